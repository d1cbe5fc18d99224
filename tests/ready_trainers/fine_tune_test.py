"""Fine-tuning: what is trained in each way, adapters alone, and merged."""

import dataclasses
import json
import os
import pathlib
import subprocess

import keras
import numpy as np
import pytest
from conftest import make_strategy, repetitions

import looplib
from trainers import fine_tune, image_classification, image_data, pictures
from trainers.fine_tune import Config

ROOT = pathlib.Path(__file__).parents[2]


def train(module, config, model_dir, steps, strategy=None):
    keras.utils.set_random_seed(1)
    strategy = strategy or make_strategy("default")
    with strategy.scope():
        trainer, evaluator = module.build(config)
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=64, steps_per_loop=steps, loop="graph"),
        trainer=trainer,
        evaluator=evaluator,
        strategy=strategy,
        model_dir=model_dir,
        config=config,
    )  # fmt: skip
    metrics = controller.train_and_evaluate(steps, steps)["eval"]
    controller.close()
    return trainer, metrics


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The run directory of a model of digits 0 to 4."""
    folder = tmp_path_factory.mktemp("base")
    config = image_classification.Config(model="wide_mlp", classes="0-4")
    train(image_classification, config, folder, repetitions(10, 150))
    return str(folder)


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    """Of each way to tune: the run directory, the trainer, its weights at the end, its metrics."""
    results, steps = {}, repetitions(10, 200)
    for tune in ("all", "last", "lora"):
        folder = tmp_path_factory.mktemp(tune)
        trainer, metrics = train(fine_tune, Config(base=base, tune=tune, decay_steps=steps), folder, steps)
        results[tune] = folder, trainer, metrics
    return results


def layers_of(path):
    """The kernels and biases in a run directory's newest checkpoint of a plain model, in the order of the layers."""
    model, _ = fine_tune.make_models(fine_tune.read_config(path), 5)
    looplib.warm_start({"model": model}, str(path))
    return [variable.numpy() for variable in model.trainable_variables]


def logits(images, weights):
    """The model in numpy."""
    for number in range(0, len(weights), 2):
        images = images @ weights[number] + weights[number + 1]
        images = images if number == len(weights) - 2 else np.maximum(images, 0)
    return images


@pytest.mark.slow
def test_each_way_trains_its_part_and_leaves_the_rest_as_in_the_base(base, tuned):
    before = layers_of(base)
    for tune, (_, trainer, _) in tuned.items():
        kernels = [v.numpy() for v in trainer.model.variables if not v.name.startswith("lora_")]
        changed = [not np.array_equal(one, other) for one, other in zip(before[:-2], kernels[:-2], strict=True)]
        assert changed == [tune == "all"] * 6, tune
        adapters = [v.path for v in trainer.model.variables if v.name.startswith("lora_")]
        assert len(adapters) == (6 if tune == "lora" else 0)


@pytest.mark.slow
def test_lora_trains_two_percent_and_is_within_a_point_of_all_weights(tuned):
    models = {tune: json.loads((folder / "run.json").read_text())["model"] for tune, (folder, _, _) in tuned.items()}
    sizes = [64, 1024, 1024, 128, 5]
    head = 128 * 5 + 5
    adapters = sum(4 * (sizes[i] + sizes[i + 1]) for i in range(3))
    whole = sum(sizes[i] * sizes[i + 1] + sizes[i + 1] for i in range(4))
    assert {tune: model["trainable_parameters"] for tune, model in models.items()} == {
        "all": whole, "last": head, "lora": adapters + head
    }  # fmt: skip
    assert (adapters + head) / whole <= 0.02
    accuracy = {tune: metrics["accuracy"] for tune, (_, _, metrics) in tuned.items()}
    assert all(metrics["examples"] == 180 for _, _, metrics in tuned.values())
    assert accuracy["all"] >= 0.96 and accuracy["lora"] >= accuracy["all"] - 0.02  # with a third of the page's steps
    assert accuracy["last"] < accuracy["lora"] - 0.1


