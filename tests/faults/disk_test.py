"""A disk that is full, or cannot be written, while a run trains on it: nothing committed is lost, and it resumes."""

import contextlib
import functools
import json
import os
import shutil
import subprocess

import keras as keras3
import numpy as np
import pytest
import toy
from conftest import make_strategy, more
from kill_test import events, records, saved_step

import looplib
from looplib.commands.compare import compare
from looplib.errors import SaveError
from looplib.loop.contracts import Request
from looplib.run import commits

MB = 2**20


def mount(folder, *options):
    return subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True)


@pytest.fixture
def disk(tmp_path):
    """A small file system of its own, of 24 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    result = mount(folder, "-t", "tmpfs", "-o", "size=24m", "tmpfs")
    if result.returncode:
        pytest.skip(f"a file system cannot be mounted here: {result.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_until_it_ends(life, folder, leave):
    """Writes to a file of somebody else's whenever there is more than some space, until the run has ended."""
    path = folder / "somebody_elses"
    while True:
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        if free > leave:
            with contextlib.suppress(OSError), open(path, "ab") as file:  # the run may have been faster
                file.write(bytes(free - leave))
        if life.ended(0.002):
            return path


# A checkpoint is 4.6 MB; three are kept, and a fourth is written before one is deleted.
ARGUMENTS = ["--config.state_mb=4", "--keep_last=2", "--config.slow_step=0.01", "--train_steps=28", "--loop=eager"]


@pytest.fixture(scope="module")
def whole(nursery, tmp_path_factory):
    """A run on a disk with space."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    life = nursery.life(folder, *ARGUMENTS)
    assert life.code() == 0, life.output()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("leave", [3 * MB, *more([0])])
def test_a_disk_that_gets_full_ends_a_run_with_a_sentence_and_it_resumes_once_there_is_space(
    leave, nursery, disk, whole
):
    """Full at once, so that nothing can be reported either, and full in the midst of a later save."""
    arguments, run = ARGUMENTS, disk / "run"
    life = nursery.life(run, *arguments)
    while saved_step(run) < 12 and not life.ended(0.005):
        pass
    fill_until_it_ends(life, disk, leave)
    code, output = life.code(), life.output()
    kept = saved_step(run)
    assert code == 1, output
    last = output.strip().splitlines()[-1]
    assert last.startswith("looplib: error: ") and "No space left on device" in last and "; free space" in last, last
    assert f"{run}/" in last and "Traceback" not in output, output
    assert kept >= 12
    assert commits.verify(commits.newest(str(run / "checkpoints"))) == ""
    still = nursery.life(run, *arguments)  # nothing is mended
    other = fill_until_it_ends(still, disk, leave)
    assert still.code() == 1 and saved_step(run) >= kept
    other.unlink()
    life = nursery.life(run, *arguments)
    assert life.code() == 0, life.output()
    assert compare(whole, run).differences == []
    assert records(run) == records(whole) and events(run) == events(whole)
    assert json.loads((run / "run.json").read_text())["status"] == "done"


# In one process: when a background save fails, when is the error raised?


def start(folder, actions=()):
    """Builds a trainer and a controller that goes step by step: a graph would take a second to trace."""
    keras3.utils.set_random_seed(0)
    trainer = toy.Regression(optimizer="adam")
    evaluator = toy.RegressionEvaluator(trainer.model)
    policy = looplib.CheckpointPolicy(every_steps=4)
    return trainer, toy.controller(
        make_strategy("default"),
        trainer,
        evaluator,
        model_dir=folder,
        checkpoints=policy,
        actions=actions,
        loop="eager",
    )


@pytest.fixture
def run(tmp_path):
    """A run directory whose checkpoints can be made unwritable, also for root: by a mount over them."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    yield folder
    while subprocess.run(["umount", str(folder / "checkpoints")], capture_output=True).returncode == 0:
        pass


def writable(folder, yes):
    place = folder / "checkpoints"
    if yes:
        subprocess.run(["umount", str(place)], check=True)
        return
    for command in (["--bind", place, place], ["-o", "remount,bind,ro", place]):
        result = subprocess.run(["mount", *map(str, command)], capture_output=True, text=True)
        if result.returncode:
            pytest.skip(f"a directory cannot be made read-only here: {result.stderr.strip()}")


@functools.cache
def expected_weights(steps):
    trainer, controller = start(None)
    with controller:
        controller.train(steps)
    return trainer.weights()


def assert_equal_weights(trainer, steps):
    for a, b in zip(trainer.weights(), expected_weights(steps), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_directory_that_cannot_be_written_between_saves_only_hinders_nothing(run):
    def action(event):
        if event.step in (5, 9):
            event.controller._checkpointer.wait()
            writable(run, False)
        if event.step in (7, 11):
            writable(run, True)

    trainer, controller = start(run, [action])
    with controller:
        controller.train(14)
    assert_equal_weights(trainer, 14)
    assert saved_step(run) == 14


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("fails_at", [8, 12])
def test_a_save_that_fails_is_reported_soon_and_the_run_resumes_exactly_once_it_is_mended(fails_at, run):
    def action(event):
        if event.step == fails_at - 1:
            event.controller._checkpointer.wait()
            writable(run, False)

    _, controller = start(run, [action])
    with pytest.raises(SaveError, match=f"ckpt-{fails_at}.*.*Read-only.*system.*"):
        controller.train(20)
    assert fails_at <= controller.global_step <= fails_at + 4  # before the next save at the latest
    writable(run, True)
    controller.close()
    assert saved_step(run) == fails_at - 4
    trainer, controller = start(run)
    with controller:
        assert controller.restored_from.endswith(f"ckpt-{fails_at - 4}")
        controller.train(20)
    assert_equal_weights(trainer, 20)


def block_next_save(folder, step):
    """Puts a directory where the save of a step will write its first file: a fault of that save alone, on any disk."""
    place = folder / "checkpoints" / f"ckpt-{step}.unfinished"
    place.mkdir(parents=True)
    (place / "in_the_way").write_text("")
    return place


@pytest.mark.slow
@pytest.mark.parametrize("what", ["the last save", "with an evaluation after it", "while steps go on", "close"])
def test_the_error_of_a_background_save_is_never_lost(what, tmp_path):
    folder = tmp_path / "run"
    _, controller = start(folder)
    controller.train(5)  # the first save of a process is not in the background
    place = block_next_save(folder, 8)
    with pytest.raises(SaveError, match="ckpt-8"):
        if what == "the last save":
            controller.train(8)
        elif what == "with an evaluation after it":
            controller.train_and_evaluate(20, 8)
        elif what == "while steps go on":
            controller.train(400)
        else:
            controller.loops["train"].resume(5)
            controller.loops["train"].run(Request(3), "train")
            controller._checkpointer.save(wait=False)
            controller.close()
    if what == "while steps go on":
        assert controller.global_step <= 12
    controller.close()  # the error is raised once
    shutil.rmtree(place)
    trainer, controller = start(folder)
    with controller:
        assert controller.restored_from.endswith("ckpt-5")
        controller.train(12)
    assert_equal_weights(trainer, 12)
