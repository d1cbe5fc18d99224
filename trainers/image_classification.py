"""Trains an image classifier: `python -m trainers.image_classification --model_dir=/tmp/digits`.

By default a small convolutional network on scikit-learn's digits: 1,437 images to train on and 360 to test on, no
download. `--helpfull` lists all flags.
"""

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

import looplib
from looplib import UsageError, launch
from trainers import image_data, image_models


@dataclasses.dataclass
class Config:
    """The settings of this experiment, each a flag `--config.<field>=<value>`.

    Attributes:
      dataset: digits, numpy, tfrecord, or the name of a tensorflow_datasets data set such as mnist.
      data_path: the .npz file (numpy), or the directory that holds the prepared data set (tensorflow_datasets).
      train_files: pattern of the TFRecord files to train on.
      test_files: pattern of the TFRecord files to test on.
      image_size: height and width of the images of TFRecord files and of data sets of many sizes, in pixels.
      channels: 1 or 3, for TFRecord files.
      num_classes: for TFRecord files.
      classes: labels to train and test on, such as 0-4 or 0,2,7-9, which become 0, 1, ...; empty for all.
      model: cnn, mlp, tpu_guide, wide_mlp, or resnet18, resnet34, resnet50, ... of tf-models-official.
      optimizer: adam or sgd (with momentum 0.9).
      learning_rate: the rate at the first step.
      decay_steps: steps over which the rate falls to 0 along half a cosine; 0 keeps it constant.
    """

    dataset: str = "digits"
    data_path: str = ""
    train_files: str = ""
    test_files: str = ""
    image_size: int = 224
    channels: int = 3
    num_classes: int = 10
    classes: str = ""
    model: str = "cnn"
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    decay_steps: int = 0


class ImageClassifier(looplib.GradientTrainer):
    """Trains a classifier on cross entropy.

    Args:
      model: a Keras model of either family, from images to logits.
      optimizer: an optimizer of the model's Keras family.
      data: the images and labels.
      freeze: patterns of the names of variables that are not trained, see `looplib.GradientTrainer`.
    """

    def __init__(
        self, model: Any, optimizer: Any, data: image_data.ImageData, freeze: Sequence[str] | str = ()
    ) -> None:
        super().__init__(model, optimizer, freeze=freeze, report=("learning_rate",))
        self._data = data

    def dataset(self, context: looplib.InputContext) -> tf.data.Dataset:
        """See `looplib.Trainer.dataset`."""
        return self._data.train(context)

    def loss_fn(self, inputs: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Returns the cross entropy and the accuracy of (images, labels)."""
        images, labels = inputs
        logits = self.model(images, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return losses, {"accuracy": tf.equal(tf.argmax(logits, axis=1), labels)}


class ImageClassifierEvaluator(looplib.Evaluator):
    """Evaluates a classifier; each test example counts once.

    Args:
      model: the trainer's model.
      data: the images and labels.
    """

    def __init__(self, model: Any, data: image_data.ImageData) -> None:
        self.model = model
        self._data = data

    def dataset(self, context: looplib.InputContext) -> tf.data.Dataset:
        """See `looplib.Evaluator.dataset`."""
        return self._data.test(context)

    def step_fn(self, inputs: tuple[tf.Tensor, tf.Tensor]) -> Mapping[str, Any]:
        """Reports loss and accuracy of (images, labels)."""
        images, labels = inputs
        logits = self.model(images, training=False)
        return {
            "loss": tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits),
            "accuracy": tf.equal(tf.argmax(logits, axis=1), labels),
        }

    def predict_fn(self, inputs: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Predicts the class, and the probability of each class, beside the label."""
        images, labels = inputs
        probabilities = tf.nn.softmax(self.model(images, training=False))
        return {"label": labels, "prediction": tf.argmax(probabilities, axis=1), "probabilities": probabilities}


def build(config: Config) -> tuple[ImageClassifier, ImageClassifierEvaluator]:
    """Builds the experiment, under the strategy's scope.

    Args:
      config: the settings.

    Returns:
      The trainer and its evaluator.

    Raises:
      looplib.UsageError: for data that are not available, or an unknown model or optimizer.
    """
    data = image_data.load(config)
    model = image_models.build(config.model, data.image_shape, data.num_classes)
    return ImageClassifier(model, make_optimizer(config, model), data), ImageClassifierEvaluator(model, data)


def make_optimizer(config: Config, model: Any) -> Any:
    """Makes an optimizer of the model's own Keras family.

    Args:
      config: the settings `optimizer`, `learning_rate` and `decay_steps`.
      model: a Keras model of either family.

    Returns:
      The optimizer.

    Raises:
      looplib.UsageError: for an unknown name or a learning rate that is not positive.
    """
    keras = sys.modules[type(model).__module__.split(".")[0]]
    if not 0 < config.learning_rate < math.inf or config.decay_steps < 0:
        raise UsageError(
            f"--config.learning_rate is {config.learning_rate} and --config.decay_steps {config.decay_steps}; expected "
            "a positive rate and at least 0 steps"
        )
    rate = config.learning_rate
    if config.decay_steps:
        rate = keras.optimizers.schedules.CosineDecay(rate, config.decay_steps)
    if config.optimizer == "adam":
        return keras.optimizers.Adam(rate)
    if config.optimizer == "sgd":
        return keras.optimizers.SGD(rate, momentum=0.9)
    raise UsageError(f"--config.optimizer is {config.optimizer!r}; expected adam or sgd")


EXPERIMENTS = {
    "mlp": Config(model="mlp"),
    "sgd": Config(optimizer="sgd", learning_rate=0.05, decay_steps=2000),
}

if __name__ == "__main__":
    launch.run(build, Config(), experiments=EXPERIMENTS, train_steps=2000, eval_interval=500)
