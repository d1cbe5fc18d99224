"""`LearningWarnings`: a warning once, in the log, `run.json` and the page; silent where all is well; changes no bit."""

import itertools
import json
import logging
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from conftest import make_strategy, more
from worthless import Network, NetworkEvaluator

import looplib
from looplib.binary.flag_groups import LearningWarningsFlag
from looplib.errors import ActionError, SettingError
from looplib.report.page.content import read_run
from looplib.report.page.verdict import findings
from looplib.run.records import read_jsonl

EVERY, END = 10, 160


def looking():
    return looplib.LearningWarnings(every=EVERY, share=1.0)


def train(strategy, keras, folder, steps=END, actions=None, **settings):
    """Trains, and returns the trainer."""
    strategy = make_strategy(strategy)
    with strategy.scope():
        keras.utils.set_random_seed(0)
        trainer = Network(keras, **settings)
        evaluator = NetworkEvaluator(trainer.model)
    config = looplib.RunConfig(global_batch_size=16, steps_per_loop=10, loop="graph")
    with looplib.Controller(
        config, trainer=trainer, evaluator=evaluator, strategy=strategy, model_dir=folder, writers=[],
        actions=[looking()] if actions is None else actions,
    ) as controller:  # fmt: skip
        controller.train_and_evaluate(steps, 40)
    return trainer


def warnings(folder):
    """The warnings of each start in `run.json`."""
    starts = json.loads((pathlib.Path(folder) / "run.json").read_text())["starts"]
    return [start.get("warnings", []) for start in starts]


DEAD = {("no change", "hidden/kernel"), ("no change", "head/kernel"), ("constant predictions", "eval")}
FAULTS = {
    "dead": ({"dead": True}, DEAD),
    "detached": ({"detached": True}, {("no change", "side/kernel"), ("no change", "side/bias")}),
    "dropout": ({"dropout": 0.2}, set()),
    "plain": ({}, set()),
    "frozen": ({"detached": True, "frozen": True}, set()),
}
FEW = [("dead", "mirrored_x2", "keras"), ("detached", "default", "keras"), ("dropout", "default", "keras")]
ALL = itertools.product(FAULTS, ("default", "mirrored_x2"), ("keras", "tf_keras"))


def test_a_controller_without_actions_warns_at_its_first_report(tmp_path):
    import keras

    config = looplib.RunConfig(global_batch_size=16, steps_per_loop=10)
    for folder, settings in (("default", {}), ("none", {"actions": []})):
        trainer = Network(keras, detached=True)
        with looplib.Controller(
            config, trainer=trainer, model_dir=tmp_path / folder, writers=[], **settings
        ) as controller:
            controller.train(10)
    ((found,),) = warnings(tmp_path / "default")
    assert (found["step"], found["subjects"]) == (10, ["side/kernel", "side/bias"])
    assert warnings(tmp_path / "none") == [[]]


@pytest.mark.parametrize(
    ("fault", "strategy", "family"), [*FEW[:1], *more(FEW[1:]), *more([one for one in ALL if one not in FEW])]
)
def test_faults_are_found_and_nothing_else(fault, strategy, family, tmp_path):
    keras = pytest.importorskip(family)
    settings, expected = FAULTS[fault]
    settings = dict(settings)
    if settings.pop("dead", False):
        settings["bias"] = keras.initializers.Constant(-100.0)
    train(strategy, keras, tmp_path, **settings)
    (found,) = warnings(tmp_path)
    assert {(one["kind"], subject) for one in found for subject in one["subjects"]} == expected
    assert all(0 <= one["since"] <= one["step"] <= END for one in found)


class Explodes(looplib.Action):
    """Makes a kernel large at a step."""

    def __call__(self, event):
        if event.split == "train" and event.step == 140:
            kernel = event.controller.loops["train"].task.model.get_layer("side").kernel
            kernel.assign(tf.fill([8, 4], 1000.0))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "family"), [("default", "keras"), *more([("mirrored_x2", "tf_keras")])])
def test_a_norm_that_explodes_is_found_with_its_history(strategy, family, tmp_path):
    keras = pytest.importorskip(family)
    train(strategy, keras, tmp_path, actions=[looking(), Explodes()])
    (found,) = warnings(tmp_path)
    assert [(one["kind"], one["subjects"], one["since"], one["step"]) for one in found] == [
        ("exploding norm", ["side/kernel"], 140, 150)
    ]


