"""The documents are true: their programs run as printed, their tables are the code's."""

import concurrent.futures
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
from conftest import more, needs_models, repetitions

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
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", **environment},
    )


# What differs in the tests: a machine may or may not have the internet.
REPLACED = {
    "tpu_course": [("keras.datasets.mnist.load_data()", 'keras.utils.get_file(origin="http://host.invalid/mnist")')],
}


def whole(name):
    """Returns the program of a page, on the digits that need no download."""
    program = "\n\n".join(programs(f"docs/{name}.md"))
    for printed, replacement in REPLACED.get(name, []):
        assert printed in program
        program = program.replace(printed, replacement)
    return program


def page(name, after=""):
    return lambda python, folder: run(python, whole(name) + after, folder)


# The end of a program: would the steps of its trainer and evaluator run on a TPU?
LOWER = """
trainer = {trainer}()
evaluator = {evaluator}
controller = looplib.Controller(
    looplib.RunConfig(global_batch_size=64), trainer=trainer, evaluator=evaluator, writers=[]
)
report = looplib.preflight.look(controller, "TPU", cores=8)
faults = [finding["text"] for finding in report["findings"] if finding["fault"]]
print("lowered:", {{split: step["lowered"] for split, step in report["steps"].items()}}, faults)
"""
CLASSIFIER = LOWER.format(trainer="Classifier", evaluator="ClassifierEvaluator(trainer.model)")

TPU_PAGES = {
    "tpu_guide": "",
    "tpu_guide_data": "",
    "tpu_guide_loops": CLASSIFIER,
    "tpu_strategy": "",
    "tpu_strategy_data": LOWER.format(trainer="Separation", evaluator="None"),
    "tpu_course": "",
    "tpu_course_training": CLASSIFIER,
}


def by_hand(name):
    """Returns the program of a page with the connection by hand: its own, with --by_hand, or that of the guide."""
    program, call = whole(name), 'runtime.setup("auto", num_virtual_devices=2)'
    if "--by_hand" in program:
        return program
    assert program.count(call) == 1
    (function,) = re.findall(r"^def connect_by_hand\(\):\n(?: .*\n)+", whole("tpu_guide"), re.MULTILINE)
    return f"import os\n\nimport tensorflow as tf\n\n\n{function}\n\n{program.replace(call, 'connect_by_hand()')}"


ARGUMENTS = {"settings": ("--experiment=large", "--config.model.width=64", "--print_config")}
PAGES = [path.stem for path in sorted((ROOT / "docs").glob("*.md")) if "```python\n" in path.read_text()]
# In `make test`; the others need --all, because the tests of what they show try it too.
ALWAYS = ("settings",)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: tmp_path_factory.mktemp(name) for name in repetitions(ALWAYS, PAGES)}


@pytest.fixture(scope="module")
def results(folders, python):
    """What the programs of each page print, two at a time, as many as the smallest machine has cores."""

    def page(name):
        return run(python, whole(name) + TPU_PAGES.get(name, ""), folders[name], *ARGUMENTS.get(name, ()))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return dict(zip(folders, pool.map(page, folders)))


@pytest.mark.parametrize("name", [*ALWAYS, *more([name for name in PAGES if name not in ALWAYS])])
def test_the_programs_of_a_page_run_as_printed(name, results):
    if name.startswith("from_orbit") or "model_garden" in name:
        pytest.importorskip("official")
    if name in ("keras_hub", "ray"):
        pytest.importorskip(name)
    printed(results[name])


# Pages that report, list or link.
WITHOUT_PROGRAM = re.compile(
    "index|installation|trainers|security|reliability.*|.*_measured|speed_choices|keras_matrix.*|architecture.*|extending"
    "|model_garden_compared|errors|scaling"
)


def guides():
    return [path for path in (ROOT / "docs").glob("*.md") if not WITHOUT_PROGRAM.fullmatch(path.stem)]


def test_a_guide_begins_with_a_program_or_a_command():
    for path in guides():
        beginning = path.read_text().split("\n## ")[0]
        assert re.search(r"^(```(python|sh)\n|    \S)", beginning, re.MULTILINE), path.name


def test_no_page_is_longer_than_twelve_kilobytes():
    long = {path.name: size for path in (ROOT / "docs").rglob("*.md") if (size := path.stat().st_size) > 12_000}
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
    assert (
        f"the sum of c: {product.sum():.1f}" in out
        and f"products of 2 replicas: {[product.tolist()] * 2}" in out.replace(".0", "")
    )
    assert "squares: [0.0, 1.0]\ntheir sum: 1.0" in out and "the sum of squares: 1.0" in out
    assert "padded lists give the means of TPUEmbedding's lookup" in out


def check_the_guides_loops(out, least=0.6):
    assert min(shown(r"steps_per_execution=\d+: (\S+) ms a step", out, count=2)) > 0
    # The metrics are reset between epochs: a mean over all steps would be near that of the first ones.
    losses = shown(r"training loss: (\S+),", out, count=len(re.findall("Current step", out)))
    assert losses[-1] < losses[0] / 2
    accuracies = [
        *shown(r"fit\{.*\}: accuracy (\S+)", out, 2),
        *shown(r"KerasTrainer: accuracy (\S+)", out),
        *shown(r"\naccuracy: (\S+) of 360", out),
        *shown(r"accuracy by hand: (\S+)", out),
    ]
    assert min(accuracies) > least


