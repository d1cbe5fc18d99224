"""Audits: a flipped bit is found, with its interval and variables; healthy runs are equal; a run under way is not disturbed."""

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

from looplib.__main__ import main
from looplib.commands import journal
from looplib.commands.journal import DIFFERENT, EQUAL, UNKNOWN, Verdict
from looplib.errors import EXIT_DIFFERENT, EXIT_DONE, EXIT_UNKNOWN, ReplayError
from looplib.run import commits

SHORT = ("--mode=train", "--train_steps=40")


@pytest.fixture(autouse=True)
def forks(python, monkeypatch, nursery):
    """The commands run in forks."""
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setenv("PYTHONPATH", nursery.environment["PYTHONPATH"])
    monkeypatch.delenv("LOOPLIB_EXAMPLE_CHECKSUMS", raising=False)


@pytest.fixture
def train(nursery, tmp_path):
    """A function that trains to the end, with what the environment has; returns the run directory."""

    def run(*arguments, name="run", **environment):
        life = nursery.life_of(
            "audited", f"--model_dir={tmp_path / name}", *arguments,
            environment={"LOOPLIB_EXAMPLE_CHECKSUMS": None, **environment},
        )  # fmt: skip
        assert life.code() == 0, life.output()
        return tmp_path / name

    return run


