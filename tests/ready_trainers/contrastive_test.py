"""Contrastive learning: the loss over all replicas, views that examples alone decide, the linear probe."""

import dataclasses
import math
import os
import pathlib
import subprocess

import flat_config
import keras
import numpy as np
import pytest
import sklearn.linear_model
import tensorflow as tf
from conftest import make_strategy

import looplib
from trainers import augmentation, contrastive, image_data
from trainers.contrastive import Config

ROOT = pathlib.Path(__file__).parents[2]
# With the default rate, a ReLU that rounding switches is soon a difference of 1e-4.
SMALL = Config(width=32, projection=16, learning_rate=0.01)


def build(config, strategy, **settings):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        trainer, evaluator = contrastive.build(config)
    settings = {"global_batch_size": 32, "writers": [], "loop": "graph", **settings}
    return trainer, flat_config.controller(trainer=trainer, evaluator=evaluator, strategy=strategy, **settings)


def test_the_loss_is_that_of_a_plain_loop_over_all_views():
    views = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)
    views /= np.linalg.norm(views, axis=2, keepdims=True)
    losses, metrics = contrastive.nt_xent(list(map(tf.constant, views)), list(map(tf.constant, views)), 0.5)
    everything = [(view, example) for view in range(2) for example in range(5)]
    for example in range(5):
        expected, found = [], []
        for view in range(2):
            similar = {
                other: views[view, example] @ views[other] / 0.5 for other in everything if other != (view, example)
            }
            target = similar[1 - view, example]
            expected.append(math.log(sum(map(math.exp, similar.values()))) - target)
            found.append(target == max(similar.values()))
        assert losses[example].numpy() == pytest.approx(np.mean(expected), rel=1e-5)
        assert metrics["found"][example].numpy() == np.mean(found)


@pytest.mark.slow
def test_1_2_and_4_replicas_train_the_same_weights_on_one_global_batch():
    several = ["mirrored_x2", "mirrored_x4"]
    weights, losses = {}, {}
    for name in ("default", *several):
        history = []
        action = lambda event, history=history: event.split == "train" and history.append(event.metrics["loss"])
        trainer, controller = build(SMALL, make_strategy(name), steps_per_loop=1, actions=[action])
        controller.train(4)
        weights[name], losses[name] = [v.numpy() for v in trainer.model.trainable_variables], history
    assert losses["default"][-1] < losses["default"][0]
    for name in several:
        np.testing.assert_allclose(losses[name], losses["default"], rtol=1e-6)
        for one, other in zip(weights["default"], weights[name]):
            np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)


def test_views_depend_on_the_example_and_its_seed_alone():
    images = tf.constant(image_data.digits_arrays()[0][0][:6, ..., None])
    seeds = tf.constant(np.arange(12).reshape(6, 2), tf.int32)
    one, two = augmentation.two_views(images, seeds, 1.0)
    order = [4, 0, 5]
    for view, part in zip((one, two), augmentation.two_views(tf.gather(images, order), tf.gather(seeds, order), 1.0)):
        np.testing.assert_array_equal(part, view.numpy()[order])
    assert np.abs(one - two).max() > 0.1 and np.abs(one - images).max() > 0.1
    for view in augmentation.two_views(images, seeds, 0.0):
        np.testing.assert_allclose(view, images, atol=1e-6)


def test_a_view_is_moved_as_drawn():
    """Each pixel of a plane stays on the plane: bilinear interpolation is exact there."""
    height, width = 8, 8
    y, x = np.mgrid[:height, :width].astype(np.float32)
    seed = tf.constant([[3, 4]])
    draws = 0.1 * tf.random.stateless_uniform([2, 6 + 64], seed[0], -1, 1).numpy()
    moved = [augmentation.two_views(tf.constant(plane[None, ..., None]), seed, 0.1) for plane in (x, y)]
    for view in range(2):
        angle, x_scale, y_scale, shear, x_shift, y_shift = draws[view, :6]
        cos, sin = np.cos(0.35 * angle), np.sin(0.35 * angle)
        noise = 0.2 * draws[view, 6:].reshape(8, 8)
        from_x = 3.5 + (1 + 0.2 * x_scale) * cos * (x - 3.5) + (0.2 * shear - sin) * (y - 3.5) + x_shift
        from_y = 3.5 + sin * (x - 3.5) + (1 + 0.2 * y_scale) * cos * (y - 3.5) + y_shift
        inside = (slice(1, -1), slice(1, -1))  # outside of the image there are zeros
        for expected, plane in zip((from_x, from_y), moved):
            np.testing.assert_allclose((plane[view][0, ..., 0] - noise)[inside], expected[inside], atol=1e-4)


def test_the_probe_is_ridge_regression():
    (x, y), (test_x, test_y) = image_data.digits_arrays()
    x, test_x = x.reshape(-1, 64)[:300], test_x.reshape(-1, 64)
    found = contrastive.ridge_accuracy(x, y[:300], test_x, test_y, 0.05)
    scale = lambda rows: (rows - x.mean(0)) / (x.std(0) + 1e-6)
    model = sklearn.linear_model.Ridge(alpha=0.05 * 300).fit(scale(x), np.eye(10)[y[:300]])
    assert found == pytest.approx(np.mean(model.predict(scale(test_x)).argmax(axis=1) == test_y), abs=1e-9)


@pytest.mark.slow
def test_features_learned_without_labels_classify_digits(tmp_path):
    (x, y), (test_x, test_y) = image_data.digits_arrays()
    pixels = contrastive.ridge_accuracy(x.reshape(-1, 64)[:100], y[:100], test_x.reshape(-1, 64), test_y, 0.01)
    config = dataclasses.replace(Config(), width=128, decay_steps=150)
    _, controller = build(config, make_strategy("default"), global_batch_size=128, model_dir=tmp_path / "run")
    metrics = controller.train_and_evaluate(150, 150)["eval"]
    assert metrics["examples"] == 1797
    assert metrics["accuracy"] > 0.95 and metrics["accuracy_100_labels"] > pixels + 0.05
    picture = tf.io.decode_png((tmp_path / "run" / "features.png").read_bytes())
    assert len(np.unique(picture.numpy().reshape(-1, picture.shape[-1]), axis=0)) > 20  # points of ten colors


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(temperature=0.0), "--config.temperature.*0.0"),
        (dict(decay_steps=0), "--config.decay_steps.*0"),
        (dict(augmentation=3.0), "--config.augmentation.*3.0.*0.*2"),
    ],
)
def test_bad_settings_are_sentences(changes, message):
    with pytest.raises(looplib.UsageError, match=message):
        contrastive.build(dataclasses.replace(Config(), **changes))


@pytest.mark.slow
def test_a_killed_run_resumes_exactly(python, tmp_path):
    command = [
        *(python, "-m", "looplib", "check", "resume", "--kills=1", f"--dir={tmp_path / 'check'}", "--", python, "-m"),
        *("trainers.contrastive", "--config.width=32", "--train_steps=60", "--eval_interval=30", "--steps_per_loop=10"),
        *("--checkpoint_interval=10", "--global_batch_size=32"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert result.returncode == 0 and "EQUAL" in result.stdout, result.stdout + result.stderr
