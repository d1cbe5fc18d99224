"""CopyCheck: looks whether batches arrive at the replicas as they left the host."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.data.input_context import InputContext
from looplib.errors import ActionError, DatasetError
from looplib.extras.integrity.checksums import checksums_of_all, summed_leaves
from looplib.extras.integrity.corrupted import Corrupted
from looplib.loop.base import Metrics, StepAddition
from looplib.loop.packing import Packer
from looplib.loop.step import StepFn
from looplib.messages import whole_number
from looplib.task.actions import Action
from looplib.task.reductions import total
from looplib.task.trainer import Trainer

_METRIC = "looplib/copies"  # by replica: copies that were checked, wrong ones, the sum of the steps of these: `[3, n]`
_CURE = (
    "the data on the host and the learning rate are not at fault: test the device, its memory and what connects it, or "
    "leave it out, and run the same command again"
)


class CopyCheck(Action, StepAddition):
    """Compares every `every`th batch on its replica with what it was on the host.

    The input pipeline adds integer checksums to it, and the step computes them again on the device. Any single changed
    bit is found. If a batch has arrived otherwise, the training ends with a `CorruptionError`, which names the replica
    and the step; or, if the `Guards` allow rollbacks, goes back and repeats the same data. That is noticed at a report,
    before a save, and when a value is not finite, so that such a copy is not taken for a loss that diverged.

    Args:
      every: 1 compares each batch; 100 by default compares one in a hundred, on all replicas in turn.

    Attributes:
      passed: how many copies were compared and arrived, over all reports and replicas.

    Raises:
      UsageError: for bad input, and for data of which no batch is copied: numbers of examples whose rows are gathered
        in the step (`context.resident`, or `context.indices` alone), parameter servers, a trainer's own loop.

    Example:
        ```python
        looplib.Controller(..., actions=[looplib.CopyCheck(every=100)])
        ```
    """

    def __init__(self, every: int = 100) -> None:
        self._every = whole_number("every of CopyCheck", every)
        self.passed = {"copies": 0}
        self._controller: Any = None
        self._receives, self._replicas = False, 0  # the second is known once a step is traced
        self._good = 0  # the last step up to which no copy was wrong

    def add_to_data(self, dataset: tf.data.Dataset, context: InputContext) -> tf.data.Dataset:
        """See `StepAddition`; adds whether the batch is compared, and its checksums."""
        asked = context.asked
        if asked.arrays is not None or (asked.last is not None and dataset is asked.last.ids):
            raise DatasetError(
                "copies of batches are to be checked, and the data set has the numbers of examples, whose rows the "
                "step gathers: no batch is copied; leave out --check_copies"
            )
        if not summed_leaves(dataset.element_spec):
            raise DatasetError(
                f"copies of batches are to be checked, and a batch is {dataset.element_spec}; expected tensors of "
                "numbers, booleans or strings among it; leave out --check_copies"
            )

        @tf.autograph.experimental.do_not_convert
        def with_checksums(number: tf.Tensor, batch: Any) -> Any:
            # One in each `every` batches, at another place each time: replicas get the batches in turn.
            chosen = tf.equal(number % self._every, number // self._every % self._every)
            return batch, (chosen, _checksums_if(chosen, batch))

        return dataset.enumerate().map(with_checksums)

    def receive(self, step_fn: StepFn, task: Trainer) -> StepFn:
        """See `StepAddition`."""
        self._receives = True

        def compared(inputs: Any) -> Any:
            batch, (chosen, expected) = inputs
            counts = self._count(batch, chosen, expected, task.global_step)
            outputs = step_fn(batch)
            return {**outputs, _METRIC: total(counts)} if isinstance(outputs, dict) else outputs

        return compared

    def on_start(self, controller: Any) -> None:
        """Refuses a trainer whose batches looplib does not see."""
        if not self._receives:
            raise ActionError(
                "copies of batches are to be checked, and the trainer reads its data and runs its steps by itself; "
                "leave out --check_copies"
            )
        self._controller, self._good = controller, controller.global_step
        self.passed = {"copies": 0}  # run.json is written with its newest value
        controller.report.note("copy_checks", every=self._every, passed=self.passed)

    def take(self, metrics: Metrics) -> Metrics:
        """See `StepAddition`; raises `Corrupted` for a copy that was wrong."""
        if _METRIC in metrics:
            counts = metrics.pop(_METRIC)
            self._refuse(counts)
            self.passed["copies"] += int(counts[0].sum())
        return {}

    def check(self, packer: Packer, read: Callable[[], list[list[float]]]) -> None:
        """See `StepAddition`; raises as `take` does."""
        if _METRIC in packer.names:
            start = packer.start_of(_METRIC)
            self._refuse(np.sum(read(), axis=0)[start : start + 3 * self._replicas].reshape(3, -1))

    @tf.autograph.experimental.do_not_convert
    def _count(self, batch: Any, chosen: tf.Tensor, expected: Any, step: tf.Tensor) -> tf.Tensor:
        """Returns what a step adds to the metric, int64 `[3, replicas]`."""
        wrong = tf.reduce_any(tf.not_equal(tf.stack(_checksums_if(chosen, batch)), tf.stack(expected)))
        numbers = tf.cast(chosen, tf.int64), tf.cast(wrong, tf.int64), tf.where(wrong, tf.cast(step, tf.int64) + 1, 0)
        context = tf.distribute.get_replica_context()
        self._replicas = context.num_replicas_in_sync
        own = tf.one_hot(context.replica_id_in_sync_group, self._replicas, dtype=tf.int64)
        return tf.stack(numbers)[:, None] * own

    def _refuse(self, counts: np.ndarray) -> None:
        """Raises `Corrupted` if a copy since the last report was wrong."""
        if self._controller is None:  # no training: a trial of the speed, say
            return
        step, (_, wrong, steps) = self._controller.global_step, counts.astype(np.int64)
        if not wrong.any():
            self._good = step
            return
        good = min(self._good, step - 1)
        found = [
            f"a copy to replica {replica} arrived wrongly at step {steps[replica]}"
            if wrong[replica] == 1
            else f"{wrong[replica]} copies to replica {replica} arrived wrongly after step {good}, up to step {step}"
            for replica in np.flatnonzero(wrong)
        ]
        first = int(steps[wrong > 0].min()) if (wrong <= 1).all() else good + 1
        raise Corrupted(self._controller, "; ".join(found), _CURE, first - 1, step)


def _checksums_if(chosen: tf.Tensor, batch: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns two checksums of a batch, int64 scalars; zeros unless it is chosen."""
    sums = tf.cond(chosen, lambda: checksums_of_all(batch), lambda: tf.zeros([2], tf.int64))
    return sums[0], sums[1]
