"""Several workers on loopback: the same run as on one device, resumed exactly, on another number of workers too."""

import collections
import json
import shutil

import board
import numpy as np
import pytest
import tensorflow as tf
from conftest import more

from looplib.commands.compare import compare
from looplib.run import commits
from looplib.run.records import read_jsonl

STEPS = 20
SHORT = [f"--train_steps={STEPS}", "--checkpoint_interval=5", "--eval_interval=10"]
PLAIN = ["--config.noisy=False", "--config.state_mb=0.01", *SHORT]
QUIET = [*PLAIN, "--config.clipped=True"]
STRATEGIES = {
    "mirrored_x2": ["--strategy=mirrored", "--num_virtual_devices=2"],
    "multi_worker_x2": 2,
    "multi_worker_x4": 4,
}


def run(nursery, folder, workers, *arguments):
    """Runs the binary to its end, as one process or several."""
    processes = nursery.workers(workers, folder, *arguments) if workers else [nursery.life(folder, *arguments)]
    for process in processes:
        assert process.code(300) == 0, "".join(life.output() for life in processes)
    return processes


def stopped(folder, step, copy):
    """Copies a run as one that ended right after it had saved a step has left it."""
    shutil.copytree(folder, copy)
    while (newest := commits.newest(str(copy / "checkpoints"))).step > step:
        commits.remove(newest)
    assert newest.step == step
    records = copy / "metrics.jsonl"
    kept = [line for line in records.read_text().splitlines(keepends=True) if json.loads(line)["step"] <= step]
    records.write_text("".join(kept))
    return copy


def reported(folder, split, metric):
    return [record[metric] for record in read_jsonl(str(folder / "metrics.jsonl")) if record["split"] == split]


def tensors(folder, step=STEPS):
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


@pytest.fixture(scope="module")
def runs(nursery, cases, tmp_path_factory):
    """That run on each strategy that is tested: dict from name to (directory, processes)."""
    done = {}
    for name in dict.fromkeys(["multi_worker_x2", *cases("name")]):
        kind = STRATEGIES[name]
        arguments, workers = (kind, 0) if isinstance(kind, list) else ([], kind)
        folder = tmp_path_factory.mktemp(name) / "run"
        done[name] = folder, run(nursery, folder, workers, *QUIET, *arguments)
    return done


def check_weights(folder, reference):
    expected = tensors(reference)
    for key, value in tensors(folder).items():
        np.testing.assert_allclose(value, expected[key], rtol=1e-4, atol=1e-6, err_msg=key)


# Strategies of one process are tried in tests/conformance, and four workers are close to two.
@pytest.mark.parametrize("name", ["multi_worker_x2", *more(["mirrored_x2", "multi_worker_x4"])])
def test_every_strategy_sees_the_same_examples_and_comes_to_the_same_weights(name, runs, reference):
    folder, processes = runs[name]
    checksums = reported(folder, "train", "examples_checksum")
    assert checksums == reported(reference, "train", "examples_checksum")
    assert len(set(checksums)) == STEPS // 5
    for metric in ("accuracy", "examples", "keras_accuracy"):
        np.testing.assert_allclose(reported(folder, "eval", metric), reported(reference, "eval", metric), rtol=1e-6)
    check_weights(folder, reference)
    for process in processes[1:]:  # one line of progress, from the chief
        assert f"step {STEPS}" not in process.output()


@pytest.mark.slow
# With normalization each replica has state of its own.
@pytest.mark.parametrize("keras, data, distribute", [
    ("keras", "interleaved", "auto"),
    *more([("tf_keras", "pipeline", "auto"), ("tf_keras", "indices", "auto"), ("keras", "interleaved", "tf")]),
])  # fmt: skip
def test_two_workers_that_stop_and_start_again_resume_exactly(keras, data, distribute, nursery, tmp_path):
    """They stop in the third epoch; what is clipped resumes in the test of more and of fewer workers."""
    arguments = [
        f"--config.keras={keras}",
        f"--config.data={data}",
        f"--distribute={distribute}",
        "--config.normalized=True",
        "--verbosity=0",  # on the other worker too
        "--mode=train",
        *SHORT,
        "--checkpoint_interval=13",
    ]
    run(nursery, tmp_path / "whole", 2, *arguments)
    workers = run(nursery, stopped(tmp_path / "whole", 13, tmp_path / "parts"), 2, *arguments)
    result = compare(tmp_path / "whole", tmp_path / "parts")
    assert result.differences == [] and result.examples
    if data == "indices":
        return
    how = "from its saved state" if distribute == "auto" else "by skipping 13 batches"
    for worker in workers:
        assert f"Faulty.dataset resumes after step 13 {how}" in worker.output()
    if distribute == "tf":
        return
    check_damaged_positions(tmp_path / "parts" / "checkpoints", tmp_path / "copies")
    (alone,) = run(nursery, tmp_path / "parts", 0, *arguments, "--train_steps=22", "--loop=eager")
    assert (
        "ckpt-20 were saved by 2 workers, and this run has 1: no saved state of an iterator is used" in alone.output()
    )
    assert "Faulty.dataset resumes after step 20 by skipping 20 batches" in alone.output()


