"""Data of users and items, and a training on parameter servers, for the tests of packages of recommenders."""

import json
import os
import subprocess
import sys

import numpy as np
from paths import PYTHONPATH

USERS, ITEMS, EXAMPLES, BATCH, DIM = 30, 20, 256, 32, 4
RANDOM = np.random.default_rng(0)
USER, ITEM = RANDOM.integers(0, USERS, EXAMPLES), RANDOM.integers(0, ITEMS, EXAMPLES)
CLICKS = RANDOM.integers(0, 2, (EXAMPLES, 1)).astype("float32")


def output_of(command, **environment):
    """Returns what a program has printed, which has to succeed."""
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses_on_servers(program, folder, **environment):
    """Returns the reported losses of 60 steps of a program on two workers and two parameter servers."""
    tool = [sys.executable, "-m", "looplib", "launch", "--workers=2", "--parameter_servers=2", "--"]
    flags = [f"--model_dir={folder}", "--train_steps=60", "--strategy=parameter_server"]
    output_of([*tool, sys.executable, program, *flags], **environment)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line.get("split") == "train"]
