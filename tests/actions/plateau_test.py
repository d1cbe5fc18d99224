"""Actions that watch a metric, and the hooks of actions."""

import json
import os
import pathlib
import signal
import subprocess

import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy, more
from paths import PYTHONPATH

import looplib
from looplib.commands.compare import compare
from looplib.errors import ActionError
from looplib.report.page.content import read_run
from looplib.report.page.verdict import findings
from looplib.run.status import read_status

ROOT = pathlib.Path(__file__).parents[2]
UsageError = looplib.UsageError


class Scripted(looplib.Evaluator):
    """Reports a given value for each step as its score and its loss."""

    def __init__(self, model, values):
        self.model = model
        self.values = np.float64(values)

    def dataset(self, context):
        return context.indices(1)

    def step_fn(self, inputs):
        value = tf.gather(tf.constant(self.values), self.global_step)
        return {"score": looplib.last(value), "loss": looplib.last(value), "unclear": looplib.last(value)}


def build(values, actions, strategy=None, keras=keras3, optimizer="adam", keep=None, **settings):
    """A controller that evaluates to values[step]."""
    strategy = strategy or make_strategy("default")
    with strategy.scope():
        trainer = toy.Regression(keras, optimizer)
    keep = keep or (looplib.KeepLast(2),)
    policy = looplib.CheckpointPolicy(keep=keep)
    evaluator = Scripted(trainer.model, values)
    return toy.controller(strategy, trainer, evaluator, actions=actions, checkpoints=policy, **settings)


def rate_of(trainer):
    return float(np.asarray(trainer.optimizer.get_config()["learning_rate"]))


def sequences(count):
    """Values with plateaus, equal values, small changes and NaN."""
    random = np.random.RandomState(7)
    for _ in range(count):
        values = np.round(np.cumsum(random.choice([-1, -0.25, 0, 0, 0.25, 0.5], 24)), 2) + 9
        values[random.rand(24) < 0.1] = np.nan
        values[1] = 9  # the first step; Keras stops improving for good if the first value is NaN
        yield values


CASES = [dict(patience=1), dict(patience=3, mode="max"), dict(patience=2, min_change=0.3)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_early_stopping_stops_where_that_of_keras_does(case):
    stopped = set()
    for values in sequences(3):
        mode = case.get("mode", "min")
        theirs = keras3.callbacks.EarlyStopping("loss", case.get("min_change", 0), case["patience"], mode=mode)
        theirs.set_model(keras3.Sequential([keras3.Input((1,)), keras3.layers.Dense(1)]))
        theirs.on_train_begin()
        theirs.model.stop_training = False
        expected = 0
        while expected < 23 and not theirs.model.stop_training:
            expected += 1
            theirs.on_epoch_end(expected, {"loss": values[expected]})
        controller = build(values, [looplib.EarlyStopping("eval/loss", **case)])
        controller.train_and_evaluate(23, 1)
        assert controller.global_step == expected
        stopped.add(expected)
    assert min(stopped) < 23


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, dict(patience=1, cooldown=2), dict(patience=2, min_rate=0.002)], ids=str)
def test_the_rate_on_a_plateau_is_that_of_keras(case):
    lowest = set()
    for values in sequences(2):
        mode = case.get("mode", "min")
        cooldown = case.get("cooldown", -1) + 1  # Keras counts a report more than it leaves out
        theirs = keras3.callbacks.ReduceLROnPlateau(
            "loss", 0.5, case["patience"], mode=mode, min_delta=case.get("min_change", 0), cooldown=cooldown,
            min_lr=case.get("min_rate", 0),
        )  # fmt: skip
        model = keras3.Sequential([keras3.Input((1,)), keras3.layers.Dense(1)])
        model.compile(keras3.optimizers.Adam(0.05))
        theirs.set_model(model)
        theirs.on_train_begin()
        expected, found = [], []
        action = looplib.ReduceOnPlateau("eval/loss", factor=0.5, **case)
        note = lambda event: event.split == "eval" and found.append(rate_of(controller.loops["train"].task))
        controller = build(values, [action, note])
        controller.train_and_evaluate(23, 1)
        for step in range(1, 24):
            theirs.on_epoch_end(step, {"loss": values[step]})
            expected.append(float(model.optimizer.learning_rate))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        lowest.add(found[-1])
    assert min(lowest) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default", "mirrored_x2", *more(["one_device", "mirrored_x4"])])
