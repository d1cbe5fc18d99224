"""A small program of several kinds, whose run directories `tests/fixtures` keeps: `python -m earlier_program --config.kind=phases`."""

import dataclasses
import os
import signal
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
import tf_keras

import looplib
from looplib import launch

EXAMPLES = 32
X = np.random.RandomState(0).randn(EXAMPLES, 5).astype("float32")
Y = X.sum(axis=1, keepdims=True)
SETTINGS = dict(
    loop="graph",
    global_batch_size=8,
    train_steps=8,
    steps_per_loop=2,
    checkpoint_interval=4,
    eval_interval=4,
    keep_last=2,
)


@dataclasses.dataclass
class Config:
    kind: str = "one_worker"
    nan_at: int = 0  # the step whose loss is not finite
    signal: str = ""  # what the program sends itself
    signal_at: int = 0  # after this step


def network(family):
    layers = family.layers
    return family.Sequential(
        [
            layers.InputLayer((5,)),
            layers.Dense(4, "relu", name="body"),
            layers.Dropout(0.1),
            layers.Dense(1, name="head"),
        ]
    )


class Line(looplib.GradientTrainer):
    def __init__(self, config, family=keras, **settings):
        self.nan_at = config.nan_at
        super().__init__(network(family), family.optimizers.Adam(0.05), **settings)

    def dataset(self, context):
        return context.indices(EXAMPLES).map(lambda i: (tf.gather(X, i), tf.gather(Y, i)))

    def loss_fn(self, inputs):
        losses = tf.square(self.model(inputs[0], training=True) - inputs[1])[:, 0]
        return losses * tf.where(self.global_step + 1 == self.nan_at, np.nan, 1.0)


class OfPipeline(Line):
    """Takes its examples from a pipeline of its own, whose position is saved."""

    def dataset(self, context):
        data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(EXAMPLES, seed=context.seed).repeat()
        return data.batch(context.per_replica_batch_size)


class Shown(Line):
    """Reports media."""

    def step_fn(self, inputs):
        image = looplib.image(tf.nn.sigmoid(inputs[0])[:, None, :, None], most=1)
        text, histogram = looplib.text(tf.strings.as_string(inputs[1][:, 0])), looplib.histogram(inputs[0])
        return {**super().step_fn(inputs), "image": image, "text": text, "histogram": histogram}


class Error(looplib.Evaluator):
    def __init__(self, model):
        self.model = model

    def dataset(self, context):
        return context.indices(EXAMPLES).map(lambda i: (tf.gather(X, i), tf.gather(Y, i)))

    def step_fn(self, inputs):
        return {"error": tf.abs(self.model(inputs[0], training=False) - inputs[1])[:, 0]}


def keras_trainer(config):
    model = network(keras)
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return looplib.KerasTrainer(model, X, Y, callbacks=[keras.callbacks.ReduceLROnPlateau("loss", patience=1)])


def phases(config):
    return Line(config, phases=[looplib.Phase(until=4, train="head"), looplib.Phase(learning_rate=0.01)])


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of run.

    Attributes:
      make: function from the config to the trainer.
      flags: of every start.
      end: flags of the first start: how it ends.
      resumes_at: the step from which the next start continues.
    """

    make: Callable[[Config], looplib.Trainer]
    flags: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    resumes_at: int = 8


KINDS = {
    "one_worker": Kind(Line),
    "two_replicas": Kind(lambda config: Line(config, tf_keras), ("--num_virtual_devices=2",)),
    "averaged": Kind(lambda config: Line(config, average_decay=0.9)),
    "phases": Kind(phases),
    "keras_trainer": Kind(keras_trainer, ("--steps_per_loop=4",)),
    "stopped": Kind(OfPipeline, end=("--config.signal=SIGTERM", "--config.signal_at=6"), resumes_at=6),
    "killed": Kind(OfPipeline, end=("--config.signal=SIGKILL", "--config.signal_at=6"), resumes_at=4),
    "diverged": Kind(Line, end=("--config.nan_at=6",), resumes_at=4),
    "media": Kind(Shown, ("--trackers=csv",)),
}


class Sender:
    """Sends the program the signal of its settings."""

    config = Config()

    def __call__(self, event):
        if event.step == self.config.signal_at:
            os.kill(os.getpid(), signal.Signals[self.config.signal])


SENDER = Sender()


def build(config):
    SENDER.config = config
    trainer = KINDS[config.kind].make(config)
    return trainer, Error(trainer.model)


if __name__ == "__main__":
    launch.run(build, Config(), actions=[SENDER], **SETTINGS)
