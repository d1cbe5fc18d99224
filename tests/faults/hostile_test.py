"""A run directory from somebody else: nothing outside of it is touched, nothing hangs, and what is wrong is said.

`victim` stands for all that is outside. Each test lets a run of a few steps be resumed from a directory that was
tampered with, and compares the victim, bit by bit.
"""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import time

import board
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy, more
from paths import PYTHONPATH
from tampering import MAKE, make_directory, make_fifo, rewrite_marker, rewrite_run_state

import looplib
from looplib.__main__ import main as cli
from looplib.errors import CheckpointError, ClosedError, FileError, RunDirectoryError, UsageError
from looplib.report.writers.files import JsonlWriter
from looplib.run import commits
from looplib.run.records import read_jsonl


def start(folder, keep=2, **policy):
    trainer, evaluator = toy.build(make_strategy("default"))
    policy = looplib.CheckpointPolicy(every_steps=2, keep=(looplib.KeepLast(keep),), **policy)
    settings = dict(model_dir=folder, checkpoints=policy, writers=None)
    return toy.controller(make_strategy("default"), trainer, evaluator, **settings)


def train(folder, steps, **policy):
    with start(folder, **policy) as controller:
        controller.train_and_evaluate(steps, 2)
        return controller


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    train(folder, 6)
    return folder


@pytest.fixture
def victim(tmp_path):
    """A directory outside, with files that a run has; `untouched` is what is in it."""
    folder = tmp_path / "victim"
    for name in (
        "train/events.out.tfevents.1.host.1.v2",
        "eval/x",
        "checkpoints/ckpt-2.index",
        "metrics.jsonl",
        "notes",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"this is {name}")
    return folder


@pytest.fixture
def folder(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "run")


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@pytest.fixture(autouse=True)
def untouched(victim):
    before = contents(victim)
    yield
    assert contents(victim) == before


@pytest.mark.slow
def test_a_marker_names_files_of_its_own_checkpoint_only(folder, victim, caplog):
    path = folder / "checkpoints" / "ckpt-6.commit"
    listed = json.loads(path.read_text())["files"]
    rewrite_marker(path, files={**listed, f"{victim}/notes": {"bytes": 1, "sha256": "0"}})
    controller = train(folder, 12, keep=1)
    assert controller.global_step == 12
    assert "the checkpoint of step 6 is invalid: its marker cannot be read" in caplog.text
    assert [saved.step for saved in looplib.list_checkpoints(folder)] == [12]


@pytest.mark.slow
def test_a_size_that_no_file_has_is_damage(folder):
    path = folder / "checkpoints" / "ckpt-6.commit"
    listed = json.loads(path.read_text())["files"]
    rewrite_marker(path, files={**listed, "ckpt-6.index": {"bytes": 10**30, "sha256": "0"}})
    check_damage(folder)


def check_damage(folder):
    """Checks that what a start does first sets the checkpoint of step 6 aside, and finds that of step 4."""
    directory = str(folder / "checkpoints")
    assert commits.newest_intact(directory, tidy=True).step == 4
    assert [done.step for done in commits.listing(directory)] == [4]
    assert (folder / "checkpoints" / "set_aside" / "ckpt-6").is_dir()


def test_names_in_the_run_state_lead_nowhere(folder, caplog):
    def change(state):
        state["reported"] = {"train": 6, "../../victim/train": -1, "../victim": 0}
        state["actions"] = {"../victim": 1, "ExportBest\x1b[2J": ["../victim"]}

    rewrite_run_state(folder / "checkpoints" / "ckpt-6.commit", change)
    controller = train(folder, 10)
    assert controller.global_step == 10 and controller.restored_from.endswith("ckpt-6")
    assert (
        r"memories in it that are not used: ../victim, ExportBest\x1b[2J" in caplog.text and "\x1b" not in caplog.text
    )


LINKS = [
    "lock",
    "run.json",
    "run.json.new",
    "metrics.jsonl",
    "metrics.jsonl.new",
    "metrics.voided.jsonl",
    "checkpoints/checkpoint",
    "checkpoints/checkpoint.new",
    "checkpoints/ckpt-8.commit.new",
    "checkpoints/ckpt-6.unfinished",
    "checkpoints/ckpt-8.unfinished",
    "checkpoints/ckpt-8.unfinished.new",
    "train/events.out.tfevents.0000000001.000000.host.1.v2",
    "train/events.out.rewritten.1.v2",
    "eval/other/events.out.tfevents.0000000001.000000.host.1.v2",
]


