"""`--profile` and `looplib.Profile`: a profile of exactly the steps that were asked for, read with public tools."""

import json
import re

import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import looplib
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


def recorded(folder):
    return list((folder / "train" / "plugins" / "profile").glob("*/*.xplane.pb"))


def marks(folder):
    """How often the op of `Marked` has run in the profiled steps."""
    space = xplane_pb2.XSpace.FromString(recorded(folder)[0].read_bytes())
    events = [(plane, event) for plane in space.planes for line in plane.lines for event in line.events]
    return sum(plane.event_metadata[event.metadata_id].name.endswith(":Digamma") for plane, event in events)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """A run of 40 steps that was stopped at step 20, whose steps 14 to 19 are profiled: its folder, and the actions."""
    folder = tmp_path_factory.mktemp("profiled")
    counting = Counting(13, 19, 20)
    train(folder, 20, [counting, looplib.Profile(13, 6)])
    (first,) = recorded(folder)
    train(folder, 40, [looplib.Profile(13, 6)])
    assert recorded(folder) == [first], "a profile whose steps are past was taken again"
    return folder, counting


@pytest.mark.slow
def test_the_profile_has_exactly_the_steps(profiled):
    folder, _ = profiled
    assert marks(folder) == 6


def test_stops_are_between_two_loops_and_change_no_report(profiled):
    _, counting = profiled
    assert counting.seen == [
        ("train", 10), ("reaching", 13, 13), ("leaving", 13, 13), ("reaching", 19, 19), ("leaving", 19, 19),
        ("reaching", 20, 20), ("train", 20),
    ]  # fmt: skip
    boundaries = list(Schedule(10, 100, {}, 20, stops=(13, 19)).boundaries(0))
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


def test_a_training_that_ends_early_keeps_the_profile_of_the_steps_that_it_did(tmp_path):
    train(tmp_path, 8, [looplib.Profile(5, 100)])
    assert marks(tmp_path) == 3


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
