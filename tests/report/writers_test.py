"""The same numbers in TensorBoard, in metrics.jsonl and on the screen, each (split, step) once."""

import dataclasses
import fcntl
import io
import json
import math
import os
import pty
import re
import resource
import select
import shutil
import signal
import struct
import subprocess
import termios
import time

import numpy as np
import pytest
import tensorflow as tf
import toy
from board import numbers as events
from conftest import make_strategy, repetitions
from tensorboard.backend.event_processing import event_accumulator

from looplib import CheckpointPolicy, ConsoleWriter, JsonlWriter, KeepLast, TensorBoardWriter, UsageError
from looplib.base.numbers import Progress, format_number
from looplib.report.clock import Clock, SpeedMeter
from looplib.report.reporter import ThreadedWriter
from looplib.report.writers.contract import Writer
from looplib.run.records import read_jsonl


def scalars(folder):
    return {(tag, step): value for step, values in events(folder) for tag, value in values.items()}


def contents(folder):
    return {path.name: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir() if path.is_file()}


def write_board(directory, *records):
    """Writes (step, split, metrics) in one process's life."""
    writer = TensorBoardWriter(str(directory))
    for record in records:
        writer.write(*record)
    writer.close()


def test_all_writers_get_the_same_numbers(tmp_path, capsys):
    trainer, evaluator = toy.build(make_strategy("default"))
    with toy.controller(None, trainer, evaluator, model_dir=tmp_path, writers=None) as controller:
        controller.train_and_evaluate(6, 3)
    records = read_jsonl(str(tmp_path / "metrics.jsonl"))
    printed = capsys.readouterr().out
    assert [(r["step"], r["split"]) for r in records] == [
        (1, "train"), (2, "train"), (3, "train"), (3, "eval"), (4, "train"), (5, "train"), (6, "train"), (6, "eval")
    ]  # fmt: skip
    for split in ("train", "eval"):
        board = scalars(tmp_path / split)
        expected = {
            (name, r["step"]): value
            for r in records
            if r["split"] == split
            for name, value in r.items()
            if name not in ("step", "split")
        }
        assert board.keys() == expected.keys()
        for key, value in expected.items():
            assert board[key] == pytest.approx(value, rel=1e-6)
    for line, record in zip(printed.splitlines(), records, strict=True):
        assert line.split()[1:3] == [str(record["step"]), record["split"]]
        assert f"{record.get('loss', record.get('accuracy')):.4g}" in line


def test_a_record_written_again_replaces_the_first(tmp_path):
    path = str(tmp_path / "m.jsonl")
    writer = JsonlWriter(path)
    writer.write(5, "eval", {"a": 1.0})
    writer.write(5, "train", {"b": 2.0})
    writer.close()
    writer = JsonlWriter(path)  # another process
    writer.write(5, "eval", {"a": 3})
    writer.close()
    assert read_jsonl(path) == [{"step": 5, "split": "train", "b": 2.0}, {"step": 5, "split": "eval", "a": 3}]


def test_records_that_a_resumed_run_makes_again_are_taken_out(tmp_path):
    path = str(tmp_path / "m.jsonl")
    writer = JsonlWriter(path)
    for step in (4, 8, 12):
        writer.write(step, "train", {"a": step})
        writer.write(step, "other_job", {"a": step})
    writer.resume(10, {"train": 4})
    writer.close()
    kept = [(r["step"], r["split"]) for r in read_jsonl(path)]
    assert kept == [(4, "train"), (4, "other_job"), (8, "other_job")]
    voided = str(tmp_path / "m.voided.jsonl")
    assert [(r["step"], r["split"]) for r in read_jsonl(voided)] == [(8, "train"), (12, "train"), (12, "other_job")]
    writer.write(8, "train", {"a": 8})
    writer.write(12, "train", {"a": 13})
    writer.resume(4, {"train": 4})  # killed again at once: what was kept aside stands there once
    assert [r["a"] for r in read_jsonl(voided)] == [8, 12, 12, 8, 13]  # the 8 of other_job is new


