"""Formats of exports: each file, loaded by its own runtime in another process, computes what numpy does; and cards."""

import functools
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
import toy
import yaml
from conftest import make_strategy

import looplib
from looplib.errors import ExportError, PluginError, RunDirectoryError
from looplib.exports import int8
from looplib.exports.int8 import MOST_CALIBRATION
from looplib.exports.new_folder import check_free
from looplib.exports.parts import difference
from looplib.exports.samples import MOST_EXAMPLES, ModelInputs, find_inputs

FAMILIES = {"keras": keras3, "tf_keras": tf_keras}
EXAMPLES, FEATURES, CLASSES = 1200, 6, 3
_random = np.random.default_rng(0)
X = _random.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
Y = (X[:, :CLASSES].argmax(1)).astype(np.int64)
INSTALLED = [name for name in ("safetensors", "onnxruntime", "tf2onnx") if importlib.util.find_spec(name)]
FORMATS = ["int8", "tflite", "weights.h5", "safetensors", *(["onnx"] if "tf2onnx" in INSTALLED else [])]
# In a process in which looplib cannot be imported: loads each file of exports by its own runtime.
READER = """
    import importlib.util, os, re, sys
    sys.modules["looplib"] = None
    import numpy as np, tensorflow as tf
    x, family = np.load(sys.argv[1]), sys.argv[2]
    os.chdir(sys.argv[3])
    keras = importlib.import_module(family)
    found = {}
    model = keras.models.load_model("model.keras")
    found["model.keras"] = np.array(model(x, training=False))
    model.set_weights([np.zeros_like(value) for value in model.get_weights()])
    model.load_weights("model.weights.h5")
    found["model.weights.h5"] = np.array(model(x, training=False))
    for name in ("model.tflite", "model.int8.tflite"):
        runner = tf.lite.Interpreter(name).get_signature_runner("serving_default")
        (found[name],) = runner(inputs=x).values()
    if os.path.exists("model.onnx"):
        import onnxruntime
        session = onnxruntime.InferenceSession("model.onnx")
        (found["model.onnx"],) = session.run(None, {"inputs": x})
    np.savez("../" + family + ".npz", **found)
    if importlib.util.find_spec("safetensors"):
        from safetensors.numpy import load_file
        np.savez("../" + family + ".weights.npz", **load_file("model.safetensors"))
    (program,) = re.findall("```python\\n(.*?)```", open("README.md").read(), re.S)
    exec(program, names := {})
    (printed,) = names["outputs"].values()
    assert printed.shape == (2, 3), printed.shape
"""


class Classifier(looplib.GradientTrainer):
    def __init__(self, keras, **settings):
        layers = keras.layers
        network = [layers.InputLayer((FEATURES,)), layers.Dense(16, "relu"), layers.BatchNormalization(momentum=0.8)]
        model = keras.Sequential([*network, layers.Dropout(0.5), layers.Dense(CLASSES)])
        super().__init__(model, keras.optimizers.Adam(0.05), **settings)

    def dataset(self, context):
        return context.indices(EXAMPLES).map(lambda i: (tf.gather(X, i), tf.gather(Y, i)))

    def loss_fn(self, inputs):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(inputs[1], self.model(inputs[0], training=True))


class Accuracy(looplib.Evaluator):
    def dataset(self, context):
        return context.indices(EXAMPLES).map(lambda i: (tf.gather(X, i), tf.gather(Y, i)))

    def step_fn(self, inputs):
        return {"accuracy": tf.equal(tf.argmax(self.model(inputs[0], training=False), 1), inputs[1])}


