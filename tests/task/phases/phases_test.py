"""Phases: one run that trains other variables, or at another rate, from some steps on, on every engine."""

import json

import flat_config
import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from conftest import make_strategy

import looplib
from looplib.compat import keras as _keras
from looplib.errors import EndlessDataError, MismatchError, ModelError, OptimizerError, SettingError, StaleTraceError
from looplib.report.page import content

# A global batch is an epoch, so that each step sees all examples, in any order.
BATCH, FEATURES, HIDDEN = 16, 4, 3
_random = np.random.RandomState(0)
X = _random.randn(BATCH, FEATURES).astype("float32")
Y = _random.randn(BATCH, 1).astype("float32")
NAMES = ("encoder/kernel", "encoder/bias", "head/kernel", "head/bias")
START = {
    "encoder/kernel": _random.randn(FEATURES, HIDDEN).astype("float32"),
    "encoder/bias": np.zeros(HIDDEN, "float32"),
    "head/kernel": _random.randn(HIDDEN, 1).astype("float32"),
    "head/bias": np.zeros(1, "float32"),
}
FIRST, STEPS = 5, 12
PHASES = [looplib.Phase(until=FIRST, train="head"), looplib.Phase(learning_rate=0.01)]
FAMILIES = {"keras": keras3, "tf_keras": tf_keras}


class Net(looplib.GradientTrainer):
    """tanh(x W + b) V + c, by least squares."""

    def __init__(self, optimizer=None, keras=keras3, phases=PHASES, **settings):
        layers = [keras.layers.Dense(HIDDEN, "tanh", name="encoder"), keras.layers.Dense(1, name="head")]
        model = keras.Sequential([keras.layers.InputLayer((FEATURES,)), *layers])
        model.set_weights([START[name] for name in NAMES])
        super().__init__(model, optimizer or keras.optimizers.SGD(0.1, momentum=0.9), phases=phases, **settings)

    def dataset(self, context):
        return context.indices(BATCH).map(lambda i: (tf.gather(X, i), tf.gather(Y, i)))

    def loss_fn(self, inputs):
        return tf.square(self.model(inputs[0], training=True) - inputs[1])[:, 0]


def gradients(weights):
    w = {name: weights[name].astype(np.float64) for name in NAMES}
    hidden = np.tanh(X @ w["encoder/kernel"] + w["encoder/bias"])
    error = 2 * (hidden @ w["head/kernel"] + w["head/bias"] - Y) / BATCH
    inner = (error @ w["head/kernel"].T) * (1 - hidden**2)
    return dict(zip(NAMES, (X.T @ inner, inner.sum(0), hidden.T @ error, error.sum(0))))


def in_numpy(kind, steps=STEPS, first=FIRST, clip=None, decay=0.0, average=None):
    """Trains the head alone for `first` steps, at rate 0.1, then all at rate 0.01; returns weights and averages."""
    w = {name: value.astype(np.float64) for name, value in START.items()}
    m, v = ({name: np.zeros_like(value) for name, value in w.items()} for _ in range(2))
    averages = {name: value.copy() for name, value in w.items()}
    for step in range(steps):
        trained, rate = (NAMES[2:], 0.1) if step < first else (NAMES, 0.01)
        every = gradients(w)
        norm = np.sqrt(sum(np.sum(every[name] ** 2) for name in trained))
        for name in trained:
            g = every[name] * (min(1.0, clip / norm) if clip else 1.0)
            w[name] -= rate * decay * w[name]
            if kind == "sgd":
                m[name] = 0.9 * m[name] - rate * g
                w[name] += m[name]
            else:
                alpha = rate * np.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
                m[name] += (g - m[name]) * 0.1
                v[name] += (g * g - v[name]) * 0.001
                w[name] -= alpha * m[name] / (np.sqrt(v[name]) + 1e-7)
            if average:
                averages[name] = average * averages[name] + (1 - average) * w[name]
    return w, averages


def assert_weights(trainer, expected):
    for found, name in zip(trainer.model.get_weights(), NAMES):
        np.testing.assert_allclose(found, expected[name], rtol=2e-4, atol=2e-6, err_msg=name)


def train(trainer, steps=STEPS, strategy=None, **settings):
    settings = dict(steps_per_loop=4, writers=[], global_batch_size=BATCH) | settings
    strategy = strategy or make_strategy("default")
    with flat_config.controller(trainer=trainer, strategy=strategy, **settings) as controller:
        return controller.train(steps)


