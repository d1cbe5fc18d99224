"""The strategy that the flags choose, in processes of their own where devices must be made first."""

import os
import pathlib
import random
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import more, repetitions
from paths import PYTHONPATH

from looplib import UsageError
from looplib.cluster import runtime
from looplib.errors import TpuError

ROOT = pathlib.Path(__file__).absolute().parents[2]


def in_a_new_process(code, python=sys.executable, **environment):
    """Runs code after `from looplib.cluster import runtime`; returns its last line."""
    program = (
        f"import logging, tensorflow as tf\nfrom looplib.cluster import runtime; from looplib import UsageError\n{code}"
    )
    result = subprocess.run(
        [python, "-c", program], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip().splitlines()[-1]


def test_virtual_devices_and_precision(python):
    code = """
s = runtime.setup("auto", num_virtual_devices=3, mixed_precision="mixed_bfloat16", deterministic=True)
from tensorflow.python.framework import config  # TensorFlow has no public question for it
import keras
layer = keras.layers.Dense(1)
print(runtime.describe(s), layer.compute_dtype, config.is_op_determinism_enabled())
"""
    assert in_a_new_process(code, python) == "MirroredStrategy, 3 replicas bfloat16 True"


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["xla", *more(["graph"])])
def test_a_deterministic_run_trains_and_evaluates(loop, python):
    code = f"""
import sys
sys.path[:0] = {PYTHONPATH.split(os.pathsep)!r}
import toy
strategy = runtime.setup("auto", num_virtual_devices={1 if loop == "xla" else 2}, deterministic=True)
trainer, evaluator = toy.build(strategy)
with toy.controller(strategy, trainer, evaluator, loop={loop!r}) as controller:
    accuracy = controller.train_and_evaluate(6, 3)["eval"]["accuracy"]
weights = list(trainer.weights())
print(controller.global_step, accuracy == toy.numpy_accuracy(weights))
"""
    assert in_a_new_process(code, python) == "6 True"


def test_choices_on_one_cpu_and_a_late_call(python):
    code = """
names = [runtime.describe(runtime.setup(name)) for name in ("auto", "one_device", "mirrored")]
tf.zeros([])
try:
    runtime.setup("auto", num_virtual_devices=2)
except UsageError as error:
    names.append("late" if "before any tensor is made" in str(error) else "?")
print("; ".join(names))
"""
    expected = "DefaultStrategy, 1 replica; OneDeviceStrategy, 1 replica; MirroredStrategy, 1 replica; late"
    assert in_a_new_process(code, python) == expected


EARLY = {
    "constant": "table = tf.constant([1, 2])",
    "variable": "table = tf.Variable(1.0)",
    "data set": "table = tf.data.Dataset.from_tensor_slices([1, 2])",
    "generator": "table = tf.random.Generator.from_seed(1)",
    "random": "table = tf.random.normal([2])",
    "model": "table = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])",
    "optimizer": "table = keras.optimizers.Adam()",
    "metric": "table = keras.metrics.Mean()",
    "devices": "table = tf.config.list_logical_devices()",
    "strategy": "table = tf.distribute.MirroredStrategy()",
    "none": "table = keras.layers.Dense(2), keras.initializers.GlorotUniform(), tf.random.set_seed(1)",
}
TOO_LATE = """
import contextlib, io, json, os, sys
sys.path.insert(0, {folder!r})
{imports}
import early

os.environ["TF_CONFIG"] = json.dumps({{"cluster": {{"worker": ["127.0.0.1:1", "127.0.0.1:2"]}}, "task": {{"type": "worker", "index": 0}}}})
for settings in (dict(strategy="mirrored", num_virtual_devices=2), dict(strategy="multi_worker", join_limit=0.1)):
    try:
        print(runtime.describe(runtime.setup(**settings)))
    except UsageError as error:
        print(error)
"""


