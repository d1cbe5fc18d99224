"""Trains a GAN on scikit-learn's digits: `python -m trainers.gan --model_dir=/tmp/gan`.

A generator makes an image of a given digit from noise, and a discriminator tells such images from real ones
(Goodfellow et al., 2014), with several updates of the discriminator for each one of the generator. `--helpfull` lists
all flags.
"""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

import looplib
from looplib import UsageError, launch
from trainers import image_data, sample_quality
from trainers.sample_quality import IMAGE_SHAPE, NUM_CLASSES


@dataclasses.dataclass
class Config:
    """The settings of this experiment, each a flag `--config.<field>=<value>`.

    Attributes:
      discriminator_steps: updates of the discriminator for each update of the generator, on other real images each.
      width: units of each hidden layer.
      noise_size: random numbers that the generator makes an image of.
      generator_rate: learning rate of the generator.
      discriminator_rate: learning rate of the discriminator.
      gradient_penalty: factor of the squared gradient of the discriminator at real images.
      average_decay: decay of the averages of the generator's weights, which evaluations use.
      classifier: run directory of trainers.image_classification, whose classifier rates the samples; if empty, a new
        run trains one at its start.
    """

    discriminator_steps: int = 2
    width: int = 256
    noise_size: int = 32
    generator_rate: float = 5e-4
    discriminator_rate: float = 5e-4
    gradient_penalty: float = 1.0
    average_decay: float = 0.995
    classifier: str = ""


def make_generator(noise_size: int, width: int) -> keras.Model:
    """Makes a model from (noise float32 `[b, noise_size]`, labels `[b]`) to images float32 `[b, 8, 8, 1]` in [0, 1]."""
    noise, labels = keras.Input((noise_size,)), keras.Input((), dtype="int64")
    hidden = keras.layers.Concatenate()([noise, keras.layers.Embedding(NUM_CLASSES, noise_size)(labels)])
    for _ in range(3):
        hidden = keras.layers.Dense(width, "leaky_relu")(hidden)
    pixels = keras.layers.Dense(64, "sigmoid", dtype="float32")(hidden)
    return keras.Model([noise, labels], keras.layers.Reshape(IMAGE_SHAPE)(pixels), name="generator")


def make_discriminator(width: int) -> keras.Model:
    """Makes a model from (images float32 `[b, 8, 8, 1]`, labels `[b]`) to logits float32 `[b]`, high for real images.

    The label takes part by a projection (Miyato and Koyama, 2018).
    """
    images, labels = keras.Input(IMAGE_SHAPE), keras.Input((), dtype="int64")
    hidden = keras.layers.Flatten()(images)
    for _ in range(3):
        hidden = keras.layers.Dense(width, "leaky_relu")(hidden)
    of_label = keras.layers.Dot(1, dtype="float32")([hidden, keras.layers.Embedding(NUM_CLASSES, width)(labels)])
    logits = keras.layers.Add(dtype="float32")([keras.layers.Dense(1, dtype="float32")(hidden), of_label])
    return keras.Model([images, labels], keras.layers.Reshape(())(logits), name="discriminator")


