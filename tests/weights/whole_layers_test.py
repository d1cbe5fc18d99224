"""A layer of a file is taken whole or not at all, and the log and the errors say of each name what it is."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from written import write_safetensors

import looplib
from looplib.errors import SettingError, WarmStartError

NAMES = {"encoder/kernel": (4, 3), "encoder/bias": (3,), "head/kernel": (3, 2), "head/bias": (2,)}


def model():
    layers = [keras.layers.Dense(3, name="encoder"), keras.layers.Dense(2, name="head")]
    return keras.Sequential([keras.Input((4,)), *layers])


def ones(path, **changed):
    return write_safetensors(path, {name: np.ones(shape, "float32") for name, shape in NAMES.items()} | changed)


def taken(found):
    return {name: bool(np.all(value == 1)) for name, value in zip(NAMES, found.get_weights(), strict=True)}


@pytest.mark.parametrize(
    "value, reason", [(np.ones((9, 3), "float32"), "of another shape"), (np.ones((4, 3), "int64"), "of another type")]
)
def test_a_layer_with_a_value_that_does_not_fit_keeps_all_its_values(value, reason, tmp_path, caplog):
    found = model()
    looplib.warm_start({"model": found}, ones(tmp_path / "a.safetensors", **{"encoder/kernel": value}))
    assert taken(found) == {name: name.startswith("head") for name in NAMES}
    assert f"{reason}: encoder/kernel; with these in a layer: encoder/bias)" in caplog.text


def test_values_of_a_checkpoint_that_are_no_numbers_are_of_another_type(tmp_path, caplog):
    there, here = tf.Module(), tf.Module()
    for name, value in {"word": ["a"], "number": [1.0 + 2j], "count": [3], "kept": [4.0]}.items():
        setattr(there, name, tf.Variable(value, name=name))
        setattr(here, name, tf.Variable([0.0], name=name))
    looplib.warm_start({"model": here}, tf.train.Checkpoint(model=there).save(tmp_path / "ckpt"))
    assert [float(here.kept[0]), float(here.count[0]), float(here.number[0])] == [4, 0, 0]
    assert "another shape" not in caplog.text
    assert all(name in caplog.text.split("of another type: ")[1] for name in ("word", "number", "count"))


def test_names_in_a_file_move_no_terminal_and_names_here_are_those_of_rules(tmp_path):
    path = write_safetensors(tmp_path / "a.safetensors", {"\x1b[2Jencoder/\nkernel": np.ones((4, 3), "float32")})
    for rules, match in [({}, r"only here: encoder/bias, encoder/kernel.*there: \\x1b"), ({"none": "x"}, r"\\x1b\[2J")]:
        with pytest.raises(WarmStartError, match=match) as error:
            looplib.warm_start({"model": model()}, looplib.WarmStart(path, rules))
        assert str(error.value).isprintable() and "sequential" not in str(error.value)


@pytest.mark.parametrize("path", [None, 3, b"run"])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(SettingError, match="expected the path of a file of weights"):
        looplib.warm_start({"model": model()}, path)