def in_numpy(weights):
    """Computes the outputs of the network for `X` in inference, in float64."""
    kernel, bias, gamma, beta, mean, variance, last, last_bias = (value.astype(np.float64) for value in weights)
    hidden = np.maximum(X @ kernel + bias, 0)
    hidden = (hidden - mean) / np.sqrt(variance + 1e-3) * gamma + beta
    return hidden @ last + last_bias


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A function of a family: (trainer, metrics, run directory, export, dict of what another process found)."""
    folder = tmp_path_factory.mktemp("formats")
    np.save(folder / "x.npy", X)

    @functools.cache
    def export(family):
        trainer = Classifier(FAMILIES[family])
        with looplib.Controller(
            looplib.RunConfig(global_batch_size=100), trainer=trainer, evaluator=Accuracy(trainer.model),
            model_dir=folder / family, config={"rate": 0.05, "place": "/somewhere/else"}, writers=[],
        ) as controller:  # fmt: skip
            metrics = controller.train_and_evaluate(30, 30)["eval"]
            path = pathlib.Path(controller.export(formats=FORMATS, license="apache-2.0"))
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(READER), folder / "x.npy", family, path],
            capture_output=True, text=True, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return trainer, metrics, folder / family, path, dict(np.load(f"{path.parent}/{family}.npz"))

    return export


def record_of(path):
    return json.loads((path / "export.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["tf_keras", "keras"])
def test_each_file_computes_in_its_own_runtime_what_numpy_does(family, exported):
    trainer, _, _, path, found = exported(family)
    expected, record = in_numpy(trainer.model.get_weights()), record_of(path)
    assert record["left_out"] == {}
    for name, outputs in found.items():
        if name != "model.int8.tflite":
            np.testing.assert_allclose(outputs, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
            assert record["differences"][name] <= 1e-5 * np.abs(expected).max()
    assert {f"model.{name.replace('int8', 'int8.tflite')}" for name in FORMATS} <= {*found, "model.safetensors"}
    if (weights := path.parent / f"{family}.weights.npz").exists():
        loaded = dict(np.load(weights))
        assert sorted(loaded) == sorted([
            "dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias", *(
                f"batch_normalization/{name}" for name in ("gamma", "beta", "moving_mean", "moving_variance"))
        ])  # fmt: skip
        assert loaded["dense_1/kernel"].tobytes() == trainer.model.layers[-1].get_weights()[0].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["tf_keras", "keras"])
def test_weights_come_back_bit_by_bit_from_an_export(family, exported):
    trainer, _, _, path, _ = exported(family)
    for name in ("model.safetensors", "model.weights.h5"):
        other = Classifier(FAMILIES[family]).model  # whose layers have other numbers
        looplib.warm_start({"model": other}, path / name)
        for one, two in zip(other.get_weights(), trainer.model.get_weights(), strict=True):
            assert one.tobytes() == two.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["tf_keras", "keras"])
def test_what_int8_costs_is_measured_on_the_evaluation_data(family, exported):
    trainer, _, _, path, found = exported(family)
    expected, quantized = (
        in_numpy(trainer.model.get_weights())[:MOST_EXAMPLES],
        found["model.int8.tflite"][:MOST_EXAMPLES],
    )
    cost = record_of(path)["int8"]
    assert (cost["kind"], cost["split"], cost["examples"], cost["calibrated"]) == (
        "integer", "eval", MOST_EXAMPLES, MOST_CALIBRATION
    )  # fmt: skip
    (output,) = cost["outputs"].values()
    differences = np.abs(expected - quantized)
    assert 0 < output["mean"] < 0.05 * np.abs(expected).max() and output["mean"] < output["largest"]
    np.testing.assert_allclose(
        [output["largest"], output["mean"], output["same_class"]],
        [differences.max(), differences.mean(), (expected.argmax(1) == quantized.argmax(1)).mean()],
        rtol=1e-3,
    )  # fmt: skip
    types = {each["dtype"] for each in tf.lite.Interpreter(str(path / "model.int8.tflite")).get_tensor_details()}
    assert np.int8 in types


@pytest.mark.slow
@pytest.mark.parametrize("family", ["tf_keras", "keras"])
def test_a_card_says_what_the_model_is_and_hubs_can_read_its_head(family, exported):
    trainer, metrics, run, path, _ = exported(family)
    text = (path / "README.md").read_text()
    _, head, body = text.split("---\n", 2)
    front = yaml.safe_load(head)
    assert front["library_name"] == {"keras": "keras", "tf_keras": "tf-keras"}[family]
    assert front["license"] == "apache-2.0" and front["metrics"] == ["accuracy"] and "tflite" in front["tags"]
    assert f"{sum(value.size for value in trainer.model.get_weights()):,} parameters" in body
    assert re.search(rf"\| eval \| 30 \| accuracy \| {metrics['accuracy']:.6g} \|", body)
    assert f"{EXAMPLES:,} examples" in body and "config." not in body
    assert "The metrics above are those of the model in floating-point numbers." in body
    assert "/somewhere" not in text and str(run) not in text
    assert f"tensorflow {tf.__version__}" in body


def test_formats_and_licenses_are_refused_before_anything_is_written(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tf2onnx", None)  # as where it is not installed
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=8), evaluator=toy.RegressionEvaluator(toy.Regression().model), writers=[]
    )
    for settings, kind, words in [
        ({"formats": ["tflite", "gguf"]}, ExportError, "gguf.*safetensors, weights.h5, onnx, tflite, int8"),
        ({"formats": "onnx"}, ExportError, "list"),
        ({"formats": ["onnx"]}, PluginError, r"tf2onnx.*pip install 'looplib\[onnx\]'"),
        ({"license": "a\nb"}, ExportError, "license"),
        ({"license": None}, ExportError, "license"),
    ]:
        with pytest.raises(kind, match=words):
            controller.export(tmp_path / "out", **settings)
        with pytest.raises(kind, match=words):
            looplib.ExportBest("eval/accuracy", **settings)
    assert list(tmp_path.iterdir()) == []


def test_what_no_converter_takes_is_left_out_with_its_reason(tmp_path):
    class Decomposed(toy.RegressionEvaluator):
        def export(self):
            whole = super().export()
            return looplib.Exported(lambda x: tf.linalg.svd(whole.function(x))[0], whole.signature, whole.model)

    formats = [name for name in FORMATS if name in ("tflite", "int8", "onnx")]
    evaluator = Decomposed(toy.Regression().model)
    controller = looplib.Controller(looplib.RunConfig(global_batch_size=8), evaluator=evaluator, writers=[])
    path = pathlib.Path(controller.export(tmp_path / "out", formats=formats))
    left_out = record_of(path)["left_out"]
    assert sorted(left_out) == sorted(f"model.{name}".replace("int8", "int8.tflite") for name in formats)
    assert all("does not take it" in reason for reason in left_out.values())
    assert sorted(one.name for one in path.iterdir()) == ["README.md", "export.json", "model.keras", "saved_model"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_infinite_outputs_keeps_its_files(family, tmp_path):
    keras, rows = FAMILIES[family], np.array([[0, -np.inf, np.inf]], np.float32)
    model = keras.Sequential(
        [keras.layers.Input((FEATURES,)), keras.layers.Dense(3), keras.layers.Dense(3, name="last")]
    )
    model.layers[-1].set_weights([np.eye(3, dtype=np.float32), rows[0]])

    class Masked(looplib.Evaluator):
        def dataset(self, context):
            return context.indices(8).map(lambda i: tf.gather(X, i))

        def step_fn(self, inputs):
            return {"value": self.model(inputs)[:, 0]}

    controller = looplib.Controller(looplib.RunConfig(global_batch_size=8), evaluator=Masked(model), writers=[])
    record = record_of(pathlib.Path(controller.export(tmp_path / "out", formats=["weights.h5"])))
    assert record["left_out"] == {}
    assert all(far <= 1e-3 for far in record["differences"].values()) and len(record["differences"]) == 3
    assert difference([rows], [rows + 0]) == 0
    for other in ([[0, 0, np.inf]], [[0, -np.inf, np.nan]], [[np.nan, -np.inf, np.inf]]):
        assert difference([np.zeros((1, 3))], [rows]) == difference([rows], [np.array(other)]) == np.inf


def test_inputs_are_found_in_a_batch_by_structure_names_and_shapes():
    x, y, words = tf.zeros([4, 5]), tf.zeros([4], tf.int64), tf.zeros([4, 7], tf.int32)
    one, two = tf.TensorSpec([None, 5], name="x"), tf.TensorSpec([None, 7], tf.int32, name="words")
    for batch, signature, expected in [
        (x, one, [x]), ((x, y), one, [x]), ((y, x), one, [x]), ((y, words), one, None), ({"x": x, "y": y}, one, [x]),
        (({"x": x, "words": words}, y), {"words": two, "x": one}, [words, x]),
        ({"x": x, "words": words, "y": y}, {"words": two, "x": one}, [words, x]),
        ((x, words, y), (one, two), None), (((x, words), y), (one, two), [x, words]), ((tf.cast(x, tf.uint8), y), one, "cast"),
    ]:  # fmt: skip
        found = find_inputs(batch, signature)
        if expected == "cast":
            assert found[0].dtype == tf.uint8
        else:
            assert (found is None) == (expected is None) and all(a is b for a, b in zip(found or (), expected or ()))


@pytest.mark.slow
def test_int8_without_data_that_fits_quantises_the_weights_alone(tmp_path):
    class Other(toy.RegressionEvaluator):
        def export(self):
            whole = super().export()
            spec = tf.TensorSpec([None, 2 * toy.NUM_FEATURES], name="pairs")
            return looplib.Exported(lambda x: whole.function(x[:, : toy.NUM_FEATURES]), spec, whole.model)

    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=8), evaluator=Other(toy.Regression().model), writers=[]
    )
    cost = record_of(pathlib.Path(controller.export(tmp_path / "out", formats=["int8"])))["int8"]
    assert cost["kind"] == "dynamic range" and cost["outputs"] == {} and "no part of a batch" in cost["reason"]


def test_an_export_is_registered_in_mlflow_if_that_is_asked_for(monkeypatch, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_REGISTERED_MODEL", "toy")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    trainer, evaluator = toy.build(tf.distribute.get_strategy())
    with toy.controller(
        None, trainer, evaluator, model_dir=tmp_path / "run", writers=["mlflow"],
        actions=[looplib.ExportBest("eval/accuracy", license="mit")],
    ) as controller:  # fmt: skip
        controller.train_and_evaluate(2, 2)
        path = controller.export(tmp_path / "again")
    assert list((tmp_path / "here").iterdir()) == []
    client = mlflow.MlflowClient(f"file://{tmp_path}/mlruns")
    versions = client.search_model_versions("name = 'toy'")
    assert sorted(version.tags["step"] for version in versions) == ["2", "2"] and len(versions) == 2
    (run,) = {version.run_id for version in versions}
    assert run == (tmp_path / "run" / "mlflow.id").read_text().strip()
    place = pathlib.Path(client.get_model_version_download_uri("toy", "1").removeprefix("file://"))
    assert place.name != pathlib.Path(client.get_model_version_download_uri("toy", "2")).name  # files are never mixed
    texts = {pathlib.Path(path, "README.md").read_bytes(), (tmp_path / "run/export/step-2/README.md").read_bytes()}
    assert (place / "README.md").read_bytes() in texts


def test_numbers_that_are_not_finite_decide_no_range_and_are_no_part_of_the_cost(tmp_path):
    """TensorFlow's converter ends the process where a range is infinite."""
    model = keras3.Sequential([keras3.Input((4,), name="x"), keras3.layers.Dense(3)])
    tf.saved_model.save(
        model, str(tmp_path / "saved"), signatures=tf.function(lambda x: {"y": model(x)}).get_concrete_function(
            tf.TensorSpec([None, 4], name="x"))
    )  # fmt: skip
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    x[3] = np.inf
    content, kind, reason = int8.quantize(str(tmp_path / "saved"), ModelInputs("eval", [{"x": x}]))
    assert content and kind == "dynamic range" and "not finite" in reason
    (cost,) = int8.compare(lambda x: {"y": model(x)}, lambda x: {"y": model(x).numpy() + 0.5}, [{"x": x}]).values()
    assert cost.left_out == 1 and cost.mean == pytest.approx(0.5, rel=1e-5) and cost.same_class == 1.0


