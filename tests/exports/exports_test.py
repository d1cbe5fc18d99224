"""Exports: what a process without looplib loads computes what the trainer does, and a directory appears whole."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap
import time

import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
import toy
from conftest import make_strategy, more, needs_models
from tampering import rewrite_run_state

import looplib
from looplib.__main__ import main as cli
from looplib.errors import CheckpointError, FileError, MissingPartError
from trainers import contrastive, diffusion, gan, image_classification, image_data, language_model, transformer

ROOT = pathlib.Path(__file__).parents[2]
FAMILIES = {"keras": keras3, "tf_keras": tf_keras}
# Loads exports, in a process in which looplib cannot be imported, and writes what they compute for some inputs.
READER = """
    import importlib, json, sys
    sys.modules["looplib"] = None
    try:
        import looplib
    except ImportError:
        pass
    else:
        raise SystemExit("looplib can be imported")
    import numpy as np, tensorflow as tf
    for folder, family in json.load(open(sys.argv[1])):
        inputs = dict(np.load(folder + ".npz"))
        serve = tf.saved_model.load(folder + "/saved_model").signatures["serving_default"]
        found = {name: value.numpy() for name, value in serve(**{k: tf.constant(v) for k, v in inputs.items()}).items()}
        if family:
            model = importlib.import_module(family).models.load_model(folder + "/model.keras")
            found["keras"] = np.array(model(*inputs.values(), training=False))
        np.savez(folder + ".out.npz", **found)
