"""What a training changes about its trainer's Keras optimizers, in one place, until it is closed.

On several replicas, an optimizer of Keras 3 clips each replica's own gradient and sums afterwards. looplib sums the
gradients before the optimizer gets them, so that clipping, decay, accumulation and averages see the gradient of the
global batch, as they do on one device. tf_keras sums first itself. Both families fail on sparse gradients whose number
of rows varies, so looplib sums these for both.

A change is a method set on the instance. On one replica, none of them adds an op to what Keras does.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from looplib.cluster import gradient_sum, remote
from looplib.compat import keras as _keras
from looplib.data import shares
from looplib.errors import UsageError
from looplib.health import non_finite
from looplib.loop import fused_optimizers
from looplib.task.trainer import Trainer

# The class by which Keras 3 adapts its optimizers to tf.distribute, and what of it is changed here. None is public.
_ADAPTER = "keras.src.backend.tensorflow.optimizer"
_SUM = "_all_reduce_sum_gradients"
_UPDATES = (
    "_backend_update_step",
    "_apply_weight_decay",
    "_backend_increment_gradient_accumulators",
    "_overwrite_model_variables_with_average_value",
)
_NADAM = "tf_keras.src.optimizers.nadam"


class TrainingOptimizers:
    """The Keras optimizers of a trainer, changed for one training.

    - On several replicas, an optimizer of Keras 3 is given the sum of the gradients, once, and clips it once.
    - Gradients are noted for the guards, as each replica computed them.
    - Variables are updated by fused kernels where these are faster.
    - On parameter servers, steps are counted exactly.

    Args:
      trainer: the `Trainer` that holds the optimizers.
      strategy: `tf.distribute.Strategy` that runs its steps.
      noted: whether gradients are noted for `non_finite.run_watched`.
      fuse: whether variables are updated by fused kernels where these are faster.

    Raises:
      UsageError: for an optimizer that cannot be right on this strategy.
    """

    def __init__(self, trainer: Trainer, strategy: tf.distribute.Strategy, *, noted: bool, fuse: bool = True) -> None:
        self._strategy = strategy
        self._noted = noted
        self._sums = strategy.num_replicas_in_sync > 1
        self._replacements: list[Replacement] = []
        self._prepared: list[Any] = []  # optimizers of Keras 3 that leave the sum to this object
        self._inside: set[int | None] = set()  # replicas that are in an `apply` whose gradients are summed
        self._held = list(_keras.optimizers(trainer).values())
        try:
            for optimizer in self._held:
                self._change(optimizer)
                if fuse and (update := fused_optimizers.update_step(optimizer)):
                    self._replace(optimizer, "update_step", update)
            if remote.plugin_of(strategy) is not None:
                for optimizer in _keras.with_inner(self._held):
                    self._count_exactly(optimizer)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives the optimizers the methods back that they had before."""
        for replacement in reversed(self._replacements):
            replacement.take_back()

    def _replace(self, owner: Any, name: str, make: Callable[[Callable], Callable]) -> None:
        self._replacements.append(Replacement(owner, name, make))

    def _change(self, optimizer: Any) -> None:
        noted = self._noted and not _keras.scales_loss(optimizer)
        if _keras.family(optimizer) != "keras":
            if self._sums and type(optimizer).__module__ == _NADAM:
                raise UsageError(
                    "tf_keras.optimizers.Nadam counts its updates while TensorFlow traces them, once for each replica, "
                    "and computes different weights on several; use tf_keras.optimizers.legacy.Nadam, or Keras 3"
                )
            if noted or self._sums:
                make = functools.partial(self._applying_pairs, optimizer, noted)
                self._replace(optimizer, "apply_gradients", make)
            return
        if self._sums:
            self._prepare(optimizer)
        if noted and not self._sums:
            self._replace(optimizer, "apply", _noting)

    # Keras 3.

    def _prepare(self, optimizer: Any) -> None:
        """Lets an optimizer of Keras 3, and those inside of it, leave the sum over replicas to this object."""
        for each in _keras.with_inner([optimizer]):
            if all(each is not other for other in self._prepared):
                self._prepared.append(each)
                adapter = _adapter(each)
                held = any(each is other for other in self._held)
                noted = self._noted and held and not _keras.scales_loss(each)
                self._replace(each, "apply", functools.partial(self._applying, each, noted))
                self._replace(each, _SUM, lambda _: list)
                if each.gradient_accumulation_steps or (each.use_ema and each.ema_overwrite_frequency):
                    self._update_in_replicas(each, adapter)

    def _update_in_replicas(self, optimizer: Any, adapter: type) -> None:
        """Lets each replica update its own copy of the variables, as one device does.

        Keras updates all copies together, which TensorFlow cannot do inside of a condition (merge_call), where
        accumulation updates, and an average overwrites the weights. After the sum, all replicas compute the same.
        """
        for name in _UPDATES:
            if next(cls for cls in type(optimizer).__mro__ if name in vars(cls)) is adapter:
                plain = getattr(super(adapter, optimizer), name)
                self._replace(optimizer, name, lambda _, plain=plain: plain)

    def _applying(self, optimizer: Any, noted: bool, plain: Callable) -> Callable:
        def apply(grads: Iterable, trainable_variables: Any = None, **kwargs: Any) -> Any:
            grads = list(grads)
            if trainable_variables is not None:
                trainable_variables = list(trainable_variables)
            replica = _replica()
            if replica in self._inside or tf.distribute.in_cross_replica_context():
                return plain(grads, trainable_variables, **kwargs)
            grads = shares.weighed(grads)
            if noted:
                non_finite.note_gradients(grads, trainable_variables)
            self._make_ready(optimizer, trainable_variables)
            self._inside.add(replica)
            try:
                return plain(self._sum(optimizer, grads), trainable_variables, **kwargs)
            finally:
                self._inside.discard(replica)

        return apply

    def _make_ready(self, optimizer: Any, variables: list[Any] | None) -> None:
        """Builds an optimizer that has no variables yet; refuses those that replicas cannot update by themselves."""
        if not optimizer.built and variables:  # Keras would build it next, and that may make others inside of it
            optimizer.build(variables)
        self._prepare(optimizer)
        conditional = any(
            each.gradient_accumulation_steps or each.ema_overwrite_frequency for each in _keras.with_inner([optimizer])
        )
        for variable in variables or getattr(optimizer, "_trainable_variables", ()):
            if getattr(variable, "overwrite_with_gradient", False):
                raise UsageError(
                    f"{variable.path} is overwritten by its gradient (float8), and each replica has another; train in "
                    "float8 on one replica, or use another precision"
                )
            held = _keras.tf_variable(variable)
            aggregation = getattr(held, "aggregation", None)
            if conditional and aggregation not in (None, tf.VariableAggregation.NONE):
                raise UsageError(
                    f"{variable.name} aggregates what replicas write to it, and {type(optimizer).__name__} with "
                    "gradient_accumulation_steps or ema_overwrite_frequency writes to each replica's own copy; make "
                    "the variable without aggregation"
                )

    # tf_keras.

    def _applying_pairs(self, optimizer: Any, noted: bool, plain: Callable) -> Callable:
        parameters = inspect.signature(plain).parameters
        skip = {"skip_gradients_aggregation": True, "experimental_aggregate_gradients": False}
        skip = {name: value for name, value in skip.items() if name in parameters}

        def apply_gradients(grads_and_vars: Iterable, *args: Any, **kwargs: Any) -> Any:
            pairs = list(grads_and_vars)
            gradients, variables = (
                shares.weighed(gradient for gradient, _ in pairs),
                [variable for _, variable in pairs],
            )
            pairs = list(zip(gradients, variables))
            if noted:
                non_finite.note_gradients(gradients, variables)
            sums_itself = len(args) > 1 or any(kwargs.get(name) == value for name, value in skip.items())
            here = gradient_sum.is_summed() or any(map(gradient_sum.varies, gradients))
            if not self._sums or not here or sums_itself or tf.distribute.in_cross_replica_context():
                return plain(pairs, *args, **kwargs)
            if not skip:
                raise UsageError(
                    f"{type(optimizer).__name__}.apply_gradients takes no skip_gradients_aggregation, which a "
                    "GradientTrainer and sparse gradients of varying length need on several replicas; "
                    f"{gradient_sum.MAKE_DENSE}"
                )
            return plain(list(zip(self._sum(optimizer, gradients), variables)), *args, **{**kwargs, **skip})

        return apply_gradients

    def _sum(self, optimizer: Any, gradients: list[gradient_sum.Gradient]) -> list[gradient_sum.Gradient]:
        """Returns the gradients summed over replicas, which a `GradientTrainer` has done before; in replica context."""
        if gradient_sum.is_summed():
            return gradients
        return gradient_sum.over_replicas(self._strategy, type(optimizer).__name__, gradients)

    # Parameter servers.

    def _count_exactly(self, optimizer: Any) -> None:
        """Lets an optimizer count by one op, where Keras 3 reads, adds and writes, and workers lose counts."""
        if getattr(optimizer, "gradient_accumulation_steps", None):
            raise UsageError(
                f"{type(optimizer).__name__} has gradient_accumulation_steps, and with the strategy parameter_server "
                "workers add to one accumulator at the same time, so that gradients are lost; use a larger batch"
            )
        iterations = optimizer.iterations
        if _keras.is_variable(iterations):
            variable = iterations.value
            self._replace(
                iterations, "assign_add", lambda _: lambda value: variable.assign_add(tf.cast(value, variable.dtype))
            )


