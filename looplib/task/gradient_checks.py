"""Checks of what a `GradientTrainer` is given, and of what its `loss_fn` returns."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from looplib.compat import keras as _keras
from looplib.errors import UsageError, join_names
from looplib.task.micro_batches import check_per_example
from looplib.task.reductions import Reduction
from looplib.task.state import SlotOptimizer
from looplib.task.trainer import Trainer

REPORTS = ("learning_rate", "gradient_norm", "weight_norm", "update_norm", "layer_norms")


def losses_and_metrics(trainer: type[Trainer], returned: Any, inputs: Any) -> tuple[Any, dict[str, Any]]:
    """Checks what a `loss_fn` returned for a batch, or a part of it."""
    who = trainer.__name__
    losses, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(metrics, dict):
        raise UsageError(
            f"{who}.loss_fn returned a {type(metrics).__name__} after the losses; expected a dict of metrics, or "
            "looplib.mean(losses, weights) for weighted losses"
        )
    if trainer.loss_name in metrics:
        raise UsageError(
            f"{who}.loss_fn returned a metric {trainer.loss_name!r}, which is the losses' own name; rename it"
        )
    if isinstance(losses, Reduction) and losses.kind == "mean":
        return losses, metrics
    if not isinstance(losses, tf.Tensor) or not losses.dtype.is_floating or losses.shape.rank == 0:
        found = (
            f"a {losses.dtype.name} tensor of shape {losses.shape}" if isinstance(losses, tf.Tensor) else repr(losses)
        )
        raise UsageError(
            f"{who}.loss_fn returned {found}; expected one loss per example, a float tensor [batch], or "
            "looplib.mean(losses, weights): a mean that is taken already would be wrong for micro-batches and replicas"
        )
    check_per_example(f"what {who}.loss_fn returned as losses", losses, inputs)
    return losses, metrics


def joined(who: str, metrics: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Joins the metrics of a `loss_fn` and those of a `GradientTrainer`; raises `UsageError` for a common name."""
    if both := sorted(metrics.keys() & own.keys()):
        raise UsageError(f"{who}.loss_fn returned the metric {both[0]!r}, which GradientTrainer reports; rename yours")
    return {**metrics, **own}


def check_weights(who: str, values: tf.Tensor, weights: tf.Tensor) -> None:
    """Raises `UsageError` if weights do not broadcast to the losses, as far as the shapes are known."""
    try:
        fits = tf.broadcast_static_shape(values.shape, weights.shape).is_compatible_with(values.shape)
    except ValueError:
        fits = False
    if not fits:
        raise UsageError(
            f"{who}.loss_fn returned losses of shape {values.shape} with weights of shape {weights.shape}; expected "
            "weights that broadcast to the losses"
        )


def check_model(model: Any) -> None:
    """Raises `UsageError` if a model is none, or has no trainable variables yet."""
    if not isinstance(model, tf.Module) and not _keras.is_layer(model):
        raise UsageError(f"model is a {type(model).__name__}; expected a Keras model or layer, or a tf.Module")
    if not model.trainable_variables:
        raise UsageError(
            "the model has no trainable variables yet; give it an Input layer, or call it once before "
            "GradientTrainer.__init__"
        )


def check_trainable(who: str, model: Any, before: Sequence[Any]) -> None:
    """Raises `UsageError` if other variables of a model are trainable than when the trainer was built."""
    then, now = ({id(variable): variable for variable in each} for each in (before, model.trainable_variables))
    if changed := [_keras.variable_path({**then, **now}[key]) for key in then.keys() ^ now.keys()]:
        raise UsageError(
            f"trainable has changed for {join_names(sorted(changed))} since {who}.__init__, where the optimizer got "
            "its variables; set it before, or give GradientTrainer(freeze=...)"
        )


def check_optimizer(optimizer: Any) -> None:
    """Raises `UsageError` if an optimizer is none of Keras, makes its variables late, or scales the loss."""
    if not _keras.is_optimizer(optimizer):
        raise UsageError(
            f"optimizer is a {type(optimizer).__name__}; expected a Keras optimizer, or a dict of them by pattern"
        )
    if isinstance(optimizer, SlotOptimizer):
        raise UsageError(
            f"the optimizer is a {type(optimizer).__name__} of tf_keras.optimizers.legacy, which makes variables in "
            "its first update; give that of tf_keras.optimizers, or use it in the step_fn of a looplib.Trainer"
        )
    if _keras.scales_loss(optimizer) or getattr(optimizer, "loss_scale_factor", None):
        raise UsageError(
            f"{type(optimizer).__name__} scales the loss; give an optimizer that does not, because GradientTrainer "
            'scales the loss itself (loss_scale="auto")'
        )


def checked_reports(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of metrics to report; raises `UsageError` for other names."""
    if isinstance(names, str) or not set(names) <= set(REPORTS):
        raise UsageError(f"report is {names!r}; expected names among {', '.join(REPORTS)}")
    return tuple(names)
