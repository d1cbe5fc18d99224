"""Metrics of compiled models that depend on the number of replicas are said; those that do not are not."""

import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from conftest import make_strategy

import looplib

SAID, UNKNOWN = "not the values for the batch", "not known"
X = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def largest(y, predicted):
    return tf.reduce_max(tf.abs(y - predicted))


def mean_error(y, predicted):
    return tf.reduce_mean(tf.abs(y - predicted))


def each_error(y, predicted):
    return tf.abs(y - predicted)


@pytest.mark.slow
@pytest.mark.parametrize("keras", [keras3, tf_keras], ids=["keras", "tf_keras"])
def test_a_metric_function_that_is_no_mean_over_examples_is_said_by_its_name(keras, caplog):
    with make_strategy("mirrored_x2").scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        metrics = [largest, mean_error, each_error, "mae", keras.metrics.MeanSquaredError(), keras.metrics.AUC()]
        model.compile("sgd", "mse", metrics=metrics)
        before = [np.array(weight) for weight in model.get_weights()]
        looplib.KerasTrainer(model, X, Y)
    (said,) = [record.getMessage() for record in caplog.records if SAID in record.getMessage()]
    found = np.abs(Y - model.predict(X, verbose=0))
    name, value, of_batch = said.split("batch of ")[1].split(")")[0].replace(" (", " ").replace(" for ", " ").split()
    assert name == "largest" and said.count(" for ") == 3  # no other is named
    assert found.min() < float(value) < float(of_batch) <= found.max() * 1.001
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights()))
    assert all(
        float(tf.reduce_sum(tf.abs(v))) == 0 for one in model.metrics for v in map(tf.convert_to_tensor, one.variables)
    )


@pytest.mark.slow
def test_a_metric_function_that_is_nan_for_parts_alone_is_said(caplog):
    def beyond(y, predicted):
        return tf.sqrt(tf.cast(tf.shape(y)[0], tf.float32) - 17)  # NaN for 16 examples, which half of those tried are

    with make_strategy("mirrored_x2").scope():
        model = keras3.Sequential([keras3.Input((6,)), keras3.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[beyond])
        looplib.KerasTrainer(model, X, Y)
    assert "beyond (nan for 3.873)" in caplog.text


class BatchError(keras3.metrics.Mean):
    """Averages over batches what it computes of each."""

    def update_state(self, y, predicted, sample_weight=None):
        return super().update_state(tf.reduce_max(tf.abs(y - predicted)))


class Own(keras3.Model):
    """A step of its own, whose numbers reach Keras through trackers."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.mean, self.most = keras3.metrics.Mean(name="mean"), keras3.metrics.Mean(name="most")
        self.seeds = keras3.random.SeedGenerator(0)

    @property
    def metrics(self):
        return [self.mean, self.most]

    def train_step(self, data):
        x, y = data
        x = x + 0.01 * keras3.random.normal(tf.shape(x), seed=self.seeds)
        with tf.GradientTape() as tape:
            errors = tf.abs(self(x) - y)
            loss = tf.reduce_mean(errors)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
        self.mean.update_state(loss)
        self.most.update_state(tf.reduce_max(errors))
        return {"mean": self.mean.result(), "most": self.most.result()}


def two_outputs(keras, **metrics):
    inputs = keras.Input((6,))
    one, other = (keras.layers.Dense(1, name=name)(inputs) for name in ("one", "other"))
    model = keras.Model(inputs, {"one": one, "other": other})
    model.compile("sgd", "mse", **metrics)
    return model


def dense(batch_size=None, dropout=(), **metrics):
    model = keras3.Sequential([keras3.Input((6,), batch_size=batch_size), *dropout, keras3.layers.Dense(1)])
    model.compile("sgd", "mse", **metrics)
    return model


def own_step():
    model = Own(*(lambda inputs: (inputs, keras3.layers.Dense(1)(inputs)))(keras3.Input((6,))))
    model.compile("sgd")
    return model


def lines(caplog, make, x, y, sample_weight=None):
    """Returns what is said of metrics where a trainer is made on two replicas."""
    caplog.clear()
    with make_strategy("mirrored_x2").scope():
        looplib.KerasTrainer(make(), x, y, sample_weight=sample_weight)
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    return [message for message in messages if SAID in message or UNKNOWN in message]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("keras", [keras3, tf_keras], ids=["keras", "tf_keras"])
def test_metrics_of_several_outputs_and_with_weights_are_looked_at(keras, caplog):
    data = X, {"one": Y, "other": Y[::-1]}, {"one": np.ones([40]), "other": np.linspace(0.1, 3, 40)}
    metrics = {"one": [largest, "mae"], "other": [mean_error]}
    weighted = {"one": ["mse"], "other": [each_error]}
    (said,) = lines(caplog, lambda: two_outputs(keras, metrics=metrics, weighted_metrics=weighted), *data)
    assert said.count(" for ") == 3 and "largest" in said and SAID in said


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("case", ["metric", "own step", "fixed size", "dropout"])
def test_metrics_that_are_no_functions_or_in_other_steps_are_looked_at(case, caplog):
    make, wrong, right = {
        "metric": (lambda: dense(metrics=[BatchError(name="most"), "mae"]), "most", "mae"),
        "own step": (own_step, "most", "mean ("),
        "fixed size": (lambda: dense(4, metrics=[largest, "mae", mean_error]), "largest", "mean_error"),
        "dropout": (lambda: dense(None, [keras3.layers.Dropout(0.3)], metrics=[largest, "mae"]), "largest", "mae"),
    }[case]
    (said,) = lines(caplog, make, X, Y)
    assert wrong in said and SAID in said and right not in said


def test_metrics_that_cannot_be_looked_at_are_said(caplog):
    def infinite(y, predicted):
        return tf.abs(y - predicted) / 0.0

    for make, data, reason in (
        (lambda: dense(metrics=[infinite, "mae"]), (X, Y), "infinite of the"),
        (lambda: dense(metrics=["mae"]), (X[:1], Y[:1]), "one example"),
    ):
        (said,) = lines(caplog, make, *data)
        assert UNKNOWN in said and reason in said
    assert not lines(caplog, lambda: dense(), X, Y)
