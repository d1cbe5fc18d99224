"""The programs of docs/data_loaders.md, each with the real package: killed, and resumed as if it had not been."""

import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
from conftest import more

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "data_loaders.md").read_text()
(PROGRAM,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
OTHERS = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
NAMES = ("stateful", "torch", "datasets", "webdataset", "own", "processes")
MAKERS = dict(zip(NAMES, OTHERS, strict=True))
OWN_MAKER = re.compile(r"def make\(.*?\n\n\n", re.DOTALL)
LIMIT = 240  # seconds for a program
START = "import keras\nkeras.utils.set_random_seed(0)\n"


def program(name, folder):
    made = OWN_MAKER.sub(lambda _: MAKERS[name] + "\n\n", PROGRAM) if name != "grain" else PROGRAM
    assert name == "grain" or MAKERS[name] in made
    return START + made.replace("/tmp/loaders", str(folder)).replace("/tmp/shard", str(folder.parent / "shard"))


def start(name, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    path = folder.parent / f"program_of_{name}.py"
    path.write_text(program(name, folder))
    with open(f"{folder}.log", "a") as log:
        return subprocess.Popen([sys.executable, path], env=environment, stdout=log, stderr=log, start_new_session=True)


def weights(folder):
    """The numbers in the newest checkpoint: weights, the optimizer's variables and the step."""
    newest = max(folder.rglob("ckpt-*.index"), key=lambda path: int(path.stem.rpartition("-")[2]))
    reader = tf.train.load_checkpoint(str(newest.with_suffix("")))
    types = reader.get_variable_to_dtype_map()
    return {name: reader.get_tensor(name) for name, dtype in types.items() if dtype != tf.string}


@pytest.mark.parametrize("name", ["grain", *more(NAMES)])
def test_a_program_that_is_killed_twice_ends_as_one_that_is_not(name, tmp_path):
    if name in ("stateful", "torch") and importlib.util.find_spec("torchdata") is None:
        pytest.skip("PyTorch for CPUs is not installed")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    for step in (20, 110):
        process, end = start(name, killed), time.monotonic() + LIMIT
        while process.poll() is None and not any(number >= step for number in saved(killed)):
            assert time.monotonic() < end, pathlib.Path(f"{killed}.log").read_text()
            time.sleep(0.01)
        assert process.poll() is None, pathlib.Path(f"{killed}.log").read_text()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert start(name, killed).wait(LIMIT) == 0, pathlib.Path(f"{killed}.log").read_text()
    assert start(name, whole).wait(LIMIT) == 0, pathlib.Path(f"{whole}.log").read_text()
    one, other = weights(whole), weights(killed)
    assert one.keys() == other.keys() and len(one) >= 4
    for key, value in one.items():
        np.testing.assert_array_equal(value, other[key], err_msg=key)


def saved(folder):
    return [int(path.stem.rpartition("-")[2]) for path in folder.rglob("ckpt-*.index")]
