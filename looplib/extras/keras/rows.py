"""Arrays of examples of each kind that `fit` takes: of numpy, pandas and scipy; dense, ragged and sparse tensors."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tensorflow as tf

from looplib.errors import DatasetError

KINDS = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)  # specs of tensors
Array = np.ndarray | tf.RaggedTensor | tf.SparseTensor


@runtime_checkable
class _AsArray(Protocol):
    def __array__(self) -> np.ndarray:
        """Returns the array."""


def as_array(array: Any, float_type: str) -> Array:
    """Returns what was given as an array, of one floating-point type.

    Raises:
      UsageError: for something else.
    """
    if array is None:
        raise DatasetError(
            "KerasTrainer got None beside arrays, for one of several outputs, say; leave it out of a dict of targets, "
            "or give a tf.data.Dataset, which may have None"
        )
    if any(kind.__module__.startswith("scipy.sparse") for kind in type(array).__mro__):
        array = array.tocsr().tocoo()  # which adds up what is given twice
        array = tf.SparseTensor(np.stack([array.row, array.col], axis=1).astype("int64"), array.data, array.shape)
    if isinstance(array, (tf.RaggedTensor, tf.SparseTensor)):
        array = tf.sparse.reorder(array) if isinstance(array, tf.SparseTensor) else array
        return tf.cast(array, float_type) if array.dtype.is_floating else array
    found = np.asarray(array)
    if found.dtype.kind == "O":
        try:
            found = tf.convert_to_tensor(found).numpy()
        except (ValueError, TypeError, tf.errors.OpError) as error:
            raise DatasetError(
                f"KerasTrainer got a {type(array).__name__} of Python objects, which are not all strings; give columns "
                "of different types as a dict of arrays, or convert them to one type, such as float32"
            ) from error
    return found.astype(float_type) if found.dtype.kind == "f" else found


def is_array(value: Any) -> bool:
    """Returns whether a value is an array, a table or a tensor of any kind."""
    if any(kind.__module__.startswith("scipy.sparse") for kind in type(value).__mro__):
        return True
    return isinstance(value, (_AsArray, tf.RaggedTensor, tf.SparseTensor))


def take(batch: Any, ids: Iterable[int]) -> Any:
    """Returns some rows of a batch of tensors or arrays of any kind, by their numbers; None stays."""
    chosen = tf.constant([*ids], tf.int64)
    return tf.nest.map_structure(lambda part: part if part is None else getter(part)(chosen), batch)


def by_content(batch: Any, count: int) -> list[int]:
    """Returns the numbers of the first rows of a batch, those with the fewest elements other than 0 or "" first.

    Of equal rows, those whose last part, such as weights, has the least sum come first.
    """
    sizes, last = np.zeros([count], np.int64), np.zeros([count])
    for part in tf.nest.flatten(take(batch, range(count))):
        if isinstance(part, tf.RaggedTensor):
            sizes += part.row_lengths().numpy()
        elif isinstance(part, tf.SparseTensor):
            sizes += np.bincount(part.indices[:, 0], minlength=count)
        elif part is not None:
            table = part.numpy().reshape([count, -1])
            is_number = table.dtype.kind in "biuf"
            sizes += np.count_nonzero(table if is_number else table.astype(bool), axis=1)
            last = table.sum(axis=1, dtype=float) if is_number else last
    return np.lexsort([last, sizes]).tolist()


def count(batch: Any) -> tf.Tensor:
    """Returns the number of rows of a batch, of tensors of any kind and None."""
    first = next(part for part in tf.nest.flatten(batch) if part is not None and part.shape.rank != 0)
    return first.nrows() if isinstance(first, tf.RaggedTensor) else tf.shape(first)[0]


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


class OmittedParts:
    """Where the structure of a batch has None, which the data sets here do without until a step.

    Args:
      batch: of the structure.
    """

    def __init__(self, batch: Any) -> None:
        self._blank = tf.nest.map_structure(lambda part: part is None, batch)

    def __bool__(self) -> bool:
        """Returns whether there is one."""
        return any(tf.nest.flatten(self._blank))

    def remove(self, batch: Any) -> tuple:
        """Returns what a batch has besides."""
        return tuple(part for part in tf.nest.flatten(batch) if part is not None)

    def restore(self, parts: Any) -> Any:
        """Returns the batch, of what `remove` returned of it, or of their specs."""
        parts = iter(tf.nest.flatten(parts))
        filled = [None if blank else next(parts) for blank in tf.nest.flatten(self._blank)]
        return tf.nest.pack_sequence_as(self._blank, filled)
