"""TensorFlow Recommenders' own tasks and layers: as a loop by hand on one replica, and as it or refused on two."""

import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
from paths import PYTHONPATH

PROGRAM = pathlib.Path(__file__).parents[1] / "programs" / "tfrs_models.py"
TUTORIALS = [f"{name},sum_over_batch_size,1" for name in ("retrieval", "ranking", "multi_task", "dcn")]
OF_EXAMPLES = [f"{name},none,2" for name in ("ranking", "multi_task", "dcn")]
GATHERED = ["gathered,none,1", "gathered,none,2"]
REFUSED = {
    "ranking,sum_over_batch_size,2": "loss that divides by the batch in a step of the model's own on several replicas",
    "retrieval,sum_over_batch_size,2": "compares examples with each other",
    "retrieval,none,2": "compares examples with each other",
}
# The package refuses to be imported beside Keras 3, which pytest's own process has.
pytestmark = pytest.mark.skipif(not importlib.util.find_spec("tensorflow_recommenders"), reason="needs the package")
ENVIRONMENT = {**os.environ, "TF_USE_LEGACY_KERAS": "1", "PYTHONPATH": os.pathsep.join((PYTHONPATH, *sys.path))}


@functools.cache
def found():
    """Runs all cases in one process, as the package needs a Keras of its own."""
    cases = [*TUTORIALS, *OF_EXAMPLES, *GATHERED, *REFUSED]
    done = subprocess.run(
        [sys.executable, PROGRAM, *cases], env=ENVIRONMENT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", [*TUTORIALS, *OF_EXAMPLES, *GATHERED])
def test_a_model_is_trained_as_by_hand(case):
    assert found()[case] < 1e-6


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_whose_negatives_would_be_those_of_a_replica_is_refused(case):
    assert REFUSED[case] in found()[case]


@pytest.mark.slow
def test_towers_train_on_parameter_servers(tmp_path):
    tool = [sys.executable, "-m", "looplib", "launch", "--workers=2", "--parameter_servers=2", "--"]
    flags = [f"--model_dir={tmp_path}", "--train_steps=60", "--strategy=parameter_server"]
    done = subprocess.run(
        [*tool, sys.executable, PROGRAM, *flags],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line.get("split") == "train"]
    assert losses[-1] < losses[0]
