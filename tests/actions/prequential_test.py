"""Prequential: each example is evaluated before the step that trains on it, exactly, and the training is unchanged."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import flat_config
import keras as keras3
import numpy as np
import prequential as program
import pytest
import tensorflow as tf
import tf_keras
from conftest import make_strategy
from paths import PYTHONPATH

import looplib
from looplib.report.page.content import read_run

PROGRAM = pathlib.Path(__file__).parents[1] / "programs" / "prequential.py"
WINDOW, STEPS = 80, 10  # examples, and steps of 8


def records(folder):
    """Returns the metrics of the windows in a run directory, by the step of their report."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {
        line["step"]: {k.removeprefix("prequential/"): v for k, v in line.items() if "prequential" in k}
        for line in lines
        if line["split"] == "train"
    }
    return {step: window for step, window in found.items() if window}


def batches(steps):
    """Returns the ids of each global batch, from a run without the action."""
    order = []

    class Noting(program.Clicks):
        def step_fn(self, inputs):
            return {**super().step_fn(inputs), "ids": looplib.total(inputs["id"])}

        def loop_end(self, metrics):
            order.append(metrics.pop("ids"))
            return metrics

    flat_config.controller(trainer=Noting(), global_batch_size=8, steps_per_loop=1, writers=[]).train(steps)
    return order


@pytest.fixture(scope="module")
def expected():
    """What numpy comes to in 60 steps: the windows, and the weights."""
    return program.numpy_windows(batches(60), STEPS)


def train(strategy, folder, steps=60, family=keras3, window=WINDOW, actions=(), **settings):
    settings = {"global_batch_size": 8, "steps_per_loop": 7, "writers": ["jsonl"], **settings}
    with strategy.scope():
        trainer = program.Clicks(family)
        prequential = looplib.Prequential(program.Unseen(trainer.model, family), window)
    with flat_config.controller(
        trainer=trainer, strategy=strategy, model_dir=folder, actions=[prequential, *actions], **settings
    ) as controller:
        controller.train(steps)
    return trainer


