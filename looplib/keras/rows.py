"""Arrays of examples of each kind that `fit` takes: of numpy, pandas and scipy; dense, ragged and sparse tensors."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tensorflow as tf

from looplib.data.records.reading import tuple_like
from looplib.errors import DatasetError

_ELEMENTS = 2**21  # of each array that are looked at, to choose examples
KINDS = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)  # specs of tensors
Array = np.ndarray | tf.RaggedTensor | tf.SparseTensor
_SCALARS = (bool, int, float, str, bytes, np.generic)


@runtime_checkable
class _AsArray(Protocol):
    def __array__(self) -> np.ndarray:
        """Returns the array."""


def as_arrays(structure: Any, float_type: str) -> Any:
    """Returns a structure of arrays of examples in the form that `fit` gives them to a step.

    Lists become tuples, because tf.data takes lists for arrays. A column of pandas becomes `[n, 1]`, and a list of
    numbers or texts becomes an array.

    Raises:
      UsageError: for what is no array.
    """
    if is_array(structure) or _is_of_scalars(structure):
        array = as_array(structure, float_type)
        return array[:, None] if _is_of(structure, "pandas", "Series") else array
    if isinstance(structure, Mapping):
        return {name: as_arrays(part, float_type) for name, part in structure.items()}
    if isinstance(structure, (list, tuple)):
        return tuple_like(structure, [as_arrays(part, float_type) for part in structure])
    return as_array(structure, float_type)


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
    if _is_of(array, "scipy.sparse"):
        array = array.tocsr().tocoo()  # which adds up what is given twice
        array = tf.SparseTensor(np.stack([array.row, array.col], axis=1).astype("int64"), array.data, array.shape)
    if isinstance(array, (tf.RaggedTensor, tf.SparseTensor)):
        array = tf.sparse.reorder(array) if isinstance(array, tf.SparseTensor) else array
        return tf.cast(array, float_type) if array.dtype.is_floating else array
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise DatasetError(
            "KerasTrainer got a masked array, whose masked values a step would get as they are; fill them "
            "(array.filled(0)), and give examples that do not count the sample_weight 0"
        )
    found = _plain(array)
    if found.dtype.kind == "f" or tf.as_dtype(found.dtype).is_floating:
        return found.astype(float_type)
    return found


def _plain(array: Any) -> np.ndarray:
    """Returns an array of numbers or texts; raises `UsageError` for one of something else."""
    kind = type(array).__name__
    try:
        found = np.asarray(array)
        if found.dtype.kind == "O":
            found = tf.convert_to_tensor(found).numpy()
    except (ValueError, TypeError, tf.errors.OpError) as error:
        raise DatasetError(
            f"KerasTrainer got a {kind} of Python objects, which are not all strings; give columns of different types "
            "as a dict of arrays, or convert them to one type, such as float32"
        ) from error
    if found.dtype.kind in "mM" or found.dtype.names:
        what = "with named fields" if found.dtype.names else f"of {found.dtype.name}"
        cure = "a dict of arrays, one for each field" if found.dtype.names else "numbers, such as seconds or days"
        raise DatasetError(f"KerasTrainer got a {kind} {what}, which TensorFlow does not have; give {cure}")
    return found


def _is_of(array: Any, package: str, name: str | None = None) -> bool:
    """Returns whether an array is of a class of a package that need not be installed."""
    kinds = (kind for kind in type(array).__mro__ if name in (None, kind.__name__))
    return any(f"{kind.__module__}.".startswith(f"{package}.") for kind in kinds)


def _is_of_scalars(value: Any) -> bool:
    """Returns whether a list, or a list of lists, begins with a number or text: it is no structure of arrays then."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
        if isinstance(value, _SCALARS):
            return True
    return False


def is_array(value: Any) -> bool:
    """Returns whether a value is an array, a table or a tensor of any kind."""
    return _is_of(value, "scipy.sparse") or isinstance(value, (_AsArray, tf.RaggedTensor, tf.SparseTensor))


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
