"""The trainer: a loss. looplib computes the gradient and updates the weights."""

import keras
import looplib
import tensorflow as tf

from my_project import data
from my_project.model import make_model
from my_project.settings import Config


class Classifier(looplib.GradientTrainer):
    """Minimizes the cross-entropy of the classes."""

    def __init__(self, config: Config) -> None:
        super().__init__(make_model(config), keras.optimizers.Adam(config.learning_rate))
        self.config = config

    def dataset(self, context: looplib.InputContext) -> tf.data.Dataset:
        """Returns the training data, in a new order in each epoch."""
        return context.resident(data.read(self.config, "train"))

    def loss_fn(self, inputs: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Returns the loss of each example of a batch, and further metrics."""
        features, classes = inputs
        logits = self.model(features, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(classes, logits)
        return losses, {"accuracy": tf.equal(tf.argmax(logits, 1, tf.int32), classes)}


def make_trainer(config: Config) -> Classifier:
    """Returns the trainer with its model."""
    return Classifier(config)
