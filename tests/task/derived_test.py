"""Averages of weights start from the weights that a run starts with, wherever these come from."""

import json
import pathlib

import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from conftest import make_strategy

import looplib
from looplib.compat import keras as _keras
from looplib.errors import CheckpointError, ClosedError

FAMILIES = {"keras": keras3, "tf_keras": tf_keras}
PRETRAINED = np.array([[1.0], [2.0], [3.0], [4.0]], "float32")
DECAY, STEPS, BATCH = 0.9, 3, 8
X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X @ np.array([[4.0], [3.0], [2.0], [1.0]], "float32")


def line(keras, ema=False):
    layers = [keras.layers.InputLayer((4,)), keras.layers.Dense(1, use_bias=False, name="line")]
    options = dict(use_ema=True, ema_momentum=DECAY) if ema else {}
    return keras.Sequential(layers), keras.optimizers.SGD(0.05, **options)


def dataset(context):
    return context.indices(64).map(lambda i: (tf.gather(X, i), tf.gather(Y, i)))


class Gradient(looplib.GradientTrainer):
    """Its averages are those of `average_decay`, or the optimizer's own."""

    def __init__(self, keras, ema=False, averages=True):
        super().__init__(*line(keras, ema), average_decay=DECAY if averages and not ema else None)

    def dataset(self, context):
        return dataset(context)

    def loss_fn(self, inputs):
        return tf.square(self.model(inputs[0], training=True) - inputs[1])[:, 0]


class Own(looplib.Trainer):
    """A step of one's own, with the averages deep in an attribute."""

    def __init__(self, keras, ema=False, averages=True):
        self.model, self.optimizer = line(keras, ema)
        if averages and not ema:
            self.kept = {"averages": [looplib.WeightAverages(self.model.trainable_variables, DECAY)]}

    def dataset(self, context):
        return dataset(context)

    def step_fn(self, inputs):
        with tf.GradientTape() as tape:
            losses = tf.square(self.model(inputs[0], training=True) - inputs[1])[:, 0]
            loss = self.global_mean(losses)
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        if "kept" in vars(self):
            self.kept["averages"][0].update()
        return {"loss": losses}


def compiled(keras, ema=True, averages=True):
    model, optimizer = line(keras, ema)
    model.compile(optimizer, "mse")
    return looplib.KerasTrainer(model, X, Y)


def average_of(trainer):
    """The average of the only weight, whoever keeps it."""
    if isinstance(trainer, Own) and "kept" in vars(trainer):
        return trainer.kept["averages"][0].values[0].numpy()
    if getattr(trainer, "averages", None):
        return trainer.averages.values[0].numpy()
    (optimizer,) = _keras.optimizers(trainer).values()
    ((_, average),) = _keras.averaged(optimizer, trainer.model.trainable_variables, with_updated=True)
    return average.numpy()


def trained(strategy, trainer, folder, steps, seen=None, **policy):
    """Trains, with the weight after each step in `seen`; returns the average before the first step, and after the last."""
    note = [] if seen is None else [lambda event: seen.append(trainer.model.get_weights()[0])]
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=BATCH, steps_per_loop=1),
        trainer=trainer,
        writers=[],
        model_dir=folder,
        strategy=strategy,
        actions=note,
        start=looplib.Start(**policy),
    ) as controller:  # fmt: skip
        first = average_of(trainer) if seen is not None else None
        controller.train(steps)
    return first, average_of(trainer) if seen is not None else None


def by_initialize(trainer, tmp_path, strategy, make):
    trainer.initialize = lambda: trainer.model.set_weights([PRETRAINED])
    return {}, 0


def by_warm_start(trainer, tmp_path, strategy, make):
    other = make(averages=False, ema=False)
    other.initialize = lambda: other.model.set_weights([PRETRAINED])
    trained(strategy, other, tmp_path / "other", 1)
    PLACES[tmp_path] = other.model.get_weights()[0]
    return dict(warm_start=str(tmp_path / "other")), 0