"""


def read_elsewhere(exports, folder):
    """Returns what another process computes with each of some exports: a dict of arrays.

    Args:
      exports: list of (directory, dict of inputs, family of its Keras file or "").
      folder: a `pathlib.Path` for files.
    """
    for path, inputs, _ in exports:
        np.savez(f"{path}.npz", **inputs)
    (folder / "exports.json").write_text(json.dumps([(str(path), family) for path, _, family in exports]))
    (folder / "reader.py").write_text(textwrap.dedent(READER))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, folder / "reader.py", folder / "exports.json"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [dict(np.load(f"{path}.out.npz")) for path, _, _ in exports]


def digits(size):
    """Returns the first images and labels of the test set."""
    context = looplib.InputContext(
        global_batch_size=size, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=0, training=False, start_step=0
    )
    return [part.numpy() for part in next(iter(image_data.digits().test(context)))]


class Gradient(looplib.GradientTrainer):
    """A trainer of any network of one input, `toy.X`."""

    def __init__(self, keras, **others):
        layers = keras.layers
        network = [layers.InputLayer((toy.NUM_FEATURES,)), layers.Dense(8), layers.BatchNormalization(momentum=0.8)]
        model = keras.Sequential([*network, layers.Dropout(0.5), layers.Dense(toy.NUM_CLASSES)])
        super().__init__(model, keras.optimizers.SGD(0.1), **others)

    def dataset(self, context):
        return context.indices(toy.NUM_EXAMPLES).map(lambda i: (tf.gather(toy.X, i), tf.gather(toy.Y, i)))

    def loss_fn(self, inputs):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(inputs[1], self.model(inputs[0], training=True))


def gradient(family, strategy):
    with strategy.scope():
        trainer = Gradient(FAMILIES[family])
        return trainer, None, {"inputs": toy.X}


def keras_trainer(family, strategy):
    keras = FAMILIES[family]
    with strategy.scope():
        model = keras.Sequential([keras.layers.InputLayer((toy.NUM_FEATURES,)), keras.layers.Dense(2, "tanh")])
        model.compile("sgd", "mse")
        trainer = looplib.KerasTrainer(model, toy.X, toy.X[:, :2], validation_data=(toy.X, toy.X[:, :2]))
        return trainer, trainer.evaluator(), {"inputs": toy.X}


def images(model, strategy):
    with strategy.scope():
        config = image_classification.Config(model=model)
        trainer, evaluator = image_classification.build(config)
    return trainer, evaluator, {"inputs": digits(8)[0]}


class Module(tf.Module):
    def __init__(self):
        super().__init__()
        self.kernel = tf.Variable(toy.KERNEL)
        keys = tf.lookup.KeyValueTensorInitializer(["one", "ten"], [1.0, 10.0])
        self.table = tf.lookup.StaticHashTable(keys, 0.0)


class OfModule(toy.RegressionEvaluator):
    """Exports a function of words and numbers."""

    def export(self):
        def serve(batch):
            scale = self.model.table.lookup(batch["word"])[:, None]
            return {
                "scaled": scale * tf.matmul(batch["x"], self.model.kernel),
                "length": tf.strings.length(batch["word"]),
            }

        signature = {"x": tf.TensorSpec([None, 5], name="x"), "word": tf.TensorSpec([None], tf.string, name="word")}
        return looplib.Exported(serve, signature, self.model)

    def step_fn(self, inputs):
        return {"zero": tf.reduce_sum(tf.matmul(inputs[0], self.model.kernel), 1) * 0}


CASES = {
    # With dropout and batch normalization.
    "GradientTrainer, tf_keras, two replicas": (gradient, "tf_keras", "mirrored_x2"),
}
REPEATED = {
    "GradientTrainer, Keras 3": (gradient, "keras", "default"),
    "KerasTrainer, Keras 3, two replicas": (keras_trainer, "keras", "mirrored_x2"),
    # The test of the command below exports an image classifier.
    "image classification, cnn": (images, "cnn", "default"),
}
RESNET = "image classification, resnet18"


@pytest.fixture(scope="module")
def exported(cases, tmp_path_factory):
    """Each case trained for two steps and exported: dict from its name to (outputs, what another process has)."""
    folder, exports, expected = tmp_path_factory.mktemp("exports"), [], {}
    for number, name in enumerate(cases("name")):
        build, argument, strategy = {**CASES, **REPEATED, RESNET: (images, "resnet18", "default")}[name]
        strategy = make_strategy(strategy)
        trainer, evaluator, inputs = build(argument, strategy)
        with looplib.Controller(
            looplib.RunConfig(global_batch_size=8), trainer=trainer, evaluator=evaluator, strategy=strategy, writers=[]
        ) as controller:
            controller.train(2)
            path = controller.export(folder / str(number))
        # A ResNet of Model Garden is written as one, and Keras alone does not know its class.
        family = "" if argument == "resnet18" else argument if argument in FAMILIES else "keras"
        exports.append((path, inputs, family))
        expected[name] = np.array(trainer.model(*inputs.values(), training=False))
    controller = looplib.Controller(looplib.RunConfig(global_batch_size=8), evaluator=OfModule(Module()), writers=[])
    words = {"x": toy.X[:3], "word": np.array(["ten", "no", "one"])}
    exports.append((controller.export(folder / "own"), words, ""))
    expected["own"] = toy.X[:3] @ toy.KERNEL * [[10], [0], [1]]
    return dict(zip(expected, zip(expected.values(), read_elsewhere(exports, folder))))


@pytest.mark.parametrize(
    "name", [*CASES, *more(REPEATED), pytest.param(RESNET, marks=[needs_models, pytest.mark.slow])]
)
def test_what_is_loaded_without_looplib_computes_what_the_trainer_does(name, exported):
    expected, found = exported[name]
    assert np.ptp(expected) > 0.01 and found.keys() >= {"keras"} - ({"keras"} if "resnet" in name else set())
    for part in found.values():
        np.testing.assert_allclose(part, expected, rtol=0, atol=1e-6 * max(1, np.abs(expected).max()))


class OfOneRow(language_model.LanguageModelEvaluator):
    def dataset(self, context):
        return tf.data.Dataset.from_tensors((tf.constant([[7, 1, 2]]), tf.constant([0])))

    def step_fn(self, inputs):
        return {"tokens": looplib.total(tf.size(inputs[0]))}


def research():
    """Builds each of the research trainers that has a model of its own kind: yields (evaluator, inputs, outputs)."""
    noise = np.random.default_rng(0).normal(size=(3, 8, 8, 1)).astype(np.float32)
    labels = np.array([3, 1, 4])
    _, evaluator = gan.build(gan.Config(width=16, noise_size=4))
    inputs = {"noise": noise[:, 0, :4, 0], "labels": labels}
    yield evaluator, inputs, evaluator.sample(*map(tf.constant, inputs.values()))
    _, evaluator = diffusion.build(diffusion.Config(width=8, sampling_steps=2))
    yield evaluator, {"noise": noise, "labels": labels}, evaluator.sample(tf.constant(noise), tf.constant(labels))
    _, evaluator = contrastive.build(contrastive.Config(width=32, projection=16))
    name = tf.nest.flatten(evaluator.export().signature)[0].name or "inputs"
    yield evaluator, {name: noise}, evaluator.model(noise, training=False)[0]
    model = transformer.Decoder(9, 7, transformer.Size(width=8, layers=1, heads=2))
    evaluator = OfOneRow(model, None, None)
    tokens = np.array([[7, 1, 2, 7, 5], [7, 0, 1, 2, 3]], np.int32)
    yield evaluator, {"tokens": tokens}, model(tokens)


@pytest.mark.slow
def test_the_research_trainers_export_what_they_compute(tmp_path):
    exports, expected = [], []
    for evaluator, inputs, outputs in research():
        controller = looplib.Controller(looplib.RunConfig(global_batch_size=8), evaluator=evaluator, writers=[])
        path = controller.export(tmp_path / type(evaluator).__name__, averages=False)
        exports.append((path, inputs, ""))
        expected.append(np.array(outputs))
    for found, outputs in zip(read_elsewhere(exports, tmp_path), expected, strict=True):
        found = next(part for part in found.values() if part.shape == outputs.shape)
        np.testing.assert_allclose(found, outputs, rtol=0, atol=1e-6 * max(1, np.abs(outputs).max()))


def test_a_function_of_ones_own_is_exported_with_its_tables(exported):
    expected, found = exported["own"]
    np.testing.assert_allclose(found["scaled"], expected, rtol=1e-5, atol=1e-6)
    assert found["length"].tolist() == [3, 2, 3]


class Averaged(toy.RegressionEvaluator):
    def __init__(self, trainer):
        super().__init__(trainer.model)
        self.averages = trainer.averages


@pytest.mark.slow
@pytest.mark.parametrize("evaluates", [False, True])
def test_averages_are_exported_unless_the_last_weights_are_asked_for(evaluates, tmp_path):
    trainer = Gradient(keras3, average_decay=0.9)
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=8),
        trainer=trainer,
        evaluator=Averaged(trainer) if evaluates else None,
        writers=[],
    ) as controller:
        controller.train(5)
        last = np.array(trainer.model.layers[-1].kernel)
        average = trainer.averages.values[-2].numpy()
        for averages, kernel in ((True, average), (False, last)):
            path = controller.export(tmp_path / str(averages), averages=averages)
            restored = keras3.models.load_model(f"{path}/model.keras").layers[-1].kernel
            np.testing.assert_array_equal(restored, kernel)
            record = json.loads(pathlib.Path(path, "export.json").read_text())
            assert record["weights"] == ("averages" if averages else "last") and record["step"] == 5
    assert np.abs(average - last).max() > 1e-3
    np.testing.assert_array_equal(trainer.model.layers[-1].kernel, last)


class Scripted(toy.RegressionEvaluator):
    """Reports a given accuracy at each step."""

    accuracies = dict(zip(range(2, 13, 2), [0.1, 0.5, 0.4, 0.6, 0.6, 0.7]))

    def loop_end(self, metrics):
        return {**metrics, "accuracy": self.accuracies.get(int(self.global_step), 0.0)}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("stops", [[12], [5, 8, 12]])
def test_the_best_are_exported_as_they_come_over_restarts_too(stops, tmp_path):
    for steps in stops:
        trainer, made = toy.Regression(), []
        action = looplib.ExportBest("eval/accuracy", tmp_path / "best", number=2)
        with toy.controller(
            make_strategy("default"), trainer, Scripted(trainer.model), model_dir=tmp_path / "run",
            actions=[action, lambda event: event.split == "eval" and made.append((event.step, [*filter(re.compile("step").match, names(tmp_path / "best"))]))],
        ) as controller:  # fmt: skip
            controller.train_and_evaluate(steps, 2)
            if steps == 12:
                assert made[-1] == (12, ["step-12", "step-8"])
                assert "| eval | 12 | accuracy | 0.7 |" in (tmp_path / "best" / "step-12" / "README.md").read_text()
                np.testing.assert_array_equal(
                    keras3.models.load_model(tmp_path / "best" / "step-12" / "model.keras").get_weights()[0],
                    trainer.weights()[0],
                )
    if len(stops) == 1:
        kept = dict(made)
        assert [kept[step] for step in (2, 4, 6, 8, 10)] == [
            ["step-2"], ["step-2", "step-4"], ["step-2", "step-4"], ["step-4", "step-8"], ["step-4", "step-8"]
        ]  # fmt: skip


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def best(folder, steps, directory=None):
    """Trains to a step, and keeps the newest export that is better than those before."""
    trainer = toy.Regression()
    action = looplib.ExportBest("eval/accuracy", directory)
    with toy.controller(
        make_strategy("default"), trainer, Scripted(trainer.model), model_dir=folder, writers=None, actions=[action]
    ) as controller:
        controller.train_and_evaluate(steps, 2)


@pytest.mark.slow
def test_a_finished_run_that_starts_again_leaves_its_exports_as_they_are(tmp_path):
    best(tmp_path, 4)
    made = tmp_path / "export" / "step-4" / "export.json"
    before = made.stat().st_mtime_ns, made.stat().st_ino
    best(tmp_path, 4)
    assert (made.stat().st_mtime_ns, made.stat().st_ino) == before
    with toy.controller(None, toy.Regression(), model_dir=tmp_path) as controller:
        with pytest.raises(looplib.UsageError, match="is in the export"):
            controller.export(made.parent / "mine" / "own")


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run whose best export is that of step 4."""
    folder = tmp_path_factory.mktemp("first") / "run"
    best(folder, 6)
    return folder


