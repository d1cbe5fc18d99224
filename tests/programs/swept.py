"""A binary for sweeps: it trains one weight in a known way, slowly enough to be killed."""

import dataclasses
import time

import numpy as np
import tensorflow as tf

import looplib
from looplib import launch


@dataclasses.dataclass
class Config:
    rate: float = 0.1
    start: float = 0.0
    pause: float = 0.0
    fails: bool = False
    noise: float = 0.0


class Approach(looplib.Trainer):
    """Moves a weight towards 1, each step by a part of the rest."""

    def __init__(self, config):
        self.config = config
        self.weight = tf.Variable(config.start)

    def dataset(self, context):
        return context.indices(64)

    def step_fn(self, inputs):
        noise = self.config.noise * tf.random.stateless_normal([], self.step_seed())
        self.weight.assign_add(self.config.rate * (1.0 - self.weight) + noise)
        return {"weight": looplib.last(self.weight)}

    def loop_end(self, metrics):
        time.sleep(self.config.pause)
        return metrics


class Score(looplib.Evaluator):
    def __init__(self, trainer):
        self.weight = trainer.weight

    def dataset(self, context):
        return context.indices(4)

    def step_fn(self, inputs):
        return {"score": tf.fill(tf.shape(inputs), self.weight)}


def build(config):
    if config.fails:
        raise looplib.UsageError(f"a rate of {config.rate} is not what this trains with; use another")
    trainer = Approach(config)
    return trainer, Score(trainer)


def score(rate, steps, start=0.0):
    """Returns the score after so many steps without noise."""
    weight = np.float32(start)
    for _ in range(steps):
        weight += np.float32(rate) * (np.float32(1) - weight)
    return weight


if __name__ == "__main__":
    launch.run(
        build, Config(), train_steps=40, eval_interval=10, checkpoint_interval=10, steps_per_loop=5, global_batch_size=4,
        loop="eager",
    )  # fmt: skip
