"""Whole numbers are what `operator.index` takes, wherever one is asked for; a bool is none."""

import json

import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy

import looplib
from looplib.base.messages import whole_number
from looplib.cluster import runtime
from looplib.data.context import per_replica_batch_size
from looplib.errors import SettingError


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize(
    "value", [7, np.int64(7), np.uint8(7), np.array(7), tf.constant(7)], ids=lambda v: type(v).__name__
)
def test_whole_numbers_of_any_type_are_taken_as_ints(value):
    assert whole_number("x", value) == 7 and type(whole_number("x", value)) is int


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("value", [True, np.True_, 7.0, np.float32(7), "7", None, 0, [7]])
def test_all_else_is_refused_in_a_sentence(value):
    with pytest.raises(SettingError, match="1$"):
        whole_number("x", value)


@pytest.mark.slow
def test_numpy_integers_are_taken_everywhere(tmp_path):
    n = np.int64
    trainer, evaluator = toy.build(make_strategy("default"))
    evaluator.global_batch_size = n(4)
    guards = looplib.Guards(spike_window=n(8), rollbacks=n(1), loss_limit_from=n(2))
    keep = (looplib.KeepLast(n(2)), looplib.KeepBest("eval/accuracy", "max", n(1)), looplib.KeepEvery(n(4)))
    policy = looplib.CheckpointPolicy(every_steps=n(2), keep=keep)
    settings = dict(
        global_batch_size=n(8), steps_per_loop=n(1), seed=n(3), model_dir=tmp_path, checkpoints=policy, guards=guards
    )
    with toy.controller(make_strategy("default"), trainer, evaluator, **settings) as controller:
        controller.train_and_evaluate(n(4), n(2), n(2))
        controller.train(n(5))
        controller.evaluate(n(1))
        assert controller.global_step == 5
    same, _ = toy.build(make_strategy("default"))
    with toy.controller(make_strategy("default"), same, seed=3) as controller:
        controller.train(5)
    assert [ids.tolist() for ids in trainer.order] == [ids.tolist() for ids in same.order]
    assert per_replica_batch_size(n(8), 2) == 4 and json.dumps(per_replica_batch_size(n(8), 2)) == "4"
    runtime.setup("one_device", seed=n(7), num_virtual_devices=n(1))


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "settings, name",
    [
        ({"global_batch_size": True}, "global_batch_size"),
        ({"steps_per_loop": 2.0}, "steps_per_loop"),
        ({"seed": "1"}, "seed"),
        ({"seed": True}, "seed"),
    ],
)
def test_the_controller_refuses_what_is_no_whole_number(settings, name):
    trainer, _ = toy.build(make_strategy("default"))
    with pytest.raises(SettingError, match=f"^{name}"):
        toy.controller(make_strategy("default"), trainer, **settings)


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("steps", [0, True, 2.5, np.float64(2)])
def test_numbers_of_steps_are_checked_alike(steps):
    trainer, evaluator = toy.build(make_strategy("default"))
    with toy.controller(make_strategy("default"), trainer, evaluator) as controller:
        for call in (controller.train, controller.evaluate):
            with pytest.raises(SettingError, match="1.*-1"):
                call(steps)
