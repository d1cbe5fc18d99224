"""Batches of another size than a step is told, noticed where the pipeline does not say the size of its batches."""

import collections.abc

import numpy as np
import tensorflow as tf

from looplib.errors import UsageError
from looplib.packing import rows
from looplib.reductions import total

METRIC = "batch_sizes"  # a step's contribution: larger batches, smaller ones, examples too many or too few, batches


def is_measured(leaf: object) -> bool:
    """Whether a tensor of a batch has a first dimension."""
    return isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)) and bool(leaf.shape.rank)


class BatchSizes:
    """Compares the sizes of training batches with what is expected.

    A batch is larger if all of its tensors have more rows, and smaller if all have fewer: some may have another number,
    such as the boxes of all images. A smaller batch is right as the last one of the data or of an epoch, so that smaller
    ones are wrong only if they are more than half of all.

    Args:
      who: the class name of the user's trainer, for messages.
      expected: examples of a batch.
    """

    def __init__(self, who: str, expected: int) -> None:
        self._who, self._expected = who, expected
        self._seen = np.zeros(4)

    def add_to(self, step_fn: collections.abc.Callable[[object], object]) -> collections.abc.Callable[[object], object]:
        """Wraps a training step on one replica, so that its metrics have what `check` takes."""

        def measured(inputs: object) -> object:
            leaves = [leaf for leaf in tf.nest.flatten(inputs) if is_measured(leaf)]
            outputs = step_fn(inputs)
            if not leaves or not isinstance(outputs, dict):
                return outputs
            return {**outputs, METRIC: total(self._contribution(leaves))}

        return measured

    @tf.autograph.experimental.do_not_convert
    def _contribution(self, leaves: list[tf.Tensor | tf.RaggedTensor | tf.SparseTensor]) -> tf.Tensor:
        """float64 `[4]`. Few ops: they are a part of every step."""
        more = tf.cast(tf.stack([rows(leaf) for leaf in leaves]) - self._expected, tf.float64)
        if len(leaves) == 1:
            least = most = more[0]
        else:
            least, most = tf.reduce_min(more), tf.reduce_max(more)
        parts = tf.stack([least, -most, least, least])
        return tf.clip_by_value(parts, np.array([0, 0, -np.inf, 1]), np.array([1, 1, np.inf, 1]))

    def check(self, metrics: dict[str, object]) -> dict[str, object]:
        """Takes the sizes out of the metrics of all steps since the last check; returns the others.

        Raises:
          UsageError: for batches of another size.
        """
        if METRIC not in metrics:
            return metrics
        self._seen += metrics[METRIC]
        self._refuse(self._seen)
        return {name: value for name, value in metrics.items() if name != METRIC}

    def look(self, totals: np.ndarray) -> None:
        """Raises as `check` does, for the steps since the last check, before they are saved.

        Args:
          totals: float64 `[4]`, what they have contributed.
        """
        self._refuse(self._seen + totals)

    def _refuse(self, seen: np.ndarray) -> None:
        large, small, more, count = seen
        if large or small > count / 2 + 1:
            raise UsageError(
                f"{self._who}.dataset made {int(large or small)} of {int(count)} batches {'larger' if large else 'smaller'} "
                f"than context.per_replica_batch_size, which is {self._expected} (they have "
                f"{self._expected + more / count:g} examples on average), so that means and gradients are scaled wrongly; "
                "batch by that size, with drop_remainder=True to have it checked before the first step, or set "
                "batch_size_varies of the trainer if the sizes are meant to vary"
            )