CASES = [
    ("default", "graph", 1, keras3),
    ("default", "graph", 7, tf_keras),
    pytest.param("default", "xla", 7, keras3, marks=pytest.mark.slow),
    pytest.param("default", "eager", 7, keras3, marks=pytest.mark.slow),
    ("mirrored_x2", "graph", 7, keras3),
    ("mirrored_x2", "graph", 10, tf_keras),
    pytest.param("mirrored_x4", "eager", 3, keras3, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name, loop, per_loop, family", CASES)
def test_windows_are_those_of_a_plain_loop_that_predicts_and_then_trains(
    name, loop, per_loop, family, tmp_path, expected
):
    windows, kernel, bias = expected
    trainer = train(make_strategy(name), tmp_path, family=family, loop=loop, steps_per_loop=per_loop)
    np.testing.assert_allclose(trainer.model.get_weights()[0][:, 0], kernel, rtol=1e-4)
    found = records(tmp_path)
    reports = [*range(per_loop, 61, per_loop), 60]
    ends = [next(step for step in reports if step >= end) for end in range(STEPS, 61, STEPS)]
    assert list(found) == ends
    for window, right in zip(found.values(), windows, strict=True):
        assert window == pytest.approx(right, rel=1e-5)
    assert windows[0]["inputs/x0/mean"] != windows[1]["inputs/x0/mean"]


def start(folder, dies_at="-1", *arguments, launcher=()):
    """Runs the program in a process of its own; returns its exit code."""
    environment = {**os.environ, "PYTHONPATH": f"{PROGRAM.parent}:{PYTHONPATH}", "DIES_AT": dies_at}
    command = [sys.executable, *launcher, str(PROGRAM), f"--model_dir={folder}", "--loop=graph", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode in (0, 1, -signal.SIGKILL), done.stderr[-3000:]
    return done.returncode, done.stderr


@pytest.mark.slow
def test_a_run_that_is_killed_twice_reports_the_bits_of_an_uninterrupted_one(tmp_path, expected):
    assert start(tmp_path / "whole")[0] == 0
    for dies_at in ("14", "49"):  # a report that ends a window, and one that does not
        assert start(tmp_path / "run", dies_at)[0] == -signal.SIGKILL
    assert start(tmp_path / "run")[0] == 0
    whole, found = records(tmp_path / "whole"), records(tmp_path / "run")
    assert whole == found
    assert list(whole) == [14, 21, 35, 42, 56, 60]
    for window, right in zip(whole.values(), expected[0], strict=True):
        assert window == pytest.approx(right, rel=1e-5)


@pytest.mark.slow
def test_two_workers_report_what_one_process_does(tmp_path, expected):
    flags = ["-m", "looplib", "launch", "--workers=2", "--", sys.executable]
    code, errors = start(tmp_path, "-1", "--strategy=multi_worker", launcher=flags)
    assert code == 0, errors[-3000:]
    for window, right in zip(records(tmp_path).values(), expected[0], strict=True):
        assert window == pytest.approx(right, rel=1e-5)


def test_a_resume_within_a_window_continues_with_its_sums_and_the_first_values(tmp_path, expected):
    strategy = make_strategy("mirrored_x2")
    policy = looplib.CheckpointPolicy(every_steps=12)
    for steps in (12, 40):
        train(strategy, tmp_path, steps, checkpoints=policy)
    found = records(tmp_path)
    assert list(found) == [14, 21, 35, 40]  # the reports of a run of 40 steps
    for window, right in zip(found.values(), expected[0]):
        assert window == pytest.approx(right, rel=1e-5)


class Net(looplib.GradientTrainer):
    """Has what an evaluation must not touch: statistics, random numbers, an accumulating optimizer."""

    def __init__(self, family, **settings):
        family.utils.set_random_seed(0)
        layers = family.layers
        parts = [layers.InputLayer((3,)), layers.Dense(8, "gelu"), layers.BatchNormalization(), layers.Dropout(0.3)]
        more = dict(gradient_accumulation_steps=2) if family is keras3 else {}
        model = family.Sequential([*parts, layers.Dense(1)])
        super().__init__(model, family.optimizers.Adam(0.01, **more), **settings)

    def dataset(self, context):
        return context.indices(640).map(lambda i: {"x": tf.gather(program.X, i), "y": tf.gather(program.Y, i), "id": i})

    def loss_fn(self, inputs):
        logits = self.model(inputs["x"], training=True)[:, 0]
        return tf.nn.sigmoid_cross_entropy_with_logits(inputs["y"], logits)


def state_after(trainer, prequential, strategy, steps=20, **settings):
    settings = {"global_batch_size": 8, "steps_per_loop": 5, "writers": [], **settings}
    with flat_config.controller(trainer=trainer, strategy=strategy, actions=prequential, **settings) as controller:
        controller.train(steps)
    return [np.asarray(tf.convert_to_tensor(one)) for one in [*trainer.model.weights, *trainer.optimizer.variables]]


@pytest.mark.parametrize(
    "name, loop, family, settings",
    [
        ("default", "graph", keras3, dict(micro_batches=2)),
        pytest.param("mirrored_x2", "graph", keras3, {}, marks=pytest.mark.slow),
        pytest.param("default", "xla", keras3, {}, marks=pytest.mark.slow),
        pytest.param("default", "eager", keras3, {}, marks=pytest.mark.slow),
        pytest.param("mirrored_x2", "graph", keras3, dict(jit_compile=True), marks=pytest.mark.slow),
    ],
)
def test_the_training_has_the_same_bits_with_and_without_it(name, loop, family, settings):
    strategy, found = make_strategy(name), []
    for wanted in (True, False):
        with strategy.scope():
            trainer = Net(family, **settings)
            actions = [looplib.Prequential(program.Unseen(trainer.model, family), 80)] if wanted else []
        found.append(state_after(trainer, actions, strategy, loop=loop))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_an_evaluation_that_shares_its_metrics_changes_nothing(tmp_path, expected):
    class Both(program.Unseen):
        def dataset(self, context):
            return program.Clicks.dataset(self, context)

    trainer = program.Clicks()
    evaluator = Both(trainer.model)
    with flat_config.controller(
        trainer=trainer, evaluator=evaluator, model_dir=tmp_path, global_batch_size=8, steps_per_loop=5,
        actions=[looplib.Prequential(evaluator, 80)], writers=["jsonl"],
    ) as controller:  # fmt: skip
        controller.train_and_evaluate(20, 4)
    found = records(tmp_path)
    assert list(found) == [10, 20]
    for window, right in zip(found.values(), expected[0]):
        assert window == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize("family", [keras3, pytest.param(tf_keras, marks=pytest.mark.slow)])
def test_a_compiled_model_is_evaluated_by_an_evaluator_of_its_own(family, tmp_path):
    strategy, count = make_strategy("mirrored_x2"), 41

    class Error(looplib.Evaluator):
        def dataset(self, context):
            raise NotImplementedError

        def step_fn(self, inputs):
            x, y = inputs
            return {"error": tf.square(self.model(x, training=False)[:, 0] - y), "size": looplib.total(tf.size(y))}

    with strategy.scope():
        model = family.Sequential([family.layers.InputLayer((3,)), family.layers.Dense(1)])
        model.compile(family.optimizers.SGD(0.0), "mse")
        trainer = looplib.KerasTrainer(model, program.X[:count], program.Y[:count], shuffle=False)
    with flat_config.controller(
        trainer=trainer, strategy=strategy, model_dir=tmp_path, global_batch_size=8, steps_per_loop=6,
        actions=[looplib.Prequential(Error(model), 48)], writers=["jsonl"],
    ) as controller:  # fmt: skip
        controller.train(epochs=1)
    (found,) = records(tmp_path).values()
    right = np.square(model(program.X[:count]).numpy()[:, 0] - program.Y[:count]).mean()
    assert (found["examples"], found["size"]) == (count, count)  # of the last batch, one replica has no example
    assert found["error"] == pytest.approx(right, rel=1e-5)


@pytest.mark.slow
def test_ids_of_a_growing_table_are_looked_up_before_they_get_rows(tmp_path):
    ids = np.random.RandomState(0).randint(0, 60, 160)

    class Users(looplib.GradientTrainer):
        def __init__(self):
            inputs = keras3.Input((), dtype="int64")
            self.table = looplib.DynamicEmbedding(2, 100)
            model = keras3.Model(inputs, keras3.layers.Dense(1)(self.table(inputs)))
            super().__init__(model, keras3.optimizers.Adagrad(0.1))

        def dataset(self, context):
            return context.indices(160, shuffle=False).map(lambda i: tf.gather(ids, i))

        def loss_fn(self, inputs):
            return tf.square(self.model(inputs, training=True)[:, 0] - 1)

    class Unknown(looplib.Evaluator):
        def dataset(self, context):
            raise NotImplementedError

        def step_fn(self, inputs):
            zeros = tf.reduce_all(self.table(inputs) == 0, axis=1)
            return {"inputs/user/unknown": self.table.is_unknown(inputs), "zeros": zeros}

    strategy = make_strategy("mirrored_x2")
    with strategy.scope():
        trainer = Users()
        evaluator = Unknown(trainer.model)
        evaluator.table = trainer.table
    with flat_config.controller(
        trainer=trainer, strategy=strategy, model_dir=tmp_path, global_batch_size=8, steps_per_loop=2,
        actions=[looplib.Prequential(evaluator, 40)], writers=["jsonl"],
    ) as controller:  # fmt: skip
        controller.train(20)
    seen, shares = set(), []
    for batch in ids.reshape(20, 8):
        shares.append(np.mean([one not in seen for one in batch]))
        seen |= set(batch)
    found = [*records(tmp_path).values()]
    right = np.reshape(shares, (4, 5)).mean(1)
    np.testing.assert_allclose([window["inputs/user/unknown"] for window in found], right, rtol=1e-12)
    np.testing.assert_allclose([window["zeros"] for window in found], right, rtol=1e-12)
    assert {window["inputs/user/unknown_at_start"] for window in found} == {found[0]["inputs/user/unknown"]}


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_bad_step_adds_nothing_and_a_rollback_takes_its_windows_back(policy, tmp_path):
    class Bad(program.Clicks):
        def dataset(self, context):
            bad = context.indices(640).map(
                lambda i: {"x": tf.gather(program.X, i), "y": tf.gather(program.Y, i), "id": i}
            )
            number = tf.data.Dataset.range(640)
            return tf.data.Dataset.zip(bad, number).map(
                lambda one, n: {**one, "y": tf.where(tf.equal(n, 13), np.nan, one["y"])}
            )

    strategy = make_strategy("default")
    with strategy.scope():
        trainer = Bad()
        prequential = looplib.Prequential(program.Unseen(trainer.model), 80)
    with flat_config.controller(
        trainer=trainer, model_dir=tmp_path, global_batch_size=8, steps_per_loop=5, actions=[prequential],
        guards=looplib.Guards(non_finite=policy), checkpoints=looplib.CheckpointPolicy(every_steps=10),
        writers=["jsonl"],
    ) as controller:  # fmt: skip
        controller.train(30)
    found = records(tmp_path)
    assert list(found) == [10, 20, 30]
    assert [window["examples"] for window in found.values()] == [80, 72 if policy == "skip" else 80, 80]
    assert all(np.isfinite(list(window.values())).all() for window in found.values())


def test_a_window_by_time_ends_with_the_first_report_after_it(tmp_path):
    seconds, ends = 0.5, []

    def note(event):
        ends.append((event.step, time.time(), "prequential/loss" in event.metrics))
        time.sleep(0.05)

    started = time.time()
    window = f"{seconds}s"
    train(make_strategy("mirrored_x2"), tmp_path, 60, window=window, actions=[note], steps_per_loop=2)
    windows = [(step, at) for step, at, ended in ends if ended]
    assert len(windows) > 1
    assert windows[0][1] - started >= seconds
    for (_, before), (_, after) in zip(windows, windows[1:]):
        assert after - before >= seconds - 0.1
    steps = [0, *(step for step, _ in windows)]
    assert [window["examples"] for window in records(tmp_path).values()] == [8 * n for n in np.diff(steps)]


def test_the_page_of_a_run_has_the_curves(tmp_path):
    train(make_strategy("default"), tmp_path, 20, steps_per_loop=10)
    run = read_run(str(tmp_path), "run")
    curve = run.curve("train/prequential/auc")
    assert curve.steps.tolist() == [10, 20]
    assert run.curve("train/prequential/inputs/x0/mean_at_start").values[0] == curve_of(run, "x0/mean")[0]
    assert "prequential/auc" in (tmp_path / "report.html").read_text()


def curve_of(run, name):
    return run.curve(f"train/prequential/inputs/{name}").values


def test_an_action_that_is_added_in_the_middle_begins_with_the_rest_of_its_window(tmp_path, expected):
    with flat_config.controller(
        trainer=program.Clicks(), model_dir=tmp_path, global_batch_size=8, steps_per_loop=5, writers=["jsonl"]
    ) as controller:  # fmt: skip
        controller.train(25)
    train(make_strategy("default"), tmp_path)  # with reports at 28 and 35, and windows that end at 30 and 40
    found = records(tmp_path)
    assert {step: window["examples"] for step, window in found.items()} == {35: 40, 42: 80, 56: 80, 60: 80}
    assert found[42]["auc"] == pytest.approx(expected[0][3]["auc"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["graph", "eager"])
@pytest.mark.parametrize("kind", ["growing", "divided"])
def test_predictions_leave_the_rows_and_the_ids_of_tables_as_they_are(kind, loop):
    ids, found = np.random.RandomState(0).randint(0, 60, 160), []

    class Users(looplib.GradientTrainer):
        def __init__(self):
            keras3.utils.set_random_seed(0)
            growing = dict(admit_after=2, expire_after=4, full="evict")
            table = looplib.DynamicEmbedding(2, 20, **growing) if kind == "growing" else looplib.ShardedEmbedding(60, 2)
            inputs = keras3.Input((), dtype="int64")
            super().__init__(
                keras3.Model(inputs, keras3.layers.Dense(1)(table(inputs))), keras3.optimizers.Adagrad(0.1)
            )

        def dataset(self, context):
            return context.indices(160).map(lambda i: tf.gather(ids, i))

        def loss_fn(self, inputs):
            return tf.square(self.model(inputs, training=True)[:, 0] - 1)

    for wanted in (True, False):
        with (strategy := make_strategy("mirrored_x2")).scope():
            trainer = Users()
            action = looplib.Prequential(Wrong(trainer, lambda self, inputs: {"p": self.model(inputs)}), 40)
        found.append(state_after(trainer, [action] * wanted, strategy, loop=loop))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


class Peak(keras3.metrics.Metric):
    def __init__(self):
        super().__init__()
        self.peak = self.add_weight(name="peak", initializer="zeros")

    def update_state(self, values):
        self.peak.assign(tf.maximum(self.peak, tf.reduce_max(values)))

    def result(self):
        return self.peak


class Wrong(looplib.Evaluator):
    """Returns what is refused."""

    def __init__(self, trainer, step):
        super().__init__(trainer.model)
        self.trainer_metric, self.peak, self._step = getattr(trainer, "metric", None), Peak(), step
        self.calls = tf.Variable(0.0)

    def dataset(self, context):
        raise NotImplementedError

    def step_fn(self, inputs):
        return self._step(self, inputs)


def shared(self, inputs):
    self.trainer_metric.update_state(inputs["y"])
    return {"metric": self.trainer_metric}


def of_a_foreign_class(self, inputs):
    self.peak.update_state(inputs["y"])
    return {"peak": self.peak}


def with_a_memory(self, inputs):
    self.calls.assign_add(1.0)
    return {"calls": looplib.total(self.calls)}


REFUSED = {
    "changes .*moving_": lambda self, inputs: {"p": self.model(inputs["x"], training=True)},
    "a looplib.last or a looplib.each": lambda self, inputs: {"last": looplib.last(inputs["y"][0])},
    "which no window sums": lambda self, inputs: {"each": looplib.each(inputs["y"])},
    "changes mean.*, of the trainer.* metrics of the evaluator's own": shared,
    "changes Variable.* or in no checkpoint": with_a_memory,
    "draws random numbers .RandomUniform.": lambda self, inputs: {"p": inputs["y"] + tf.random.uniform(())},
    "may be no sum over examples": of_a_foreign_class,
    "Tensor; expected a dict": lambda self, inputs: looplib.input_means(inputs["x"]),
    "is not fully known": lambda self, inputs: {"sum": looplib.total(tf.boolean_mask(inputs["y"], inputs["y"] > 0))},
}


@pytest.mark.parametrize("loop", ["graph", "eager"])
@pytest.mark.parametrize("sentence", REFUSED)
def test_an_evaluator_that_no_window_can_have_is_refused(sentence, loop):
    if loop == "eager" and "not fully known" in sentence:
        pytest.skip("an eager step knows all shapes")
    trainer = Net(keras3)
    trainer.metric = keras3.metrics.Mean()
    action = looplib.Prequential(Wrong(trainer, REFUSED[sentence]), 80)
    with pytest.raises(looplib.UsageError, match=sentence):
        flat_config.controller(
            trainer=trainer, global_batch_size=8, writers=[], actions=[action], loop=loop, steps_per_loop=1
        ).train(1)


def test_what_cannot_be_evaluated_before_a_step_is_refused_when_it_is_made():
    trainer = Net(keras3, average_decay=0.9)
    averaged = program.Unseen(trainer.model)
    averaged.averages = trainer.averages
    model = keras3.Sequential([keras3.Input((3,)), keras3.layers.Dense(1)])
    model.compile("sgd", "mse")
    compiled = looplib.KerasTrainer(model, program.X, program.Y, validation_data=(program.X, program.Y)).evaluator()
    for evaluator, window, sentence in (
        (averaged, 80, "without averages"),
        (compiled, 80, "with a step_fn of its own"),
        (trainer, 80, "expected a looplib.Evaluator"),
        (program.Unseen(trainer.model), 0, "window of Prequential"),
        (program.Unseen(trainer.model), "soon", "window of Prequential"),
    ):
        with pytest.raises(looplib.UsageError, match=sentence):
            looplib.Prequential(evaluator, window)


def test_a_window_shorter_than_a_report_is_refused():
    trainer = program.Clicks()
    action = looplib.Prequential(program.Unseen(trainer.model), 80)
    controller = flat_config.controller(
        trainer=trainer, global_batch_size=8, steps_per_loop=11, writers=[], actions=[action]
    )
    with pytest.raises(looplib.UsageError, match="80 examples, 10 steps, and a report comes every 11"):
        controller.train(11)
