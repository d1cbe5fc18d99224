"""Runs that an earlier looplib began, which named variables, replicas and learning rates by numbers, continue."""

import pathlib
import shutil
import subprocess

import numpy as np
import pytest

TESTS = pathlib.Path(__file__).parent


@pytest.mark.parametrize("run", ["seq-keras-2", "sub-tf_keras-1"])
def test_a_run_of_an_earlier_version_ends_as_that_version_ended_it(run, python, tmp_path):
    golden, folder = TESTS / "goldens" / run, tmp_path / "run"
    shutil.copytree(golden, folder)
    command = [python, str(TESTS / "earlier.py"), *run.split("-"), str(folder), "40"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"restored from {folder}/checkpoints/ckpt-20" in done.stdout
    ours, theirs = np.load(f"{folder}.npz"), np.load(golden / "at_40.npz")
    assert len(theirs.files) == 14
    for name in theirs.files:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-4, atol=1e-5)