def test_records_that_are_no_events_cost_the_rest_of_their_file_only(tmp_path):
    write_board(tmp_path, (4, "train", {"a": 4}))
    (path,) = (tmp_path / "train").iterdir()
    content = path.read_bytes()
    with tf.io.TFRecordWriter(str(tmp_path / "other")) as writer:
        writer.write(b"\xff\xff\xff no event")
    path.write_bytes(content + (tmp_path / "other").read_bytes())
    TensorBoardWriter(str(tmp_path)).resume(8, {"train": 8})
    write_board(tmp_path, (9, "train", {"a": 9}))
    assert path.read_bytes() == content + (tmp_path / "other").read_bytes()  # no file is changed
    (new,) = set((tmp_path / "train").iterdir()) - {path}
    path.unlink()  # TensorBoard reads nothing in a folder with such a file
    assert new.exists() and events(tmp_path / "train") == [(9, {"a": 9})]


def test_void_records_of_another_job_are_taken_out(tmp_path):
    path = str(tmp_path / "m.jsonl")
    writer = JsonlWriter(path)
    JsonlWriter(path).write(8, "eval", {"a": 8})
    writer.resume(4, {"train": 4})
    assert read_jsonl(path) == []


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "split": "train", "a": 1}\n{"step": 2, "spl')
    assert read_jsonl(str(path)) == [{"step": 1, "split": "train", "a": 1}]
    writer = JsonlWriter(str(path))
    writer.write(2, "train", {"a": 2})
    writer.close()
    assert [r["step"] for r in read_jsonl(str(path))] == [1, 2]


def test_numbers_survive_exactly_and_what_is_not_finite_is_null(tmp_path):
    path = str(tmp_path / "m.jsonl")
    writer = JsonlWriter(path)
    writer.write(1, "train", {"third": 1 / 3, "count": 2**53 + 1, "bad": math.nan, "worse": math.inf})
    writer.close()
    strict = json.loads(open(path).read(), parse_constant=pytest.fail)
    assert strict == {"step": 1, "split": "train", "third": 1 / 3, "count": 2**53 + 1, "bad": None, "worse": None}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def screen(text):
    """The lines that a terminal shows once it has got a text."""
    lines = []
    for line in text.split("\n"):
        shown, column = [], 0
        for part in re.split(r"(\r|\x1b\[K)", line):
            if part == "\r":
                column = 0
            elif part == "\x1b[K":
                del shown[column:]
            else:
                shown[column : column + len(part)] = part
                column += len(part)
        lines.append("".join(shown).rstrip())
    return [line for line in lines if line]


def test_a_bar_stands_for_the_reports_of_the_training_on_a_terminal_only():
    for stream in (io.StringIO(), Terminal()):
        writer = ConsoleWriter(stream)
        for step in (10, 20, 30):
            time.sleep(0.06 * stream.isatty())  # a bar is not drawn more often
            writer.progress(Progress(step, 100, rate=4.0, left=20.0, to_evaluation=2.5, waiting=0.08))
            writer.write(step, "train", {"accuracy": 0.25, "loss": step / 40, "steps_per_second": 5.0})
            if step == 20:
                writer.write(20, "eval", {"accuracy": 0.5})
        shown = screen(stream.getvalue())
        forecast = "20 s left, evaluation in 2 s, input 8%"
        line = "step {:>7}  train  accuracy 0.25  loss {}  steps_per_second 5  ({}% of 100 steps, " + forecast + ")"
        reports = [line.format(step, step / 40, step) for step in (10, 20, 30)]
        evaluation = "step      20  eval   accuracy 0.5"
        if stream.isatty():
            assert shown[:2] == [reports[1], evaluation] and len(shown) == 3
            assert re.fullmatch(
                rf" 30%\|.{{12}}\| 30/100 \| 4 steps/s \| {forecast} \| loss 0.75, accuracy 0.25", shown[2]
            )
        else:
            assert shown == [*reports[:2], evaluation, reports[2]]
        writer.progress(None)
        assert screen(stream.getvalue())[-1] == reports[2]  # the bar is gone, and its last report stays


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("columns, shown", [(120, ", evaluation in 2 s, input 96%"), (80, ""), (52, None)])
def test_a_bar_on_a_narrow_terminal_cuts_no_number(columns, shown):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(theirs, "w", encoding="utf-8") as stream:
        writer = ConsoleWriter(stream)
        now = Progress(1060, 1100, rate=85.73, left=9.0, to_evaluation=2.5, waiting=0.96)
        writer.progress(now)
        writer.write(1060, "train", {"loss": 0.002648})
        writer.progress(dataclasses.replace(now, evaluating=True))
        writer.progress(now)
        text = b""
        while select.select([ours], [], [], 0.2)[0]:
            text += os.read(ours, 1 << 16)
        writer.close()
    os.close(ours)
    last = screen(text.decode())[-1]
    end = f" | 9 s left{shown} | loss 0.002648" if shown is not None else ""
    assert f"1,060/1,100 | 85.73 steps/s{end}" in last and last.endswith(end or "steps/s")


def test_a_message_of_the_runtime_replaces_the_bar_and_does_not_stand_behind_it():
    stream, message = Terminal(), "2026-11-23 12:00:00.000000: W tensorflow/core/framework/op_kernel.cc: " + 60 * "x"
    writer = ConsoleWriter(stream)
    writer.progress(Progress(10, 100, rate=4.0))
    stream.write(message + "\n")  # on the same terminal, not through the bar or a guarded stream
    writer.progress(Progress(20, 100, rate=4.0, evaluating=True))
    writer.write(20, "eval", {"accuracy": 0.5})
    stream.write(message + "\n")
    writer.progress(Progress(30, 100, rate=4.0))
    shown = screen(stream.getvalue())
    assert shown[:3] == [message, "step      20  eval   accuracy 0.5", message]
    assert len(shown) == 4 and "30/100 | 4 steps/s" in shown[3]


def test_a_training_whose_end_is_not_known_shows_its_step():
    stream = Terminal()
    writer = ConsoleWriter(stream)
    writer.progress(Progress(0))
    writer.progress(Progress(1500, rate=4.0, waiting=0.5))
    writer.write(1500, "train", {"loss": 0.25})
    assert screen(stream.getvalue()) == ["step 1,500 | 4 steps/s | input 50% | loss 0.25"]


def test_time_left_counts_training_saves_and_evaluations_after_a_resume_and_a_rollback():
    now = 0.0
    clock = Clock(lambda: now)
    pace = SpeedMeter(clock)

    def spend(**phases):
        nonlocal now
        for name, seconds in phases.items():
            with clock.phase(name):
                now += seconds

    spend(compile=50, train=3, save=1)  # of the steps before it resumed nothing is known
    pace = SpeedMeter(clock)
    pace.measure_from(1000)
    assert pace.at(1000, 2000, 1500) == Progress(1000, 2000)
    spend(compile=20, train=0.6, input=0.4, evaluate=0.3, save=0.2)
    found = pace.at(1100, 2000, 1500)
    assert (found.rate, found.waiting) == (pytest.approx(100), pytest.approx(0.4))
    assert found.to_evaluation == pytest.approx(400 / 100)
    assert found.left == pytest.approx(900 * (1 / 100 + 0.5 / 100))
    pace.measure_from(1050)  # back to a checkpoint
    spend(train=1)
    found = pace.at(1150, None, None)
    assert found.rate == pytest.approx(100, rel=0.01) and found.left is None and found.to_evaluation is None
    assert found.waiting == 0  # of this interval, as the numbers beside it are
    spend(train=600)  # a slow loop: what was long ago counts no more
    assert pace.at(1250, 2000, None).rate == pytest.approx(100 / 600, rel=0.01)
    assert pace.at(1250, 300, None).left is None  # of a run that is beyond the step that was asked for


@pytest.mark.slow
def test_what_others_print_and_log_leaves_no_piece_of_the_bar_on_a_terminal(nursery, tmp_path):
    texts = []
    for target in (40, 60):
        ours, theirs = pty.openpty()
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 150, 0, 0))
        flags = [f"--train_steps={target}", "--config.slow_step=0.03", "--profile=22:2"]  # whose end is logged
        life = nursery.life(tmp_path / "run", *flags, console=os.ttyname(theirs))
        text = b""
        while not life.ended() or select.select([ours], [], [], 0.1)[0]:
            if select.select([ours], [], [], 0.1)[0]:
                text += os.read(ours, 65536)
        assert life.code() == 0, text
        for descriptor in (ours, theirs):
            os.close(descriptor)
        texts.append(text.decode().replace("\r\n", "\n"))
    shown = [line for text in texts for line in screen(text)]
    records = read_jsonl(str(tmp_path / "run" / "metrics.jsonl"))
    for step in (20, 40, 60):  # above each evaluation stands the report of its step
        place = next(place for place, line in enumerate(shown) if line.startswith(f"step {step:>7}  eval "))
        assert shown[place - 1].startswith(f"step {step:>7}  train  accuracy ")
    assert not any("steps/s" in line for line in shown)
    assert sum(line.startswith("I") and "] profiled steps 23 to 24: " in line for line in shown) == 1
    assert sum("restored step 40" in line for line in shown) == 1
    assert re.search(r"\r +\d+%\|.{12}\| 25/40 \| [\d.]+ steps/s \| \d+ s left, evaluation in \d+ s, input", texts[0])
    assert "| 20/40 | " in texts[0] and "s left, evaluating, input" in texts[0]
    assert re.search(r"67%\|.{12}\| 40/60", texts[1]) and "| 35/" not in texts[1]  # where it resumed
    assert [r["step"] for r in records if r["split"] == "train"] == list(range(5, 61, 5))


