"""Puts the numbers of a tensor into a variable, of any number of replicas, with no other copy of a large one."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.errors import WarmStartError

_PIECE = 1 << 22  # bytes that TensorFlow takes at once


def assign(variable: tf.Variable, value: np.ndarray) -> None:
    """Gives a variable a value of its shape; floating-point numbers become those of its type.

    A large one is given in pieces, because TensorFlow copies what it is given.

    Raises:
      WarmStartError: if a number is too large for the type.
    """
    if not variable.dtype.is_floating:
        variable.assign(value)
        return
    dtype, value, parts = variable.dtype.as_numpy_dtype, np.asarray(value), _parts(variable)
    if value.nbytes <= _PIECE or not parts:
        variable.assign(_cast(variable, value, dtype))
        return
    for place in pieces(value.shape, max(value.itemsize, np.dtype(dtype).itemsize), _PIECE):
        piece = np.ascontiguousarray(_cast(variable, value[place], dtype))
        for part in parts:
            with tf.device(part.device):
                part[place].assign(piece)


def _cast(variable: tf.Variable, value: np.ndarray, dtype: Any) -> np.ndarray:
    with np.errstate(over="ignore"):
        found = np.asarray(value, dtype)
    if found.dtype != value.dtype and not np.array_equal(np.isinf(found), np.isinf(value)):
        raise WarmStartError(
            f"{variable.name} is {variable.dtype.name}, and the file has larger numbers for it, up to "
            f"{np.abs(value[np.isfinite(value)]).max():.3g}; build the model with float32 weights"
        )
    return found


def _parts(variable: tf.Variable) -> tuple[tf.Variable, ...]:
    """Returns the copies of a variable, one for each replica; none where they may differ, or lie in another process."""
    if isinstance(variable, tf.distribute.DistributedValues):
        alike = type(variable).__name__ == "MirroredVariable"
        return tuple(variable.values) if alike else ()
    return (variable,) if type(variable).__name__ == "ResourceVariable" else ()


def pieces(shape: tuple[int, ...], itemsize: int, most: int) -> Iterator[tuple[slice | int, ...]]:
    """Yields the indices of parts of a tensor with at least one axis, none of which has more than `most` bytes."""
    rows = [math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]
    axis = next(axis for axis, size in enumerate(rows) if size <= most)
    step = max(1, most // max(1, rows[axis]))
    for before in np.ndindex(*shape[:axis]):
        for start in range(0, shape[axis], step):
            yield (*map(int, before), slice(start, min(start + step, shape[axis])))
