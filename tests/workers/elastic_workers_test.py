"""Trainings whose workers are killed at random: they go on with fewer, and with all again, as if nothing had been."""

import json
import os
import pathlib
import random
import signal
import time

import numpy as np
import pytest
import tensorflow as tf

from looplib.commands.compare import compare
from looplib.run import commits, status
from looplib.run.records import read_jsonl

PLAIN = ["--mode=train", "--config.noisy=False", "--config.state_mb=0.01"]
LIMIT = 900.0  # seconds


class Training:
    """`python -m looplib launch` of the binary `faulty`."""

    def __init__(self, nursery, folder, options, *arguments):
        self.folder = folder
        flags = [f"--model_dir={folder}", "--strategy=multi_worker", *PLAIN, *arguments]
        self.life = nursery.life_of("looplib", "launch", *options, "--", nursery.python, "-m", "faulty", *flags)

    def workers(self):
        """The processes of the workers that run, in their order."""
        children = pathlib.Path(f"/proc/{self.life.pid}/task/{self.life.pid}/children")
        return [int(pid) for pid in children.read_text().split()]

    def saved_step(self):
        done = commits.newest(str(self.folder / "checkpoints"))
        return done.step if done else 0

    def wait_for(self, condition):
        end = time.monotonic() + LIMIT
        while not condition():
            assert not self.life.ended() and time.monotonic() < end, self.life.output()
            time.sleep(0.01)

    def kill(self, number):
        """Kills a worker with SIGKILL."""
        os.kill(self.workers()[number], signal.SIGKILL)

    def starts(self):
        """(replicas, what is noted) of each start that trained."""
        return [(start["num_replicas"], start["note"]) for start in self.report()["starts"]]

    def report(self):
        return json.loads((self.folder / "run.json").read_text())


def checksums(folder):
    return {
        r["step"]: r["examples_checksum"] for r in read_jsonl(str(folder / "metrics.jsonl")) if r["split"] == "train"
    }


def tensors(folder, step):
    reader = tf.train.load_checkpoint(str(folder / "checkpoints" / f"ckpt-{step}"))
    names = [name for name in reader.get_variable_to_shape_map() if name.endswith("VARIABLE_VALUE")]
    return {name: reader.get_tensor(name) for name in names if "save_counter" not in name}


def assert_as(whole, folder, step):
    """The same examples in each step, and the same weights but for rounding."""
    assert checksums(folder) == checksums(whole) and len(checksums(whole)) == step // 5
    found, expected = tensors(folder, step), tensors(whole, step)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_when_a_worker_dies_the_other_goes_on_with_the_same_examples(nursery, tmp_path):
    steps = ["--train_steps=15", "--checkpoint_interval=5", "--loop=eager"]
    whole = nursery.life(tmp_path / "whole", *PLAIN, *steps)
    training = Training(
        nursery, tmp_path / "run", ["--workers=2", "--min_workers=1"], *steps, "--config.slow_step=0.05"
    )
    training.wait_for(lambda: training.saved_step() >= 5)
    training.kill(1)
    assert whole.code(LIMIT) == 0 and training.life.code(LIMIT) == 0, training.life.output()
    note = "1 of 2 workers because worker 1 was ended by SIGKILL"
    assert training.starts() == [(2, "2 workers"), (1, note)]
    assert status.read_status(str(tmp_path / "run")).detail == note
    assert_as(tmp_path / "whole", tmp_path / "run", 15)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_random_deaths_of_four_workers_that_shrink_and_grow_leave_the_weights_of_the_whole_run(seed, nursery, tmp_path):
    steps = ["--train_steps=400", "--checkpoint_interval=5", "--global_batch_size=12", "--config.slow_step=0.05"]
    whole = nursery.workers(4, tmp_path / "whole", *PLAIN, *steps)
    assert [life.code(LIMIT) for life in whole] == [0] * 4, whole[0].output()
    options = ["--workers=4", "--min_workers=2", "--restarts=100", "--backoff=0.5", "--grow_after=8"]
    training, moments = Training(nursery, tmp_path / "run", options, *steps), random.Random(seed)
    for _ in range(6):
        target = training.saved_step() + moments.randrange(5, 50)
        training.wait_for(lambda: training.saved_step() >= target)
        time.sleep(moments.random())
        training.kill(moments.randrange(len(training.workers())))
    assert training.life.code(LIMIT) == 0, training.life.output()
    counts = [count for count, _ in training.starts()]
    assert {4, 3} <= set(counts) <= {4, 3, 2} and any(a < b for a, b in zip(counts, counts[1:])), counts
    assert_as(tmp_path / "whole", tmp_path / "run", 400)


@pytest.mark.slow
@pytest.mark.parametrize("data", ["indices", "interleaved"])
def test_random_deaths_of_workers_whose_number_stays_leave_every_bit(data, nursery, tmp_path):
    steps = ["--train_steps=200", "--checkpoint_interval=5", f"--config.data={data}", "--config.normalized=True"]
    steps += ["--config.noisy=True", "--config.slow_step=0.02"]
    whole = nursery.workers(2, tmp_path / "whole", *PLAIN, *steps)
    assert [life.code(LIMIT) for life in whole] == [0] * 2, whole[0].output()
    training, moments = Training(nursery, tmp_path / "run", ["--workers=2", "--restarts=9"], *steps), random.Random(7)
    for _ in range(4):
        target = training.saved_step() + moments.randrange(5, 30)
        training.wait_for(lambda: training.saved_step() >= target)
        training.kill(moments.randrange(2))
    assert training.life.code(LIMIT) == 0, training.life.output()
    assert [count for count, _ in training.starts()] == [2] * 5
    result = compare(tmp_path / "whole", tmp_path / "run")
    assert result.differences == [] and result.examples


@pytest.mark.slow
def test_a_program_tells_which_numbers_of_workers_can_share_its_global_batch(nursery, tmp_path):
    training = Training(nursery, tmp_path / "run", ["--workers=3", "--min_workers=1"], "--train_steps=5")
    assert training.life.code(LIMIT) == 0, training.life.output()
    assert training.starts() == [(2, "2 of 3 workers")]
    lines = [line for line in training.life.output().splitlines() if line.startswith("looplib: ")]
    assert lines == [
        "looplib: a global batch of 16 examples can be divided among 1 or 2 workers (of 1 to 3)",
        "looplib: starting 2 of 3 workers",
    ]
