"""Puts the numbers of a tensor into a variable, of any number of replicas, with one other copy of a large one."""

import numpy as np
import tensorflow as tf

from looplib.errors import WarmStartError

_LARGE = 1 << 22  # bytes
_ALIGNMENT = 64  # bytes, without which TensorFlow copies the memory that it is given


def assign(variable: tf.Variable, value: np.ndarray) -> None:
    """Gives a variable a value of its shape; floating-point numbers become those of its type.

    It is given as a whole: once a part of a variable was assigned, TensorFlow copies all of it at each read. It would
    copy an array of numpy twice; memory that it shares becomes that of the variable.

    Raises:
      WarmStartError: if a number is too large for the type.
    """
    if not variable.dtype.is_floating:
        variable.assign(value)
        return
    found = _cast(variable, np.asarray(value))
    if found.nbytes > _LARGE:
        bits = found.view(f"u{found.itemsize}")  # numpy shares no types of others, such as bfloat16
        found = tf.bitcast(tf.experimental.dlpack.from_dlpack(bits.__dlpack__()), variable.dtype)
    variable.assign(found)


def _cast(variable: tf.Variable, value: np.ndarray) -> np.ndarray:
    """Returns a copy with the type of a variable, in memory that TensorFlow can share."""
    dtype = np.dtype(variable.dtype.as_numpy_dtype)
    memory = np.empty(value.size * dtype.itemsize + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    found = memory[start : start + value.size * dtype.itemsize].view(dtype).reshape(value.shape)
    with np.errstate(over="ignore"):
        found[...] = value
    if dtype != value.dtype and not np.array_equal(np.isinf(found), np.isinf(value)):
        raise WarmStartError(
            f"{variable.name} is {variable.dtype.name}, and the file has larger numbers for it, up to "
            f"{np.abs(value[np.isfinite(value)]).max():.3g}; build the model with float32 weights"
        )
    return found
