"""Constant predictions: equal outputs are told from similar ones, and a model is only called if that leaves no trace."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import make_strategy, more

import looplib
from looplib.actions.output_checks import ConstantOutputs, are_constant
from looplib.compat.tensorflow import leaves_no_trace

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(64, 4)).astype("float32")


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([np.zeros((8, 3), "float32")], True),
        ([np.tile(RANDOM.normal(size=3).astype("float32"), (8, 1))], True),
        ([np.full((8, 1), 0.3, "float32") + np.float32(3e-8) * np.arange(8)[:, None]], True),  # one rounding
        ([np.full((8, 1), 0.3, "float32") + np.float32(1e-4) * np.arange(8, dtype="float32")[:, None]], False),
        ([RANDOM.normal(size=(8, 3)).astype("float32")], False),
        ([np.tile([0.0, 1.0], (8, 1)).astype("float32")], False),  # a model that is sure of eight examples of a class
        ([np.ones((8, 1), "float32")], False),
        ([np.full((8, 3), 0.2, "float32"), RANDOM.normal(size=(8, 2)).astype("float32")], False),
        ([np.full((8, 3), np.nan, "float32")], False),  # for the guards
        ([np.full((8, 3), 1e-30, "float32") * np.arange(8, dtype="float32")[:, None]], False),
    ],
)
def test_outputs_are_constant_up_to_rounding(outputs, expected):
    assert are_constant([np.asarray(output, "float32") for output in outputs]) == expected


class Predicts(looplib.Evaluator):
    """Predicts by a function that a test gives."""

    def __init__(self, predict, data=None):
        super().__init__(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]))
        self.noted = tf.Variable(0.0, trainable=False)
        self._predict, self._data = predict, data

    def dataset(self, context):
        return self._data() if self._data else context.indices(64).map(lambda ids: tf.gather(X, ids))

    def step_fn(self, inputs):
        return {"size": tf.reduce_sum(self.model(inputs, training=False), axis=1)}

    def predict_fn(self, inputs):
        return {"outputs": self._predict(self, inputs)}


def constant(task, x):
    return tf.fill([tf.shape(x)[0], 2], 0.25)


def found(predict, data=None, strategy="default", evaluations=2):
    with make_strategy(strategy).scope():
        task = Predicts(predict, data)
    config = looplib.RunConfig(global_batch_size=16)
    with looplib.Controller(config, evaluator=task, strategy=make_strategy(strategy), writers=[]) as controller:
        checks = ConstantOutputs()
        loop = controller.loops["eval"]
        last = range(1, evaluations + 1)
        return [one for step in last for one in checks.check("eval", loop, step, ending=step == 7, known=())], float(
            tf.convert_to_tensor(task.noted)
        )


@pytest.mark.parametrize("strategy", ["mirrored_x2", *more(["default"])])
def test_constant_predictions_are_found_at_the_second_evaluation_in_a_row(strategy):
    findings, _ = found(constant, strategy=strategy)
    (finding,) = findings
    assert (finding.kind, finding.subjects, finding.since) == ("constant predictions", ("eval",), 1)
    assert "'eval' are equal for all 8 examples" in finding.text or "for all 16 examples" in finding.text
    assert not found(constant, evaluations=1, strategy=strategy)[0]
    assert not found(lambda task, x: task.model(x), strategy=strategy)[0]


@pytest.mark.parametrize(
    "predict",
    [
        lambda task, x: constant(task, x) + 0 * task.noted.assign_add(1.0),
        lambda task, x: constant(task, x) + 0 * tf.random.normal([]),
        lambda task, x: constant(task, x) + 0 * tf.py_function(lambda: 1.0, [], tf.float32),
        lambda task, x: tf.argmax(task.model(x), axis=1),  # one class for all may be right
    ],
    ids=["variable", "random", "python", "classes"],
)
def test_a_prediction_that_would_leave_a_trace_or_shows_nothing_is_not_judged(predict):
    assert found(predict) == ([], 0.0)


@pytest.mark.slow
def test_a_pipeline_with_a_state_of_its_own_is_not_read_again():
    ids = tf.data.Dataset.range(64)
    plain = [
        ids.batch(8),
        ids.map(lambda i: i + 1).take(3).repeat(2).prefetch(1),
        tf.data.Dataset.from_tensor_slices(X).padded_batch(4),
        ids.flat_map(lambda i: tf.data.Dataset.range(i)),
        ids.map(lambda i: tf.random.stateless_normal([2], [i, 1])),
    ]
    stateful = [
        ids.shuffle(8).batch(8),
        ids.map(lambda i: tf.random.normal([]) + tf.cast(i, tf.float32)),
        ids.cache(),
        ids.map(lambda i: tf.py_function(lambda: 1.0, [], tf.float32)),
        ids.flat_map(lambda i: tf.data.Dataset.range(i).shuffle(2)),
        tf.data.Dataset.from_generator(lambda: iter([1]), output_signature=tf.TensorSpec([], tf.int32)),
        tf.data.Dataset.random(4).take(3),
    ]
    assert [leaves_no_trace(one, []) for one in plain] == [True] * len(plain)
    assert [leaves_no_trace(one, []) for one in stateful] == [False] * len(stateful)
    assert leaves_no_trace(stateful[0].map(lambda i: i), [stateful[0]])
    assert not found(constant, data=lambda: tf.data.Dataset.from_tensor_slices(X).shuffle(64).batch(16))[0]
    assert found(constant, data=lambda: tf.data.Dataset.from_tensor_slices(X).batch(16))[0]