def paths_in(folder):
    """Returns the names of the files that hold the path of a run, except those that say how it was started."""
    said = ("run.json", "lock", "report.html")
    return [name for name, content in contents(folder).items() if str(folder).encode() in content and name not in said]


@pytest.mark.slow
@pytest.mark.parametrize("how", [shutil.copytree, shutil.move])
def test_a_run_that_was_copied_or_moved_removes_its_own_exports_only(how, first, tmp_path):
    folder, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(first, folder)
    how(folder, other)
    before = contents(folder)
    best(other, 8)
    assert names(other / "export") == ["step-8"]
    assert contents(folder) == before and (before == {}) == (how is shutil.move)
    assert paths_in(first) == paths_in(other) == []


@pytest.mark.slow
def test_exports_that_a_checkpoint_from_elsewhere_names_are_removed_inside_the_run_only(first, tmp_path):
    """By a link in its folder; a path is refused."""
    folder, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(first, folder)
    shutil.move(folder / "export" / "step-4", outside / "step-4")
    (folder / "export" / "step-4").symlink_to(outside / "step-4")
    before = contents(outside)

    def change(state):
        state["actions"]["ExportBest(eval/accuracy, max)"][-1] = ["step-4"]

    rewrite_run_state(folder / "checkpoints" / "ckpt-6.commit", change)
    best(folder, 8)
    assert contents(outside) == before != {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [[".."], ["step-4/.."], ["../step-4"], ["/step-4"], [""], ["step-x"], [4], "step-4", None]
)
def test_names_of_exports_that_are_none_are_a_sentence(names, first, tmp_path):
    shutil.copytree(first, tmp_path / "run")

    def change(state):
        state["actions"]["ExportBest(eval/accuracy, max)"][-1] = names

    rewrite_run_state(tmp_path / "run" / "checkpoints" / "ckpt-6.commit", change)
    with pytest.raises(CheckpointError, match="ExportBest"):
        best(tmp_path / "run", 8)


