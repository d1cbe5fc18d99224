"""`context.loader` on two real workers: parts, evaluation, and a resume."""

import os
import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = [sys.executable, "-m", "looplib", "launch", "--workers=2", "--"]
PROGRAM = [sys.executable, str(ROOT / "tests" / "programs" / "loader_workers.py")]

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def train(folder, steps, *others):
    command = [*LAUNCH, *PROGRAM, f"--model_dir={folder}", f"--train_steps={steps}", *others]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


def hash_of(folder):
    (path,) = folder.rglob("ckpt-24.index")
    return int(tf.train.load_checkpoint(str(path.with_suffix(""))).get_tensor("hash/.ATTRIBUTES/VARIABLE_VALUE"))


@pytest.mark.slow
def test_two_workers_read_parts_that_continue_after_a_resume_and_evaluate_each_example_once(tmp_path):
    printed = train(tmp_path / "whole", 24)
    assert "examples 64  mean 31.5" in printed and "equal batches" not in printed
    train(tmp_path / "stopped", 11)
    train(tmp_path / "stopped", 24)
    assert hash_of(tmp_path / "stopped") == hash_of(tmp_path / "whole") != 0
    assert "gives all 2 workers loaders that begin with equal batches" in train(tmp_path / "alike", 4, "--alike")
