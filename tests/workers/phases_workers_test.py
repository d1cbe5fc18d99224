"""Phases of several workers on loopback: a kill in each, and the weights of one device."""

import signal

import numpy as np
import pytest
import tensorflow as tf

ARGUMENTS = ["--steps_per_loop=2", "--checkpoint_interval=2", "--config.average_decay=0.9"]
STEPS = 16
KILLS = (6, 12)  # in the first phase, which ends at step 7, and in the second


def values(folder):
    reader = tf.train.load_checkpoint(str(folder / "checkpoints" / f"ckpt-{STEPS}"))
    names = [name for name in reader.get_variable_to_shape_map() if name.startswith(("model", "optimizer", "averages"))]
    assert len(names) > 20
    return {name: reader.get_tensor(name) for name in names if name.endswith("VARIABLE_VALUE")}


def start(nursery, folder, killed_at=-1, *arguments):
    """Starts two workers; returns their exit codes and what they have printed."""
    environments = [{"KILLED_AT": str(killed_at)}] * 2
    lives = nursery.workers(2, folder, *ARGUMENTS, *arguments, binary="averaged", environments=environments)
    return [life.code(300) for life in lives], "".join(life.output() for life in lives)


@pytest.mark.slow
def test_workers_that_are_killed_in_each_phase_end_as_workers_that_were_not(nursery, tmp_path):
    codes, output = start(nursery, tmp_path / "whole")
    assert codes == [0, 0], output
    for step in KILLS:
        codes, output = start(nursery, tmp_path / "killed", step)
        assert codes == [-signal.SIGKILL] * 2, output
    codes, output = start(nursery, tmp_path / "killed")
    assert codes == [0, 0] and "restored step 10 " in output, output
    whole, killed = values(tmp_path / "whole"), values(tmp_path / "killed")
    assert whole.keys() == killed.keys()
    assert all(np.array_equal(whole[name], killed[name], equal_nan=True) for name in whole)


@pytest.mark.slow
def test_workers_come_to_the_weights_of_one_device_in_each_phase(nursery, tmp_path):
    plain = "--config.normalizes=False"  # each worker normalizes by its own batches
    codes, output = start(nursery, tmp_path / "two", -1, plain)
    assert codes == [0, 0], output
    alone = nursery.life_of("averaged", f"--model_dir={tmp_path / 'one'}", *ARGUMENTS, plain)
    assert alone.code(300) == 0, alone.output()
    one, two = values(tmp_path / "one"), values(tmp_path / "two")
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_allclose(two[name], one[name], rtol=1e-4, atol=1e-6, err_msg=name)
