"""A look at the sizes of batches in each step of a training whose shapes do not tell them before."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.errors import BatchSizeError
from looplib.loop.base import Metrics, StepAddition
from looplib.loop.packing import Packer, batch_size
from looplib.loop.step import StepFn
from looplib.run import metric_names
from looplib.task.reductions import total
from looplib.task.trainer import Trainer

# Totals of a step: the examples that larger batches have too many, full batches, examples more than expected, batches.
METRICS = metric_names.BATCH_SIZES


class BatchSizes(StepAddition):
    """Compares the sizes of training batches with what is expected.

    The size of a batch is that of the first value per example that the step returns, else that of its input. No batch
    may be larger than expected. The last batch of the data or of an epoch may be smaller, so at least half of the
    batches have to be full.

    Args:
      who: the class name of the user's trainer, for messages.
      expected: examples of a batch.
      replicas: batches of a step.
    """

    def __init__(self, who: str, expected: int, replicas: int) -> None:
        self._who, self._expected, self._replicas = who, expected, replicas
        self._seen = np.zeros(len(METRICS))

    def add_to_step(self, step_fn: StepFn, task: Trainer) -> StepFn:
        """See `StepAddition`; adds the sizes of the batches, for `take`."""

        def measured(inputs: Any) -> Any:
            outputs = step_fn(inputs)
            size = _size(inputs, outputs) if isinstance(outputs, dict) else None
            if size is None:
                return outputs
            more = size - self._expected
            parts = tf.maximum(more, 0), tf.cast(more == 0, tf.float64), more, tf.constant(1, tf.float64)
            return {**outputs, **{name: total(part) for name, part in zip(METRICS, parts)}}

        return measured

    def take(self, metrics: Metrics) -> Metrics:
        """See `StepAddition`; raises `UsageError` for wrong batch sizes."""
        if METRICS[0] in metrics:
            self._seen += [metrics.pop(name) for name in METRICS]
            self._refuse(self._seen)
        return {}

    def check(self, packer: Packer, read: Callable[[], list[list[float]]]) -> None:
        """See `StepAddition`; raises as `take` does."""
        if METRICS[0] in packer.names:
            places = [packer.start_of(name) for name in METRICS]
            self._refuse(self._seen + np.sum(read(), axis=0)[places])

    def _refuse(self, seen: np.ndarray) -> None:
        larger, full, more, count = seen
        if larger > 0 or 2 * full < count - self._replicas:
            raise BatchSizeError(
                f"{self._who}.dataset made {'larger' if larger > 0 else 'smaller'} batches than "
                f"context.per_replica_batch_size, which is {self._expected}: the first {int(count)} have "
                f"{self._expected + more / count:g} examples on average, so that means and gradients are scaled "
                "wrongly; batch by that size, with drop_remainder=True to have it checked before the first step, or "
                "set batch_size_varies of the trainer if the batch size varies intentionally"
            )


@tf.autograph.experimental.do_not_convert
def _size(inputs: Any, outputs: dict[str, Any]) -> tf.Tensor | None:
    """Returns the examples of a batch, float64 scalar; None if unknown."""
    for _, value in sorted(outputs.items(), key=lambda item: str(item[0])):
        if isinstance(value, tf.Tensor) and value.shape.rank == 1:
            # The ops of packing a mean, which TensorFlow then runs once.
            return tf.cast(tf.size(tf.cast(value, tf.float64)), tf.float64)
    batch = batch_size(inputs)
    return None if batch is None else tf.cast(batch[1], tf.float64)
