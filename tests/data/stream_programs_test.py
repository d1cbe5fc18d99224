"""The program of docs/streams.md on a cluster that another process owns: killed, waiting for messages, and on two workers."""

import contextlib
import json
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

pytest.importorskip("confluent_kafka")
ROOT = pathlib.Path(__file__).parents[2]
(PROGRAM,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "streams.md").read_text(), re.DOTALL)
LIMIT = 120  # seconds for a program
STEP = 16  # messages of each of four partitions that a step takes
STEPS = 200
WITH_FLAGS = "looplib.launch.run(lambda config: (Classifier(brokers), None), global_batch_size=64, steps_per_loop=5)\n"


class Cluster:
    def __init__(self):
        program = [sys.executable, ROOT / "tests" / "programs" / "kafka_cluster.py"]
        self._process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.brokers = self._process.stdout.readline().strip()

    def send(self, steps):
        """Sends the messages of some further steps."""
        print(steps * STEP, file=self._process.stdin, flush=True)
        assert int(self._process.stdout.readline())

    def close(self):
        self._process.kill()
        self._process.wait()


@pytest.fixture
def cluster():
    with contextlib.closing(Cluster()) as made:
        yield made


def start(cluster, folder, changes=(), command=(), flags=()):
    text = PROGRAM
    seeded = ("import keras\n", "import keras\nkeras.utils.set_random_seed(0)\n")
    pinned = ("steps_per_loop=5", 'steps_per_loop=5, loop="graph"')
    for before, after in (*changes, ("/tmp/streams", str(folder)), seeded, pinned):
        assert before in text or before == "/tmp/streams"
        text = text.replace(before, after)
    path = folder.parent / f"{folder.name}.py"
    path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2", "BROKERS": cluster.brokers}
    with open(f"{folder}.log", "a") as log:
        return subprocess.Popen(
            [*command, sys.executable, path, *flags], env=environment, stdout=log, stderr=log, start_new_session=True
        )


def written(folder):
    return pathlib.Path(f"{folder}.log").read_text()


def saved(folder):
    return max((int(path.stem.rpartition("-")[2]) for path in folder.rglob("ckpt-*.index")), default=0)


def await_step(process, folder, step):
    end = time.monotonic() + LIMIT
    while saved(folder) < step:
        assert process.poll() is None and time.monotonic() < end, written(folder)
        time.sleep(0.02)


def kill(process, signum):
    os.killpg(process.pid, signum)
    return process.wait(LIMIT)


def weights(folder):
    """The numbers in the newest checkpoint: weights, the optimizer's variables and the step."""
    reader = tf.train.load_checkpoint(str(folder / "checkpoints" / f"ckpt-{saved(folder)}"))
    types = reader.get_variable_to_dtype_map()
    return {name: reader.get_tensor(name) for name, dtype in types.items() if dtype != tf.string}


def assert_equal(folder, other):
    one, two = weights(folder), weights(other)
    assert one.keys() == two.keys() and len(one) >= 4
    for key, value in one.items():
        np.testing.assert_array_equal(value, two[key], err_msg=key)
    assert losses(folder) == losses(other)


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line.get("split") == "train"]


def test_a_run_that_is_killed_and_waits_ends_as_one_that_is_not(cluster, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for sent, number in (
        (55, 50),
        (70, 120),
    ):  # each kill comes while the program waits for messages, or shortly before
        cluster.send(sent)
        process = start(cluster, killed)
        await_step(process, killed, number)
        kill(process, signal.SIGKILL)
    cluster.send(STEPS - 125)
    assert start(cluster, killed).wait(LIMIT) == 0, written(killed)
    assert start(cluster, whole).wait(LIMIT) == 0, written(whole)
    assert_equal(whole, killed)
    assert written(killed).count("restored step") == 2


def test_waiting_is_no_stall_and_a_signal_ends_it_with_a_save(cluster, tmp_path):
    whole, waiting = tmp_path / "whole", tmp_path / "waiting"
    guarded = [("trainer=Classifier", "guards=looplib.Guards(stall_limit=3), trainer=Classifier")]
    cluster.send(73)
    process = start(cluster, waiting, guarded)
    await_step(process, waiting, 70)
    time.sleep(8)
    assert process.poll() is None, written(waiting)
    began = time.monotonic()
    assert kill(process, signal.SIGTERM) == 75, written(waiting)
    assert time.monotonic() - began < 8
    assert saved(waiting) == 73  # each message that has come is used
    cluster.send(STEPS - 73)
    assert start(cluster, waiting, guarded).wait(LIMIT) == 0, written(waiting)
    assert start(cluster, whole).wait(LIMIT) == 0, written(whole)
    assert_equal(whole, waiting)


@pytest.mark.slow
def test_each_of_two_workers_has_its_own_partitions_and_continues_from_them(cluster, tmp_path):
    changes = [(PROGRAM[PROGRAM.index("controller = ") :], WITH_FLAGS)]
    command = [sys.executable, "-m", "looplib", "launch", "--workers=2", "--"]

    def launched(folder):
        flags = [f"--model_dir={folder}", f"--train_steps={STEPS}", "--checkpoint_interval=10"]
        return start(cluster, folder, changes, command, [*flags, "--strategy=multi_worker"])

    alone, whole, stopped = tmp_path / "alone", tmp_path / "whole", tmp_path / "stopped"
    cluster.send(73)
    process = launched(stopped)
    await_step(process, stopped, 70)
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT) == 75 and saved(stopped) == 73, written(stopped)
    cluster.send(50)
    process = launched(stopped)
    await_step(process, stopped, 120)
    kill(process, signal.SIGKILL)
    cluster.send(STEPS - 123)
    for folder in (stopped, whole):
        assert launched(folder).wait(LIMIT) == 0, written(folder)
    assert_equal(whole, stopped)
    assert start(cluster, alone).wait(LIMIT) == 0, written(alone)
    one, other = weights(alone), weights(whole)
    for key, value in one.items():
        np.testing.assert_allclose(value, other[key], rtol=1e-3, atol=1e-5, err_msg=key)
