"""What looplib reads in TensorFlow's messages and states is there in this version of TensorFlow."""

import numpy as np
import pytest
import tensorflow as tf
from conftest import make_strategy

from looplib import _tf

VERSION = f"TensorFlow {tf.__version__} says it in other words than looplib._tf reads"


def error_of(function):
    with pytest.raises(Exception) as caught:  # noqa: B017, PT011 - of types that have no public name
        function()
    return caught.value


@tf.function
def read(iterator):
    return next(iterator)


@pytest.mark.parametrize("how", ["map", "py_function"])
def test_an_error_of_the_data_is_told_from_one_of_the_step(how):
    def refuse(number):
        tf.debugging.assert_less(number, tf.constant(0, tf.int64))
        return number

    numbers = tf.data.Dataset.range(3)
    data = numbers.map(refuse) if how == "map" else numbers.map(lambda i: tf.numpy_function(refuse, [i], tf.int64))
    assert _tf.is_of_the_input(error_of(lambda: read(iter(data)))), VERSION
    step = tf.function(lambda: tf.debugging.check_numerics(1 / tf.zeros([]), ""))
    assert not _tf.is_of_the_input(error_of(step)), VERSION


def test_a_variable_that_is_made_too_late_is_recognized():
    made = []

    def step(x):
        if len(made) < 2:
            made.append(tf.Variable(x * 2.0))
        return made[0] * x

    strategy = make_strategy("mirrored_x2")
    with strategy.scope():
        outer = tf.function(lambda x: strategy.run(step, (x,)))
        error = error_of(lambda: outer.get_concrete_function(tf.TensorSpec([])))
    assert _tf.is_late_variable(error), f"{VERSION}: {type(error)}"
    assert not _tf.is_late_variable(ValueError("another"))


def state(data):
    iterator = iter(data)
    next(iterator)
    variants = tf.raw_ops.SerializeIterator(
        resource_handle=tf.nest.flatten(iterator, expand_composites=True)[0], external_state_policy=2
    )
    return tf.strings.as_string(variants).numpy().tolist()


def test_the_stages_of_an_iterator_stand_in_its_state():
    data = tf.data.Dataset.range(9).shuffle(3).flat_map(lambda i: tf.data.Dataset.range(i + 1)).batch(2)
    assert {"Range", "Shuffle", "FlatMap", "BatchV2"} <= _tf.stages_of_iterator_state(state(data)), VERSION


def test_what_is_restored_wrongly_is_recognized(tmp_path):
    numbers = tf.data.Dataset.range(9)
    assert _tf.why_restored_wrongly(state(numbers)) == ""
    assert "caches in files" in _tf.why_restored_wrongly(state(numbers.cache(str(tmp_path / "cache")))), VERSION
    (tmp_path / "rows.csv").write_text("1\n2\n3\n")
    rows = tf.data.experimental.CsvDataset([str(tmp_path / "rows.csv")], [tf.int64])
    assert "CSV" in _tf.why_restored_wrongly(state(rows)), VERSION


def test_the_op_is_taken_out_of_a_message():
    data = tf.data.Dataset.range(3).map(lambda i: tf.numpy_function(lambda j: np.int64(j), [i], tf.int64))
    error = error_of(lambda: state(data))
    message = _tf.message_without_op(error)
    assert "{{" not in message and "[Op" not in message and "stateful" in message, f"{VERSION}: {error.message}"
