"""How good generated digits are, in the eyes of a classifier; what the trainers of generative models share.

The classifier is that of `trainers.image_classification`. Its weights are part of each checkpoint of the run, so that
all evaluations of a run use one classifier.
"""

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

import looplib
from looplib import UsageError
from trainers import image_classification, image_data, image_models

NUM_CLASSES = 10
IMAGE_SHAPE = (8, 8, 1)
_CONFIDENCE = 0.9
_CLASSIFIER_STEPS = 600
_ROWS = 10  # of a grid of samples, which has a column for each digit
_ZOOM = 6


def make_classifier() -> keras.Model:
    """Makes a classifier that is not trained yet and that no trainer updates.

    Returns:
      A model from float32 images `[b, 8, 8, 1]` in [0, 1] to (features `[b, 128]` of the layer before the last, logits
      `[b, 10]`), both float32.
    """
    network = image_models.build("cnn", IMAGE_SHAPE, NUM_CLASSES)
    classifier = keras.Model(network.inputs[0], [network.layers[-2].output, network.outputs[0]], name="classifier")
    classifier.trainable = False
    return classifier


def prepare_classifier(classifier: keras.Model, run_dir: str) -> None:
    """Gives a classifier the weights of a run, or trains it on the digits; in `Trainer.initialize`.

    Args:
      classifier: see `make_classifier`.
      run_dir: run directory of `trainers.image_classification` with its default model and data; "" trains.

    Raises:
      UsageError: if the directory has no checkpoint of that model.
    """
    network = image_models.build("cnn", IMAGE_SHAPE, NUM_CLASSES)
    if run_dir:
        saved = looplib.list_checkpoints(run_dir)
        if not saved:
            raise UsageError(
                f"--config.classifier={run_dir} has no checkpoint; expected a run directory, made by python -m "
                f"trainers.image_classification --model_dir={run_dir}"
            )
        try:
            status = tf.train.Checkpoint(model=network).restore(saved[0].path).expect_partial()
            status.assert_existing_objects_matched()
        except (AssertionError, ValueError) as error:
            raise UsageError(
                f"{saved[0].path} is of another model; --config.classifier expects a run of python -m "
                "trainers.image_classification with its default model and data"
            ) from error
    else:
        logging.info("training the classifier that rates the samples, for %d steps", _CLASSIFIER_STEPS)
        trainer = image_classification.ImageClassifier(network, keras.optimizers.Adam(1e-3), image_data.digits())
        with looplib.Controller(looplib.RunConfig(global_batch_size=64), trainer=trainer, writers=[]) as controller:
            controller.train(_CLASSIFIER_STEPS)
    classifier.set_weights(network.get_weights())


