"""The documents are true: their programs run as printed, their tables are the code's."""

import concurrent.futures
import inspect
import os
import pathlib
import re
import subprocess

import numpy as np
import pytest
import tensorflow as tf

import looplib
from looplib import launch

ROOT = pathlib.Path(__file__).parents[1]


def programs(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def run(python, program, folder, *arguments):
    path = folder / "program.py"
    path.write_text(program.replace("/tmp/", f"{folder}/"))
    return subprocess.run(
        [python, path, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def readme(python, folder):
    """The README's three programs, and the first once more with more steps."""
    all_three, first = "\n\n".join(programs("README.md")), programs("README.md")[0]
    return run(python, all_three, folder), run(python, first.replace("steps=500", "steps=600"), folder)


def guide(python, folder):
    flags = [f"--model_dir={folder}/binary", "--config.learning_rate=0.02"]
    return run(python, "\n\n".join(programs("docs/guide.md")), folder, *flags)


def page(name):
    return lambda python, folder: run(python, "\n\n".join(programs(f"docs/{name}.md")), folder)


PAGES = {
    "readme": readme,
    "guide": guide,
    **{name: page(name) for name in ("tpu_guide", "tpu_strategy", "tpu_course", "from_orbit", "recipes")},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: tmp_path_factory.mktemp(name) for name in PAGES}


@pytest.fixture(scope="module")
def results(folders, python):
    """What the programs of each page print, two at a time, as many as the smallest machine has cores."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return dict(zip(PAGES, pool.map(lambda name: PAGES[name](python, folders[name]), PAGES)))


def test_the_readmes_three_ways_to_start_run_as_printed_and_resume(results):
    ways = programs("README.md")
    assert len(ways) == 3 and all(len(program.strip().splitlines()) <= 25 for program in ways)
    first, again = results["readme"]
    assert first.returncode == 0, first.stderr
    loss, compiled, step = (line for line in first.stdout.splitlines() if line.startswith("{"))
    assert float(re.search(r"'loss': ([\d.]+)", loss)[1]) < 0.2
    assert float(re.search(r"'accuracy': ([\d.]+)", compiled)[1]) > 0.7
    assert float(re.search(r"'accuracy': ([\d.]+)", step)[1]) > 0.9
    assert [line.split()[1] for line in again.stdout.splitlines() if line.startswith("step")] == ["600"]


def test_the_guides_programs_run_as_printed(results, folders):
    result = results["guide"]
    assert result.returncode == 0, result.stderr
    assert "stopped at step" in result.stdout and "done at step 400" in result.stdout
    assert (folders["guide"] / "binary" / "run.json").exists()


def printed(result):
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_tpu_guides_programs_run_by_hand_and_in_looplib_without_a_tpu(results):
    out = printed(results["tpu_guide"])
    product = np.array([[1, 2, 3], [4, 5, 6]]) @ np.array([[1, 2], [3, 4], [5, 6]])
    assert "no TPU:" in out and out.count("[22. 28.]") == out.count("[49. 64.]") == 2
    assert f"the sum of c: {product.sum():.1f}" in out and f"the sum over 2 cores: {2 * product.sum():.1f}" in out
    assert float(re.search(r"training loss: \S+ accuracy: (\S+)", out)[1]) > 0.3
    assert float(re.search(r"\naccuracy: (\S+) of 360", out)[1]) > 0.7


def test_the_tpu_strategys_programs_run_by_hand_and_in_looplib_without_a_tpu(results):
    out = printed(results["tpu_strategy"])
    assert out.count("[[[0, 0, 0, 0], [0, 0, 0, 1]]]") == 2 and "4 replicas of two cores" in out
    assert out.count("device:CPU:0 and /job:localhost/replica:0/task:0/device:CPU:1") == 2
    assert "a number, not a symbol: 40.0" in out and re.search(r"losses: \[\d", out)


def test_the_courses_program_runs_by_hand_and_in_looplib_without_a_tpu(results):
    out = printed(results["tpu_course"])
    assert "TPU not found. Using default strategy." in out
    by_hand, ours = re.findall(r"train_accuracy: (\S+)\n", out)[1], re.search(r"\ntrain_accuracy: (\S+)", out)[1]
    assert float(by_hand) > 0.3 and float(ours) > 0.3


def test_the_recipes_run_as_printed(results):
    out = printed(results["recipes"])
    assert "stopped early; the weights are the best" in out
    accuracies = [float(value) for value in re.findall(r"step +40  train  accuracy ([\d.]+)", out)]
    assert len(accuracies) >= 6 and min(accuracies) > 0.8 and max(accuracies) > 0.95


def test_the_orbit_guides_programs_run_in_the_adapter_and_ported(results):
    out = printed(results["from_orbit"])
    found = dict(re.findall(r"^(adapter|ported): ([\d.]+)$", out, re.MULTILINE))
    assert float(found["adapter"]) > 0.9 and float(found["ported"]) > 0.9


def test_the_readmes_table_has_every_flag_with_its_default():
    rows = re.findall(r"^\| `--(\w+)` \| (\S+) \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [name for name, _, _ in rows] == [name for name, *_ in launch.FLAGS]
    for (name, default, text), (_, _, value, help_text, *values) in zip(rows, launch.FLAGS):
        assert default == ("none" if value is None else str(value).lower()), name
        assert text == help_text + (f" One of {', '.join(values[0])}." if values else ""), name


def test_the_examples_in_docstrings_run():
    namespace = {"looplib": looplib, "np": np, "tf": tf, "keras": __import__("keras")}
    for kind in (looplib.Trainer, looplib.Evaluator):
        exec(inspect.cleandoc(inspect.getdoc(kind).split("Example:")[1]), namespace)
    trainer = namespace["Line"]()
    controller = looplib.Controller(
        trainer=trainer, evaluator=namespace["LineError"](trainer.model), global_batch_size=32, writers=[]
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


def test_the_architecture_in_the_readme_names_every_room():
    screen = (ROOT / "README.md").read_text().split("## On one screen")[1].split("##")[0]
    for path in (ROOT / "looplib").iterdir():
        assert path.name in screen or path.name in ("__init__.py", "__pycache__"), path.name