def test_tensorboard_folders_follow_the_names(tmp_path):
    writer = TensorBoardWriter(str(tmp_path))
    for split in ("train", "eval", "robustness"):
        writer.write(1, split, {"a": 1})
    writer.close()
    assert [scalars(tmp_path / f) for f in ("train", "eval", "eval/robustness")][2] == {("a", 1): 1.0}


def test_tensorboard_gets_what_tf_summary_would_write(tmp_path):
    write_board(tmp_path, (7, "train", {"loss": 0.25, "count": 3}))
    with tf.summary.create_file_writer(str(tmp_path / "peer")).as_default(7):
        tf.summary.scalar("loss", 0.25)
        tf.summary.scalar("count", 3)
    found = []
    for folder in ("train", "peer"):
        board = event_accumulator.EventAccumulator(str(tmp_path / folder)).Reload()
        found.append({tag: board.SummaryMetadata(tag).SerializeToString() for tag in board.Tags()["tensors"]})
    assert scalars(tmp_path / "train") == scalars(tmp_path / "peer") == {("loss", 7): 0.25, ("count", 7): 3}
    assert found[0] == found[1]


def test_others_can_read_in_tensorboard_what_was_written_at_once(tmp_path):
    writer = TensorBoardWriter(str(tmp_path))
    for step in range(1, 4):
        writer.write(step, "train", {"a": step})
        assert [s for s, _ in events(tmp_path / "train")] == list(range(1, step + 1))


