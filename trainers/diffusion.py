"""Trains a diffusion model on scikit-learn's digits: `python -m trainers.diffusion --model_dir=/tmp/diffusion`.

A small U-Net predicts the noise in a noisy image of a given digit (Ho et al., 2020), and images are made from noise by
DDIM (Song et al., 2021). `--helpfull` lists all flags.
"""

import dataclasses
import functools
import math

import keras
import tensorflow as tf

import looplib
from looplib import UsageError, launch
from trainers import image_data, sample_quality
from trainers.sample_quality import IMAGE_SHAPE, NUM_CLASSES

_LAST_TIME = 0.99  # at time 1 an image is noise alone, of which the image cannot be computed


@dataclasses.dataclass
class Config:
    """The settings of this experiment, each a flag `--config.<field>=<value>`.

    Attributes:
      width: channels at 8x8 pixels, a multiple of 8; there are twice as many at 4x4.
      learning_rate: the rate of Adam.
      sampling_steps: steps of DDIM.
      average_decay: decay of the averages of the weights, which evaluations use.
      classifier: run directory of trainers.image_classification, whose classifier rates the samples; if empty, a new
        run trains one at its start.
    """

    width: int = 32
    learning_rate: float = 2e-3
    sampling_steps: int = 25
    average_decay: float = 0.995
    classifier: str = ""


def make_model(width: int) -> keras.Model:
    """Makes a U-Net with two resolutions.

    Args:
      width: channels at the higher resolution.

    Returns:
      A model from (noisy images float32 `[b, 8, 8, 1]`, times float32 `[b]` in [0, 1], labels `[b]`) to the noise in
      the images, float32 `[b, 8, 8, 1]`.
    """
    layers = keras.layers
    images, times = keras.Input(IMAGE_SHAPE), keras.Input(())
    labels = keras.Input((), dtype="int64")
    angles = times[:, None] * (2.0 ** keras.ops.arange(8, dtype="float32") * math.pi / 2)
    known = layers.Concatenate()([keras.ops.sin(angles), keras.ops.cos(angles), times[:, None]])
    known = layers.Add()([layers.Dense(4 * width)(known), layers.Embedding(NUM_CLASSES, 4 * width)(labels)])
    known = layers.Dense(4 * width, "silu")(layers.Activation("silu")(known))

    high = _block(layers.Conv2D(width, 3, padding="same")(images), known, width)
    low = _block(layers.Conv2D(2 * width, 3, strides=2, padding="same")(high), known, 2 * width)
    low = _block(low, known, 2 * width)
    raised = layers.Conv2D(width, 3, padding="same")(layers.UpSampling2D()(low))
    high = _block(layers.Concatenate()([raised, high]), known, width)
    high = layers.Activation("silu")(layers.GroupNormalization(8)(high))
    noise = layers.Conv2D(1, 3, padding="same", kernel_initializer="zeros", dtype="float32")(high)
    return keras.Model([images, times, labels], noise, name="u_net")


def _block(images: keras.KerasTensor, known: keras.KerasTensor, width: int) -> keras.KerasTensor:
    """Adds two convolutions, which get the time and the label, to a copy of their input."""
    layers = keras.layers
    hidden = layers.Activation("silu")(layers.GroupNormalization(8)(images))
    hidden = layers.Conv2D(width, 3, padding="same")(hidden)
    hidden = layers.Add()([hidden, layers.Reshape((1, 1, width))(layers.Dense(width)(known))])
    hidden = layers.Activation("silu")(layers.GroupNormalization(8)(hidden))
    hidden = layers.Conv2D(width, 3, padding="same", kernel_initializer="zeros")(hidden)
    if images.shape[-1] != width:
        images = layers.Conv2D(width, 1)(images)
    return layers.Add()([images, hidden])


