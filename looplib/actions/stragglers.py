"""Stragglers: an action that finds out which of several workers that train in step is slow.

All of them take the same time for a step, because each waits for the slowest. What tells them apart is the time that
each one needs for itself.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.data.pipelines import runs_on_host
from looplib.loop.contracts import StepAddition
from looplib.loop.step import StepFn, now
from looplib.run.report import Straggler
from looplib.task.actions import Action, Event
from looplib.task.trainer import Trainer

_SHARE = 0.2  # of the time of a step for which a worker holds the others up; less is noise


@dataclasses.dataclass(frozen=True)
class WorkerTimes:
    """The time of one worker for some steps, in seconds.

    Attributes:
      total: from the first to the last, with all waiting.
      own: computing, without the sums over workers, for which it waits for the others.
      data: waiting for its data.
    """

    total: float
    own: float
    data: float

    @property
    def needed(self) -> float:
        """The time that the steps would take if it were alone."""
        return self.own + self.data


def find_stragglers(times: Sequence[WorkerTimes], steps: int, step: int) -> list[Straggler]:
    """Returns the workers that hold the others up by a fifth of the time of a step or more.

    Args:
      times: of each worker, for the same steps.
      steps: how many these are.
      step: the last one.
    """
    total = max(one.total for one in times)
    usual = sorted(times, key=lambda one: one.needed)[(len(times) - 1) // 2]  # of two workers, the faster one
    found = []
    for worker, one in enumerate(times):
        more = one.needed - usual.needed
        if total > 0 and more >= _SHARE * total:
            cause = "data" if one.data - usual.data >= more / 2 else "step"
            seconds, others = round(one.needed / steps, 7), round(usual.needed / steps, 7)
            found.append(Straggler(worker, step, round(min(1.0, more / total), 4), seconds, others, cause))
    return found


_WAITING = ("CollectiveReduce", "CollectiveGather")  # beginnings of the types of ops that wait for other workers
_MOST = 16  # such ops in a step; each costs two reads of the clock


class _Begun(NamedTuple):
    """A step whose tracing has begun: when its batch is there, and how many ops the graph has before it."""

    time: tf.Tensor
    ops: int


class OwnTimes:
    """Adds up the own time of the steps of this worker, on the device.

    Args:
      strategy: the `tf.distribute.Strategy` that runs the steps, on CPUs.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        with strategy.scope():
            # Seconds of own time, and between the end of a step's last sum and the batch of the next step; and when
            # that sum ended.
            variable = tf.Variable(
                tf.zeros([3], tf.float64),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
        self._sums = strategy.experimental_local_results(variable)[0]

    def measure(self, step_fn: StepFn) -> StepFn:
        """Returns a step on one replica that measures itself while it does what `step_fn` does."""

        def measured(inputs: Any) -> Any:
            begun = self._begin(inputs)
            outputs = step_fn(inputs)
            self._add(begun)
            return outputs

        return measured

    def read(self) -> tuple[float, float]:
        """Returns the seconds of own time so far, and of gaps in which the step had no batch."""
        own, gaps, _ = self._sums.numpy().tolist()
        return own, gaps

    @tf.autograph.experimental.do_not_convert
    def _begin(self, inputs: Any) -> _Begun | None:
        if tf.executing_eagerly():  # as in the eager loop
            return None
        ops = len(tf.compat.v1.get_default_graph().get_operations())
        with tf.control_dependencies(tf.nest.flatten(inputs, expand_composites=True)):
            return _Begun(now(), ops)

    @tf.autograph.experimental.do_not_convert
    def _add(self, begun: _Begun | None) -> None:
        graph = tf.compat.v1.get_default_graph()
        ops = graph.get_operations()[begun.ops :] if begun else []
        waiting = [op for op in ops if op.type.startswith(_WAITING)]
        if not 0 < len(waiting) <= _MOST:
            return
        # Ops and not methods of the variable, with which it would be one of those that the step of the user has.
        before = tf.raw_ops.ReadVariableOp(resource=self._sums.handle, dtype=tf.float64)
        last = tf.unstack(before)[2]
        at = start = tf.maximum(begun.time, last)
        parts = []
        for op in waiting:  # automatic control dependencies keep the reads of the clock in this order
            with tf.control_dependencies([op.inputs[0]]):
                parts.append(now() - at)
            with tf.control_dependencies([op]):
                at = now()
        more = tf.stack([tf.add_n(parts), start - last, at - last])
        tf.raw_ops.AssignAddVariableOp(resource=self._sums.handle, value=more)


_FIRST, _LONGEST = 2.0, 60.0  # seconds of steps until the first comparison, and between two of them at most
_MUCH = 1.5  # the factor by which a share has to change to be noted again
_MOST_NOTES = 100  # of a start


class _Spent(NamedTuple):
    """The time of this worker so far, in seconds; `data` by the clock of the run, `gaps` without a batch."""

    step: int
    total: float
    own: float
    data: float
    gaps: float


class Stragglers(Action, StepAddition):
    """Names the workers that are slower than the others, in the log and in `run.json`, by their own times.

    The workers compare their times at reports: after two seconds of steps, and then after twice as many each time, up
    to a minute. A worker is named when it was slow twice in succession. That costs a sum over workers each time.

    On GPUs an op has ended for TensorFlow when its kernels are queued, so that no op can see their time: there only the
    waiting for data is compared.

    Args:
      strategy: the `tf.distribute.Strategy` that runs the steps.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        self._own_times: OwnTimes | None = None
        self._seconds = _FIRST  # of steps until the next comparison
        self._mark: _Spent | None = None  # at the last comparison
        self._next = 0  # the step from which on a report compares
        self._found: list[dict[int, Straggler]] = [{}, {}]  # by the last two comparisons
        self._named: dict[int, Straggler] = {}
        self._notes = 0

    def add_to_step(self, step_fn: StepFn, task: Trainer) -> StepFn:
        """See `StepAddition`."""
        if not runs_on_host(self._strategy):
            return step_fn
        self._own_times = self._own_times or OwnTimes(self._strategy)  # a run may build several loops
        return self._own_times.measure(step_fn)

    def on_start(self, controller: Any) -> None:
        """Compares nothing from before this training."""
        self._mark, self._next = None, 0

    def __call__(self, event: Event) -> None:
        """Compares the times, if it is time to; alike on all workers."""
        begins = self._mark is None or event.step <= self._mark.step  # or has been rolled back
        if event.split != "train" or not (begins or event.step >= self._next):
            return
        sums = self._spent(event.step, event.controller)
        if begins:
            self._mark, self._next = sums, event.step + 1
        else:
            self._compare(sums, event.controller)

    def _spent(self, step: int, controller: Any) -> _Spent:
        own, gaps = self._own_times.read() if self._own_times else (0.0, 0.0)
        data = controller.clock.of("input")
        return _Spent(step, controller.clock.of("train") + data, own, data, gaps)

    def _compare(self, now: _Spent, controller: Any) -> None:
        before, steps = self._mark, now.step - self._mark.step
        gathered = controller.gather(np.array(dataclasses.astuple(_times(before, now))))
        times = [WorkerTimes(*row) for row in gathered.tolist()]
        total = max(1e-6, *(one.total for one in times))
        if total >= 0.9 * self._seconds:  # by the rate of the steps before, which may have changed
            self._mark, self._seconds = now, min(2 * self._seconds, _LONGEST)
            self._found = [self._found[1], {one.worker: one for one in find_stragglers(times, steps, now.step)}]
            if controller.is_chief:
                self._name(now.step, controller)
        self._next = self._mark.step + math.ceil(steps * self._seconds / total)

    def _name(self, step: int, controller: Any) -> None:
        """Notes which workers are slow now and were not before, and the other way round."""
        earlier, now = self._found
        slow = {worker: one for worker, one in now.items() if worker in earlier and self._is_news(one)}
        over = [one for worker, one in self._named.items() if worker not in earlier and worker not in now]
        notes = [*slow.values(), *(dataclasses.replace(one, step=step, share=0.0) for one in over)]
        for one in notes[: _MOST_NOTES - self._notes]:
            self._notes += 1
            controller.report.note(one)
            if one.share and one.worker not in self._named:
                logging.warning("%s", one)
        self._named = {worker: one for worker, one in {**self._named, **slow}.items() if one not in over}
        if notes:
            controller.report.write("running")

    def _is_news(self, one: Straggler) -> bool:
        before = self._named.get(one.worker)
        if before is None or before.cause != one.cause:
            return True
        return not before.share / _MUCH < one.share < before.share * _MUCH


def _times(before: _Spent, now: _Spent) -> WorkerTimes:
    """Returns what the steps between two moments took this worker.

    Data that is read while the worker waits for the others holds nobody up, and between two calls of the loop there is
    a gap that is no waiting for data: the time lost to data is the smaller of both measures.
    """
    total, own, data, gaps = (max(0.0, after - earlier) for after, earlier in zip(now[1:], before[1:]))
    return WorkerTimes(total, own, min(data, gaps) if own else data)
