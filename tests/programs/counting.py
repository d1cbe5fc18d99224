"""A binary whose weight is the number of steps, and whose score is best at a step that is set."""

import dataclasses
import os
import signal

import keras
import tensorflow as tf

import looplib
from looplib import launch


@dataclasses.dataclass
class Config:
    best: int = 20
    kill_at: int = 0


class Counting(looplib.Trainer):
    """Adds one to its weight in each step."""

    def __init__(self, config=Config()):
        self.config = config
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        self.model = keras.Sequential([keras.Input((1,)), dense])

    def dataset(self, context):
        return context.indices(64)

    def step_fn(self, inputs):
        self.model.trainable_variables[0].assign_add([[1.0]])
        return {"loss": tf.cast(inputs, tf.float32)}

    def loop_end(self, metrics):
        if self.config.kill_at and self.global_step >= self.config.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return metrics


class Counted(looplib.Evaluator):
    """The weight, and how far the step is from the best."""

    def __init__(self, model, best=20):
        self.model, self.best = model, best

    def dataset(self, context):
        return context.indices(4)

    def step_fn(self, inputs):
        distance = tf.abs(tf.cast(self.global_step, tf.float32) - self.best)
        return {"score": looplib.last(-distance), "weight": looplib.last(self.model.trainable_variables[0][0, 0])}

    def predict_fn(self, inputs):
        return {"weight": self.model(tf.ones((tf.shape(inputs)[0], 1)))[:, 0]}


def build(config):
    trainer = Counting(config)
    return trainer, Counted(trainer.model, config.best)


if __name__ == "__main__":
    launch.run(
        build, Config(), train_steps=100, eval_interval=10, steps_per_loop=5, global_batch_size=8, keep_last=2,
        actions=[looplib.EarlyStopping("eval/score", 4, mode="max", restore_best=True)], keep_best="max:eval/score",
        loop="eager",
    )  # fmt: skip