def check_damaged_positions(checkpoints, copies):
    """A checkpoint of which one worker's position is not as it was written is not restored."""
    for number, damage in enumerate([
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
        lambda path: path.unlink(),
    ]):  # fmt: skip
        folder = shutil.copytree(checkpoints, copies / str(number))
        assert sorted(path.name for path in folder.glob("ckpt-20.position-*")) == [
            "ckpt-20.position-0-of-2",
            "ckpt-20.position-1-of-2",
        ]
        assert commits.newest_intact(str(folder), tidy=False).step == 20
        damage(folder / "ckpt-20.position-1-of-2")
        assert commits.newest_intact(str(folder), tidy=True).step == 13
        assert not list(folder.glob("ckpt-20.*"))  # all of it is set aside
        commits.remove(commits.newest(str(folder)))
        assert not list(folder.glob("ckpt-13.*"))


@pytest.mark.slow
@pytest.mark.parametrize("first, second", [(0, 2), *more([(2, 4)])])
def test_a_run_resumes_with_more_and_with_fewer_workers(first, second, nursery, reference, runs, tmp_path):
    stopped(runs["multi_worker_x2"][0] if first else reference, 5, tmp_path / "run")
    run(nursery, tmp_path / "run", second, *QUIET, "--mode=train", "--train_steps=14")
    run(nursery, tmp_path / "run", 0, *QUIET, "--mode=train", "--loop=eager")
    assert reported(tmp_path / "run", "train", "examples_checksum") == reported(reference, "train", "examples_checksum")
    check_weights(tmp_path / "run", reference)


@pytest.mark.slow
@pytest.mark.parametrize("keras", ["keras", *more(["tf_keras"])])
def test_two_workers_sum_sparse_gradients_of_any_number_of_rows_as_one_device_does(keras, nursery, tmp_path):
    arguments = [*QUIET, f"--config.keras={keras}", "--config.sparse=True", "--mode=train"]
    for workers in (0, 2):
        run(nursery, tmp_path / str(workers), workers, *arguments)
    check_weights(tmp_path / "2", tmp_path / "0")
    (table,) = [value for name, value in tensors(tmp_path / "2").items() if name.startswith("table/")]
    assert 0 < table[1:].min() and table[1:].max() < 1 and not table[0].any()  # of the words that were looked up


@pytest.mark.slow
def test_an_evaluation_of_a_training_by_workers_runs_on_workers_too(nursery, runs):
    folder, _ = runs["multi_worker_x2"]
    run(nursery, folder, 2, *QUIET, "--mode=eval", "--config.collects=True")
    evaluated = json.loads((folder / "run_eval.json").read_text())["metrics"]["eval"]
    assert evaluated["examples"] == 96 and evaluated["accuracy"] == reported(folder, "eval", "accuracy")[-1]
    # What the steps return as looplib.each comes from both.
    assert evaluated["in_order"] == 1 and evaluated["right"] == round(96 * evaluated["accuracy"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "flag, words",
    [
        ("data=unsharded", "Faulty.dataset gives all 2 workers the same data"),
        ("data=ragged", "FaultyEvaluator.dataset has elements RaggedTensorSpec"),  # before any step
    ],
)
def test_what_workers_cannot_share_is_refused_when_the_controller_is_built(flag, words, nursery, tmp_path):
    processes = nursery.workers(2, tmp_path / "run", f"--config.{flag}")
    assert [process.code(120) for process in processes] == [1, 1]
    assert words in processes[0].output()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_what_a_share_that_ends_early_leaves_out_of_the_others_is_said_once(nursery, tmp_path):
    processes = run(nursery, tmp_path / "run", 2, *PLAIN, "--config.data=uneven", "--mode=train", "--train_steps=-1")
    sentence = (
        "Faulty.dataset lasts for 3 steps: it has shares of 3, 5 batches, in the order of the workers, and 2 of worker 1 "
        "are left out"
    )
    assert [process.output().count(sentence) for process in processes] == [1, 0]
    assert "done at step 3" in processes[0].output()


@pytest.mark.slow
def test_two_workers_show_each_step_once_after_a_rollback_and_a_failure(nursery, tmp_path):
    folder = tmp_path / "run"
    schedule = ["--steps_per_loop=2", "--checkpoint_interval=5", "--eval_interval=10", "--train_steps=20"]
    arguments = ["--config.noisy=False", "--config.shows=True", "--non_finite=rollback", *schedule]
    first = nursery.workers(2, folder, *arguments, "--config.nan_at=8", "--config.fail_at=18")
    assert all(process.code(300) for process in first), "".join(process.output() for process in first)
    assert "rolling back to step 5" in first[0].output()
    run(nursery, folder, 2, *arguments, "--loop=eager")
    reports = [(record["step"], record["split"]) for record in read_jsonl(str(folder / "metrics.jsonl"))]
    assert len(set(reports)) == len(reports) and (20, "train") in reports and (20, "eval") in reports
    expected = dict.fromkeys(((*report, name) for report in reports for name in ("image", "text", "histogram")), 1)
    lines = read_jsonl(str(folder / "media.jsonl"))
    assert collections.Counter((line["step"], line["split"], line["name"]) for line in lines) == expected
    assert {line["step"] for line in read_jsonl(str(folder / "media.voided.jsonl"))} >= {6, 12}  # were done twice
    events = collections.Counter(
        (event.step, split, value.tag)
        for split in ("train", "eval")
        for event in board.events(folder / split)
        for value in event.summary.value
        if value.tag in ("image", "text", "histogram")
    )
    assert events == expected