class Replacement:
    """A method of one object in place of its class's, made from the one that it replaces."""

    def __init__(self, owner: Any, name: str, make: Callable[[Callable], Callable]) -> None:
        before = vars(owner).pop(name, None)
        if isinstance(before, Replacement):  # of a training that was not closed
            before = before._before
        self._owner, self._name, self._before = owner, name, before
        self._method = make(getattr(owner, name) if before is None else before)
        vars(owner)[name] = self  # past __setattr__, which would look for state in it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the method that was made."""
        return self._method(*args, **kwargs)

    def take_back(self) -> None:
        """Gives the object back what it had, unless another training has replaced it since."""
        if vars(self._owner).get(self._name) is self:
            del vars(self._owner)[self._name]
            if self._before is not None:
                vars(self._owner)[self._name] = self._before


def refuse_others(strategy: tf.distribute.Strategy, unheld: Iterable[str]) -> None:
    """Raises `UsageError` if a step on several replicas uses an optimizer or seed that its trainer does not hold.

    Args:
      strategy: `tf.distribute.Strategy` that runs the step.
      unheld: the names of the variables of the step that the trainer does not hold. Each optimizer reads its learning
        rate or its count of updates from one.
    """
    if strategy.num_replicas_in_sync == 1:
        return
    unheld = list(unheld)
    if any(_keras.GLOBAL_SEED in name for name in unheld):
        raise UsageError(_keras.UNSEEDED)
    found = [name for name in unheld if re.search(r"(^|/)(iter|iteration|learning_rate)(_\d+)?:0$", name)]
    if found:
        raise UsageError(
            f"the step uses an optimizer that the trainer does not hold (its variable {found[0]}), and whose gradients "
            "looplib can neither sum over the replicas nor weigh by their examples; make it an attribute of the "
            "trainer, or of a model, layer or tf.Module in it"
        )


def _adapter(optimizer: Any) -> type:
    """Returns the class by which Keras 3 adapts an optimizer to tf.distribute."""
    found = next((cls for cls in type(optimizer).__mro__ if cls.__module__ == _ADAPTER), None)
    if found is None or any(name not in vars(found) for name in (_SUM, *_UPDATES)):
        raise UsageError(
            f"{type(optimizer).__name__} sums gradients over replicas in a way that looplib does not know (it knows "
            "Keras 3.15), so it could clip before the sum; use one replica, another version of Keras, or tf_keras"
        )
    return found


def _noting(apply: Callable) -> Callable:
    def noting(grads: Iterable, trainable_variables: Any = None, **kwargs: Any) -> Any:
        grads = list(grads)
        non_finite.note_gradients(grads, trainable_variables)
        return apply(grads, trainable_variables, **kwargs)

    return noting


def _replica() -> int | None:
    """Returns the replica that is traced or run, where they take turns in Python; None where one trace is for all."""
    context = tf.distribute.get_replica_context()
    number = None if context is None else tf.get_static_value(context.replica_id_in_sync_group)
    return None if number is None else int(number)