def test_a_warning_comes_once_over_restarts_in_the_log_run_json_and_the_page(tmp_path, caplog):
    import keras

    class Stopped(Exception):
        pass

    def stop(event):
        if event.step == 120 and event.split == "train":
            raise Stopped

    dead = keras.initializers.Constant(-100.0)
    with caplog.at_level(logging.WARNING):
        with pytest.raises(Stopped):
            train("default", keras, tmp_path, bias=dead, actions=[looking(), stop])
        train("default", keras, tmp_path, bias=dead)  # from the checkpoint of step 80
        train("default", keras, tmp_path, steps=END + 100, bias=dead)
    first, *later = warnings(tmp_path)
    assert {one["kind"] for one in first} == {"no change", "constant predictions"} and later == [[], []]
    assert caplog.text.count("have not changed by a single bit") == 1
    assert caplog.text.count("are equal for all") == 1
    run = read_run(str(tmp_path), "run")
    remarks = [remark for remark in findings(run) if remark.kind == "bad" and "single bit" in remark.text]
    assert remarks and remarks[0].advice.startswith("Look for a ReLU")
    assert [mark.kind for mark in run.marks].count("warning") == len(first)
    assert "not changed by a single bit" in (tmp_path / "report.html").read_text()


def state_of(folder, trainer):
    """All variables, and the reported metrics without times."""
    weights = [np.array(one) for one in [*trainer.model.variables, *trainer.optimizer.variables]]
    records = read_jsonl(str(folder / "metrics.jsonl")) if (folder / "metrics.jsonl").exists() else []
    return weights, [{k: v for k, v in one.items() if "per_second" not in k} for one in records]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mirrored_x2", *more(["default"])])
def test_no_bit_of_a_run_changes_nor_of_one_that_is_resumed(strategy, tmp_path):
    import keras

    def run(folder, steps, actions):
        stated = make_strategy(strategy)
        with stated.scope():
            keras.utils.set_random_seed(0)
            trainer = Network(keras, dropout=0.3)
            evaluator = NetworkEvaluator(trainer.model)
        config = looplib.RunConfig(global_batch_size=16, steps_per_loop=10, loop="graph")
        with looplib.Controller(
            config, trainer=trainer, evaluator=evaluator, strategy=stated, model_dir=folder, actions=actions
        ) as controller:
            controller.train_and_evaluate(steps, 40)
        return state_of(folder, trainer)

    plain_weights, plain_records = run(tmp_path / "plain", 120, [])
    run(tmp_path / "looked", 70, [looking()])
    weights, records = run(tmp_path / "looked", 120, [looking()])
    for one, other in zip(plain_weights, weights, strict=True):
        np.testing.assert_array_equal(one, other)
    last = {(one["split"], one["step"]): one for one in records}
    assert all(last[one["split"], one["step"]] == one for one in plain_records)


@pytest.mark.slow
def test_a_check_that_fails_ends_no_run(tmp_path, caplog):
    import keras

    class Broken(looplib.LearningWarnings):
        def _of_training(self, event):
            raise RuntimeError("planted")

    with caplog.at_level(logging.WARNING):
        train("default", keras, tmp_path, steps=40, actions=[Broken(share=1.0)])
    assert caplog.text.count("looks no further, because a check failed: planted") == 1


@pytest.mark.slow
def test_checks_stay_within_their_share(tmp_path):
    import keras

    action = looplib.LearningWarnings(every=1, share=1e-9)
    train("default", keras, tmp_path, steps=40, actions=[action])
    assert action.seconds < 1 and warnings(tmp_path) == [[]]  # a fifth of a second, and the check that passes it


def test_the_flag_is_on_by_default_and_a_trial_has_no_warnings():
    (flag,) = LearningWarningsFlag.flags
    assert flag.name == "learning_warnings" and flag.default is True
    values = {"learning_warnings": True, "dry_run": False, "estimate": False}
    assert [type(action) for action in LearningWarningsFlag().actions(values)] == [looplib.LearningWarnings]
    for other in ({"learning_warnings": False}, {"dry_run": True}, {"estimate": True}):
        assert not LearningWarningsFlag().actions(values | other)


@pytest.mark.slow
def test_the_warnings_of_a_program_come_in_place_of_those_of_the_flag_by_default(nursery, tmp_path):
    life = nursery.life_of("warned", f"--model_dir={tmp_path}/run", "--train_steps=4", "--steps_per_loop=2")
    assert life.code(120) == 0, life.output()
    life = nursery.life_of("warned", f"--model_dir={tmp_path}/asked", "--train_steps=4", "--learning_warnings")
    assert life.code(120) == 1 and "two actions are LearningWarnings()" in life.output()


def test_bad_settings_and_a_foreign_memory_are_refused():
    with pytest.raises(SettingError):
        looplib.LearningWarnings(every=0)
    for share in (0, 2, True, "much"):
        with pytest.raises(ActionError):
            looplib.LearningWarnings(share=share)
    for state in ({"known": "x", "norms": {}}, {"known": [1], "norms": {}}, {"known": [], "norms": []}):
        with pytest.raises(ValueError):
            looplib.LearningWarnings().load(state)


@pytest.mark.slow
def test_two_workers_train_to_the_end_though_the_chief_looks_at_reports_alone(nursery, tmp_path):
    lives = nursery.workers(2, tmp_path, "--config.worthless=True", "--loop=graph", binary="worthless")
    assert [life.code(300) for life in lives] == [0, 0], "".join(life.output() for life in lives)
    assert warnings(tmp_path) == [[]]
