"""Loops in which the host calls each step, and can take values from it in between."""

import abc
import time
from collections.abc import Callable

import tensorflow as tf

from looplib.cluster.collectives import Workers
from looplib.data.stream import Stream
from looplib.health.preemption import notice
from looplib.loop.base import InnerLoop, Iterator, Metrics, Ran, Request
from looplib.loop.reducer import Reducer
from looplib.loop.step import Step

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

    @abc.abstractmethod
    def _do(self, batch: object) -> object:
        """Does and counts one step; returns what the replicas collect, None for nothing."""

    def run(self, iterator: Iterator, request: Request) -> Ran:
        """See `InnerLoop`."""
        done, waited = 0, 0.0
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
        """Gives the task what the replicas that had examples collected, those of all workers in order."""
        parts = [self._strategy.experimental_local_results(leaf) for leaf in tf.nest.flatten(collected)]
        replicas = self._workers.gather_tensors(list(zip(*parts)))
        replicas = [tf.nest.pack_sequence_as(collected, leaves) for leaves in replicas]
        self._collect([values for had_examples, values in replicas if had_examples])

    def _stopped(self) -> bool:
        return self._workers.any_of(bool(notice.requested))

    def _finite(self) -> bool:
        return not self._reducer.created or bool(self._reducer.finite())


class StepwiseLoop(HostLoop):
    """One call into the device for each step of an evaluation that collects values on the host.

    Args:
      step: the step.
      collect: `Evaluator.collect`.
    """

    def __init__(self, step: Step, collect: Collect) -> None:
        super().__init__(step.strategy, step.reducer, step.stream, collect)
        self.step = step
        self._call = tf.function(step.__call__, autograph=False, reduce_retracing=True)

    def _do(self, batch: object) -> object:
        return self._call(batch)
