"""Seconds by phase, which never overlap and add up to the wall time."""

import contextlib
from time import sleep

import pytest
import toy
from conftest import make_strategy

import looplib
from looplib.report.clock import Clock
from looplib.report.run_report import memory_growth
from looplib.run import commits
from looplib.run.report import Point


class Time:
    """A time that passes on demand."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_inner_phases_do_not_count_for_outer_ones():
    time = Time()
    clock = Clock(now=time)
    time.now += 1
    with clock.phase("train"):
        time.now += 2
        with clock.phase("save"):
            time.now += 4
        time.now += 8
        assert clock.of("train") == 10
    with clock.phase("train"):
        time.now += 16
    time.now += 32
    assert clock.seconds() == {"other": 33, "save": 4, "train": 26, "wall": 63}


def test_a_job_that_does_not_train_gets_no_advice_for_trainings():
    for phase, words in (
        ("evaluate", "evaluation-bound: 90% of"),
        ("compile", "start-bound: "),
        ("other", "overhead-bound: "),
    ):
        verdicts = {}
        for trains in (False, True):
            clock = Clock(now=(time := Time()))
            with clock.phase(phase):
                time.now += 90
            with clock.phase("train") if trains else contextlib.nullcontext():
                time.now += 10
            verdicts[trains] = clock.summary()[1]
        assert verdicts[True].startswith(words) and "; " in verdicts[True]
        assert verdicts[False].startswith(words[:-8]) and ";" not in verdicts[False]


def test_a_phase_that_raises_is_closed():
    time = Time()
    clock = Clock(now=time)
    try:
        with clock.phase("train"):
            time.now += 1
            raise RuntimeError
    except RuntimeError:
        pass
    time.now += 2
    assert clock.seconds() == {"other": 2, "train": 1, "wall": 3}


def verdict_of_saves(forced, others):
    """The verdict of a run that saves for so many seconds before evaluations, and otherwise, and trains for 10."""
    time = Time()
    clock = Clock(now=time)
    with clock.phase("train"):
        time.now += 10
        for seconds, around in ((forced, clock.saving_for_an_evaluation()), (others, contextlib.nullcontext())):
            with around, clock.phase("save"):
                time.now += seconds
    return clock.summary()[1]


def test_saves_that_evaluations_ask_for_are_distinguished_from_those_of_the_interval():
    start = "overhead-bound: 91% of the time is overhead, most of it save; "
    assert verdict_of_saves(forced=80, others=20).startswith(
        start + "evaluate less often, because each evaluation saves first"
    )
    assert verdict_of_saves(forced=20, others=80) == start + "save less often"


def test_where_training_waits_for_its_input_the_slowest_stage_is_in_the_verdict():
    time = Time()
    clock = Clock(now=time)
    for phase, seconds in (("train", 1), ("input", 3)):
        with clock.phase(phase):
            time.now += seconds
    start = "input-bound: training waits for its data 75% of the time"
    assert clock.waits_for_input and clock.summary()[1].startswith(f"{start}; try map")
    clock.of_input = lambda: ("most of it is read", "read less")
    assert clock.summary()[1] == f"{start}, and most of it is read; read less"


def verdict(unit=10, **phases):
    """The verdict of a run whose phases took so many units of seconds, in one call each."""
    time = Time()
    clock = Clock(now=time)
    for phase, count in phases.items():
        with clock.phase(phase):
            time.now += unit * count
    return clock.summary()[1]


def test_a_run_of_seconds_has_a_verdict_only_on_what_it_has_done_for_long_enough():
    for phases in (
        {"start": 5, "compile": 1, "train": 3, "save": 1},
        {"save": 9, "train": 5},
        {"train": 2},
        {"start": 30, "train": 12},
        {"start": 8, "evaluate": 2},
        {"start": 2, "train": 0.1, "input": 0.3},
    ):
        assert verdict(unit=1, **phases) == ""
    assert verdict(unit=1, start=8, train=12).startswith("compute-bound: the device computes 60% of the time")
    assert verdict(unit=1, start=8, evaluate=9, train=2).startswith("evaluation-bound: 47% of the time")
    assert verdict(unit=1, start=5, train=1, input=3).startswith("input-bound: training waits for its data 75% of the")


def test_a_run_is_told_that_its_start_took_its_time():
    start = "start-bound: start-up took 60% of the time (start 50%, compile 10%)"
    assert verdict(start=5, compile=1, restore=0.05, train=3, save=0.95) == f"{start}; train more steps per start"
    waits = f"{start}, and the training itself waits for its data 75% of its time (input-bound); train more steps per "
    assert verdict(start=5, compile=1, train=0.95, input=2.85, save=0.2).startswith(f"{waits}start, and try map(")
    assert verdict(start=5, compile=1, train=7).startswith("compute-bound: the device computes 54% ")
    assert verdict(start=2, compile=1, train=1, save=6).startswith("overhead-bound: ")
    assert verdict(compile=4.5, train=4.6, save=0.9).endswith("most of it compile; train more steps per start")
    assert verdict(start=2, compile=1, train=1, evaluate=4).startswith("evaluation-bound: ")


@pytest.mark.slow
@pytest.mark.alone
def test_a_run_that_evaluates_often_and_saves_seldom_is_advised_to_evaluate_less_often(tmp_path, monkeypatch):
    commit = commits.commit
    monkeypatch.setattr(commits, "commit", lambda *args: (sleep(0.3), commit(*args))[1])  # a slow disk
    trainer, evaluator = toy.build(make_strategy("default"))
    policy = looplib.CheckpointPolicy(every_steps=1000)
    monkeypatch.setattr("looplib.report.clock._SHORT_RUN", 0)
    clocked = toy.controller(make_strategy("default"), trainer, evaluator, model_dir=tmp_path, checkpoints=policy)
    with clocked as controller:
        controller.train_and_evaluate(24, eval_interval=2)
        assert "most of it save; evaluate less often" in controller.clock.summary()[1]


@pytest.mark.parametrize(
    ("sizes", "warns"),
    [
        ([1000 + 40 * number for number in range(40)], True),
        ([1000 + 40 * min(number, 8) for number in range(40)], False),  # a buffer that fills at the start
        ([1000 + 4 * number for number in range(40)], False),
        ([1000] * 30 + [2600] * 10, False),  # at once, as by an evaluation
        ([1000 + 40 * number for number in range(10)], False),
    ],
)
def test_memory_that_grows_steadily_is_a_warning_with_the_rate(sizes, warns):
    points = [Point(10 * place, size * 10**6, None, {"train": 1.0 * place}) for place, size in enumerate(sizes)]
    found = memory_growth(points)
    assert (found is not None) == warns
    if found:
        assert "from 1.4 GB at step 100 to 2.56 GB at step 390: 4 GB in 1,000 steps, 144 GB an hour" in found.text
