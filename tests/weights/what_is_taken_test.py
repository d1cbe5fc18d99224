"""A warm start takes weights, and neither the state of optimizers nor half of a layer; it warns of what files lack."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import looplib
from looplib.errors import WarmStartError

X = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")


def adapted(rank):
    """Returns a model whose layers have adapters of a rank that change what it computes; none for 0."""
    keras.utils.set_random_seed(rank)
    layers = [keras.layers.Dense(5, name="a"), keras.layers.Dense(2, use_bias=False)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    for layer in layers if rank else ():
        layer.enable_lora(rank)
        layer.lora_kernel_b.assign(np.random.default_rng(rank).normal(size=layer.lora_kernel_b.shape))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("there, here", [(0, 2), (2, 2), (2, 3), (2, 0)])
def test_adapters_are_taken_as_a_part_of_the_kernel(there, here, tmp_path):
    source = adapted(there)
    for path, save in {"a.weights.h5": source.save_weights, "a.keras": source.save}.items():
        save(tmp_path / path)
        target = adapted(here)
        looplib.warm_start({"model": target}, tmp_path / path)
        np.testing.assert_allclose(target(X), source(X), rtol=1e-5, atol=1e-6)
        assert target.layers[0].lora_enabled == bool(here)


def test_adapters_of_a_layer_of_another_size_stay(tmp_path):
    adapted(0).save_weights(tmp_path / "a.weights.h5")
    target = keras.Sequential([keras.Input((6,)), keras.layers.Dense(7, name="a"), keras.layers.Dense(2, name="b")])
    target.layers[0].enable_lora(2)
    before = [variable.numpy() for variable in target.variables]
    with pytest.raises(WarmStartError, match="of another shape: a/., a/.[)]"):
        looplib.warm_start({"model": target}, tmp_path / "a.weights.h5")
    assert all(map(np.array_equal, before, target.variables))


def test_a_layer_of_another_kind_takes_nothing(keras, tmp_path, caplog):
    def model(kind, **batch):
        layers = [kind(4, 3, name="conv"), keras.layers.BatchNormalization(name="bn", **batch), keras.layers.Flatten()]
        found = keras.Sequential([keras.Input((8, 8, 3)), *layers, keras.layers.Dense(2, name="head")])
        found.layers[0].bias.assign(np.full(4, float(len(found.layers[0].weights))))
        return found

    source, target = model(keras.layers.SeparableConv2D), model(keras.layers.Conv2D, scale=False)
    source.layers[1].beta.assign([1.0, 2.0, 3.0, 4.0])
    conv = target.layers[0].get_weights()
    looplib.warm_start({"model": target}, tf.train.Checkpoint(model=source).save(tmp_path / "ckpt"))
    assert all(map(np.array_equal, conv, target.layers[0].get_weights()))
    assert all(map(np.array_equal, source.layers[-1].get_weights(), target.layers[-1].get_weights()))
    assert "in a layer with other variables: conv/bias" in caplog.text
    np.testing.assert_array_equal(target.layers[1].beta, [1, 2, 3, 4])  # a layer that only lacks a part


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["keras", "tf_keras", "legacy"])
def test_the_learning_rate_of_the_new_run_stays_and_nothing_is_said_to_lack(kind, tmp_path, caplog):
    family = keras if kind == "keras" else tf_keras

    def compiled(rate):
        model = family.Sequential([family.Input((6,)), family.layers.Dense(1, name="head")])
        adam = family.optimizers.legacy.Adam if kind == "legacy" else family.optimizers.Adam
        model.compile(adam(rate), "mse")
        return model

    source = compiled(0.25)
    source.fit(X, X[:, 0], verbose=0)
    source.save_weights(tmp_path / "a.weights.h5")
    source.save(tmp_path / "a.keras")
    for path in (
        tmp_path / "a.weights.h5",
        tmp_path / "a.keras",
        tf.train.Checkpoint(model=source).save(tmp_path / "b"),
    ):
        target = compiled(0.5)
        target.optimizer.build(target.trainable_variables) if kind != "legacy" else target.optimizer.iterations
        looplib.warm_start({"model": target}, path)
        assert float(target.optimizer.learning_rate) == 0.5 and int(target.optimizer.iterations) == 0
        assert all(map(np.array_equal, source.get_weights(), target.get_weights()))
    assert "not taken" not in caplog.text


def test_vocabularies_that_a_file_does_not_tell_are_named(keras, tmp_path, caplog):
    def model(words):
        split = keras.layers.TextVectorization(max_tokens=10, output_sequence_length=4)
        split.adapt(np.array([words]))
        parts = [split, keras.layers.Embedding(10, 3), keras.layers.Flatten(), keras.layers.Dense(2)]
        return keras.Sequential([keras.Input((1,), dtype="string"), *parts])

    source = model("a b c d")
    source.save_weights(tmp_path / "a.weights.h5")
    for path in (tmp_path / "a.weights.h5", tf.train.Checkpoint(model=source).save(tmp_path / "b")):
        caplog.clear()
        looplib.warm_start({"model": model("x y z")}, path)
        assert "vocabularies" in caplog.text and "model/text_vectorization" in caplog.text


@pytest.mark.parametrize("how", ["checkpoint", "weights"])
def test_a_discretization_takes_its_bins(how, tmp_path):
    def model(seed):
        bins = tf_keras.layers.Discretization(num_bins=4)
        bins.adapt(np.random.default_rng(seed).normal(seed, size=(100 + 50 * seed, 1)))
        return tf_keras.Sequential([tf_keras.Input((1,)), bins])

    source, target, x = model(0), model(3), np.linspace(-2, 4, 50)[:, None].astype("float32")
    source.save_weights(tmp_path / "a.weights.h5")
    path = tf.train.Checkpoint(model=source).save(tmp_path / "b") if how == "checkpoint" else tmp_path / "a.weights.h5"
    looplib.warm_start({"model": target}, path)
    expected = np.searchsorted(np.array(source.layers[0].bin_boundaries, "float32"), x, side="right")
    np.testing.assert_array_equal(target.predict(x, verbose=0), expected)


def test_a_checkpoint_of_one_model_says_that_here_are_several(tmp_path):
    path = tf.train.Checkpoint(model=adapted(0)).save(tmp_path / "ckpt")
    with pytest.raises(WarmStartError, match="has the values of model, and here are critic, generator"):
        looplib.warm_start({"generator": adapted(0), "critic": adapted(0)}, looplib.WarmStart(path, {"^": "critic/"}))
