"""Phases: one run that trains other variables, or at another rate, from some steps on, on every engine."""

import json

import flat_config
import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from conftest import make_strategy

import looplib
from looplib.errors import ModelError, OptimizerError, SettingError

# A global batch is an epoch, so that each step sees all examples, in any order.
BATCH, FEATURES, HIDDEN = 16, 4, 3
_random = np.random.RandomState(0)
X = _random.randn(BATCH, FEATURES).astype("float32")
Y = _random.randn(BATCH, 1).astype("float32")
NAMES = ("encoder/kernel", "encoder/bias", "head/kernel", "head/bias")
START = {
    "encoder/kernel": _random.randn(FEATURES, HIDDEN).astype("float32"),
    "encoder/bias": np.zeros(HIDDEN, "float32"),
    "head/kernel": _random.randn(HIDDEN, 1).astype("float32"),
    "head/bias": np.zeros(1, "float32"),
}
FIRST, STEPS = 5, 12
PHASES = [looplib.Phase(until=FIRST, train="head"), looplib.Phase(learning_rate=0.01)]
FAMILIES = {"keras": keras3, "tf_keras": tf_keras}


class Net(looplib.GradientTrainer):
    """tanh(x W + b) V + c, by least squares."""

    def __init__(self, optimizer=None, keras=keras3, phases=PHASES, **settings):
        layers = [keras.layers.Dense(HIDDEN, "tanh", name="encoder"), keras.layers.Dense(1, name="head")]
        model = keras.Sequential([keras.layers.InputLayer((FEATURES,)), *layers])
        model.set_weights([START[name] for name in NAMES])
        super().__init__(model, optimizer or keras.optimizers.SGD(0.1, momentum=0.9), phases=phases, **settings)

    def dataset(self, context):
        return context.indices(BATCH).map(lambda i: (tf.gather(X, i), tf.gather(Y, i)))

    def loss_fn(self, inputs):
        return tf.square(self.model(inputs[0], training=True) - inputs[1])[:, 0]


def gradients(weights):
    w = {name: weights[name].astype(np.float64) for name in NAMES}
    hidden = np.tanh(X @ w["encoder/kernel"] + w["encoder/bias"])
    error = 2 * (hidden @ w["head/kernel"] + w["head/bias"] - Y) / BATCH
    inner = (error @ w["head/kernel"].T) * (1 - hidden**2)
    return dict(zip(NAMES, (X.T @ inner, inner.sum(0), hidden.T @ error, error.sum(0))))


def in_numpy(kind, steps=STEPS, first=FIRST, clip=None, decay=0.0, average=None):
    """Trains the head alone for `first` steps, at rate 0.1, then all at rate 0.01; returns weights and averages."""
    w = {name: value.astype(np.float64) for name, value in START.items()}
    m, v = ({name: np.zeros_like(value) for name, value in w.items()} for _ in range(2))
    averages = {name: value.copy() for name, value in w.items()}
    for step in range(steps):
        trained, rate = (NAMES[2:], 0.1) if step < first else (NAMES, 0.01)
        every = gradients(w)
        norm = np.sqrt(sum(np.sum(every[name] ** 2) for name in trained))
        for name in trained:
            g = every[name] * (min(1.0, clip / norm) if clip else 1.0)
            w[name] -= rate * decay * w[name]
            if kind == "sgd":
                m[name] = 0.9 * m[name] - rate * g
                w[name] += m[name]
            else:
                alpha = rate * np.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
                m[name] += (g - m[name]) * 0.1
                v[name] += (g * g - v[name]) * 0.001
                w[name] -= alpha * m[name] / (np.sqrt(v[name]) + 1e-7)
            if average:
                averages[name] = average * averages[name] + (1 - average) * w[name]
    return w, averages


def assert_weights(trainer, expected):
    for found, name in zip(trainer.model.get_weights(), NAMES):
        np.testing.assert_allclose(found, expected[name], rtol=2e-4, atol=2e-6, err_msg=name)


def train(trainer, steps=STEPS, strategy=None, **settings):
    settings = dict(steps_per_loop=4, writers=[], global_batch_size=BATCH) | settings
    strategy = strategy or make_strategy("default")
    with flat_config.controller(trainer=trainer, strategy=strategy, **settings) as controller:
        return controller.train(steps)


def optimizer_of(kind, keras):
    return keras.optimizers.SGD(0.1, momentum=0.9) if kind == "sgd" else keras.optimizers.Adam(0.1)


@pytest.mark.parametrize(
    "name, loop, kind, family",
    [
        ("default", "graph", "sgd", "keras"),
        ("default", "xla", "adam", "keras"),
        ("default", "eager", "adam", "keras"),
        ("mirrored_x2", "graph", "adam", "keras"),
        ("mirrored_x2", "eager", "sgd", "keras"),
        ("default", "auto", "adam", "tf_keras"),
        pytest.param("mirrored_x2", "graph", "sgd", "tf_keras", marks=pytest.mark.slow),
        pytest.param("default", "xla", "sgd", "tf_keras", marks=pytest.mark.slow),
    ],
)
def test_two_phases_equal_a_plain_loop_in_numpy(name, loop, kind, family):
    strategy, keras = make_strategy(name), FAMILIES[family]
    with strategy.scope():
        trainer = Net(optimizer_of(kind, keras), keras)
    train(trainer, strategy=strategy, loop=loop)
    assert_weights(trainer, in_numpy(kind)[0])