def keyed_normal(seeds: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Draws standard normal numbers that depend on each example's seed alone, not on the batch or the replica.

    Args:
      seeds: int32 `[b, 2]`, of `InputContext.indices`.
      shape: the shape of one example's numbers.

    Returns:
      float32 `[b, *shape]`.
    """
    numbers = tf.TensorSpec(shape, tf.float32)
    return tf.map_fn(lambda seed: tf.random.stateless_normal(shape, seed), seeds, fn_output_signature=numbers)


def frechet_distance(first: np.ndarray, second: np.ndarray) -> float:
    """Computes the Frechet distance between Gaussians that are fitted to two sets of features.

    This is the FID (Heusel et al., 2017) in other features than Inception's. It is larger for small sets: compare
    distances of sets of one size.

    Args:
      first: features `[n, d]`.
      second: features `[m, d]`.

    Returns:
      |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), with the means m and the covariances C.
    """
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    covariances = [np.cov(features, rowvar=False) for features in (first, second)]
    values, vectors = np.linalg.eigh(covariances[0])
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    # C1 C2 has the eigenvalues of this symmetric matrix.
    values = np.linalg.eigvalsh(root @ covariances[1] @ root)
    traces = sum(np.trace(covariance) for covariance in covariances) - 2 * np.sqrt(np.maximum(values, 0)).sum()
    return float(np.sum((first.mean(axis=0) - second.mean(axis=0)) ** 2) + traces)


def nearest_distance(images: np.ndarray, others: np.ndarray) -> float:
    """Computes how far images are from the nearest of some others.

    Args:
      images: float `[n, ...]`.
      others: float `[m, ...]`.

    Returns:
      The Euclidean distance between an image and the nearest other one, as the mean over the images.
    """
    first, second = (np.asarray(each, np.float64).reshape(len(each), -1) for each in (images, others))
    squares = (first**2).sum(axis=1)[:, None] + (second**2).sum(axis=1) - 2 * first @ second.T
    return float(np.sqrt(np.maximum(squares.min(axis=1), 0)).mean())


def image_grid(images: np.ndarray) -> np.ndarray:
    """Arranges images in rows of ten, enlarged and with a margin.

    Args:
      images: float `[n, height, width, 1]` in [0, 1].

    Returns:
      uint8 `[rows * (height + 1) * 6, 10 * (width + 1) * 6, 1]`; the last row is filled up with gray.
    """
    framed = np.pad(images[..., 0], ((0, -len(images) % NUM_CLASSES), (0, 1), (0, 1)), constant_values=0.5)
    number, height, width = framed.shape
    grid = framed.reshape(number // NUM_CLASSES, NUM_CLASSES, height, width).transpose(0, 2, 1, 3)
    grid = grid.reshape(-1, NUM_CLASSES * width).repeat(_ZOOM, axis=0).repeat(_ZOOM, axis=1)
    return np.round(255 * np.clip(grid, 0, 1)).astype(np.uint8)[..., None]


class SampleEvaluator(looplib.Adapter, looplib.Evaluator):
    """Evaluates as many samples as half of the training set has, of all digits in turn.

    The random numbers depend on the run's seed only: each evaluation of a run uses equal ones. The metrics:

    - `distance`: the Frechet distance between the samples and the first half of the training images, in the
      classifier's features.
    - `real_distance`: that distance between the two halves, which have equal shares of each digit.
    - `recognised`: the share of samples that the classifier assigns to some digit with a probability above 0.9.
    - `as_asked`: the share of samples that the classifier takes for the digit that was asked for.
    - `nearest`: the mean distance in pixels between a sample and the nearest training image, which is 0 for copies.
    - `real_nearest`: that distance for the test images.

    After each evaluation, the first 100 samples are shown as the image `samples`.

    Args:
      model: the model that makes the samples.
      averages: of its weights; None for none.
      classifier: see `make_classifier`; the trainer prepares it, see `prepare_classifier`.
      noise_shape: the shape of the noise of one sample.
    """

    def __init__(
        self,
        model: keras.Model,
        averages: looplib.WeightAverages | None,
        classifier: keras.Model,
        noise_shape: Sequence[int],
    ) -> None:
        self.model, self.averages, self.classifier = model, averages, classifier
        self._noise_shape = tuple(noise_shape)
        (train, labels), (test, _) = image_data.digits_arrays()
        self._train = train[np.argsort(labels, kind="stable")][..., None]  # whose even and odd rows are the two halves
        self._real_nearest = nearest_distance(test, train)
        self._images: list[np.ndarray] = []
        self._features: list[np.ndarray] = []

    @abc.abstractmethod
    def sample(self, noise: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """Generates images.

        Args:
          noise: float32 `[b, *noise_shape]`, standard normal.
          labels: int64 `[b]`, the digits to generate.

        Returns:
          float32 `[b, 8, 8, 1]` in [0, 1].
        """

    def export(self) -> looplib.Exported:
        """See `looplib.Evaluator.export`: makes images of noise and labels."""
        noise = tf.TensorSpec([None, *self._noise_shape], name="noise")
        signature = (noise, tf.TensorSpec([None], tf.int64, name="labels"))
        return looplib.Exported(lambda inputs: self.sample(*inputs), signature, self.model, self.averages)

    @property
    def own_actions(self) -> Sequence[Callable[[looplib.Event], object]]:
        """See `looplib.Adapter.own_actions`."""
        return (self._show_grid,)

    def dataset(self, context: looplib.InputContext) -> tf.data.Dataset:
        """See `looplib.Evaluator.dataset`."""

        def rows(ids: tf.Tensor, seeds: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return keyed_normal(seeds, self._noise_shape), ids % NUM_CLASSES

        return context.indices(len(self._train) // 2, seeds=True).map(rows, tf.data.AUTOTUNE)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """See `looplib.Evaluator.evaluating`."""
        self._images, self._features = [], []
        with super().evaluating():
            yield

    def step_fn(self, inputs: tuple[tf.Tensor, tf.Tensor]) -> dict[str, Any]:
        """Generates and classifies images of (noise, labels)."""
        noise, labels = inputs
        images = self.sample(noise, labels)
        features, logits = self.classifier(images, training=False)
        return {
            "recognised": tf.reduce_max(tf.nn.softmax(logits), axis=1) > _CONFIDENCE,
            "as_asked": tf.equal(tf.argmax(logits, axis=1), labels),
            "samples": looplib.each((images, features)),
        }

    def collect(self, outputs: list[dict[str, Any]]) -> None:
        """Keeps the images and their features."""
        for output in outputs:
            images, features = output["samples"]
            self._images.append(images.numpy())
            self._features.append(features.numpy())

    def loop_end(self, metrics: dict[str, Any]) -> Mapping[str, Any]:
        """Adds the distances."""
        real = self.classifier(self._train, training=False)[0].numpy()
        return {
            **metrics,
            "distance": frechet_distance(np.concatenate(self._features), real[::2]),
            "real_distance": frechet_distance(real[1::2], real[::2]),
            "nearest": nearest_distance(np.concatenate(self._images), self._train),
            "real_nearest": self._real_nearest,
        }

    def _show_grid(self, event: looplib.Event) -> None:
        controller = event.controller
        if event.split != "train" and controller.is_chief:
            grid = image_grid(np.concatenate(self._images)[: _ROWS * NUM_CLASSES])
            controller.show({"samples": looplib.image(grid[None])}, event.split)