def optimizer_of(kind, keras):
    return keras.optimizers.SGD(0.1, momentum=0.9) if kind == "sgd" else keras.optimizers.Adam(0.1)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "name, loop, kind, family",
    [
        ("default", "graph", "sgd", "keras"),
        ("mirrored_x2", "eager", "sgd", "keras"),
        ("default", "auto", "adam", "tf_keras"),
        ("mirrored_x2", "graph", "sgd", "tf_keras"),
        ("default", "xla", "sgd", "tf_keras"),
        ("default", "eager", "adam", "keras"),
        ("default", "xla", "adam", "keras"),
        ("mirrored_x2", "graph", "adam", "keras"),
    ],
)
def test_two_phases_equal_a_plain_loop_in_numpy(name, loop, kind, family):
    strategy, keras = make_strategy(name), FAMILIES[family]
    with strategy.scope():
        trainer = Net(optimizer_of(kind, keras), keras)
    train(trainer, strategy=strategy, loop=loop)
    assert_weights(trainer, in_numpy(kind)[0])


@pytest.mark.slow
def test_what_a_phase_does_not_train_has_no_decay_no_part_in_clipping_and_no_average():
    optimizer = keras3.optimizers.AdamW(0.1, weight_decay=0.1)
    report = ("learning_rate", "gradient_norm", "layer_norms")
    trainer = Net(optimizer, clip_global_norm=0.5, average_decay=0.8, report=report)
    with flat_config.controller(trainer=trainer, global_batch_size=BATCH, steps_per_loop=5, writers=[]) as controller:
        metrics = controller.train(FIRST)
        norms = {name.split("/", 2)[2]: value for name, value in metrics.items() if name.startswith("gradient_norm/")}
        assert norms["encoder/kernel"] == 0 < norms["head/kernel"] and metrics["learning_rate"] == np.float32(0.1)
        slots = [variable.numpy() for variable in optimizer.variables if "encoder" in variable.path]
        assert len(slots) == 4 and not any(map(np.any, slots))
        controller.train(STEPS)
    expected, averages = in_numpy("adam", clip=0.5, decay=0.1, average=0.8)
    assert_weights(trainer, expected)
    for found, name in zip(trainer.averages.values, NAMES):
        np.testing.assert_allclose(found.numpy(), averages[name], rtol=2e-4, atol=2e-6)


def test_averages_of_what_a_later_phase_freezes_stay():
    trainer = Net(phases=[looplib.Phase(until=FIRST), looplib.Phase(train="head")], average_decay=0.8)
    with flat_config.controller(trainer=trainer, global_batch_size=BATCH, steps_per_loop=4, writers=[]) as controller:
        controller.train(FIRST)
        encoder = [value.numpy() for value in trainer.averages.values[:2]]
        controller.train(STEPS)
    assert all(map(np.array_equal, encoder, [value.numpy() for value in trainer.averages.values[:2]]))
    assert not np.allclose(encoder[0], trainer.model.get_weights()[0])


def everything(trainer):
    return [np.asarray(variable) for variable in [*trainer.model.variables, *trainer.optimizer.variables]]


@pytest.mark.slow
@pytest.mark.parametrize("name, loop", [("mirrored_x2", "graph"), ("default", "auto"), ("default", "graph")])
def test_a_run_that_stops_at_the_end_of_a_phase_and_in_the_next_one_resumes_bit_by_bit(name, loop, tmp_path, caplog):
    strategy = make_strategy(name)

    def run(folder, *ends):
        for end in ends:
            with strategy.scope():
                trainer = Net(keras3.optimizers.Adam(0.1))
            train(trainer, end, strategy, model_dir=tmp_path / folder, loop=loop, writers=None)
        return trainer

    whole, stopped = run("whole", STEPS), run("stopped", FIRST, 7, STEPS)
    assert all(map(np.array_equal, everything(whole), everything(stopped)))
    assert "the program had changed it" not in caplog.text
    curves = [
        [json.loads(line) for line in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()]
        for folder in ("whole", "stopped")
    ]
    losses = [{record["step"]: record["loss"] for record in records} for records in curves]
    assert losses[0] == {step: loss for step, loss in losses[1].items() if step in losses[0]}
    report = json.loads((tmp_path / "stopped" / "run.json").read_text())
    assert len(report["starts"]) == 3
    assert report["flags"]["phases"] == [
        {"until": 5, "train": "head", "learning_rate": None}, {"until": None, "train": "", "learning_rate": 0.01},
    ]  # fmt: skip
    assert [(mark.kind, mark.step) for mark in content.read_run(str(tmp_path / "whole"), "whole").marks][0] == (
        "phase",
        FIRST,
    )


