"""A binary that trains a DynamicEmbedding of words; each step has new ones, and rows are given to others."""

import os
import signal

import keras
import numpy as np
import tensorflow as tf

import looplib
from looplib import launch

EXAMPLES, STEPS = 480, 30
RNG = np.random.default_rng(5)
NUMBERS = RNG.zipf(1.4, (EXAMPLES, 4)) % 15 + np.arange(EXAMPLES)[:, None] // 32 * 5
WORDS = np.char.add("word ", NUMBERS.astype(str)).astype("S")
TARGETS = RNG.normal(size=(EXAMPLES, 1)).astype("float32")


class Mean(looplib.GradientTrainer):
    def __init__(self):
        inputs = keras.Input((4,), dtype="string")
        uniform = keras.initializers.RandomUniform(-0.5, 0.5, seed=3)
        self.table = looplib.DynamicEmbedding(
            3, 30, admit_after=2, full="evict", combiner="mean", initializer=uniform, name="words"
        )
        super().__init__(keras.Model(inputs, self.table(inputs)), keras.optimizers.Adam(0.1))

    def dataset(self, context):
        order = context.indices(EXAMPLES, shuffle=False)
        return order.map(lambda i: (tf.gather(WORDS, i), tf.gather(TARGETS, i)))

    def loss_fn(self, inputs):
        words, targets = inputs
        return tf.reduce_sum(tf.square(self.model(words, training=True) - targets), axis=1)


def kill(event):
    """Ends the process at the step that the environment variable KILLED_AT has."""
    if event.step == int(os.environ.get("KILLED_AT", "-1")):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    launch.run(
        lambda config: (Mean(), None), actions=[kill], global_batch_size=16, steps_per_loop=5, checkpoint_interval=5,
        train_steps=STEPS,
    )  # fmt: skip
