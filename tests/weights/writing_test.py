"""Safetensors that looplib writes: read by the format's own library, and taken back bit by bit."""

import keras as keras3
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from written import filled, functional, same, sequential, subclassed

import looplib
from looplib.errors import ExportError
from looplib.weights.taking import named_weights, write_safetensors


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("build", [sequential, functional, subclassed])
def test_weights_come_back_into_a_model_whose_layers_have_other_numbers(build, keras, tmp_path):
    source, target = filled(build(keras)), filled(build(keras), seed=1)
    weights = named_weights(source)
    assert sorted(value.numpy().tobytes() for value in weights.values()) == sorted(
        value.tobytes() for value in source.get_weights()
    )
    write_safetensors(str(tmp_path / "model.safetensors"), weights)
    looplib.warm_start({"model": target}, tmp_path / "model.safetensors")
    same(source, target)


def test_the_library_of_the_format_reads_each_type(tmp_path):
    library = pytest.importorskip("safetensors")
    random = np.random.default_rng(0)
    values = {
        dtype: random.normal(size=(3, 4)).astype(dtype) * 10
        for dtype in ("float64", "float32", "float16", ml_dtypes.bfloat16, "int64", "int32", "int8", "uint8")
    }
    values = {np.dtype(dtype).name: value.astype(dtype) for dtype, value in values.items()}
    values |= {"bool": np.array([True, False]), "scalar": np.float32(3), "empty": np.zeros((0, 2), np.float32)}
    write_safetensors(str(tmp_path / "all"), {name: tf.Variable(value) for name, value in values.items()})
    found = dict(library.deserialize((tmp_path / "all").read_bytes()))
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert bytes(found[name]["data"]) == value.tobytes() and found[name]["shape"] == list(value.shape)
    assert found["bfloat16"]["dtype"] == "BF16"


def test_weights_of_one_name_are_refused():
    class Two(tf.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = tf.Variable(1.0), tf.Variable(2.0)

    with pytest.raises(ExportError, match="several weights have the name Variable"):
        named_weights(Two())
    assert list(named_weights(keras3.Sequential([keras3.Input((2,)), keras3.layers.Dropout(0.5)]))) == []
