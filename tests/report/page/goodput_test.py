"""Goodput: what `run.json` says of simulated weeks with kills and rollbacks is what the simulation knows."""

import datetime
import json

import pytest
import toy
from conftest import make_strategy, more, repetitions
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_run import BEGIN, CAUSES, WEEK, Faults, SimulatedRun

from looplib.base.decoding import decode
from looplib.run import goodput as goodputs
from looplib.run.report import StartEntry

HOUR = 3600.0


def goodput(starts):
    return goodputs.goodput(decode(list[StartEntry], starts, strict=False))


def check(run):
    """Compares each cause; `run.json` has the times of starts in whole seconds, and others in milliseconds.

    What it does not know of a start that was killed counts as "off". If steps take different times, a cut between two
    points is as exact as their mean.
    """
    found, starts = goodput(run.starts), len(run.starts)
    blurred = run.cuts * run.variation * run.longest
    assert found.wall == pytest.approx(run.wall, abs=starts + 1)
    assert found.seconds["off"] == pytest.approx(run.truth["off"] + run.unnoted, abs=starts + 1)
    for cause in set(CAUSES) - {"off"}:
        margin = 0.01 * (starts + 1) + (blurred if cause in ("train", "input", "repeated") else 0.0)
        more = found.seconds[cause] - run.truth[cause]
        assert -run.unnoted - margin <= more <= margin, (cause, more, run.unnoted, blurred)
    assert found.share == pytest.approx(run.truth["train"] / run.wall, abs=(run.unnoted + blurred + 1) / run.wall)


@pytest.mark.parametrize("seed, faults", [
    (1, Faults(kill=2 * HOUR, rollback=6 * HOUR, suspension=12 * HOUR, preemption=8 * HOUR)),
    *more([(2, Faults(kill=HOUR)), (3, Faults(rollback=HOUR)), (4, Faults(suspension=HOUR, preemption=2 * HOUR)), (5, Faults())]),
])  # fmt: skip
def test_each_cause_of_a_week_has_the_seconds_of_the_simulation(seed, faults):
    run = SimulatedRun(seed, faults)
    assert sum(run.truth.values()) == pytest.approx(run.now) and WEEK <= run.now < WEEK + 4 * HOUR
    check(run)
    assert run.truth["repeated"] > 0.02 * run.wall or faults.kill > 2 * HOUR  # there was something to find


MEANS = st.floats(0.2 * HOUR, 20 * HOUR) | st.just(float("inf"))


@settings(max_examples=repetitions(6, 100), deadline=None)
@given(st.integers(0, 10**6), st.builds(Faults, MEANS, MEANS, MEANS, MEANS, st.floats(1.0, HOUR)), st.floats(0.0, 0.9),
       st.sampled_from([0.0, 0.3]))  # fmt: skip
def test_each_cause_has_the_seconds_of_the_simulation_whatever_strikes(seed, faults, waiting, variation):
    check(SimulatedRun(seed, faults, 12 * HOUR, waiting, variation))


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