@pytest.mark.slow
def test_resume_takes_void_steps_out_of_tensorboard_and_leaves_other_files_alone(tmp_path):
    write_board(tmp_path, (4, "train", {"a": 4}), (4, "eval", {"a": 4}), (4, "other_job", {"a": 4}))
    write_board(tmp_path, *((s, split, {"a": s, "b": -s}) for s in (8, 12) for split in ("train", "eval", "other_job")))
    splits = ("train", "eval", "eval/other_job")
    untouched = {split: contents(tmp_path / split) for split in splits}
    for _ in range(2):  # killed again at once
        TensorBoardWriter(str(tmp_path)).resume(10, {"train": 8, "eval": 0})
        assert events(tmp_path / "train") == [(4, {"a": 4}), (8, {"a": 8, "b": -8})]
        assert events(tmp_path / "eval") == []
        assert events(tmp_path / "eval/other_job") == [(4, {"a": 4}), (8, {"a": 8, "b": -8})]
        for split in splits:
            after = contents(tmp_path / split)
            assert len(after) == 3 and untouched[split].items() <= after.items()  # the third has the restart


def test_resume_takes_out_void_records_that_tf_summary_wrote(tmp_path):
    with tf.summary.create_file_writer(str(tmp_path / "train")).as_default():
        for step in (1, 2, 3):
            for tag in ("a", "b"):
                tf.summary.scalar(tag, step, step)
    TensorBoardWriter(str(tmp_path)).resume(2, {})
    assert events(tmp_path / "train") == [(1, {"a": 1}), (1, {"b": 1}), (2, {"a": 2}), (2, {"b": 2})]


