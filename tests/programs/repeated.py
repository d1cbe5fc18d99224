"""A binary whose runs are repeated: in a training with REPEATED_FLIP in its environment, one bit is another one at a step.

REPEATED_FLIP is "what:step": a bit of a weight, of an optimizer's slot, or of a number of a batch ("data").
"""

import dataclasses
import os
import time

import keras
import numpy as np
import tensorflow as tf

import looplib
from looplib import launch

X = np.random.RandomState(0).randn(96, 6).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


@dataclasses.dataclass
class Config:
    kind: str = "dropout"  # of `KINDS`
    rate: float = 0.05
    dropout: float = 0.2
    files: str = ""  # TFRecord files of float32 rows, for the kind "records"
    waits: float = 0.0  # seconds of each batch
    model_file: str = ""  # for a callback of Keras


def flip():
    """What is flipped, and after which step; ("", 0) without."""
    what, _, step = os.environ.get("REPEATED_FLIP", "").partition(":")
    return what, int(step or 0)


class Flips(looplib.Action):
    """Flips a bit of a variable between two steps, as faulty memory does."""

    def __init__(self):
        self._what, self._step = flip()

    def stops(self):
        return (self._step,) if self._what in ("weight", "slot") else ()

    def on_leaving(self, step, controller):
        trainer = controller.loops["train"].task
        slots = [variable for variable in trainer.optimizer.variables if variable.path.endswith("kernel_momentum")]
        variable = {"weight": trainer.model.trainable_variables, "slot": slots}[self._what][0]
        value = np.array(variable)
        value.view(np.uint32)[1, 2] ^= 1 << 12
        variable.assign(value)


def network(config):
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(config.dropout), keras.layers.Dense(1, name="last")]
    return keras.Sequential([keras.Input((6,)), *layers])


def batches(context, config):
    """Batches of (features, targets), in which one number may be another."""
    what, at = flip()

    def of_step(ids, step):
        x = tf.gather(X, ids)
        flipped = tf.tensor_scatter_nd_add(x, [[2, 3]], [0.5])
        return tf.where(step == at, flipped, x) if what == "data" else x, tf.gather(Y, ids)

    def wait(step):
        time.sleep(config.waits)
        return step

    steps = tf.data.Dataset.counter(context.start_step + 1)
    if config.waits:
        steps = steps.map(lambda step: tf.ensure_shape(tf.py_function(wait, [step], tf.int64), []))
    return tf.data.Dataset.zip(context.indices(len(X)), steps).map(of_step)


class Dropout(looplib.GradientTrainer):
    def __init__(self, config, **arguments):
        self.config = config
        super().__init__(network(config), keras.optimizers.Adam(config.rate), **arguments)

    def dataset(self, context):
        return batches(context, self.config)

    def loss_fn(self, inputs):
        return tf.square(self.model(inputs[0], training=True) - inputs[1])[:, 0]


class Unrepeatable(Dropout):
    """Whose data has noise from the operating system."""

    def dataset(self, context):
        noise = lambda: np.frombuffer(os.urandom(4), np.uint32)[0] / np.float32(2**32)
        add = lambda x, y: (x + tf.ensure_shape(tf.py_function(noise, [], tf.float32), []), y)
        return batches(context, self.config).map(add)


class OfRecords(Dropout):
    def dataset(self, context):
        decode = lambda rows: tf.ensure_shape(tf.io.decode_raw(rows, tf.float32), [None, 7])
        return context.records(self.config.files).map(decode).map(lambda rows: (rows[:, :6], rows[:, 6:]))


class Error(looplib.Evaluator):
    def __init__(self, model):
        self.model = model

    def dataset(self, context):
        return context.indices(len(X)).map(lambda ids: (tf.gather(X, ids), tf.gather(Y, ids)))

    def step_fn(self, inputs):
        return {"error": tf.square(self.model(inputs[0], training=False) - inputs[1])[:, 0]}


def by_keras(config):
    net = network(config)
    net.compile(keras.optimizers.Adam(config.rate), "mse", metrics=["mae"])
    callbacks = [
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=100.0),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        *([keras.callbacks.ModelCheckpoint(config.model_file)] if config.model_file else []),
    ]
    return looplib.KerasTrainer(net, X, Y, callbacks=callbacks)


KINDS = {
    "dropout": Dropout,
    "accumulation": lambda config: Dropout(config, micro_batches=2, average_decay=0.9),
    "unrepeatable": Unrepeatable,
    "records": OfRecords,
    "keras": by_keras,
}


def build(config):
    trainer = KINDS[config.kind](config)
    return trainer, Error(trainer.model) if config.kind in ("dropout", "accumulation") else None


if __name__ == "__main__":
    launch.run(
        build,
        Config(),
        actions=[Flips(), looplib.ReduceOnPlateau("train/loss", 0.5, patience=1, min_change=100.0)],
        train_steps=60,
        eval_interval=30,
        checkpoint_interval=20,
        steps_per_loop=10,
        global_batch_size=8,
    )
