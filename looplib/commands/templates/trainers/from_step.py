"""The trainer: a step of your own, from a batch to the updated weights."""

import keras
import looplib
import tensorflow as tf

from my_project import data
from my_project.model import make_model
from my_project.settings import Config


class Stepper(looplib.Trainer):
    """Minimizes the cross-entropy of the classes."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.model = make_model(config)
        self.optimizer = keras.optimizers.Adam(config.learning_rate)

    def dataset(self, context: looplib.InputContext) -> tf.data.Dataset:
        """Returns the training data, in a new order in each epoch."""
        return context.resident(data.read(self.config, "train"))

    def step_fn(self, inputs: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Does one step on the batch of one replica; returns metrics with one value for each example."""
        features, classes = inputs
        with tf.GradientTape() as tape:
            logits = self.model(features, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(classes, logits)
            loss = self.global_mean(losses)  # this replica's part of the mean over the global batch
        variables = self.model.trainable_variables
        self.apply_gradients(self.optimizer, zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": losses, "accuracy": tf.equal(tf.argmax(logits, 1, tf.int32), classes)}


def make_trainer(config: Config) -> Stepper:
    """Returns the trainer with its model."""
    return Stepper(config)