@pytest.mark.slow
def test_a_model_dir_may_be_a_link_to_a_directory_that_is_not_there_yet(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert train(tmp_path / "link", 2).global_step == 2
    assert (tmp_path / "run" / "checkpoints").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [LINKS, *more([name] for name in LINKS[::3])], ids=lambda names: names[0] if len(names) == 1 else "all"
)
def test_a_link_in_place_of_a_file_is_not_followed(names, folder, victim):
    for name in names:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        target = victim / ("train/events.out.tfevents.1.host.1.v2" if "events" in name else "metrics.jsonl")
        path.symlink_to(target)
    with start(folder) as controller:
        controller.restore_checkpoint(folder / "checkpoints" / "ckpt-4")  # so that records are rewritten, too
        controller.train_and_evaluate(10, 2)
        assert controller.global_step == 10


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/set_aside", "train", "eval"])
def test_a_link_in_place_of_a_folder_is_refused(name, folder, victim):
    path = folder / name
    shutil.rmtree(path, ignore_errors=True)
    path.symlink_to(victim / name.replace("/set_aside", ""))
    with pytest.raises(RunDirectoryError, match=f"{name}"):
        start(folder)


SIDE_FILES = [
    "lock",
    "run.json",
    "metrics.jsonl",
    "metrics.voided.jsonl",
    "train/events.out.tfevents.0000000001.000000.x.1.v2",
]


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKE, ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "names",
    [SIDE_FILES, *more([name] for name in SIDE_FILES)],
    ids=lambda names: names[0] if len(names) == 1 else "all",
)
def test_side_files_never_block_a_start(names, make, folder):
    for name in names:
        path = folder / name
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        make(path)
    controller = train(folder, 8)
    assert controller.global_step == 8 and controller.restored_from.endswith("ckpt-6")
    assert [r["step"] for r in read_jsonl(str(folder / "metrics.jsonl")) if r["split"] == "train"][-2:] == [7, 8]
    assert json.loads((folder / "run.json").read_text())["status"] == "done"


def test_a_report_that_cannot_be_read_is_kept_aside(folder, caplog):
    (folder / "run.json").write_text('{"starts": [')
    train(folder, 7)
    assert (folder / "run.json.aside").read_text() == '{"starts": [' and "run.json cannot be read" in caplog.text
    assert json.loads((folder / "run.json").read_text())["restarts"] == 0


@pytest.mark.slow
def test_a_fifo_blocks_no_start_of_a_directory_that_is_given_as_a_url(nursery, tmp_path):
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "run.json")
    life = nursery.life(f"file://{tmp_path}/run", "--train_steps=5")
    assert life.code() == 0, life.output()


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("make", MAKE, ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ["ckpt-6.commit", "ckpt-6.index", "ckpt-6.data-00000-of-00001"])
def test_a_file_of_a_checkpoint_that_is_none_is_damage(name, make, folder, capsys):
    path = folder / "checkpoints" / name
    path.unlink()
    make(path)
    assert cli(["inspect", str(folder), "--verify"]) == 1
    assert "intact" in capsys.readouterr().out
    check_damage(folder)


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("name, make", [("ckpt-6.commit", make_directory), ("ckpt-6.index", make_fifo)])
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(name, make, folder):
    (folder / "checkpoints" / name).unlink()
    make(folder / "checkpoints" / name)
    assert train(folder, 8).restored_from.endswith("ckpt-4")


def test_inspect_prints_no_commands_for_the_terminal(folder, capsys):
    rewrite_marker(folder / "checkpoints" / "ckpt-6.commit", scores={"eval/\x1b]0;pwned\x07\n\x1b[2J": 1.0})
    cli(["inspect", str(folder)])
    printed = capsys.readouterr().out
    assert "pwned" in printed and all(char.isprintable() or char == "\n" for char in printed)
    assert len(printed.splitlines()) == 3


@pytest.mark.slow
def test_a_checkpoint_is_read_through_before_tensorflow_is_given_it(folder):
    with start(folder) as controller:
        path = folder / "checkpoints" / "ckpt-4"
        data = path.with_name("ckpt-4.data-00000-of-00001")
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
        with pytest.raises(CheckpointError):
            controller.restore_checkpoint(path)
        path.with_name("ckpt-4.commit").unlink()
        with pytest.raises(CheckpointError):
            controller.restore_checkpoint(path)
        assert controller.global_step == 6
        controller.train(7)


# Another program that writes to the run directory.


def write_as_another_program(folder):
    """Writes a file as another program of TensorFlow leaves it there, and is about to append to it."""
    for name in ("train", "eval", "eval/other"):
        with tf.summary.create_file_writer(f"{folder}/{name}").as_default():
            for step in range(12):
                tf.summary.scalar("accuracy", step, step)
    checkpoint = tf.train.Checkpoint(v=tf.Variable(1.0))
    manager = tf.train.CheckpointManager(checkpoint, f"{folder}/checkpoints", max_to_keep=None)
    for step in (3, 8, 50):
        manager.save(step)


