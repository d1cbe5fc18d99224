"""DynamicEmbedding in real processes: a kill and a resume, and two workers, end with the map of a run without them."""

import re
import signal

import numpy as np
import pytest
import tensorflow as tf

STEPS = 30


def values(folder):
    """All that the final checkpoint has of the table, its map and its slots."""
    reader = tf.train.load_checkpoint(str(folder / "checkpoints" / f"ckpt-{STEPS}"))
    names = [name for name in reader.get_variable_to_shape_map() if name.startswith(("table", "optimizer"))]
    return {name: reader.get_tensor(name) for name in names if name.endswith("VARIABLE_VALUE")}


@pytest.fixture(scope="module")
def whole(nursery, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    life = nursery.life_of("grown", f"--model_dir={folder}", "--strategy=one_device")
    assert life.code(240) == 0, life.output()
    found = values(folder)
    assert {"table/keys/.ATTRIBUTES/VARIABLE_VALUE", "table/sights/.ATTRIBUTES/VARIABLE_VALUE"} <= found.keys()
    assert found["table/position/.ATTRIBUTES/VARIABLE_VALUE"][1] > 10  # rows were given a second time
    return found


def test_a_killed_run_resumes_with_its_map_bit_by_bit(nursery, tmp_path, whole):
    arguments = f"--model_dir={tmp_path}", "--strategy=one_device"
    life = nursery.life_of("grown", *arguments, environment={"KILLED_AT": "20"})
    assert life.code(240) == -signal.SIGKILL, life.output()
    life = nursery.life_of("grown", *arguments)
    assert life.code(240) == 0 and re.search("restored step 1[05] ", life.output()), life.output()
    found = values(tmp_path)
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.slow
def test_two_workers_have_the_map_of_one_device(nursery, tmp_path, whole):
    lives = nursery.workers(2, tmp_path, binary="grown")
    assert [life.code(300) for life in lives] == [0, 0], "".join(life.output() for life in lives)
    found = values(tmp_path)
    for name, value in whole.items():
        if value.dtype == np.int64 and not name.startswith("table/index"):  # whose order is that of the gifts
            np.testing.assert_array_equal(found[name], value, err_msg=name)
        else:
            np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