def by_a_partial_restore(trainer, tmp_path, strategy, make):
    by_warm_start(trainer, tmp_path, strategy, make)
    (tmp_path / "other").rename(tmp_path / "run")
    return dict(partial=True), 1


def by_continue_from(trainer, tmp_path, strategy, make):
    with strategy.scope():
        other = make(averages=False, ema=False)
        other.model.set_weights([PRETRAINED])
        other.optimizer.build(other.model.trainable_variables)
        step = tf.Variable(1, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(model=other.model, optimizer=other.optimizer, global_step=step)
    checkpoint.write(str(tmp_path / "theirs"))
    return dict(continue_from=str(tmp_path / "theirs")), 1


PLACES = {}
CASES = [  # trainer, family, whose averages, the start, strategy
    (Gradient, "keras", False, by_initialize, "default"),
    (Gradient, "tf_keras", False, by_warm_start, "mirrored_x2"),
    (Gradient, "keras", False, by_continue_from, "default"),
    (Own, "keras", False, by_warm_start, "mirrored_x2"),
    (Own, "tf_keras", False, by_a_partial_restore, "default"),
    (Gradient, "keras", False, by_a_partial_restore, "mirrored_x2"),
    (Gradient, "tf_keras", True, by_initialize, "mirrored_x2"),
    (Own, "keras", True, by_a_partial_restore, "default"),
    (Own, "tf_keras", True, by_a_partial_restore, "mirrored_x2"),
    (compiled, "tf_keras", True, by_warm_start, "default"),
    (compiled, "keras", True, by_a_partial_restore, "default"),
]


@pytest.mark.slow(spread=3)
@pytest.mark.parametrize(
    "kind, family, ema, start, name", CASES, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_averages_start_from_the_weights_of_the_start(kind, family, ema, start, name, tmp_path):
    strategy = make_strategy(name)

    def make(**options):
        with strategy.scope():
            return kind(FAMILIES[family], **options)

    trainer, seen = make(ema=ema), []
    policy, step = start(trainer, tmp_path, strategy, make)
    first, last = trained(strategy, trainer, tmp_path / "run", step + STEPS, seen, **policy)
    weights = PLACES.get(tmp_path, PRETRAINED)
    np.testing.assert_array_equal(first, weights)
    expected = weights.astype(np.float64)
    if ema and family == "keras" and step == 0:
        expected = seen[0]  # Keras 3 replaces the average in the first update
    assert len(seen) == STEPS and np.abs(seen[-1] - weights).max() > 0.1
    for weight in seen:
        expected = DECAY * expected + (1 - DECAY) * weight
    np.testing.assert_allclose(last, expected, rtol=1e-5)


@pytest.mark.slow
def test_averages_of_a_checkpoint_or_of_the_program_are_kept(tmp_path):
    strategy, seen = make_strategy("default"), []
    _, saved = trained(strategy, Gradient(keras3), tmp_path, 5, seen)
    for policy in ({}, dict(partial=True)):
        first, _ = trained(strategy, Gradient(keras3), tmp_path, 5, [], **policy)
        np.testing.assert_array_equal(first, saved)
    assert np.abs(saved - seen[-1]).max() > 0.1
    trainer = Gradient(keras3)
    trainer.averages.values[0].assign(PRETRAINED)  # before the controller is built
    np.testing.assert_array_equal(trained(strategy, trainer, None, 1, [])[0], PRETRAINED)
    alone = looplib.WeightAverages([tf.Variable([1.0]), tf.Variable(tf.zeros([0, 3]))], DECAY)
    assert [average.name for average in alone.values] == ["average/Variable:0"] * 2


@pytest.mark.slow
def test_a_restore_that_fails_changes_no_average(tmp_path):
    strategy = make_strategy("default")
    trained(strategy, Gradient(keras3), tmp_path / "run", 2)
    trainer = Gradient(keras3)
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=BATCH),
        trainer=trainer,
        writers=[],
        model_dir=tmp_path / "other",
        start=looplib.Start(partial=True),
    ) as controller:  # fmt: skip
        controller.train(1)
        before = average_of(trainer)
        path = tmp_path / "run" / "checkpoints" / "ckpt-2"
        path.with_suffix(".index").write_bytes(b"")
        with pytest.raises(CheckpointError, match="ckpt-2"):
            controller.restore_checkpoint(path)
        np.testing.assert_array_equal(average_of(trainer), before)
        assert controller.train(3)


