"""`CopyCheck`: a batch that arrives otherwise than it left is found, by replica and step, and is no loss that diverged."""

import json

import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy, more

import looplib
from looplib.errors import CorruptionError, DatasetError, FlagError
from looplib.extras.integrity.flags import IntegrityFlags


class BadBus(looplib.CopyCheck):
    """A stand-in for hardware: of the pipeline's batches, it changes those of some numbers behind the host's checksum.

    Args:
      numbers: of the batches, from 0, which replicas get in turn.
      change: what is done to the features.
      pipelines: how many pipelines it does so in; another one is built for a rollback.
    """

    def __init__(self, numbers, every=1, change=None, pipelines=1):
        super().__init__(every)
        self._numbers, self._left = numbers, pipelines
        self._change = change or (lambda x: tf.tensor_scatter_nd_update(x, [[0, 0]], [_flipped(x[0, 0])]))

    def add_to_data(self, dataset, context):
        dataset, self._left = super().add_to_data(dataset, context), self._left - 1
        if self._left < 0:
            return dataset

        def corrupt(number, element):
            (ids, x, y), sums = element
            struck = tf.reduce_any(tf.equal(number, tf.constant(self._numbers, tf.int64)))
            return (ids, tf.cond(struck, lambda: self._change(x), lambda: x), y), sums

        return dataset.enumerate().map(corrupt)


def _flipped(number):
    return tf.bitcast(tf.bitwise.bitwise_xor(tf.bitcast(number, tf.int32), 1 << 3), tf.float32)


def train(name, actions, steps=20, **settings):
    with make_strategy(name).scope():
        trainer = toy.Regression()
    with toy.controller(make_strategy(name), trainer, actions=actions, **settings) as controller:
        controller.train(steps)
        return controller, trainer


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "loop, name", [("eager", "mirrored_x2"), ("graph", "default"), ("xla", "default"), ("graph", "mirrored_x2")]
)
def test_one_batch_in_a_thousand_is_found_at_the_report_with_its_replica_and_step(loop, name):
    replicas = make_strategy(name).num_replicas_in_sync
    struck = 15 if loop == "eager" else 705
    bus = BadBus([struck, struck + 1000])
    with pytest.raises(CorruptionError) as caught:
        train(
            name, [bus], steps=40 if loop == "eager" else 1200, steps_per_loop=10 if loop == "eager" else 100, loop=loop
        )
    step = struck // replicas + 1
    assert f"a copy to replica {struck % replicas} arrived wrongly at step {step}; no checkpoint" in str(caught.value)
    assert "the data on the host and the learning rate are not at fault" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("loop, name", [("graph", "default"), *more([("xla", "default"), ("graph", "mirrored_x2")])])
def test_healthy_runs_are_silent_and_equal(loop, name, tmp_path):
    check, reports = looplib.CopyCheck(every=3), []
    _, checked = train(
        name, [check, lambda event: reports.append(event.metrics)], 24, loop=loop, model_dir=tmp_path, steps_per_loop=4
    )
    _, plain = train(name, [], 24, loop=loop, steps_per_loop=4)
    for one, other in zip(checked.weights(), plain.weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(checked.order[-1], plain.order[-1])
    replicas = make_strategy(name).num_replicas_in_sync
    assert check.passed == {"copies": 24 * replicas // 3}
    (start,) = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert start["copy_checks"] == [{"every": 3, "passed": check.passed}]
    assert len(reports) == 6 and not any("looplib/copies" in metrics for metrics in reports)


def nan(x):
    return x * np.nan


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("loop, name", [("xla", "default"), ("graph", "mirrored_x2"), ("graph", "default")])
def test_a_copy_that_makes_the_loss_nan_is_no_loss_that_diverged(loop, name):
    replicas = make_strategy(name).num_replicas_in_sync
    with pytest.raises(CorruptionError) as caught:
        train(name, [BadBus([6 * replicas], change=nan)], steps_per_loop=10, loop=loop)
    assert "a copy to replica 0 arrived wrongly at step 7" in str(caught.value)
    assert "not finite" not in str(caught.value)


@pytest.mark.slow
def test_a_copy_that_makes_the_loss_jump_is_no_loss_that_diverged():
    guards = looplib.Guards(loss_limit=100.0, on_spike="halt")
    with pytest.raises(CorruptionError, match="a copy to replica 0 arrived wrongly at step 7"):
        train("default", [BadBus([6], change=lambda x: x * 1e6)], steps_per_loop=10, guards=guards)


@pytest.mark.slow
@pytest.mark.parametrize("change", [None, nan])
def test_a_rollback_repeats_the_data_and_ends_as_a_run_without_it(change, tmp_path):
    _, plain = train("mirrored_x2", [], 20)
    settings = dict(guards=looplib.Guards(non_finite="rollback"), checkpoints=looplib.CheckpointPolicy(every_steps=2))
    controller, repeated = train(
        "mirrored_x2", [BadBus([13], change=change)], 20, model_dir=tmp_path, steps_per_loop=5, **settings
    )
    assert controller.rollbacks == 1
    for one, other in zip(repeated.weights(), plain.weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_a_wrong_copy_is_found_before_a_save_and_several_are_counted(tmp_path):
    settings = dict(model_dir=tmp_path, checkpoints=looplib.CheckpointPolicy(every_steps=5), steps_per_loop=100)
    with pytest.raises(
        CorruptionError, match=r"2 copies to replica 0 arrived wrongly after step 5, up to step 10.*ckpt-5, is good"
    ):
        train("default", [BadBus([6, 7])], **settings)
    assert [found.step for found in looplib.list_checkpoints(tmp_path)] == [5]


@pytest.mark.parametrize("how", ["ids", "resident"])
def test_data_of_which_nothing_is_copied_is_refused(how):
    class Gathering(toy.Regression):
        def dataset(self, context):
            return context.indices(37) if how == "ids" else context.resident((toy.X, toy.Y))

        def step_fn(self, inputs):
            return {"loss": tf.cast(tf.nest.flatten(inputs)[0], tf.float32)}

    with pytest.raises(DatasetError, match="the data set has the numbers of examples.*--check_copies"):
        toy.controller(make_strategy("default"), Gathering(), actions=[looplib.CopyCheck()])


def test_the_flag_is_for_trainings():
    values = {"mode": "train", "check_replicas": 0, "check_copies": 7, "steps_per_loop": None}
    IntegrityFlags().check(values)
    (action,) = IntegrityFlags().actions(values)
    assert isinstance(action, looplib.CopyCheck)
    with pytest.raises(FlagError, match="--check_copies is for trainings"):
        IntegrityFlags().check({**values, "mode": "predict"})