def test_a_rollback_loses_no_summary_that_the_program_writes_after_it(tmp_path, caplog):
    """Its writer has the file open, and writes on to it; TensorBoard shows what comes in a new one."""
    summaries = tf.summary.create_file_writer(str(tmp_path / "train"))
    for step in (1, 2, 3, 4):
        with summaries.as_default(step):
            tf.summary.scalar("own", step)
        summaries.flush()
        if step == 3:
            TensorBoardWriter(str(tmp_path)).resume(2, {})
            assert "is open in this process; TensorBoard drops its events after step 2" in caplog.text
    summaries.close()
    path = next(
        path for path in (tmp_path / "train").iterdir() if re.match(r"events\.out\.tfevents\.\d+\.\D", path.name)
    )
    records = list(tf.data.TFRecordDataset(str(path)).as_numpy_iterator())
    steps = [event.step for event in map(tf.compat.v1.Event.FromString, records) if event.HasField("summary")]
    assert steps == [1, 2, 3, 4]
    assert [step for step, _ in events(tmp_path / "train")] == [1, 2]


@pytest.mark.slow
def test_a_rollback_within_a_process_leaves_each_step_once(tmp_path):
    board, jsonl = TensorBoardWriter(str(tmp_path)), JsonlWriter(str(tmp_path / "m.jsonl"))
    for attempt in range(12):  # within one second
        for writer in (board, jsonl):
            for step in range(1, 6) if not attempt else (4, 5):
                writer.write(step, "train", {"a": attempt})
            writer.resume(3, {"train": 3})
    for writer in (board, jsonl):
        writer.write(4, "train", {"a": 12})
    expected = [(1, 0), (2, 0), (3, 0), (4, 12)]
    assert [(s, v["a"]) for s, v in events(tmp_path / "train")] == expected
    assert [(r["step"], r["a"]) for r in read_jsonl(str(tmp_path / "m.jsonl"))] == expected
    assert scalars(tmp_path / "train") == {("a", s): a for s, a in expected}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_an_event_file_cut_anywhere_loses_only_the_record_that_was_cut(split, tmp_path):
    write_board(tmp_path / "whole", *((s, split, {"a": s}) for s in (1, 2, 3)))
    (whole,) = (tmp_path / "whole" / split).iterdir()
    sizes = [8 + 4 + len(r) + 4 for r in tf.data.TFRecordDataset(str(whole)).as_numpy_iterator()]
    ends = np.cumsum(sizes)[1:]  # of the three records; the first event is the version
    assert ends[-1] == whole.stat().st_size
    # Every twenty-ninth length (with --all, every sixth), and those around each end.
    for length in sorted({*range(0, ends[-1], repetitions(29, 6)), *ends - 1, *ends, *ends[:-1] + 1}):
        run = tmp_path / f"{length}"
        (run / split).mkdir(parents=True)
        (run / split / whole.name).write_bytes(whole.read_bytes()[:length])
        write_board(run, (4, split, {"a": 4}))
        assert [s for s, _ in events(run / split)] == [*range(1, 1 + sum(ends <= length)), 4], length
        shutil.rmtree(run)