def layers_of_ones_own(keras):
    """Models with a layer or a function that Keras does not know, and what is said of them; "" where it is loaded."""
    register = keras.saving.register_keras_serializable

    class Plain(keras.layers.Layer):
        def call(self, inputs):
            return 2 * inputs

    class Forgetful(keras.layers.Layer):
        def __init__(self, factor=1.0, **others):
            super().__init__(**others)
            self.factor = factor

        def call(self, inputs):
            return self.factor * inputs

        def get_config(self):
            return super().get_config()

    class Complete(Forgetful):
        def get_config(self):
            return {**super().get_config(), "factor": self.factor}

    register(keras.__name__)(Forgetful), register(keras.__name__)(Complete)
    own_loss = lambda labels, outputs: tf.square(labels - outputs)
    kinds = {
        "no such class": (Plain(), "Keras cannot load what it has written"),
        "lambda": (keras.layers.Lambda(lambda x: 2 * x), "Keras cannot load what it has written"),
        "an argument is lost": (Forgetful(3.0), "what Keras loads differs by "),
        "complete": (Complete(3.0), ""),
    }
    for kind, (layer, words) in kinds.items():
        model = keras.Sequential([keras.Input((toy.NUM_FEATURES,)), keras.layers.Dense(2), layer])
        if kind == "complete":  # which another program has no loss for
            model.compile("sgd", own_loss)
        yield model, words


