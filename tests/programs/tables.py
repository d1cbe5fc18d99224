"""Trains a ShardedEmbedding; prints the device of each part, and the size of the gradient that a step sends."""

import keras
import numpy as np
import tensorflow as tf

import looplib

ROWS, DIM, EXAMPLES = 1000, 8, 6400
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, ROWS // 2, (EXAMPLES, 8))
TARGETS = RNG.normal(size=(EXAMPLES, 1)).astype("float32")


class Mean(looplib.GradientTrainer):
    def __init__(self):
        inputs = keras.Input((8,), dtype="int64")
        uniform = keras.initializers.RandomUniform(seed=3)
        self.table = looplib.ShardedEmbedding(ROWS, DIM, shards=4, combiner="mean", initializer=uniform)
        super().__init__(keras.Model(inputs, self.table(inputs)), keras.optimizers.Adagrad(0.1))
        for part in self.table.tables:
            print("held by", part.path, part.value.device, part.shape[0], "rows", flush=True)

    def dataset(self, context):
        return context.indices(EXAMPLES).map(lambda i: (tf.gather(IDS, i), tf.gather(TARGETS, i)))

    def loss_fn(self, inputs):
        ids, targets = inputs
        return tf.reduce_sum(tf.square(self.model(ids, training=True) - targets), axis=1)


if __name__ == "__main__":
    looplib.launch.run(lambda config: (Mean(), None), global_batch_size=64)
