"""Keras optimizers, where their public interface does not suffice.

- On several replicas, an optimizer of Keras 3 clips each replica's own gradient and sums afterwards, which is not what
  it does on one device. Its class for tf.distribute has no setting for this. Inside of `summed`, that class neither
  sums again nor updates across replicas.
- A user's step calls `optimizer.apply_gradients` by itself, and Keras has no hook there. `Replacement` puts another
  function in the place of this method until a training is closed.
- Keras writes an update as arithmetic on whole tensors, a dozen ops for a variable. `fused_update` finds the one kernel
  of TensorFlow that does the same; the slots that it needs have no public names.

Each works with the versions that `versions.py` knows, and is refused, or left out, with one that lacks these names.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from looplib.compat import keras as _keras
from looplib.compat.versions import KNOWN_KERAS
from looplib.errors import OptimizerError

# The class that adapts optimizers of Keras 3 to tf.distribute, and the methods changed here.
_ADAPTER = "keras.src.backend.tensorflow.optimizer"
_SUM = "_all_reduce_sum_gradients"
_UPDATES = (
    "_backend_update_step",
    "_apply_weight_decay",
    "_backend_increment_gradient_accumulators",
    "_overwrite_model_variables_with_average_value",
)
_num_replicas: property = tf.distribute.Strategy.num_replicas_in_sync  # before anything replaces it
_summed: set[tuple[int, int | None]] = set()  # strategies and replicas whose gradients are summed, see `_place`


class Replacement:
    """A method of one object that replaces its class's method and may call it.

    Attributes:
      replaced: the original method.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Callable], Callable]) -> None:
        before = vars(owner).pop(name, None)
        if isinstance(before, Replacement):  # of a training that was not closed
            before = before._before
        self._owner, self._name, self._before = owner, name, before
        self.replaced = getattr(owner, name) if before is None else before
        self._method = make(self.replaced)
        vars(owner)[name] = self  # past __setattr__, which would look for state in it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the method that was made."""
        return self._method(*args, **kwargs)

    def undo(self) -> None:
        """Restores the original method, unless another training has replaced it since."""
        if vars(self._owner).get(self._name) is self:
            del vars(self._owner)[self._name]
            if self._before is not None:
                vars(self._owner)[self._name] = self._before


def own_method(owner: Any, name: str) -> Callable:
    """Returns the original method of an object, also where a `Replacement` stands in its place."""
    method = getattr(owner, name)
    return method.replaced if isinstance(method, Replacement) else method


@contextlib.contextmanager
def summed() -> Iterator[None]:
    """Tells optimizers in the `with` block that their gradients are summed over replicas; in replica context.

    An optimizer of Keras 3 that was given to `leave_out_sum`, and those inside of it, then only clip and update.
    """
    place = _place()
    _summed.add(place)
    try:
        yield
    finally:
        _summed.discard(place)


def is_summed() -> bool:
    """Returns whether the gradients that an optimizer gets here are summed, see `summed`."""
    return _place() in _summed


def _place() -> tuple[int, int | None] | None:
    """Returns the strategy and the replica that is traced or run; None across replicas.

    The replica is None where one trace is for all. It is not told by the thread, because an optimizer that scales the
    loss updates each replica in another one.
    """
    context = tf.distribute.get_replica_context()
    if context is None or num_replicas() == 1:  # on one replica, the number would be another op
        return context and (id(context.strategy), 0)
    number = tf.get_static_value(context.replica_id_in_sync_group)
    return id(context.strategy), None if number is None else int(number)


def num_replicas() -> int:
    """Returns the number of replicas, also where the code of a model is shown only its own."""
    return _num_replicas.fget(tf.distribute.get_strategy())


def leave_out_sum(optimizer: Any) -> None:
    """Changes the class that adapts optimizers of Keras 3 to tf.distribute, so that it heeds `summed`.

    An optimizer that updates in some steps only does so inside of a condition, where TensorFlow cannot update all
    replicas' copies of a variable together (merge_call), as Keras does. After the sum all replicas compute the same, so
    each updates its own copy, as one device does.

    Raises:
      UsageError: if this version of Keras has no such class.
    """
    adapter = next((cls for cls in type(optimizer).__mro__ if cls.__module__ == _ADAPTER), None)
    if adapter is None or any(name not in vars(adapter) for name in (_SUM, *_UPDATES)):
        raise OptimizerError(
            f"{type(optimizer).__name__} sums gradients over replicas in a way that looplib does not know (it knows "
            f"Keras {KNOWN_KERAS}), so it could clip before the sum; use one replica, another version of Keras, or "
            "tf_keras"
        )
    if vars(adapter)[_SUM].__module__ == __name__:
        return
    for name in (_SUM, *_UPDATES):
        setattr(adapter, name, _aware_of_sum(adapter, name, vars(adapter)[name]))


def updates_conditionally(optimizer: Any) -> bool:
    """Returns whether an optimizer of Keras 3 writes to variables in some steps only."""
    return bool(optimizer.gradient_accumulation_steps or (optimizer.use_ema and optimizer.ema_overwrite_frequency))


def accumulating(optimizer: Any) -> list[tuple[Any, list[Any]]]:
    """Returns the optimizers of Keras 3, in a built one or itself, that update once in several steps.

    Each with the variables that it updates.
    """
    found = [one for one in _keras.with_inner([optimizer]) if getattr(one, "gradient_accumulation_steps", None)]
    return [(one, list(variables_of(one))) for one in found]


def counts_while_traced(optimizer: Any) -> bool:
    """Returns whether an optimizer counts its updates in Python, once for each replica that TensorFlow traces."""
    return type(optimizer).__module__ == "tf_keras.src.optimizers.nadam"