def train_with_summaries(folder, steps):
    """Trains, and writes summaries of its own beside looplib's."""
    summaries = tf.summary.create_file_writer(f"{folder}/train")
    with start(folder, keep=9) as controller, summaries.as_default():
        for step in range(controller.global_step + 1, steps + 1):
            controller.train(step)
            tf.summary.scalar("own", step, step)


def in_another_process(python, call):
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    code = f"from faults import hostile_test; hostile_test.{call}"
    subprocess.run([python, "-c", code], check=True, env=environment, timeout=120)


@pytest.fixture(scope="module")
def left(python, tmp_path_factory):
    """Returns the content that another program has left."""
    folder = tmp_path_factory.mktemp("left")
    in_another_process(python, f"write_as_another_program({str(folder)!r})")
    (path,) = (folder / "eval").glob("*tfevents*")
    path.write_bytes(path.read_bytes()[:-5])  # it is being written
    return folder


@pytest.mark.slow
def test_files_of_another_program_stay_as_they_are(left, folder, caplog):
    shutil.copytree(left, folder, dirs_exist_ok=True)
    checkpoints = folder / "checkpoints"
    for _ in range(2):
        with start(folder) as controller:
            assert controller.restored_from.endswith("ckpt-6")
            text = f"ckpt-3, ckpt-8, ckpt-50 in {checkpoints} have no looplib marker; they are ignored"
            assert text in caplog.text
    expected = contents(left)
    assert expected.items() <= contents(folder).items()
    with start(folder) as controller:
        controller.restore_checkpoint(checkpoints / "ckpt-4")  # what came after is void
        controller.train_and_evaluate(10, 2)
        controller.save_checkpoint()
    assert [saved.step for saved in looplib.list_checkpoints(folder)] == [10, 8]
    aside = {name: content for name, content in contents(checkpoints / "set_aside" / "ckpt-8").items()}
    assert aside == {name.split("/")[1]: expected.pop(name) for name in list(expected) if "/ckpt-8." in name}
    assert len(aside) == 2 and "files of ckpt-8 without looplib's marker blocked a save; moved to" in caplog.text
    assert expected.items() <= contents(folder).items()
    steps = [r["step"] for r in read_jsonl(str(folder / "metrics.jsonl")) if r["split"] == "train"]
    assert steps == [*range(1, 11)]


@pytest.mark.slow
def test_void_summaries_of_the_program_itself_are_taken_out_and_kept(python, tmp_path):
    """Of a process that has ended, too: TensorBoard drops them, and their files stay."""
    folder = tmp_path / "run"
    in_another_process(python, f"train_with_summaries({str(folder)!r}, 6)")

    def steps():
        found = board.events(folder / "train")
        return [event.step for event in found for value in event.summary.value if value.tag == "own"]

    assert steps() == [1, 2, 3, 4, 5, 6]
    before = contents(folder / "train")
    with start(folder) as controller:
        controller.restore_checkpoint(folder / "checkpoints" / "ckpt-4")
        controller.train(7)
    assert steps() == [1, 2, 3, 4]
    assert before.items() <= contents(folder / "train").items()


class Killed(BaseException):
    """Stands for a kill between two operations on files."""


@pytest.mark.parametrize("what", ["remove", "set_aside"])
def test_a_deletion_or_a_move_cut_off_anywhere_leaves_nothing_that_looks_foreign(what, folder, monkeypatch):
    directory = str(folder / "checkpoints")
    (saved,) = [saved for saved in commits.committed(directory) if saved.step == 6]
    whole = shutil.copytree(directory, folder / "copy")
    done, number = False, 0
    while not done:
        number += 1
        shutil.rmtree(directory)
        shutil.copytree(whole, directory)
        left = [number]
        with monkeypatch.context() as patch:
            for module, name in ((os, "rename"), (os, "unlink")):

                def counted(*arguments, own=getattr(module, name), **options):
                    left[0] -= 1
                    if left[0] == 0:
                        raise Killed
                    return own(*arguments, **options)

                patch.setattr(module, name, counted)
            try:
                commits.remove(saved) if what == "remove" else commits.set_aside(directory, 6)
                done = True
            except Killed:
                pass
        assert commits.foreign(directory) == []
        intact = commits.newest_intact(directory, tidy=True)
        assert intact.step == (6 if number == 1 or (what == "set_aside" and number == 2) else 4)
        left_over = [name for name in os.listdir(directory) if name.startswith("ckpt-6")]
        assert intact.step == 6 or left_over == []
    assert number == {"remove": 5, "set_aside": 6}[what]


# The lock and the directory.


