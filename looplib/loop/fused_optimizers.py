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

from looplib import _keras

# Adam's kernel on CPUs divides a variable of more than some 300 elements among threads, which takes longer than Keras's
# dozen ops, that run without another thread's help. Gradient descent without momentum is one op in Keras too.
_FEW, _MANY = 256, 8192
Kernel = Callable[[tf.Tensor], Any]
_MODULES = ("keras.src.optimizers.", "tf_keras.src.optimizers.")


def update_step(optimizer: Any) -> Callable[[Callable], Callable] | None:
    """Finds the fused update of a Keras optimizer: of Adam, AdamW and SGD of both families.

    There is none for their subclasses, AMSGrad, sparse gradients and other types than float32. Clipping, decay,
    averages, schedules and the names of all variables are unchanged.

    Args:
      optimizer: the optimizer.

    Returns:
      A function that makes the method `update_step` from the one that the optimizer has, or None.
    """
    find = {"Adam": _adam, "AdamW": _adam, "SGD": _sgd}.get(type(optimizer).__name__)
    if not find or not type(optimizer).__module__.startswith(_MODULES) or getattr(optimizer, "amsgrad", False):
        return None
    if getattr(optimizer, "update_step", None) is None:  # tf_keras.optimizers.legacy has fused kernels itself
        return None
    return functools.partial(_updating, optimizer, find)


def _updating(optimizer: Any, find: Callable, plain: Callable) -> Callable:
    def update(gradient: Any, variable: Any, *learning_rate: Any) -> Any:
        kernel = None
        if isinstance(gradient, tf.Tensor) and gradient.dtype == variable.dtype == tf.float32:
            if _gains(optimizer, variable.shape.num_elements() or 0):
                kernel = _kernel(find, optimizer, variable, learning_rate)
        if kernel is None:
            return plain(gradient, variable, *learning_rate)
        return kernel(gradient)

    return update


def _gains(optimizer: Any, elements: int) -> bool:
    """Returns whether the kernel is faster than Keras's ops for a variable of so many elements."""
    if type(optimizer).__name__ == "SGD":
        return elements >= _MANY or bool(optimizer.momentum)
    return not _FEW < elements < _MANY


def _kernel(find: Callable, optimizer: Any, variable: Any, learning_rate: tuple) -> Kernel | None:
    """Finds the function of the gradient that updates the variable; None if Keras keeps its slots in another way."""
    rate = learning_rate[0] if learning_rate else optimizer.learning_rate
    try:
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
    if not optimizer.momentum and _keras.family(optimizer) == "keras":  # tf_keras has the slot in any case
        return lambda gradient: tf.raw_ops.ResourceApplyGradientDescent(var=handle, alpha=rate, delta=gradient)
    arguments = dict(var=handle, lr=rate, momentum=optimizer.momentum, use_nesterov=optimizer.nesterov)
    accum = _slot(optimizer, optimizer.momentums, variable)
    return lambda gradient: tf.raw_ops.ResourceApplyKerasMomentum(accum=accum, grad=gradient, **arguments)


def _slot(optimizer: Any, slots: list, variable: Any) -> tf.Tensor:
    if _keras.family(optimizer) == "keras":
        return _handle(slots[optimizer._get_variable_index(variable)])
    return _handle(slots[optimizer._index_dict[optimizer._var_key(variable)]])


def _handle(variable: Any) -> tf.Tensor:
    variable = _keras.tf_variable(variable)
    variable.read_value()  # unused, but the trace then counts the variable as one of the step's; a handle is not enough
    return variable.handle
