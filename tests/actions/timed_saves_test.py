"""`TimedSaves`: saves by time or by cost, alike on all workers, and a resume from them is exact."""

import json
import os

import numpy as np
import pytest
import toy
from conftest import make_strategy, more

import looplib
from looplib.actions.timed_saves import Timed
from looplib.binary.flag_groups import TimedSavesFlags
from looplib.errors import ActionError, FlagError, MissingPartError, SettingError

RARELY = looplib.CheckpointPolicy(every_steps=10**9, keep=looplib.KeepLast(1000))


class Time:
    """A clock that an action moves on by some seconds at each report."""

    def __init__(self, seconds):
        self.now, self._seconds = 100.0, seconds

    def __call__(self):
        return self.now

    def pass_on(self, event):
        self.now += self._seconds


def saved_steps(folder):
    return sorted(int(name[5:-7]) for name in os.listdir(folder / "checkpoints") if name.endswith(".commit"))


def train(folder, steps, saves, time, **settings):
    with toy.controller(
        make_strategy("default"), toy.Regression(), model_dir=folder, steps_per_loop=2, checkpoints=RARELY,
        actions=[time.pass_on, saves], **settings,
    ) as controller:  # fmt: skip
        controller.train(steps)
        return controller.clock.seconds()


@pytest.mark.slow
def test_it_saves_at_the_first_report_after_each_interval(tmp_path):
    time = Time(seconds=4)  # for two steps: 4 s at step 2, 8 s at step 4, 12 s at step 6
    train(tmp_path, 25, looplib.TimedSaves(every=10, now=time), time)
    assert saved_steps(tmp_path) == [6, 12, 18, 24, 25]  # the end saves too


@pytest.mark.slow
def test_a_budget_measures_a_save_first_and_then_waits_as_long_as_it_allows(tmp_path):
    time = Time(seconds=1)
    saves = looplib.TimedSaves(budget=1e-9, now=time)
    train(tmp_path / "dear", 20, saves, time)
    assert saved_steps(tmp_path / "dear") == [2, 20]
    saves = looplib.TimedSaves(budget=0.999, now=time)
    seconds = train(tmp_path / "cheap", 20, saves, time)
    assert saved_steps(tmp_path / "cheap")[:2] == [2, 4] and len(saved_steps(tmp_path / "cheap")) > 5
    assert saves.interval >= 1 and seconds["save"] > 0


def test_the_interval_of_a_budget_is_the_stop_over_it_and_not_shorter_than_a_commit():
    assert [Timed(budget=share).seconds(2.0, 30.0) for share in (0.01, 0.1)] == pytest.approx([200.0, 30.0])


@pytest.mark.slow
def test_a_save_for_another_reason_counts(tmp_path):
    time = Time(seconds=4)
    policy = looplib.CheckpointPolicy(every_steps=8, keep=looplib.KeepLast(1000), in_background=False)
    with toy.controller(
        make_strategy("default"), toy.Regression(), model_dir=tmp_path, steps_per_loop=2, checkpoints=policy,
        actions=[time.pass_on, looplib.TimedSaves(every=20, now=time)],
    ) as controller:  # fmt: skip
        controller.train(24)
    assert saved_steps(tmp_path) == [8, 16, 24]  # 16 s apart, each of which puts the next one off


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mirrored_x2", *more(["default"])])
def test_a_resume_from_a_timed_save_is_bit_equal(name, tmp_path):
    class Stop(Exception):
        pass

    def stop(event):
        if event.step == 14:
            raise Stop

    def run(folder, actions):
        with make_strategy(name).scope():
            trainer = toy.Regression()
        with toy.controller(
            make_strategy(name), trainer, model_dir=folder, steps_per_loop=2, checkpoints=RARELY, actions=actions
        ) as controller:
            controller.train(20)
            return controller.restored_from, trainer

    _, whole = run(tmp_path / "whole", [])
    time = Time(seconds=4)
    with pytest.raises(Stop):
        run(tmp_path / "run", [time.pass_on, looplib.TimedSaves(every=10, now=time), stop])
    restored, resumed = run(tmp_path / "run", [])
    assert restored.endswith("ckpt-12")
    for a, b in zip(whole.model.get_weights(), resumed.model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_two_workers_save_alike_although_their_clocks_differ_and_resume_exactly(nursery, tmp_path):
    flags = [
        "--train_steps=60",
        "--steps_per_loop=2",
        "--config.state_mb=0.01",
        "--checkpoint_interval=1000000",
        "--mode=train",
    ]
    runs = {}
    for name, more_flags in {"whole": [], "run": ["--checkpoint_every=0.2", "--config.slow_step=0.05"]}.items():
        lives = nursery.workers(2, tmp_path / name, *flags, *more_flags)
        if name == "run":
            while not os.path.isdir(tmp_path / name / "checkpoints") or len(saved_steps(tmp_path / name)) < 3:
                assert not lives[0].ended(0.05), lives[0].output()
            for life in lives:
                life.kill()
                life.code()
            lives = nursery.workers(2, tmp_path / name, *flags, *more_flags)
        assert [life.code() for life in lives] == [0, 0], lives[0].output()
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        runs[name] = {record["step"]: record["loss"] for record in map(json.loads, lines)}
    assert runs["run"] == runs["whole"] and len(runs["run"]) == 30


@pytest.mark.parametrize("arguments", [{}, {"every": 5, "budget": 0.1}, {"budget": 0}, {"budget": 1}, {"budget": "1%"}])
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ActionError, match="TimedSaves"):
        looplib.TimedSaves(**arguments)


def test_a_run_without_a_directory_is_refused():
    with pytest.raises(MissingPartError, match="TimedSaves needs a run directory"):
        with toy.controller(None, toy.Regression(), actions=[looplib.TimedSaves(every=5)]) as controller:
            controller.train(2)


def test_flags_are_read_or_refused():
    plugin, none = TimedSavesFlags(), {"checkpoint_every": None, "checkpoint_budget": None, "mode": "train"}
    assert plugin.actions(none) == ()
    assert plugin.actions({**none, "checkpoint_every": "1m30s"})[0].interval == 90
    (saves,) = plugin.actions({**none, "checkpoint_budget": "0.5%"})
    saves._stops.extend([2.0, 2.0, 60.0])
    assert saves.interval == pytest.approx(400)
    for wrong in ({"checkpoint_budget": "1"}, {"checkpoint_budget": "0%"}, {"checkpoint_budget": "100%"}):
        with pytest.raises(FlagError, match="--checkpoint_budget is"):
            plugin.check({**none, **wrong})
    with pytest.raises(SettingError, match="--checkpoint_every is"):
        plugin.check({**none, "checkpoint_every": "soon"})
    with pytest.raises(FlagError, match="one of them"):
        plugin.check({**none, "checkpoint_every": "5m", "checkpoint_budget": "1%"})
    with pytest.raises(FlagError, match="--mode=eval does not train"):
        plugin.check({**none, "checkpoint_every": "5m", "mode": "eval"})
