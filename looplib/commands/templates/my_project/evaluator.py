"""The evaluator: what is measured on the test data."""

import keras
import looplib
import tensorflow as tf

from my_project import data
from my_project.settings import Config


class Evaluation(looplib.Evaluator):
    """Measures the loss and the accuracy."""

    def __init__(self, model: keras.Model, config: Config) -> None:
        super().__init__(model)
        self.config = config

    def dataset(self, context: looplib.InputContext) -> tf.data.Dataset:
        """Returns the test data, each example once."""
        return context.resident(data.read(self.config, "test"))

    def step_fn(self, inputs: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns metrics with one value for each example of a batch; looplib averages them over all examples."""
        features, classes = inputs
        logits = self.model(features, training=False)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(classes, logits)
        return {"loss": losses, "accuracy": tf.equal(tf.argmax(logits, 1, tf.int32), classes)}