@pytest.mark.slow
@pytest.mark.parametrize("later, expected", [(0.02, 0.02), (0.01, 0.005)])
def test_a_rate_that_an_action_has_changed_stays_and_one_that_the_program_changes_applies(
    later, expected, tmp_path, caplog
):
    def halve(event):
        if event.step == 8:
            trainer.optimizer.learning_rate = trainer.optimizer.learning_rate / 2

    for end, rate, found in ((10, 0.01, 0.005), (11, later, expected)):
        trainer = Net(phases=[PHASES[0], looplib.Phase(learning_rate=rate)])
        train(trainer, end, model_dir=tmp_path, actions=[halve])
        np.testing.assert_allclose(trainer.optimizer.learning_rate, found)
    assert later == 0.01 or ("0.02 from step 10" in caplog.text and "phases=" in caplog.text)


class Poisoned(Net):
    """A batch, the 7th, has a value that is not finite."""

    def dataset(self, context):
        positions = tf.data.Dataset.counter(context.start_step)
        poison = lambda position, batch: (tf.where(position == 6, np.nan, batch[0]), batch[1])  # noqa: E731
        return tf.data.Dataset.zip(positions, super().dataset(context)).map(poison)


@pytest.mark.slow
def test_a_guard_rolls_back_over_the_end_of_a_phase(tmp_path):
    trainer = Poisoned()
    guards = looplib.Guards(non_finite="rollback")
    policy = looplib.CheckpointPolicy(every_steps=4)
    train(trainer, model_dir=tmp_path, guards=guards, checkpoints=policy)
    assert_weights(trainer, in_numpy("sgd")[0])
    (back,) = json.loads((tmp_path / "run.json").read_text())["starts"][-1]["rollbacks"]
    assert (back["step"], back["to"]) == (7, 4)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["eager", "graph"])
def test_a_value_that_is_not_finite_is_found_in_its_step_after_a_phase_has_begun(loop):
    with pytest.raises(looplib.DivergenceError, match=r"\bstep 7\b"):
        train(Poisoned(), loop=loop, steps_per_loop=12)


def normalized(keras, **settings):
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.InputLayer((FEATURES,)), keras.layers.Dense(HIDDEN, name="encoder_dense"),
        keras.layers.BatchNormalization(name="encoder_norm", momentum=0.5), keras.layers.Dense(1, name="head"),
    ]  # fmt: skip

    class Normalized(looplib.GradientTrainer):
        dataset, loss_fn = Net.dataset, Net.loss_fn

    return Normalized(keras.Sequential(layers), keras.optimizers.Adam(0.05), **settings)


class Error(looplib.Evaluator):
    dataset = Net.dataset

    def step_fn(self, inputs):
        return {"loss": tf.square(self.model(inputs[0], training=False) - inputs[1])[:, 0]}


def test_frozen_batch_normalization_keeps_its_statistics_and_its_layer_is_as_the_user_left_it():
    trainer = normalized(keras3, phases=[looplib.Phase(until=FIRST, train="head"), looplib.Phase()])
    norm = trainer.model.get_layer("encoder_norm")
    with flat_config.controller(trainer=trainer, global_batch_size=BATCH, steps_per_loop=4, writers=[]) as controller:
        controller.train(FIRST)
        assert norm.trainable and norm.gamma.trainable and not np.any(norm.moving_mean)
        controller.train(STEPS)
        assert np.any(norm.moving_mean)


@pytest.mark.slow
@pytest.mark.parametrize("name, family", [("mirrored_x2", "keras"), ("default", "tf_keras")])
def test_phases_equal_two_starts_with_a_partial_restore_also_in_batch_normalization(name, family, tmp_path):
    strategy, keras = make_strategy(name), FAMILIES[family]

    def run(folder, steps, **settings):
        with strategy.scope():
            trainer = normalized(keras, **settings)
        norm = trainer.model.get_layer("encoder_norm")
        start = looplib.Start(partial=folder == "two")
        with flat_config.controller(
            trainer=trainer, evaluator=Error(trainer.model), strategy=strategy, global_batch_size=BATCH,
            steps_per_loop=4, model_dir=tmp_path / folder, start=start, writers=[],
        ) as controller:  # fmt: skip
            found = controller.train_and_evaluate(steps, 3)
            return found, norm.trainable, np.asarray(norm.moving_mean), trainer.model.get_weights()

    phases = [looplib.Phase(until=FIRST, train="head"), looplib.Phase()]
    _, trainable, mean, _ = run("one", FIRST, phases=phases)
    assert trainable and not np.any(mean)
    found, _, mean, weights = run("one", STEPS, phases=phases)
    run("two", FIRST, freeze="encoder")
    expected, _, _, others = run("two", STEPS)
    assert np.any(mean) and found["eval"] == expected["eval"]
    assert all(map(np.array_equal, weights, others))


