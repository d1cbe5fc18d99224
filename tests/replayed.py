"""A binary whose runs are replayed: a regression in which a step can be changed, or made not finite, by a setting."""

import dataclasses

import keras
import numpy as np
import tensorflow as tf

import looplib
from looplib import launch

X = np.random.RandomState(0).randn(50, 6).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


@dataclasses.dataclass
class Config:
    kind: str = "gradient"  # "gradient", "step" or "keras": the base class
    rate: float = 0.05
    change_at: int = 0  # the step in whose batch one number is another
    nan_at: int = 0  # the step in which a logarithm is that of a negative number


def batches(context, config):
    """Batches of (features, labels, step)."""

    def of_step(ids, step):
        x = tf.gather(X, ids)
        changed = tf.tensor_scatter_nd_add(x, [[2, 3]], [0.5])
        return tf.where(step == config.change_at, changed, x), tf.gather(Y, ids), tf.fill(tf.shape(ids), step)

    steps = tf.data.Dataset.counter(context.start_step + 1)
    return tf.data.Dataset.zip(context.indices(50), steps).map(of_step)


def model():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1, name="last")])


def losses_of(config, model, x, y, step):
    errors = tf.square(model(x, training=True) - y)[:, 0]
    poison = tf.where(step == config.nan_at, -1.0, 1.0)
    return errors + tf.math.log(poison)  # the bad op


class ByLoss(looplib.GradientTrainer):
    def __init__(self, config):
        self.config = config
        super().__init__(model(), keras.optimizers.Adam(config.rate))

    def dataset(self, context):
        return batches(context, self.config)

    def loss_fn(self, inputs):
        return losses_of(self.config, self.model, *inputs)


class ByStep(looplib.Trainer):
    def __init__(self, config):
        self.config, self.model, self.optimizer = config, model(), keras.optimizers.SGD(config.rate)

    def dataset(self, context):
        return batches(context, self.config)

    def step_fn(self, inputs):
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            losses = losses_of(self.config, self.model, *inputs)
            loss = self.global_mean(losses)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": losses}


def build(config):
    if config.kind == "keras":
        net = model()
        net.compile(keras.optimizers.SGD(config.rate), "mse", metrics=["mae"])
        return looplib.KerasTrainer(net, X, Y), None
    return {"gradient": ByLoss, "step": ByStep}[config.kind](config), None


if __name__ == "__main__":
    launch.run(
        build, Config(), mode="train", train_steps=60, checkpoint_interval=20, steps_per_loop=10, global_batch_size=8
    )