@pytest.mark.slow
def test_the_ranges_come_from_batches_of_one_size_as_the_converter_takes_no_others(tmp_path):
    inputs = [keras3.Input((4,), name="a"), keras3.Input((4,), name="b")]
    joined = keras3.layers.Concatenate()([keras3.layers.Dense(3)(one) for one in inputs])
    model = keras3.Model(inputs, keras3.layers.Dense(2)(joined))
    model.export(tmp_path / "saved", verbose=False)
    rows = np.random.default_rng(0).normal(size=(150, 4)).astype("float32")
    samples = ModelInputs("eval", [{"a": part, "b": part} for part in np.split(rows, [48, 96, 144])])
    assert int8.quantize(str(tmp_path / "saved"), samples)[1:] == ("integer", "")
    assert samples.of_one_size(int8.MOST_CALIBRATION).examples == 96


@pytest.mark.slow
def test_on_two_replicas_readers_of_sessions_find_the_mean_of_the_moving_statistics(tmp_path):
    """TensorFlow Serving and the converter read a SavedModel in a session, and not as `tf.saved_model.load` does."""
    strategy = make_strategy("mirrored_x2")
    with strategy.scope():
        trainer = Classifier(tf_keras)
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=100), trainer=trainer, strategy=strategy, writers=[]
    ) as controller:
        controller.train(30)
        path = controller.export(tmp_path / "out", formats=["tflite", "int8"])
    parts = trainer.model.layers[1].moving_mean.values
    assert np.abs(parts[0].numpy() - parts[1].numpy()).max() > 0.01
    expected = in_numpy(trainer.model.get_weights())
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        (output,) = (signature := tf.compat.v1.saved_model.load(
            session, ["serve"], f"{path}/saved_model").signature_def["serving_default"]).outputs.values()  # fmt: skip
        found = {"session": session.run(output.name, {signature.inputs["inputs"].name: X})}
    for name in ("model.tflite", "model.int8.tflite"):
        runner = tf.lite.Interpreter(f"{path}/{name}").get_signature_runner("serving_default")
        (found[name],) = runner(inputs=X).values()
    for name in ("session", "model.tflite"):
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    errors = found["model.int8.tflite"] - expected
    assert np.abs(errors.mean(0)).max() < 0.01 * np.abs(expected).max()


