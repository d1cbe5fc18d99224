"""Ready trainers on two workers: the weights of numpy, and of Keras `fit` on one device."""

import keras as keras3
import keras_scripts
import numpy as np
import pytest
import ready_trainers
import tensorflow as tf
from conftest import repetitions
from task import gradient_trainer_test

from looplib.run.records import read_jsonl

ENGINE = f"--loop={repetitions('eager', 'graph')}"  # other workers have graphs


def tensors(folder, step):
    """Returns the values of a checkpoint, by key."""
    reader = tf.train.load_checkpoint(str(folder / "checkpoints" / f"ckpt-{step}"))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def assert_holds(values, expected):
    """Each expected array is one of the values, by shape and numbers."""
    for array in expected:
        near = [value for value in values.values() if getattr(value, "shape", None) == array.shape and array.shape]
        assert any(np.allclose(value, array, rtol=1e-4, atol=1e-6) for value in near), (array, near)


def run(nursery, binary, folder, *arguments):
    lives = nursery.workers(2, folder, *arguments, binary=binary)
    assert [life.code(300) for life in lives] == [0, 0], "".join(life.output() for life in lives)


def clip(gradients, _):
    norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients))
    return [gradient * min(1, ready_trainers.OPTIONS["clip_global_norm"] / norm) for gradient in gradients]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[ENGINE], ["--config.jit_compile", "--loop=graph"]], ids=["plain", "compiled"])
def test_a_gradient_trainer_on_two_workers_has_the_weights_and_averages_of_numpy(arguments, nursery, tmp_path):
    run(nursery, "ready_trainers", tmp_path / "run", "--mode=train", *arguments)
    history = [gradient_trainer_test.numpy_weights(step, clip) for step in range(1, 5)]
    values = tensors(tmp_path / "run", 4)
    assert_holds(values, history[-1])
    kept = ready_trainers.OPTIONS["average_decay"]
    averages = [gradient_trainer_test.KERNEL.astype(np.float64), np.zeros(gradient_trainer_test.CLASSES)]
    for weights in history:
        averages = [kept * average + (1 - kept) * weight for average, weight in zip(averages, weights)]
    assert_holds({key: value for key, value in values.items() if "average" in key}, averages)


@pytest.mark.slow
def test_a_keras_trainer_on_two_workers_has_the_weights_and_metrics_of_fit(nursery, tmp_path):
    steps = keras_scripts.EPOCHS * 4
    arguments = ["--config.script=cnn", "--config.shuffle=False", f"--train_steps={steps}", "--eval_interval=4", ENGINE]
    run(nursery, "keras_scripts", tmp_path / "run", *arguments)
    weights, history = keras_scripts.fitted("cnn", keras3)
    assert_holds(tensors(tmp_path / "run", steps), weights)
    evaluated = [record for record in read_jsonl(str(tmp_path / "run" / "metrics.jsonl")) if record["split"] == "eval"]
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose([record[name] for record in evaluated], history[f"val_{name}"], rtol=1e-4)