def fault(what, folder):
    """Faults of a run directory in the middle of a training."""

    def strike(event):
        if event.step == 3 and event.split == "train":
            while '"step": 3' not in (folder / "metrics.jsonl").read_text():  # a fault in mid-write has no fixed end
                time.sleep(0.01)
            if what == "lock removed":
                (folder / "lock").unlink()
            elif what == "lock replaced":
                (folder / "lock").unlink()
                (folder / "lock").write_text("")
            elif what == "moved":
                folder.rename(folder.with_name("elsewhere"))
            elif what == "removed":
                shutil.rmtree(folder)
            else:
                shutil.rmtree(folder)
                folder.mkdir()

    return strike


@pytest.mark.slow
@pytest.mark.parametrize("what", ["lock removed", "lock replaced", "moved", "removed", "made again"])
def test_a_directory_that_is_not_its_own_any_more_ends_a_training(what, tmp_path):
    folder = tmp_path / "run"
    trainer, _ = toy.build(make_strategy("default"))
    policy = looplib.CheckpointPolicy(every_steps=2)
    settings = dict(model_dir=folder, checkpoints=policy, writers=None, actions=[fault(what, folder)])
    with toy.controller(make_strategy("default"), trainer, **settings) as controller:
        with pytest.raises(UsageError, match="removed|was"):
            controller.train(40)
        assert controller.global_step <= 4
    assert folder.exists() == (what not in ("moved", "removed"))
    if what == "made again":
        assert not any(folder.iterdir())


@pytest.mark.slow
def test_a_directory_is_recognized_by_another_spelling(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with start("run") as first:
        first.train(2)
        monkeypatch.chdir("/")
        first.train(4)
        with start(f"file://{tmp_path}/run/../run") as second:
            assert second.global_step == 4
            with pytest.raises(ClosedError):
                first.train(6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "victim"]
    assert [r["step"] for r in read_jsonl(str(tmp_path / "run/metrics.jsonl"))] == [1, 2, 3, 4]


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("name", ["[a]", "a[", "b\\c", "d*e", "f?g"])
def test_a_name_that_tensorflow_takes_for_a_pattern_is_refused_at_the_start(name, tmp_path):
    with pytest.raises(FileError, match="TensorFlow"):
        start(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    (read, write), (ready, say_ready) = os.pipe(), os.pipe()
    controller = start(tmp_path / "run")
    child = os.fork()
    if child == 0:
        os.close(write)
        os.write(say_ready, b".")
        os.read(read, 1)  # until the parent is done
        os._exit(0)
    try:
        os.read(ready, 1)
        controller.close()
        other = os.open(tmp_path / "run" / "lock", os.O_RDWR)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
    finally:
        os.close(write)
        os.waitpid(child, 0)


def test_records_that_other_processes_append_while_one_rewrites_are_not_lost(tmp_path):
    path = str(tmp_path / "metrics.jsonl")
    writer = JsonlWriter(path)
    writer.write(0, "train", {"a": 0})
    children = []
    for number in range(3):
        child = os.fork()
        if child == 0:
            job = JsonlWriter(path)
            for step in range(100):
                job.write(step, f"job_{number}", {"a": step})
            os._exit(0)
        children.append(child)
    while children:
        writer._file._keep(lambda record: True)
        children = [child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0]
    counts = {}
    for record in read_jsonl(path):
        counts[record["split"]] = counts.get(record["split"], 0) + 1
    assert counts == {"train": 1, "job_0": 100, "job_1": 100, "job_2": 100}


# A failed step.


@pytest.mark.slow(spread=1)
def test_after_a_failed_step_nothing_is_saved_or_trained_on_before_a_restore(keras, tmp_path):
    """A step that updates one variable and fails before the next one."""

    class Torn(toy.Regression):
        def __init__(self):
            super().__init__(keras)
            self.first, self.second = tf.Variable(0.0, trainable=False), tf.Variable(0.0, trainable=False)
            self.fails = tf.Variable(False, trainable=False)

        def step_fn(self, inputs):
            self.first.assign_add(1.0)
            with tf.control_dependencies([self.first.read_value()]):
                check = tf.debugging.assert_equal(self.fails, False, "it fails")
            with tf.control_dependencies([check] if check is not None else []):
                self.second.assign_add(1.0)
            return super().step_fn(inputs)

    trainer = Torn()
    policy = looplib.CheckpointPolicy(every_steps=2)
    settings = dict(model_dir=tmp_path / "run", checkpoints=policy)
    with toy.controller(make_strategy("default"), trainer, **settings) as controller:
        controller.train(4)
        trainer.fails.assign(True)
        with pytest.raises(tf.errors.InvalidArgumentError, match="it fails"):
            controller.train(8)
        assert float(trainer.first) != float(trainer.second)
        trainer.fails.assign(False)
        for call in (lambda: controller.train(8), controller.save_checkpoint):
            with pytest.raises(ClosedError, match=r"restore_checkpoint\(\)"):
                call()
        controller.restore_checkpoint()
        assert float(trainer.first) == float(trainer.second) == 4
        controller.train(8)
        assert float(trainer.first) == float(trainer.second) == 8
