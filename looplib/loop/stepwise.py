"""Loops in which the host calls each step, and can take values from it in between."""

import abc
import time
from collections.abc import Callable

import tensorflow as tf

from looplib.cluster.collectives import Workers
from looplib.data.stream import Stream
from looplib.health.preemption import notice
from looplib.loop import media
from looplib.loop.base import InnerLoop, Iterator, Metrics, Ran, Request
from looplib.loop.reducer import Reducer
from looplib.loop.step import Step
from looplib.report.shown import Shown

Collect = Callable[[list], None] | None  # `Evaluator.collect`; None for a trainer, whose steps collect nothing


class HostLoop(InnerLoop):
    """A Python loop over the steps, which checks after each of them whether to continue.

    Args:
      strategy: `tf.distribute.Strategy`.
      reducer: reduces what the step returns.
      stream: reads the iterators.
      collect: takes what a step returns as `looplib.each`.
    """

    def __init__(self, strategy: tf.distribute.Strategy, reducer: Reducer, stream: Stream, collect: Collect) -> None:
        self._strategy = strategy
        self._reducer = reducer
        self._stream = stream
        self._collect = collect
        self._workers = Workers(strategy)
        self._kept: tuple[tf.Tensor, dict[str, list[tf.Tensor]]] | None = None  # media of the first replica

    @abc.abstractmethod
    def _do(self, batch: object) -> object:
        """Does and counts one step; returns what the replicas collect, None for nothing."""

    def run(self, iterator: Iterator, request: Request) -> Ran:
        """See `InnerLoop`."""
        done, waited, self._kept = 0, 0.0, None
        while done != request.steps and not self._stopped() and self._finite():
            started = time.perf_counter()
            batch = self._stream.next_as_optional(iterator)
            if not self._stream.has_value(batch):
                break
            waited += time.perf_counter() - started
            collected = self._do(self._stream.get_value(batch))
            if self._reducer.collects:
                self._hand_over(collected)
            done += 1
        return Ran(done, self._finite(), self._stopped(), waited=waited)

    def read(self) -> Metrics:
        """See `InnerLoop`."""
        return self._reducer.packer.unpack(*self._reducer.read())

    def _hand_over(self, collected: object) -> None:
        """Keeps the media of the first replica; gives the task the rest of what replicas with examples collected."""
        shows = self._reducer.packer.media
        had_examples, values = collected
        if shows and (self._kept is None or self._collect is None):  # the first step of an evaluation
            self._kept = tf.nest.map_structure(
                lambda leaf: self._strategy.experimental_local_results(leaf)[0],
                (had_examples, {name: values[name] for name in shows}),
            )
        if self._reducer.hands_over:
            self._collect_each((had_examples, {name: values[name] for name in values if name not in shows}))

    def _collect_each(self, collected: object) -> None:
        """Gives the task what the replicas collected, those of all workers in order."""
        parts = [self._strategy.experimental_local_results(leaf) for leaf in tf.nest.flatten(collected)]
        replicas = self._workers.gather_tensors(list(zip(*parts)))
        replicas = [tf.nest.pack_sequence_as(collected, leaves) for leaves in replicas]
        self._collect([values for had_examples, values in replicas if had_examples])

    def shown(self) -> dict[str, Shown]:
        """See `InnerLoop`."""
        kept, self._kept = self._kept, None
        if kept is None or not kept[0]:
            return {}
        return media.as_shown(media.with_tensors(self._reducer.packer.media, kept[1]))

    def _stopped(self) -> bool:
        return self._workers.any_of(bool(notice.requested))

    def _finite(self) -> bool:
        return not self._reducer.created or bool(self._reducer.finite())


class StepwiseLoop(HostLoop):
    """One call into the device for each step: of an evaluation that collects values on the host, or one that is shown.

    Args:
      step: the step.
      collect: `Evaluator.collect`, or None.
    """

    def __init__(self, step: Step, collect: Collect) -> None:
        super().__init__(step.strategy, step.reducer, step.stream, collect)
        self.step = step
        self._call = tf.function(step.__call__, autograph=False, reduce_retracing=True)
        self._all_finite = tf.function(step.reducer.finite, autograph=False)

    def trace(self, iterator: Iterator) -> None:
        """See `InnerLoop`."""
        self._call.get_concrete_function(self._stream.element_spec)

    def _finite(self) -> bool:
        return bool(self._all_finite())

    def _do(self, batch: object) -> object:
        return self._call(batch)