@pytest.mark.slow
def test_an_error_of_the_data_or_of_the_function_is_not_one_of_files(tmp_path):
    class Data(Accuracy):
        def dataset(self, context):
            return super().dataset(context).map(lambda x, y: (x + tf.strings.to_number(tf.io.read_file("/none")), y))

    class Function(Accuracy):
        def export(self):
            whole = super().export()
            return looplib.Exported(lambda x: whole.function(tf.ensure_shape(x, [5, 6])), whole.signature, whole.model)

    trainer = Classifier(keras3)
    for evaluator, error, said in [
        (Data(trainer.model), tf.errors.NotFoundError, "/none"),
        (Function(trainer.model), (ValueError, tf.errors.OpError), r"\[5, ?6\]|shape"),
    ]:
        controller = looplib.Controller(looplib.RunConfig(global_batch_size=100), evaluator=evaluator, writers=[])
        with pytest.raises(error, match=said) as found:
            controller.export(tmp_path / "out", formats=["int8"])
        assert not isinstance(found.value, looplib.UsageError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "folder", ["checkpoints", "checkpoints/mine", "train/x", "test", "export", "media", "x/../eval"]
)
def test_a_folder_that_the_run_writes_is_refused_for_an_export(folder, tmp_path):
    with pytest.raises(RunDirectoryError, match="which the run itself writes"):
        check_free(str(tmp_path / folder), str(tmp_path), "export", ["test", "eval"])
    for free in ("export/mine", "mine"):
        check_free(str(tmp_path / free), str(tmp_path), "export", ["test", "eval"])


@pytest.mark.slow
def test_averages_with_statistics_of_other_weights_are_said_and_folders_of_the_run_are_refused(tmp_path, caplog):
    trainer = Classifier(keras3, average_decay=0.9)
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=100), trainer=trainer, model_dir=tmp_path / "run", writers=[]
    ) as controller:
        controller.export(tmp_path / "equal")
        assert "statistics of batch normalization" not in caplog.text
        controller.train(2)
        controller.export(tmp_path / "other")
        assert caplog.text.count("average DIR OUTPUT --averages --statistics_steps=100") == 1
        for folder in ("checkpoints", "checkpoints/mine", "train/x", "export", "media", "x/../predictions"):
            with pytest.raises(RunDirectoryError, match="which the run itself writes"):
                controller.export(tmp_path / "run" / folder)
    assert "in floating-point numbers" not in (tmp_path / "other" / "README.md").read_text()
