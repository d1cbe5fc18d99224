"""Converts what users return to Python's own numbers and lists, which records, markers and writers hold."""

import hashlib
import numbers
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.compat import keras as _keras
from looplib.errors import MetricError


def as_array(value: Any) -> np.ndarray:
    """Returns a value as a numpy array; if it has no shape, such as a ragged list, an array of its type's name."""
    value = _keras.tf_variable(value)
    try:
        # Numpy cannot convert a scalar tensor of a type that is not its own, such as bfloat16.
        value = value.numpy() if isinstance(value, (tf.Tensor, tf.Variable)) else value
        return np.asarray(value, object if isinstance(value, bytes) else None)  # numpy cuts off zeros at a text's end
    except (TypeError, ValueError, AttributeError, NotImplementedError):
        return np.asarray(type(value).__name__)


def as_bytes(array: np.ndarray) -> bytes:
    """Returns bytes by which arrays of one type and shape are compared; also for strings."""
    return repr(array.tolist()).encode() if array.dtype.kind == "O" else array.tobytes()


def checksum_of(arrays: Iterable[np.ndarray]) -> str:
    """Returns the SHA-256 of the types, shapes and elements of arrays, as hexadecimal digits."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(as_bytes(array))
    return digest.hexdigest()


def gaps(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns the absolute difference of each element of two arrays of numbers of one shape, float64.

    NaN in both, and the same infinity in both, are equal; against anything else the difference is infinite.
    """
    x, y = (array if array.dtype.kind == "c" else array.astype(np.float64) for array in (one, other))
    with np.errstate(invalid="ignore"):
        far = np.abs(x - y)
    equal = (x == y) | (np.isnan(x) & np.isnan(y))
    return np.where(equal, 0.0, np.where(np.isnan(far), np.inf, far))


def is_number(array: np.ndarray) -> bool:
    """Returns whether an array holds real numbers or booleans; TensorFlow's types, such as bfloat16, are among them."""
    if array.dtype.kind != "V":
        return array.dtype.kind in "biuf"
    try:
        kind = tf.as_dtype(array.dtype)
    except TypeError:
        return False
    return kind.is_floating or kind.is_integer


def as_number(what: str, value: Any) -> int | float:
    """Returns one number, of Python, numpy or TensorFlow, as an int or a float; `what` names it in the `UsageError`."""
    array = as_array(value)
    found = f"is not a number (shape {list(array.shape)}, {array.dtype})"
    if array.shape == () and is_number(array):
        number = _plain(array)
        return int(number) if isinstance(number, bool) else number
    if isinstance(value, numbers.Real):  # a fraction, or an int of more than 64 bits
        try:
            return float(value)
        except OverflowError:
            found = "is a number beyond those of float64"
    raise MetricError(
        f"{what} {found}; return a bool, an int, a float or a scalar of numpy or TensorFlow (loop_end can make numbers "
        "of an array, and leave it out)"
    )


def as_json(value: Any) -> Any:
    """Returns a scalar, an array or a tensor as what JSON can hold, for `json.dumps`; `TypeError` for others."""
    if not isinstance(_keras.tf_variable(value), (np.generic, np.ndarray, tf.Tensor, tf.Variable)):
        raise TypeError(f"{type(value).__name__} is no number, string, list or dict")
    return _plain(as_array(value))


def _plain(array: np.ndarray) -> Any:
    # `tolist` does not convert numbers of long double and bfloat16.
    wider = array.dtype.kind in "fV" and is_number(array)
    return (array.astype(np.float64) if wider else array).tolist()
