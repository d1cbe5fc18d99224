"""Several workers on loopback: the same run as on one device, resumed exactly, on another number of workers too."""

import json
import os
import pathlib
import sys

import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "faults"))

import lives

from looplib.comparisons import compare
from looplib.writers import read_jsonl

QUIET = ["--config.noisy=False", "--config.state_mb=0.01"]
STRATEGIES = {
    "one_device": ["--strategy=one_device"],
    "mirrored_x2": ["--strategy=mirrored", "--num_virtual_devices=2"],
    "multi_worker_x2": 2,
    "multi_worker_x4": 4,
}


@pytest.fixture(scope="module")
def nursery():
    with lives.Nursery() as nursery:
        yield nursery


def run(nursery, folder, workers, *arguments):
    """Runs the binary to its end, as one process or several."""
    processes = nursery.workers(workers, folder, *arguments) if workers else [nursery.life(folder, *arguments)]
    for process in processes:
        assert process.code(300) == 0, "".join(life.output() for life in processes)
    return processes


def reported(folder, split, metric):
    return [record[metric] for record in read_jsonl(str(folder / "metrics.jsonl")) if record["split"] == split]


def tensors(folder, step=60):
    reader = tf.train.load_checkpoint(str(folder / "checkpoints" / f"ckpt-{step}"))
    return {
        name: reader.get_tensor(name)
        for name in reader.get_variable_to_shape_map()
        if name.endswith("VARIABLE_VALUE") and "save_counter" not in name
    }


@pytest.fixture(scope="module")
def reference(nursery, tmp_path_factory):
    """A run on the default strategy."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    run(nursery, folder, 0, *QUIET)
    return folder


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_sees_the_same_examples_and_comes_to_the_same_weights(name, nursery, reference, tmp_path):
    kind = STRATEGIES[name]
    arguments, workers = (kind, 0) if isinstance(kind, list) else ([], kind)
    processes = run(nursery, tmp_path / "run", workers, *QUIET, *arguments)
    checksums = reported(tmp_path / "run", "train", "examples_checksum")
    assert checksums == reported(reference, "train", "examples_checksum") and len(set(checksums)) == 12
    for metric in ("accuracy", "examples", "keras_accuracy"):
        np.testing.assert_allclose(
            reported(tmp_path / "run", "eval", metric), reported(reference, "eval", metric), rtol=1e-6
        )
    expected = tensors(reference)
    for key, value in tensors(tmp_path / "run").items():
        np.testing.assert_allclose(value, expected[key], rtol=1e-4, atol=1e-6, err_msg=key)
    for process in processes[1:]:  # one line of progress, from the chief
        assert "step 60" not in process.output()


@pytest.mark.parametrize(
    "keras, data, normalized",
    [("keras", "indices", True), ("keras", "pipeline", False), ("tf_keras", "indices", False),
     ("tf_keras", "pipeline", True)],
)  # fmt: skip
def test_two_workers_that_stop_and_start_again_go_on_exactly(keras, data, normalized, nursery, tmp_path):
    arguments = [f"--config.keras={keras}", f"--config.data={data}", f"--config.normalized={normalized}"]
    run(nursery, tmp_path / "whole", 2, *arguments)
    run(nursery, tmp_path / "parts", 2, *arguments, "--train_steps=33")
    run(nursery, tmp_path / "parts", 2, *arguments)
    result = compare(tmp_path / "whole", tmp_path / "parts")
    assert result.differences == [] and result.examples


def test_a_run_goes_on_with_more_and_with_fewer_workers(nursery, reference, tmp_path):
    for workers, steps in ((2, 21), (4, 44), (0, 60)):
        run(nursery, tmp_path / "run", workers, *QUIET, f"--train_steps={steps}")
    assert reported(tmp_path / "run", "train", "examples_checksum") == reported(reference, "train", "examples_checksum")
    expected = tensors(reference)
    for key, value in tensors(tmp_path / "run").items():
        np.testing.assert_allclose(value, expected[key], rtol=1e-4, atol=1e-6, err_msg=key)


def test_an_evaluation_of_a_training_by_workers_runs_on_workers_too(nursery, reference, tmp_path):
    run(nursery, tmp_path / "run", 2, *QUIET, "--train_steps=20", "--mode=train")
    processes = run(nursery, tmp_path / "run", 2, *QUIET, "--mode=eval")
    report = json.loads((tmp_path / "run" / "run_eval.json").read_text())
    assert report["metrics"]["eval"]["examples"] == 96
    assert os.path.exists(tmp_path / "run" / "metrics.jsonl") and processes


@pytest.mark.parametrize(
    "data, words",
    [
        ("unsharded", "Faulty.dataset gives each of 2 workers the same data"),
        ("ragged", "FaultyEvaluator.dataset has elements RaggedTensorSpec"),  # before any step
    ],
)
def test_data_that_workers_cannot_share_is_refused_when_the_controller_is_built(data, words, nursery, tmp_path):
    processes = nursery.workers(2, tmp_path / "run", f"--config.data={data}")
    assert [process.code(120) for process in processes] == [1, 1]
    assert words in processes[0].output()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_what_a_share_that_ends_early_leaves_out_of_the_others_is_said_once(nursery, tmp_path):
    processes = run(nursery, tmp_path / "run", 2, *QUIET, "--config.data=uneven", "--mode=train", "--train_steps=-1")
    sentence = (
        "the training data ended at step 3 on some workers only: the share of worker 0 has ended, and batches of "
        "others are left out: 2 of worker 1"
    )
    assert [process.output().count(sentence) for process in processes] == [1, 0]
    assert "done at step 3" in processes[0].output()
