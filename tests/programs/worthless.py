"""A binary whose training is worthless: it has a dead layer.

The same network is a healthy one with other arguments.
"""

import dataclasses

import keras as keras3
import numpy as np
import tensorflow as tf

import looplib
from looplib import launch

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(512, 8)).astype("float32")
Y = np.argmax(X[:, :3] + 0.1 * RANDOM.normal(size=(512, 3)), axis=1)
OTHER_X = RANDOM.normal(size=(128, 8)).astype("float32")
OTHER_Y = np.argmax(OTHER_X[:, :3], axis=1)


@dataclasses.dataclass
class Config:
    """Whether the training is worthless."""

    worthless: bool = True


class Network(looplib.GradientTrainer):
    """A classifier with two branches, of which one may be dead, and the loss may not depend on the other."""

    def __init__(self, keras, bias="zeros", detached=False, frozen=False, dropout=0.0):
        inputs = keras.Input((8,))
        layers = keras.layers
        hidden = layers.Dense(16, "relu", bias_initializer=bias, name="hidden")(inputs)
        hidden = layers.BatchNormalization(name="norm")(hidden) if dropout else hidden
        hidden = layers.Dropout(dropout, seed=1)(hidden) if dropout else hidden
        side = layers.Dense(4, name="side", trainable=not frozen)
        outputs = [layers.Dense(3, name="head")(hidden), side(inputs)]
        super().__init__(keras.Model(inputs, outputs), keras.optimizers.Adam(0.01))
        self._detached = detached

    def dataset(self, context):
        return context.indices(512).map(lambda ids: (tf.gather(X, ids), tf.gather(Y, ids)))

    def loss_fn(self, inputs):
        x, y = inputs
        logits, side = self.model(x, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        side = tf.stop_gradient(side) if self._detached else side
        return losses + 0.01 * tf.reduce_mean(tf.square(side), axis=1)


class NetworkEvaluator(looplib.Evaluator):
    """Evaluates the classifier on other examples."""

    def dataset(self, context):
        return context.indices(128).map(lambda ids: (tf.gather(OTHER_X, ids), tf.gather(OTHER_Y, ids)))

    def step_fn(self, inputs):
        x, y = inputs
        return {"accuracy": tf.equal(tf.argmax(self.model(x, training=False)[0], axis=1), y)}

    def predict_fn(self, inputs):
        return {"logits": self.model(inputs[0], training=False)[0]}


def build(config):
    """Returns the trainer and the evaluator, under the strategy's scope."""
    trainer = Network(keras3, bias=keras3.initializers.Constant(-100.0) if config.worthless else "zeros")
    return trainer, NetworkEvaluator(trainer.model)


if __name__ == "__main__":
    launch.run(
        build, Config(), actions=[looplib.LearningWarnings(every=10, share=1.0)], global_batch_size=16,
        steps_per_loop=10, train_steps=160, eval_interval=40, learning_warnings=False,
    )  # fmt: skip
