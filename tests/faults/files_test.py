"""Checkpoint files cut short, changed, removed, unreadable and half written: a run resumes from the newest whole one.

Three checkpoints are kept, of the steps 3, 6 and 9. What is trained after a damage, to step 12, must equal what was
trained without one: every record of `metrics.jsonl` and every tensor of the last checkpoint, bit by bit.
"""

import itertools
import logging
import os
import pathlib
import random
import shutil
import subprocess
import time

import keras as keras3
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy, more
from paths import PYTHONPATH

import looplib
from looplib.commands.compare import compare
from looplib.errors import CheckpointError, MismatchError
from looplib.report.writers.files import JsonlWriter
from looplib.run import commits

ROOT = pathlib.Path(__file__).parents[2]
NEWEST, KEPT, LAST = 9, (3, 6, 9), 12
FILES = {"data": ".data-00000-of-00001", "index": ".index", "marker": ".commit"}
_random = random.Random(0)


class Noisy(toy.Regression):
    """The regression with dropout, whose seed is state."""

    def __init__(self):
        keras3.utils.set_random_seed(0)
        super().__init__(optimizer="adam")
        kernel, layers = self.model.layers[-1].get_weights(), keras3.layers
        self.model = keras3.Sequential([keras3.Input((toy.NUM_FEATURES,)), layers.Dropout(0.3), layers.Dense(3)])
        self.model.layers[-1].set_weights(kernel)


def start(folder, keep=3, start_anew=False):
    """Builds a controller that goes step by step: these tests are about files, and a graph takes a second to trace."""
    policy = looplib.CheckpointPolicy(every_steps=3, keep=(looplib.KeepLast(keep),))
    writers = [JsonlWriter(os.path.join(folder, "metrics.jsonl"))]
    return toy.controller(
        make_strategy("default"),
        Noisy(),
        model_dir=folder,
        checkpoints=policy,
        start=looplib.Start(start_anew=start_anew),
        writers=writers,
        seed=5,
        loop="eager",
    )


def train(folder, steps, keep=3):
    with start(folder, keep) as controller:
        controller.train(steps)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, LAST)
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The run that stopped at step 9, for each test to copy."""
    folder = tmp_path_factory.mktemp("stopped")
    train(folder, NEWEST)
    found = [done.step for done in commits.committed(folder / "checkpoints")]
    assert found == sorted(KEPT, reverse=True)
    return folder


@pytest.fixture
def folder(stopped, tmp_path):
    """A copy of the run that stopped, to be damaged."""
    return shutil.copytree(stopped, tmp_path / "run")


def file_of(folder, kind, step=NEWEST):
    return folder / "checkpoints" / f"ckpt-{step}{FILES[kind]}"


def truncate(path, length):
    """Cuts a file to a length: 0, 1, a number below 1 as a part of it, or -1 for its last byte."""
    size = path.stat().st_size
    length = size - 1 if length == -1 else int(size * length) if 0 < length < 1 else length
    os.truncate(path, length)


def flip(path, part):
    """Flips one bit."""
    content = bytearray(path.read_bytes())
    place = int(len(content) * part)
    content[place] ^= 1 << place % 7  # the highest bit would make no text, which is told more easily
    path.write_bytes(content)


def remove(path, _):
    path.unlink()


def replace_by_directory(path, _):
    path.unlink()
    path.mkdir()
    (path / "something").write_text("else")


PARTS = [round(_random.random(), 3) for _ in range(3)]
DAMAGES = [
    *((truncate, length) for length in (0, 1, *PARTS, -1)),
    *((flip, part) for part in (0.0, *PARTS)),
    (remove, None),
    (replace_by_directory, None),
]
each_damage = pytest.mark.parametrize(
    "damage, how",
    [
        pytest.param(damage, how, marks=pytest.mark.slow if how in PARTS[1:] else (), id=f"{damage.__name__}-{how}")
        for damage, how in DAMAGES
    ],
)


def names(place):
    return sorted(path.name for path in place.iterdir())


def check_it_resumes(folder, whole, caplog, expected_step, damaged=()):
    """Starts the run again, and checks from where it resumes, what it says and sets aside, and how it ends.

    Without its marker a checkpoint may be somebody else's: it stays until the run saves at that very step.
    """
    before = {step: names_of(folder, step) for step in damaged}
    caplog.clear()
    with start(folder) as controller:
        restored, messages = controller.restored_from, warnings(caplog)
        assert restored == str(folder / "checkpoints" / f"ckpt-{expected_step}")
        controller.train(LAST)
    for step in damaged:
        place = folder / "checkpoints" / "set_aside" / f"ckpt-{step}"
        if looplibs(before[step], step):
            told = [message for message in messages if f"the checkpoint of step {step} is invalid: " in message]
            assert len(told) == 1 and "\n" not in told[0] and told[0].endswith(f"; moved to {place}")
        else:
            told = [
                message
                for message in messages
                if f"ckpt-{step} in {folder}/checkpoints have no looplib marker" in message
            ]
            moved = f"files of ckpt-{step} without looplib's marker blocked a save; moved to {place}"
            assert len(told) == 1 and moved in warnings(caplog)
        assert names(place) == [name for name in before[step] if not name.endswith(".unfinished")]
    assert len(messages) == len(damaged), messages
    if not damaged:
        assert not (folder / "checkpoints" / "set_aside").exists()
    assert compare(whole, folder).differences == []


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name == "absl"]


def looplibs(files, step):
    """Whether one of a step's files says that looplib made them."""
    return any(name.startswith((f"ckpt-{step}.commit", f"ckpt-{step}.unfinished")) for name in files)


