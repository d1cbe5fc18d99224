"""Guards against NaN and infinite values.

In a step, on the device, these watch the losses (`Trainer.loss_name`, and metrics with "loss" in their names) and
every gradient that goes through a Keras optimizer. Between steps, before anything is committed, they check every
floating-point variable of the state.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.compat.row_updates import without_copy

_BEFORE_A_TRACE = 40  # checks of the state, which together take as long: 40 and 1,600 microseconds for a variable
GRADIENT_OF = "the gradient of "  # before the name of a variable, in the names of watched values
# Gradients of one shape that are cheaper to measure together, and their elements: larger ones would wait for the last.
_MANY, _SMALL = 4, 512
_LARGE = 8192  # elements; from here on a product of matrices is faster than one op


@tf.autograph.experimental.do_not_convert
def measure_gradients(gradients: list[tuple[str, Any]]) -> tuple[list[str], list[tf.Tensor]]:
    """Measures the gradients that a step has computed, by `updates.watching`; in replica context.

    Returns:
      `(names, measures)`: the names of the gradients that are visible outside of the step, those inside of a condition
      or a function are not; and float64 vectors, which have a number for each name. A gradient's number is finite only
      if all its elements are. It is half the squared norm, which overflows from 2e19 on, or the sum: of large matrices,
      and of many small gradients of one shape, in a step that does not run eagerly.
    """
    groups: dict[Any, list[tuple[str, tf.Tensor]]] = {}
    for name, gradient in gradients:
        if gradient is None:
            continue
        # A step that accumulates gradients itself may apply variables.
        gradient = gradient.values if isinstance(gradient, tf.IndexedSlices) else tf.convert_to_tensor(gradient)
        if not gradient.dtype.is_floating:
            continue
        if not tf.executing_eagerly() and gradient.graph is not tf.compat.v1.get_default_graph():
            continue
        elements = gradient.shape.num_elements()
        alike = elements is not None and elements <= _SMALL and not tf.executing_eagerly()
        key = (gradient.dtype, tuple(gradient.shape)) if alike else len(groups)
        groups.setdefault(key, []).append((GRADIENT_OF + name, gradient))
    many = [group for group in groups.values() if len(group) >= _MANY]
    others = [each for group in groups.values() if len(group) < _MANY for each in group]
    measures = [_sums([gradient for _, gradient in group]) for group in many]
    if others:
        values = [_measure(gradient) for _, gradient in others]
        if len({value.dtype for value in values}) > 1:
            values = [tf.cast(value, tf.float64) for value in values]
        measures.append(tf.cast(tf.stack(values), tf.float64))  # one op, not one for each
    return [name for group in [*many, others] for name, _ in group], measures


def _measure(gradient: tf.Tensor) -> tf.Tensor:
    elements, shape = gradient.shape.num_elements(), gradient.shape
    large = (elements is None or elements >= _LARGE) and (shape.rank or 0) > 1 and shape[-1]
    return (_sum if large and not tf.executing_eagerly() else _half_of_square)(gradient)


def _sums(alike: list[tf.Tensor]) -> tf.Tensor:
    """Returns the sums of small tensors of one shape, float64 `[n]`, by three ops for all of them."""
    stacked = _at_least_float32(tf.stack(alike))
    return tf.cast(tf.reduce_sum(stacked, axis=list(range(1, stacked.shape.rank))), tf.float64)


def _half_of_square(tensor: tf.Tensor) -> tf.Tensor:
    """Returns half the squared norm, float64 for float64 and else float32."""
    return tf.nn.l2_loss(_at_least_float32(tensor))


def _sum(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the sum of a tensor of matrices, float64 for float64 and else float32.

    TensorFlow and XLA add the elements one after another, but multiply matrices by vector instructions.
    """
    size = tensor.shape[-1]
    rows = tf.reshape(_at_least_float32(tensor), [-1, size])
    return tf.reduce_sum(tf.linalg.matvec(rows, tf.ones([size], rows.dtype)))


def _at_least_float32(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor


_BLOCK = 1 << 26  # elements that are measured together


class StateCheck:
    """Finds variables whose values are not finite.

    Args:
      variables: list of (name, `tf.Variable`). Those that are not floating-point are left out, and so are those that
        are not finite when the check is made, which are intended.
    """

    def __init__(self, variables: Sequence[tuple[str, tf.Variable]]) -> None:
        floating = ((name, variable) for name, variable in variables if variable.dtype.is_floating)
        self._variables = [(name, variable) for name, variable in floating if _is_finite(variable)]
        self._measure = tf.function(self._squares, autograph=False)
        self._checks = 0

    def _squares(self) -> tf.Tensor:
        """Returns a float32 scalar that is finite only if all variables are, by two ops for most of them."""
        halves = [half for _, variable in self._variables for half in _where_it_is(_half_of_square, variable)]
        return tf.reduce_sum(tf.stack([tf.constant(0.0), *(tf.cast(half, tf.float32) for half in halves)]))

    def find(self) -> list[str]:
        """Returns the names of the variables that are not finite now."""
        self._checks += 1
        measure = self._measure if self._checks > _BEFORE_A_TRACE else self._squares
        return [] if np.isfinite(measure()) else [name for name, one in self._variables if not _is_finite(one)]


def _is_finite(variable: tf.Variable) -> bool:
    return bool(tf.reduce_all(_where_it_is(lambda value: tf.reduce_all(tf.math.is_finite(value)), variable)))


def _where_it_is(measure: Callable[[tf.Tensor], tf.Tensor], variable: tf.Variable) -> list[tf.Tensor]:
    """Measures a variable on its device, so that one number, not the variable, comes from a parameter server.

    In blocks of rows, because a measure takes the memory of what it measures.
    """
    blocks = -(-variable.shape.num_elements() // _BLOCK) if variable.shape.is_fully_defined() else 1
    with tf.device(variable.device):
        value = without_copy(variable)
        if blocks <= 1 or not variable.shape.rank:
            return [measure(value)]
        rows = -(-variable.shape[0] // blocks)
        return [measure(value[start : start + rows]) for start in range(0, variable.shape[0], rows)]
