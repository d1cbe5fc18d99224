"""Intervals of a run, repeated: a flipped bit is found and named, healthy runs are equal, a training is not disturbed."""

import hashlib
import json
import os
import re
import shutil
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
from ordered import NOTHING, ordered

from looplib.__main__ import main
from looplib.base.orders import VARIABLE
from looplib.commands import intervals
from looplib.commands.intervals import DIFFERENT, EQUAL, NOTES, UNKNOWN, NotedInterval
from looplib.errors import EXIT_DIFFERENT, EXIT_DONE, EXIT_UNKNOWN, ReplayError
from looplib.run import commits

SHORT = ("--mode=train", "--train_steps=40")


@pytest.fixture(autouse=True)
def forks(python, monkeypatch, nursery):
    """The commands run in forks."""
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setenv("PYTHONPATH", nursery.environment["PYTHONPATH"])
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def train(nursery, tmp_path):
    """A function that trains to the end, with what the environment has; returns the run directory."""

    def run(*arguments, name="run", **environment):
        life = nursery.life_of(
            "repeated", f"--model_dir={tmp_path / name}", *arguments,
            environment={**NOTHING, **environment},
        )  # fmt: skip
        assert life.code() == 0, life.output()
        return tmp_path / name

    return run


def content(folder):
    """Every file below a folder with its time and a checksum."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
            for path in paths}  # fmt: skip


def results(folder):
    return {(one.begin, one.end): one.result for one in intervals.notes(str(folder))}


def repeated(folder, *arguments):
    """The exit code of the repetition of an interval."""
    return main(["rerun", str(folder), "--from", *arguments])


def all_repeated(folder):
    """The exit codes of all intervals, the newest first."""
    codes = []
    while len(results(folder)) == len(codes):
        codes.append(repeated(folder))
    assert codes.pop() == EXIT_UNKNOWN
    return codes


def test_a_flipped_bit_of_an_optimizer_is_found_with_its_interval_and_variables(train, capfd):
    """Step 20 takes the momentum that was flipped after step 19 to one update of one variable."""
    folder = train("--mode=train", "--train_steps=20", REPEATED_FLIP="slot:19")
    before = content(folder)
    assert repeated(folder) == EXIT_DIFFERENT
    out = capfd.readouterr().out
    assert "DIFFERENT: steps 1 to 20\n" in out
    names = re.findall(r"  variables: (.*?): \[", out)
    assert len(names) == 2 and all(name.endswith("dense/kernel") for name in names) and "momentum" in "".join(names)
    assert re.search(r"kernel: \[[\d, ]+\] \S+ then, \[[\d, ]+\] \S+ now, [\d,]+ of [\d,]+ elements differ\n", out)
    assert "reports:" not in out and "trained again so far: 1 of the 1 intervals" in out
    after = content(folder)
    assert {name for name in after if after[name] != before.get(name)} == {NOTES}
    assert results(folder) == {(0, 20): DIFFERENT}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["weight", "data"])
def test_a_flip_is_found_where_it_happened_and_what_follows_is_equal(what, train, capfd):
    folder = train(REPEATED_FLIP=f"{what}:33", **ordered(example_checksums=True))
    assert all_repeated(folder) == [EXIT_DONE, EXIT_DIFFERENT, EXIT_DONE, EXIT_DONE]
    out = capfd.readouterr().out
    assert re.findall("reports: step (\\d+)", out)[0] == "40"
    assert ("possible cause: other examples, by their checksums (step 40 train examples_checksum: " in out) == (
        what == "data"
    )
    assert results(folder) == {(0, 20): EQUAL, (20, 30): EQUAL, (30, 40): DIFFERENT, (40, 60): EQUAL}
    assert repeated(folder, "--to=30") == EXIT_DONE  # once more, by name
    assert main(["rerun", str(folder), "--from=20", "--to=60"]) == EXIT_DIFFERENT  # over several checkpoints


@pytest.mark.slow
def test_a_report_that_was_another_one_is_found(train, capfd):
    folder = train(*SHORT)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    record = next(record for record in records if record["step"] == 30)
    told, record["loss"] = record["loss"], float(np.nextafter(record["loss"], 9.0))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert repeated(folder) == EXIT_DIFFERENT
    assert f"reports: step 30 train loss: {record['loss']} then, {told} now\n" in capfd.readouterr().out


HEALTHY = {
    "dropout": [],
    "xla": ["--loop=xla"],
    "auto": [
        "--loop=auto",
        "--config.dropout=0",
        "--train_steps=400",
        "--checkpoint_interval=100",
        "--eval_interval=200",
    ],
    "replicas": ["--num_virtual_devices=2"],
    "accumulation": ["--config.kind=accumulation"],
    "eager": [*SHORT, "--loop=eager"],
    "callbacks": ["--config.kind=keras", "--steps_per_loop=12", "--checkpoint_interval=24", "--train_steps=72"],
    "skip": ["--non_finite=skip"],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_runs_are_equal(kind, train, tmp_path, capfd):
    model = tmp_path / "model.keras"
    folder = train(*HEALTHY[kind], f"--config.model_file={model}")
    written = model.stat().st_mtime_ns if kind == "callbacks" else 0
    assert set(all_repeated(folder)) <= {EXIT_DONE, EXIT_UNKNOWN}
    out = capfd.readouterr().out
    assert "DIFFERENT" not in out
    if kind == "auto":  # before the engine is chosen, bits may differ
        assert not re.search("not known: steps (101|201|301)", out)
    else:
        assert "not known" not in out
    if written:
        assert model.stat().st_mtime_ns == written


@pytest.mark.slow
def test_a_run_that_was_killed_and_one_whose_settings_changed_are_equal(train, nursery, tmp_path, capfd):
    folder = train("--mode=train", "--train_steps=26", "--keep_last=1")
    train("--mode=train", "--train_steps=50", "--config.rate=0.01", "--global_batch_size=16", "--keep_last=1")
    assert repeated(folder) == EXIT_DONE
    out = capfd.readouterr().out
    assert "EQUAL, bit by bit: steps 1 to 50" in out and "--config.rate=0.05" in out
    assert out.count("repeated --") == 2  # one command for each part
    other = train("--mode=train", "--train_steps=25", "--keep_last=1", name="other")
    train("--mode=train", "--train_steps=50", name="other")
    assert repeated(other) == EXIT_DONE


@pytest.mark.slow
def test_a_program_that_does_not_repeat_itself_is_no_corruption(train, capfd):
    folder = train(*SHORT, "--config.kind=unrepeatable")
    assert repeated(folder) == EXIT_UNKNOWN
    out = capfd.readouterr().out
    assert "two repetitions differ from each other" in out and "DIFFERENT" not in out
    assert set(results(folder).values()) == {UNKNOWN}


@pytest.mark.slow
def test_on_another_kind_of_machine_other_bits_tell_nothing_and_other_examples_are_a_difference(train, capfd):
    """The runs were trained in XLA, and their copies say that it was another machine, and the engine of the audit."""

    def as_of_another_machine(folder):
        report = json.loads((folder / "run.json").read_text())
        for start in [report, *report["starts"]]:
            start["command"] = [text.replace("--loop=xla", "--loop=graph") for text in start["command"]]
        report["starts"][-1]["machine"][-1]["cpu"] = "Another CPU"
        (folder / "run.json").write_text(json.dumps(report))
        return folder

    plain = [*SHORT, "--loop=xla", "--config.dropout=0"]  # whose random numbers are others in XLA
    healthy = as_of_another_machine(train(*plain, name="healthy"))
    assert repeated(healthy) == EXIT_UNKNOWN
    out = capfd.readouterr().out
    assert "DIFFERENT" not in out and "differ, but bits need not be equal: its CPU was Another CPU then" in out
    settings = {"REPEATED_FLIP": "data:33", **ordered(example_checksums=True)}
    flipped = as_of_another_machine(train(*SHORT, name="flipped", **settings))
    assert repeated(flipped) == EXIT_DIFFERENT
    assert "DIFFERENT: steps 21 to 40\n" in capfd.readouterr().out


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_steps_around_it_are_one_interval(train, capfd):
    folder = train("--mode=train")
    path = next(folder.glob("checkpoints/ckpt-40.data*"))
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    assert repeated(folder) == EXIT_DONE
    out = capfd.readouterr().out
    assert re.search(r"the checkpoint of step 40 is damaged: the content of ckpt-40\S+ differs", out)
    assert "EQUAL, bit by bit: steps 21 to 60" in out


@pytest.mark.slow
def test_data_that_was_changed_since_is_named(train, tmp_path, capfd):
    files = tmp_path / "data"
    files.mkdir()
    rows = np.random.RandomState(3).randn(96, 7).astype(np.float32)
    for part in range(2):
        with tf.io.TFRecordWriter(str(files / f"{part}.tfrecord")) as writer:
            for row in rows[part::2]:
                writer.write(row.tobytes())
    folder = train(*SHORT, "--config.kind=records", f"--config.files={files}/*.tfrecord")
    rows[3] += 1.0
    with tf.io.TFRecordWriter(str(files / "1.tfrecord")) as writer:
        for row in rows[1::2]:
            writer.write(row.tobytes())
    assert repeated(folder) == EXIT_DIFFERENT
    out = capfd.readouterr().out
    assert re.search(r"possible cause: the training data has changed since: \S*1.tfrecord has another content", out)


@pytest.mark.slow
def test_a_repetition_beside_a_training_disturbs_nothing(nursery, train, tmp_path, capfd):
    undisturbed = train("--mode=train", "--train_steps=120", name="undisturbed")
    arguments = ["--mode=train", "--train_steps=120", "--keep_last=2", "--checkpoint_interval=10", "--config.waits=0.1"]
    folder = tmp_path / "run"
    life = nursery.life_of("repeated", f"--model_dir={folder}", *arguments, environment=NOTHING)  # fmt: skip
    end = time.monotonic() + 120
    while not life.ended() and time.monotonic() < end:
        if len(commits.committed(str(folder / "checkpoints"))) < 2:
            time.sleep(0.1)
            continue
        assert repeated(folder) == EXIT_DONE
    assert life.code() == 0, life.output()
    assert set(results(folder).values()) == {EQUAL}
    ones, others = (tf.train.load_checkpoint(str(run / "checkpoints" / "ckpt-120")) for run in (undisturbed, folder))
    for key in ones.get_variable_to_shape_map():
        if key.endswith("VARIABLE_VALUE") and "save_counter" not in key:
            np.testing.assert_array_equal(ones.get_tensor(key), others.get_tensor(key))


@pytest.mark.slow
def test_checkpoints_that_vanish_while_they_are_copied_are_passed_over(train, monkeypatch, capfd):
    folder, vanished = train("--mode=train"), []

    def copy(done, to, before=intervals.copy_checkpoint):
        if done.step == 40 and not vanished and done.path.startswith(str(folder)):
            vanished.append(done.step)
            commits.remove(done)
        before(done, to)

    monkeypatch.setattr(intervals, "copy_checkpoint", copy)
    assert repeated(folder) == EXIT_DONE
    assert vanished and "damaged" not in capfd.readouterr().out
    assert results(folder) == {(20, 60): EQUAL}


REFUSED = {
    "several processes": ({"strategy": "MultiWorkerMirroredStrategy, 2 replicas"}, "had several processes"),
    "no program": ({"starts": [{"program": None}]}, "has no command to repeat"),
    "no checkpoint": ({}, "has no interval between two checkpoints yet"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_repeated_is_refused(case, train, capsys):
    folder = train("--mode=train", "--train_steps=10")
    values, sentence = REFUSED[case]
    report = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**report, **values}))
    if case == "no checkpoint":
        shutil.rmtree(folder / "checkpoints")
    else:
        assert repeated(folder, "--to=7") == EXIT_UNKNOWN  # of no checkpoint
    assert repeated(folder) == EXIT_UNKNOWN
    assert sentence in capsys.readouterr().err
    assert not (folder / NOTES).exists()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--to=300"], "--to=300 without --from names a directory"),
        (["--from=100", "--to=again"], "--to is 'again'; with --from, expected the step"),
    ],
)
def test_a_step_and_a_directory_are_told_apart(arguments, words, tmp_path, capsys):
    assert main(["rerun", str(tmp_path), *arguments]) == EXIT_UNKNOWN
    assert words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["rerun", "--from", str(tmp_path)])
    assert "expected a step, or nothing, as in: rerun DIR --from" in capsys.readouterr().err


def test_notes_of_somebody_else_are_read_with_bounds(tmp_path, capfd):
    """An older version of looplib has written more into each line."""
    known = [NotedInterval(0, 20, 1000.5, EQUAL), NotedInterval(20, 40, 1001.0, DIFFERENT)]
    intervals._note(str(tmp_path), known[0])
    path = tmp_path / NOTES
    good = json.loads(path.read_text())
    bad = [{**good, "end": 2.5}, {**good, "begin": None}, {"begin": 1}, [1], 5]
    with open(path, "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in bad) + '{"time": 1')
    intervals._note(str(tmp_path), known[1])  # not lost with the line that was cut short
    with open(path, "a") as file:
        file.write(json.dumps({**good, "causes": []}) + "\n")
    assert intervals.notes(str(tmp_path)) == [*known, known[0]]
    os.truncate(path, 1 << 25)
    with pytest.raises(ReplayError, match="move it away"):
        intervals.notes(str(tmp_path))
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ReplayError):
        intervals.notes(str(tmp_path))
    intervals._note(str(tmp_path), known[0])
    assert "cannot be noted" in capfd.readouterr().out and not (tmp_path / "elsewhere").exists()
