"""Weights come back bit by bit from each format, in models of each kind, and on each number of replicas."""

import types

import h5py
import keras as keras3
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
import toy
from conftest import make_strategy
from written import (
    bfloat16,
    by_path,
    filled,
    functional,
    same,
    sequential,
    subclassed,
    write_safetensors,
    write_shards,
)  # fmt: skip

import looplib
from looplib.errors import NoCheckpointError, StoreError, WarmStartError
from looplib.task.state import state_of
from looplib.weights.layers import LayerWalk

# Written by safetensors 0.8.0.
REFERENCE = (
    b'p\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},'
    b'"b":{"dtype":"BF16","shape":[1],"data_offsets":[8,10]}} \0\0\x80?\0\0\0@@@'
)


def of_safetensors(model, folder):
    return write_safetensors(folder / "model.safetensors", by_path(model))


def of_shards(model, folder):
    return write_shards(folder, by_path(model))


def of_folder(model, folder):
    write_shards(folder, by_path(model))
    (folder / "config.json").write_text("{}")
    return str(folder)


def of_weights(model, folder):
    model.save_weights(folder / "model.weights.h5")
    return str(folder / "model.weights.h5")


def of_keras(model, folder):
    model.save(folder / "model.keras")
    return str(folder / "model.keras")


def of_checkpoint(model, folder):
    return tf.train.Checkpoint(**state_of(types.SimpleNamespace(model=model))).save(str(folder / "ckpt"))


def of_saved_model(model, folder):
    tf.saved_model.save(model, str(folder / "saved"))
    return str(folder / "saved")


FORMATS = {write.__name__: write for write in (
    of_safetensors, of_shards, of_folder, of_weights, of_keras, of_checkpoint, of_saved_model
)}  # fmt: skip


def fresh(keras, build):
    """Returns a model whose layers have the numbers of a new process."""
    keras.backend.clear_session()
    return build(keras)


@pytest.mark.slow(spread=5)
@pytest.mark.parametrize("build", [sequential, functional, subclassed])
@pytest.mark.parametrize("how", FORMATS)
def test_weights_come_back_bit_by_bit(how, build, keras, tmp_path):
    source = filled(fresh(keras, build))
    if keras is keras3 and how == "of_saved_model" and build is not sequential:
        pytest.skip("TensorFlow saves no layers in lists of Keras 3")
    path = FORMATS[how](source, tmp_path)
    target = filled(fresh(keras, build), seed=1)
    looplib.warm_start({"model": target}, path)
    same(source, target)


@pytest.mark.slow(spread=3)
@pytest.mark.parametrize("build", [sequential, functional, subclassed])
def test_layers_are_at_the_places_where_keras_saves_them(build, keras, tmp_path):
    model = build(keras)
    model.save_weights(tmp_path / "model.weights.h5")
    with h5py.File(tmp_path / "model.weights.h5") as file:
        there = []
        file.visititems(lambda name, item: there.append(name) if isinstance(item, h5py.Dataset) else None)
    here = ["/".join((*place.path, "vars", number)) for place in LayerWalk(model).found for number in place.own]
    assert sorted(here) == sorted(there)


def test_names_of_layers_decide_and_not_their_places(tmp_path):
    def build(names):
        layers = [keras3.layers.Dense(4, name=name) for name in names]
        return keras3.Sequential([keras3.Input((4,)), *layers])

    source, target = filled(build("abc")), filled(build("cab"), seed=1)
    for path in (of_weights(source, tmp_path), of_keras(source, tmp_path), of_safetensors(source, tmp_path)):
        filled(target, seed=1)
        looplib.warm_start({"model": target}, path)
        for name in "abc":
            for ours, theirs in zip(target.get_layer(name).get_weights(), source.get_layer(name).get_weights()):
                assert ours.tobytes() == theirs.tobytes()


def test_a_file_without_names_of_layers_is_refused_where_shapes_do_not_decide(tmp_path):
    def build(names):
        layers = [tf_keras.layers.Dense(units, name=name) for name, units in zip(names, (4, 4, 3))]
        return tf_keras.Sequential([tf_keras.Input((4,)), *layers])

    source, target = filled(build("abc")), filled(build("abc"), seed=1)
    path = of_weights(source, tmp_path)
    with pytest.raises(WarmStartError, match="has no names of layers"):
        looplib.warm_start({"model": target}, path)
    rules = {"^dense/": "a/", "^dense_1/": "b/", "^dense_2/": "c/"}
    looplib.warm_start({"model": target}, looplib.WarmStart(path, rules))
    same(source, target)
    looplib.warm_start({"model": filled(target, seed=1)}, of_keras(source, tmp_path))  # which has the names
    same(source, target)