class Error(looplib.Evaluator):
    def __init__(self, trainer, hook=None):
        self.model, self.averages, self.hook = trainer.model, trainer.averages, hook

    def dataset(self, context):
        return context.indices(64).map(lambda i: (tf.gather(X, i), tf.gather(Y, i)))

    def step_fn(self, inputs):
        return {"error": tf.square(self.model(inputs[0]) - inputs[1])[:, 0]}

    def predict_fn(self, inputs):
        return {"line": self.model(inputs[0])[:, 0]}

    def loop_end(self, metrics):
        if self.hook:
            self.hook()
        return metrics


@pytest.mark.slow
@pytest.mark.parametrize("name, family", [("default", "tf_keras"), ("mirrored_x2", "keras")])
def test_averages_that_are_in_use_stay_so_in_what_is_computed_and_are_saved_in_their_place(name, family, tmp_path):
    strategy, hook = make_strategy(name), [lambda: None]

    def controller_of():
        with strategy.scope():
            trainer = Gradient(FAMILIES[family])
        evaluator = Error(trainer, lambda: hook[0]())
        config = looplib.RunConfig(global_batch_size=BATCH, steps_per_loop=STEPS)
        return trainer, looplib.Controller(
            config, trainer=trainer, evaluator=evaluator, strategy=strategy, writers=[], model_dir=tmp_path / "run"
        )

    trainer, controller = controller_of()
    averages = trainer.averages
    controller.train(STEPS)
    weights, average = trainer.model.get_weights()[0], average_of(trainer)
    assert np.abs(weights - average).max() > 0.01
    with averages.in_use(), averages.in_use():
        np.testing.assert_array_equal(trainer.model.get_weights()[0], average)
        assert np.isclose(controller.evaluate()["eval"]["error"], np.mean((X @ average - Y) ** 2), rtol=1e-5)
        piece = pathlib.Path(controller.predict()["eval"]) / "piece-00000.jsonl"
        lines = [json.loads(line)["line"] for line in piece.read_text().splitlines()]
        np.testing.assert_allclose(lines, (X @ average)[:, 0], rtol=1e-5, atol=1e-6)
        exported = tf.saved_model.load(f"{controller.export(str(tmp_path / 'export'))}/saved_model")
        np.testing.assert_allclose(exported.serve(X), X @ average, rtol=1e-5, atol=1e-6)
        with pytest.raises(ClosedError, match="in use"):
            controller.train(2 * STEPS)
        controller.save_checkpoint()
        np.testing.assert_array_equal(trainer.model.get_weights()[0], average)
        controller.restore_checkpoint()
        np.testing.assert_array_equal(trainer.model.get_weights()[0], average)
    np.testing.assert_array_equal(trainer.model.get_weights()[0], weights)
    for call in (controller.save_checkpoint, controller.restore_checkpoint, lambda: controller.train(2 * STEPS)):
        hook[0] = call
        with pytest.raises(ClosedError, match="evaluates"):
            controller.evaluate()
    hook[0] = lambda: None
    controller.close()
    with trainer.averages.in_use():
        again, second = controller_of()
    with second:
        np.testing.assert_array_equal(again.model.get_weights()[0], weights)
        np.testing.assert_array_equal(average_of(again), average)