def content(folder):
    """Every file below a folder with its time and a checksum."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
            for path in paths}  # fmt: skip


def verdicts(folder):
    return {(one.begin, one.end): one for one in journal.read(str(folder))}


def test_a_flipped_bit_of_an_optimizer_is_found_with_its_interval_and_variables(train, capfd):
    """Step 20 takes the momentum that was flipped after step 19 to one update of one variable."""
    folder = train("--mode=train", "--train_steps=20", AUDITED_FLIP="slot:19")
    before = content(folder)
    assert main(["audit", str(folder), "--all"]) == EXIT_DIFFERENT
    out = capfd.readouterr().out
    assert "DIFFERENT: steps 1 to 20\n" in out
    names = re.findall(r"  variables: (.*?): \[", out)
    assert len(names) == 2 and all(name.endswith("dense/kernel") for name in names) and "momentum" in "".join(names)
    assert re.search(r"kernel: \[[\d, ]+\] \S+ then, \[[\d, ]+\] \S+ now, [\d,]+ of [\d,]+ elements differ\n", out)
    assert "reports:" not in out and "audited so far: 20 of 20 steps (100%)\n" in out
    after = content(folder)
    assert {name for name in after if after[name] != before.get(name)} == {"audit.jsonl"}
    assert {place: (one.result, one.differences) for place, one in verdicts(folder).items()} == {
        (0, 20): (DIFFERENT, 2)
    }


@pytest.mark.slow
@pytest.mark.parametrize("what", ["weight", "data"])
def test_a_flip_is_found_where_it_happened_and_what_follows_is_equal(what, train, capfd):
    folder = train(AUDITED_FLIP=f"{what}:33", LOOPLIB_EXAMPLE_CHECKSUMS="1")
    assert main(["audit", str(folder), "--all"]) == EXIT_DIFFERENT
    out = capfd.readouterr().out
    assert "  the first report that differs is of step 40\n" in out
    assert ("possible cause: other examples, by their checksums (step 40 train examples_checksum: " in out) == (
        what == "data"
    )
    results = {place: one.result for place, one in verdicts(folder).items()}
    assert results == {(0, 20): EQUAL, (20, 30): EQUAL, (30, 40): DIFFERENT, (40, 60): EQUAL}


@pytest.mark.slow
def test_a_report_that_was_another_one_is_found(train, capfd):
    folder = train(*SHORT)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    record = next(record for record in records if record["step"] == 30)
    told, record["loss"] = record["loss"], float(np.nextafter(record["loss"], 9.0))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["audit", str(folder), "--all"]) == EXIT_DIFFERENT
    assert f"reports: step 30 train loss: {record['loss']} then, {told} now\n" in capfd.readouterr().out
    assert [(one.result, one.differences) for _, one in sorted(verdicts(folder).items())] == [
        (EQUAL, 0),
        (DIFFERENT, 1),
    ]


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


@pytest.mark.slow(most=2)
@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_runs_are_equal(kind, train, tmp_path, capfd):
    model = tmp_path / "model.keras"
    folder = train(*HEALTHY[kind], f"--config.model_file={model}")
    written = model.stat().st_mtime_ns if kind == "callbacks" else 0
    assert main(["audit", str(folder), "--all"]) == EXIT_DONE
    out = capfd.readouterr().out
    assert "DIFFERENT" not in out
    if kind == "auto":  # before the engine is chosen, bits may differ
        assert not re.search("not known: steps (101|201|301)", out)
    else:
        assert "not known" not in out and "(100%)" in out
    if written:
        assert model.stat().st_mtime_ns == written


@pytest.mark.slow
def test_audits_add_up_and_begin_with_what_none_has_tried(train, capfd):
    folder = train()
    for number, covered in enumerate(("", "", "", "60 of 60 steps (100%)")):
        assert main(["audit", str(folder), f"--seed={number}"]) == EXIT_DONE
        assert covered in capfd.readouterr().out
    assert len(journal.read(str(folder))) == len(verdicts(folder)) == 4
    assert main(["audit", str(folder)]) == EXIT_DONE  # once more
    assert len(journal.read(str(folder))) == 5


@pytest.mark.slow
def test_a_run_that_was_killed_and_one_whose_settings_changed_are_equal(train, nursery, tmp_path, capfd):
    folder = train("--mode=train", "--train_steps=26", "--keep_last=1")
    train("--mode=train", "--train_steps=50", "--config.rate=0.01", "--global_batch_size=16", "--keep_last=1")
    assert main(["audit", str(folder), "--all"]) == EXIT_DONE
    out = capfd.readouterr().out
    assert "EQUAL, bit by bit: steps 1 to 50" in out and "--config.rate=0.05" in out
    assert out.count("audited --") == 2  # one command for each part
    other = train("--mode=train", "--train_steps=25", "--keep_last=1", name="other")
    train("--mode=train", "--train_steps=50", name="other")
    assert main(["audit", str(other), "--all"]) == EXIT_DONE


@pytest.mark.slow
def test_a_program_that_does_not_repeat_itself_is_no_corruption(train, capfd):
    folder = train(*SHORT, "--config.kind=unrepeatable")
    assert main(["audit", str(folder), "--all"]) == EXIT_UNKNOWN
    out = capfd.readouterr().out
    assert "two repetitions differ from each other" in out and "DIFFERENT" not in out
    assert "audited so far: 0 of 40 steps (0%); 40 steps (100%) cannot be audited\n" in out
    assert {one.result for one in journal.read(str(folder))} == {UNKNOWN}


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
    assert main(["audit", str(healthy), "--all"]) == EXIT_UNKNOWN
    out = capfd.readouterr().out
    assert "DIFFERENT" not in out and "differ, but bits need not be equal: its CPU was Another CPU then" in out
    settings = {"AUDITED_FLIP": "data:33", "LOOPLIB_EXAMPLE_CHECKSUMS": "1"}
    flipped = as_of_another_machine(train(*SHORT, name="flipped", **settings))
    assert main(["audit", str(flipped), "--all"]) == EXIT_DIFFERENT
    assert "DIFFERENT: steps 21 to 40\n" in capfd.readouterr().out


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_steps_around_it_are_one_interval(train, capfd):
    folder = train("--mode=train")
    path = next(folder.glob("checkpoints/ckpt-40.data*"))
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    assert main(["audit", str(folder), "--all"]) == EXIT_DONE
    out = capfd.readouterr().out
    assert re.search(r"the checkpoint of step 40 is damaged: the content of ckpt-40\S+ differs", out)
    assert "EQUAL, bit by bit: steps 21 to 60" in out and "(100%)" in out


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
    assert main(["audit", str(folder), "--all"]) == EXIT_DONE
    rows[3] += 1.0
    with tf.io.TFRecordWriter(str(files / "1.tfrecord")) as writer:
        for row in rows[1::2]:
            writer.write(row.tobytes())
    assert main(["audit", str(folder), "--all"]) == EXIT_DIFFERENT
    out = capfd.readouterr().out
    assert re.search(r"possible cause: the training data has changed since: \S*1.tfrecord has another content", out)


@pytest.mark.slow
def test_an_audit_beside_a_training_disturbs_nothing(nursery, train, tmp_path, capfd):
    undisturbed = train("--mode=train", "--train_steps=120", name="undisturbed")
    arguments = ["--mode=train", "--train_steps=120", "--keep_last=2", "--checkpoint_interval=10", "--config.waits=0.1"]
    folder = tmp_path / "run"
    life = nursery.life_of("audited", f"--model_dir={folder}", *arguments,
                           environment={"LOOPLIB_EXAMPLE_CHECKSUMS": None})  # fmt: skip
    end, audited = time.monotonic() + 120, 0
    while not life.ended() and time.monotonic() < end:
        if len(commits.committed(str(folder / "checkpoints"))) < 2:
            time.sleep(0.1)
            continue
        assert main(["audit", str(folder), "--intervals=2"]) == EXIT_DONE
        audited += 1
    assert life.code() == 0, life.output()
    assert audited and {one.result for one in journal.read(str(folder))} == {EQUAL}
    ones, others = (tf.train.load_checkpoint(str(run / "checkpoints" / "ckpt-120")) for run in (undisturbed, folder))
    for key in ones.get_variable_to_shape_map():
        if key.endswith("VARIABLE_VALUE") and "save_counter" not in key:
            np.testing.assert_array_equal(ones.get_tensor(key), others.get_tensor(key))


@pytest.mark.slow
def test_checkpoints_that_vanish_while_they_are_copied_are_passed_over(train, monkeypatch, capfd):
    from looplib.commands import again

    folder, vanished = train("--mode=train"), []

    def copy(done, to, before=again.copy_checkpoint):
        if done.step == 40 and not vanished and done.path.startswith(str(folder)):
            vanished.append(done.step)
            commits.remove(done)
        before(done, to)

    monkeypatch.setattr(again, "copy_checkpoint", copy)
    assert main(["audit", str(folder), "--all"]) == EXIT_DONE
    assert vanished and "damaged" not in capfd.readouterr().out
    assert {EQUAL} == {one.result for one in journal.read(str(folder))} and (20, 60) in verdicts(folder)


REFUSED = {
    "several processes": ({"strategy": "MultiWorkerMirroredStrategy, 2 replicas"}, [], "had several processes"),
    "no program": ({"starts": [{"program": None}]}, [], "has no command to repeat"),
    "no intervals": ({}, ["--intervals=0"], "--intervals is 0; expected at least 1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", [*REFUSED, "no checkpoint"])
def test_what_cannot_be_audited_is_refused(case, train, capsys):
    folder = train("--mode=train", "--train_steps=10")
    values, arguments, sentence = REFUSED.get(case, ({}, [], "has no interval between two checkpoints yet"))
    report = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**report, **values}))
    if case == "no checkpoint":
        shutil.rmtree(folder / "checkpoints")
    assert main(["audit", str(folder), *arguments]) == EXIT_UNKNOWN
    assert sentence in capsys.readouterr().err
    assert not (folder / "audit.jsonl").exists()


def verdict(begin, end, result=EQUAL, saved=1000.0, rollbacks=0):
    return Verdict(2000.0, begin, end, saved, rollbacks, result, "", 0, [], [])


def test_verdicts_of_somebody_else_are_read_with_bounds(tmp_path, capfd):
    journal.append(str(tmp_path), verdict(0, 20))
    path = tmp_path / "audit.jsonl"
    good = json.loads(path.read_text())
    bad = [
        {**good, "end": 2**60},
        {**good, "begin": -1},
        {**good, "result": "fine"},
        {**good, "variables": "all"},
        [1],
        5,
    ]
    with open(path, "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in bad) + '{"time": 1')
    journal.append(str(tmp_path), verdict(20, 40))  # not lost with the line that was cut short
    assert [(one.begin, one.end) for one in journal.read(str(tmp_path))] == [(0, 20), (20, 40)]
    os.truncate(path, 1 << 25)
    with pytest.raises(ReplayError, match="move it away"):
        journal.read(str(tmp_path))
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ReplayError):
        journal.read(str(tmp_path))
    with pytest.raises(ValueError):
        journal.append(str(tmp_path), verdict(0, 20))
    assert not (tmp_path / "elsewhere").exists()


def test_coverage_counts_each_step_once_and_not_those_that_were_trained_again():
    told = [verdict(0, 20), verdict(10, 40), verdict(60, 80), verdict(30, 50, UNKNOWN)]
    assert journal.coverage(told, 0, 100) == journal.Coverage(60, 10, 100)
    assert journal.coverage(told, 0, 70) == journal.Coverage(50, 10, 70)
    assert str(journal.Coverage(400, 0, 1200)) == "400 of 1,200 steps (33%)"
    later = {"started": "2001-01-01T00:00:00+00:00"}
    starts = [{"started": "1970-01-01T00:00:00+00:00"}, later]
    assert journal.cut(verdict(0, 40), [0, 40], starts, []).end == 40
    assert journal.cut(verdict(0, 40), [0, 30], starts, []).end == 30
    assert journal.cut(verdict(0, 40, saved=2e9), [0, 30], starts, []).end == 40  # saved by the later start
    assert journal.cut(verdict(20, 40), [0, 20], starts, []) is None
    assert journal.cut(verdict(0, 40), [0], starts[:1], [30, 10]).end == 10
    assert journal.cut(verdict(0, 40, rollbacks=2), [0], starts[:1], [30, 10]).end == 40
