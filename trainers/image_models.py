"""Models for image classification. All return logits."""

from collections.abc import Callable
from typing import Any

from looplib import UsageError
from trainers import needed


def build(name: str, image_shape: tuple[int, int, int], num_classes: int) -> Any:
    """Builds a model by name.

    Args:
      name: "cnn" (two small convolutions, with dropout), "mlp" (128 hidden units: 784-128-10 on MNIST), "tpu_guide"
        (the 256-channel network of TensorFlow's TPU guide), "wide_mlp" (layers of 1,024, 1,024 and 128 units), or
        "resnet18", "resnet34", "resnet50", ... from tf-models-official.
      image_shape: (height, width, channels).
      num_classes: size of the logits.

    Returns:
      A model of Keras 3, or of tf_keras for a ResNet. Its input is float32 `[batch, height, width, channels]`, its
      output float32 `[batch, num_classes]`.

    Raises:
      UsageError: for an unknown name, or an image too small for the model.
    """
    if name.startswith("resnet"):
        return _resnet(name, image_shape, num_classes)
    if name not in _LAYERS:
        raise UsageError(
            f"--config.model is {name!r}; expected one of {', '.join(_LAYERS)}, resnet18, resnet34, resnet50"
        )
    import keras

    if name == "tpu_guide" and min(image_shape[:2]) < 5:
        raise UsageError(
            f"--config.model=tpu_guide needs images of at least 5x5 pixels, and these are {image_shape[:2]}"
        )
    return keras.Sequential(
        [keras.Input(image_shape), *_LAYERS[name](keras.layers), keras.layers.Dense(num_classes, dtype="float32")],
        name=name,
    )


def _cnn(layers: Any) -> list[Any]:
    return [
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.Conv2D(64, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Dropout(0.3),
        layers.Flatten(),
        layers.Dense(128, activation="relu"),
        layers.Dropout(0.5),
    ]


def _mlp(layers: Any) -> list[Any]:
    return [layers.Flatten(), layers.Dense(128, activation="relu")]


def _tpu_guide(layers: Any) -> list[Any]:
    return [
        layers.Conv2D(256, 3, activation="relu"),
        layers.Conv2D(256, 3, activation="relu"),
        layers.Flatten(),
        layers.Dense(256, activation="relu"),
        layers.Dense(128, activation="relu"),
    ]


def _wide_mlp(layers: Any) -> list[Any]:
    return [layers.Flatten(), *(layers.Dense(units, activation="relu") for units in (1024, 1024, 128))]


_LAYERS: dict[str, Callable[[Any], list[Any]]] = {
    "cnn": _cnn,
    "mlp": _mlp,
    "tpu_guide": _tpu_guide,
    "wide_mlp": _wide_mlp,
}


def _resnet(name: str, image_shape: tuple[int, int, int], num_classes: int) -> Any:
    # Importing official takes seconds, so only this function does it.
    with needed.extra("models", f"--config.model={name}"):
        import tf_keras
        from official.vision.modeling import classification_model
        from official.vision.modeling.backbones import resnet

    depths = sorted(resnet.RESNET_SPECS)
    if not name[6:].isdigit() or int(name[6:]) not in depths:
        raise UsageError(f"--config.model is {name!r}; expected resnet followed by one of {depths}")
    specs = tf_keras.layers.InputSpec(shape=[None, *image_shape])
    backbone = resnet.ResNet(model_id=int(name[6:]), input_specs=specs)
    model = classification_model.ClassificationModel(backbone, num_classes=num_classes, input_specs=specs)
    inputs = tf_keras.Input(image_shape)
    logits = tf_keras.layers.Activation("linear", dtype="float32")(model(inputs))
    return tf_keras.Model(inputs, logits, name=name)
