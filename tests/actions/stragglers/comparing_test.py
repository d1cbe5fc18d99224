"""Which workers are called slow, from the times of each; trainings are in `tests/workers/stragglers_test.py`."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from looplib.actions import stragglers
from looplib.actions.stragglers import WorkerTimes, find_stragglers
from looplib.base.decoding import decode
from looplib.report.clock import Clock
from looplib.run.report import StartEntry, strict_json
from looplib.task.actions import Event


def in_step(needed, latency):
    """The times of workers that train 10 steps in step: each step takes what the slowest needs, and the network."""
    total = 10 * (max(own + data for own, data in needed) + latency)
    return [WorkerTimes(total, 10 * own, 10 * data) for own, data in needed]


@settings(max_examples=50, deadline=None)
@given(count=st.integers(2, 9), slow=st.integers(0, 8), data=st.booleans(), more=st.floats(0.0, 0.5))
def test_of_workers_that_are_alike_but_for_one_that_one_is_named(count, slow, data, more):
    slow %= count
    needed = [(0.01, 0.001)] * count
    needed[slow] = (0.01, 0.001 + more) if data else (0.01 + more, 0.001)
    found = find_stragglers(in_step(needed, 0.002), 10, 70)
    share = more / (0.013 + more)  # of a step, in which the others wait
    if abs(share - 0.2) < 1e-6:
        return
    assert [one.worker for one in found] == [slow] * (share > 0.2)
    for one in found:
        assert one.share == pytest.approx(share, abs=1e-4) and one.cause == ("data" if data else "step")
        assert one.seconds == pytest.approx(0.011 + more, abs=1e-6) and one.others == pytest.approx(0.011)


def test_half_of_the_workers_may_be_slow():
    needed = [(0.01, 0.0), (0.03, 0.0), (0.01, 0.0), (0.01, 0.02)]
    found = find_stragglers(in_step(needed, 0.0), 10, 10)
    assert [(one.worker, one.cause) for one in found] == [(1, "step"), (3, "data")]


class Reports:
    """A controller of two workers, the chief's side, whose times the test gives; it keeps what is noted."""

    is_chief = True

    def __init__(self):
        self.clock = Clock(now=lambda: 0.0)
        self.report = self
        self.notes, self.gathers, self.other = [], 0, (0.0, 0.0, 0.0)

    def gather(self, row):
        self.gathers += 1
        return np.array([row, self.other])

    def note(self, what):
        self.notes.append(what)

    def write(self, status):
        assert status == "running"


def run(action, reports, step, seconds, waits):
    """Trains to a step; the steps took the chief so many seconds, of which it waited for its data a part."""
    reports.clock.add("train", seconds * (1 - waits))
    reports.clock.add("input", seconds * waits)
    reports.other = (seconds, 0.0, 0.01 * seconds)
    action(Event(step, "train", {}, reports))


def test_a_worker_is_named_at_the_second_time_and_once_and_when_it_is_over():
    action, reports = stragglers.Stragglers(tf.distribute.get_strategy()), Reports()
    action.on_start(reports)
    action(Event(10, "train", {}, reports))
    for step, waits in ((110, 0.5), (210, 0.0), (310, 0.5), (410, 0.5), (510, 0.5), (610, 0.9), (710, 0.0), (810, 0.0)):
        run(action, reports, step, 100.0, waits)
    assert [(one.step, one.worker, round(one.share, 2)) for one in reports.notes] == [
        (410, 0, 0.49),
        (610, 0, 0.89),
        (810, 0, 0.0),
    ]
    assert StartEntry(stragglers=reports.notes[:2]).slow_workers[0].share == pytest.approx(0.89)
    assert StartEntry(stragglers=reports.notes).slow_workers == []


def test_workers_compare_after_times_that_double_and_not_at_each_report():
    action, reports, steps = stragglers.Stragglers(tf.distribute.get_strategy()), Reports(), []
    for step in range(0, 60_000, 10):  # a step takes 10 ms
        before = reports.gathers
        run(action, reports, step, 0.1, 0.0)
        steps += [step] * (reports.gathers - before)
    assert len(steps) < 18
    pauses = np.diff(steps[-4:])
    assert all(6000 <= pause <= 6020 for pause in pauses), steps  # a minute


def test_after_a_rollback_the_times_count_from_there():
    action, reports = stragglers.Stragglers(tf.distribute.get_strategy()), Reports()
    action(Event(10, "train", {}, reports))
    run(action, reports, 110, 100.0, 0.5)
    run(action, reports, 60, 100.0, 0.5)  # back
    run(action, reports, 160, 100.0, 0.5)
    assert [one.step for one in reports.notes] == [160]


@pytest.mark.parametrize(
    "foreign",
    [[{"worker": -1, "step": 1, "share": 0.5, "seconds": 1, "others": 1}],
     [{"worker": 1, "step": 1, "share": 7, "seconds": 1, "others": 1}]],
)  # fmt: skip
def test_foreign_values_are_no_stragglers(foreign):
    assert decode(StartEntry, {"stragglers": foreign}, strict=False).slow_workers == []


def test_what_is_noted_reads_back_equal():
    (one,) = find_stragglers(in_step([(0.01, 0.0), (0.01, 0.05)], 0.0), 10, 10)
    assert decode(StartEntry, strict_json(StartEntry(stragglers=[one])), strict=False).slow_workers == [one]
    assert str(one) == (
        "worker 1 is slower than the others, which wait for it 83% of the time: it waits for its data "
        "(60 ms a step, the others 10 ms)"
    )
