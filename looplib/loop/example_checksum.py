"""A checksum of the examples of a training step, by which `check` sees that two runs trained on the same examples."""

import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from looplib.task.reductions import total

VARIABLE = "LOOPLIB_EXAMPLE_CHECKSUMS"  # of the environment; "1" adds the metric to every training
METRIC = "examples_checksum"
_BITS = 24  # so that float64 sums them exactly over 2**29 examples, more than any window of a report has


def enabled() -> bool:
    """Returns whether the environment asks for checksums."""
    return os.environ.get(VARIABLE) == "1"


def add_to(step_fn: Callable[[Any], Any], step: Callable[[], tf.Tensor]) -> Callable[[Any], Any]:
    """Wraps a training step, so that its metrics have the checksum of its examples.

    Args:
      step_fn: one step on one replica.
      step: function without arguments that returns the number of steps before this one, int64 scalar.

    Returns:
      A function of the same inputs.
    """

    def checked(inputs: Any) -> Any:
        checksum = examples_checksum(inputs, step())
        outputs = step_fn(inputs)
        if checksum is None or not isinstance(outputs, dict):
            return outputs
        return {**outputs, METRIC: total(checksum)}

    return checked


def examples_checksum(inputs: Any, step: tf.Tensor) -> tf.Tensor | None:
    """Sums a hash of every example's content and the step; the sum does not depend on the division over replicas.

    Args:
      inputs: one batch of one replica. Tensors without a batch dimension, or with another one than the first tensor,
        are left out. So are zeros and "" in tensors whose static shape leaves a dimension open, because in a padded
        batch the length of a row depends on the rows beside it. Padding by another value looks like content.
      step: int64 scalar.

    Returns:
      int64 scalar tensor, or None where nothing in `inputs` can be hashed.
    """
    columns = _columns(inputs)
    if not columns:
        return None
    steps = tf.fill([tf.shape(columns[0])[0]], tf.cast(step, tf.int64))
    return tf.reduce_sum(tf.bitwise.bitwise_and(_hash(tf.stack([*columns, steps], axis=1)), 2**_BITS - 1))


def hash_of_each(inputs: Any) -> tf.Tensor | None:
    """Returns a hash of the content of each example of a batch, int64 `[batch]`; see `examples_checksum`."""
    columns = _columns(inputs)
    return _hash(tf.stack(columns, axis=1)) if columns else None


def _columns(inputs: Any) -> list[tf.Tensor]:
    """Returns the hashes of the rows of each tensor that has a row for each example."""
    leaves = [leaf for leaf in tf.nest.flatten(inputs) if _has_rows(leaf)]
    if not leaves:
        return []
    first, *others = map(_fingerprints, leaves)
    rows = tf.shape(first)[0]
    return [first, *(tf.cond(tf.shape(x)[0] == rows, lambda x=x: x, lambda: tf.zeros_like(first)) for x in others)]


def _has_rows(leaf: Any) -> bool:
    if not isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)):
        return False
    return bool(leaf.shape.rank) and leaf.dtype not in (tf.variant, tf.resource)


def _fingerprints(leaf: Any) -> tf.Tensor:
    """Returns a hash of the content of each row, independent of the number and length of other rows: int64 `[rows]`."""
    if isinstance(leaf, tf.RaggedTensor):
        row = leaf.value_rowids()
        position = tf.range(tf.size(row, row.dtype), dtype=row.dtype) - tf.gather(leaf.row_starts(), row)
        hashes = _hash(tf.stack([_fingerprints(leaf.values), tf.cast(position, tf.int64)], axis=1))
        return tf.math.unsorted_segment_sum(hashes, row, leaf.nrows())
    if isinstance(leaf, tf.SparseTensor):
        places = tf.concat([_fingerprints(leaf.values)[:, None], leaf.indices[:, 1:]], axis=1)
        return tf.math.unsorted_segment_sum(_hash(places), leaf.indices[:, 0], leaf.dense_shape[0])
    if None in leaf.shape[1:]:  # padded to the longest of the batch, by zeros or "", which are left out
        return _fingerprints(tf.sparse.from_dense(leaf))
    if leaf.dtype == tf.string:  # tf.fingerprint of rows of no strings is whatever was in memory (TensorFlow 2.20)
        leaf = tf.strings.to_hash_bucket_fast(leaf, 2**62)
    return _hash(leaf)


def _hash(rows: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(tf.fingerprint(rows), tf.int64)
