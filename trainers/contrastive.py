"""Learns features of digits without labels (SimCLR): `python -m trainers.contrastive --model_dir=/tmp/contrastive`.

Each example is seen as two random views. The model learns to find the other view of an example among the views of all
examples of the global batch. An evaluation fits a linear classifier to the features and measures it on the test images.
The end of a training writes `features.png` into the run directory, a picture of the features of the test images.

Paper: Chen, Kornblith, Norouzi and Hinton, "A Simple Framework for Contrastive Learning of Visual Representations",
2020.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import looplib
from looplib import UsageError, launch
from trainers import augmentation, image_data, pictures

_CLASSES = 10
_FEW_LABELS = 100


@dataclasses.dataclass
class Config:
    """The settings of this experiment, each a flag `--config.<field>=<value>`.

    Attributes:
      width: number of features.
      projection: size of the vectors that the loss compares.
      temperature: divides the cosine similarities of the loss.
      augmentation: strength of the random views; 1 turns by up to 20 degrees and shifts by up to 1 pixel, 0 leaves the
        images unchanged.
      learning_rate: the rate at the first step; it falls to 0 along half a cosine.
      decay_steps: steps over which it falls.
      penalty: of the linear classifier (ridge regression), relative to the number of its examples.
    """

    width: int = 256
    projection: int = 64
    temperature: float = 0.2
    augmentation: float = 1.0
    learning_rate: float = 0.1
    decay_steps: int = 1000
    penalty: float = 0.01


class Contrastive(looplib.Adapter, looplib.GradientTrainer):
    """Trains a model to tell the two views of an example from all other views of the global batch.

    Args:
      model: Keras model from float32 images `[b, 8, 8, 1]` to (features `[b, width]`, projections `[b, projection]`).
      optimizer: Keras optimizer.
      config: the settings.
      data: ((images, labels) to train on, (images, labels) to test on), as `image_data.digits_arrays` returns them.
    """

    def __init__(self, model: keras.Model, optimizer: keras.Optimizer, config: Config, data: Any) -> None:
        super().__init__(model, optimizer, report=("learning_rate",))
        self._config, ((self._images, _), self._test) = config, data

    def dataset(self, context: looplib.InputContext) -> tf.data.Dataset:
        """Makes batches of two views, float32 `[b, 8, 8, 1]` each; every example has a new seed in every epoch."""
        images = tf.constant(self._images)[..., None]

        def views(ids: tf.Tensor, seeds: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return augmentation.two_views(tf.gather(images, ids), seeds, self._config.augmentation)

        return context.indices(len(self._images), seeds=True).map(views, num_parallel_calls=tf.data.AUTOTUNE)

    def loss_fn(self, inputs: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Returns the NT-Xent loss and the share of views whose other view is the nearest."""
        views = [tf.math.l2_normalize(self.model(view, training=True)[1], axis=1) for view in inputs]
        others = [looplib.all_gather(view) for view in views]
        return nt_xent(views, others, self._config.temperature)

    @property
    def own_actions(self) -> Sequence[Callable[[looplib.Event], object]]:
        """See `looplib.Adapter.own_actions`; the picture at the end of a training."""
        return (FeaturePicture(self.model, *self._test),)


