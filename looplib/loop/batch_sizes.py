"""Detection of batches that do not have the expected size, where the pipeline does not state it."""

import collections.abc

import numpy as np
import tensorflow as tf

from looplib.errors import UsageError
from looplib.loop.packing import Packer, batch_size
from looplib.task import own_names
from looplib.task.reductions import total

# Totals of a step: larger batches less smaller ones, examples more than expected, batches.
METRICS = own_names.BATCH_SIZES


class BatchSizes:
    """Compares the sizes of training batches with what is expected.

    The size is that of the first value per example that the step returns, or of its input if it returns none. A smaller
    batch is right as the last one of the data or of an epoch, so that smaller ones are wrong only if they are more than
    half of all. The two are subtracted from each other, because each op here is a part of every step; equal numbers of
    both are not noticed.

    Args:
      who: the class name of the user's trainer, for messages.
      expected: examples of a batch.
    """

    def __init__(self, who: str, expected: int) -> None:
        self._who, self._expected = who, expected
        self._seen = np.zeros(len(METRICS))

    def add_to(self, step_fn: collections.abc.Callable[[object], object]) -> collections.abc.Callable[[object], object]:
        """Wraps a training step on one replica, so that its metrics have what `check` takes."""

        def measured(inputs: object) -> object:
            outputs = step_fn(inputs)
            size = _size(inputs, outputs) if isinstance(outputs, dict) else None
            if size is None:
                return outputs
            more = size - self._expected
            parts = tf.sign(more), more, tf.constant(1, tf.float64)
            return {**outputs, **{name: total(part) for name, part in zip(METRICS, parts)}}

        return measured

    def check(self, metrics: dict[str, object]) -> dict[str, object]:
        """Takes the sizes out of the metrics of all steps since the last check; returns the others.

        Raises:
          UsageError: for batches of another size.
        """
        if METRICS[0] not in metrics:
            return metrics
        self._seen += [metrics[name] for name in METRICS]
        self._refuse(self._seen)
        return {name: value for name, value in metrics.items() if name not in METRICS}

    def look(self, packer: Packer, totals: list[list[float]]) -> None:
        """Raises as `check` does, for the steps since the last check, before they are saved.

        Args:
          packer: of the step's outputs.
          totals: what each replica has added up since then.
        """
        if METRICS[0] in packer.names:
            places = [packer.start_of(name) for name in METRICS]
            self._refuse(self._seen + np.sum(totals, axis=0)[places])

    def _refuse(self, seen: np.ndarray) -> None:
        large, more, count = seen
        if large > 0 or -large > count / 2 + 1:
            raise UsageError(
                f"{self._who}.dataset made {'larger' if large > 0 else 'smaller'} batches than "
                f"context.per_replica_batch_size, which is {self._expected}: the first {int(count)} have "
                f"{self._expected + more / count:g} examples on average, so that means and gradients are scaled "
                "wrongly; batch by that size, with drop_remainder=True to have it checked before the first step, or "
                "set batch_size_varies of the trainer if the batch size varies intentionally"
            )


@tf.autograph.experimental.do_not_convert
def _size(inputs: object, outputs: dict[str, object]) -> tf.Tensor | None:
    """Returns the examples of a batch, float64 scalar; None if unknown."""
    for _, value in sorted(outputs.items(), key=lambda item: str(item[0])):
        if isinstance(value, tf.Tensor) and value.shape.rank == 1:
            # The ops of packing a mean, which TensorFlow then runs once.
            return tf.cast(tf.size(tf.cast(value, tf.float64)), tf.float64)
    batch = batch_size(inputs)
    return None if batch is None else tf.cast(batch[1], tf.float64)