def test_a_flipped_bit_does_not_stop_the_run(tmp_path):
    write_board(tmp_path, *((s, "train", {"a": s}) for s in (1, 2, 3)))
    (path,) = (tmp_path / "train").iterdir()
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    TensorBoardWriter(str(tmp_path)).resume(3, {"train": 3})
    assert [s for s, _ in events(tmp_path / "train")] in ([1], [1, 2])


def test_another_hosts_file_is_left_alone_unless_it_holds_void_records(tmp_path):
    write_board(tmp_path, (1, "eval", {"a": 1}), (2, "eval", {"a": 2}))
    (path,) = (tmp_path / "eval").iterdir()
    other = path.with_name("events.out.tfevents.1700000000.000000.elsewhere.1.v2")
    other.write_bytes(path.read_bytes() + b"being written")
    path.unlink()
    before = contents(tmp_path / "eval")
    TensorBoardWriter(str(tmp_path)).resume(2, {})
    assert contents(tmp_path / "eval") == before
    TensorBoardWriter(str(tmp_path)).resume(1, {})
    assert events(tmp_path / "eval") == [(1, {"a": 1})]


def test_a_training_goes_on_from_a_cut_file_of_another_host(tmp_path):
    write_board(tmp_path, (1, "train", {"a": 1}), (2, "train", {"a": 2}))
    (path,) = (tmp_path / "train").iterdir()
    path.with_name("events.out.tfevents.1700000000.000000.elsewhere.1.v2").write_bytes(path.read_bytes()[:-1])
    path.unlink()
    TensorBoardWriter(str(tmp_path)).resume(2, {"train": 2})
    assert events(tmp_path / "train") == [(1, {"a": 1})]


def test_a_record_written_again_replaces_the_first_in_tensorboard(tmp_path):
    write_board(tmp_path, (5, "eval", {"a": 1, "b": 1}), (5, "train", {"a": 2}), (10, "eval", {"a": 2}))
    write_board(tmp_path, (5, "eval", {"a": 3}))  # another process
    assert sorted(events(tmp_path / "eval")) == [(5, {"a": 3}), (10, {"a": 2})]
    assert events(tmp_path / "train") == [(5, {"a": 2})]
    write_board(
        tmp_path, (20, "eval", {"a": 4}), (20, "eval", {"a": 5}), (20, "eval", {"a": 6}), (30, "eval", {"a": 7})
    )
    assert sorted(s for s, _ in events(tmp_path / "eval")) == [5, 10, 20, 30]
    assert (20, {"a": 6}) in events(tmp_path / "eval")


def test_a_record_written_again_spares_what_a_user_wrote_to_the_same_step(tmp_path):
    user = tf.summary.create_file_writer(str(tmp_path / "eval"))
    with user.as_default(5):
        tf.summary.scalar("own", 1)
    user.flush()
    write_board(tmp_path, (5, "eval", {"a": 1}))
    with user.as_default(6):
        tf.summary.scalar("own", 2)
    user.close()
    write_board(tmp_path, (5, "eval", {"a": 2}))
    assert sorted((s, *v.items()) for s, v in events(tmp_path / "eval")) == [
        (5, ("a", 2)),
        (5, ("own", 1)),
        (6, ("own", 2)),
    ]