class LinearProbe(looplib.Evaluator):
    """Measures features by a linear classifier, fitted to those of the training images.

    Args:
      model: the trainer's model.
      data: as for `Contrastive`.
      penalty: see `ridge_accuracy`.
    """

    def __init__(self, model: keras.Model, data: Any, penalty: float) -> None:
        super().__init__(model)
        (train_images, train_labels), (test_images, test_labels) = data
        self._images = np.concatenate([train_images, test_images])[..., None]
        self._labels, self._train, self._penalty = (
            np.concatenate([train_labels, test_labels]),
            len(train_labels),
            penalty,
        )

    def dataset(self, context: looplib.InputContext) -> tf.data.Dataset:
        """Makes batches of (ids, images), of training and test images."""
        images = tf.constant(self._images)
        return context.indices(len(self._labels)).map(lambda ids: (ids, tf.gather(images, ids)))

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """See `looplib.Evaluator.evaluating`."""
        self._features: dict[int, np.ndarray] = {}
        yield

    def step_fn(self, inputs: tuple[tf.Tensor, tf.Tensor]) -> dict[str, Any]:
        """Hands over the features of (ids, images)."""
        ids, images = inputs
        return {"features": looplib.each((ids, self.model(images, training=False)[0]))}

    def collect(self, outputs: list[dict[str, Any]]) -> None:
        """See `looplib.Evaluator.collect`."""
        for output in outputs:
            ids, features = output["features"]
            self._features.update(zip(ids.numpy().tolist(), features.numpy()))

    def loop_end(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Adds the accuracy on the test images, with all labels and with those of the first 100 training images."""
        ids = np.array(sorted(self._features))
        features, labels = np.stack([self._features[number] for number in ids]), self._labels[ids]
        train, test = ids < self._train, ids >= self._train
        if not (train.any() and test.any()):  # a dry run evaluates a few steps only
            return metrics
        for name, chosen in (("accuracy", train), (f"accuracy_{_FEW_LABELS}_labels", ids < _FEW_LABELS)):
            metrics[name] = ridge_accuracy(
                features[chosen], labels[chosen], features[test], labels[test], self._penalty
            )
        return metrics


class FeaturePicture(looplib.Action):
    """Writes `features.png` into the run directory: the first two principal components of features, by class.

    Args:
      model: see `Contrastive`.
      images: float32 `[n, 8, 8]`.
      labels: integers `[n]`.
    """

    def __init__(self, model: keras.Model, images: np.ndarray, labels: np.ndarray) -> None:
        self._model, self._images, self._labels = model, images, labels

    def on_end(self, controller: looplib.Controller) -> None:
        """See `looplib.Action.on_end`."""
        if controller.model_dir and controller.is_chief:
            features = self._model(self._images[..., None], training=False)[0].numpy()
            pictures.write_points(os.path.join(controller.model_dir, "features.png"), features, self._labels)


def nt_xent(
    views: Sequence[tf.Tensor], others: Sequence[tf.Tensor], temperature: float
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Computes the normalized temperature-scaled cross entropy of this replica's examples.

    Args:
      views: two float tensors `[b, d]` of unit vectors, one row an example of this replica.
      others: the two tensors `[n, d]` of the global batch.
      temperature: divides the similarities.

    Returns:
      (float `[b]`, the mean loss of an example's two views; dict with the float `[b]` "found", the share of the two
      views whose other view is the most similar of all).
    """
    own, total = looplib.global_positions(views[0]), tf.shape(others[0])[0]
    losses, found = [], []
    for view, target in ((0, 1), (1, 0)):
        logits = tf.matmul(views[view], tf.concat(others, axis=0), transpose_b=True) / temperature
        logits -= 1e9 * tf.one_hot(view * total + own, 2 * total)  # a view is not compared with itself
        labels = target * total + own
        losses.append(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        found.append(tf.cast(tf.equal(tf.argmax(logits, axis=1, output_type=tf.int32), labels), tf.float32))
    return tf.add_n(losses) / 2, {"found": tf.add_n(found) / 2}


def ridge_accuracy(
    features: np.ndarray, labels: np.ndarray, test_features: np.ndarray, test_labels: np.ndarray, penalty: float
) -> float:
    """Fits a linear classifier by ridge regression, in closed form, and returns its accuracy on test examples.

    Args:
      features: float `[n, d]`.
      labels: integers `[n]` from 0 to 9.
      test_features: float `[m, d]`.
      test_labels: integers `[m]`.
      penalty: of squared weights, for features of unit variance, times n.
    """
    mean, deviation = features.mean(axis=0, dtype=np.float64), features.std(axis=0, dtype=np.float64) + 1e-6
    x, targets = (features - mean) / deviation, np.eye(_CLASSES)[labels]
    weights = np.linalg.solve(x.T @ x + penalty * len(x) * np.eye(x.shape[1]), x.T @ (targets - targets.mean(axis=0)))
    scores = (test_features - mean) / deviation @ weights + targets.mean(axis=0)
    return float(np.mean(scores.argmax(axis=1) == test_labels))


def make_model(width: int, projection: int) -> keras.Model:
    """Makes a model from images `[b, 8, 8, 1]` to (features `[b, width]`, projections `[b, projection]`).

    It has no batch normalization, so that it computes the function of an example for any division of a batch.
    """
    layers = keras.layers
    inputs = x = keras.Input((8, 8, 1))
    for filters in (32, 64):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    x = layers.Flatten()(layers.MaxPooling2D()(x))
    features = layers.Dense(width, activation="relu", name="features")(x)
    hidden = layers.Dense(width, activation="relu")(features)
    return keras.Model(inputs, (features, layers.Dense(projection, name="projections")(hidden)))


def build(config: Config) -> tuple[Contrastive, LinearProbe]:
    """Builds the experiment, under the strategy's scope.

    Raises:
      looplib.UsageError: for a setting out of its range.
    """
    positive = ("width", "projection", "temperature", "learning_rate", "decay_steps", "penalty")
    for name in positive:
        if not getattr(config, name) > 0:
            raise UsageError(f"--config.{name} is {getattr(config, name)}; expected a positive number")
    if not 0 <= config.augmentation <= 2:
        raise UsageError(f"--config.augmentation is {config.augmentation}; expected 0 to 2")
    data = image_data.digits_arrays()
    model = make_model(config.width, config.projection)
    rate = keras.optimizers.schedules.CosineDecay(config.learning_rate, config.decay_steps)
    optimizer = keras.optimizers.SGD(rate, momentum=0.9)
    return Contrastive(model, optimizer, config, data), LinearProbe(model, data, config.penalty)


if __name__ == "__main__":
    launch.run(build, Config(), train_steps=1000, eval_interval=250, global_batch_size=256)
