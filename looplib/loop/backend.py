"""Where the steps of a task run: an abstract class, and the backend for the replicas of this process and its peers."""

import abc
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from looplib.base.messages import gist
from looplib.cluster import remote
from looplib.data import distribution
from looplib.data.batches import Batches
from looplib.data.stream import Stream
from looplib.errors import EngineError
from looplib.loop.auto import AutoLoop
from looplib.loop.base import InnerLoop, Specification
from looplib.loop.device_loop import DeviceLoop, single_steps
from looplib.loop.host_loop import EagerStep, HostLoop, ShowingLoop
from looplib.loop.reducer import Reducer
from looplib.loop.step import Step, StepFn
from looplib.loop.xla import XlaChunk, size_of_chunk, why_not_xla
from looplib.task.evaluator import Evaluator

Decorator = Callable[[StepFn], StepFn]
_PINNED_CHUNK = 20  # steps of a program with `loop="xla"`


class Backend(abc.ABC):
    """Makes the parts of a `TaskLoop` that depend on where its steps run."""

    remote_stream: Callable[..., Stream] | None = None  # of workers that read by themselves

    def __init__(self, spec: Specification) -> None:
        self._spec = spec

    def check(self, stream: Stream) -> None:
        """Raises `UsageError` for data that this backend cannot take; the constructor does so for settings."""

    def check_earlier(self, before: Batches, now: Batches) -> None:
        """Raises `UsageError` if the data cannot continue behind batches of the sizes of a checkpoint."""

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
    """Runs steps on the replicas of this process, in lockstep with other workers."""

    def reducer(self) -> Reducer:
        """See `Backend`."""
        spec = self._spec
        return Reducer(spec.strategy, spec.step_name, not spec.training, spec.watched_loss, spec.skips)

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
        if spec.config.loop == "eager":
            if spec.skips:
                raise EngineError("the eager loop cannot undo steps; use another policy than skip with --loop=eager")
            return HostLoop(EagerStep(spec.strategy, step_fn, reducer, stream, spec.counter), collect)
        before = spec.clock.of("compile")
        step = Step(spec.strategy, step_fn, reducer, stream, spec.counter, spec.skips)
        tracing = spec.clock.of("compile") - before
        if reducer.hands_over:
            return HostLoop(step, collect)
        # An evaluation is one call, however many steps a training call does. A shown step is not one of the loop.
        steps_per_loop = spec.config.steps_per_loop if spec.training else min(stream.properties.sure, 1000)
        steps_per_loop = max(1, steps_per_loop - bool(reducer.collects))
        if spec.config.loop == "xla":
            loop = _xla_loop(step, steps_per_loop)
        elif spec.config.loop == "auto" and spec.may_compile:
            loop = AutoLoop(step, steps_per_loop, spec.clock, tracing, spec.chosen)
        else:
            loop = single_steps(step)
        return ShowingLoop(loop, first=not spec.training) if reducer.collects else loop


def backend_of(spec: Specification) -> Backend:
    """Returns the backend of a loop: from a plug-in for the strategy if there is one, else `LocalReplicas`."""
    plugin = remote.plugin_of(spec.strategy)
    return LocalReplicas(spec) if plugin is None else plugin.backend(spec)


def _xla_loop(step: Step, steps_per_loop: int) -> DeviceLoop:
    """Returns a loop of chunks, which divide `steps_per_loop`; raises `UsageError` if XLA cannot take the step."""
    if reason := why_not_xla(step):
        raise EngineError(f"loop is xla, and XLA cannot run the step: {reason}; use loop=graph, or auto")
    chunk = XlaChunk(step, size_of_chunk(_PINNED_CHUNK, step, steps_per_loop))
    try:
        chunk.prepare()
    except Exception as error:  # XLA's have many types
        raise EngineError(
            f"loop is xla, and XLA cannot compile the step: {gist(error)}; use loop=graph, or auto, which takes "
            "XLA only where it can"
        ) from error
    return DeviceLoop(step, chunk)