@pytest.mark.slow
def test_the_merged_model_computes_what_the_base_with_adapters_computes(base, tuned):
    folder, _, _ = tuned["lora"]
    _, (images, _) = image_data.digits_arrays()
    with np.load(folder / "adapters.npz") as file:
        values = dict(file)
    weights = layers_of(base)
    for number, layer in enumerate(sorted({name.split("/")[0] for name in values})[:-1]):
        weights[2 * number] += values[f"{layer}/lora_kernel_a"] @ values[f"{layer}/lora_kernel_b"]
    weights[-2:] = [values[f"{max(name.split('/')[0] for name in values)}/{name}"] for name in ("kernel", "bias")]
    expected = logits(images.reshape(-1, 64), weights)
    merged = keras.saving.load_model(folder / "model.keras")
    assert not any("lora" in variable.name for variable in merged.variables)
    np.testing.assert_allclose(merged(images[..., None]), expected, rtol=1e-4, atol=1e-5)
    adapted = fine_tune.load_adapted(base, str(folder / "adapters.npz"))
    np.testing.assert_allclose(adapted(images[..., None]), expected, rtol=1e-4, atol=1e-5)
    alone = os.path.getsize(folder / "adapters.npz")
    assert alone < 0.03 * os.path.getsize(folder / "model.keras")


@pytest.mark.slow
def test_without_adapters_the_exported_model_is_the_tuned_one(tuned):
    _, (images, _) = image_data.digits_arrays()
    for tune in ("all", "last"):
        folder, trainer, _ = tuned[tune]
        exported = keras.saving.load_model(folder / "model.keras")
        np.testing.assert_allclose(exported(images[..., None]), trainer.model(images[..., None]), atol=1e-6)
        assert not (folder / "adapters.npz").exists()


@pytest.mark.slow
def test_adapters_merge_in_convolutions_and_on_two_replicas(tmp_path):
    config = image_classification.Config(model="cnn", classes="0-4")
    train(image_classification, config, tmp_path / "base", 3)
    strategy = make_strategy("mirrored_x2")
    config = Config(base=str(tmp_path / "base"), classes="5,7,9")
    trainer, _ = train(fine_tune, config, tmp_path / "run", 5, strategy)
    _, (images, _) = image_data.digits_arrays()
    exported = keras.saving.load_model(tmp_path / "run" / "model.keras")
    assert any(np.abs(v.numpy()).max() > 0 for v in trainer.model.variables if v.name == "lora_kernel_b")
    np.testing.assert_allclose(exported(images[..., None]), trainer.model(images[..., None]), rtol=1e-4, atol=1e-5)
    assert exported.output_shape == (None, 3)


@pytest.mark.slow
def test_pictures_compare_runs(tuned, tmp_path):
    runs = [str(folder) for folder, _, _ in tuned.values()]
    pictures.write_curves(str(tmp_path / "one.png"), runs, "eval/accuracy")
    pictures.write_curves(str(tmp_path / "other.png"), runs[:2], "eval/accuracy")
    one, other = ((tmp_path / name).read_bytes() for name in ("one.png", "other.png"))
    assert one[:4] == other[:4] == b"\x89PNG" and one != other
    with pytest.raises(looplib.UsageError, match="eval/auc"):
        pictures.write_curves(str(tmp_path / "one.png"), runs, "eval/auc")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(tune="most"), "--config.tune.*'most'"),
        (dict(base="/no/such"), "/no/such/run.json.*--config.base"),
        (dict(rank=0), "--config.rank.*0.*3.*1"),
        (dict(classes="5-12"), "--config.classes.*'5-12'"),
    ],
)
def test_bad_settings_are_sentences(changes, message, base):
    with pytest.raises(looplib.UsageError, match=message):
        fine_tune.build(dataclasses.replace(Config(base=base), **changes))


@pytest.mark.slow
def test_adapters_of_another_base_are_refused(tuned, tmp_path):
    train(image_classification, image_classification.Config(model="mlp", classes="0-4"), tmp_path, 1)
    with pytest.raises(looplib.UsageError, match="other shapes than adapters of"):
        fine_tune.load_adapted(str(tmp_path), str(tuned["lora"][0] / "adapters.npz"))
    with pytest.raises(looplib.UsageError, match="adapters.npz.*LoRA"):
        fine_tune.load_adapted(str(tmp_path), str(tmp_path / "adapters.npz"))


@pytest.mark.slow
def test_a_killed_run_resumes_exactly(python, base, tmp_path):
    command = [
        *(python, "-m", "looplib", "check", "resume", "--kills=1", f"--dir={tmp_path / 'check'}", "--", python, "-m"),
        *("trainers.fine_tune", f"--config.base={base}", "--train_steps=60", "--steps_per_loop=10"),
        "--checkpoint_interval=10",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert result.returncode == 0 and "EQUAL" in result.stdout, result.stdout + result.stderr
