"""Importing looplib is cheap and never imports tf-models-official."""

import os
import statistics
import subprocess
import sys

import conftest
import pytest

import looplib
from benchmarks import startup
from trainers import image_classification

CODE = "import time; start = time.process_time(); import {}; import sys; print(time.process_time() - start, 'official' in sys.modules)"


def seconds(module):
    output = subprocess.run(
        [sys.executable, "-c", CODE.format(module)], capture_output=True, text=True, check=True
    ).stdout
    elapsed, official = output.split()
    assert official == "False"
    return float(elapsed)


@pytest.mark.slow
@pytest.mark.alone
def test_importing_looplib_costs_little_more_than_importing_tensorflow():
    pairs = [(seconds("tensorflow"), seconds("looplib")) for _ in range(conftest.repetitions(1, 5))]
    ours, theirs = (statistics.median(times) for times in (tuple(p[1] for p in pairs), tuple(p[0] for p in pairs)))
    assert ours <= 1.15 * theirs, f"looplib {ours:.2f} s, tensorflow {theirs:.2f} s"


BARE = "import tensorflow, keras, sklearn.model_selection, sklearn.datasets; sklearn.datasets.load_digits()"
BUILD = f"""
{BARE}
import sys, tempfile
bare = set(sys.modules)
import {image_classification.__name__} as image_classification, looplib
trainer, evaluator = image_classification.build(image_classification.Config())
with tempfile.TemporaryDirectory() as folder:
    looplib.Controller(
        looplib.RunConfig(global_batch_size=60), trainer=trainer, evaluator=evaluator, model_dir=folder
    ).close()
print("added", *(sys.modules.keys() - bare))
print("all", *sys.modules)
"""


@pytest.mark.slow
def test_the_default_binary_imports_nothing_heavy_besides_what_keras_does_and_the_digits():
    done = subprocess.run([sys.executable, "-c", BUILD], capture_output=True, text=True, check=True)
    added, binary = (set(line.split()[1:]) for line in done.stdout.splitlines()[-2:])
    roots = {name.split(".")[0] for name in added}
    heavy = {"official", "tf_keras", "tensorflow_datasets", "tensorflow_models", "jax", "torch", "sklearn", "scipy", "pandas",
             "matplotlib", "PIL", "tqdm", "tensorboard"}  # fmt: skip
    assert not roots & heavy
    assert not binary & {"official", "tf_keras", "tensorflow_datasets", "sklearn.linear_model", "sklearn.ensemble"}


@pytest.mark.slow
def test_a_start_costs_little_more_than_that_of_a_loop_by_hand(tmp_path):
    """CPU seconds of three processes, see docs/speed_measured.md; with AutoGraph over all of looplib it was 6.8."""
    hand = startup.measure(tmp_path, "-c", "import benchmarks.startup as startup; startup.by_hand()")
    ours = startup.measure(
        tmp_path, "-c", "import benchmarks.startup as startup; startup.looplib()", f"{tmp_path}/run", "0"
    )
    fit = startup.measure(tmp_path, "-c", "import benchmarks.startup as startup; startup.fit()")
    assert startup.ratios({"by_hand": [hand], "looplib": [ours]})["looplib"][0] < 4.5
    assert ours["ended"][0] < 1.2 * fit["ended"][0]


@pytest.fixture(scope="module")
def imported():
    """Returns the output of a process that imports looplib twice: [garbage collection off, then on], the rooms that are loaded."""
    code = """
import gc, sys
for switch in (gc.disable, gc.enable):  # TensorFlow is imported with the first one
    switch()
    import looplib
    print(gc.isenabled())
    for name in [name for name in sys.modules if name.split(".")[0] == "looplib"]:
        del sys.modules[name]
import looplib
looplib.Trainer, looplib.Controller, looplib.launch
print("rooms", *{name.split(".")[1] for name in sys.modules if name.startswith("looplib.")})
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    collects, rooms = output.split("rooms", 1)
    return collects.split()[-2:], rooms.split()


@pytest.mark.slow
def test_importing_leaves_the_garbage_collector_as_it_was(imported):
    assert imported[0] == ["False", "True"]


def test_every_public_name_is_loaded_when_it_is_used():
    for name in (*looplib.__all__, "launch", "preflight", "runtime", "tpu"):
        assert getattr(looplib, name) is not None and name in dir(looplib)
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        getattr(looplib, "Trainr")  # noqa: B009


def test_importing_looplib_loads_no_room_that_few_runs_need(imported):
    few = {"actions", "commands", "exports", "keras", "orbit", "stores", "sweep"}
    assert not few & set(imported[1])


def test_a_tool_prints_nothing_of_tensorflow_and_the_programs_that_it_starts_get_the_users_environment(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    code = "import os; from looplib.__main__ import main; main(); print(os.environ.get('TF_CPP_MIN_LOG_LEVEL'))"
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", code, "report", tmp_path], env=environment, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == (f"{tmp_path}/report.html: 1 run\nNone\n", "")


@pytest.mark.parametrize("command", ["--help", "status /tmp", "report /nowhere"])
def test_quick_commands_import_no_packages_that_take_time(command):
    code = "import sys; from looplib.__main__ import main\ntry: main(sys.argv[1:])\nfinally: print('all', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *command.split()], capture_output=True, text=True)
    modules = done.stdout.rpartition("all ")[2].split()
    assert "looplib.base.plugins" in modules
    assert not {"numpy", "cattrs", "yaml", "tensorflow", "fsspec"} & set(modules)
