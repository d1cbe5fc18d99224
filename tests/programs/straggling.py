"""A binary of which one worker is slow: `python -m straggling --config.slow=step`. It compares the workers often."""

import dataclasses
import json
import os
import time

import keras
import numpy as np
import tensorflow as tf

import looplib
from looplib import launch
from looplib.actions import stragglers

X = np.random.RandomState(0).randn(64, 8).astype(np.float32)


@dataclasses.dataclass
class Config:
    slow: str = ""  # data, step (which sleep) or work (which computes); "" for nothing
    seconds: float = 0.03  # of a step
    worker: int = 1  # that is slow


class Straggling(looplib.Trainer):
    def __init__(self, config):
        index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        self.slow, self.seconds = config.slow if index == config.worker else "", config.seconds
        self.model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(0.01)

    def dataset(self, context):
        data = context.indices(64).map(lambda i: tf.gather(X, i))
        return data.map(self._late) if self.slow == "data" else data

    def _late(self, x):
        def sleep(x):
            time.sleep(self.seconds)
            return x

        return tf.ensure_shape(tf.numpy_function(sleep, [x], tf.float32), x.shape)

    def _delay(self):
        end = time.perf_counter() + self.seconds
        if self.slow == "step":
            time.sleep(self.seconds)
        while self.slow == "work" and time.perf_counter() < end:
            pass

    def step_fn(self, x):
        tf.py_function(self._delay, [], [])  # on all workers, because their programs have to be alike
        with tf.GradientTape() as tape:
            losses = tf.reduce_sum(self.model(x, training=True) ** 2, axis=1)
            loss = self.global_mean(losses)
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": losses}


def main():
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    stragglers._FIRST = 0.4
    launch.run(
        lambda config: (Straggling(config), None), Config(), loop="graph", mode="train", global_batch_size=16,
        train_steps=90, steps_per_loop=5, checkpoint_interval=1000,
    )  # fmt: skip


if __name__ == "__main__":
    main()
