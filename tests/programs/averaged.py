"""A binary whose checkpoints are averaged: a small network with batch normalization, in two phases."""

import dataclasses
import os
import signal

import keras
import numpy as np
import tensorflow as tf
import tf_keras

import looplib
from looplib import launch

EXAMPLES, BATCH = 64, 16
X = np.random.RandomState(0).randn(EXAMPLES, 5).astype("float32")
Y = X.sum(axis=1, keepdims=True)


@dataclasses.dataclass
class Config:
    family: str = "keras"
    normalizes: bool = True
    average_decay: float = 0.0  # none


class Net(looplib.GradientTrainer):
    def __init__(self, config):
        layers = (keras if config.family == "keras" else tf_keras).layers
        norm = layers.BatchNormalization if config.normalizes else lambda name: layers.Activation("tanh", name=name)
        parts = [layers.InputLayer((5,)), layers.Dense(4, name="first"), norm(name="norm_1"), layers.Activation("relu")]
        parts += [layers.Dense(3, name="second"), norm(name="norm_2"), layers.Dense(1, name="last")]
        family = keras if config.family == "keras" else tf_keras
        phases = [looplib.Phase(until=7, train="last"), looplib.Phase(learning_rate=0.04)]
        settings = {"phases": phases, "average_decay": config.average_decay or None}
        super().__init__(family.Sequential(parts), family.optimizers.Adam(0.05), **settings)

    def dataset(self, context):
        return context.indices(EXAMPLES, shuffle=False).map(lambda i: (tf.gather(X, i), tf.gather(Y, i)))

    def loss_fn(self, inputs):
        return tf.square(self.model(inputs[0], training=True) - inputs[1])[:, 0]


def build(config):
    return Net(config), None


def kill(event):
    """Ends the process at the step that the environment variable KILLED_AT has."""
    if event.step == int(os.environ.get("KILLED_AT", "-1")):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    launch.run(
        build,
        Config(),
        actions=[kill],
        global_batch_size=BATCH,
        steps_per_loop=4,
        checkpoint_interval=4,
        train_steps=16,
    )
