"""A small binary with one fault, for `looplib check` to find: `python -m unreliable --config.fault=step`."""

import dataclasses

import numpy as np
import tensorflow as tf
import toy

from looplib import launch


@dataclasses.dataclass
class Config:
    fault: str = ""  # step, data, unseeded, loss, crash


class Unreliable(toy.Regression):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def dataset(self, context):
        data = super().dataset(context)
        if self.fault == "data":  # every start begins with the first numbers of this generator
            generator = np.random.default_rng(0)
            draw = lambda x: generator.random(x.shape, np.float32)
            data = data.map(
                lambda i, x, y: (i, x + tf.ensure_shape(tf.numpy_function(draw, [x], tf.float32), x.shape), y)
            )
        if self.fault == "unseeded":
            shift = np.random.default_rng().normal()
            data = data.map(lambda i, x, y: (i, x + tf.cast(shift, tf.float32), y))
        return data

    def step_fn(self, inputs):
        ids, x, y = inputs
        if self.fault == "step":
            x += tf.random.normal(tf.shape(x))
        return super().step_fn((ids, x, y))

    def global_mean(self, values):
        return tf.reduce_mean(values) if self.fault == "loss" else super().global_mean(values)


def build(config):
    if config.fault == "crash":
        raise RuntimeError("the printer is on fire")
    trainer = Unreliable(config.fault)
    return trainer, toy.RegressionEvaluator(trainer.model)


if __name__ == "__main__":
    launch.run(
        build,
        Config(),
        global_batch_size=8,
        train_steps=600,
        steps_per_loop=20,
        eval_interval=200,
        checkpoint_interval=30,
    )