class GanTrainer(looplib.Trainer):
    """Trains a generator against a discriminator, on the logistic losses.

    Args:
      config: the settings.
      classifier: the classifier of the evaluator, which `initialize` prepares.

    Attributes:
      averages: averages of the generator's weights.
    """

    loss_name = "discriminator_loss"

    def __init__(self, config: Config, classifier: keras.Model) -> None:
        self.generator = make_generator(config.noise_size, config.width)
        self.discriminator = make_discriminator(config.width)
        self.generator_optimizer = keras.optimizers.Adam(config.generator_rate, beta_1=0.5)
        self.generator_optimizer.build(self.generator.trainable_variables)
        self.discriminator_optimizer = keras.optimizers.Adam(config.discriminator_rate, beta_1=0.5)
        self.discriminator_optimizer.build(self.discriminator.trainable_variables)
        self.averages = looplib.WeightAverages(self.generator.trainable_variables, config.average_decay)
        self.classifier = classifier
        self._config = config

    def initialize(self) -> None:
        """See `looplib.Trainer.initialize`."""
        sample_quality.prepare_classifier(self.classifier, self._config.classifier)

    def dataset(self, context: looplib.InputContext) -> tf.data.Dataset:
        """Makes batches of (images `[b, steps, 8, 8, 1]`, labels `[b, steps]`, noise `[b, steps + 1, noise_size]`).

        Each example has an image for each update of the discriminator, and noise also for the generator's.
        """
        (images, labels), _ = image_data.digits_arrays()
        steps, number = self._config.discriminator_steps, len(images)

        def rows(ids: tf.Tensor, seeds: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            ids = (ids[:, None] + tf.range(steps, dtype=tf.int64) * (number // steps)) % number
            noise = sample_quality.keyed_normal(seeds, (steps + 1, self._config.noise_size))
            return tf.gather(images[..., None], ids), tf.gather(labels, ids), noise

        return context.indices(number, seeds=True).map(rows, tf.data.AUTOTUNE)

    def step_fn(self, inputs: tuple[tf.Tensor, tf.Tensor, tf.Tensor]) -> dict[str, Any]:
        """Updates the discriminator `discriminator_steps` times and the generator once."""
        images, labels, noise = inputs
        for turn in range(self._config.discriminator_steps):
            metrics = self._update_discriminator(images[:, turn], labels[:, turn], noise[:, turn])
        generator_losses = self._update_generator(labels[:, 0], noise[:, -1])
        self.averages.update()
        return {**metrics, "generator_loss": generator_losses}

    def _update_discriminator(self, real: tf.Tensor, labels: tf.Tensor, noise: tf.Tensor) -> dict[str, tf.Tensor]:
        generated = self.generator([noise, labels], training=True)
        variables = self.discriminator.trainable_variables
        with tf.GradientTape() as tape:
            with tf.GradientTape() as of_images:
                of_images.watch(real)
                real_logits = self.discriminator([real, labels], training=True)
            # The penalty on real images, R1, of Mescheder et al. (2018).
            slopes = of_images.gradient(real_logits, real)
            penalties = self._config.gradient_penalty / 2 * tf.reduce_sum(slopes**2, axis=[1, 2, 3])
            generated_logits = self.discriminator([generated, labels], training=True)
            losses = tf.nn.softplus(-real_logits) + tf.nn.softplus(generated_logits)
            loss = self.global_mean(losses + penalties)
        self.discriminator_optimizer.apply(tape.gradient(loss, variables), variables)
        found = tf.stack([real_logits > 0, generated_logits <= 0], axis=1)
        return {"discriminator_loss": losses, "penalty": penalties, "told_apart": found}

    def _update_generator(self, labels: tf.Tensor, noise: tf.Tensor) -> tf.Tensor:
        variables = self.generator.trainable_variables
        with tf.GradientTape() as tape:
            logits = self.discriminator([self.generator([noise, labels], training=True), labels], training=True)
            losses = tf.nn.softplus(-logits)
            loss = self.global_mean(losses)
        self.generator_optimizer.apply(tape.gradient(loss, variables), variables)
        return losses


class GanEvaluator(sample_quality.SampleEvaluator):
    """Evaluates the images of the generator, with its averaged weights.

    Args:
      trainer: the trainer, whose generator, averages and classifier it uses.
      noise_size: see `Config`.
    """

    def __init__(self, trainer: GanTrainer, noise_size: int) -> None:
        super().__init__(trainer.generator, trainer.averages, trainer.classifier, (noise_size,))

    def sample(self, noise: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """See `SampleEvaluator.sample`."""
        return self.model([noise, labels], training=False)


def build(config: Config) -> tuple[GanTrainer, GanEvaluator]:
    """Builds the experiment, under the strategy's scope.

    Args:
      config: the settings.

    Returns:
      The trainer and its evaluator.

    Raises:
      looplib.UsageError: for sizes or rates that are not positive.
    """
    for name in ("discriminator_steps", "width", "noise_size", "generator_rate", "discriminator_rate"):
        if not getattr(config, name) > 0:
            raise UsageError(f"--config.{name} is {getattr(config, name)}; expected a number above 0")
    if not config.gradient_penalty >= 0:
        raise UsageError(f"--config.gradient_penalty is {config.gradient_penalty}; expected 0 or more")
    trainer = GanTrainer(config, sample_quality.make_classifier())
    return trainer, GanEvaluator(trainer, config.noise_size)


if __name__ == "__main__":
    launch.run(build, Config(), train_steps=4000, eval_interval=1000)
