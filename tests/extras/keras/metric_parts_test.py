"""Metric functions of compiled models that depend on the number of replicas are said; those that do not are not."""

import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from conftest import make_strategy

import looplib

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
    (said,) = [record.getMessage() for record in caplog.records if "the mean over the parts" in record.getMessage()]
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
