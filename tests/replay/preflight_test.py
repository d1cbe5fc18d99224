"""`python -m looplib check tpu`: faults that are planted are found, on the line where they are; good steps pass."""

import inspect
import itertools
import os
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
import unfit
from conftest import more
from lazily import Results
from paths import PYTHONPATH

import looplib
from looplib import __main__ as tools
from looplib.commands import check as checks
from looplib.compat import tensorflow as _tf
from looplib.errors import CheckError
from looplib.replay import preflight

ROOT = pathlib.Path(__file__).parents[2]
MLP = ("trainers.image_classification", "--config.model=mlp")
UNFIT = lambda faults: ("unfit", f"--config.faults={faults}")
CASES = {
    "good": ("tpu", ["--cores=8"], (*MLP, "--global_batch_size=1024", "--mixed_precision=mixed_bfloat16")),
    "tpu": ("tpu", ["--cores=2"], UNFIT("unique,strings,shape")),
    "gpu": ("gpu", ["--cores=2"], UNFIT("unique,strings")),
    "crash": ("tpu", [], UNFIT("crash")),
}


def check(python, platform, options, binary):
    return subprocess.run(
        [python, "-m", "looplib", "check", platform, *options, "--", python, "-m", *binary],
        capture_output=True, text=True, cwd=ROOT, timeout=300,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "TPU_NAME": "a-tpu-that-is-not-there"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def results(python):
    """What the check of each case comes to."""
    return Results(lambda case: check(python, *CASES[case]))


def line_of(marker):
    """file:line: text, of a line of unfit.py."""
    lines = inspect.getsource(unfit).splitlines()
    number = next(number for number, line in enumerate(lines, 1) if marker in line)
    return f"tests/programs/unfit.py:{number}: {lines[number - 1].strip()}"


@pytest.mark.slow
def test_a_good_binary_is_ready(results):
    result = results["good"]
    assert result.returncode == 0, result.stdout + result.stderr
    assert "train: 128 of 1024 examples on each TPU core; all of it lowers" in result.stdout
    assert "eval: 128 of 1024 examples on each TPU core; all of it lowers" in result.stdout
    assert result.stdout.splitlines()[-1] == "READY for a TPU, as far as can be checked without one"
    assert "fault" not in result.stdout


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize(
    "case, sentence, marker",
    [
        ("tpu", "fault, dynamic shape: the size of what Unique gives depends on values", "tf.unique"),
        ("tpu", "fault, unsupported op: XLA has no AsString for a TPU: strings stay on the host", "tf.strings.as_string"),
        ("tpu", "fault, unsupported op: XLA has no StringLength for a TPU", "tf.strings.length"),
        ("tpu", "fault, dynamic shape: the size of what Where gives depends on values", "tf.boolean_mask"),
        ("gpu", "fault, unsupported op: XLA has no AsString for a GPU", "tf.strings.as_string"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found_on_its_line(case, sentence, marker, results):
    result = results[case]
    assert result.returncode == 1, result.stdout + result.stderr
    lines = [line.strip() for line in result.stdout.splitlines()]
    at = next((number for number, line in enumerate(lines) if line.startswith(sentence)), None)
    assert at is not None, result.stdout
    assert lines[at + 1] == line_of(marker)
    assert re.fullmatch(r"NOT READY for a [TG]PU: \d+ faults?", lines[-1])


def test_what_a_gpu_can_do_is_no_fault_there(results):
    kinds = re.findall(r"fault, ([\w ]+):", results["gpu"].stdout)
    assert kinds and set(kinds) == {"unsupported op"}, results["gpu"].stdout  # of strings, and not tf.unique


def test_a_command_that_fails_is_code_2(results):
    result = results["crash"]
    assert result.returncode == 2 and "looplib: error: the command failed with code 1" in result.stderr


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["check", "tpu"], "there is no command to check"),
        (["check", "tpu", "--cores=0", "--", "python"], "--cores is 0; expected at least 1"),
        (["check", "gpu", "--", "python", "--model_dir=/tmp/x"], "has --model_dir, which the check sets itself"),
        (["check", "tpu", "--", sys.executable, "-c", "pass"], "ended without handing over its steps"),
    ],
)
def test_bad_input_is_a_sentence_and_code_2(arguments, sentence, capsys):
    assert tools.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("looplib: error: ") and sentence in error


def look(step_fn, dataset=None, cores=1, platform="TPU", model=None, batch=8, keras=keras, evaluator=None):
    class Trainer(looplib.Trainer):
        def __init__(self):
            self.model = model or keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
            self.optimizer = keras.optimizers.Adam(0.01)

        def dataset(self, context):
            if dataset:
                return dataset(context)
            return context.indices(64, repeat=True).map(lambda i: tf.ones([context.per_replica_batch_size, 4]))

        def step_fn(self, inputs):
            return step_fn(self, inputs)

    trainer = Trainer()
    evaluator = evaluator(trainer.model) if evaluator else None
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=batch), trainer=trainer, evaluator=evaluator, writers=[]
    )
    return preflight.look(controller, platform, cores)


