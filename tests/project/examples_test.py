"""The examples: short, and each learns, resumes and does not depend on the number of replicas."""

import collections
import json
import os
import pathlib
import re
import subprocess

import numpy as np
import pytest
from conftest import more
from lazily import Results

from trainers import small_data

ROOT = pathlib.Path(__file__).parents[2]
NAMES = ("mixture", "packages", "regression", "retrieval", "tagging")


def start(python, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [python, "-m", *arguments], capture_output=True, text=True, cwd=ROOT, timeout=300, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def results(python, tmp_path_factory):
    """The last evaluation of each example, one of which trains on two replicas."""
    folder = tmp_path_factory.mktemp("examples")
    steps = {"mixture": 300, "regression": 300, "retrieval": 200, "tagging": 100}

    def run(name):
        devices = 2 if name == "tagging" else 1
        flags = [f"--model_dir={folder / name}", f"--num_virtual_devices={devices}", f"--train_steps={steps[name]}"]
        start(python, f"examples.{name}", *flags, "--eval_interval=500", "--loop=graph")
        records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        return next(record for record in reversed(records) if record["split"] == "eval")

    return Results(run)


def test_an_example_has_fewer_than_forty_lines():
    files = {path.stem: path for path in (ROOT / "examples").glob("*.py")}
    assert set(files) == set(NAMES)
    for name, path in files.items():
        assert len(path.read_text().splitlines()) < 40, name
        assert f"python -m examples.{name}" in (ROOT / "examples" / "README.md").read_text()


@pytest.mark.slow
def test_the_regression_is_better_than_the_mean(results):
    target = np.loadtxt(ROOT / "examples" / "diabetes.csv", delimiter=",", skiprows=1)[:, -1]
    of_the_mean = np.abs(target[350:] - target[:350].mean()).mean()
    assert results["regression"]["error"] < 0.8 * of_the_mean
    assert results["regression"]["examples"] == len(target) - 350


@pytest.mark.slow
def test_the_towers_find_ten_times_as_many_halves_as_chance(results):
    assert results["retrieval"]["recall_at_10"] > 10 * 10 / 360 and results["retrieval"]["examples"] == 360


@pytest.mark.slow
def test_the_tagger_knows_more_than_the_most_frequent_tag(results):
    lines = [line for document in small_data.read_documents("python", 3000) for line in document][2500:3000]
    text = "".join(lines).replace(" ", "")
    starts = sum(letter.isupper() for line in lines for letter in line.title())
    assert results["tagging"]["accuracy"] > 1 - 0.6 * starts / len(text)
    assert results["tagging"]["examples"] == 500


@pytest.mark.slow
def test_the_mixture_knows_more_than_how_often_letters_are(results):
    texts = [
        " ".join(lines) for name in ("python", "numpy", "sklearn") for lines in small_data.read_documents(name, 600)
    ]
    train, test = ("".join(text for i, text in enumerate(texts) if (i % 8 == 0) == part) for part in (False, True))
    counts = collections.Counter(train)
    of_counts = np.mean([-np.log((1 + counts[letter]) / (len(train) + 128)) for letter in test])
    assert results["mixture"]["nats"] < 0.8 * of_counts


@pytest.mark.slow
@pytest.mark.alone
def test_the_packages_are_input_bound_until_processes_read_them_and_are_learned_alike(python, tmp_path):
    def run(processes):
        flags = [f"--processes={processes}", f"--model_dir={tmp_path / str(processes)}", "--train_steps=600"]
        printed = start(python, "examples.packages", *flags)
        records = [json.loads(line) for line in (tmp_path / str(processes) / "metrics.jsonl").read_text().splitlines()]
        waits = [int(share) for share in re.findall(r"input (\d+)%", printed)]
        return printed, [record["loss"] for record in records if record["split"] == "train"], waits

    alone, losses, waits = run(0)
    assert (
        "input-bound" in alone and "% of the pipeline's time is loader (" in alone and "processes of its own" in alone
    )
    _, same, less = run(2)
    assert same == losses and losses[-1] < 0.1 * losses[0]
    assert min(less[1:]) < 0.8 * min(waits[1:])  # by how much depends on the cores that are free


@pytest.mark.slow
@pytest.mark.parametrize("check, name", [("resume", "tagging"), ("replicas", "retrieval"), *more(
    [("resume", "regression"), ("resume", "retrieval"), ("replicas", "regression"), ("replicas", "tagging"), ("resume", "mixture"), ("resume", "packages"), ("replicas", "mixture")])])  # fmt: skip
def test_an_example_resumes_exactly_and_trains_alike_on_any_number_of_replicas(check, name, python, tmp_path):
    options = ["--kills=1"] if check == "resume" else ["--counts=1,2"]
    flags = ["--train_steps=40", "--eval_interval=20", "--checkpoint_interval=10", "--steps_per_loop=10"]
    out = start(
        python, "looplib", "check", check, *options, f"--dir={tmp_path / check}", "--",
        python, "-m", f"examples.{name}", *flags, "--global_batch_size=32",
    )  # fmt: skip
    assert "EQUAL" in out and "DIFFERENT" not in out
