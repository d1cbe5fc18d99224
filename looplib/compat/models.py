"""What a `KerasTrainer` asks about a compiled model, of either family."""

import sys
import types
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import tensorflow as tf

from looplib.compat import keras as _keras
from looplib.errors import BatchSizeError, SettingError


def callbacks_of(model: Any) -> types.ModuleType:
    """Returns the module of callbacks of a model's family."""
    return sys.modules[_keras.family(model)].callbacks


def refuse_limits(model: Any) -> None:
    """Raises `UsageError` where Keras 3 is set to end each `fit` early, for trials of a script."""
    config = sys.modules["keras"].config if _keras.family(model) == "keras" else None
    for name in ("max_epochs", "max_steps_per_epoch"):
        limit = getattr(config, name, None)  # Keras has them since 3.10
        if limit is not None and limit():
            raise SettingError(
                f"keras.config.{name} is {limit()}, a limit of fit that a Controller does not have; give "
                f"controller.train fewer epochs or steps, and call keras.config.set_{name}(None) or unset "
                f"KERAS_{name.upper()}"
            )


def has_own_step(model: Any, step: str = "train_step") -> bool:
    """Returns whether a model has a `train_step`, or another step, of its own in place of Keras's."""
    return getattr(type(model), step).__module__.split(".")[0] not in ("keras", "tf_keras")


def unlisted_metrics(model: Any) -> list[Any]:
    """Returns the metrics that a model holds and its `metrics`, where it has a property of its own, leaves out."""
    listed = {id(variable) for metric in model.metrics for variable in metric.variables}
    held = [*filter(_keras.is_metric, _keras.parts(model))]
    held += compiled_metrics(model)
    return [metric for metric in held if any(id(variable) not in listed for variable in metric.variables)]


def compiled_metrics(model: Any) -> list[Any]:
    """Returns the metrics of the compiled losses and metrics of a model of tf_keras; [] of Keras 3."""
    if _keras.family(model) == "keras":
        return []
    return [one for part in (model.compiled_loss, model.compiled_metrics) if part for one in part.metrics]


def is_batch_normalization(layer: Any) -> bool:
    """Returns whether a layer normalizes by the statistics of its batch."""
    return _keras.is_a(layer, "layers", "BatchNormalization")


def has_own_statistics(layer: Any) -> bool:
    """Returns whether a layer normalizes by the statistics of a replica's own examples."""
    return is_batch_normalization(layer) and layer.trainable and not getattr(layer, "synchronized", False)


def stateful_batch(model: Any) -> int | None:
    """Returns the batch size that the stateful recurrent layers of a model are made for; None without any."""
    stateful = any(_keras.is_a(layer, "layers", "RNN") and layer.stateful for layer in _keras.sublayers(model))
    return fixed_batch(model) if stateful else None


def fixed_batch(model: Any) -> int | None:
    """Returns the batch size that the Input layers of a model say; None if they say none."""
    sizes = [spec.shape[0] for spec in tf.nest.flatten(getattr(model, "inputs", None) or [])]
    return next((size for size in sizes if size is not None), None)


def check_stateful_batch(model: Any, size: float | None) -> None:
    """Raises `UsageError` if the stateful layers of a model are made for other batches than a replica gets.

    Args:
      model: the model.
      size: the examples that each replica gets; None if that is not known.
    """
    expected = stateful_batch(model)
    if expected and size is not None and size != expected:
        raise BatchSizeError(
            f"the stateful layers of {type(model).__name__} are made for batches of {expected}, and each of "
            f"{model.distribute_strategy.num_replicas_in_sync} replicas gets {size:g} examples; change the model, or "
            "the global batch size"
        )


def unpacked(model: Any, batch: Any) -> tuple[Any, Any, Any]:
    """Returns the inputs, targets and sample weights of a batch; None for what it does not have."""
    return sys.modules[_keras.family(model)].utils.unpack_x_y_sample_weight(batch)


@runtime_checkable
class _Preprocessing(Protocol):
    """A task of KerasHub, whose `fit` preprocesses what it is given."""

    preprocessor: Any

    def preprocess_samples(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Returns a batch for its steps."""


def preprocessing(model: Any) -> Callable[..., Any] | None:
    """Returns what the `fit` of a model does with inputs, targets and weights first; None for nothing."""
    has_own = isinstance(model, _Preprocessing) and model.preprocessor is not None
    return model.preprocess_samples if has_own else None


def served(model: Any) -> Any:
    """Returns the model to export of one that is trained: the student of a `keras.distillation.Distiller`."""
    return model.student if _keras.is_a(model, "distillation", "Distiller") else model


def float_type(model: Any) -> str:
    """Returns the name of the type of floating-point numbers that the family of a model computes with by default."""
    return sys.modules[_keras.family(model)].backend.floatx()
