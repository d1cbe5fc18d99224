"""Time limits, dry runs, training on one batch, and the table of the model."""

import datetime
import json
import os
import pathlib
import subprocess
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy, more
from paths import PYTHONPATH

import looplib
from looplib.base.messages import duration
from looplib.cluster.preemption import notice
from looplib.errors import EmptyDataError, SettingError
from looplib.run.report import Model, Variable
from looplib.task import model_table

ROOT = pathlib.Path(__file__).parents[2]
DEFAULT = make_strategy("default")
UsageError = looplib.UsageError


class Slow(toy.Regression):
    """The regression without its ids, with a pause in each step."""

    def __init__(self, seconds=0.02, optimizer="adam"):
        super().__init__(optimizer=optimizer)
        self.seconds = seconds

    def step_fn(self, inputs):
        wait = tf.numpy_function(lambda labels: (time.sleep(self.seconds), labels)[1], [inputs[2]], tf.int64)
        outputs = super().step_fn((*inputs[:2], tf.ensure_shape(wait, inputs[2].shape)))
        del outputs["ids"]
        return outputs

    def loop_end(self, metrics):
        return metrics


# max_time.


def test_durations():
    assert [duration("x", value) for value in (90, 0.5, "90", "45m", "1h30m", "2d12h", "1m30.5s", None)] == [
        90, 0.5, 90, 45 * 60, 90 * 60, 60 * 3600, 90.5, None
    ]  # fmt: skip
    assert duration("x", datetime.timedelta(minutes=2)) == 120
    for value in (0, -1, "soon", "", "1x", "m", True, float("inf"), float("nan"), [1]):
        with pytest.raises(SettingError, match="0"):
            duration("max_time", value)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("threaded", [True, False])
def test_a_training_that_reaches_its_time_saves_and_continues_exactly(threaded, tmp_path):
    """In the middle of a loop; and in a thread, where there are no signals."""
    trainer, caught = Slow(), []

    def train():
        try:
            controller.train(100_000)
        except looplib.Preempted as error:
            caught.append(error)

    with toy.controller(DEFAULT, trainer, model_dir=tmp_path, steps_per_loop=100_000, max_time="1s") as controller:
        while not controller.global_step:  # the first time may be over before the loop is compiled
            start = time.monotonic()
            thread = threading.Thread(target=train)
            thread.start() if threaded else train()
            thread.join() if threaded else None
        took, done = time.monotonic() - start, controller.global_step
    assert 1 <= took < 15 and 1 <= done < 100
    assert str(caught[-1]).startswith(f"ended by max_time of 1 s at step {done}, saved in ") and caught[-1].code == 75
    assert not notice.requested and not notice.flag.numpy()
    resumed = Slow(0)
    with toy.controller(DEFAULT, resumed, model_dir=tmp_path, steps_per_loop=5) as controller:
        assert controller.global_step == done
        controller.train(done + 5)
    plain = Slow(0)
    with toy.controller(DEFAULT, plain, steps_per_loop=5) as controller:
        controller.train(done + 5)
    for a, b in zip(resumed.weights(), plain.weights()):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_time_outside_of_trainings_does_not_count_and_a_training_in_time_ends_as_ever():
    with toy.controller(DEFAULT, Slow(0), max_time=20.0) as controller:
        controller.clock.add("other", 100.0)
        controller.train(3)
        controller.train(6)
        assert controller.global_step == 6
    with pytest.raises(SettingError, match="max_time.*'soon'"):
        toy.controller(DEFAULT, Slow(0), max_time="soon")


def start(python, *arguments, program="trainers.image_classification", **environment):
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, **environment}
    command = [python, "-m", program, "--config.model=mlp", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)


def test_a_binary_counts_from_its_own_start_and_says_how_to_continue(python, tmp_path):
    """The time is over when the training starts, so it ends after a step or none."""
    result = start(python, f"--model_dir={tmp_path}", "--max_time=0.01s", "--train_steps=100000", "--loop=eager")
    assert result.returncode == 75, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("looplib: ended by max_time of 0.01 s at step ")
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["status"] == "preempted" and run["step"] < 500


# --overfit_batch.


