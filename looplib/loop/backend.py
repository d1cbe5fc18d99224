"""Where the steps of a task run: an abstract class, and the backend for the replicas of this process and its peers."""

import abc
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from looplib.data import distribution
from looplib.data.stream import Stream
from looplib.loop import engines
from looplib.loop.base import InnerLoop, Specification
from looplib.loop.eager import EagerLoop
from looplib.loop.reducer import Reducer
from looplib.loop.showing import ShowingLoop
from looplib.loop.step import Step, StepFn
from looplib.loop.stepwise import StepwiseLoop
from looplib.task.evaluator import Evaluator

Decorator = Callable[[StepFn], StepFn]


class Backend(abc.ABC):
    """Makes the parts of a `TaskLoop` that depend on where its steps run.

    Args:
      spec: of the loop.

    Attributes:
      remote_stream: makes the stream of workers that read by themselves; None where this process reads.
    """

    remote_stream: Callable[..., Stream] | None = None

    def __init__(self, spec: Specification) -> None:
        self._spec = spec

    def check(self, stream: Stream) -> None:
        """Raises `UsageError` for data or settings that this backend cannot keep its promises with."""

    @abc.abstractmethod
    def reducer(self) -> Reducer:
        """Returns the reducer of what the steps return."""

    @abc.abstractmethod
    def tables(self, arrays: Any) -> Any:
        """Puts a structure of arrays where the steps can gather rows from them; returns tensors or variables."""

    def decorators(self) -> list[Decorator]:
        """Returns what this backend adds to the user's step, innermost first."""
        return []

    @abc.abstractmethod
    def inner_loop(self, step_fn: StepFn, reducer: Reducer, stream: Stream) -> InnerLoop:
        """Traces the step, and returns the loop that runs it."""


class LocalReplicas(Backend):
    """Steps on the replicas of this process, in lockstep with those of other workers."""

    def reducer(self) -> Reducer:
        """See `Backend`."""
        spec = self._spec
        return Reducer(
            spec.strategy, spec.step_name, count_examples=not spec.training, guarded=spec.guarded, skips=spec.skips
        )

    def tables(self, arrays: Any) -> Any:
        """See `Backend`."""
        strategy = self._spec.strategy
        if distribution.runs_on_host(strategy):
            return tf.nest.map_structure(tf.constant, arrays)
        with strategy.scope():
            return tf.nest.map_structure(lambda array: tf.Variable(array, trainable=False), arrays)

    def inner_loop(self, step_fn: StepFn, reducer: Reducer, stream: Stream) -> InnerLoop:
        """See `Backend`."""
        spec = self._spec
        collect = spec.task.collect if isinstance(spec.task, Evaluator) else None
        if spec.engine == "eager":
            return EagerLoop(spec.strategy, step_fn, reducer, stream, collect, spec.counter, spec.skips)
        before = spec.clock.of("compile")
        step = Step(spec.strategy, step_fn, reducer, stream, spec.counter, spec.skips)
        apart = bool(reducer.collects)  # a step that is shown is not one of the loop
        if reducer.hands_over:
            return StepwiseLoop(step, collect)
        loop = engines.make(
            spec.engine,
            step,
            # An evaluation is one call, however many steps a training call does.
            steps_per_loop=max(1, (spec.steps_per_loop if spec.training else min(stream.sure, 1000)) - apart),
            clock=spec.clock,
            tracing=spec.clock.of("compile") - before,
            chosen=spec.chosen,
        )
        return ShowingLoop(loop, first=not spec.training) if apart else loop
