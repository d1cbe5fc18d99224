"""`--profile` and `looplib.Profile`: a profile of exactly the steps that were asked for, read with public tools."""

import gzip
import json
import re

import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy

import looplib
from looplib.actions import profile as op_times
from looplib.binary.flag_groups import ProfileFlag
from looplib.errors import ActionError, FlagError, MissingPartError
from looplib.loop.contracts import Schedule


class Counting(looplib.Action):
    """Notes at which steps it is called, and how."""

    def __init__(self, *stops):
        self.wanted, self.seen = stops, []

    def stops(self):
        return self.wanted

    def on_reaching(self, step, controller):
        self.seen.append(("reaching", step, controller.global_step))

    def on_leaving(self, step, controller):
        self.seen.append(("leaving", step, controller.global_step))

    def __call__(self, event):
        self.seen.append((event.split, event.step))


class Marked(toy.Regression):
    """Has one op of a type that nothing else uses, once a step."""

    def step_fn(self, inputs):
        tf.debugging.check_numerics(tf.math.digamma(tf.cast(self.global_step, tf.float32) + 1.0), "mark")
        return super().step_fn(inputs)


def train(folder, steps, actions):
    with toy.controller(None, Marked(), model_dir=folder, steps_per_loop=10, actions=actions) as controller:
        controller.train(steps)
    return (folder / "metrics.jsonl").read_text() if (folder / "metrics.jsonl").exists() else ""


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """A run of 40 steps that was stopped at step 20, whose steps 14 to 19 are profiled: its folder, and the actions."""
    folder = tmp_path_factory.mktemp("profiled")
    counting = Counting(13, 19, 20)
    train(folder, 20, [counting, looplib.Profile(13, 6)])
    first = (folder / "profile.json").stat().st_mtime_ns
    train(folder, 40, [looplib.Profile(13, 6)])
    assert (folder / "profile.json").stat().st_mtime_ns == first, "a profile whose steps are past was taken again"
    return folder, counting


@pytest.mark.slow
def test_the_profile_has_exactly_the_steps(profiled):
    folder, _ = profiled
    report = json.loads((folder / "profile.json").read_text())
    assert (report["start"], report["steps"]) == (13, 6)
    (path,) = (folder / "train" / "plugins" / "profile").glob("*/*.xplane.pb")
    marks = path.read_bytes()  # a name stands once, so events are counted in the trace
    assert b"Digamma" in marks
    events = json.loads(gzip.decompress((folder / "profile.trace.json.gz").read_bytes()))["traceEvents"]
    assert sum(event["name"].endswith(":Digamma") for event in events) == 6
    assert {event["ph"] for event in events} == {"M", "X"}
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in events if event["ph"] == "X")


def test_the_ops_are_sorted_by_their_own_time(profiled):
    folder, _ = profiled
    ops = json.loads((folder / "profile.json").read_text())["ops"]
    assert {frozenset(op) for op in ops} == {frozenset(("name", "type", "time_ms", "share"))}
    times = [op["time_ms"] for op in ops]
    assert times == sorted(times, reverse=True) and times[0] > 0
    assert sum(op["share"] for op in ops) <= 1.001
    assert any("MatMul" in op["type"] for op in ops)


def test_stops_are_between_two_loops_and_change_no_report(profiled):
    _, counting = profiled
    assert counting.seen == [
        ("train", 10), ("reaching", 13, 13), ("leaving", 13, 13), ("reaching", 19, 19), ("leaving", 19, 19),
        ("reaching", 20, 20), ("train", 20),
    ]  # fmt: skip
    boundaries = list(Schedule(10, 100, None, 20, stops=(13, 19)).boundaries(0))
    assert [b.step for b in boundaries] == [10, 13, 19, 20]
    assert [b.report for b in boundaries] == [True, False, False, True]


def test_memory_and_time_are_in_run_json_and_in_no_record(profiled):
    folder, _ = profiled
    starts = json.loads((folder / "run.json").read_text())["starts"]
    points = [point for start in starts for point in start["points"]]
    assert [point["step"] for point in points] == [10, 20, 30, 40]
    assert all(1e8 < point["host_bytes"] < 1e11 and point["device_bytes"] is None for point in points)
    for start in starts:
        before, after = (point["seconds"] for point in start["points"])
        assert 0 < before["train"] <= after["train"] <= start["seconds"]["train"] + 0.01
        assert sum(after.values()) <= start["seconds"]["wall"] + 0.1


def test_the_table_of_the_log_has_a_head_above_its_columns():
    ops = [op_times.OpTime("a/MatMul", "MatMul", 1234.5, 0.9), op_times.OpTime("b/Relu", "Relu", 0.25, 0.1)]
    head, *rows = op_times.table(ops).splitlines()
    assert [row.split() for row in rows] == [
        ["90.0%", "1234.500", "ms", "MatMul", "a/MatMul"], ["10.0%", "0.250", "ms", "Relu", "b/Relu"]
    ]  # fmt: skip
    assert head.split() == ["share", "time", "type", "operation"]
    for name, cells in {"type": ("MatMul", "Relu"), "operation": ("a/", "b/")}.items():
        assert [row.index(cell) for row, cell in zip(rows, cells)] == [head.index(name)] * 2


def test_times_inside_of_an_op_are_not_its_own():
    events = [(0, 100, "outer"), (10, 40, "inner"), (20, 30, "innermost"), (50, 60, "inner"), (100, 110, "next")]
    totals = {}
    for name, time in op_times._own_times(events):
        totals[name] = totals.get(name, 0) + time
    assert totals == {"outer": 60, "inner": 30, "innermost": 10, "next": 10}


def test_a_training_that_ends_early_keeps_the_profile_of_the_steps_that_it_did(tmp_path):
    train(tmp_path, 8, [looplib.Profile(5, 100)])
    assert json.loads((tmp_path / "profile.json").read_text())["steps"] == 3


@pytest.mark.slow
def test_a_link_out_of_the_run_directory_gets_no_profile(tmp_path, caplog):
    (tmp_path / "run" / "train").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "run" / "train" / "plugins").symlink_to(tmp_path / "outside")
    train(tmp_path / "run", 8, [looplib.Profile(5, 2)])
    assert "no profile is taken" in caplog.text and not list((tmp_path / "outside").iterdir())


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("text", ["10", "10:0", "a:b", "-1:3", "1:2:3"])
def test_a_flag_of_another_form_is_a_sentence(text):
    with pytest.raises(FlagError, match=re.escape(f"--profile is {text!r}; expected START:STEPS")):
        ProfileFlag().actions({"profile": text})


def test_a_profile_after_the_end_is_refused_and_one_across_it_is_a_warning(caplog):
    profile = looplib.Profile(95, 20)
    for steps in (-1, 115):
        profile.check_end(steps)
    assert not caplog.text
    profile.check_end(100)
    assert "the training ends at step 100, so the profile has 5 steps in place of 20" in caplog.text
    with pytest.raises(ActionError, match="95.*95.*--profile"):
        profile.check_end(95)


def test_a_profile_needs_a_directory():
    controller = toy.controller(make_strategy("default"), toy.Regression(), actions=[looplib.Profile(np.int64(1), 1)])
    with pytest.raises(MissingPartError):
        controller.train(2)
