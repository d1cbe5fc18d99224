"""Fine-tuning in two phases, from the weights of another head, with a kill in each phase."""

import signal
import subprocess

import numpy as np
import pytest
import tensorflow as tf
import tuned

import looplib
from looplib.run import commits


def values(folder):
    path = commits.newest(str(folder / "checkpoints")).path
    reader = tf.train.load_checkpoint(path)
    names = [name for name in reader.get_variable_to_shape_map() if name.startswith(("model", "optimizer", "averages"))]
    assert len(names) > 20
    return {name: reader.get_tensor(name) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("kind", tuned.MODELS)
def test_a_model_that_is_tuned_in_two_phases_and_killed_in_each_equals_one_that_was_not(kind, python, tmp_path):
    pretrained = tuned.MODELS[kind](tuned.CLASSES)
    path = tmp_path / "pretrained.weights.h5"
    pretrained.save_weights(path)

    def start(folder, steps, *killed_at):
        command = [python, tuned.__file__, kind, tmp_path / folder, path, steps, *killed_at]
        return subprocess.run(list(map(str, command)), check=False, timeout=300).returncode

    assert start("whole", tuned.HEAD_STEPS) == 0
    model = tuned.MODELS[kind](2)
    looplib.warm_start({"model": model}, tmp_path / "whole")
    for layer in model.layers:
        if layer.name.startswith("backbone"):
            expected = pretrained.get_layer(layer.name).get_weights()
            assert all(map(np.array_equal, layer.get_weights(), expected)), layer.name
    assert start("whole", tuned.STEPS) == 0
    kills = [start("killed", tuned.STEPS, 6), start("killed", tuned.STEPS, 26), start("killed", tuned.STEPS)]
    assert kills == [-signal.SIGKILL, -signal.SIGKILL, 0]
    whole, killed = values(tmp_path / "whole"), values(tmp_path / "killed")
    assert whole.keys() == killed.keys()
    assert all(np.array_equal(whole[name], killed[name], equal_nan=True) for name in whole)
