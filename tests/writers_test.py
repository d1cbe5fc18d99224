"""The same numbers in TensorBoard, in metrics.jsonl and on the screen, each (split, step) once."""

import io
import json
import math

import pytest
import tensorflow as tf
import toy
from conftest import make_strategy
from tensorboard.backend.event_processing import event_accumulator

from looplib import ConsoleWriter, JsonlWriter, TensorBoardWriter
from looplib.writers import format_number, read_jsonl


def scalars(folder):
    events = event_accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {
        (tag, e.step): float(tf.make_ndarray(e.tensor_proto))
        for tag in events.Tags()["tensors"]
        for e in events.Tensors(tag)
    }


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


def test_a_progress_bar_is_on_a_terminal_only():
    for stream, bars in ((io.StringIO(), 0), (Terminal(), 1)):
        writer = ConsoleWriter(stream)
        for step in (10, 20):
            writer.write(step, "train", {"loss": 0.5})
            writer.progress(step, 100)
        text = stream.getvalue()
        assert text.count("loss 0.5") == 2
        assert ("20/100" in text) == bool(bars)
        writer.close()


def test_tensorboard_folders_follow_the_names(tmp_path):
    writer = TensorBoardWriter(str(tmp_path))
    for split in ("train", "eval", "robustness"):
        writer.write(1, split, {"a": 1})
    writer.close()
    assert [scalars(tmp_path / f) for f in ("train", "eval", "eval/robustness")][2] == {("a", 1): 1.0}


@pytest.mark.parametrize(
    "value, text", [(1797, "1797"), (0.98333, "0.9833"), (12345.6, "12346"), (1.2e-5, "1.2e-05"), (math.nan, "nan")]
)
def test_numbers_for_people(value, text):
    assert format_number(value) == text
