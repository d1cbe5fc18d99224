"""Parts of a model, chosen by regular expressions, and layers that are computed again in place of kept."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from looplib.base.messages import join_names
from looplib.compat import keras as _keras
from looplib.compat.patches import recompute
from looplib.errors import ModelError, OptimizerError, SettingError
from looplib.task.state import SlotOptimizer

REPORTS = ("learning_rate", "gradient_norm", "weight_norm", "update_norm", "layer_norms")


def check_model(model: Any) -> None:
    """Raises `UsageError` if a model is none, or has no trainable variables yet."""
    if not isinstance(model, tf.Module) and not _keras.is_layer(model):
        raise ModelError(f"model is a {type(model).__name__}; expected a Keras model or layer, or a tf.Module")
    if not model.trainable_variables:
        raise ModelError(
            "the model has no trainable variables yet; give it an Input layer, or call it once before "
            "GradientTrainer.__init__"
        )


def check_optimizer(optimizer: Any) -> None:
    """Raises `UsageError` if an optimizer is none of Keras, makes its variables late, or scales the loss."""
    if not _keras.is_optimizer(optimizer):
        raise OptimizerError(
            f"optimizer is a {type(optimizer).__name__} of {type(optimizer).__module__}; expected a Keras optimizer, "
            "or a dict of them by pattern; another one, such as Sonnet's, works in the step_fn of a looplib.Trainer on "
            "one replica"
        )
    if isinstance(optimizer, SlotOptimizer):
        raise OptimizerError(
            f"the optimizer is a {type(optimizer).__name__} of tf_keras.optimizers.legacy, which makes variables in "
            "its first update; give that of tf_keras.optimizers, or use it in the step_fn of a looplib.Trainer"
        )
    if _keras.scales_loss(optimizer) or getattr(optimizer, "loss_scale_factor", None):
        raise OptimizerError(
            f"{type(optimizer).__name__} scales the loss; give an optimizer that does not, because GradientTrainer "
            'scales the loss itself (loss_scale="auto")'
        )


def checked_reports(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of metrics to report; raises `UsageError` for other names."""
    if isinstance(names, str) or not set(names) <= set(REPORTS):
        raise SettingError(f"report is {names!r}; expected names among {', '.join(REPORTS)}")
    return tuple(names)


def matching(
    things: Sequence[Any], patterns: Sequence[str] | str | None, what: str,
    name_of: Callable[[Any], str] = _keras.variable_path, kind: str = "variable",
) -> list[Any]:  # fmt: skip
    """Returns the variables, or layers, whose names contain a match of any pattern.

    Args:
      things: variables of Keras or TensorFlow, or layers.
      patterns: regular expressions, for `re.search`; one or several, or None for none.
      what: name of the argument with the patterns, for the `UsageError` of one that is wrong or matches nothing.
      name_of: returns the name of one of the things.
      kind: what one of the things is called, for messages.
    """
    chosen: dict[int, Any] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
        try:
            found = [thing for thing in things if re.search(pattern, name_of(thing))]
        except re.error as error:
            raise ModelError(f"{what} has {pattern!r}, which is no regular expression: {error}") from error
        if not found:
            names = join_names([name_of(thing) for thing in things])
            raise ModelError(f"{what} has {pattern!r}, which matches no {kind} of the model; its {kind}s are: {names}")
        chosen.update((id(thing), thing) for thing in found)
    return [thing for thing in things if id(thing) in chosen]


def freeze(model: Any, patterns: Sequence[str] | str | None) -> list[Any]:
    """Freezes the matching variables; returns the others, of which there must be at least one.

    A layer whose variables all match becomes `trainable = False`, so that its batch normalization uses its moving
    statistics.
    """
    variables = list(model.trainable_variables)
    frozen = {id(variable) for variable in matching(variables, patterns, "freeze")}
    trained = [variable for variable in variables if id(variable) not in frozen]
    if not trained:
        raise ModelError(f"freeze={patterns!r} matches all variables of the model; leave out a part that is trained")
    for layer in layers_of(model, frozen):
        layer.trainable = False
    return trained


