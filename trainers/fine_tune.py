"""Tunes a trained image classifier on other classes: all weights, the last layer, or LoRA adapters.

    python -m trainers.image_classification --model_dir=/tmp/base --config.model=wide_mlp --config.classes=0-4
    python -m trainers.fine_tune --model_dir=/tmp/lora --config.base=/tmp/base --config.classes=5-9 --config.tune=lora

The base is a run directory of `trainers.image_classification`, with any Keras 3 model. The tuned model has a new last
layer. The end of a training writes `model.keras` into the run directory, with adapters merged into the weights, and for
LoRA `adapters.npz`, the tuned weights alone.

Paper: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
"""

import dataclasses
import os
import tempfile
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

import looplib
from looplib import UsageError, launch
from looplib.base.messages import gist
from looplib.config import field_types
from looplib.run.directory import RunDir
from trainers import image_classification, image_data, image_models

HEAD = "head"
# The layers of Keras with `enable_lora`.
_LAYERS = keras.layers
_WITH_LORA = (_LAYERS.Dense, _LAYERS.EinsumDense, _LAYERS.Embedding, _LAYERS.Conv1D, _LAYERS.Conv2D, _LAYERS.Conv3D)
# Of each way to tune, the pattern of the variables that are not trained.
_FROZEN = {"all": (), "last": rf"^(?!.*\b{HEAD}/)", "lora": rf"^(?!.*(\b{HEAD}/|/lora_))"}


@dataclasses.dataclass
class Config:
    """The settings of this experiment, each a flag `--config.<field>=<value>`.

    Attributes:
      base: run directory of `trainers.image_classification` with the trained model; its data set is used here too.
      classes: labels to tune on, such as 5-9, which become 0, 1, ...; empty for all.
      tune: all (weights), last (the new last layer alone), or lora (low-rank adapters of all other layers, and the last
        layer).
      rank: of the adapters.
      learning_rate: the rate at the first step; it falls to 0 along half a cosine.
      decay_steps: steps over which it falls.
    """

    base: str = ""
    classes: str = "5-9"
    tune: str = "lora"
    rank: int = 4
    learning_rate: float = 3e-3
    decay_steps: int = 500


