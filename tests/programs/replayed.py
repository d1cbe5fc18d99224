"""A binary whose runs are replayed: a regression in which a step can be changed, or made not finite, by a setting."""

import dataclasses
import time

import keras
import numpy as np
import tensorflow as tf
import tf_keras

import looplib
from looplib import launch
from looplib.base import orders

X = np.random.RandomState(0).randn(50, 6).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


@dataclasses.dataclass
class Config:
    kind: str = "gradient"  # of `KINDS`
    rate: float = 0.05
    change_at: int = 0  # the step in whose batch one number is another
    nan_at: int = 0  # the step in which a logarithm is that of a negative number
    waits: float = 0.0  # seconds of each batch, in Python
    hangs_again_at: int = 0  # the step whose batch never comes in a replay
    fails_at_end: bool = False  # in an action, once the training has ended


def batches(context, config):
    """Batches of (features, labels, step)."""

    def of_step(ids, step):
        x = tf.gather(X, ids)
        changed = tf.tensor_scatter_nd_add(x, [[2, 3]], [0.5])
        return tf.where(step == config.change_at, changed, x), tf.gather(Y, ids), tf.fill(tf.shape(ids), step)

    def wait(step):
        hangs = step == config.hangs_again_at and orders.current().replay is not None
        time.sleep(1000 if hangs else config.waits)
        return step

    steps = tf.data.Dataset.counter(context.start_step + 1)
    if config.waits:
        steps = steps.map(lambda step: tf.ensure_shape(tf.py_function(wait, [step], tf.int64), [])).prefetch(2)
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


class WithActions(looplib.Adapter, ByLoss):
    """Averages weights, and lowers its rate."""

    def __init__(self, config):
        self.config = config
        looplib.GradientTrainer.__init__(self, model(), keras.optimizers.Adam(config.rate), average_decay=0.9)

    @property
    def own_actions(self):
        return [looplib.ReduceOnPlateau("train/loss", 0.5, patience=1, min_change=100.0), *super().own_actions]


class OfKeras2(ByLoss):
    """With a network, an optimizer and dropout of tf_keras."""

    def __init__(self, config):
        self.config = config
        tf_keras.backend.experimental.enable_tf_random_generator()
        layers = [tf_keras.layers.Dense(8, "relu"), tf_keras.layers.Dropout(0.2), tf_keras.layers.Dense(1, name="last")]
        network = tf_keras.Sequential([tf_keras.Input((6,)), *layers])
        looplib.GradientTrainer.__init__(self, network, tf_keras.optimizers.SGD(config.rate))


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


def by_keras(config):
    net = model()
    net.compile(keras.optimizers.SGD(config.rate), "mse", metrics=["mae"])
    return looplib.KerasTrainer(net, X, Y)


KINDS = {"gradient": ByLoss, "step": ByStep, "keras": by_keras, "tf_keras": OfKeras2, "actions": WithActions}


class FailsAtEnd(looplib.Action):
    def __call__(self, event):
        pass

    def on_end(self, controller):
        if controller.report.facts.config.fails_at_end:
            raise RuntimeError("no room for the export")


def build(config):
    return KINDS[config.kind](config), None


if __name__ == "__main__":
    launch.run(
        build,
        Config(),
        actions=[FailsAtEnd()],
        mode="train",
        train_steps=60,
        checkpoint_interval=20,
        steps_per_loop=10,
        global_batch_size=8,
    )