def too_late(folder, case, python=sys.executable, imports="import looplib"):
    """Returns what runtime.setup says after a module made something at its top: a line for two devices, one for two workers."""
    family = "import keras" if "keras" in EARLY[case] else ""  # which takes a second
    (folder / "early.py").write_text(f"{family}\nimport tensorflow as tf\n\n{EARLY[case]}\n")
    program = TOO_LATE.format(folder=str(folder), imports=f"{imports}\n")
    if imports != "import looplib":  # looplib comes after the tensor
        program = program.replace(
            "\nimport early\n\nos", "\nfrom looplib import UsageError; from looplib.cluster import runtime\n\nos"
        )
    else:
        program = "from looplib import UsageError; from looplib.cluster import runtime\n" + program
    command = [python, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return result.stdout.splitlines(), result.stderr


# Other ways to start the devices than the first ones, which run with --all.
EARLY_ALIKE = ["variable", "generator", "random", "optimizer", "metric", "strategy"]


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("case", [*(case for case in EARLY if case not in EARLY_ALIKE), *more(EARLY_ALIKE)])
def test_a_setting_that_comes_after_a_tensor_names_the_line_that_made_it(case, python, tmp_path):
    lines, errors = too_late(tmp_path, case, repetitions(python, sys.executable) if case == "constant" else python)
    place = f"{tmp_path}/early.py:4: {EARLY[case]}"
    if case == "none":
        assert lines[0] == "MirroredStrategy, 2 replicas", errors
        return
    assert f"initialized by {place}; make tensors, variables, models and optimizers in `build`" in lines[0], errors
    assert lines[0].startswith("num_virtual_devices=2 must be set before") and place in lines[1]
    assert lines[1].startswith("the strategy multi_worker must be set before TensorFlow initializes its devices")
    assert f"were initialized before looplib.runtime.setup, by {place}; random values" in errors


@pytest.mark.slow
def test_a_tensor_made_before_looplib_is_imported_is_named_by_its_name(tmp_path):
    lines, errors = too_late(tmp_path, "variable", imports="import early")
    assert "initialized by a tensor, such as `table` of early.py; make" in lines[0], errors


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"strategy": "fast"}, "strategy.*'fast'"),
        ({"strategy": "multi_worker"}, "the environment does not list the workers"),
        (
            {"strategy": "parameter_server"},
            "parameter_server.*TF_CONFIG",
        ),
        ({"strategy": "mirrored", "tpu": "mine"}, "TPU.*'mirrored'"),
        ({"mixed_precision": "half"}, "mixed_precision.*'half'.*float32"),
        ({"num_virtual_devices": 0}, "num_virtual_devices.*0"),
        ({"strategy": "one_device", "num_virtual_devices": 2}, "one_device"),
        ({"seed": -1}, "seed.*-1"),
    ],
)
def test_bad_values_are_sentences(arguments, message):
    with pytest.raises(UsageError, match=message):
        runtime.setup(**arguments)


def test_the_seed_seeds_everything():
    draws = []
    for _ in range(2):
        runtime.setup("one_device", seed=7)
        kernel = keras.layers.Dense(3)
        kernel.build((None, 2))
        draws.append(
            [random.random(), np.random.rand(), float(tf.random.uniform([])), kernel.get_weights()[0].tolist()]
        )
    assert draws[0] == draws[1]


@pytest.mark.slow
def test_a_keras_family_that_is_imported_late_is_set_up_too():
    code = """
runtime.setup("auto", seed=7, mixed_precision="mixed_bfloat16")
import tf_keras
enabled = tf_keras.backend.experimental.is_tf_random_generator_enabled()
print(enabled, tf_keras.mixed_precision.global_policy().name, float(tf_keras.backend.random_uniform([1])[0]) >= 0)
"""
    assert in_a_new_process(code) == "True mixed_bfloat16 True"


class StandInResolver:
    """Stands in for TPUClusterResolver, as no TPU is at hand: fails as one without a TPU does, or connects to nothing."""

    fails = True

    def __init__(self, tpu):
        if self.fails:
            raise ValueError("Please provide a TPU Name to connect to.\nmore lines")

    def cluster_spec(self):
        return tf.train.ClusterSpec({})


def test_a_tpu_that_cannot_be_reached_is_a_sentence(monkeypatch):
    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", StandInResolver)
    with pytest.raises(TpuError, match="TPU.*TPU"):
        runtime.setup("tpu", tpu="mine")
    monkeypatch.setenv("TPU_NAME", "from_environment")
    with pytest.raises(TpuError, match="TPU.*from_environment"):
        runtime.setup("auto")


def test_a_tpu_that_is_found_is_taken(monkeypatch):
    """With stand-ins for the resolver, the connection and the strategy: the order of the calls is what is tested."""
    calls = []
    monkeypatch.setattr(StandInResolver, "fails", False)
    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", StandInResolver)
    monkeypatch.setattr(tf.config, "experimental_connect_to_cluster", lambda resolver: calls.append("connect"))
    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", lambda resolver: calls.append("initialize"))
    monkeypatch.setattr(
        tf.distribute, "TPUStrategy", lambda resolver: calls.append("strategy") or tf.distribute.get_strategy()
    )
    monkeypatch.setenv("TPU_NAME", "mine")
    runtime.setup("auto")
    assert calls == ["connect", "initialize", "strategy"]


def test_all_gpus_are_chosen_and_are_not_mixed_with_cpus(python):
    """CPU devices stand in for the list of GPUs."""
    code = """
runtime.setup("auto", num_virtual_devices=3)
cpus, found = tf.config.list_logical_devices("CPU"), []
for gpus in (cpus[:1], cpus):
    devices = {"CPU": cpus, "GPU": gpus}
    tf.config.list_logical_devices = tf.config.list_physical_devices = lambda kind: devices.get(kind, [])
    found += [runtime.describe(runtime._choose(name, gpus)[0]) for name in ("auto", "one_device")]
try:
    runtime.setup("auto", num_virtual_devices=2)
except UsageError as error:
    found.append("refused" if "this machine has 3 GPUs; leave it out" in str(error) else str(error))
print("; ".join(found))
"""
    assert in_a_new_process(code, python) == (
        "DefaultStrategy, 1 replica; OneDeviceStrategy, 1 replica; MirroredStrategy, 3 replicas; "
        "OneDeviceStrategy, 1 replica; refused"
    )