class FineTuner(looplib.Adapter, image_classification.ImageClassifier):
    """Tunes a model that starts from the weights of a base.

    Args:
      model: the model to tune.
      optimizer: Keras optimizer.
      data: images and labels.
      config: the settings.
      base: the base's model, which shares its layers, except the last one, with the model to tune.
      plain: a model of the tuned model's layers without adapters, to export.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.Optimizer,
        data: image_data.ImageData,
        config: Config,
        base: keras.Model,
        plain: keras.Model,
    ) -> None:
        super().__init__(model, optimizer, data, freeze=_FROZEN[config.tune])
        # In functions, because a checkpoint holds the models that are attributes.
        self._load = lambda: looplib.warm_start({"model": base}, config.base)
        self._export = lambda: Export(model, plain, config.tune == "lora")

    def initialize(self) -> None:
        """Loads the weights of the base."""
        self._load()

    @property
    def own_actions(self) -> Sequence[Callable[[looplib.Event], object]]:
        """See `looplib.Adapter.own_actions`; the export at the end of a training."""
        return (self._export(),)


class Export(looplib.Action):
    """Writes `model.keras`, and the adapters as `adapters.npz`, into the run directory at the end of a training.

    Args:
      model: the tuned model.
      plain: see `FineTuner`; takes the weights, with the adapters merged into them.
      adapted: whether the model has adapters.
    """

    def __init__(self, model: keras.Model, plain: keras.Model, adapted: bool) -> None:
        self._model, self._plain, self._adapted = model, plain, adapted

    def on_end(self, controller: looplib.Controller) -> None:
        """See `looplib.Action.on_end`."""
        if not controller.model_dir or not controller.is_chief:
            return
        merge(self._model, self._plain)
        with tempfile.TemporaryDirectory() as folder:
            self._plain.save(os.path.join(folder, "model.keras"))
            if self._adapted:
                values = {name: variable.numpy() for name, variable in adapter_variables(self._model).items()}
                np.savez(os.path.join(folder, "adapters.npz"), **values)
            for name in os.listdir(folder):
                path = os.path.join(controller.model_dir, name)
                tf.io.gfile.copy(os.path.join(folder, name), path, overwrite=True)


def make_models(config: image_classification.Config, num_classes: int) -> tuple[keras.Model, keras.Model]:
    """Makes the model of a base, and one that shares its layers except the last, which is new.

    Args:
      config: the settings of the base.
      num_classes: size of the new model's logits.

    Returns:
      (base, model).

    Raises:
      looplib.UsageError: if the base is not a model of Keras 3 with its layers in a row.
    """
    data = image_data.load(config)
    base = image_models.build(config.model, data.image_shape, data.num_classes)
    if not isinstance(base, keras.Sequential):
        raise UsageError(f"the base has --config.model={config.model}; expected a model of Keras 3, such as wide_mlp")
    head = keras.layers.Dense(num_classes, dtype="float32", name=HEAD)
    return base, keras.Sequential([keras.Input(data.image_shape), *base.layers[:-1], head])


def add_adapters(model: keras.Model, rank: int) -> None:
    """Adds LoRA adapters to all layers except the last one; a new adapter changes nothing yet.

    Raises:
      looplib.UsageError: if no layer can have one, or for a rank below 1.
    """
    layers = [layer for layer in model.layers[:-1] if isinstance(layer, _WITH_LORA)]
    if rank < 1 or not layers:
        raise UsageError(
            f"--config.rank is {rank}, and {len(layers)} layers take adapters; expected at least 1 of each"
        )
    for layer in layers:
        layer.enable_lora(rank)


def adapter_variables(model: keras.Model) -> dict[str, keras.Variable]:
    """Returns the variables of adapters and of the last layer, by the layer's number and the variable's name."""
    return {
        f"{number}/{variable.name}": variable
        for number, layer in enumerate(model.layers)
        for variable in layer.variables
        if layer.name == HEAD or variable.name.startswith("lora_")
    }


def merge(model: keras.Model, plain: keras.Model) -> None:
    """Gives a model without adapters the weights of one with adapters, merged with these, in layers of one order."""
    for source, target in zip(model.layers, plain.layers, strict=True):
        state: dict[str, np.ndarray] = {}
        source.save_own_variables(state)  # Keras merges adapters when it saves a layer
        target.load_own_variables(state)


def load_adapted(base: str, adapters: str) -> keras.Model:
    """Loads the base of a run directory with tuned adapters, as a model to use or to tune further.

    Args:
      base: the run directory of the base.
      adapters: the `adapters.npz` of a run directory of this binary.

    Raises:
      looplib.UsageError: if the two do not fit together.
    """
    try:
        if not os.path.isfile(adapters):  # a FIFO would be waited for
            raise OSError("it is not there, or no regular file")
        with np.load(adapters) as file:
            values = dict(file)
        rank = next(value.shape[-1] for name, value in values.items() if name.endswith("_a"))
        num_classes = list(values.values())[-1].shape[-1]  # of the bias of the last layer
    except Exception as error:  # of numpy, zipfile and zlib, which have many types
        raise UsageError(f"{adapters} cannot be read; name the adapters.npz of a LoRA run") from error
    config = read_config(base)
    bottom, model = make_models(config, num_classes)
    looplib.warm_start({"model": bottom}, base)
    add_adapters(model, rank)
    variables = adapter_variables(model)
    if {name: tuple(variable.shape) for name, variable in variables.items()} != {
        name: value.shape for name, value in values.items()
    }:
        raise UsageError(f"{adapters} has other shapes than adapters of {base}; name the base that it was tuned from")
    for name, variable in variables.items():
        variable.assign(values[name])
    return model


def read_config(base: str) -> image_classification.Config:
    """Reads the settings that a run directory of `trainers.image_classification` was trained with.

    Raises:
      looplib.UsageError: if it is not such a directory.
    """
    run = RunDir(base)
    try:
        report = run.report()
        if report is None or not report.config:
            raise UsageError("it has no settings")
        return field_types.typed(report.config, image_classification.Config, str, "")
    except UsageError as error:
        raise UsageError(
            f"{run.report_path()} cannot be read ({gist(error)}); set --config.base to a run directory of "
            "trainers.image_classification"
        ) from error


def build(config: Config) -> tuple[FineTuner, image_classification.ImageClassifierEvaluator]:
    """Builds the experiment, under the strategy's scope.

    Raises:
      looplib.UsageError: for a base that cannot be read, or a setting out of its range.
    """
    if config.tune not in _FROZEN:
        raise UsageError(f"--config.tune is {config.tune!r}; expected {', '.join(_FROZEN)}")
    trained = read_config(config.base)
    data = image_data.load(dataclasses.replace(trained, classes=config.classes))
    base, model = make_models(trained, data.num_classes)
    _, plain = make_models(trained, data.num_classes)
    if config.tune == "lora":
        add_adapters(model, config.rank)
    settings = dataclasses.replace(trained, learning_rate=config.learning_rate, decay_steps=config.decay_steps)
    optimizer = image_classification.make_optimizer(settings, model)
    trainer = FineTuner(model, optimizer, data, config, base, plain)
    return trainer, image_classification.ImageClassifierEvaluator(model, data)


if __name__ == "__main__":
    launch.run(build, Config(), train_steps=500, eval_interval=50)
