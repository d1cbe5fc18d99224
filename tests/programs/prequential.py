"""Trains a logistic regression that is evaluated on each batch before it trains on it; may kill itself at a step."""

import dataclasses
import os
import signal

import keras
import numpy as np
import tensorflow as tf

import looplib

EXAMPLES, FEATURES, RATE = 640, 3, 0.5
_random = np.random.RandomState(1)
X = _random.randn(EXAMPLES, FEATURES).astype("float32") + np.linspace(0, 1, EXAMPLES)[:, None].astype("float32")
Y = (X.sum(1) + _random.randn(EXAMPLES) > 0).astype("float32")
WEIGHTS = _random.rand(EXAMPLES).astype("float32")
KERNEL = np.float32([[1], [-1], [0.5]])


@dataclasses.dataclass
class Config:
    """The settings of the program."""

    window: int = 80


class Clicks(looplib.Trainer):
    def __init__(self, family=keras):
        self.model = family.Sequential([family.layers.InputLayer((FEATURES,)), family.layers.Dense(1)])
        self.model.layers[-1].set_weights([KERNEL, np.zeros(1, "float32")])
        self.optimizer = family.optimizers.SGD(RATE)
        self.order = []

    def dataset(self, context):
        return context.indices(EXAMPLES).map(lambda i: {"x": tf.gather(X, i), "y": tf.gather(Y, i), "id": i})

    def step_fn(self, inputs):
        with tf.GradientTape() as tape:
            logits = self.model(inputs["x"], training=True)[:, 0]
            losses = tf.nn.sigmoid_cross_entropy_with_logits(inputs["y"], logits)
            loss = self.global_mean(losses)
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": losses}


class Unseen(looplib.Evaluator):
    """Evaluates with each kind of metric that sums."""

    def __init__(self, model, family=keras):
        super().__init__(model)
        self.auc = family.metrics.AUC(from_logits=True)

    def dataset(self, context):
        raise NotImplementedError

    def step_fn(self, inputs):
        x, y = inputs["x"], inputs["y"]
        logits = self.model(x, training=False)[:, 0]
        self.auc.update_state(y, logits)
        losses = tf.nn.sigmoid_cross_entropy_with_logits(y, logits)
        weights = tf.gather(WEIGHTS, inputs["id"])
        right = tf.reduce_sum(tf.cast(tf.equal(logits > 0, y > 0), tf.int32))
        return {
            "loss": losses,
            "weighted": looplib.mean(losses, weights),
            "auc": self.auc,
            "hits": looplib.total(tf.stack([tf.size(y) - right, right])),
            **looplib.input_means({"x0": x[:, 0], "x": x}),
        }

    def loop_end(self, metrics):
        wrong, right = metrics.pop("hits")
        return {**metrics, "accuracy": right / (wrong + right)}


def numpy_windows(batches, steps):
    """Predicts for each batch and then trains on it, in float64; returns the metrics of each window of some steps."""
    kernel, bias, windows, found = KERNEL[:, 0].astype(np.float64), 0.0, [], []
    for ids in batches:
        x, y = X[ids].astype(np.float64), Y[ids]
        logits = x @ kernel + bias
        found.append((ids, logits))
        error = (1 / (1 + np.exp(-logits)) - y) / len(ids)
        kernel, bias = kernel - RATE * x.T @ error, bias - RATE * error.sum()
        if len(found) == steps:
            windows.append(_metrics(*map(np.concatenate, zip(*found))))
            found = []
    for window in windows:
        window |= {f"{name}_at_start": windows[0][name] for name in window if name.startswith("inputs/")}
    return windows, kernel, bias


def _metrics(ids, logits):
    y, p = Y[ids], 1 / (1 + np.exp(-logits))
    losses = np.logaddexp(0, logits) - y * logits
    thresholds = np.array([-1e-7, *(np.arange(1, 199) / 199), 1 + 1e-7])[:, None]  # those of Keras
    true = ((p > thresholds) & (y > 0)).sum(1) / (y > 0).sum()
    false = ((p > thresholds) & (y == 0)).sum(1) / (y == 0).sum()
    return {
        "examples": len(ids),
        "loss": losses.mean(),
        "weighted": (losses * WEIGHTS[ids]).sum() / WEIGHTS[ids].sum(),
        "auc": ((false[:-1] - false[1:]) * (true[:-1] + true[1:]) / 2).sum(),
        "accuracy": ((logits > 0) == (y > 0)).mean(),
        "inputs/x0/mean": X[ids][:, 0].mean(dtype=np.float64),
        "inputs/x/mean": X[ids].mean(dtype=np.float64),
    }


def die(event):
    if event.step == int(os.environ.get("DIES_AT", -1)):
        os.kill(os.getpid(), signal.SIGKILL)


class Program(looplib.Adapter, Clicks):
    """The trainer with its actions, so that a binary has them."""

    window = 80

    @property
    def own_actions(self):
        return [self.prequential, die]


def build(config):
    trainer = Program()
    trainer.prequential = looplib.Prequential(Unseen(trainer.model), config.window)
    return trainer, None


if __name__ == "__main__":
    looplib.launch.run(build, Config(), global_batch_size=8, train_steps=60, steps_per_loop=7, checkpoint_interval=5)