def test_numbers_are_refused_where_a_layer_here_has_others(tmp_path):
    def build(bias):
        head = keras3.layers.Dense(3, use_bias=bias, name="head")
        return keras3.Sequential([keras3.Input((4,)), keras3.layers.Dense(4, name="body"), head])

    source, target = filled(build(True)), filled(build(False), seed=1)
    path = of_weights(source, tmp_path)
    with pytest.raises(WarmStartError, match=r"head.*0, 1.*0"):
        looplib.warm_start({"model": target}, path)
    looplib.warm_start({"model": target}, looplib.WarmStart(path, {"^head/0$": "head/kernel", "^head/1$": None}))
    for ours, theirs in zip(target.get_weights(), [*source.get_weights()[:3]], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_layers_that_keras_has_numbered_are_not_guessed_from_names_alone(tmp_path):
    def build(*units):
        return keras3.Sequential([keras3.Input((4,)), *map(keras3.layers.Dense, units)])

    keras3.backend.clear_session()
    source = filled(build(4, 4, 3))
    path = of_safetensors(source, tmp_path)
    target = filled(build(4, 4, 3), seed=1)  # dense_3, dense_4 and dense_5
    with pytest.raises(WarmStartError, match="numbered"):
        looplib.warm_start({"model": target}, path)
    source = filled(build(4, 3))
    target = filled(build(4, 3), seed=1)
    looplib.warm_start({"model": target}, of_safetensors(source, tmp_path))  # the shapes decide
    same(source, target)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("write", [of_weights, of_keras, of_safetensors])
def test_half_precision_comes_back_and_becomes_float32_exactly(write, dtype, tmp_path):
    def build(dtype):
        layers = [keras3.layers.Dense(4, name="a", dtype=dtype), keras3.layers.Dense(3, name="b", dtype=dtype)]
        return keras3.Sequential([keras3.Input((4,)), *layers])

    source, target, wide = filled(build(dtype)), filled(build(dtype), seed=1), filled(build("float32"), seed=1)
    path = write(source, tmp_path)
    for model in (target, wide):
        looplib.warm_start({"model": model}, path)
    same(source, target)
    for ours, theirs in zip(wide.get_weights(), source.get_weights()):
        np.testing.assert_array_equal(ours, theirs.astype(np.float32))
    narrow = filled(build(dtype), seed=1)
    looplib.warm_start({"model": narrow}, write(filled(wide, seed=2), tmp_path))
    type_ = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    for ours, theirs in zip(narrow.get_weights(), wide.get_weights()):
        np.testing.assert_array_equal(ours.astype(np.float32), theirs.astype(type_).astype(np.float32))


def test_the_older_h5_of_tf_keras_is_read_by_its_names(tmp_path):
    source = filled(fresh(tf_keras, functional))
    source.save_weights(tmp_path / "model.h5")
    target = filled(fresh(tf_keras, functional), seed=1)
    looplib.warm_start({"model": target}, str(tmp_path / "model.h5"))
    same(source, target)


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("write", [of_keras, of_weights, of_shards])
@pytest.mark.parametrize("name", ["default", "mirrored_x2"])
def test_a_run_starts_from_a_file_on_each_replica_and_resumes_from_its_own(name, write, tmp_path):
    source, _ = toy.build(make_strategy("default"))
    keras3.backend.clear_session()
    path = write(filled(source.model), tmp_path)
    trained = []
    for steps in (2, 4):
        trainer, _ = toy.build(make_strategy(name), keras3, "adam")
        start = looplib.Start(warm_start=looplib.WarmStart(path))
        with toy.controller(make_strategy(name), trainer, model_dir=tmp_path / "run", start=start) as controller:
            assert controller.global_step == steps - 2
            if steps == 2:
                for ours, theirs in zip(trainer.model.weights, source.model.get_weights()):
                    for part in make_strategy(name).experimental_local_results(ours.value):
                        assert part.numpy().tobytes() == theirs.tobytes()
            else:
                same(trainer.model, trained.pop())
            controller.train(steps)
            trained.append(trainer.model)


def test_a_trainer_without_keras_takes_safetensors_by_the_names_of_its_variables(tmp_path):
    class Module(tf.Module):
        def __init__(self):
            super().__init__()
            self.kernel = tf.Variable(tf.zeros([3, 2]), name="kernel")

    module = Module()
    path = write_safetensors(tmp_path / "m.safetensors", {"kernel": np.ones((3, 2), np.float32)})
    looplib.warm_start({"module": module}, path)
    np.testing.assert_array_equal(module.kernel, np.ones((3, 2)))


def test_of_two_models_rules_say_which_one_is_meant(tmp_path):
    def build():
        return {name: filled(keras3.Sequential([keras3.Input((4,)), keras3.layers.Dense(3, name="dense_of")]), seed)
                for seed, name in enumerate(("generator", "critic"))}  # fmt: skip

    source, target = build(), build()
    filled(source["generator"], seed=5)
    for write in (of_weights, of_safetensors):
        path = write(source["generator"], tmp_path)
        with pytest.raises(WarmStartError, match="generator|several"):
            looplib.warm_start(target, path)
        looplib.warm_start(target, looplib.WarmStart(path, {"^": "generator/"}))
        same(source["generator"], target["generator"])
        same(source["critic"], target["critic"])


def test_a_folder_with_several_files_asks_for_one(tmp_path):
    model = filled(sequential(keras3))
    of_weights(model, tmp_path), of_keras(model, tmp_path)
    with pytest.raises(NoCheckpointError, match=r"model\.keras, model\.weights\.h5"):
        looplib.warm_start({"model": model}, str(tmp_path))


def test_layers_in_a_quantized_form_are_refused_by_their_numbers(tmp_path):
    model = filled(keras3.Sequential([keras3.Input((8,)), keras3.layers.Dense(8, name="a")]))
    path = of_weights(model, tmp_path)
    model.quantize("int8")
    with pytest.raises(WarmStartError):
        looplib.warm_start({"model": model}, path)


def test_a_file_of_the_library_itself_is_read(tmp_path):
    class Module(tf.Module):
        def __init__(self):
            super().__init__()
            self.a = tf.Variable(tf.zeros([1, 2]), name="a")
            self.b = tf.Variable(tf.zeros([1], tf.bfloat16), name="b")

    (tmp_path / "real.safetensors").write_bytes(REFERENCE)
    module = Module()
    looplib.warm_start({"module": module}, str(tmp_path / "real.safetensors"))
    assert module.a.numpy().tolist() == [[1, 2]] and module.b.numpy().tolist() == [3]
    ours = write_safetensors(tmp_path / "ours", {"a": np.array([[1, 2]], np.float32), "b": bfloat16([3])})
    assert open(ours, "rb").read() == REFERENCE  # so the other tests write what the library does


@pytest.fixture
def memory(monkeypatch, tmp_path):
    """The URL of a folder in fsspec's store in memory, and its files."""
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("LOOPLIB_CACHE", str(tmp_path / "cache"))
    store = fsspec.filesystem("memory")
    yield "memory://weights", store
    store.rm("/weights", recursive=True)


@pytest.mark.slow
def test_weights_at_a_url_are_fetched_and_an_index_brings_its_shards(memory, tmp_path):
    url, store = memory
    source, target = filled(fresh(keras3, functional)), fresh(keras3, functional)
    folder = tmp_path / "written"
    folder.mkdir()
    of_folder(source, folder), of_weights(source, tmp_path), of_keras(source, tmp_path)
    for path in [*folder.iterdir(), tmp_path / "model.weights.h5", tmp_path / "model.keras"]:
        store.pipe_file(f"/weights/{path.relative_to(tmp_path)}", path.read_bytes())
    rules = f"path: {url}/model.weights.h5\nrules: {{'^encoder/(.*)': 'encoder/\\1'}}"
    store.pipe_file("/weights/rules.yaml", rules.encode())
    for name in (
        "written/model.safetensors.index.json", "written", "model.weights.h5", "model.keras", "rules.yaml"
    ):  # fmt: skip
        looplib.warm_start({"model": filled(target, seed=1)}, f"{url}/{name}")
        same(source, target)
    store.rm("/weights/written/model-00002-of-00002.safetensors")
    with pytest.raises(StoreError, match="00002"):
        looplib.warm_start({"model": target}, f"{url}/written/model.safetensors.index.json")
    store.pipe_file("/weights/bad.safetensors.index.json", b'{"weight_map": {"a": "../../a.safetensors"}}')
    with pytest.raises(WarmStartError, match="plain name"):
        looplib.warm_start({"model": target}, f"{url}/bad.safetensors.index.json")


@pytest.mark.parametrize("how", ["checkpoint", "weights"])
def test_a_normalization_computes_with_the_statistics_that_it_takes(how, keras, tmp_path):
    data = np.random.default_rng(0).normal(3.0, 2.0, size=(50, 3)).astype("float32")

    def normalizer(adapts):
        layer = keras.layers.Normalization(name="norm")
        layer.adapt(data) if adapts else layer.build((None, 3))
        return keras.Sequential([keras.Input((3,)), layer])

    source, target = normalizer(True), normalizer(False)
    path = str(tmp_path / ("source.weights.h5" if how == "weights" else "source"))
    if how == "weights":
        source.save_weights(path)
    else:
        path = tf.train.Checkpoint(model=source).save(path)
    looplib.warm_start({"model": target}, path)
    expected = (data - data.mean(0)) / data.std(0)
    np.testing.assert_allclose(target.predict(data, verbose=0), expected, rtol=1e-4, atol=1e-5)
