"""The GAN and the diffusion model: their updates, their samples and how these are rated."""

import dataclasses
import os
import pathlib
import subprocess

import flat_config
import keras
import numpy as np
import pytest
import scipy.linalg
import tensorflow as tf
from conftest import make_strategy, more, repetitions

import looplib
from looplib.run.records import read_jsonl
from trainers import diffusion, gan, image_classification, image_data, sample_quality

ROOT = pathlib.Path(__file__).parents[2]
SMALL = {
    gan: gan.Config(width=16, noise_size=4),
    diffusion: diffusion.Config(width=8, sampling_steps=2),
}
BINARIES = {gan: "trainers.gan", diffusion: "trainers.diffusion"}
EXPERIMENTS = pytest.mark.parametrize("experiment", [gan, *more([diffusion])])


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """The run directory of a classifier."""
    folder = tmp_path_factory.mktemp("classifier")
    keras.utils.set_random_seed(0)
    trainer, _ = image_classification.build(image_classification.Config())
    policy = looplib.CheckpointPolicy(every_steps=1000)
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=64, loop="graph"),
        trainer=trainer,
        model_dir=folder,
        checkpoints=policy,
        writers=[],
    ) as controller:
        controller.train(repetitions(200, 300))
    return str(folder)


def control(experiment, config, strategy="default", **settings):
    keras.utils.set_random_seed(0)
    strategy = make_strategy(strategy)
    with strategy.scope():
        trainer, evaluator = experiment.build(config)
    settings = {"global_batch_size": 64, "writers": [], "evaluator": evaluator, **settings}
    return flat_config.controller(trainer=trainer, strategy=strategy, **settings), trainer, evaluator


def sigmoid(values):
    return 1 / (1 + np.exp(-values))


def test_the_frechet_distance_is_that_of_gaussians():
    random = np.random.default_rng(0)
    first, second = random.normal(size=(50, 6)), random.normal(1, 2, size=(70, 6)) @ random.normal(size=(6, 6))
    covariances = np.cov(first.T), np.cov(second.T)
    root = scipy.linalg.sqrtm(covariances[0] @ covariances[1]).real
    expected = np.sum((first.mean(0) - second.mean(0)) ** 2) + np.trace(sum(covariances) - 2 * root)
    assert sample_quality.frechet_distance(first, second) == pytest.approx(expected)
    assert sample_quality.frechet_distance(first, first) == pytest.approx(0, abs=1e-9)


def test_the_nearest_image_is_the_nearest():
    images, others = np.random.default_rng(0).uniform(size=(2, 7, 3, 3, 1))
    expected = np.mean([min(np.linalg.norm(image - other) for other in others) for image in images])
    assert sample_quality.nearest_distance(images, others) == pytest.approx(expected)


def test_a_grid_has_its_images_in_rows_of_ten():
    values = np.linspace(0, 1, 28)
    grid = sample_quality.image_grid(values[:, None, None, None] * np.ones([1, 8, 8, 1]))
    size = grid.shape[0] // 3
    assert grid.shape == (3 * size, 10 * size, 1) and grid.dtype == np.uint8
    corners = grid[::size, ::size, 0]  # of the images, and of the two that are missing
    np.testing.assert_array_equal(corners.reshape(-1), [*np.round(255 * values), 128, 128])


def test_noise_depends_on_the_seed_of_its_example_alone():
    seeds = tf.constant([[1, 2], [3, 4], [1, 3]])
    noise = sample_quality.keyed_normal(seeds, (5, 2)).numpy()
    np.testing.assert_array_equal(sample_quality.keyed_normal(seeds[1:2], (5, 2))[0], noise[1])
    assert noise.shape == (3, 5, 2) and np.unique(noise).size == 30
    seeds = np.stack([np.arange(500), np.zeros(500)], axis=1).astype("int32")
    many = sample_quality.keyed_normal(tf.constant(seeds), (8,)).numpy()
    assert abs(many.mean()) < 0.05 and abs(many.std() - 1) < 0.05


