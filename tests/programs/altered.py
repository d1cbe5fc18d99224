"""A binary in which one worker changes one bit of its copy of a variable, as faulty memory does: `ALTERED=1:7:kernel`."""

import json
import os

import keras
import numpy as np
import tensorflow as tf

import looplib
from benchmarks.corruptions import flip_bit
from looplib import launch

EXAMPLES = 64
X = np.random.RandomState(0).randn(EXAMPLES, 5).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Net(looplib.GradientTrainer):
    def __init__(self):
        keras.utils.set_random_seed(1)
        layers = keras.layers
        model = keras.Sequential([
            layers.Input((5,)), layers.Dense(4, name="first"), layers.BatchNormalization(), layers.Dropout(0.1), layers.Dense(1),
        ])  # fmt: skip
        super().__init__(model, keras.optimizers.Adam(0.05), average_decay=0.9)

    def dataset(self, context):
        return context.indices(EXAMPLES).map(lambda i: (tf.gather(X, i), tf.gather(Y, i)))

    def loss_fn(self, inputs):
        return tf.square(self.model(inputs[0], training=True) - inputs[1])[:, 0]


def build(_):
    return Net(), None


_done = []


def alter(event):
    """Changes the bit once, in the worker, at the step and in the variable that the environment names."""
    worker, step, name = os.environ.get("ALTERED", "-1:0:").split(":")
    if _index() == int(worker) and event.step == int(step) and not _done:
        _done.append(step)
        trainer = event.controller.loops["train"].task
        variables = [*trainer.model.variables, *trainer.optimizer.variables]
        (variable, *_) = [one.value for one in variables if name in one.path]
        (part,) = variable.distribute_strategy.experimental_local_results(variable)
        flip_bit(part, bit=20)


def _index():
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


if __name__ == "__main__":
    launch.run(
        build,
        actions=[alter],
        global_batch_size=16,
        steps_per_loop=2,
        checkpoint_interval=4,
        train_steps=16,
    )
