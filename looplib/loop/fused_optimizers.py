"""Keras optimizers' updates by TensorFlow's fused kernels: one op for a variable in place of a dozen.

Keras writes an update as arithmetic on whole tensors, each of them read and written in each op. The kernels do the same
arithmetic in one pass, which makes the step of a small dense network on two cores a fifth faster, and a ResNet's 5%
(`python -m benchmarks --workloads=W1,W5`). Small variables gain as well, because each op costs about a microsecond
(`python -m benchmarks.growth --point=variables=100`).
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from looplib.compat import keras as _keras

# On CPUs, Adam's kernel divides a variable among threads too early: its estimate of the cost grows with the square
# of the elements. This takes three times as long as Keras's dozen ops. It does so from some 400 elements on, or from
# some 60 if their number is not a multiple of what a vector instruction takes.
_FEW, _FEW_VECTORS, _VECTOR, _MANY = 48, 256, 16, 8192
Kernel = Callable[[tf.Tensor], Any]
_MODULES = ("keras.src.optimizers.", "tf_keras.src.optimizers.")


def update_step(optimizer: Any) -> Callable[[Callable], Callable] | None:
    """Finds the fused update of a Keras optimizer: of Adam, AdamW and SGD of both families.

    There is none for their subclasses, AMSGrad, an adaptive epsilon, sparse gradients and other types than float32.
    Clipping, decay, averages, schedules and the names of all variables are unchanged.

    Args:
      optimizer: the optimizer.

    Returns:
      A function that makes the method `update_step` from the one that the optimizer has, or None.
    """
    find = {"Adam": _adam, "AdamW": _adam, "SGD": _sgd}.get(type(optimizer).__name__)
    if not find or not type(optimizer).__module__.startswith(_MODULES):
        return None
    if getattr(optimizer, "amsgrad", False) or getattr(optimizer, "adaptive_epsilon", False):
        return None
    if getattr(optimizer, "update_step", None) is None:  # tf_keras.optimizers.legacy has fused kernels itself
        return None
    return functools.partial(_updating, optimizer, find)


def _updating(optimizer: Any, find: Callable, plain: Callable) -> Callable:
    def update(gradient: Any, variable: Any, *learning_rate: Any) -> Any:
        kernel = None
        if isinstance(gradient, tf.Tensor) and gradient.dtype == variable.dtype == tf.float32:
            if gradient.shape.is_compatible_with(variable.shape):  # Keras's ops broadcast, the kernels do not
                kernel = _kernel(find, optimizer, variable, learning_rate)
        if kernel is None:
            return plain(gradient, variable, *learning_rate)
        return kernel(gradient)

    return update


def _gains(optimizer: Any, elements: int) -> bool:
    """Returns whether the kernel is faster on CPUs than Keras's ops, for a variable of so many elements."""
    if type(optimizer).__name__ == "SGD":
        # Without momentum, Keras 3 needs two ops. tf_keras has the slot of momentum in any case.
        return elements >= _MANY or _keras.family(optimizer) != "keras" or bool(optimizer.momentum)
    few = elements <= _FEW or (elements <= _FEW_VECTORS and elements % _VECTOR == 0)
    return few or elements >= _MANY


def _kernel(find: Callable, optimizer: Any, variable: Any, learning_rate: tuple) -> Kernel | None:
    """Finds the function of the gradient that updates the variable; None if Keras's ops are to do it."""
    elements = tf.TensorShape(variable.shape).num_elements()
    rate = learning_rate[0] if learning_rate else optimizer.learning_rate
    try:
        if not elements or not _gains(optimizer, elements):
            return None
        return find(optimizer, _handle(variable), variable, tf.cast(rate, tf.float32))
    except (AttributeError, KeyError, IndexError, TypeError):  # the slots are in attributes that are not public
        return None


def _adam(optimizer: Any, handle: tf.Tensor, variable: Any, rate: tf.Tensor) -> Kernel:
    step = tf.cast(_keras.tf_variable(optimizer.iterations) + 1, tf.float32)
    arguments = dict(
        var=handle,
        m=_slot(optimizer, optimizer._momentums, variable),
        v=_slot(optimizer, optimizer._velocities, variable),
        beta1_power=tf.pow(tf.cast(optimizer.beta_1, tf.float32), step),
        beta2_power=tf.pow(tf.cast(optimizer.beta_2, tf.float32), step),
        lr=rate,
        beta1=optimizer.beta_1,
        beta2=optimizer.beta_2,
        epsilon=optimizer.epsilon,
    )
    return lambda gradient: tf.raw_ops.ResourceApplyAdam(grad=gradient, **arguments)


def _sgd(optimizer: Any, handle: tf.Tensor, variable: Any, rate: tf.Tensor) -> Kernel:
    if _keras.family(optimizer) == "keras" and not optimizer.momentum:
        return lambda gradient: tf.raw_ops.ResourceApplyGradientDescent(var=handle, alpha=rate, delta=gradient)
    momentum = tf.cast(optimizer.momentum, tf.float32)
    arguments = dict(var=handle, lr=rate, momentum=momentum, use_nesterov=optimizer.nesterov)
    accum = _slot(optimizer, optimizer.momentums, variable)
    return lambda gradient: tf.raw_ops.ResourceApplyKerasMomentum(accum=accum, grad=gradient, **arguments)


def _slot(optimizer: Any, slots: list, variable: Any) -> tf.Tensor:
    if _keras.family(optimizer) == "keras":
        return _handle(slots[optimizer._get_variable_index(variable)])
    return _handle(slots[optimizer._index_dict[optimizer._var_key(variable)]])


def _handle(variable: Any) -> tf.Tensor:
    variable = _keras.tf_variable(variable)
    variable.value()  # unused, but the trace then counts the variable as one of the step's; a handle is not enough
    return variable.handle
