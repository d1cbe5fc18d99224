"""Two workers on loopback of which one has a changed bit: both say so at the next comparison, or go back together."""

import re

import numpy as np
import pytest
import tensorflow as tf

from looplib.run import commits

STEPS = 16


def start(nursery, folder, altered, *arguments):
    """Runs two workers to their end; returns their exit codes, and what each has printed."""
    environments = [{"ALTERED": altered}] * 2
    lives = nursery.workers(2, folder, *arguments, binary="altered", environments=environments)
    return [life.code(300) for life in lives], [life.output() for life in lives]


def tensors(folder):
    reader = tf.train.load_checkpoint(str(folder / "checkpoints" / f"ckpt-{STEPS}"))
    names = [name for name in reader.get_variable_to_shape_map() if name.startswith(("model", "optimizer", "averages"))]
    assert len(names) > 10
    return {name: reader.get_tensor(name) for name in names if name.endswith("VARIABLE_VALUE")}


@pytest.mark.slow
@pytest.mark.parametrize("altered", ["1:6:first/kernel", "0:6:momentum"])
def test_a_bit_of_one_worker_ends_both_and_a_restart_is_exact(altered, nursery, tmp_path):
    codes, output = start(nursery, tmp_path / "whole", "-1:0:")
    assert codes == [0, 0], output
    codes, output = start(nursery, tmp_path / "run", altered, "--check_replicas=4")
    assert codes == [1, 1], output
    name = altered.rpartition(":")[2]
    for text in output:
        found = rf"the replicas differ at step 8, and agreed at step 4: .*{name}.*between replica 0 \(worker 0\) and replica 1 \(worker 1\)"
        assert re.search(found, text), text
    assert any("(CorruptionError)" in text for text in output)
    assert commits.newest(str(tmp_path / "run" / "checkpoints")).step == 4
    codes, output = start(nursery, tmp_path / "run", "-1:0:", "--check_replicas=4")
    assert codes == [0, 0], output
    whole, continued = tensors(tmp_path / "whole"), tensors(tmp_path / "run")
    assert whole.keys() == continued.keys()
    for name in whole:
        np.testing.assert_array_equal(continued[name], whole[name], err_msg=name)


@pytest.mark.slow
def test_two_workers_go_back_together_and_end_as_an_uninterrupted_run(nursery, tmp_path):
    codes, output = start(nursery, tmp_path / "whole", "-1:0:")
    assert codes == [0, 0], output
    arguments = ["--check_replicas=4", "--non_finite=rollback"]
    codes, output = start(nursery, tmp_path / "run", "1:6:first/kernel", *arguments)
    assert codes == [0, 0], output
    assert "rolling back to step 4 and continuing with the data after step 4" in output[0], output[0]
    whole, continued = tensors(tmp_path / "whole"), tensors(tmp_path / "run")
    for name in whole:
        np.testing.assert_array_equal(continued[name], whole[name], err_msg=name)