def test_the_same_numbers_again_change_no_file(tmp_path):
    record = (5, "eval", {"a": 1 / 3, "bad": math.nan, "worse": math.inf, "count": 2**53 + 1})
    write_board(tmp_path, record)
    before = contents(tmp_path / "eval")
    write_board(tmp_path, record, record)
    assert contents(tmp_path / "eval") == before
    (found,) = events(tmp_path / "eval")
    np.testing.assert_equal(found[1], {name: float(np.float32(value)) for name, value in record[2].items()})


def test_a_fresh_run_reads_no_event_files(tmp_path, monkeypatch):
    writer = TensorBoardWriter(str(tmp_path))
    writer.write(1, "train", {"a": 1})
    monkeypatch.setattr(tf.data, "TFRecordDataset", pytest.fail)
    monkeypatch.setattr(tf.io.gfile, "listdir", pytest.fail)
    for step in range(2, 9):
        writer.write(step, "train", {"a": step})


def test_an_evaluation_job_goes_on_when_a_training_job_rewrites_its_file(tmp_path):
    job = TensorBoardWriter(str(tmp_path))
    for step in (10, 20):
        job.write(step, "eval", {"a": step})
    TensorBoardWriter(str(tmp_path)).resume(10, {"train": 10})
    job.write(20, "eval", {"a": 21})
    job.write(30, "eval", {"a": 30})
    assert events(tmp_path / "eval") == [(10, {"a": 10}), (20, {"a": 21}), (30, {"a": 30})]
    shutil.rmtree(tmp_path / "eval")
    job.write(40, "eval", {"a": 40})
    assert events(tmp_path / "eval") == [(40, {"a": 40})]


@pytest.mark.slow
def test_a_controller_stopped_between_a_report_and_a_save_leaves_each_step_once(tmp_path):
    def die(event):
        if (event.step, event.split) == (8, "train"):
            raise KeyboardInterrupt

    def start(steps, actions=()):
        trainer, evaluator = toy.build(make_strategy("default"))
        policy = CheckpointPolicy(every_steps=5, keep=(KeepLast(100),))
        settings = {"model_dir": tmp_path, "writers": None, "checkpoints": policy, "actions": actions}
        toy_controller = toy.controller(None, trainer, evaluator, **settings)
        toy_controller.train_and_evaluate(steps, 6)  # nothing closes the writers, as after a kill
        return toy_controller

    with pytest.raises(KeyboardInterrupt):
        start(20, [die])
    assert [s for s, _ in events(tmp_path / "train")] == [*range(1, 9)]
    controller = start(10)
    controller.restore_checkpoint(str(tmp_path / "checkpoints/ckpt-5"))  # a rollback with writers open
    controller.train_and_evaluate(12, 6)
    assert [s for s, _ in events(tmp_path / "train")] == [*range(1, 13)]
    assert [s for s, _ in events(tmp_path / "eval")] == [6, 12]
    for split in ("train", "eval"):
        expected = {
            r["step"]: {name: float(np.float32(value)) for name, value in r.items() if name not in ("step", "split")}
            for r in read_jsonl(str(tmp_path / "metrics.jsonl"))
            if r["split"] == split
        }
        assert dict(events(tmp_path / split)) == expected


ENDLESS = """
import itertools, sys
from looplib import JsonlWriter, TensorBoardWriter
writers = TensorBoardWriter(sys.argv[1]), JsonlWriter(sys.argv[1] + "/metrics.jsonl")
first = int(sys.argv[2])
for writer in writers:
    writer.resume(first, {"train": first})
for step in itertools.count(first + 1):
    for writer in writers:
        writer.write(step, "train", {"a": step, "b": -step})
    print(step, flush=True)
"""