def test_the_step_computes_with_the_reduced_rate_on_every_strategy(name):
    """As a training whose program sets the rate at the same steps."""
    values = [9, 5, 6, 7, 8, 9, 9, 9]
    strategy = make_strategy(name)
    with strategy.scope():
        plain = toy.Regression(optimizer="adam")
    with toy.controller(strategy, plain) as controller:
        controller.train(2)
        for step, rate in ((4, 0.05 * 0.1), (6, 0.05 * 0.01)):  # 5 at step 1; two without a better one are 2, 3
            controller.train(step - 1)
            plain.optimizer.learning_rate = rate
            controller.train(step)
    reduced = build(values, [looplib.ReduceOnPlateau("eval/loss", patience=2)], strategy)
    reduced.train_and_evaluate(6, 1)
    for a, b in zip(reduced.loops["train"].task.weights(), plain.weights()):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.slow
def test_a_new_rate_of_the_program_wins_at_a_restart_and_is_reduced_further(tmp_path, keras):
    def start(rate, steps):
        trainer = toy.Regression(keras, "adam")
        trainer.optimizer.learning_rate = rate
        evaluator = Scripted(trainer.model, [9, 1, 2, 3, 4, 5, 6, 7, 8, 9])
        action = looplib.ReduceOnPlateau("eval/loss", factor=0.5, patience=2)
        with toy.controller(make_strategy("default"), trainer, evaluator, model_dir=tmp_path, actions=[action]) as job:
            job.train_and_evaluate(steps, 1)
        return rate_of(trainer)

    assert start(0.08, 3) == pytest.approx(0.04)  # reduced after step 3, which the checkpoint of step 3 does not know
    assert start(0.08, 4) == pytest.approx(0.04)  # reduced again, as the evaluation of step 3 is repeated
    assert start(0.08, 4) == pytest.approx(0.04)
    assert start(0.01, 4) == pytest.approx(0.01)
    assert start(0.01, 6) == pytest.approx(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default", "mirrored_x2", *more(["one_device", "mirrored_x4"])])
def test_early_stopping_restores_the_best_state_and_repeats_nothing_wrongly(name, tmp_path):
    """The best value is that of step 3; the weights are those of a training of three steps."""
    strategy = make_strategy(name)
    with strategy.scope():
        plain = toy.Regression(optimizer="adam")
    with toy.controller(strategy, plain) as controller:
        controller.train(3)
    stop = looplib.EarlyStopping("eval/loss", patience=4, restore_best=True)
    values = [9, 8, 7, 3, 5, 6, 4, 9, 9, 9]
    with build(values, [stop], strategy, model_dir=tmp_path) as controller:
        result = controller.train_and_evaluate(9, 1)
        assert controller.global_step == 3 and result["eval"]["loss"] == 3
        for a, b in zip(controller.loops["train"].task.weights(), plain.weights()):
            np.testing.assert_array_equal(a, b)
        assert controller.latest_checkpoint.endswith("ckpt-7")
        run = json.loads((tmp_path / "run.json").read_text())
        assert [run[key] for key in ("status", "step", "final_step", "saved_step")] == ["done", 7, 3, 7]
        assert run["metrics"]["eval"]["loss"] == 3
    before = (tmp_path / "metrics.jsonl").read_bytes() if (tmp_path / "metrics.jsonl").exists() else b""
    stop = looplib.EarlyStopping("eval/loss", patience=4, restore_best=True)
    with build(values, [stop], strategy, model_dir=tmp_path) as controller:  # stops again where it had stopped
        controller.train_and_evaluate(9, 1)
        assert controller.global_step == 3 and controller.latest_checkpoint.endswith("ckpt-7")
    assert before == ((tmp_path / "metrics.jsonl").read_bytes() if before else b"")
    patient = looplib.EarlyStopping("eval/loss", patience=6)
    with build(values, [patient], strategy, model_dir=tmp_path) as controller:  # raised, it trains on from step 7
        controller.train_and_evaluate(9, 1)
        assert controller.global_step == 9


def test_a_training_metric_stops_too_and_an_unfinished_restart_does_not_train_on(tmp_path):
    def start():
        stop = looplib.EarlyStopping("train/loss", patience=2, min_change=100.0)
        with build([0] * 9, [stop], model_dir=tmp_path, steps_per_loop=2) as controller:
            controller.train(8)
            return controller.global_step

    assert [start(), start()] == [6, 6]


@pytest.mark.parametrize("values", [[np.nan] * 9, [9, 5, np.nan, np.inf, 7, 8]], ids=["never finite", "no more"])
def test_why_early_stopping_has_ended_a_run_is_logged_and_stays_with_the_run(values, tmp_path, caplog):
    stop = looplib.EarlyStopping("eval/loss", patience=2)
    with build(values, [stop], model_dir=tmp_path) as controller:
        controller.train_and_evaluate(8, 1)
        end = controller.global_step
    at_best = "eval/loss was best at step 1 (5)" if values[1] == 5 else "eval/loss has had no finite value"
    why = f"early stopping at step {end}: {at_best}, and is {values[end]} now"
    assert [one.message for one in caplog.records if one.levelname == "WARNING"] == [why]
    assert read_status(str(tmp_path)).detail == why
    assert any(one.text == f"E{why[1:]}." for one in findings(read_run(str(tmp_path), "run")))
    with build(values, [looplib.EarlyStopping("eval/loss", patience=4)], model_dir=tmp_path) as controller:
        controller.train_and_evaluate(end + 1, 1)
    assert read_status(str(tmp_path)).detail == ""


@pytest.mark.slow
def test_an_evaluation_by_hand_does_not_count(tmp_path):
    stop = looplib.EarlyStopping("eval/loss", patience=2)
    controller = build([5] * 9, [stop])
    controller.train_and_evaluate(2, 1)
    controller.evaluate()
    controller.evaluate()
    assert stop.state() == [5.0, 1, 2, 1]


# A process that kills itself at given events, and is started again until it is done.
PROGRAM = """
import os, signal, sys
import numpy as np
import looplib, toy
from actions import plateau_test
from looplib import launch

values = [9, 8, 7, 7, 7, 6, 6, 6, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5]

class Kill(looplib.Action):  # counts in a file, because a killed process forgets
    def __call__(self, event):
        name = f"{event.split}-{event.step}"
        mark = os.path.join(os.environ["MARKS"], name)
        if name in os.environ["KILLS"].split() and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    state = lambda self: 0
    load = lambda self, state: None

def build(config):
    trainer = toy.Regression(optimizer="adam")
    return trainer, plateau_test.Scripted(trainer.model, values)

before = [Kill()] if os.environ["SIDE"] == "before" else []
actions = [*before, looplib.ReduceOnPlateau("eval/loss", 0.5, patience=1, cooldown=1),
           looplib.ReduceOnPlateau("train/loss", 0.9, patience=1, min_change=0.05),
           looplib.EarlyStopping("eval/loss", patience=5), *([] if before else [Kill()])]
launch.run(build, global_batch_size=8, steps_per_loop=2, eval_interval=1, checkpoint_interval=3, train_steps=20,
           keep_best="eval/loss", loop="eager", actions=actions)
"""


@pytest.mark.slow
@pytest.mark.parametrize("side", ["before", *more(["after"])])
def test_a_run_killed_at_any_event_stops_and_reduces_as_one_that_was_not(side, python, tmp_path):
    def run(name, kills):
        (tmp_path / f"marks-{name}").mkdir()
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "KILLS": kills, "SIDE": side}
        environment["MARKS"] = str(tmp_path / f"marks-{name}")
        command = [python, "-c", PROGRAM, f"--model_dir={tmp_path / name}"]
        killed = 0
        while True:
            life = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
            if life.returncode != -signal.SIGKILL and life.returncode != 128 + signal.SIGKILL:
                assert life.returncode == 0, life.stderr
                return killed, json.loads((tmp_path / name / "run.json").read_text())
            killed += 1

    killed, whole = run("whole", "")
    assert killed == 0 and whole["step"] == 13  # 5 comes at step 8, and five evaluations bring no more
    killed, parts = run("parts", "eval-4 train-4 eval-7 train-8 eval-13")
    assert killed == 5 and parts["step"] == 13
    assert not compare(tmp_path / "whole", tmp_path / "parts").differences


