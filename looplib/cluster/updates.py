"""One update of weights by a Keras optimizer, with the gradients of all replicas.

On several replicas, an optimizer of Keras 3 clips each replica's own gradient and sums afterwards. looplib sums the
gradients before the optimizer gets them, so that clipping, decay, accumulation and averages see the gradient of the
global batch, as they do on one device. tf_keras sums first itself. Both families fail on sparse gradients whose number
of rows varies, and have rows of each replica where one device has one, so looplib sums sparse gradients for both.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from looplib.cluster import replicas
from looplib.compat import keras as _keras
from looplib.compat import optimizers as _optimizers
from looplib.compat.autograph import converted
from looplib.errors import OptimizerError, StepError


def apply_gradients(optimizer: Any, grads_and_vars: Iterable[tuple[Any, Any]], *, summed: bool = False) -> None:
    """Updates weights: weighs and sums the gradients, notes them for the guards, and has the optimizer clip and apply.

    Gradients belong to one replica, or with `summed` to all. The optimizer is of either Keras family.
    """
    if not _keras.is_optimizer(optimizer):
        raise OptimizerError(
            f"apply_gradients got a {type(optimizer).__name__} as its optimizer; expected a Keras optimizer, and then "
            "pairs of a gradient and its variable"
        )
    pairs = list(grads_and_vars)
    if _keras.family(optimizer) == "keras":
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        _apply(optimizer, _optimizers.own_method(optimizer, "apply"), gradients, variables, summed=summed)
    else:
        _apply_pairs(optimizer, _optimizers.own_method(optimizer, "apply_gradients"), pairs, summed=summed)


@tf.autograph.experimental.do_not_convert
def _apply(
    optimizer: Any, plain: Callable, grads: Iterable, trainable_variables: Iterable | None = None, *,
    summed: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """Replaces the method `apply` of a Keras 3 optimizer, which is `plain`."""
    grads = list(grads)
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    if tf.distribute.in_cross_replica_context() or _optimizers.is_summed():
        return converted(plain)(grads, trainable_variables, **kwargs)
    if not summed:
        grads = replicas.weighted(grads)
    if not _keras.scales_loss(optimizer):
        replicas.note_gradients(grads, trainable_variables)
    if _optimizers.num_replicas() > 1:
        _make_ready(optimizer, trainable_variables)
        if not summed:
            grads = replicas.over_replicas(type(optimizer).__name__, grads)
    with _optimizers.summed():
        return converted(plain)(grads, trainable_variables, **kwargs)


def _make_ready(optimizer: Any, variables: list[Any] | None) -> None:
    """Builds an optimizer if needed; refuses variables that a replica cannot update by itself."""
    _optimizers.leave_out_sum(optimizer)
    if not optimizer.built and variables:  # Keras would build it next, and that may make others inside of it
        optimizer.build(variables)
    conditional = any(map(_optimizers.updates_conditionally, _keras.with_inner([optimizer])))
    for variable in variables or _optimizers.variables_of(optimizer):
        if getattr(variable, "overwrite_with_gradient", False):
            raise OptimizerError(
                f"{variable.path} is overwritten by its gradient (float8), and each replica has another; train in "
                "float8 on one replica, or use another precision"
            )
        aggregation = getattr(_keras.tf_variable(variable), "aggregation", None)
        if conditional and aggregation not in (None, tf.VariableAggregation.NONE):
            raise OptimizerError(
                f"{variable.name} aggregates what replicas write to it, and {type(optimizer).__name__} with "
                "gradient_accumulation_steps or ema_overwrite_frequency writes to each replica's own copy; make "
                "the variable without aggregation"
            )


@tf.autograph.experimental.do_not_convert
def _apply_pairs(
    optimizer: Any, plain: Callable, grads_and_vars: Iterable, *args: Any, summed: bool = False, **kwargs: Any
) -> Any:
    """Replaces the method `apply_gradients` of a tf_keras optimizer, which is `plain`."""
    pairs = list(grads_and_vars)
    if tf.distribute.in_cross_replica_context() or _optimizers.is_summed():
        return converted(plain)(pairs, *args, **kwargs)
    gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
    if not summed:
        gradients = replicas.weighted(gradients)
    if not _keras.scales_loss(optimizer):
        replicas.note_gradients(gradients, variables)
    names = {"skip_gradients_aggregation": True, "experimental_aggregate_gradients": False}
    parameters = inspect.signature(plain).parameters
    skip = {name: value for name, value in names.items() if name in parameters}
    several = _optimizers.num_replicas() > 1
    sums_itself = len(args) > 1 or any(kwargs.get(name) == value for name, value in skip.items())
    sparse = any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
    if several and not sums_itself and (summed or sparse):
        if not skip:
            raise OptimizerError(
                f"{type(optimizer).__name__}.apply_gradients takes no skip_gradients_aggregation, which a "
                f"GradientTrainer and sparse gradients need on several replicas; {replicas.MAKE_DENSE}"
            )
        kwargs |= skip
        if not summed:
            gradients = replicas.over_replicas(type(optimizer).__name__, gradients)
    with _optimizers.summed():
        return converted(plain)(list(zip(gradients, variables)), *args, **kwargs)


class TrainingOptimizers:
    """The optimizers of a trainer, whose steps may call them by themselves, until it is closed.

    - A call of `apply` or `apply_gradients` does what `apply_gradients` of this module does.
    - Variables are updated by fused kernels where these are faster.

    On one replica, none of this adds an op to what Keras does.

    Args:
      trainer: the object that holds the optimizers.
      strategy: `tf.distribute.Strategy` that runs its steps.
      noted: whether the steps are watched, see `replicas.watching`.
      fuse: whether variables are updated by fused kernels where these are faster.

    Raises:
      UsageError: for an optimizer that cannot be right on this strategy.
    """

    def __init__(self, trainer: Any, strategy: tf.distribute.Strategy, *, noted: bool, fuse: bool = True) -> None:
        self._replacements: list[_optimizers.Replacement] = []
        sums = strategy.num_replicas_in_sync > 1
        try:
            for optimizer in _keras.optimizers(trainer).values():
                self._change(optimizer, sums, noted and not _keras.scales_loss(optimizer))
                if fuse and (update := _optimizers.fused_update(optimizer)):
                    self._replacements.append(_optimizers.Replacement(optimizer, "update_step", update))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Restores the original methods of the optimizers."""
        for replacement in reversed(self._replacements):
            replacement.undo()

    def _change(self, optimizer: Any, sums: bool, noted: bool) -> None:
        if _keras.family(optimizer) == "keras":
            if sums:
                _optimizers.leave_out_sum(optimizer)
            name, function = "apply", _apply
        else:
            if sums and _optimizers.counts_while_traced(optimizer):
                raise OptimizerError(
                    "tf_keras.optimizers.Nadam counts its updates while TensorFlow traces them, once for each replica, "
                    "and computes different weights on several; use tf_keras.optimizers.legacy.Nadam, or Keras 3"
                )
            name, function = "apply_gradients", _apply_pairs
        if sums or noted:
            make = functools.partial(functools.partial, function, optimizer)
            self._replacements.append(_optimizers.Replacement(optimizer, name, make))


def refuse_others(strategy: tf.distribute.Strategy, unheld: Iterable[str]) -> None:
    """Raises `UsageError` if a step on several replicas uses an optimizer or seed that its trainer does not hold.

    `unheld` are the names of the step's variables that the trainer does not hold: each optimizer reads its learning
    rate or its count of updates from one.
    """
    if strategy.num_replicas_in_sync == 1:
        return
    unheld = list(unheld)
    if any(_keras.GLOBAL_SEED in name for name in unheld):
        raise StepError(_keras.UNSEEDED)
    found = [name for name in unheld if re.search(r"(^|/)(iter|iteration|learning_rate)(_\d+)?:0$", name)]
    if found:
        raise OptimizerError(
            f"the step uses an optimizer that the trainer does not hold (its variable {found[0]}), and whose gradients "
            "looplib can neither sum over the replicas nor weigh by their examples; make it an attribute of the "
            "trainer, or of a model, layer or tf.Module in it"
        )