def test_a_kill_loses_nothing_that_was_written(python, tmp_path):
    expected = 0
    for life in range(3):
        job = subprocess.Popen([python, "-c", ENDLESS, str(tmp_path), str(expected)], stdout=subprocess.PIPE, text=True)
        told = [int(job.stdout.readline()) for _ in range(50 + 37 * life)]
        job.send_signal(signal.SIGKILL)
        rest = [int(line) for line in job.stdout.read().split()]
        job.wait()
        written = ([*told, *rest])[-1]
        assert [r["step"] for r in read_jsonl(str(tmp_path / "metrics.jsonl"))][:written] == [*range(1, written + 1)]
        expected = written - 20  # the last checkpoint: twenty steps are made again
    TensorBoardWriter(str(tmp_path)).resume(written, {"train": written})
    steps = [*range(1, written + 1)]
    assert events(tmp_path / "train") == [(s, {"a": s, "b": -s}) for s in steps]
    JsonlWriter(str(tmp_path / "metrics.jsonl")).resume(written, {"train": written})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == steps


def test_a_line_that_another_job_left_cut_short_spoils_no_other(tmp_path):
    path = tmp_path / "m.jsonl"
    writer = JsonlWriter(str(path))
    path.touch()
    writer.write(1, "train", {"a": 1})
    with open(path, "a") as file:
        file.write('{"step": 1, "spl')
    writer.write(2, "train", {"a": 2})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize("kind", ["tensorboard", "jsonl"])
def test_a_full_disk_raises_and_spoils_nothing(kind, tmp_path):
    """A limit on the size of files stands for it."""
    path = str(tmp_path / "m.jsonl")
    writer = TensorBoardWriter(str(tmp_path)) if kind == "tensorboard" else JsonlWriter(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises((OSError, tf.errors.OpError)):
            for step in range(1000):
                writer.write(step, "train", {"a": step})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.write(step, "train", {"a": step})
    writer.write(step + 1, "train", {"a": step})
    if kind == "jsonl":
        found = [json.loads(line)["step"] for line in open(path)]
    else:
        found = [s for s, _ in events(tmp_path / "train")]
    assert step > 5 and found == [*range(step + 2)]


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "value, text",
    [
        (1797, "1797"),
        (0.98333, "0.9833"),
        (12345.6, "12346"),
        (1.2e-5, "1.2e-05"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (1.25e308, "1.25e+308"),
        (-(10**15), "-1e+15"),
    ],
)
def test_numbers_for_people(value, text):
    assert format_number(value) == text


def test_a_record_that_another_job_has_written_meanwhile_is_not_written_again(tmp_path):
    path = str(tmp_path / "metrics.jsonl")
    training, job = JsonlWriter(path), JsonlWriter(path)
    training.write(10, "train", {"loss": 1.0})
    job.write(10, "eval", {"accuracy": 0.5})
    training.write(10, "eval", {"accuracy": 0.5})
    training.write(20, "eval", {"accuracy": 0.75})
    job.write(20, "eval", {"accuracy": 0.5})
    assert [(r["step"], r["split"], r.get("accuracy")) for r in read_jsonl(path)] == [
        (10, "train", None), (10, "eval", 0.5), (20, "eval", 0.5),
    ]  # fmt: skip


def test_a_run_that_lost_its_directory_writes_nothing_in_the_thread_either(tmp_path):
    def check():
        raise UsageError("the lock is gone")

    writer = ThreadedWriter(JsonlWriter(str(tmp_path / "metrics.jsonl")), check)
    writer.write(1, "train", {"loss": 1.0})
    with pytest.raises(UsageError, match="the lock is gone"):
        writer.flush()
    writer.close()
    assert not list(tmp_path.iterdir())


def test_an_error_in_the_thread_of_a_writer_is_raised_by_the_training(tmp_path):
    class Full(Writer):
        def write(self, step, split, metrics):
            raise OSError(28, "No space left on device")

    writer = ThreadedWriter(Full(), lambda: None)
    writer.write(1, "train", {"loss": 1.0})
    with pytest.raises(OSError, match="No space left"):
        writer.flush()
    writer.close()