BAD = {
    "no mode": (lambda: looplib.EarlyStopping("eval/unclear"), "without a mode"),
    "no split": (lambda: looplib.ReduceOnPlateau("loss"), "EarlyStopping|ReduceOnPlateau got the metric 'loss'"),
    "patience": (lambda: looplib.EarlyStopping("eval/loss", patience=0), "patience is 0; expected a whole number of at"),
    "change": (lambda: looplib.EarlyStopping("eval/loss", min_change=-1), "min_change is -1; expected a number of at"),
    "factor": (lambda: looplib.ReduceOnPlateau("eval/loss", factor=2), "factor is 2; expected a number between 0 and 1"),
    "no number": (lambda: looplib.ReduceOnPlateau("eval/loss", min_rate="x"), "min_rate is 'x'; expected a number"),
}  # fmt: skip


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_sentences(case):
    make, sentence = BAD[case]
    with pytest.raises(UsageError, match=sentence):
        make()


@pytest.mark.slow
def test_what_cannot_work_is_a_sentence_before_the_first_step(tmp_path):
    def refused(sentence, action, **settings):
        controller = build([1] * 9, [action], **settings)
        with pytest.raises(UsageError, match=sentence):
            controller.train_and_evaluate(4, 2)
        assert controller.global_step == 0
        controller.close()

    refused(r"expected a metric of eval or train", looplib.EarlyStopping("test/loss"))
    refused(r"expected one of eval/examples, eval/loss, eval/score", looplib.EarlyStopping("eval/error"))
    best = looplib.EarlyStopping("eval/loss", restore_best=True)
    refused(r"give Controller\(model_dir=\.\.\.\)", best)
    keep = (looplib.KeepBest("eval/score", "max"),)
    refused("the best of the run, which is that by max:eval/score", best, keep=keep, model_dir=tmp_path)
    trainer = toy.Regression()
    trainer.optimizer = keras3.optimizers.SGD(keras3.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9))
    controller = toy.controller(
        make_strategy("default"), trainer, actions=[looplib.ReduceOnPlateau("train/loss", patience=1)]
    )
    with pytest.raises(ActionError, match="SGD"):
        controller.train(2)


