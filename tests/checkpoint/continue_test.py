"""A run goes on from a checkpoint that Orbit's or Model Garden's way of saving wrote."""

import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy

import looplib
from looplib.errors import SettingError

DEFAULT = make_strategy("default")


def foreign(directory, keras, steps=5, optimizer="adam"):
    """Trains by hand and saves as Orbit users do; returns the trainer."""
    trainer, _ = toy.build(DEFAULT, keras, optimizer)
    trainer.global_batch_size = 8
    step = tf.Variable(0, dtype=tf.int64)
    for i in range(steps):
        ids = np.arange(8) + i
        trainer.step_fn((tf.constant(ids), tf.constant(toy.X[ids]), tf.constant(toy.Y[ids])))
        step.assign_add(1)
    checkpoint = tf.train.Checkpoint(model=trainer.model, optimizer=trainer.optimizer, global_step=step)
    tf.train.CheckpointManager(checkpoint, directory, max_to_keep=2).save(checkpoint_number=steps)
    return trainer


def start(path):
    return looplib.Start(continue_from=str(path))


@pytest.mark.slow(keep=1)
def test_step_weights_and_slots_are_taken_and_the_data_starts_anew(keras, tmp_path):
    theirs = foreign(tmp_path / "theirs", keras)
    trainer, _ = toy.build(DEFAULT, keras, "adam")
    settings = dict(model_dir=tmp_path / "ours", start=start(tmp_path / "theirs"))
    with toy.controller(DEFAULT, trainer, **settings) as controller:
        assert controller.global_step == 5 and "ckpt-5" in controller.restored_from
        for a, b in zip(trainer.model.get_weights(), theirs.model.get_weights()):
            np.testing.assert_array_equal(a, b)
        controller.train(8)
    again, _ = toy.build(DEFAULT, keras, "adam")
    with toy.controller(DEFAULT, again) as controller:
        controller.train(3)
    np.testing.assert_array_equal(trainer.order, again.order)  # the first three batches of the order
    for ids in trainer.order:
        theirs.step_fn((tf.constant(ids), tf.constant(toy.X[ids]), tf.constant(toy.Y[ids])))
    for a, b in zip(trainer.weights(), theirs.weights()):  # so that Adam's slots and its count were taken too
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    resumed, _ = toy.build(DEFAULT, keras, "adam")
    with toy.controller(DEFAULT, resumed, **settings) as controller:  # from its own checkpoint now
        assert controller.global_step == 8
        controller.train(10)
    whole, _ = toy.build(DEFAULT, keras, "adam")
    with toy.controller(DEFAULT, whole) as controller:
        controller.train(5)
    np.testing.assert_array_equal(resumed.order, whole.order[3:])


def test_a_step_that_was_counted_in_the_optimizer_is_the_step_and_the_optimizers_count(keras, tmp_path):
    theirs = foreign(tmp_path / "theirs", keras)
    checkpoint = tf.train.Checkpoint(
        model=theirs.model, optimizer=theirs.optimizer, global_step=theirs.optimizer.iterations
    )
    path = checkpoint.save(str(tmp_path / "shared"))
    trainer, _ = toy.build(DEFAULT, keras, "adam")
    with toy.controller(DEFAULT, trainer, start=start(path)) as controller:
        assert controller.global_step == 5 and int(np.array(trainer.optimizer.iterations)) == 5
        controller.train(8)
    for ids in trainer.order:
        theirs.step_fn((tf.constant(ids), tf.constant(toy.X[ids]), tf.constant(toy.Y[ids])))
    for a, b in zip(trainer.weights(), theirs.weights()):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_run_that_is_already_there_reports_nothing_and_saves(tmp_path):
    foreign(tmp_path / "theirs", toy.keras3)
    seen = []
    settings = dict(model_dir=tmp_path / "ours", start=start(tmp_path / "theirs"), actions=[seen.append])
    with toy.controller(DEFAULT, toy.build(DEFAULT, optimizer="adam")[0], **settings) as controller:
        controller.train(5)
        assert not seen and controller.latest_checkpoint.endswith("ckpt-5")


def test_an_evaluation_reads_it_too(tmp_path):
    theirs = foreign(tmp_path, toy.keras3)
    _, evaluator = toy.build(DEFAULT)
    controller = toy.controller(DEFAULT, None, evaluator, model_dir=tmp_path / "ours", start=start(tmp_path))
    assert controller.global_step == 5
    assert controller.evaluate()["eval"]["accuracy"] == toy.numpy_accuracy(theirs.weights())


@pytest.mark.slow
def test_what_cannot_be_continued_from_is_a_sentence(tmp_path):
    foreign(tmp_path / "sgd", toy.keras3, optimizer="sgd")
    tf.train.Checkpoint(model=toy.build(DEFAULT)[0].model).save(str(tmp_path / "stepless"))
    (tmp_path / "empty").mkdir()
    for path, optimizer, message in (
        ("sgd", "adam", "its model or optimizer differs .only here: .*velocity"),
        ("stepless-1", "sgd", "expected a checkpoint with global_step"),
        ("empty", "sgd", "there is no checkpoint in"),
        ("nowhere", "sgd", "the run cannot continue from .*nowhere"),
    ):
        with pytest.raises(looplib.UsageError, match=message):
            toy.controller(DEFAULT, toy.build(DEFAULT, optimizer=optimizer)[0], start=start(tmp_path / path))
    with pytest.raises(SettingError):
        looplib.Start(continue_from="a", warm_start="b")