@pytest.mark.slow
def test_each_phase_is_traced_once_and_a_value_that_changes_in_between_is_found():
    trainer = Net()
    trainer.scale = 1.0
    type_ = type("Scaled", (Net,), {"loss_fn": lambda self, inputs: self.scale * Net.loss_fn(self, inputs)})
    trainer.__class__ = type_
    with flat_config.controller(trainer=trainer, global_batch_size=BATCH, steps_per_loop=4, writers=[]) as controller:
        controller.train(STEPS)
        programs = controller.loops["train"]._programs
        assert [programs[number].inner.traces for number in (0, 1)] == [1, 1]
        trainer.scale = 2.0
        with pytest.raises(StaleTraceError, match="scale is 2.0 and was 1.0"):
            controller.train(STEPS + 1)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"phases": [looplib.Phase(train="encoder")]}, {"phases": None, "freeze": "head"}])
def test_other_trained_variables_are_refused_by_their_names_and_phases_that_are_gone_are_said(
    settings, tmp_path, caplog
):
    head = [looplib.Phase(until=FIRST, train="head")]
    train(Net(phases=head), steps=4, model_dir=tmp_path)
    with pytest.raises(MismatchError) as refused:
        train(Net(**settings), model_dir=tmp_path)
    assert "only there: SGD momentum of model/head/bias" in str(refused.value) and "other names" not in str(
        refused.value
    )
    train(Net(phases=None, freeze="encoder"), model_dir=tmp_path)
    assert "phases=None (was [{" in caplog.text and "'train': 'head'" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("family", ["tf_keras", "keras"])
def test_what_no_phase_trains_is_frozen_and_each_optimizer_counts_its_own_updates(family):
    keras = FAMILIES[family]
    optimizers = {"encoder": keras.optimizers.Adam(0.01), "": keras.optimizers.SGD(0.1)}
    phases = [looplib.Phase(until=FIRST, train="head/kernel"), looplib.Phase(train=("head/kernel", "encoder"))]
    trainer = Net(optimizers, keras, phases=phases)
    train(trainer)
    (frozen,) = trainer.frozen_variables
    assert _keras.variable_path(frozen).endswith("head/bias")
    assert [int(one.iterations) for one in optimizers.values()] == [STEPS - FIRST, STEPS]
    assert np.array_equal(trainer.model.get_weights()[3], START["head/bias"])


@pytest.mark.slow
def test_the_parts_of_a_batch_are_measured_for_each_phase():
    trainer = Net(micro_batches="auto")
    train(trainer)
    assert trainer.micro_batches == 1
    assert_weights(trainer, in_numpy("sgd")[0])


class Ema(Net):
    def __init__(self, phases):
        super().__init__(keras3.optimizers.SGD(0.1, use_ema=True), phases=phases)


@pytest.mark.parametrize(
    "error, make, match",
    [
        (SettingError, lambda: looplib.Phase(until=0), "until is 0"),
        (SettingError, lambda: looplib.Phase(train=()), "train is"),
        (SettingError, lambda: looplib.Phase(learning_rate=lambda step: 0.1), "schedule"),
        (SettingError, lambda: looplib.Phase(learning_rate=float("nan")), "finite number"),
        (SettingError, lambda: looplib.Phase(learning_rate=-1.0), "-1.0; expected a finite number, 0 or more"),
        (SettingError, lambda: Net(phases=[]), "list such as"),
        (SettingError, lambda: Net(phases=[500]), "list such as"),
        (SettingError, lambda: Net(phases=[looplib.Phase(5), looplib.Phase(5)]), "phase 2 ends at step 5"),
        (SettingError, lambda: Net(phases=[looplib.Phase(), looplib.Phase(5)]), "phase 1 has no until"),
        (ModelError, lambda: Net(phases=[looplib.Phase(5, "tail"), looplib.Phase()]), "train of phase 1 has 'tail'"),
        (ModelError, lambda: Net(phases=[looplib.Phase(5, "encoder")], freeze="encoder"), "no trained variable"),
        (OptimizerError, lambda: Ema(PHASES), "use_ema"),
        (
            OptimizerError,
            lambda: Net(keras3.optimizers.SGD(keras3.optimizers.schedules.CosineDecay(0.1, 9))),
            "has a schedule",
        ),
        (SettingError, lambda: train(Net(phases=[PHASES[0], looplib.Phase(10)])), "last phase ends at step 10"),
        (SettingError, lambda: train(Net(phases=[looplib.Phase(10)]), -1), "never ends|last phase ends at step 10"),
    ],
)
def test_phases_that_cannot_be_trained_are_refused_when_the_trainer_is_built_or_the_training_starts(error, make, match):
    with pytest.raises((error, EndlessDataError), match=match):
        make()