@pytest.mark.slow
def test_the_tpu_guides_programs_run_without_a_tpu(results):
    check_the_guide(printed(results["tpu_guide"]))
    data = printed(results["tpu_guide_data"])
    assert "{'train': 1437, 'test': 360}" in data and "three readers, the same examples" in data
    check_the_guides_loops(printed(results["tpu_guide_loops"]))
    assert "lowered: {'train': True, 'eval': True} []" in results["tpu_guide_loops"].stdout


@pytest.mark.slow
def test_the_tpu_guides_program_with_a_larger_network_is_accurate(python, tmp_path):
    """The network of the guide has 64 filters, and takes five minutes on two cores; half of them are seen to be enough."""
    program, small = whole("tpu_guide_loops"), "filters, epochs, batch_size = 8, 2, 120"
    assert small in program
    result = run(python, program.replace(small, "filters, epochs, batch_size = 32, 2, 120"), tmp_path, timeout=600)
    check_the_guides_loops(printed(result), least=0.9)


def check_the_reference(out):
    assert "copies of the counter: [3.0, 3.0]" in out
    assert out.count("[[[0, 0, 0, 0], [0, 0, 0, 1]]]") == 2 and "4 replicas of two cores" in out
    assert "device:CPU:0 and /job:localhost/replica:0/task:0/device:CPU:1" in out
    assert "a number, not a symbol: 40.0" in out and re.search(r"losses: \[\d", out)
    assert shown(r"divided: \{'loss': ([\d.]+)", out)[0] < 0.9


def check_the_references_data(out):
    assert "both data sets give the weights of numpy" in out
    by_fit, in_looplib = shown(r"fit: \[[\d.]+, ([\d.]+)\]", out), shown(r"KerasTrainer: \{'loss': ([\d.]+)", out)
    assert abs(by_fit[0] - in_looplib[0]) < 0.01 and shown(r"in looplib: \{'loss': ([\d.]+)", out)[0] < 0.7


@pytest.mark.slow
def test_the_tpu_strategys_programs_run_without_a_tpu(results):
    check_the_reference(printed(results["tpu_strategy"]))
    check_the_references_data(printed(results["tpu_strategy_data"]))
    assert "lowered: {'train': True} []" in results["tpu_strategy_data"].stdout


def accuracies(out, way, *dtypes):
    """Returns the accuracies that a program of the course prints of one way to train, in some types."""
    found = [shown(rf"{way}, {dtype}: train_accuracy \S+ test accuracy (\S+)", out)[0] for dtype in dtypes]
    assert min(found) > 0.94 and max(found) - min(found) <= 0.01
    return found


def check_the_course(out):
    accuracies(out, "fit", "float32", "bfloat16")
    assert "the copies of each variable are equal" in out


def check_the_courses_training(out):
    float32, _ = accuracies(out, "Classifier", "float32", "bfloat16")
    assert accuracies(out, "FromLoss", "float32") == [float32]
    assert "the mean loss of the first step" in out


@pytest.mark.slow
def test_the_courses_programs_run_without_a_tpu(results):
    check_the_course(printed(results["tpu_course"]))
    check_the_courses_training(printed(results["tpu_course_training"]))
    assert "lowered: {'train': True, 'eval': True} []" in results["tpu_course_training"].stdout


CHECKS = {
    "tpu_guide": check_the_guide,
    "tpu_guide_loops": check_the_guides_loops,
    "tpu_strategy": check_the_reference,
    "tpu_strategy_data": check_the_references_data,
    "tpu_course": check_the_course,
    "tpu_course_training": check_the_courses_training,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tpu_guide", "tpu_strategy_data"])  # two others with the stand-in
def test_the_tpu_pages_run_with_the_connection_by_hand(name, python, tmp_path):
    CHECKS[name](printed(run(python, by_hand(name), tmp_path, "--by_hand")))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["tpu_strategy --one_replica --by_hand", "tpu_course_training"])
def test_the_tpu_pages_connect_once_and_run_where_there_is_a_tpu(command, python, tmp_path):
    """With a stand-in for the TPU, two CPU devices."""
    name, *arguments = command.split()
    page = by_hand(name) if "--by_hand" in arguments else whole(name)
    program = "import tpu_stand_in\n\ntpu_stand_in.install()\n" + page
    log = tmp_path / "calls"
    result = run(python, program, tmp_path, *arguments, TPU_NAME="mine", TPU_STAND_IN_LOG=str(log))
    CHECKS[name](printed(result))
    assigned = ["assign [[[0, 0, 0, 0], [0, 0, 0, 1]]]"] if "--one_replica" in arguments else []
    assert log.read_text().splitlines() == ["resolve mine", "initialize", *assigned]


@pytest.mark.slow
def test_the_programs_of_after_training_run_as_printed(results, folders):
    out = printed(results["after_training"])
    assert min(shown(r"accuracy of the second hundred: (\S+)", out)) > 0.9
    served, labels = (line.split() for line in re.search(r"classes: \[(.*)\] labels: \[(.*)\]", out).groups())
    assert len(served) == 5 and sum(a == b for a, b in zip(served, labels)) >= 4
    assert shown(r"accuracy of the records: (\S+)", out)[0] > 0.9
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
