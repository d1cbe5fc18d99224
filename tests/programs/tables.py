"""Trains a ShardedEmbedding; prints where each part is, and its rows."""

import dataclasses
import importlib
import os

import numpy as np
import tensorflow as tf

import looplib

ROWS, DIM, EXAMPLES = 1000, 8, 6400
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, ROWS // 2, (EXAMPLES, 8))
IDS[2000, 3] = int(os.environ.get("WRONG_ID", IDS[2000, 3]))
TARGETS = RNG.normal(size=(EXAMPLES, 1)).astype("float32")


@dataclasses.dataclass
class Config:
    family: str = "keras"
    plain: bool = False


class Mean(looplib.GradientTrainer):
    def __init__(self, family):
        keras = importlib.import_module(family)
        inputs = keras.Input((8,), dtype="int64")
        uniform = keras.initializers.RandomUniform(seed=3)
        self.table = looplib.ShardedEmbedding(
            ROWS, DIM, shards=int(os.environ.get("SHARDS", "4")), combiner="mean", initializer=uniform, family=family
        )
        super().__init__(keras.Model(inputs, self.table(inputs)), keras.optimizers.Adagrad(0.1))
        for part in self.table.tables:
            variable = part.value if family == "keras" else part
            print("held by", getattr(part, "path", part.name), variable.device, part.shape[0], "rows", flush=True)

    def dataset(self, context):
        return context.indices(EXAMPLES).map(lambda i: (tf.gather(IDS, i), tf.gather(TARGETS, i)))

    def loss_fn(self, inputs):
        ids, targets = inputs
        return tf.reduce_sum(tf.square(self.model(ids, training=True) - targets), axis=1)


class PlainMean(Mean):
    def step_fn(self, inputs):
        with tf.GradientTape() as tape:
            losses = self.loss_fn(inputs)
            loss = self.global_mean(losses)
        variables = self.model.trainable_variables
        watched = [getattr(one, "value", one) if not isinstance(one, tf.Variable) else one for one in variables]
        self.optimizer.apply_gradients(zip(tape.gradient(loss, watched), variables))
        return {"loss": losses}


def build(config):
    return (PlainMean if config.plain else Mean)(config.family), None


if __name__ == "__main__":
    looplib.launch.run(build, Config(), global_batch_size=64)
