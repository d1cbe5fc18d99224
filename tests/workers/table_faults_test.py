"""Tables on parameter servers, struck: a server is killed, frozen or started again, a worker dies, an id is wrong."""

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
from paths import PYTHONPATH

from looplib.processes.group import hold_ports

PROGRAM = pathlib.Path(__file__).parents[1] / "programs" / "tables.py"
TASKS = [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1)]
pytestmark = pytest.mark.slow


class Job:
    """The processes of one start, in a `with` block."""

    def __init__(self, folder, *flags, **environment):
        self.folder, self.flags = folder, [f"--model_dir={folder}/run", "--strategy=parameter_server", *flags]
        self.environment = {
            **os.environ,
            "PYTHONPATH": PYTHONPATH,
            "SHARDS": "4",
            "CUDA_VISIBLE_DEVICES": "-1",
            **environment,
        }
        self.processes = {}

    def __enter__(self):
        self.held = contextlib.ExitStack()
        ports, self.jobs = self.held.enter_context(hold_ports(len(TASKS))), {}
        for (job, _), port in zip(TASKS, ports):
            self.jobs.setdefault(job, []).append(f"127.0.0.1:{port}")
        for task in TASKS:
            self.start(*task)
        return self

    def start(self, job, index):
        task = json.dumps({"cluster": self.jobs, "task": {"type": job, "index": index}})
        with open(self.folder / f"{job}{index}.log", "ab") as log:
            self.processes[job, index] = subprocess.Popen(
                [sys.executable, PROGRAM, *self.flags],
                env={**self.environment, "TF_CONFIG": task},
                stdout=log,
                stderr=log,
            )
        self.held.callback(self.processes[job, index].wait)
        self.held.callback(self.processes[job, index].kill)

    def __exit__(self, *_):
        self.held.close()

    def log(self, job="chief", index=0):
        return (self.folder / f"{job}{index}.log").read_text(errors="replace")

    def wait_for(self, words, seconds=300):
        until = time.monotonic() + seconds
        while not re.search(words, self.log(), re.MULTILINE):
            assert self.processes["chief", 0].poll() is None and time.monotonic() < until, self.log()[-3000:]
            time.sleep(0.1)

    def code(self, seconds=300):
        return self.processes["chief", 0].wait(seconds)


def newest(folder):
    path = tf.train.latest_checkpoint(str(folder / "run" / "checkpoints"))
    reader = tf.train.load_checkpoint(path)
    rows = [reader.get_tensor(f"table/rows_{n}/.ATTRIBUTES/VARIABLE_VALUE") for n in range(4)]
    return int(path.rpartition("-")[2]), np.concatenate(rows)


LONG = ("--train_steps=1000000", "--keep_last=1000", "--checkpoint_interval=20", "--steps_per_loop=10")


def test_a_killed_server_ends_the_run_and_all_started_again_continue(tmp_path):
    with Job(tmp_path, *LONG) as job:
        job.wait_for(r"^step +60 ")
        job.processes["ps", 1].kill()
        assert job.code() == 1
        assert re.search("looplib: error: .*parameter server was lost.* restart all processes to resume", job.log())
    step, rows = newest(tmp_path)
    assert step >= 40 and np.isfinite(rows).all()
    with Job(tmp_path, f"--train_steps={step + 20}", *LONG[1:]) as job:
        assert job.code() == 0, job.log()[-3000:]
        assert f"restored step {step}" in job.log()
    later, after = newest(tmp_path)
    assert later == step + 20
    np.testing.assert_array_equal(after[500:], rows[500:])  # which no batch looks up
    assert not np.array_equal(after[:500], rows[:500])


def test_a_server_that_is_frozen_in_a_step_ends_the_run_by_the_watchdog(tmp_path):
    with Job(tmp_path, "--train_steps=1000000", "--steps_per_loop=10", "--stall_limit=20") as job:
        job.wait_for(r"^step +60 ")
        job.processes["ps", 0].send_signal(signal.SIGSTOP)
        assert job.code() == 76, job.log()[-3000:]
        assert "looplib: error: no progress for 2" in job.log()
        job.processes["ps", 0].send_signal(signal.SIGCONT)


def test_a_worker_that_dies_in_a_step_and_comes_back_loses_no_row(tmp_path):
    with Job(tmp_path, *LONG) as job:
        job.wait_for(r"^step +60 ")
        job.processes["worker", 1].kill()
        job.wait_for("task:1 is gone")
        job.start("worker", 1)
        job.wait_for("task:1 is back")
        job.processes["chief", 0].terminate()
        assert job.code() == 75, job.log()[-3000:]
    step, rows = newest(tmp_path)
    first = tf.train.load_checkpoint(str(tmp_path / "run" / "checkpoints" / "ckpt-20"))
    np.testing.assert_array_equal(rows[500:], np.concatenate([first.get_tensor(
        f"table/rows_{n}/.ATTRIBUTES/VARIABLE_VALUE") for n in (2, 3)]))  # fmt: skip
    assert step > 60 and np.isfinite(rows).all()


def test_an_id_that_the_table_does_not_have_ends_the_run_and_is_named(tmp_path):
    with Job(tmp_path, *LONG, WRONG_ID="-7") as job:
        assert job.code() == 1
        assert re.search(r"of 1000 rows does not have; expected 0 to 999(.|\n)*-7", job.log()), job.log()[-3000:]
        assert "looplib: error" in job.log().splitlines()[-1]
