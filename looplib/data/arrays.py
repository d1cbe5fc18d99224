"""Arrays of examples of each kind that `fit` and loaders give: of numpy, pandas, scipy and PyTorch, and tensors."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tensorflow as tf

from looplib.base.messages import gist
from looplib.errors import DatasetError

Array = np.ndarray | tf.RaggedTensor | tf.SparseTensor
LOOKED_AT = 2  # batches, for the sizes that they have in common
_SCALARS = (bool, int, float, str, bytes, np.generic)


@runtime_checkable
class _AsArray(Protocol):
    def __array__(self) -> np.ndarray:
        """Returns the array."""


def without_lists(structure: Any) -> Any:
    """Returns a structure with tuples in place of lists, which tf.data takes for arrays."""
    return _of_each(structure, without_lists)


def _of_each(structure: Any, function: Callable[[Any], Any]) -> Any:
    """Returns what a function makes of each part of a dict, list or tuple, with a tuple for a list; else the value."""
    if isinstance(structure, Mapping):
        return {name: function(part) for name, part in structure.items()}
    if isinstance(structure, (list, tuple)):
        is_named = isinstance(structure, tuple) and type(structure) is not tuple
        return type(structure)(*map(function, structure)) if is_named else tuple(map(function, structure))
    return structure


def as_arrays(structure: Any, float_type: str, who: str) -> Any:
    """Returns a structure of arrays of examples in the form that `fit` gives them to a step.

    Lists become tuples, because tf.data takes lists for arrays. A column of pandas becomes `[n, 1]`, and a list of
    numbers or texts becomes an array.

    Raises:
      UsageError: for what is no array, in the name of `who` got it.
    """
    if is_array(structure) or _is_of_scalars(structure):
        array = as_array(structure, float_type, who)
        return array[:, None] if is_of(structure, "pandas", "Series") else array
    if isinstance(structure, (Mapping, list, tuple)):
        return _of_each(structure, lambda part: as_arrays(part, float_type, who))
    return as_array(structure, float_type, who)


def as_array(array: Any, float_type: str | None, who: str) -> Array:
    """Returns what was given as an array, of one floating-point type; None keeps the type.

    Raises:
      UsageError: for something else, in the name of `who` got it.
    """
    if array is None:
        raise DatasetError(
            f"{who} got None beside arrays, for one of several outputs, say; leave it out of a dict of targets, "
            "or give a tf.data.Dataset, which may have None"
        )
    if is_of(array, "scipy.sparse"):
        array = array.tocsr().tocoo()  # which adds up what is given twice
        array = tf.SparseTensor(np.stack([array.row, array.col], axis=1).astype("int64"), array.data, array.shape)
    if isinstance(array, (tf.RaggedTensor, tf.SparseTensor)):
        array = tf.sparse.reorder(array) if isinstance(array, tf.SparseTensor) else array
        return tf.cast(array, float_type) if float_type and array.dtype.is_floating else array
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise DatasetError(
            f"{who} got a masked array, whose masked values a step would get as they are; fill them "
            "(array.filled(0)), and give examples that do not count the sample_weight 0"
        )
    found = _plain(array, who)
    if float_type and (found.dtype.kind == "f" or tf.as_dtype(found.dtype).is_floating):
        return found.astype(float_type)
    return found


def _plain(array: Any, who: str) -> np.ndarray:
    """Returns an array of numbers or texts; raises `UsageError` for one of something else."""
    kind = type(array).__name__
    try:
        found = np.asarray(array)
        if found.dtype.kind == "O":
            found = tf.convert_to_tensor(found).numpy()
    except (ValueError, TypeError, tf.errors.OpError) as error:
        raise DatasetError(
            f"{who} got a {kind} of Python objects, which are not all strings; give columns of different types "
            "as a dict of arrays, or convert them to one type, such as float32"
        ) from error
    if found.dtype.kind in "mM" or found.dtype.names:
        what = "with named fields" if found.dtype.names else f"of {found.dtype.name}"
        cure = "a dict of arrays, one for each field" if found.dtype.names else "numbers, such as seconds or days"
        raise DatasetError(f"{who} got a {kind} {what}, which TensorFlow does not have; give {cure}")
    return found


def is_of(array: Any, package: str, name: str | None = None) -> bool:
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
    return is_of(value, "scipy.sparse") or isinstance(value, (_AsArray, tf.RaggedTensor, tf.SparseTensor))


def copied(batch: Any) -> Any:
    """Returns a batch with copies of the arrays of numpy, which a loader may overwrite by its next batch."""
    return tf.nest.map_structure(lambda part: part.copy() if isinstance(part, np.ndarray) else part, batch)


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


class BatchFormat:
    """The structure, the types and the sizes of batches.

    Args:
      who: what they come from.
      first: some of them.
      float_type: the type that floating-point numbers become; None keeps theirs.

    Raises:
      UsageError: if there is none, or they have no rows.
    """

    def __init__(self, who: str, first: Iterable[Any], float_type: str | None) -> None:
        self.who, self._float_type = who, float_type
        batches = [self._structured(batch) for batch in first]
        if not batches:
            raise DatasetError(f"{who} has no batch; check where the data is read from")
        self._like, self._blanks = batches[0], OmittedParts(batches[0])
        arrays = [self._arrays(batch) for batch in batches]
        if not all(array.shape for array in arrays[0]):
            raise DatasetError(f"{who} has single examples or numbers; expected batches, whose arrays have a row each")
        sizes = [zip(*(part.shape for part in parts)) for parts in zip(*arrays)]
        shapes = [[dims[0] if len(set(dims)) == 1 else None for dims in each] for each in sizes]
        self.specs = [tf.TensorSpec([None, *shape[1:]], type_of(array)) for shape, array in zip(shapes, arrays[0])]
        self.types = [spec.dtype for spec in self.specs]
        self.structure = tf.nest.map_structure(
            lambda spec: tf.type_spec_from_value(None) if spec is None else spec, self._blanks.restore(self.specs)
        )
        self.first_size = arrays[0][0].shape[0]  # the rows of the first batch
        for batch in batches:
            self.flat(batch)  # whose types have to be equal

    def flat(self, batch: Any) -> list[np.ndarray]:
        """Returns the arrays of a batch.

        Raises:
          UsageError: if it is not like the first ones.
        """
        arrays = self._arrays(self._structured(batch))
        specs = [tf.TensorSpec(array.shape, type_of(array)) for array in arrays]
        if len(specs) != len(self.specs) or not all(map(tf.TensorSpec.is_compatible_with, self.specs, specs)):
            found = [f"{array.dtype} {list(array.shape)}" for array in arrays]
            known = [f"{spec.dtype.name} {spec.shape.as_list()}" for spec in self.specs]
            raise DatasetError(
                f"{self.who} has a batch of {', '.join(found)}, and its first ones have {', '.join(known)}; give all "
                "batches the same types, and rows of the same shape"
            )
        return arrays

    def packed(self, tensors: Iterable[tf.Tensor]) -> Any:
        """Returns the batch of the tensors of its arrays."""
        return self._blanks.restore([tf.ensure_shape(one, spec.shape) for one, spec in zip(tensors, self.specs)])

    def _structured(self, batch: Any, inside: bool = False) -> Any:
        """Returns a batch with tuples in place of lists, or arrays, where those are columns of numbers or texts."""
        if inside and isinstance(batch, (list, tuple)) and _is_of_scalars(batch):
            return as_array(batch, None, self.who)
        return _of_each(batch, functools.partial(self._structured, inside=True))

    def _arrays(self, batch: Any) -> list[np.ndarray]:
        try:
            tf.nest.assert_same_structure(self._like, batch)
        except (ValueError, TypeError) as error:
            raise DatasetError(
                f"{self.who} has batches of different structures ({gist(error)}); expected (inputs, targets) or the "
                "like of each"
            ) from error
        arrays = [as_array(part, self._float_type, self.who) for part in self._blanks.remove(batch)]
        if not all(isinstance(array, np.ndarray) for array in arrays):
            raise DatasetError(
                f"{self.who} has sparse or ragged arrays, which only a tf.data.Dataset has in batches; give one "
                "(tf.data.Dataset.from_generator makes one of a generator)"
            )
        # TensorFlow would otherwise read them where they are, and a source may overwrite them meanwhile. One that is
        # converted is a copy already; the loaders of PyTorch make new tensors.
        given = self._blanks.remove(batch)
        kept = [is_of(one, "torch") or not np.may_share_memory(array, one) for array, one in zip(arrays, given)]
        return [array if keep else array.copy() for array, keep in zip(arrays, kept)]


def type_of(array: np.ndarray) -> tf.DType:
    """Returns the type that an array has as a tensor."""
    return tf.string if array.dtype.kind in "SUO" else tf.as_dtype(array.dtype)
