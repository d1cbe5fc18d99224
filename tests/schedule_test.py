"""The schedule: every multiple of every interval, and the end, once each and in order."""

import itertools

import pytest

from looplib.loop.schedule import Boundary, Schedule

INTERVALS = (1, 3, 4, 100)


def step_by_step(schedule, start, end):
    """What a loop over single steps finds due between two steps."""
    for step in range(start + 1, end + 1):
        report = step % schedule.report_every == 0
        save = step % schedule.save_every == 0
        evaluate = schedule.evaluate_every is not None and step % schedule.evaluate_every == 0
        last = step == schedule.end
        if report or save or evaluate or last:
            yield Boundary(step, report, save, evaluate and not last, last)


@pytest.mark.parametrize("evaluate_every", (None, *INTERVALS))
def test_boundaries_are_what_a_loop_over_single_steps_finds_due(evaluate_every):
    for report_every, save_every in itertools.product(INTERVALS, repeat=2):
        for start, end in itertools.product((0, 1, 4, 11, 12), (1, 4, 12, 13, 101)):
            schedule = Schedule(report_every, save_every, evaluate_every, end)
            assert [*schedule.boundaries(start)] == [*step_by_step(schedule, start, end)]


def test_without_an_end_boundaries_never_stop():
    schedule = Schedule(4, 10, 7)
    found = [*itertools.islice(schedule.boundaries(3), 200)]
    assert found == [*step_by_step(schedule, 3, found[-1].step)]
    assert not any(boundary.end for boundary in found)


@pytest.mark.parametrize("start", (12, 13))
def test_nothing_is_due_at_or_past_the_end(start):
    assert [*Schedule(4, 10, 7, 12).boundaries(start)] == []


def test_a_schedule_gives_the_same_boundaries_from_wherever_it_is_entered():
    whole = [*Schedule(4, 10, 7, 45).boundaries(0)]
    for start in range(45):
        assert [*Schedule(4, 10, 7, 45).boundaries(start)] == [b for b in whole if b.step > start]


def test_an_evaluation_is_missing_at_a_multiple_on_the_way_only():
    schedule = Schedule(4, 10, 7, 21)
    assert [step for step in range(30) if schedule.evaluates_at(step)] == [7, 14, 28]
    assert not any(Schedule(4, 10, None, 21).evaluates_at(step) for step in range(30))


def test_the_horizon_is_the_end_where_it_is_known():
    for end, horizon in ((45, 45), (None, 4)):
        schedule = Schedule(4, 10, 7, end)
        assert schedule.horizon(next(schedule.boundaries(0))) == horizon