def first_batch(strategy):
    """The ids of the first global batch."""
    with strategy.scope():
        trainer = toy.Regression()
    with toy.controller(strategy, trainer) as controller:
        controller.train(1)
    return trainer.order[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default", "mirrored_x2", *more(["one_device", "mirrored_x4"])])
def test_every_step_gets_the_first_batch_also_after_a_restart(name, tmp_path):
    strategy = make_strategy(name)
    ids, order = first_batch(strategy), []
    for steps in (3, 5):
        with strategy.scope():
            trainer = toy.Regression()
        with toy.controller(strategy, trainer, model_dir=tmp_path, overfit_batch=True) as controller:
            controller.train(steps)
        order += trainer.order
    np.testing.assert_array_equal(order, [ids] * 5)
    _, expected = toy.numpy_losses_and_weights(order, "sgd")
    for a, b in zip(trainer.weights(), expected):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


class Piped(toy.Regression):
    """The regression on a pipeline of its own, shuffled anew in each epoch, that ends."""

    size = 8

    def dataset(self, context):
        ids = tf.data.Dataset.range(self.size).shuffle(100, seed=context.seed).batch(
            context.per_replica_batch_size, drop_remainder=True
        )  # fmt: skip
        return ids.map(lambda i: (i, tf.gather(toy.X, i), tf.gather(toy.Y, i)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default", "mirrored_x2"])
def test_a_pipeline_that_ends_repeats_its_first_batch(name, tmp_path):
    strategy, order = make_strategy(name), []
    for steps in (2, 4):
        with strategy.scope():
            trainer = Piped()
        with toy.controller(strategy, trainer, model_dir=tmp_path, overfit_batch=True) as controller:
            controller.train(steps)
        order += trainer.order
    assert len(order) == 4 and sorted(order[0]) == list(range(8))
    np.testing.assert_array_equal(order, [order[0]] * 4)


def test_data_without_a_whole_batch_cannot_be_repeated():
    with make_strategy("mirrored_x2").scope():
        trainer = Piped()
    trainer.size = 4  # a batch for one of two replicas
    with pytest.raises(EmptyDataError, match="2"):
        toy.controller(make_strategy("mirrored_x2"), trainer, overfit_batch=True)


# --dry_run.


def test_a_dry_run_tries_everything_and_leaves_nothing(python, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    (tmp_path / "tmp").mkdir()
    arguments = [f"--model_dir={tmp_path}/run", "--dry_run", "--num_virtual_devices=2", "--keep_best=eval/accuracy"]
    result = start(python, *arguments, TMPDIR=str(tmp_path / "tmp"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == (
        "dry run: all went well: 2 steps, an evaluation of at most 2 steps (eval), a save and a restore; nothing is kept"
    )
    assert os.listdir(tmp_path / "run") == ["notes.txt"] and os.listdir(tmp_path / "tmp") == []
    assert "restored step 2 from" in result.stdout


BAD = {
    "metric": (["--dry_run", "--keep_best=eval/f1"], "needs a metric that the evaluation returns"),
    "workers": (["--dry_run", "--strategy=multi_worker"], "--dry_run tries the program in one process"),
    "time": (["--model_dir={}", "--max_time=soon"], "--max_time is 'soon'; expected seconds above 0"),
    "mode": (["--model_dir={}", "--max_time=1h", "--mode=eval"], "--max_time limits a training, and --mode=eval does"),
}  # fmt: skip


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_sentence_and_leaves_nothing(case, python, tmp_path):
    arguments, sentence = BAD[case]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    (tmp_path / "tmp").mkdir()
    arguments = [argument.format(tmp_path / "run") for argument in arguments]
    result = start(python, *arguments, TMPDIR=str(tmp_path / "tmp"))
    last = result.stderr.strip().splitlines()[-1]
    assert result.returncode == 1 and last.startswith("looplib: error: ") and sentence in last
    assert os.listdir(tmp_path / "tmp") == [] and os.listdir(tmp_path / "run") == ["notes.txt"]


# The table of the model.


class Parts(toy.Regression):
    """A model with a normalization, a frozen layer, and variables of its own."""

    def __init__(self, keras, optimizer="adam"):
        super().__init__(keras, optimizer)
        layers = keras.layers
        self.model = keras.Sequential(
            [keras.Input((5,)), layers.Dense(4, name="frozen"), layers.BatchNormalization(), layers.Dropout(0.1),
             layers.Dense(3, name="head")]
        )  # fmt: skip
        self.model.layers[0].trainable = False
        self.scale = tf.Variable(1.0, name="scale")
        self.generator = tf.random.Generator.from_seed(1)


def test_the_table_has_every_variable_once_with_its_shape_and_whether_it_is_trained(keras):
    table = model_table.describe(Parts(keras))
    rows = {row.name.rpartition(": ")[2].rpartition("/")[0].rpartition("/")[2] + "/" + row.name.rpartition("/")[2]:
            (row.shape, row.parameters, row.trainable) for row in table.variables}  # fmt: skip
    normalization = next(name.partition("/")[0] for name in rows if "gamma" in name)
    assert {name: row for name, row in rows.items() if "scale" not in name} == {
        "frozen/kernel": ([5, 4], 20, False),
        "frozen/bias": ([4], 4, False),
        f"{normalization}/gamma": ([4], 4, True),
        f"{normalization}/beta": ([4], 4, True),
        f"{normalization}/moving_mean": ([4], 4, False),
        f"{normalization}/moving_variance": ([4], 4, False),
        "head/kernel": ([4, 3], 12, True),
        "head/bias": ([3], 3, True),
    }
    assert [row.shape for row in table.variables if row.name == "scale: scale"] == [[]]
    assert (table.parameters, table.trainable_parameters) == (20 + 4 + 16 + 15 + 1, 8 + 15 + 1)


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("name", ["default", "mirrored_x2", *more(["one_device", "mirrored_x4"])])
def test_the_log_and_run_json_have_the_table(name, tmp_path, caplog):
    caplog.set_level("INFO", logger="absl")
    strategy = make_strategy(name)
    with strategy.scope():
        trainer = toy.Regression(optimizer="adam")
    with toy.controller(strategy, trainer, model_dir=tmp_path) as controller:
        controller.train(1)
    assert "the trainer has 18 parameters, of which 18 are trained" in caplog.text
    model = json.loads((tmp_path / "run.json").read_text())["model"]
    assert (model["parameters"], model["trainable_parameters"]) == (18, 18)
    assert [(row["shape"], row["parameters"], row["trainable"]) for row in model["variables"]] == [
        ([5, 3], 15, True), ([3], 3, True)
    ]  # fmt: skip


def test_a_long_table_is_cut_in_the_log():
    rows = [Variable(f"layer_{i}/kernel", [10, i], 10 * i, i % 2 == 0) for i in range(100)]
    lines = model_table.text_of(Model(49_500, 24_500, rows)).splitlines()
    assert len(lines) == 42 and lines[0] == "the trainer has 49,500 parameters, of which 24,500 are trained"
    assert lines[-1] == "  and 60 more variables, which run.json lists"
    assert lines[2].split() == ["layer_1/kernel", "[10,", "1]", "10", "not", "trained"]