def test_the_discriminator_and_the_generator_take_their_numbers_of_steps():
    config = dataclasses.replace(SMALL[gan], discriminator_steps=3, gradient_penalty=0.7)
    trainer, _ = gan.build(config)
    trainer.global_batch_size = 4
    # Of a linear discriminator without a bias, the gradients are known.
    images, labels = keras.Input((8, 8, 1)), keras.Input(())
    logits = keras.layers.Dense(1, use_bias=False)(keras.layers.Flatten()(images))
    trainer.discriminator = keras.Model([images, labels], keras.layers.Reshape(())(logits))
    trainer.discriminator_optimizer = keras.optimizers.SGD(0.5)
    trainer.generator_optimizer = keras.optimizers.SGD(0.5)
    weights = trainer.discriminator.get_weights()[0][:, 0].astype(np.float64)
    random = np.random.default_rng(0)
    real = random.uniform(size=(4, 3, 8, 8, 1)).astype("float32")
    labels, noise = random.integers(10, size=(4, 3)), random.normal(size=(4, 4, 4)).astype("float32")
    generated = [trainer.generator([noise[:, turn], labels[:, turn]]).numpy().reshape(4, 64) for turn in range(3)]
    bias = trainer.generator.layers[-2].bias
    before = bias.numpy()
    final = trainer.generator([noise[:, 3], labels[:, 0]]).numpy().reshape(4, 64)

    trainer.step_fn((tf.constant(real), tf.constant(labels), tf.constant(noise)))
    for turn in range(3):
        x, g = real[:, turn].reshape(4, 64), generated[turn]
        slope = ((sigmoid(x @ weights) - 1)[:, None] * x + sigmoid(g @ weights)[:, None] * g).mean(axis=0)
        weights = weights - 0.5 * (slope + 0.7 * weights)
    np.testing.assert_allclose(trainer.discriminator.get_weights()[0][:, 0], weights, rtol=1e-4, atol=1e-6)
    assert trainer.discriminator_optimizer.iterations == 3 and trainer.generator_optimizer.iterations == 1
    # The generator's step is against the discriminator after its steps.
    slope = ((sigmoid(final @ weights) - 1)[:, None] * weights * final * (1 - final)).mean(axis=0)
    np.testing.assert_allclose(bias.numpy(), before - 0.5 * slope, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_discriminator_gets_other_images_in_each_of_its_steps():
    trainer, _ = gan.build(dataclasses.replace(SMALL[gan], discriminator_steps=3))
    context = looplib.InputContext(
        global_batch_size=20, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=0, training=True, start_step=0
    )
    images, labels, noise = next(iter(trainer.dataset(context)))
    (known, digits), _ = image_data.digits_arrays()
    found = np.abs(images.numpy().reshape(60, 1, 64) - known.reshape(1, -1, 64)).sum(axis=2)
    assert (found.min(axis=1) == 0).all() and len(np.unique(images.numpy().reshape(60, 64), axis=0)) == 60
    np.testing.assert_array_equal(digits[found.argmin(axis=1)], labels.numpy().reshape(60))
    assert noise.shape == (20, 4, 4)


def test_ddim_finds_the_image_that_a_perfect_model_knows():
    image = np.random.default_rng(0).uniform(size=(1, 8, 8, 1)).astype("float32")
    trainer, evaluator = diffusion.build(dataclasses.replace(SMALL[diffusion], sampling_steps=7))

    def noise_in(inputs, training):  # if all data are this image
        noisy, times, _ = inputs
        angles = times[:, None, None, None] * (np.pi / 2)
        return (noisy - tf.cos(angles) * (2 * image - 1)) / tf.sin(angles)

    evaluator.model = noise_in
    samples = evaluator.sample(tf.random.stateless_normal([3, 8, 8, 1], [0, 0]), tf.constant([0, 1, 2], tf.int64))
    np.testing.assert_allclose(samples, np.repeat(image, 3, axis=0), atol=1e-4)


def test_the_diffusion_loss_is_the_error_of_the_predicted_noise():
    trainer, _ = diffusion.build(SMALL[diffusion])
    random = np.random.default_rng(0)
    images, noise = random.normal(size=(2, 5, 8, 8, 1)).astype("float32")
    labels, times = np.arange(5), np.linspace(0, 1, 5).astype("float32")
    trainer.model.layers[-1].set_weights([random.normal(size=(3, 3, 8, 1)), np.zeros(1)])  # zeros at first
    angles = times[:, None, None, None] * (np.pi / 2)
    predicted = trainer.model([np.cos(angles) * images + np.sin(angles) * noise, times, labels])
    losses = trainer.loss_fn(tuple(map(tf.constant, (images, labels, times, noise))))
    np.testing.assert_allclose(losses, (predicted - noise) ** 2, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@EXPERIMENTS
def test_a_resumed_run_is_exact_and_two_replicas_train_like_one(experiment, classifier, tmp_path):
    config = dataclasses.replace(SMALL[experiment], classifier=classifier)

    def train(strategy, steps, **settings):
        settings = dict(evaluator=None, steps_per_loop=1, loop="graph", **settings)
        controller, trainer, _ = control(experiment, config, strategy, **settings)
        with controller:
            controller.train(steps)
        return [average.numpy() for average in trainer.averages.values]

    expected = train("default", 2)
    train("default", 1, model_dir=tmp_path)
    resumed, on_two = train("default", 2, model_dir=tmp_path), train("mirrored_x2", 2)
    for average, again, other in zip(expected, resumed, on_two, strict=True):
        np.testing.assert_array_equal(average, again)
        np.testing.assert_allclose(average, other, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("experiment, steps", [(gan, 1200), *more([(diffusion, 1500)])])
def test_the_samples_are_digits_and_an_evaluation_job_repeats_them(experiment, steps, classifier, tmp_path):
    config = dataclasses.replace(experiment.Config(), classifier=classifier)
    with control(experiment, config, model_dir=tmp_path, writers=None)[0] as controller:
        metrics = controller.train_and_evaluate(steps, steps)["eval"]
    assert metrics["recognised"] >= 0.8 and metrics["as_asked"] >= 0.8
    assert metrics["distance"] < 4 * metrics["real_distance"] and metrics["nearest"] > 0.5
    (shown,) = read_jsonl(str(tmp_path / "media.jsonl"))
    assert (shown["step"], shown["split"], shown["name"]) == (steps, "eval", "samples")
    grid = tmp_path / "media" / shown["files"][0]
    pixels = tf.io.decode_png(grid.read_bytes()).numpy()
    grid.unlink()
    _, evaluator = experiment.build(config)  # whose classifier comes from the run's checkpoint
    with looplib.Controller(looplib.RunConfig(global_batch_size=64), evaluator=evaluator, model_dir=tmp_path) as job:
        assert job.evaluate()["eval"] == metrics
    np.testing.assert_array_equal(tf.io.decode_png(grid.read_bytes()).numpy(), pixels)
    assert read_jsonl(str(tmp_path / "media.jsonl")) == [shown]


@pytest.mark.slow
def test_the_real_images_are_recognised_and_their_halves_are_close(classifier):
    """The rating of the training images themselves, in place of samples."""
    (images, labels), (test, _) = image_data.digits_arrays()
    other_half = images[np.argsort(labels, kind="stable")][1::2, ..., None]
    digits = np.sort(labels)[1::2]

    class Real(sample_quality.SampleEvaluator):
        def dataset(self, context):
            return context.indices(718).map(lambda ids: (ids, tf.gather(digits, ids)))

        def sample(self, noise, labels):
            return tf.gather(other_half, noise)

    evaluator = Real(None, None, sample_quality.make_classifier(), ())
    sample_quality.prepare_classifier(evaluator.classifier, classifier)
    metrics = looplib.Controller(looplib.RunConfig(global_batch_size=64), evaluator=evaluator, writers=[]).evaluate()[
        "eval"
    ]
    assert metrics["recognised"] > 0.9 and metrics["as_asked"] > 0.97
    assert metrics["distance"] == pytest.approx(metrics["real_distance"], rel=1e-3) and metrics["nearest"] < 1e-6
    expected = np.mean([np.linalg.norm(images - image, axis=(1, 2)).min() for image in test])
    assert metrics["real_nearest"] == pytest.approx(expected)


@pytest.mark.slow
def test_without_a_directory_a_classifier_is_trained(monkeypatch):
    monkeypatch.setattr(sample_quality, "_CLASSIFIER_STEPS", 60)
    classifier = sample_quality.make_classifier()
    sample_quality.prepare_classifier(classifier, "")
    images, labels = image_data.digits_arrays()[1]
    assert np.mean(classifier(images[..., None])[1].numpy().argmax(axis=1) == labels) > 0.8
    assert not classifier.trainable_variables


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "experiment, changes, message",
    [
        (gan, dict(discriminator_steps=0), "--config.discriminator_steps.*0.*0"),
        (gan, dict(generator_rate=float("nan")), "--config.generator_rate"),
        (gan, dict(gradient_penalty=-1.0), "0"),
        (gan, dict(average_decay=1.0), "0.*1"),
        (diffusion, dict(width=12), "8"),
        (diffusion, dict(sampling_steps=0), "1"),
    ],
)
def test_bad_settings_are_sentences(experiment, changes, message):
    with pytest.raises(looplib.UsageError, match=message):
        experiment.build(dataclasses.replace(experiment.Config(), **changes))


def test_a_directory_without_a_fitting_classifier_is_a_sentence(tmp_path):
    classifier = sample_quality.make_classifier()
    with pytest.raises(looplib.UsageError, match="has no checkpoint"):
        sample_quality.prepare_classifier(classifier, str(tmp_path))
    trainer, _ = image_classification.build(image_classification.Config(model="mlp"))
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=64), trainer=trainer, model_dir=tmp_path, writers=[]
    ) as controller:
        controller.train(1)
    with pytest.raises(looplib.UsageError, match="is of another model"):
        sample_quality.prepare_classifier(classifier, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [gan, diffusion])
def test_a_killed_run_resumes_exactly(experiment, python, classifier, tmp_path):
    small = {gan: ["--config.width=16"], diffusion: ["--config.width=8", "--config.sampling_steps=2"]}
    binary = [
        *(BINARIES[experiment], *small[experiment], f"--config.classifier={classifier}", "--train_steps=60"),
        *("--mode=train", "--checkpoint_interval=10", "--steps_per_loop=10"),
    ]
    result = subprocess.run(
        [python, "-m", "looplib", "check", "resume", "--kills=1", f"--dir={tmp_path}", "--", python, "-m", *binary],
        capture_output=True, text=True, cwd=ROOT, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "EQUAL, uninterrupted and after 1 kill: 6 records" in result.stdout
