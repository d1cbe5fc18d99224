"""The schedule: every multiple of every interval, every stop, and the end, once each and in order."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from looplib.loop.contracts import Boundary, Schedule

INTERVALS = st.integers(1, 12) | st.just(100)
SCHEDULES = st.builds(
    Schedule, INTERVALS, INTERVALS, st.dictionaries(st.sampled_from("ab"), INTERVALS), st.none() | st.integers(0, 50),
    st.lists(st.integers(0, 60), max_size=3).map(tuple),
)  # fmt: skip


def step_by_step(schedule, start, last):
    """Returns what a loop over single steps finds due after one step and up to another."""
    for step in range(start + 1, last + 1):
        report, save = step % schedule.report_every == 0, step % schedule.save_every == 0
        end = step == schedule.end
        due = () if end else tuple(name for name, every in schedule.evaluate_every.items() if step % every == 0)
        if report or save or due or end or step in schedule.stops:
            yield Boundary(step, report, save, due, end)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(SCHEDULES, st.integers(0, 60))
def test_what_is_due_is_what_a_loop_over_single_steps_finds_from_wherever_it_is_entered(schedule, start):
    last = start + 250 if schedule.end is None else schedule.end
    found = [*itertools.takewhile(lambda boundary: boundary.step <= last, schedule.boundaries(start))]
    assert found == [*step_by_step(schedule, start, last)]
    every, end = schedule.evaluate_every, schedule.end
    due = {step: tuple(name for name in every if step % every[name] == 0 and step != end) for step in range(1, 400)}
    on_the_way = [step for step in due if due[step]]
    assert schedule.evaluators_at(start) == due.get(start, ())
    if end is None:
        assert schedule.next_evaluation(start) == min((step for step in on_the_way if step > start), default=None)
    elif start <= end:  # at the end comes the last one
        later = [step for step in (*on_the_way, end) if every and start < step <= end]
        assert schedule.next_evaluation(start) == min(later, default=None)
    for boundary in found:
        assert schedule.horizon(boundary) == (boundary.step if end is None else end)
