"""Rows of arrays and tensors of each kind that `fit` takes: chosen by number, and by content for a trial."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.data.arrays import Array

_ELEMENTS = 2**21  # of each array that are looked at, to choose examples


def take(batch: Any, ids: Iterable[int]) -> Any:
    """Returns some rows of a batch of tensors or arrays of any kind, by their numbers; None stays."""
    chosen = tf.constant([*ids], tf.int64)
    return tf.nest.map_structure(lambda part: part if part is None else getter(part)(chosen), batch)


def sizes(batch: Any) -> list[int]:
    """Returns the number of rows of each part of a batch that has rows."""
    return [int(part.shape[0]) for part in tf.nest.flatten(batch) if part is not None and len(part.shape)]


def varied(batch: Any, count: int) -> list[int]:
    """Returns the numbers of some rows that differ as the data does, and of others at random; in ascending order.

    For each part these are the rows with the least and the most elements other than 0 or "", the least and greatest
    element, and the least and greatest sum, such as weights, paddings and labels that only few rows have.

    Args:
      batch: structure of arrays, of as many rows each.
      count: how many rows; fewer where the batch has fewer.
    """
    parts = [part for part in tf.nest.flatten(batch) if part is not None]
    size, chance = int(parts[0].shape[0]), np.random.default_rng(0)
    looked = np.arange(0, size, max(1, size * max(map(_width, parts)) // _ELEMENTS))
    orders = [np.argsort(feature, kind="stable") for part in parts for feature in _features(_some(part, looked))]
    extreme = [int(looked[order[place]]) for place in (0, -1, 1, -2) for order in orders if len(order) > 1]
    others = chance.permutation(size)[: 2 * count].tolist()
    return sorted(list(dict.fromkeys([*extreme, *others]))[:count])


def by_content(batch: Any, count: int) -> list[int]:
    """Returns the numbers of the first rows of a batch, in the order of the number of elements other than 0 or "".

    Of equal rows, those whose last part, such as weights, has the least sum come first.
    """
    found = [_features(part) for part in tf.nest.flatten(take(batch, range(count))) if part is not None]
    sums = next((features[-1] for features in reversed(found) if len(features) > 1), np.zeros([count]))
    return np.lexsort([sums, sum(features[0] for features in found)]).tolist()


def spec(array: Any) -> tf.TypeSpec:
    """Returns the spec of an array or a tensor of any kind, with any number of rows."""
    shape = [None, *array.shape[1:]]
    if isinstance(array, tf.SparseTensor):
        return tf.SparseTensorSpec(shape, array.dtype)
    if isinstance(array, tf.RaggedTensor):
        return tf.RaggedTensorSpec(shape, array.dtype, array.ragged_rank, array.row_splits.dtype)
    return tf.TensorSpec(shape, array.dtype)


def getter(array: Array) -> Callable[[tf.Tensor], Any]:
    """Returns a function from row numbers, int64 `[b]`, to these rows of an array, as a tensor of its kind."""
    if isinstance(array, tf.SparseTensor):
        return _sparse_getter(array)
    table = tf.constant(array) if isinstance(array, np.ndarray) else array
    return lambda ids: tf.gather(table, ids)


def _sparse_getter(array: tf.SparseTensor) -> Callable[[tf.Tensor], tf.SparseTensor]:
    inner = array.dense_shape[1:]
    values = tf.RaggedTensor.from_value_rowids(array.values, array.indices[:, 0], array.dense_shape[0])
    places = values.with_values(array.indices[:, 1:])

    def get(ids: tf.Tensor) -> tf.SparseTensor:
        found, at = tf.gather(values, ids), tf.gather(places, ids)
        indices = tf.concat([tf.cast(found.value_rowids(), tf.int64)[:, None], at.values], axis=1)
        shape = tf.concat([tf.shape(ids, tf.int64), inner], axis=0)
        return tf.SparseTensor(indices, found.values, shape)

    return get


def _some(part: Array, numbers: np.ndarray) -> Array:
    return part[numbers] if isinstance(part, np.ndarray) else getter(part)(tf.constant(numbers))


def _width(part: Array) -> int:
    return max(1, int(np.prod([size or 1 for size in part.shape[1:]])))


def _features(part: Any) -> list[np.ndarray]:
    """Returns numbers that describe each row: elements other than 0 or "", then least, greatest and sum of numbers."""
    if isinstance(part, tf.RaggedTensor):
        return [part.row_lengths().numpy()]
    if isinstance(part, tf.SparseTensor):
        return [np.bincount(part.indices[:, 0], minlength=int(part.shape[0]))]
    table = np.asarray(part)
    table = table.reshape([table.shape[0], -1])
    if table.dtype.kind not in "biuf" or not table.shape[1]:
        return [np.count_nonzero(table.astype(bool), axis=1)]
    numbers = table.astype(float)
    return [np.count_nonzero(table, axis=1), numbers.min(axis=1), numbers.max(axis=1), numbers.sum(axis=1)]
