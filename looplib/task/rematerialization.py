"""Layers that compute their activations twice, in less memory, for `rematerialize` of a `GradientTrainer`."""

from collections.abc import Sequence
from typing import Any

from looplib.compat import keras as _keras
from looplib.compat.methods import recompute
from looplib.errors import ModelError
from looplib.task import parts


def rematerialize(model: Any, patterns: Sequence[str] | str) -> None:
    """Lets the matching layers compute their activations again in the backward pass, by `tf.recompute_grad`.

    Only what goes into such a layer is kept for the gradient, so that a block of a deep model is a good choice. The
    patterns are for names of layers, also those of models in the model. `UsageError` for a layer whose second
    computation would differ.
    """
    layers = list({id(layer): layer for layer in parts.nested_layers(model)}.values())
    for layer in parts.matching(layers, patterns, "rematerialize", lambda layer: layer.name, "layer"):
        if _keras.changes_when_called(layer):
            raise ModelError(
                f"rematerialize has {patterns!r}, which matches {layer.name}, and computing it twice gives two results "
                "(dropout, batch normalization or another state in it); match layers without state"
            )
        recompute(layer)