def warn_of_untrained(who: str, model: Any, tape: tf.GradientTape, target: tf.Tensor) -> None:
    """Warns of trainable variables outside of the model that the loss depends on, because no optimizer trains them.

    Args:
      who: the trainer, for messages.
      model: its model.
      tape: a persistent tape that has recorded the loss.
      target: the loss, a scalar.
    """
    # By their handles, because with parameter servers the tape knows what a model's variable is a wrapper of.
    known = {id(_keras.tf_variable(variable).handle) for variable in _keras.without_vocabularies(model.variables)}
    others = [variable for variable in tape.watched_variables() if id(variable.handle) not in known]
    gradients = tape.gradient(target, others)
    left_out = [_keras.variable_path(one) for one, gradient in zip(others, gradients) if gradient is not None]
    if left_out:
        logging.warning(
            "the losses of %s.loss_fn depend on %s outside of its model, which no optimizer trains; make a model that "
            "has both, or use trainable=False or tf.stop_gradient if this is intended", who, join_names(left_out),
        )  # fmt: skip


def layers_of(model: Any, variables: Collection[int]) -> list[Any]:
    """Returns the layers that have trainable variables, all of them among `variables`, which are given by id."""
    own = [(layer, layer.trainable_variables) for layer in (nested_layers(model) if variables else ())]
    return [layer for layer, held in own if held and all(id(variable) in variables for variable in held)]


def divided(optimizers: Mapping[str, Any], variables: Sequence[Any]) -> list[tuple[str, Any, list[Any]]]:
    """Gives each variable to the optimizer of the first pattern that matches it.

    Returns a list of (pattern, optimizer, its variables). `UsageError` for a pattern that matches nothing that is left,
    variables that no pattern matches, or an optimizer that comes twice.
    """
    if len({id(optimizer) for optimizer in optimizers.values()}) < len(optimizers):
        raise OptimizerError("optimizer has one optimizer under two patterns; join the patterns, as in 'encoder|head'")
    left, parts = list(variables), []
    for pattern, optimizer in optimizers.items():
        own = matching(left, pattern, "optimizer")
        taken = {id(variable) for variable in own}
        left = [variable for variable in left if id(variable) not in taken]
        parts.append((pattern, optimizer, own))
    if left:
        names = join_names([_keras.variable_path(variable) for variable in left])
        raise OptimizerError(f'no pattern of optimizer matches {names}; add a last one for the rest, "": optimizer')
    return parts


def leave_out_of_decay(
    optimizer_parts: Sequence[tuple[str, Any, list[Any]]], patterns: Sequence[str] | str | None
) -> None:
    """Leaves the matching variables out of the weight decay of their optimizers, which are not built yet.

    `optimizer_parts` is what `divided` returns. `UsageError` if no optimizer decays weights.
    """
    if not patterns:
        return
    everything = [variable for _, _, variables in optimizer_parts for variable in variables]
    left_out = {id(variable) for variable in matching(everything, patterns, "no_decay")}
    decaying = [(each, variables) for _, each, variables in optimizer_parts if getattr(each, "weight_decay", None)]
    if not decaying:
        raise OptimizerError("no_decay is given, and no optimizer has a weight_decay; use AdamW(weight_decay=...), say")
    for optimizer, variables in decaying:
        if own := [variable for variable in variables if id(variable) in left_out]:
            optimizer.exclude_from_weight_decay(var_list=own)


def nested_layers(model: Any) -> Iterator[Any]:
    """Yields the layers of a model, also of models in it; a layer that comes twice, twice."""
    for layer in model.layers if _keras.is_model(model) else ():
        yield layer
        yield from nested_layers(layer)


def rematerialize(model: Any, patterns: Sequence[str] | str) -> None:
    """Lets the matching layers compute their activations again in the backward pass, by `tf.recompute_grad`.

    Only what goes into such a layer is kept for the gradient, so that a block of a deep model is a good choice. The
    patterns are for names of layers, also those of models in the model. `UsageError` for a layer whose second
    computation would differ.
    """
    layers = list({id(layer): layer for layer in nested_layers(model)}.values())
    for layer in matching(layers, patterns, "rematerialize", lambda layer: layer.name, "layer"):
        if _keras.changes_when_called(layer):
            raise ModelError(
                f"rematerialize has {patterns!r}, which matches {layer.name}, and computing it twice gives two results "
                "(dropout, batch normalization or another state in it); match layers without state"
            )
        recompute(layer)