def kinds(result, fault=True):
    return {
        (finding["kind"], finding["line"].split(": ", 1)[-1])
        for finding in result["findings"]
        if finding["fault"] == fault
    }


def train(self, x):
    with tf.GradientTape() as tape:
        losses = tf.reduce_sum(self.model(x) ** 2, 1)
        loss = self.global_mean(losses)
    variables = self.model.trainable_variables
    self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return {"loss": losses}


def test_faults_within_conditions_and_loops_are_found_on_their_lines():
    def step(self, x):
        def branch():
            return tf.py_function(lambda: 1.0, [], tf.float32)  # within a branch

        size = tf.cond(tf.reduce_sum(x) > 0, branch, lambda: 0.0)
        each = tf.map_fn(lambda row: tf.cast(tf.size(tf.unique(row)[0]), tf.float32), x)
        return {"loss": each + size}

    found = kinds(look(step))
    assert any(kind == "unsupported op" and "within a branch" in line for kind, line in found)
    assert any(kind == "dynamic shape" and "tf.map_fn" in line for kind, line in found)


@pytest.mark.slow
def test_slow_types_are_found_where_they_are_made():
    def step(self, x):
        wide = tf.cast(x, tf.float64)
        half = tf.matmul(tf.cast(x, tf.float16), tf.zeros([4, 2], tf.float16))
        return {"loss": tf.reduce_sum(wide, 1), "half": tf.cast(half[:, 0], tf.float32)}

    found = kinds(look(step))
    assert ("slow dtype", "wide = tf.cast(x, tf.float64)") in found
    assert any(kind == "slow dtype" and line.startswith("half = ") for kind, line in found)
    assert {kind for kind, _ in kinds(look(train))} == set()


@pytest.mark.slow
def test_batches_of_unknown_size_are_found():
    rows = tf.data.Dataset.from_tensor_slices(tf.ones([64, 4])).repeat()
    assert ("dynamic shape", "") in kinds(look(train, lambda context: rows.batch(8)))
    assert kinds(look(train, lambda context: rows.batch(8, drop_remainder=True))) == set()
    assert ("batch size", "") in kinds(look(train, cores=2))  # 4 of a core
    assert ("batch size", "") in kinds(look(train), fault=False)  # 8, not 128


def test_a_batch_that_does_not_divide_is_found():
    (text,) = [finding["text"] for finding in look(train, batch=60, cores=8)["findings"] if finding["fault"]]
    assert text == "a global batch of 60 does not divide over 8 cores; use 64"


def test_an_evaluation_of_batches_that_no_device_takes_tells_the_memory_that_is_known(capsys):
    class Ragged(looplib.Evaluator):
        def __init__(self, model):
            self.model = model

        def dataset(self, context):
            return context.indices(64, repeat=True).map(lambda i: tf.RaggedTensor.from_tensor(tf.ones([tf.size(i), 4])))

        def step_fn(self, inputs):
            return {"loss": tf.reduce_sum(self.model(inputs.to_tensor(shape=[None, 4])), 1)}

    result = look(train, evaluator=Ragged)
    step = result["steps"]["eval"]
    assert not step["lowered"] and step["memory"] == {"parameters": (4 * 2 + 2) * 4, "activations": None}
    findings = [preflight.Finding(**found) for found in result["findings"] if found["split"] == "eval"]
    checks._say_of_step("eval", preflight.FoundStep(**step), findings, "TPU")
    said = capsys.readouterr().out
    assert "Ragged.dataset has a RaggedTensor, which XLA does not take" in said
    assert said.splitlines()[-1].endswith("memory of each TPU core: parameters 40 B, activations not known")


LAYERS = {
    "dropout": lambda k: [k.layers.Dense(4), k.layers.Dropout(0.5)],
    "batch normalization": lambda k: [k.layers.Dense(4), k.layers.BatchNormalization()],
    "convolution": lambda k: [k.layers.Reshape((2, 2, 1)), k.layers.Conv2D(4, 2, padding="same"), k.layers.MaxPool2D(), k.layers.Flatten()],
    "lstm": lambda k: [k.layers.Reshape((4, 1)), k.layers.LSTM(8)],
    "attention": lambda k: [k.layers.Reshape((2, 2)), k.layers.UpSampling1D(2), k.layers.LayerNormalization(), k.layers.Flatten()],
    "embedding": lambda k: [k.layers.Embedding(50, 8), k.layers.Flatten()],
}  # fmt: skip


# The families in turn; the other one of each layer with --all.
IN_TURN = list(zip(LAYERS, itertools.cycle(["keras", "tf_keras"])))
OTHERS = list(zip(LAYERS, itertools.cycle(["tf_keras", "keras"])))


@pytest.mark.slow
@pytest.mark.parametrize("layers, family", [*IN_TURN, *more(OTHERS)])
def test_the_layers_of_both_families_lower(layers, family):
    keras = pytest.importorskip(family)
    """With what they keep, draw at random and hand from step to step."""
    model = keras.Sequential([keras.layers.InputLayer((4,)), *LAYERS[layers](keras), keras.layers.Dense(2)])
    result = look(train, model=model, keras=keras)
    assert result["steps"]["train"]["lowered"], result["findings"]
    assert kinds(result) == set()
    assert result["steps"]["train"]["memory"]["activations and gradients"] > 0


