"""What a trainer or evaluator exports: a function that serves, and the model whose variables it uses."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from looplib.compat import keras as _keras
from looplib.errors import ExportError
from looplib.task.averages import WeightAverages


@dataclasses.dataclass(frozen=True)
class Exported:
    """What is exported for programs without looplib.

    Attributes:
      function: function of one argument, a batch, in TensorFlow; returns a tensor or a structure of tensors.
      signature: the structure of `tf.TensorSpec`s of this argument.
      model: the Keras model or `tf.Module` that holds the variables and tables that the function uses.
      averages: `WeightAverages` that an export may use in place of the weights; None for none.

    Example:
        ```python
        def export(self):
            serve = lambda images: {"class": tf.argmax(self.model(images, training=False), 1)}
            return looplib.Exported(serve, tf.TensorSpec([None, 28, 28, 1], name="images"), self.model)
        ```
    """

    function: Callable[[Any], Any]
    signature: Any
    model: Any
    averages: WeightAverages | None = None


def check_names(names: Sequence[str]) -> None:
    """Raises `UsageError` for names of inputs that a SavedModel cannot have, or that it would not tell apart."""
    wrong = [name for name in names if not re.fullmatch(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*", name) or name == "self"]
    kept = [re.sub(r"\W", "_", name) for name in names]
    wrong = wrong or [name for name, one in zip(names, kept) if kept.count(one) > 1]
    if wrong:
        raise ExportError(
            f"no export can have inputs named {', '.join(map(repr, wrong))}; give each another name of letters, "
            "digits and underscores: of its Input layer, its key in a dict, or its tf.TensorSpec"
        )


def of_model(who: str, model: Any, averages: WeightAverages | None = None) -> Exported:
    """Returns the default export of a task of the class `who`: the model's outputs in inference, for any batch size."""
    signature = _keras.input_specs(model) if _keras.is_model(model) else None
    if signature is None:
        found = "a model without Input layers" if _keras.is_model(model) else "no Keras model as its attribute model"
        raise ExportError(
            f"{who} has {found}, so it is not known what to export; define {who}.export, which returns "
            "looplib.Exported(function, signature, model)"
        )
    return Exported(lambda inputs: model(inputs, training=False), signature, model, averages)