# Hooks.


class Noting(looplib.Action):
    """Notes which hooks were called."""

    def __init__(self, fail=""):
        self.calls, self._fail = [], fail

    def _note(self, *what):
        self.calls.append(what)
        if what[0] == self._fail:
            raise ValueError(f"the hook {self._fail} fails")

    def __call__(self, event):
        self._note("event", event.split, event.step)

    def state(self):
        return None

    def load(self, state):
        pass

    def on_start(self, controller):
        self._note("start", controller.global_step)

    def on_save(self, path, controller):
        assert tf.io.gfile.exists(path + ".commit")
        self._note("save", int(path.rsplit("-")[-1]))

    def on_exception(self, error, controller):
        self._note("exception", type(error).__name__)

    def on_end(self, controller):
        self._note("end", controller.global_step)

    def of(self, *kinds):
        return [call for call in self.calls if call[0] in kinds]


def noted(tmp_path, action, *others, **settings):
    policy = looplib.CheckpointPolicy(every_steps=2)
    trainer = toy.Regression()
    strategy = make_strategy("default")
    return toy.controller(
        strategy, trainer, model_dir=tmp_path, checkpoints=policy, actions=[action, *others], **settings
    )


@pytest.mark.slow
def test_hooks_are_called_at_the_start_after_each_save_and_at_the_end(tmp_path):
    action = Noting()
    with noted(tmp_path, action) as controller:
        controller.train(5)
        assert action.calls[0] == ("start", 0) and action.calls[-1] == ("end", 5)
        assert action.of("save") == [("save", 2), ("save", 4), ("save", 5)]
        controller.loops["train"].task.model.layers[-1].kernel.assign(toy.KERNEL)
        controller.save_checkpoint()
        assert action.calls[-1] == ("save", 5)
        controller.train(6)
        assert action.of("start") == [("start", 0), ("start", 5)] and not action.of("exception")


@pytest.mark.slow
@pytest.mark.parametrize("fail", ["", "exception"])
def test_the_hook_on_an_exception_gets_what_ended_the_training_after_the_saves(fail, tmp_path):
    def stop_at_4(event):
        if event.step == 4:
            raise RuntimeError("the roof is leaking")

    action = Noting(fail)
    with noted(tmp_path, action, stop_at_4) as controller:
        with pytest.raises(RuntimeError, match="the roof is leaking"):
            controller.train(6)
    assert action.calls[-1] == ("exception", "RuntimeError")
    assert action.of("save") == [("save", 2)] and not action.of("end")


def test_the_hook_on_an_exception_gets_a_signal_after_its_save(tmp_path):
    action = Noting()

    def interrupt(event):
        if event.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with noted(tmp_path, action, interrupt) as controller:
        with pytest.raises(looplib.Preempted):
            controller.train(50)
        done = controller.global_step
    assert action.calls[-2:] == [("save", done), ("exception", "Preempted")]


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("hook", ["start", "save", "end"])
def test_a_hook_that_raises_ends_the_training(hook, tmp_path):
    with noted(tmp_path, Noting(hook)) as controller:
        with pytest.raises(ValueError, match=f"the hook {hook} fails"):
            controller.train(6)