@pytest.mark.slow
def test_a_batch_of_strings_is_found_and_so_is_what_uses_it():
    def dataset(context):
        rows = context.indices(64).map(lambda i: tf.ones([context.per_replica_batch_size, 4]))
        return rows.map(lambda x: (x, tf.fill([context.per_replica_batch_size], "text")))

    def step(self, inputs):
        x, texts = inputs
        return {**train(self, x), "length": tf.strings.length(texts)}

    result = look(step, dataset)
    texts = [finding["text"] for finding in result["findings"] if finding["fault"]]
    assert "Trainer.dataset has a string tensor; map it to numbers there, on the host" in texts
    assert any(text.startswith("XLA has no StringLength for a TPU") for text in texts) and len(texts) == 2
    assert not result["steps"]["train"]["lowered"]


def test_batches_padded_to_their_longest_example_are_found_and_the_step_lowers_at_a_real_ones_size():
    rows = tf.data.Dataset.range(64).map(lambda n: tf.ones([1 + n % 4]))

    def step(self, x):
        return {"loss": tf.reduce_sum(x, 1)}

    result = look(step, lambda context: rows.padded_batch(8, drop_remainder=True).repeat())
    (text,) = [finding["text"] for finding in result["findings"] if finding["fault"]]
    assert text.startswith("Trainer.dataset has batches of shape (8, None); a TPU compiles again for each, so fix it")
    assert result["steps"]["train"]["lowered"] and result["steps"]["train"]["memory"]["batch"] == 8 * 4 * 4


def test_a_step_of_float16_is_slow_on_a_tpu_and_lowers():
    """Loss scaling applies gradients within a condition."""
    model = tf_keras.Sequential([tf_keras.layers.InputLayer((4,)), tf_keras.layers.Dense(2, dtype="mixed_float16")])

    def step(self, x):
        with tf.GradientTape() as tape:
            losses = tf.reduce_sum(tf.cast(self.model(x), tf.float32) ** 2, 1)
            loss = scaled.get_scaled_loss(self.global_mean(losses))
        variables = self.model.trainable_variables
        scaled.apply_gradients(zip(scaled.get_unscaled_gradients(tape.gradient(loss, variables)), variables))
        return {"loss": losses}

    scaled = tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD(0.1))
    scaled.build(model.trainable_variables)
    result = look(step, model=model, keras=tf_keras)
    assert result["steps"]["train"]["lowered"], result["findings"]
    assert {kind for kind, _ in kinds(result)} == {"slow dtype"}


def test_a_lookup_table_is_found():
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1, 2], [3, 4], tf.int64, tf.int64), -1)

    def step(self, x):
        found = table.lookup(tf.cast(x[:, 0], tf.int64))  # in the step
        return {"loss": tf.cast(found, tf.float32)}

    assert any(kind == "unsupported op" and "# in the step" in line for kind, line in kinds(look(step)))


def test_where_tensorflow_has_hidden_what_is_not_public_less_is_reported(monkeypatch):
    """The graphs of called functions, for source lines, and XLA's plan of memory."""
    assert _tf.graph_of(object(), "f") is None
    monkeypatch.setattr(_tf, "graph_of", lambda graph, name: None)
    monkeypatch.setattr(preflight, "_fields", lambda message: [])
    result = look(train)
    assert result["steps"]["train"]["lowered"] and kinds(result) == set()
    assert result["steps"]["train"]["memory"]["activations and gradients"] is None
    result = look(lambda self, x: {"loss": tf.py_function(lambda x: x[:, 0], [x], tf.float32)})
    (text,) = [finding["text"] for finding in result["findings"] if finding["fault"]]
    assert "EagerPyFunc" in text and not result["steps"]["train"]["lowered"]


@pytest.mark.slow
def test_memory_is_what_the_layers_come_to():
    model = keras.Sequential(
        [keras.Input((4,)), *(keras.layers.Dense(256, "relu") for _ in range(4)), keras.layers.Dense(2)]
    )
    weights = 4 * sum(int(np.prod(weight.shape)) for weight in model.weights)
    result = look(train, model=model, batch=4096, cores=2)
    assert result["steps"]["train"]["lowered"]  # with the fused updates of large variables
    memory = result["steps"]["train"]["memory"]
    assert result["steps"]["train"]["batch"] == 2048 and memory["batch"] == 2048 * 4 * 4
    assert memory["parameters"] == weights
    assert 0 <= memory["optimizer"] - 2 * weights <= 64  # Adam's moments, the count and the rate
    outputs = 4 * 2048 * 4 * 256  # what the backward pass needs of each layer
    assert outputs <= memory["activations and gradients"] <= 3 * outputs + 2 * weights


def test_a_tensorflow_that_does_not_compile_for_a_cpu_is_a_sentence(monkeypatch):
    monkeypatch.setattr(tf, "ones", lambda shape: 1 / 0)
    with pytest.raises(CheckError, match="TensorFlow.*CPU"):
        preflight.look(None)