@pytest.mark.slow
def test_a_keras_file_is_left_out_that_keras_does_not_load_as_the_model(keras, tmp_path):
    for number, (model, words) in enumerate(layers_of_ones_own(keras)):
        evaluator = toy.RegressionEvaluator(model)
        with looplib.Controller(
            looplib.RunConfig(global_batch_size=8, loop="eager"), evaluator=evaluator, writers=[]
        ) as controller:
            path = controller.export(tmp_path / str(number))
        record = json.loads((tmp_path / str(number) / "export.json").read_text())
        there = "model.keras" in names(tmp_path / str(number))
        assert there == ("model.keras" in record["files"]) == ("model.keras" in record["differences"]) == (not words)
        assert record["left_out"].get("model.keras", "").startswith(words), record
        if there:
            again = keras.models.load_model(f"{path}/model.keras")
            x = toy.X[:7]
            kernel, bias = model.get_weights()
            np.testing.assert_allclose(np.array(again(x)), 3 * (x @ kernel + bias), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_what_cannot_be_exported_is_a_sentence(tmp_path):
    class Modelless(toy.RegressionEvaluator):
        def __init__(self):
            super().__init__(None)

        def step_fn(self, inputs):
            return {"zero": inputs[0][:, 0] * 0}

    class Subclassed(keras3.Model):
        def call(self, inputs):
            return inputs

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    (tmp_path / "c").mkdir()
    for name in ("thesis.tex", "export.json"):
        (tmp_path / "c" / name).write_text("")
    model = toy.Regression().model
    for evaluator, directory, words in [
        (Modelless(), tmp_path / "x", "Modelless has no Keras model as its attribute model"),
        (toy.RegressionEvaluator(Subclassed()), tmp_path / "x", "a model without Input layers"),
        (toy.RegressionEvaluator(model), tmp_path / "mine", "holds something else than an export"),
        (toy.RegressionEvaluator(model), tmp_path / "c", "c holds something else than an export"),
        (toy.RegressionEvaluator(model), "gs://bucket/x", "gs://bucket/x.* like a URL"),
        (toy.RegressionEvaluator(model), "/proc/x/y", "/proc/x/y cannot be written"),
        (toy.RegressionEvaluator(model), None, "export without a directory needs a model_dir"),
    ]:
        with looplib.Controller(looplib.RunConfig(global_batch_size=8), evaluator=evaluator, writers=[]) as controller:
            with pytest.raises(looplib.UsageError, match=words):
                controller.export(directory)
    assert names(tmp_path / "mine") == ["thesis.tex"] and not (tmp_path / "x").exists()
    assert names(tmp_path / "c") == ["export.json", "thesis.tex"]
    with pytest.raises(FileError, match="ExportBest.directory is .gs://b/x., .* URL"):
        best(tmp_path / "run", 2, "gs://b/x")
    with pytest.raises(MissingPartError, match="ExportBest"):
        trainer = toy.Regression()
        action = looplib.ExportBest("eval/accuracy")
        toy.controller(
            make_strategy("default"), trainer, toy.RegressionEvaluator(trainer.model), actions=[action]
        ).train(1)


@pytest.mark.slow
def test_an_export_that_is_killed_leaves_nothing_in_its_place(nursery, tmp_path):
    run, out, small = tmp_path / "run", tmp_path / "out", "--config.state_mb=0.01"
    life = nursery.life(run, small, "--mode=export")
    assert life.code() == 1 and "there is no checkpoint in" in life.output()
    life = nursery.life(run, small, "--mode=train", "--train_steps=4", "--loop=eager")
    assert life.code() == 0, life.output()
    life = nursery.life(run, small, "--mode=export", f"--export={out}")
    until = time.monotonic() + 60
    while not list(tmp_path.glob("out.*.new")) and time.monotonic() < until:
        time.sleep(0.001)
    life.kill()
    assert life.code() == -9 and not out.exists()
    for _ in range(2):  # the second replaces the first
        life = nursery.life(run, small, "--mode=export", f"--export={out}")
        assert life.code() == 0, life.output()
        assert "exported the weights of step 4" in life.output()
        assert names(out) == ["README.md", "export.json", "model.keras", "saved_model"]
    assert names(tmp_path) == ["out", "run"]


@pytest.mark.slow
def test_the_command_exports_what_a_binary_has_trained(nursery, tmp_path, capsys):
    binary = [f"--model_dir={tmp_path}/run", "--config.model=mlp", "--loop=eager"]
    for arguments in (["--mode=train", "--train_steps=4"], ["--mode=predict"]):
        life = nursery.life_of("trainers.image_classification", *binary, *arguments)
        assert life.code() == 0, life.output()
    done = subprocess.run(
        [nursery.python, "-m", "looplib", "export", tmp_path / "run", tmp_path / "out", "--formats=safetensors,int8",
         "--license=mit"],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pixels, labels = digits(360)
    loaded = tf.saved_model.load(str(tmp_path / "out" / "saved_model"))
    found = loaded.serve(pixels).numpy()
    records = [json.loads(line) for line in open(tmp_path / "run" / "predictions" / "eval" / "piece-00000.jsonl")]
    assert [record["label"] for record in records] == labels.tolist()
    softmax = np.exp(found - found.max(1, keepdims=True))
    softmax /= softmax.sum(1, keepdims=True)
    np.testing.assert_allclose([record["probabilities"] for record in records], softmax, rtol=0, atol=1e-6)
    assert names(tmp_path / "out") == [
        "README.md", "export.json", "model.int8.tflite", "model.keras", "model.safetensors", "saved_model"
    ]  # fmt: skip
    card, cost = (
        (tmp_path / "out" / "README.md").read_text(),
        json.loads((tmp_path / "out" / "export.json").read_text()),
    )
    assert "license: mit" in card and str(tmp_path) not in card
    assert cost["int8"]["examples"] == len(labels)
    assert cli(["export", str(tmp_path / "run"), str(tmp_path / "other"), "--formats=gguf"]) == 2
    assert "gguf" in capsys.readouterr().err
    assert cli(["export", str(tmp_path)]) == 2
    assert "run.json cannot be read; name the run directory of a training" in capsys.readouterr().err


@pytest.mark.slow
def test_an_export_keeps_the_states_of_stateful_layers_of_the_file_and_of_the_training(keras, tmp_path):
    rnn = keras.layers.LSTM(4, stateful=True, name="rnn")
    model = keras.Sequential([keras.Input((5, 3), batch_size=2), rnn, keras.layers.Dense(2)])
    x = np.random.default_rng(0).normal(size=(2, 5, 3)).astype("float32")
    model.compile("sgd", "mse")
    trainer = looplib.KerasTrainer(model, np.tile(x, (4, 1, 1)), np.zeros((8, 2), "float32"), shuffle=False)
    with looplib.Controller(looplib.RunConfig(global_batch_size=2), trainer=trainer, model_dir=tmp_path / "run") as run:
        run.train(4)
        before = [np.array(state) for state in rnn.states]
        loaded = tf.saved_model.load(f"{run.export(tmp_path / 'export')}/saved_model")
        assert any(state.any() for state in before)
        assert all(np.array_equal(state, now) for state, now in zip(before, rnn.states, strict=True))
        np.testing.assert_allclose(loaded.serve(x), model(x, training=False), atol=1e-6)


@pytest.mark.parametrize("names", [("age", "item id"), ("a/b", "a_b")])
def test_names_of_inputs_that_no_export_can_have_are_refused_before_the_training(names, keras, tmp_path):
    inputs = {name: keras.Input((3,), name=f"input_{number}") for number, name in enumerate(names)}
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(list(inputs.values()))))
    model.compile("sgd", "mse")
    x, y = {name: np.zeros((16, 3), "float32") for name in names}, np.zeros((16, 1), "float32")
    trainer = looplib.KerasTrainer(model, x, y, validation_data=(x, y))
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=8),
        trainer=trainer,
        evaluator=trainer.evaluator(),
        model_dir=str(tmp_path),
        writers=[],
        actions=[looplib.ExportBest("eval/loss")],
    )
    with pytest.raises(looplib.UsageError, match=names[1]):
        controller.train_and_evaluate(2, 1)
    assert controller.global_step == 0
