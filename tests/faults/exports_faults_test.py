"""Exports under faults: what stands beside them, two at once, kills, full disks, forged names and links."""

import os
import shutil
import time

import keras as keras3
import numpy as np
import pytest
import toy
from conftest import make_strategy
from disk_test import disk
from exports.exports_test import contents
from tampering import rewrite_run_state

import looplib
from looplib.binary import trial
from looplib.errors import ExportError, UsageError

__all__ = ["disk"]
SMALL = ("--config.state_mb=0.01", "--loop=eager")
PARTS = ["README.md", "export.json", "model.keras", "saved_model"]


@pytest.fixture(scope="module")
def trained(nursery, tmp_path_factory):
    """A run of four steps."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    life = nursery.life(folder, *SMALL, "--mode=train", "--train_steps=4")
    assert life.code() == 0, life.output()
    return folder


def export(nursery, run, out):
    return nursery.life(run, *SMALL, "--mode=export", f"--export={out}")


@pytest.mark.slow
def test_an_export_touches_nothing_beside_it(nursery, trained, tmp_path):
    for name in ("out.old", "out.new", "out.0123.new", "out.0123456789abcdef.new", "other.0123456789abcdef.new"):
        (tmp_path / name).mkdir()
        for file in ("export.json", "saved_model"):  # as if they were exports
            (tmp_path / name / file).write_text(f"{file} of {name}")
    before = contents(tmp_path)
    for _ in range(2):  # the second replaces the first
        life = export(nursery, trained, tmp_path / "out")
        assert life.code() == 0, life.output()
    assert sorted(os.listdir(tmp_path / "out")) == PARTS
    shutil.rmtree(tmp_path / "out")
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_an_export_into_a_directory_that_cannot_be_replaced_is_whole_and_replaced(nursery, trained, disk):
    """One that is mounted."""
    for _ in range(2):
        life = export(nursery, trained, disk)
        assert life.code() == 0, life.output()
        assert sorted(os.listdir(disk)) == PARTS
    (disk / "thesis.tex").write_text("mine")
    life = export(nursery, trained, disk)
    assert life.code() == 1 and "holds something else than an export" in life.output()


@pytest.mark.slow
def test_places_that_an_export_cannot_have_are_a_sentence(nursery, trained, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    for name, words in (("link", "is a symbolic link, which an export would replace; name the directory itself"),
                        ("a[1]", "has '[' and ']' in its name"), ("a\nb", "in its name, which TensorFlow interprets")):  # fmt: skip
        life = export(nursery, trained, tmp_path / name)
        assert life.code() == 1 and words in life.output().strip().splitlines()[-1], life.output()
    life = nursery.life(trained, *SMALL, "--mode=export", "--export=")
    assert life.code() == 1 and "the directory of the export is ''" in life.output()
    assert sorted(os.listdir(tmp_path)) == ["link", "there"]


@pytest.mark.slow
def test_two_exports_at_once_both_end_and_leave_a_whole_one(nursery, trained, tmp_path):
    for _ in range(3):
        lives = [export(nursery, trained, tmp_path / "out") for _ in range(3)]
        for life in lives:
            assert life.code() == 0, life.output()
        assert os.listdir(tmp_path) == ["out"] and sorted(os.listdir(tmp_path / "out")) == PARTS
    life = nursery.life(trained, *SMALL, "--mode=eval")
    assert life.code() == 0, life.output()


def test_what_killed_exports_leave_is_removed_by_the_next_one(nursery, trained, tmp_path):
    lives = [export(nursery, trained, tmp_path / "out") for _ in range(3)]
    until = time.monotonic() + 60
    while len(list(tmp_path.glob("out.*.new"))) < 3 and time.monotonic() < until:
        time.sleep(0.001)
    lives[0].kill()
    lives[1].kill()
    assert lives[2].code() == 0, lives[2].output()
    assert export(nursery, trained, tmp_path / "out").code() == 0
    assert os.listdir(tmp_path) == ["out"] and sorted(os.listdir(tmp_path / "out")) == PARTS


@pytest.mark.slow
def test_a_full_disk_ends_an_export_with_a_sentence_and_leaves_the_earlier_one(nursery, trained, disk):
    out = disk / "out"
    assert export(nursery, trained, out).code() == 0
    before = contents(out)
    with open(disk / "somebody_elses", "wb") as file:
        file.write(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - 4096))
    life = export(nursery, trained, out)
    assert life.code() == 1
    last = life.output().strip().splitlines()[-1]
    assert last.startswith("looplib: error: ") and str(out) in last and "No space left on device" in last, last
    assert contents(out) == before and sorted(os.listdir(disk)) == ["out", "somebody_elses"]


class Rising(toy.RegressionEvaluator):
    """Reports the step as its accuracy, so that each evaluation is the best."""

    def loop_end(self, metrics):
        return {**metrics, "accuracy": int(self.global_step)}


def best(folder, steps, directory=None):
    """Trains to a step, and keeps the newest of the exports after each second one."""
    trainer = toy.Regression()
    action = looplib.ExportBest("eval/accuracy", directory)
    policy = looplib.CheckpointPolicy(every_steps=2)
    with toy.controller(
        make_strategy("default"), trainer, Rising(trainer.model), model_dir=folder, writers=None, checkpoints=policy,
        actions=[action], loop="eager",
    ) as controller:  # fmt: skip
        controller.train_and_evaluate(steps, 2)


@pytest.mark.slow
def test_what_is_no_export_is_not_removed_although_the_saved_state_names_it(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    best(run, 2, out)
    (out / "step-1").mkdir()
    (out / "step-1" / "thesis.tex").write_text("mine")
    (out / "step-0").symlink_to(tmp_path / "thesis")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "export.json").write_text("mine")

    def change(state):
        state["actions"]["ExportBest(eval/accuracy, max)"][-1] = ["step-0", "step-1", "step-2"]

    rewrite_run_state(run / "checkpoints" / "ckpt-2.commit", change)
    best(run, 4, out)
    assert sorted(os.listdir(out)) == [
        ".looplib-run",
        "step-1",
        "step-4",
    ]  # the link itself is gone, and what it led to is there
    assert (out / "step-1" / "thesis.tex").read_text() == (tmp_path / "thesis" / "export.json").read_text() == "mine"


@pytest.mark.slow
def test_a_directory_for_the_best_is_for_one_run(tmp_path):
    out = tmp_path / "out"
    best(tmp_path / "run", 4, out)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    before = contents(out)
    for name in ("copy", "another"):
        with pytest.raises(ExportError):
            best(tmp_path / name, 6, out)
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "step-1").mkdir()
    with pytest.raises(ExportError):
        best(tmp_path / "run", 6, tmp_path / "moved")
    assert contents(out) == before
    best(tmp_path / "run", 6, out)
    assert "step-6" in os.listdir(out)


@pytest.mark.slow
def test_a_dry_run_exports_into_its_own_directory(tmp_path):
    action = looplib.ExportBest("eval/accuracy", tmp_path / "out")
    trial.keep_inside([print, action])
    trainer = toy.Regression()
    settings = dict(model_dir=tmp_path / "run", writers=None, actions=[action], loop="eager")
    with toy.controller(make_strategy("default"), trainer, Rising(trainer.model), **settings) as controller:
        controller.train_and_evaluate(2, 2)
    assert sorted(os.listdir(tmp_path)) == ["run"] and os.listdir(tmp_path / "run" / "export") == ["step-2"]


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("name", ["step-4", ""])
def test_exports_of_a_run_never_follow_a_link(name, tmp_path):
    run, outside = tmp_path / "run", tmp_path / "outside"
    best(run, 2)
    outside.mkdir()
    (outside / "notes").write_text("mine")
    place = run / "export" / name
    shutil.rmtree(place, ignore_errors=True)
    place.symlink_to(outside)
    with pytest.raises(UsageError, match="is a symbolic link"):
        best(run, 4)
    assert contents(outside) == {"notes": b"mine"}


@pytest.mark.slow
def test_a_full_disk_ends_a_training_at_the_export_and_it_resumes(disk, tmp_path):
    whole = tmp_path / "whole" / "export"
    best(whole.parent, 6)
    run, out = tmp_path / "run", disk / "out"
    best(run, 2, out)
    before, filler = contents(out), disk / "somebody_elses"
    filler.write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - 4096))
    with pytest.raises(ExportError, match="out/step-4"):
        best(run, 6, out)
    assert contents(out) == before
    filler.unlink()
    best(run, 6, out)
    assert sorted(os.listdir(out)) == [".looplib-run", *os.listdir(whole)] == [".looplib-run", "step-6"]
    one, other = (keras3.models.load_model(folder / "step-6" / "model.keras").get_weights() for folder in (out, whole))
    assert all(map(np.array_equal, one, other)) and len(one) == len(other) > 0