def names_of(folder, step):
    return [name for name in names(folder / "checkpoints") if name.startswith((f"ckpt-{step}.", f"ckpt-{step}_"))]


@pytest.mark.slow
def test_a_run_stopped_and_started_again_equals_one_that_was_not(folder, whole, caplog):
    check_it_resumes(folder, whole, caplog, NEWEST)


# Each damage once, to the files of a checkpoint by turns; the rest of the product are repetitions.
KINDS_BY_TURNS = dict(zip([case for case in DAMAGES if case[1] not in PARTS[1:]], itertools.cycle(FILES)))


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize(
    "kind, damage, how",
    [
        pytest.param(
            kind, damage, how, marks=() if KINDS_BY_TURNS.get((damage, how)) == kind else pytest.mark.slow,
            id=f"{kind}-{damage.__name__}-{how}",
        )
        for kind, (damage, how) in itertools.product(FILES, DAMAGES)
    ],
)  # fmt: skip
def test_a_damaged_file_of_the_newest_checkpoint_costs_that_checkpoint_only(kind, damage, how, folder, whole, caplog):
    damage(file_of(folder, kind), how)
    check_it_resumes(folder, whole, caplog, 6, [NEWEST])


@pytest.mark.slow(keep=1)
@each_damage
def test_tensorflows_own_list_of_checkpoints_may_be_damaged(damage, how, folder, whole, caplog):
    damage(folder / "checkpoints" / "checkpoint", how)
    with start(folder) as controller:
        assert controller.restored_from.endswith("ckpt-9")
        told = warnings(caplog)
        controller.train(LAST)
    aside = folder / "checkpoints" / "set_aside"
    if damage is replace_by_directory:
        assert len(told) == 1 and told[0].endswith(f"is a directory instead of a file; moved to {aside}/checkpoint")
        assert names(aside / "checkpoint") == ["something"]
    else:
        assert not told and not aside.exists()
    assert compare(whole, folder).differences == []
    assert tf.train.latest_checkpoint(folder / "checkpoints") == str(folder / "checkpoints" / f"ckpt-{LAST}")


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, *more(range(1, 8))])
def test_the_two_newest_damaged_cost_both(number, folder, whole, caplog):
    chance = random.Random(number)
    for step in (6, 9):
        damage, how = chance.choice(DAMAGES)
        damage(file_of(folder, chance.choice(list(FILES)), step), how)
    check_it_resumes(folder, whole, caplog, 3, [6, 9])


