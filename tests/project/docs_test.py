"""The documents are true: their programs run as printed, their tables are the code's."""

import configparser
import inspect
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorflow as tf
from conftest import more, needs_models
from lazily import Results
from paths import PYTHONPATH

import looplib

ROOT = pathlib.Path(__file__).parents[2]


def programs(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def run(python, program, folder, *arguments, timeout=600, **environment):
    path = folder / "program.py"
    seeded = "import keras; keras.utils.set_random_seed(0)  # the pages leave the initial weights to chance\n"
    path.write_text(seeded + program.replace("/tmp/", f"{folder}/"))
    return subprocess.run(
        [python, path, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, **environment},
    )


def whole(name):
    """Returns the program of a page."""
    return "\n\n".join(programs(f"docs/{name}.md"))


def page(name, after=""):
    return lambda python, folder: run(python, whole(name) + after, folder)


# The end of a program: would the steps of its trainer and evaluator run on a TPU?
LOWER = """
trainer = Classifier()
controller = looplib.Controller(
    looplib.RunConfig(global_batch_size=64), trainer=trainer, evaluator=ClassifierEvaluator(trainer.model), writers=[]
)
report = looplib.preflight.look(controller, "TPU", cores=8)
faults = [finding["text"] for finding in report["findings"] if finding["fault"]]
print("lowered:", {split: step["lowered"] for split, step in report["steps"].items()}, faults)
"""


ARGUMENTS = {"settings": ("--experiment=large", "--config.model.width=64", "--print_config")}
PAGES = [path.stem for path in sorted((ROOT / "docs").glob("*.md")) if "```python\n" in path.read_text()]
# In `make test`; the others need --all, because the tests of what they show try it too.
ALWAYS = ("settings",)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return Results(tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def results(folders, python):
    """The results of the programs of each page."""

    def page(name):
        program = whole(name) + (LOWER if name == "tpu_training" else "")
        return run(python, program, folders[name], *ARGUMENTS.get(name, ()))

    return Results(page)


@pytest.mark.parametrize("name", [*ALWAYS, *more([name for name in PAGES if name not in ALWAYS])])
def test_the_programs_of_a_page_run_as_printed(name, results):
    if name.startswith("from_orbit") or "model_garden" in name:
        pytest.importorskip("official")
    if name in ("keras_hub", "ray"):
        pytest.importorskip(name)
    printed(results[name])


# Pages that report, list or link.
WITHOUT_PROGRAM = re.compile(
    "index|installation|trainers|security|reliability.*|.*_measured|speed_choices|keras_matrix|architecture.*|extending"
    "|model_garden_compared|errors|scaling"
)


def guides():
    return [path for path in (ROOT / "docs").glob("*.md") if not WITHOUT_PROGRAM.fullmatch(path.stem)]


def test_a_guide_begins_with_a_program_or_a_command():
    for path in guides():
        beginning = path.read_text().split("\n## ")[0]
        assert re.search(r"^(```(python|sh)\n|    \S)", beginning, re.MULTILINE), path.name


def test_no_page_is_longer_than_twelve_kilobytes():
    """But for a table to look up a model in."""
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.stem != "keras_matrix"]
    long = {path.name: size for path in pages if (size := path.stat().st_size) > 12_000}
    assert not long and len((ROOT / "README.md").read_text().splitlines()) < 120


def test_the_readmes_program_is_short_runs_as_printed_and_resumes(python, tmp_path):
    (program,) = programs("README.md")
    assert len(program.strip().splitlines()) <= 25
    first = printed(run(python, program, tmp_path))
    assert float(re.search(r"'loss': ([\d.]+)", first)[1]) < 0.2
    again = printed(run(python, program.replace("steps=500", "steps=600"), tmp_path))
    assert [line.split()[1] for line in again.splitlines() if line.startswith("step")] == ["600"]


def test_the_settings_program_prints_the_settings_as_the_page_has_them(results):
    (shown,) = re.findall(r"--print_config\n((?:    .*\n)+)", (ROOT / "docs" / "settings.md").read_text())
    assert printed(results["settings"]) == textwrap.dedent(shown)


def printed(result):
    assert result.returncode == 0, result.stderr
    return result.stdout


def shown(pattern, text, count=1):
    """Returns the numbers that a pattern with one group finds in a text."""
    found = [float(number) for number in re.findall(pattern, text, re.MULTILINE)]
    assert len(found) == count, (pattern, text)
    return found


def check_the_guide(out):
    product = np.array([[1, 2, 3], [4, 5, 6]]) @ np.array([[1, 2], [3, 4], [5, 6]])
    assert out.count("[22. 28.]") == out.count("[49. 64.]") == 3
    assert f"products of 2 replicas: {[product.tolist()] * 2}" in out.replace(".0", "")
    assert "squares: [0.0, 1.0]\ntheir sum: 1.0" in out and "the sum of squares: 1.0" in out
    assert "padded lists give the means of TPUEmbedding's lookup" in out
    assert "copies of the counter: [3.0, 3.0]" in out
    assert out.count("[[[0, 0, 0, 0], [0, 0, 0, 1]]]") == 2 and "4 replicas of two cores" in out
    assert shown(r"divided: \{'loss': ([\d.]+)", out)[0] < 0.9


def check_the_training(out, least=0.6):
    # The metrics are reset between epochs: a mean over all steps would be near that of the first ones.
    losses = shown(r"training loss: (\S+),", out, count=len(re.findall("Current step", out)))
    assert losses[-1] < losses[0] / 2
    accuracies = [
        *shown(r"fit\{.*\}: accuracy (\S+)", out, 2),
        *shown(r"KerasTrainer: accuracy (\S+)", out),
        *shown(r"^(?:float32|bfloat16): accuracy (\S+) of 360", out, 2),
        *shown(r"accuracy by hand: (\S+)", out),
    ]
    assert min(accuracies) > least


@pytest.mark.slow
def test_the_tpu_pages_run_without_a_tpu(results):
    check_the_guide(printed(results["tpu_guide"]))
    check_the_training(printed(results["tpu_training"]))
    assert "lowered: {'train': True, 'eval': True} []" in results["tpu_training"].stdout


@pytest.mark.slow
def test_the_tpu_guides_program_with_a_larger_network_is_accurate(python, tmp_path):
    """The network of the guide has 64 filters, and takes five minutes on two cores; half of them are seen to be enough."""
    program, small = whole("tpu_training"), "filters, epochs, batch_size = 8, 2, 120"
    assert small in program
    result = run(python, program.replace(small, "filters, epochs, batch_size = 32, 2, 120"), tmp_path, timeout=600)
    check_the_training(printed(result), least=0.9)


@pytest.mark.slow
def test_the_tpu_guide_runs_with_the_connection_by_hand(python, tmp_path):
    check_the_guide(printed(run(python, whole("tpu_guide"), tmp_path, "--by_hand")))


@pytest.mark.slow
@pytest.mark.parametrize("by_hand", [["--by_hand"], []])
def test_the_tpu_guide_connects_once_where_there_is_a_tpu(by_hand, python, tmp_path):
    """With a stand-in for the TPU, two CPU devices."""
    program, log = "import tpu_stand_in\n\ntpu_stand_in.install()\n" + whole("tpu_guide"), tmp_path / "calls"
    stand_in = {"TPU_NAME": "mine", "TPU_STAND_IN_LOG": str(log)}
    result = run(python, program, tmp_path, "--one_replica", *by_hand, **stand_in)
    check_the_guide(printed(result))
    assert log.read_text().splitlines() == ["resolve mine", "initialize", "assign [[[0, 0, 0, 0], [0, 0, 0, 1]]]"]


@pytest.mark.slow
def test_the_programs_of_after_training_run_as_printed(results, folders):
    out = printed(results["after_training"])
    assert min(shown(r"accuracy of the second hundred: (\S+)", out)) > 0.9
    served, labels = (line.split() for line in re.search(r"classes: \[(.*)\] labels: \[(.*)\]", out).groups())
    assert len(served) == 5 and sum(a == b for a, b in zip(served, labels)) >= 4
    assert shown(r"accuracy of the records: (\S+)", out)[0] > 0.9
    assert "\nid,prediction[0],prediction[1]\n" in out and shown(r"right: (\S+)", out)[0] > 0.9
    kept = {path.name for path in (folders["after_training"] / "after_training" / "export").iterdir()}
    assert kept and kept <= {"step-100", "step-200"}


@pytest.mark.slow
@needs_models
def test_the_programs_of_exports_run_as_printed(results):
    out = printed(results["exports"])
    by_name, own = (re.search(rf"{name}: \[(.*)\]", out)[1].split() for name in ("by the signature", "served"))
    assert by_name == own and len(own) == 5


@pytest.mark.slow
def test_the_orbit_guides_programs_run_in_the_adapter_and_ported(results):
    out = printed(results["from_orbit"]) + printed(results["from_orbit_port"])
    found = dict(re.findall(r"^(adapter|ported): ([\d.]+)$", out, re.MULTILINE))
    assert float(found["adapter"]) > 0.9 and float(found["ported"]) > 0.9


@pytest.mark.slow
def test_the_keras_guides_programs_come_to_the_same_before_and_after(results):
    out = printed(results["from_keras"])
    before, after = (
        [float(number) for number in re.search(rf"^{name}: (.*)$", out, re.MULTILINE)[1].split()]
        for name in ("fit", "KerasTrainer")
    )
    np.testing.assert_allclose(after, before, rtol=1e-5)
    first, *_ = programs("docs/from_keras.md")
    assert "stopped by Keras after 2 epochs" in out and first.count("\n") < 30


@pytest.mark.slow
def test_a_summed_loss_is_refused_on_two_replicas_and_a_mean_trains(results):
    out = printed(results["from_keras_differences"])
    assert "refused: the loss of Sequential is no mean over examples" in out
    assert shown(r"^loss: (\S+)$", out)[0] < 0.2


@pytest.mark.slow
def test_the_hand_written_loop_and_its_trainer_come_to_the_same_loss(results):
    found = dict(re.findall(r"^(by hand|looplib): (\S+)$", printed(results["from_tf_distribute"]), re.MULTILINE))
    assert float(found["by hand"]) < 0.3
    np.testing.assert_allclose(float(found["looplib"]), float(found["by hand"]), rtol=1e-5)


@pytest.mark.slow
def test_the_program_ported_from_lightning_learns(results):
    assert shown(r"^looplib: (\S+)$", printed(results["from_lightning"]))[0] > 0.95


@pytest.mark.slow
def test_the_lightning_program_learns_as_its_port_does(tmp_path):
    pytest.importorskip("lightning")
    (program,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs/from_lightning.md").read_text(), re.DOTALL)
    assert shown(r"^lightning: (\S+)$", printed(run(sys.executable, program, tmp_path)))[0] > 0.95


def test_the_installation_page_says_what_each_package_is_for():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    lists = [settings["options"]["install_requires"], *settings["options.extras_require"].values()]
    packages = {re.match(r"[\w-]+", line)[0] for one in lists for line in one.split("\n") if line}
    table = (ROOT / "docs" / "installation.md").read_text().split("## What each package is for")[1]
    assert packages <= set(re.findall(r"[\w-]+", table)), packages - set(re.findall(r"[\w-]+", table))


def test_the_examples_in_docstrings_run():
    namespace = {"looplib": looplib, "np": np, "tf": tf, "keras": __import__("keras")}
    for kind in (looplib.Trainer, looplib.Evaluator):
        (example,) = re.findall(r"```python\n(.*?)```", inspect.getdoc(kind), re.DOTALL)
        exec(textwrap.dedent(example), namespace)
    trainer = namespace["Line"]()
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=32),
        trainer=trainer,
        evaluator=namespace["LineError"](trainer.model),
        writers=[],
    )
    assert controller.train_and_evaluate(200, 100)["eval"]["error"] < 0.05


def test_every_public_name_has_a_docstring():
    for name in looplib.__all__:
        value = getattr(looplib, name)
        assert inspect.getdoc(value), name
        if inspect.isclass(value):
            for method, function in vars(value).items():
                if not method.startswith("_") and callable(function):
                    assert function.__doc__, f"{name}.{method}"
