"""The main job: every model takes steps, the default learns the digits."""

import dataclasses

import flat_config
import numpy as np
import pytest
from conftest import make_strategy, more, needs_models

import looplib
from trainers import image_classification, image_data, image_models
from trainers.image_classification import Config


def run(config, strategy, steps, **settings):
    with strategy.scope():
        trainer, evaluator = image_classification.build(config)
    settings = {"global_batch_size": 32, "steps_per_loop": steps, "writers": [], "seed": 0, **settings}
    controller = flat_config.controller(trainer=trainer, evaluator=evaluator, strategy=strategy, **settings)
    return controller, controller.train_and_evaluate(steps, steps)["eval"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, name",
    [
        ("cnn", "mirrored_x2"),
        ("tpu_guide", "default"),
        pytest.param("resnet18", "default", marks=needs_models),
        *more([("mlp", "mirrored_x2"), ("cnn", "default"), ("mlp", "default"), ("tpu_guide", "mirrored_x2")]),
        pytest.param("resnet18", "mirrored_x2", marks=[needs_models, pytest.mark.slow]),
    ],
)
def test_every_model_trains_and_evaluates(model, name):
    controller, metrics = run(dataclasses.replace(Config(), model=model), make_strategy(name), 3)
    assert metrics["examples"] == 360 and np.isfinite(metrics["loss"]) and controller.global_step == 3


def test_the_models_are_what_they_are_called():
    parameters = lambda name, shape: image_models.build(name, shape, 10).count_params()
    assert parameters("mlp", (28, 28, 1)) == 784 * 128 + 128 + 128 * 10 + 10
    convolutions = (9 * 256 + 256) + (9 * 256 * 256 + 256)
    dense = (24 * 24 * 256 * 256 + 256) + (256 * 128 + 128) + (128 * 10 + 10)
    assert parameters("tpu_guide", (28, 28, 1)) == convolutions + dense


@pytest.mark.slow
def test_the_default_learns_the_digits():
    _, metrics = run(Config(decay_steps=500), make_strategy("default"), 500, global_batch_size=64)
    assert metrics["accuracy"] >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_optimizers_follow_their_schedule(optimizer):
    config = dataclasses.replace(Config(), model="mlp", optimizer=optimizer, learning_rate=0.02, decay_steps=10)
    rates = []
    action = lambda event: event.split == "train" and rates.append(event.metrics["learning_rate"])
    run(config, make_strategy("default"), 8, steps_per_loop=1, actions=[action])
    # Half a cosine over 10 steps, from the first step's rate on.
    np.testing.assert_allclose(rates, 0.01 * (1 + np.cos(np.pi * np.arange(8) / 10)), rtol=1e-5)


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(model="vgg"), "--config.model.*'vgg'.*tpu_guide"),
        pytest.param(dict(model="resnet7"), "expected resnet followed by one of", marks=needs_models),
        (dict(optimizer="adamw"), "--config.optimizer.*'adamw'"),
        (dict(learning_rate=0.0), "expected a positive rate"),
    ],
)
def test_bad_settings_are_sentences(changes, message):
    with pytest.raises(looplib.UsageError, match=message):
        image_classification.build(dataclasses.replace(Config(), **changes))


def test_an_image_too_small_for_a_model_is_a_sentence():
    with pytest.raises(looplib.UsageError, match="5x5"):
        image_models.build("tpu_guide", (4, 8, 1), 10)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["keras", "tf_keras"])
def test_float16_gets_loss_scaling(family):
    keras = pytest.importorskip(family)
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        if family == "keras":
            network = image_models.build("mlp", (8, 8, 1), 10)
        else:
            layers = keras.layers
            network = keras.Sequential(
                [
                    layers.InputLayer((8, 8, 1)),
                    layers.Flatten(),
                    layers.Dense(10),
                    layers.Activation("linear", dtype="float32"),
                ]
            )
        optimizer = image_classification.make_optimizer(Config(), network)
        trainer = image_classification.ImageClassifier(network, optimizer, image_data.digits())
        controller = looplib.Controller(
            looplib.RunConfig(global_batch_size=8, steps_per_loop=2), trainer=trainer, writers=[]
        )
        metrics = controller.train(2)
        assert np.isfinite(metrics["loss"]) and metrics["loss_scale"] == 2**15
    finally:
        keras.mixed_precision.set_global_policy("float32")