@pytest.mark.parametrize("number", [0, *more([1, 2, 3])])
def test_all_damaged_is_refused_and_starts_from_the_beginning_if_asked_and_ends_equal(number, folder, whole):
    chance = random.Random(number)
    for step in KEPT:
        damage, how = chance.choice(DAMAGES)
        damage(file_of(folder, chance.choice(list(FILES)), step), how)
    before = {step: names_of(folder, step) for step in KEPT}
    for _ in range(2):  # what was set aside by the first start is known to the second
        with pytest.raises(CheckpointError, match="--start_anew"):
            start(folder)
    for step in KEPT:
        if looplibs(before[step], step):
            assert names(folder / "checkpoints" / "set_aside" / f"ckpt-{step}") == before[step]
        else:
            assert names_of(folder, step) == before[step]
    with start(folder, start_anew=True) as controller:
        assert controller.restored_from is None
        controller.train(LAST)
    assert compare(whole, folder).differences == []


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_gone_is_refused_and_its_records_are_kept(folder, whole):
    records = (folder / "metrics.jsonl").read_text()
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(CheckpointError, match=f"{NEWEST}"):
        start(folder)
    assert (folder / "metrics.jsonl").read_text() == records
    with start(folder, start_anew=True) as controller:
        controller.train(LAST)
    assert (folder / "metrics.voided.jsonl").read_text() == records
    assert compare(whole, folder).differences == []


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize(
    "kind, damage, how",
    [
        ("data", truncate, 0), ("index", remove, None), ("marker", replace_by_directory, None),
        *more([("data", remove, None), ("data", replace_by_directory, None), ("index", truncate, 0)]),
        *more([("index", replace_by_directory, None), ("marker", truncate, 0), ("marker", remove, None)]),
    ],
)  # fmt: skip
def test_an_older_checkpoint_that_is_damaged_hinders_nothing(damage, how, kind, folder, whole, caplog):
    """It is looked at only when it is needed; to delete it when it is no longer kept must not fail."""
    damage(file_of(folder, kind, 3), how)
    with start(folder) as controller:
        assert controller.restored_from.endswith("ckpt-9")
        controller.train(LAST)
    assert compare(whole, folder).differences == []
    assert [done.step for done in commits.committed(folder / "checkpoints")] == [12, 9, 6]


def half_written():
    """(name, function of the directory and of a whole checkpoint's files): each moment of a save, in its order."""

    def part(content, length):
        return content[: int(len(content) * length)]

    data, index, marker = FILES.values()
    moments = {}
    # tf.train.Checkpoint.write, the first save of a process: shards in a folder, merged. (As strace tells.)
    moments["no shard yet"] = lambda c: {"_temp/part-00000-of-00001.data-00000-of-00001.tempstate12345": b""}
    moments["the shard of a first save"] = lambda c: {
        "_temp/part-00000-of-00001.data-00000-of-00001": part(c[data], 0.5)
    }
    moments["the shards of a first save"] = lambda c: {
        "_temp/part-00000-of-00001.data-00000-of-00001": c[data],
        "_temp/part-00000-of-00001.index": part(c[index], 0.5),
    }
    moments["data moved, shards left"] = lambda c: {data: c[data], "_temp/part-00000-of-00001.index": c[index]}
    # SaveV2, the later ones.
    for length in (0.0, 0.5, 1.0):
        moments[f"data's temporary file to {length:.0%}"] = lambda c, length=length: {
            f"{data}.tempstate12345": part(c[data], length)
        }
    moments["data without index"] = lambda c: {data: c[data]}
    moments["data with half an index"] = lambda c: {data: c[data], index: part(c[index], 0.5)}
    moments["data with half an index's temporary file"] = lambda c: {
        data: c[data], f"{index}.tempstate12345": part(c[index], 0.5)
    }  # fmt: skip
    moments["both without marker"] = lambda c: {data: c[data], index: c[index]}
    for length in (0.0, 0.5, 1.0):
        moments[f"marker's new file to {length:.0%}"] = lambda c, length=length: {
            data: c[data], index: c[index], f"{FILES['marker']}.{'0' * 16}.new": part(c[marker], length)
        }  # fmt: skip
    return moments


# Moments that are a matter of how much is written: another length is tried, or the next moment.
ALIKE = (
    "the shard of a first save", "data's temporary file to 0%", "data's temporary file to 100%", "marker's new file to 0%",
    "marker's new file to 50%",
)  # fmt: skip
MOMENTS = [(moment, number % 2 == 0) for number, moment in enumerate(half_written())]


