"""Run directories of earlier versions, as `tests/fixtures` keeps them, are shown and resume."""

import json
import pathlib
import subprocess
import tarfile

import earlier_program
import numpy as np
import pytest
from conftest import more

from looplib.__main__ import main as cli

ARCHIVE = pathlib.Path(__file__).absolute().parents[1] / "fixtures" / "runs.tar.xz"
SHOWN = {"killed": ("silent", "4/8"), "stopped": ("preempted", "6/8"), "diverged": ("failed", "6/8")}  # else done
KINDS = list(earlier_program.KINDS)
FEW = ["stopped", "keras_trainer"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def records(path):
    """Returns {(step, split): the metrics that depend on no clock}; each is there once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {(line.pop("step"), line.pop("split")): line for line in lines}
    assert len(found) == len(lines)
    return {
        key: {name: value for name, value in line.items() if "per_second" not in name} for key, line in found.items()
    }


def test_the_archive_has_each_kind(runs):
    assert {path.name for path in runs.iterdir() if path.is_dir()} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_an_earlier_version_is_shown(kind, runs, tmp_path, capfd):
    assert cli(["status", str(runs / kind)]) == 0
    row = capfd.readouterr().out.splitlines()[1].split()
    assert tuple(row[1:3]) == SHOWN.get(kind, ("done", "8/8"))
    assert cli(["inspect", "--verify", str(runs / kind)]) == 0
    newest = capfd.readouterr().out.splitlines()[1].split()
    assert newest[0] == str(earlier_program.KINDS[kind].resumes_at) and "intact" in newest
    page = tmp_path / "page.html"
    assert cli(["report", f"--output={page}", str(runs / kind)]) == 0
    assert '"loss"' in page.read_text()
    assert "error" not in capfd.readouterr().err


@pytest.mark.parametrize("kind", [*FEW, *more([kind for kind in KINDS if kind not in FEW])])
def test_a_run_of_an_earlier_version_resumes_as_if_it_had_not_stopped(kind, runs, nursery):
    before = records(runs / kind / "metrics.jsonl")
    program = earlier_program.KINDS[kind]
    command = [nursery.python, "-m", "earlier_program", f"--model_dir={runs / kind}", f"--config.kind={kind}"]
    command += [*program.flags, "--train_steps=12"]
    done = subprocess.run(command, capture_output=True, text=True, env=nursery.environment)
    assert done.returncode == 0, done.stderr
    assert f"resumes after step {program.resumes_at} " in done.stderr
    after, expected = records(runs / kind / "metrics.jsonl"), records(runs / f"{kind}.jsonl")
    assert list(after) == list(expected)
    for key, metrics in expected.items():
        assert after[key].keys() == metrics.keys()
        for name, value in metrics.items():
            rtol = 0 if isinstance(value, int) else 1e-4  # a number of examples and their checksum are exact
            np.testing.assert_allclose(after[key][name], value, rtol, err_msg=f"{name} of {key}")
        if key[0] <= program.resumes_at:
            assert after[key] == before[key]
    for path in (runs / kind / "csv").glob("*.csv"):
        steps = [int(line.split(",")[0]) for line in path.read_text().splitlines()[1:]]
        assert steps == [step for step, split in expected if split == path.stem]
