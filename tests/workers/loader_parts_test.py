"""`context.loader` on real workers: parts, evaluation, a resume, and one with another number of workers."""

import os
import pathlib
import subprocess
import sys

import grain
import numpy as np
import pytest
import tensorflow as tf

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = [sys.executable, str(ROOT / "tests" / "programs" / "loader_workers.py")]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def run(folder, steps, *others, workers=2):
    launch = [sys.executable, "-m", "looplib", "launch", f"--workers={workers}", "--"]
    command = [*launch, *PROGRAM, f"--model_dir={folder}", f"--train_steps={steps}", *others]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=300)
    return done.returncode, done.stdout + done.stderr


def train(*arguments, **options):
    code, printed = run(*arguments, **options)
    assert code == 0, printed[-2000:]
    return printed


def hash_of(folder):
    (path,) = folder.rglob("ckpt-24.index")
    return int(tf.train.load_checkpoint(str(path.with_suffix(""))).get_tensor("hash/.ATTRIBUTES/VARIABLE_VALUE"))


@pytest.mark.slow
def test_two_workers_read_parts_that_continue_after_a_resume_and_evaluate_each_example_once(tmp_path):
    printed = train(tmp_path / "whole", 24)
    assert "examples 64  mean 31.5" in printed and "equal batches" not in printed
    train(tmp_path / "stopped", 11)
    code, printed = run(tmp_path / "stopped", 24, workers=1)
    assert code and "gave the run part 0 of 2, in batches of 4, and gives part 0 of 1, in batches of 8" in printed
    train(tmp_path / "stopped", 24)
    assert hash_of(tmp_path / "stopped") == hash_of(tmp_path / "whole") != 0
    assert "gives all 2 workers loaders that begin with equal batches" in train(tmp_path / "alike", 4, "--alike")


@pytest.mark.slow
def test_global_batches_of_a_loader_continue_on_another_number_of_workers(tmp_path):
    for steps, workers in [(11, 2), (17, 1), (24, 2)]:
        printed = train(tmp_path, steps, "--global", workers=workers)
        assert "no saved state" not in printed
    expected = 0
    for ids in grain.MapDataset.range(64).seed(1).shuffle().repeat(3).batch(8):
        expected = (expected * 31 + int(np.sum(ids * ids)) + 2**63) % 2**64 - 2**63
    assert hash_of(tmp_path) == expected != 0