def variables_of(optimizer: Any) -> Iterable[Any]:
    """Returns the variables that an optimizer of Keras 3 was built for."""
    return getattr(optimizer, "_trainable_variables", ())


def _aware_of_sum(adapter: type, name: str, original: Callable) -> Callable:
    @functools.wraps(original)
    def method(self: Any, *args: Any) -> Any:
        if num_replicas() == 1 or not is_summed():
            return original(self, *args)
        if name == _SUM:
            return list(args[0])
        return getattr(super(adapter, self), name)(*args) if updates_conditionally(self) else original(self, *args)

    method.__module__ = __name__
    return method


# Fused updates. One op for a variable makes the step of a small dense network on two cores a fifth faster, and a
# ResNet's 5% (`python -m benchmarks --workloads=W1,W5`).

# On CPUs, Adam's kernel divides a variable among threads too early: its estimate of the cost grows with the square
# of the elements. This takes three times as long as Keras's dozen ops. It does so from some 400 elements on, or from
# some 60 if their number is not a multiple of what a vector instruction takes.
_FEW, _FEW_VECTORS, _VECTOR, _MANY = 48, 256, 16, 8192
_MODULES = ("keras.src.optimizers.", "tf_keras.src.optimizers.")


def fused_update(optimizer: Any) -> Callable[[Callable], Callable] | None:
    """Finds the fused update of a Keras optimizer: of Adam, AdamW and SGD of both families.

    There is none for their subclasses, AMSGrad, an adaptive epsilon, sparse gradients and other types than float32.
    Clipping, decay, averages, schedules and the names of all variables are unchanged.

    Returns:
      A function that makes the method `update_step` from the one that the optimizer has, or None.
    """
    make = {"Adam": _adam, "AdamW": _adam, "SGD": _sgd}.get(type(optimizer).__name__)
    if not make or not type(optimizer).__module__.startswith(_MODULES):
        return None
    if getattr(optimizer, "amsgrad", False) or getattr(optimizer, "adaptive_epsilon", False):
        return None
    if getattr(optimizer, "update_step", None) is None:  # tf_keras.optimizers.legacy has fused kernels itself
        return None

    def updating(plain: Callable) -> Callable:
        def update(gradient: Any, variable: Any, *rate: Any) -> Any:
            if isinstance(gradient, tf.Tensor) and gradient.dtype == variable.dtype == tf.float32:
                if gradient.shape.is_compatible_with(variable.shape):  # Keras's ops broadcast, the kernels do not
                    if kernel := _kernel(make, optimizer, variable, *(rate or [optimizer.learning_rate])):
                        return kernel(grad=gradient)
            return plain(gradient, variable, *rate)

        return update

    return updating


def _kernel(make: Callable, optimizer: Any, variable: Any, rate: Any) -> Callable | None:
    """Returns the op that updates a variable, without its gradient; None if Keras's ops are to do it."""
    elements = tf.TensorShape(variable.shape).num_elements()
    try:
        return make(optimizer, variable, tf.cast(rate, tf.float32)) if _gains(optimizer, elements) else None
    except (AttributeError, KeyError, IndexError, TypeError):  # another version keeps the slots elsewhere
        return None


def _gains(optimizer: Any, elements: int | None) -> bool:
    """Returns whether the kernel is faster on CPUs than Keras's ops, by the number of elements."""
    if not elements:
        return False
    if type(optimizer).__name__ == "SGD":
        # Without momentum, Keras 3 needs two ops. tf_keras has the slot of momentum in any case.
        return elements >= _MANY or _keras.family(optimizer) != "keras" or bool(optimizer.momentum)
    few = elements <= _FEW or (elements <= _FEW_VECTORS and elements % _VECTOR == 0)
    return few or elements >= _MANY


def _adam(optimizer: Any, variable: Any, rate: tf.Tensor) -> Callable:
    step = tf.cast(_keras.tf_variable(optimizer.iterations) + 1, tf.float32)
    return functools.partial(
        tf.raw_ops.ResourceApplyAdam,
        var=handle_of(variable),
        m=handle_of(slot_of(optimizer, optimizer._momentums, variable)),
        v=handle_of(slot_of(optimizer, optimizer._velocities, variable)),
        beta1_power=tf.pow(tf.cast(optimizer.beta_1, tf.float32), step),
        beta2_power=tf.pow(tf.cast(optimizer.beta_2, tf.float32), step),
        lr=rate,
        beta1=optimizer.beta_1,
        beta2=optimizer.beta_2,
        epsilon=optimizer.epsilon,
    )


def _sgd(optimizer: Any, variable: Any, rate: tf.Tensor) -> Callable:
    handle = handle_of(variable)
    if _keras.family(optimizer) == "keras" and not optimizer.momentum:
        return lambda grad: tf.raw_ops.ResourceApplyGradientDescent(var=handle, alpha=rate, delta=grad)
    return functools.partial(
        tf.raw_ops.ResourceApplyKerasMomentum,
        var=handle,
        accum=handle_of(slot_of(optimizer, optimizer.momentums, variable)),
        lr=rate,
        momentum=tf.cast(optimizer.momentum, tf.float32),
        use_nesterov=optimizer.nesterov,
    )


def slot_of(optimizer: Any, slots: Sequence[Any], variable: Any) -> Any:
    """Returns the slot of a variable among those that an optimizer keeps in a list."""
    if _keras.family(optimizer) == "keras":
        return slots[optimizer._get_variable_index(variable)]
    return slots[optimizer._index_dict[optimizer._var_key(variable)]]


def handle_of(variable: Any) -> tf.Tensor:
    """Returns the handle of a variable of either family, for an op of a step."""
    variable = _keras.tf_variable(variable)
    variable.value()  # unused, but the trace then counts the variable as one of the step's; a handle is not enough
    return variable.handle