# Each moment once, by turns with the note that a save is under way and, as an earlier looplib left it, without.
@pytest.mark.slow(spread=1)
@pytest.mark.parametrize(
    "moment, noted",
    [
        *(case for case in MOMENTS if case[0] not in ALIKE),
        *more(case for case in MOMENTS if case[0] in ALIKE),
        *more((moment, not noted) for moment, noted in MOMENTS),
    ],
)
def test_a_save_that_was_cut_off_does_not_count(moment, noted, folder, whole, caplog):
    contents = {suffix: (folder / "checkpoints" / f"ckpt-{NEWEST}{suffix}").read_bytes() for suffix in FILES.values()}
    for kind in FILES:
        file_of(folder, kind).unlink()
    for suffix, content in half_written()[moment](contents).items():
        path = folder / "checkpoints" / f"ckpt-{NEWEST}{suffix}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    if noted:
        (folder / "checkpoints" / f"ckpt-{NEWEST}.unfinished").write_text("")
    check_it_resumes(folder, whole, caplog, 6, [NEWEST])
    assert names_of(folder, NEWEST) == [f"ckpt-{NEWEST}{suffix}" for suffix in sorted(FILES.values())]


def test_a_save_that_was_cut_off_after_its_marker_counts(folder, whole, caplog):
    """TensorFlow's list is still the old one, and what should have been deleted is still there."""
    (folder / "checkpoints" / "checkpoint").write_text('model_checkpoint_path: "ckpt-6"\n')
    left = folder / "checkpoints" / f"checkpoint.{'0' * 16}.new"
    left.write_text("model_check")
    os.utime(left, (0, time.time() - 4000))  # one that is an hour old belongs to nobody
    check_it_resumes(folder, whole, caplog, NEWEST)
    assert not left.exists()


def test_a_deletion_that_was_cut_off_leaves_what_does_not_count(folder, whole, caplog):
    """The marker is renamed first, then the files go."""
    file_of(folder, "marker", 3).rename(folder / "checkpoints" / "ckpt-3.unfinished")
    file_of(folder, "data", 3).unlink()
    check_it_resumes(folder, whole, caplog, NEWEST, damaged=[3])


def test_a_metrics_line_cut_short_is_made_again(folder, whole, caplog):
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-7])
    caplog.set_level(logging.ERROR, logger="absl")
    file_of(folder, "data").unlink()
    with start(folder) as controller:
        assert controller.restored_from.endswith("ckpt-6")
        controller.train(LAST)
    assert compare(whole, folder).differences == []


def test_an_evaluation_moves_nothing_and_takes_the_newest_whole_one(folder):
    truncate(file_of(folder, "data"), 0.5)
    before = names(folder / "checkpoints")
    trainer = Noisy()
    evaluator = toy.RegressionEvaluator(trainer.model)
    with toy.controller(make_strategy("default"), None, evaluator, model_dir=folder) as job:
        assert job.restored_from.endswith("ckpt-6")
        assert job.evaluate()["eval"]["examples"] == toy.NUM_EXAMPLES
    assert names(folder / "checkpoints") == before


def test_a_checkpoint_of_another_model_is_refused_and_left_alone(folder):
    before = names(folder / "checkpoints")
    with pytest.raises(MismatchError):
        toy.controller(make_strategy("default"), toy.Regression(), model_dir=folder)
    assert names(folder / "checkpoints") == before


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give a file to another user than the run's")
def test_a_file_that_this_user_may_not_read_is_no_damage_and_nothing_is_moved(folder, python):
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, 65534, 65534)
    for parent in folder.parents:
        if parent.stat().st_mode & 0o001 == 0:
            parent.chmod(parent.stat().st_mode | 0o001)
    os.chown(file_of(folder, "data"), 0, 0)
    file_of(folder, "data").chmod(0o600)
    code = (
        "import os; from faults import files_test; os.setgroups([]); os.setresgid(*[65534] * 3); os.setresuid(*[65534] * 3); "
        f"files_test.train({str(folder)!r}, {LAST})"
    )
    result = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, timeout=120, cwd="/",
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "HOME": "/nonexistent"},
    )  # fmt: skip
    if "Permission denied" in result.stderr and "files_test" in result.stderr and result.returncode:
        pytest.skip("another user cannot read the sources or packages here")
    assert result.returncode == 1, result.stderr
    assert "ckpt-9.data-00000-of-00001 cannot be read (" in result.stderr
    assert "which does not prove that it is damaged; fix its permissions" in result.stderr
    assert not (folder / "checkpoints" / "set_aside").exists()