def signal_and_noise(times: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes the cosine schedule (Nichol and Dhariwal, 2021).

    Args:
      times: float32, from 0 (an image) to 1 (noise).

    Returns:
      The factors of the image and of the noise in a noisy image, each of the shape of `times`; the sum of their squares
      is 1.
    """
    angles = times * (math.pi / 2)
    return tf.cos(angles), tf.sin(angles)


class DiffusionTrainer(looplib.GradientTrainer):
    """Trains the U-Net on the squared error of the predicted noise.

    Args:
      config: the settings.
      classifier: the classifier of the evaluator, which `initialize` prepares.
    """

    def __init__(self, config: Config, classifier: keras.Model) -> None:
        model, optimizer = make_model(config.width), keras.optimizers.Adam(config.learning_rate)
        super().__init__(model, optimizer, average_decay=config.average_decay, report=("gradient_norm",))
        self.classifier = classifier
        self._run_dir = config.classifier

    def initialize(self) -> None:
        """See `looplib.Trainer.initialize`."""
        sample_quality.prepare_classifier(self.classifier, self._run_dir)

    def dataset(self, context: looplib.InputContext) -> tf.data.Dataset:
        """Makes batches of (images `[b, 8, 8, 1]` in [-1, 1], labels `[b]`, times `[b]`, noise `[b, 8, 8, 1]`)."""
        (images, labels), _ = image_data.digits_arrays()
        images = 2 * images[..., None] - 1

        def rows(ids: tf.Tensor, seeds: tf.Tensor) -> tuple[tf.Tensor, ...]:
            uniform = functools.partial(tf.random.stateless_uniform, [])
            # Other seeds than those of the noise: the numbers of one seed depend on each other.
            times = tf.map_fn(uniform, seeds + [0, 1], fn_output_signature=tf.float32)
            noise = sample_quality.keyed_normal(seeds, IMAGE_SHAPE)
            return tf.gather(images, ids), tf.gather(labels, ids), times, noise

        return context.indices(len(images), seeds=True).map(rows, tf.data.AUTOTUNE)

    def loss_fn(self, inputs: tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]) -> tf.Tensor:
        """Returns the squared error of the predicted noise."""
        images, labels, times, noise = inputs
        signal, share = signal_and_noise(times[:, None, None, None])
        predicted = self.model([signal * images + share * noise, times, labels], training=True)
        return tf.square(predicted - noise)


class DiffusionEvaluator(sample_quality.SampleEvaluator):
    """Evaluates the images that DDIM makes, with the averaged weights.

    Args:
      trainer: the trainer, whose model, averages and classifier it uses.
      sampling_steps: see `Config`.
    """

    def __init__(self, trainer: DiffusionTrainer, sampling_steps: int) -> None:
        super().__init__(trainer.model, trainer.averages, trainer.classifier, IMAGE_SHAPE)
        self._steps = sampling_steps

    def sample(self, noise: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """See `SampleEvaluator.sample`; DDIM without random numbers of its own (eta = 0)."""
        times = tf.linspace(_LAST_TIME, 0.0, self._steps + 1)

        def step(noisy: tf.Tensor, pair: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
            time, following = pair
            signal, share = signal_and_noise(time)
            predicted = self.model([noisy, tf.fill(tf.shape(labels), time), labels], training=False)
            images = tf.clip_by_value((noisy - share * predicted) / signal, -1.0, 1.0)
            predicted = (noisy - signal * images) / share
            signal, share = signal_and_noise(following)
            return signal * images + share * predicted

        images = tf.foldl(step, (times[:-1], times[1:]), initializer=noise)
        return tf.clip_by_value((images + 1) / 2, 0.0, 1.0)


def build(config: Config) -> tuple[DiffusionTrainer, DiffusionEvaluator]:
    """Builds the experiment, under the strategy's scope.

    Args:
      config: the settings.

    Returns:
      The trainer and its evaluator.

    Raises:
      looplib.UsageError: for settings out of range.
    """
    if config.width < 8 or config.width % 8:
        raise UsageError(f"--config.width is {config.width}; expected a positive multiple of 8, such as 32")
    if not config.learning_rate > 0 or config.sampling_steps < 1:
        raise UsageError(
            f"--config.learning_rate is {config.learning_rate} and --config.sampling_steps {config.sampling_steps}; "
            "expected a positive rate and at least 1 step"
        )
    trainer = DiffusionTrainer(config, sample_quality.make_classifier())
    return trainer, DiffusionEvaluator(trainer, config.sampling_steps)


if __name__ == "__main__":
    launch.run(build, Config(), train_steps=3000, eval_interval=1000)
