"""The program of docs/continuous.md: killed again and again while files appear, and a server reads what it exports."""

import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

ROOT = pathlib.Path(__file__).parents[2]
(PROGRAM,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "continuous.md").read_text(), re.DOTALL)
LIMIT = 240  # seconds for a start
DAYS, ROWS, WIDTH, STEPS = 12, 512, 8, 192


def start(folder):
    path = folder / "program.py"
    path.write_text("import keras\nkeras.utils.set_random_seed(0)\n" + PROGRAM.replace("/tmp/continuous", str(folder)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    with open(folder / "log", "a") as log:
        return subprocess.Popen([sys.executable, path], env=environment, stdout=log, stderr=log, start_new_session=True)


def saved(folder):
    return max((int(path.stem.partition("-")[2]) for path in folder.rglob("ckpt-*.commit")), default=0)


def auc(folder):
    """The AUC of a version on examples of its own, by numpy: the share of pairs that are in the right order."""
    x = np.random.default_rng(77).normal(size=(400, WIDTH)).astype("float32")
    clicked = x @ np.arange(1, WIDTH + 1) > 0
    (scores,) = tf.saved_model.load(str(folder)).signatures["serving_default"](tf.constant(x)).values()
    scores = scores.numpy().ravel()
    return np.mean(scores[clicked][:, None] > scores[~clicked])


@pytest.mark.slow
def test_a_training_without_an_end_that_is_killed_has_each_example_once_and_serves_good_versions_alone(tmp_path):
    moments = random.Random(1)
    with open(tmp_path / "reader.log", "w") as log:
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        environment.pop("PYTHONPATH", None)
        reader = subprocess.Popen(
            [sys.executable, ROOT / "tests" / "programs" / "serving_reader.py", tmp_path / "models"],
            env=environment, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        for step in (8, 40, 72, 104, 136):
            process, end = start(tmp_path), time.monotonic() + LIMIT
            while process.poll() is None and saved(tmp_path) < step:
                assert time.monotonic() < end, (tmp_path / "log").read_text()[-3000:]
                time.sleep(0.01)
            time.sleep(moments.uniform(0, 0.5))
            assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert start(tmp_path).wait(LIMIT) == 0, (tmp_path / "log").read_text()[-3000:]
        assert reader.poll() is None, (tmp_path / "reader.log").read_text()[-3000:]
    finally:
        reader.kill()
        reader.wait()
    assert "each example came once: True" in (tmp_path / "log").read_text()
    checkpoint = tf.train.load_checkpoint(str(tmp_path / "run" / "checkpoints" / f"ckpt-{STEPS}"))
    np.testing.assert_array_equal(checkpoint.get_tensor("times/.ATTRIBUTES/VARIABLE_VALUE"), np.ones(DAYS * ROWS))
    served = [path for path in (tmp_path / "models").iterdir() if path.name.isdigit()]
    rejected = [path for path in (tmp_path / "models" / "rejected").iterdir() if path.name.isdigit()]
    assert len(served) == 3 and rejected and max(int(path.name) for path in (*served, *rejected)) >= 12
    for path in served:
        assert auc(path) > 0.97, path
    assert min(map(auc, rejected)) < min(map(auc, served))
    seen = [int(line) for line in (tmp_path / "reader.log").read_text().split() if line.isdigit()]
    assert len(seen) >= 3 and seen == sorted(set(seen))
