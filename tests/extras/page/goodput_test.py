"""Goodput: what `run.json` says of a simulated week with kills and rollbacks is what the simulation knows."""

import datetime
import json
import random

import pytest
import toy
from conftest import make_strategy

from looplib.extras.page.goodput import goodput

BEGIN = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)
DAY = 86_400.0


class Week:
    """A run of a week, second by second, which notes for itself what each second was for.

    Each start has 90 s before its first step. A step takes one second, of which a tenth waits for input; each 500 steps
    a save takes 6 s, and each 2,000 an evaluation takes 40 s. Kills come at random, and so do rollbacks; what was done
    since the last save is then repeated. What the process writes is at most a minute old when it is killed.
    """

    def __init__(self, seed, hours_between_kills, hours_between_rollbacks):
        self.chance = random.Random(seed)
        self.kill_rate, self.rollback_rate = 1 / 3600 / hours_between_kills, 1 / 3600 / hours_between_rollbacks
        self.truth = dict.fromkeys(("train", "input", "repeated", "start", "evaluate", "save", "off"), 0.0)
        self.starts, self.now, self.saved = [], 0.0, 0
        while self.now < 7 * DAY:
            self.start()
            pause = self.chance.uniform(60, 3600)
            self.truth["off"] += pause
            self.now += pause
        self.truth["off"] -= pause  # the week ends with a start

    def start(self):
        began, step, since_save = self.now, self.saved, []
        until = min(7 * DAY, began + self.chance.expovariate(self.kill_rate))
        seconds = {"start": 0.0, "train": 0.0, "input": 0.0, "save": 0.0, "evaluate": 0.0}
        report = {"started": (BEGIN + datetime.timedelta(seconds=began)).isoformat(), "points": [], "rollbacks": []}
        report["restored_from"] = f"/run/checkpoints/ckpt-{step}" if step else None
        written, reports, every = None, 0, 1

        def write():
            return {**report, "step": step, "status": "running", "seconds": {**seconds, "wall": self.now - began},
                    "points": [*report["points"]], "rollbacks": [*report["rollbacks"]]}  # fmt: skip

        def spend(name, amount):
            seconds[name] += amount
            self.now += amount
            if name in ("save", "evaluate", "start"):
                self.truth[name] += amount

        spend("start", 90.0)
        written, last = write(), self.now
        while self.now < until:
            step += 1
            spend("train", 0.9)
            spend("input", 0.1)
            since_save.append((0.9, 0.1))
            if self.chance.random() < self.rollback_rate:
                report["rollbacks"].append({"step": step, "to": self.saved, "reason": "a spike"})
                self.truth["repeated"] += len(since_save)
                step, since_save = self.saved, []
            reports += step % 100 == 0
            if step % 100 == 0 and reports % every == 0:
                report["points"].append({"step": step, "seconds": dict(seconds)})
                if len(report["points"]) == 100:  # as `Points` keeps them
                    report["points"], every = report["points"][1::2], 2 * every
            if step % 500 == 0 and step > self.saved:
                spend("save", 6.0)
                self.saved = step
                self.truth["train"] += sum(train for train, _ in since_save)
                self.truth["input"] += sum(wait for _, wait in since_save)
                since_save = []
            if step % 2000 == 0:
                spend("evaluate", 40.0)
            if self.now - last >= 60 or step % 500 == 0:
                written, last = write(), self.now
        if self.now >= 7 * DAY:
            written = {**write(), "status": "done"}
            self.truth["train"] += sum(train for train, _ in since_save)
            self.truth["input"] += sum(wait for _, wait in since_save)
        else:
            self.truth["repeated"] += len(since_save)
            written["status"] = "killed"
        self.starts.append(written)


@pytest.mark.parametrize("seed, kills, rollbacks", [(1, 6, 1e9), (2, 1e9, 3), (3, 4, 5), (4, 1, 2)])
def test_each_cause_has_the_seconds_of_the_simulation(seed, kills, rollbacks):
    week = Week(seed, kills, rollbacks)
    found = goodput(week.starts)
    wall = sum(week.truth.values())
    assert found.wall == pytest.approx(wall, rel=0.01) and wall == pytest.approx(7 * DAY, rel=0.02)
    for cause, seconds in week.truth.items():
        assert found.seconds[cause] == pytest.approx(seconds, abs=0.01 * wall), cause
    assert found.share == pytest.approx(week.truth["train"] / wall, abs=0.01)
    assert week.truth["repeated"] > 0.01 * wall or kills > 5  # there was something to find


def test_a_run_that_went_well_has_only_what_its_clock_has():
    start = {
        "started": BEGIN.isoformat(),
        "step": 10,
        "seconds": {"train": 8.0, "start": 1.5, "report": 0.5, "wall": 10.0},
    }
    found = goodput([start])
    assert found.share == pytest.approx(0.8) and found.seconds["off"] == 0 == found.seconds["repeated"]
    assert found.seconds["other"] == 0.5 and found.wall == 10


@pytest.mark.parametrize(
    "starts",
    [
        [],
        [{}],
        [{"started": "yesterday"}],
        [{"started": 3, "seconds": []}],
        [{"started": BEGIN.isoformat(), "seconds": {"wall": None}}],
    ],
)
def test_what_cannot_be_read_has_no_goodput(starts):
    assert goodput(starts) is None


def test_foreign_values_are_left_out():
    start = {"started": BEGIN.isoformat(), "step": "x", "points": [3, {"step": None}], "rollbacks": [{"step": 1}, 5],
             "seconds": {"train": 5.0, "wall": 5.0}}  # fmt: skip
    assert goodput([start, start]).seconds["other"] >= 0


def test_a_run_report_has_the_goodput_of_all_its_starts(tmp_path):
    for steps in (20, 40):
        with toy.controller(make_strategy("default"), toy.Regression(), model_dir=tmp_path) as controller:
            controller.train(steps)
    report = json.loads((tmp_path / "run.json").read_text())
    began, again = (datetime.datetime.fromisoformat(start["started"]).timestamp() for start in report["starts"])
    wall = again - began + report["starts"][1]["seconds"]["wall"]
    found = report["goodput"]
    assert sum(found["seconds"].values()) == pytest.approx(wall, abs=1.1)  # a start is noted in whole seconds
    trained = sum(start["seconds"]["train"] for start in report["starts"])
    assert found["seconds"]["train"] == pytest.approx(trained, abs=0.01) and found["seconds"]["repeated"] == 0
    assert found["share"] == pytest.approx(found["seconds"]["train"] / sum(found["seconds"].values()), abs=1e-3)
