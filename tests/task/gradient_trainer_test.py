"""GradientTrainer: the update of a loss is numpy's, on any number of replicas and micro-batches."""

import os
import subprocess
import sys

import flat_config
import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
import toy
from conftest import make_strategy, more

import looplib
from looplib import UsageError
from looplib.base.messages import parse_error
from looplib.compat import keras as _keras
from looplib.errors import DatasetError, EngineError, LossError, OptimizerError, StaleTraceError, StepError
from looplib.task import micro_batches, model_table
from looplib.task.gradient_trainer import Clipping, DynamicLossScale

# A global batch is an epoch, so that each step sees all examples, in any order.
BATCH, TOKENS, FEATURES, CLASSES, RATE = 32, 6, 5, 3, 0.5
_random = np.random.RandomState(1)
X = _random.randn(BATCH, TOKENS, FEATURES).astype("float32")
Y = _random.randint(0, CLASSES, [BATCH, TOKENS])
LENGTHS = _random.randint(0, TOKENS + 1, BATCH)  # some sentences have no token
MASK = (np.arange(TOKENS) < LENGTHS[:, None]).astype("float32")
KERNEL = _random.randn(FEATURES, CLASSES).astype("float32")
FAMILIES = {"keras": keras3, "tf_keras": tf_keras}


def old_sgd():
    return tf_keras.optimizers.legacy.SGD(0.1)


class Tagger(looplib.GradientTrainer):
    """Softmax regression on the tokens of sentences of many lengths."""

    def __init__(self, keras=keras3, optimizer=None, regularizer=0.0, weighted=True, blow_up_at=None, **settings):
        dense = keras.layers.Dense(
            CLASSES, name="dense", kernel_regularizer=keras.regularizers.L2(regularizer) if regularizer else None
        )
        model = keras.Sequential([keras.layers.InputLayer((TOKENS, FEATURES)), dense])
        dense.set_weights([KERNEL, np.zeros(CLASSES)])
        super().__init__(model, optimizer or keras.optimizers.SGD(RATE), **settings)
        self._weighted, self._blow_up_at = weighted, blow_up_at

    def dataset(self, context):
        return context.indices(BATCH).map(lambda i: (tf.gather(X, i), tf.gather(Y, i), tf.gather(MASK, i)))

    def loss_fn(self, inputs):
        x, y, mask = inputs
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, self.model(x, training=True))
        if self._blow_up_at is not None:
            losses *= tf.where(tf.equal(self.global_step, self._blow_up_at), 1e36, 1.0)
        metrics = {"tokens": looplib.total(tf.reduce_sum(mask))}
        return (looplib.mean(losses, mask) if self._weighted else losses), metrics


def train(trainer, steps, strategy=None, **settings):
    settings = dict(steps_per_loop=2, writers=[]) | settings
    strategy = strategy or make_strategy("default")
    with flat_config.controller(trainer=trainer, strategy=strategy, global_batch_size=BATCH, **settings) as controller:
        return controller.train(steps)


def made(strategy, *args, **settings):
    with strategy.scope():
        return Tagger(*args, **settings)


def numpy_gradients(parameters, weighted=True, regularizer=0.0):
    """The gradients of the mean loss over the real tokens of a global batch, in float64."""
    x, y = X.astype(np.float64), np.eye(CLASSES)[Y]
    weights = MASK / MASK.sum() if weighted else np.full([BATCH, TOKENS], 1 / (BATCH * TOKENS))
    z = x @ parameters[0] + parameters[1]
    e = np.exp(z - z.max(-1, keepdims=True))
    error = (e / e.sum(-1, keepdims=True) - y) * weights[..., None]
    kernel = np.einsum("btf,btc->fc", x, error) + 2 * regularizer * parameters[0]
    return [kernel, error.sum((0, 1))]


def numpy_weights(steps, change=lambda gradients, parameters: gradients, **settings):
    parameters = [KERNEL.astype(np.float64), np.zeros(CLASSES)]
    for _ in range(steps):
        gradients = change(numpy_gradients(parameters, **settings), parameters)
        parameters = [p - RATE * g for p, g in zip(parameters, gradients)]
    return parameters


def assert_weights(trainer, expected):
    for found, weights in zip(trainer.model.get_weights(), expected):
        np.testing.assert_allclose(found, weights, rtol=1e-5, atol=1e-6)


def possible(params):
    return params["loop"] == "graph" or not params["strategy"].startswith("mirrored")


@pytest.mark.slow
@pytest.mark.slow(pairs=possible)
@pytest.mark.parametrize("loop", ["eager", "xla", "graph"])
@pytest.mark.parametrize("count", [1, 4, *more([2, 8])])
def test_micro_batches_of_ragged_tokens_on_replicas_equal_numpy(strategy, keras, count, loop):
    if not possible({"loop": loop, "strategy": "mirrored" if strategy.num_replicas_in_sync > 1 else ""}):
        pytest.skip("one XLA program runs on one device; eager replicas are tried below")
    trainer = made(strategy, keras, micro_batches=count)
    metrics = train(trainer, 4, strategy, loop=loop)
    assert_weights(trainer, numpy_weights(4))
    assert metrics["tokens"] == 2 * MASK.sum()  # of the last two steps


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("loop", ["graph", "xla", "eager"])
@pytest.mark.parametrize(
    "name, count", [("default", 4), ("one_device", 1), ("mirrored_x2", 4), ("mirrored_x2", 1), ("default", 1)]
)
def test_gradients_compiled_by_xla_equal_numpy(name, count, loop):
    strategy = make_strategy(name)
    if not possible({"loop": loop, "strategy": name}):
        pytest.skip("one XLA program runs on one device")
    trainer = made(strategy, micro_batches=count, jit_compile=True, regularizer=0.01)
    metrics = train(trainer, 4, strategy, loop=loop)
    assert_weights(trainer, numpy_weights(4, regularizer=0.01))
    assert metrics["tokens"] == 2 * MASK.sum()


class Strings(Tagger):
    """A loss with an op that XLA lacks."""

    def loss_fn(self, inputs):
        losses = super().loss_fn(inputs)[0].value
        return losses + 0 * tf.strings.to_number(tf.strings.as_string(losses))


@pytest.mark.slow
def test_jit_compile_says_what_xla_lacks():
    train(Strings(), 1, loop="graph")
    with pytest.raises(EngineError, match="Strings.loss_fn.*jit_compile.*AsString.*jit_comp"):
        train(Strings(jit_compile=True), 1, loop="graph")


class Masked(Tagger):
    """Means of as many values as the data says, and strings in the batch that no loss uses."""

    def dataset(self, context):
        return super().dataset(context).map(lambda x, y, mask: (x, y, mask, tf.as_string(y)))

    def loss_fn(self, inputs):
        losses = super().loss_fn(inputs[:3])[0].value
        real = tf.boolean_mask(losses, inputs[2] > 0)
        return looplib.mean(real), {"mean": looplib.mean(real), "real": looplib.total(tf.size(real))}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
def test_values_of_a_size_that_the_data_decides_count_once_in_xla(count):
    trainers = [Masked(micro_batches=count, jit_compile=compiled) for compiled in (False, True)]
    plain, compiled = [train(trainer, 2, loop="graph") for trainer in trainers]
    assert plain["real"] == compiled["real"] == 2 * MASK.sum()
    np.testing.assert_allclose([compiled["loss"], compiled["mean"]], [plain["loss"], plain["mean"]], rtol=1e-5)
    for trainer in trainers:
        assert_weights(trainer, numpy_weights(2))


class Growing(Tagger):
    """XLA would leave the array at its first size."""

    def loss_fn(self, inputs):
        losses = super().loss_fn(inputs)[0].value
        rows = tf.TensorArray(tf.float32, size=0, dynamic_size=True)
        for i in tf.range(3):
            rows = rows.write(i, losses)
        return tf.reduce_mean(rows.stack(), axis=[0, 2])


@pytest.mark.slow
def test_an_array_that_xla_would_not_let_grow_is_refused():
    train(Growing(), 1, loop="graph")
    with pytest.raises(StepError, match="tf.TensorArray.*XLA"):
        train(Growing(jit_compile=True), 1, loop="graph")


@pytest.mark.slow
@pytest.mark.parametrize("keras", [tf_keras, keras3])
def test_random_numbers_that_xla_does_not_repeat_are_said(keras, caplog):
    trainer = Tagger(keras, jit_compile=True)
    trainer.model.add(keras.layers.Dropout(0.1))
    trainer.model.build((None, TOKENS, FEATURES))
    train(trainer, 1, loop="graph")
    assert ("so no run repeats another one" in caplog.text) == (keras is tf_keras)


@pytest.mark.slow
def test_guards_name_the_gradient_of_a_compiled_loss(tmp_path):
    trainer = Tagger(blow_up_at=3, jit_compile=True, loss_scale=None)
    trainer.optimizer.learning_rate = 1e30
    with pytest.raises(looplib.DivergenceError, match="gradient of .*dense/kernel"):
        train(trainer, 8, model_dir=tmp_path, loop="graph")


@pytest.mark.slow
@pytest.mark.parametrize("weighted, count", [(True, 1), (True, 4), (False, 1), (False, 4)])
def test_losses_of_the_models_layers_count_once(weighted, count):
    """A regularizer is neither multiplied by replicas or micro-batches nor divided by tokens."""
    strategy = make_strategy("mirrored_x2")
    trainer = made(strategy, regularizer=0.01, weighted=weighted, micro_batches=count)
    metrics = train(trainer, 3, strategy)
    assert_weights(trainer, numpy_weights(3, weighted=weighted, regularizer=0.01))
    kernel, _ = numpy_weights(2, weighted=weighted, regularizer=0.01)  # before the last step, of the last report
    assert metrics["regularization_loss"] == pytest.approx(0.01 * np.square(kernel).sum(), rel=1e-5)


class InOrder(Tagger):
    """Batches in the order of the data, as those of fit, of sentences that are all whole."""

    def dataset(self, context):
        rows = lambda i: (tf.gather(X, i), tf.gather(Y, i), tf.ones_like(tf.gather(MASK, i)))
        data = tf.data.Dataset.range(BATCH).shard(context.num_pipelines, context.pipeline_index)
        return data.batch(context.per_replica_batch_size).map(rows).repeat()


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("weighted", [True, False])
def test_the_loss_and_the_regularization_are_the_loss_of_fit(weighted, count, keras):
    strategy = make_strategy("mirrored_x2")
    with strategy.scope():
        trainer = InOrder(keras, regularizer=0.01, weighted=weighted, micro_batches=count)
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=8, steps_per_loop=4), trainer=trainer, strategy=strategy, writers=[]
    ) as controller:
        metrics = controller.train(4)
    order = np.stack([np.arange(0, BATCH, 2), np.arange(1, BATCH, 2)]).reshape(2, 4, 4).transpose(1, 0, 2).ravel()
    theirs = Tagger(keras, regularizer=0.01).model
    theirs.compile(keras.optimizers.SGD(RATE), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = theirs.fit(X[order], Y[order], batch_size=8, shuffle=False, verbose=0).history
    assert metrics["loss"] + metrics["regularization_loss"] == pytest.approx(history["loss"][0], rel=1e-5)


@pytest.mark.slow
def test_trainable_that_is_changed_between_the_trainer_and_its_controller_is_refused(keras):
    trainer = Tagger(keras, freeze="bias")
    trainer.model.layers[-1].trainable = False
    with pytest.raises(StaleTraceError, match=r"\S*dense/bias.*\S*dense/kernel.*Tagger.__init__"):
        train(trainer, 1)
    trainer.model.layers[-1].trainable = True
    train(trainer, 1)


class Scaled(Tagger):
    """Divides the losses by a temperature, which is no part of the model."""

    def __init__(self, keras, stopped, **settings):
        super().__init__(keras, weighted=False, **settings)
        self._temperature = (
            keras.Variable(1.0, name="temperature") if keras is keras3 else tf.Variable(1.0, name="temperature")
        )
        self._use = tf.stop_gradient if stopped else tf.identity

    def loss_fn(self, inputs):
        losses, metrics = super().loss_fn(inputs)
        return losses / self._use(tf.convert_to_tensor(self._temperature)), metrics


@pytest.mark.parametrize("name, count", [("default", 2), ("mirrored_x2", 1)])
@pytest.mark.parametrize("stopped", [False, True])
def test_a_variable_outside_of_the_model_that_the_loss_depends_on_is_named_as_untrained(
    stopped, name, count, keras, caplog
):
    strategy = make_strategy(name)
    with strategy.scope():
        trainer = Scaled(keras, stopped, freeze="bias", micro_batches=count)
    train(trainer, 1, strategy)
    said = [record.getMessage() for record in caplog.records if "no optimizer trains" in record.getMessage()]
    assert len(said) == (0 if stopped else 1)
    assert all("depend on temperature outside" in one for one in said)


class Uneven(looplib.GradientTrainer):
    """Layers add a mean over the batch, an activity regularizer and a regularizer of weights; 37 examples in eights."""

    batches = "global"

    def __init__(self, keras, added, weighted=False, **settings):
        class Adds(keras.layers.Layer):
            def call(self, x):
                self.add_loss(added(tf.square(x)))
                return x

        self.weighted = weighted
        regularizer = keras.regularizers.L2(3.0)
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(5, "tanh", activity_regularizer=regularizer, kernel_regularizer="l2")(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(Adds()(hidden)))
        model.set_weights([np.cos(np.arange(weight.size)).reshape(weight.shape) / 2 for weight in model.get_weights()])
        super().__init__(model, keras.optimizers.SGD(0.05), **settings)

    x, y = np.sin(np.arange(37 * 4)).reshape(37, -1).astype("float32"), np.arange(37.0)[:, None] / 37

    def dataset(self, context):
        data = context.indices(37, shuffle=False, whole_epochs=True)
        return data.map(lambda i: (tf.gather(self.x, i), tf.gather(self.y.astype("float32"), i)))

    def loss_fn(self, inputs):
        errors = tf.square(self.model(inputs[0], training=True) - inputs[1])[:, 0]
        return looplib.mean(errors, inputs[1][:, 0]) if self.weighted else errors


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name, count", [("mirrored_x2", 1), ("default", 2), ("mirrored_x2", 2), ("mirrored_x4", 1)])
def test_losses_of_layers_weigh_by_the_examples_of_a_part(keras, name, count, weighted):
    strategy = make_strategy(name)
    with strategy.scope():
        trainer = Uneven(keras, tf.reduce_mean, weighted, micro_batches=count)
    reports = []
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=8, steps_per_loop=1),
        trainer=trainer,
        strategy=strategy,
        actions=[lambda event: reports.append(event.metrics["regularization_loss"])],
        writers=[],
    ) as controller:
        controller.train(10)
    plain, own = Uneven(keras, tf.reduce_mean), []
    for start in [*range(0, 37, 8)] * 2:
        x, y = trainer.x[start : start + 8], trainer.y[start : start + 8]
        with tf.GradientTape() as tape:
            errors = tf.square(plain.model(x, training=True) - y)
            own.append(tf.add_n(plain.model.losses))
            loss = own[-1] + (tf.reduce_sum(errors * y) / y.sum() if weighted else tf.reduce_mean(errors))
        variables = plain.model.trainable_variables
        plain.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    for ours, theirs in zip(trainer.model.get_weights(), plain.model.get_weights()):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(reports, own, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name, count", [("mirrored_x2", 1), ("default", 2)])
def test_a_sum_that_a_layer_adds_is_refused_where_a_batch_is_computed_in_parts(keras, name, count):
    strategy = make_strategy(name)
    with strategy.scope():
        trainer = Uneven(keras, tf.reduce_sum, micro_batches=count)
    with pytest.raises(LossError, match="add_loss"):
        train(trainer, 1, strategy)
    train(Uneven(keras, tf.reduce_sum), 1)


def test_a_loss_of_a_layer_that_is_zero_when_it_is_tried_is_named(caplog):
    train(Uneven(keras3, lambda values: 0 * tf.reduce_sum(values), micro_batches=2), 1)
    assert "losses that layers of Uneven add are 0 or not finite at first (1 of 2)" in caplog.text


@pytest.mark.slow
def test_a_metric_of_one_s_own_stays_by_the_name_of_the_regularization():
    class Own(Tagger):
        def loss_fn(self, inputs):
            losses, metrics = super().loss_fn(inputs)
            return losses, {**metrics, "regularization_loss": looplib.last(7.0)}

    assert train(Own(regularizer=0.01), 2)["regularization_loss"] == 7
    assert "regularization_loss" not in train(Tagger(), 2)


def _scaled_to(limit, gradients):
    return [g * min(1, limit / np.sqrt((g**2).sum())) for g in gradients]


def _adaptive(gradients, parameters):
    norm = lambda x: np.linalg.norm(x.reshape(-1, x.shape[-1]), axis=0) if x.ndim > 1 else np.linalg.norm(x)
    norms, limits = map(norm, gradients), [0.05 * np.maximum(norm(p), 1e-3) for p in parameters]
    return [np.where(n > limit, g * limit / n, g) for g, n, limit in zip(gradients, norms, limits)]


CLIPS = {
    "clip_value": (0.05, lambda g, p: [np.clip(x, -0.05, 0.05) for x in g]),
    "clip_norm": (0.1, lambda g, p: _scaled_to(0.1, g)),
    "clip_global_norm": (0.1, lambda g, p: [x * min(1, 0.1 / np.sqrt(sum((y**2).sum() for y in g))) for x in g]),
    "clip_adaptive": (0.05, _adaptive),
}


@pytest.mark.parametrize("size", [2, 7, 12])
def test_parts_of_a_batch_of_unknown_size_have_each_example_once_and_metrics_of_all(size):
    values, metrics = np.random.default_rng(0).normal(size=[size, 2]), micro_batches.MetricSums()

    def compute(part, number):
        found = {
            "mean": part[:, 0],
            "weighted": looplib.mean(part[:, 0], part[:, 1] ** 2),
            "total": looplib.total(tf.reduce_sum(part)),
            "last": looplib.last(tf.reduce_sum(part[:1], axis=0)),
            "rows": looplib.total(tf.shape(part)[0]),
        }
        return metrics.pack(found, part, number)

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float64)])
    def step(batch):
        return {name: one.value for name, one in metrics.unpack(micro_batches.summed(compute, batch, 3)).items()}

    found = step(values)
    assert float(found["mean"]) == pytest.approx(values[:, 0].mean())
    assert float(found["weighted"]) == pytest.approx(np.average(values[:, 0], weights=values[:, 1] ** 2))
    assert float(found["total"]) == pytest.approx(values.sum())
    assert float(found["rows"]) == size
    np.testing.assert_array_equal(found["last"], values[0])  # exactly, of the first part


def test_parts_of_a_batch_with_different_numbers_of_rows_are_refused_in_micro_batches():
    known = tf.zeros([12, 2]), {"labelled": tf.zeros([4])}
    with pytest.raises(DatasetError, match="Semi.dataset.*4 and 12 rows.*uneven_parts"):
        micro_batches.checked("Semi", known)

    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([None])])
    def step(one, other):
        return micro_batches.checked("Semi", (one, other))[0]

    np.testing.assert_array_equal(step(tf.ones([4, 2]), tf.zeros([4])), np.ones([4, 2]))
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        step(*tf.nest.flatten(known))
    assert parse_error(error.value).kind == "DatasetError" and "uneven_parts" in parse_error(error.value).sentence


@pytest.mark.parametrize("clip", CLIPS)
def test_each_kind_of_clipping_is_that_of_numpy(clip):
    """Of a matrix, a vector and a kernel of a convolution, whose units have norms on both sides of the limit."""
    random, (limit, change) = np.random.default_rng(0), CLIPS[clip]
    shapes = [(5, 3), (4,), (2, 3, 3, 6)]
    weights = [random.normal(size=shape) for shape in shapes]
    gradients = [random.normal(size=shape) * np.geomspace(1e-3, 3, shape[-1]) for shape in shapes]
    clipping = Clipping(**{clip.removeprefix("clip_"): limit})
    found = clipping.clip(list(map(tf.constant, gradients)), list(map(tf.constant, weights)))
    for one, expected, before in zip(found, change(gradients, weights), gradients):
        np.testing.assert_allclose(one, expected, rtol=1e-6)
        assert not np.allclose(one, before)


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize(
    "name, family, count",
    [
        ("mirrored_x2", "keras", 2),
        *more([("default", "keras", 2), ("mirrored_x2", "tf_keras", 1), ("mirrored_x4", "tf_keras", 4)]),
    ],
)
@pytest.mark.parametrize("clip", CLIPS)
def test_clipping_is_that_of_the_gradient_of_the_global_batch(clip, name, family, count):
    strategy, (limit, change) = make_strategy(name), CLIPS[clip]
    trainer = made(strategy, FAMILIES[family], micro_batches=count, **{clip: limit})
    train(trainer, 3, strategy)
    assert_weights(trainer, numpy_weights(3, change))
    assert not np.allclose(trainer.model.get_weights()[0], numpy_weights(3)[0], rtol=1e-3)  # it did clip


@pytest.mark.slow
@pytest.mark.parametrize("name, family", [("default", "tf_keras"), ("mirrored_x2", "keras")])
def test_averages_equal_numpy_and_are_what_an_evaluation_sees(name, family, tmp_path):
    class Norm(looplib.Evaluator):
        def __init__(self, trainer):
            self.model, self.averages = trainer.model, trainer.averages

        def dataset(self, context):
            return context.indices(4)

        def step_fn(self, inputs):
            return {"sum": looplib.last(tf.reduce_sum(tf.convert_to_tensor(self.model.trainable_variables[0])))}

    strategy = make_strategy(name)

    def run(folder, *ends):
        for end in ends:
            with strategy.scope():
                trainer = Tagger(FAMILIES[family], average_decay=0.8)
                evaluator = Norm(trainer)
            settings = dict(global_batch_size=BATCH, steps_per_loop=2, writers=[], model_dir=folder)
            with flat_config.controller(
                trainer=trainer, evaluator=evaluator, strategy=strategy, **settings
            ) as controller:
                controller.train_and_evaluate(end, 2)
                seen = controller.evaluate()["eval"]["sum"]
        with flat_config.controller(evaluator=evaluator, strategy=strategy, **settings) as controller:
            assert controller.evaluate()["eval"]["sum"] == seen  # an evaluation job, by the checkpoint alone
        return trainer, seen

    parameters, averages = [[KERNEL.astype(np.float64), np.zeros(CLASSES)] for _ in range(2)]
    for step in range(5):
        parameters = numpy_weights(step + 1)
        averages = [0.8 * a + 0.2 * p for a, p in zip(averages, parameters)]
    trainer, seen = run(tmp_path / "whole", 5)
    saved = {name.split("/")[0] for name, _ in tf.train.list_variables(str(tmp_path / "whole/checkpoints/ckpt-5"))}
    assert {"optimizer", "averages"} <= saved and not any("plan" in name for name in saved), saved
    assert_weights(trainer, parameters)  # they are back in their places
    assert seen == pytest.approx(averages[0].sum(), rel=1e-5)
    for found, expected in zip(trainer.averages.values, averages):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)
    again, _ = run(tmp_path / "resumed", 3, 5)
    for found, expected in zip(again.averages.values, trainer.averages.values):
        np.testing.assert_array_equal(found.numpy(), expected.numpy())


@pytest.mark.slow
@pytest.mark.parametrize("name, kind", [("mirrored_x2", "one"), ("default", "several"), *more([("default", "one")])])
def test_an_optimizer_that_accumulates_moves_averages_rates_and_norms_with_its_updates(name, kind):
    """Three steps of a third of the batch are one of the batch, for all that counts updates."""

    def make(steps):
        schedule = keras3.optimizers.schedules.ExponentialDecay(0.3, steps or 1, 0.5, staircase=True)  # by steps
        one = lambda: keras3.optimizers.SGD(schedule, momentum=0.9, gradient_accumulation_steps=steps)
        if kind == "one":
            return one()
        plain, slow = keras3.optimizers.SGD(0.0), one()
        return keras3.optimizers.MultiOptimizer(lambda variable: slow if len(variable.shape) == 2 else plain)

    class Thirds(Tagger):
        parts = 1

        def dataset(self, context):
            size = 30 // self.parts // context.num_pipelines
            rows = np.arange(30).reshape(self.parts, context.num_pipelines, size)[:, context.pipeline_index].ravel()
            data = tf.data.Dataset.from_tensor_slices((X[rows], Y[rows], MASK[rows]))
            return data.batch(context.per_replica_batch_size).repeat()

    found, strategy = [], make_strategy(name)
    for parts in (1, 3):
        report = ("learning_rate", "update_norm") if kind == "one" else ("update_norm",)
        with strategy.scope():
            trainer = Thirds(
                keras3, make(None if parts == 1 else parts), weighted=False, average_decay=0.5, report=report
            )
        trainer.parts, reports = parts, []
        with looplib.Controller(
            looplib.RunConfig(global_batch_size=30 // parts, steps_per_loop=1),
            trainer=trainer,
            strategy=strategy,
            actions=[lambda event, reports=reports: reports.append([event.metrics[name] for name in report])],
            writers=[],
        ) as controller:
            controller.train(4 * parts)
        found.append((trainer.model.get_weights()[0], trainer.averages.values[0].numpy(), np.array(reports)))
    (weights, averages, plain), (ours, our_averages, reports) = found
    np.testing.assert_allclose(ours, weights, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(our_averages, averages, rtol=1e-5, atol=1e-6)
    assert np.abs(weights - averages).max() > 0.01
    np.testing.assert_allclose(reports[2::3], plain, rtol=1e-4)
    assert not reports[0::3, -1].any() and not reports[1::3, -1].any()  # the norms of updates that there are not


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "name, family",
    [
        ("default", "tf_keras"),
        ("mirrored_x2", "keras"),
        pytest.param("mirrored_x4", "tf_keras", marks=pytest.mark.slow),
    ],
)
def test_an_overflow_skips_one_step_on_all_replicas(name, family, tmp_path):
    """The weights and the optimizer's count stay, the step counts, and the scale is halved and saved."""
    strategy, keras = make_strategy(name), FAMILIES[family]
    make = lambda: made(
        strategy, keras, loss_scale="dynamic", blow_up_at=2, optimizer=None, average_decay=0.5, micro_batches=2
    )
    reports = []
    trainer = make()
    train(trainer, 5, strategy, actions=[lambda event: reports.append(event.metrics)], model_dir=tmp_path)
    parameters = [KERNEL.astype(np.float64), np.zeros(CLASSES)]
    for _ in (0, 1, 3, 4):
        parameters = [p - RATE * g for p, g in zip(parameters, numpy_gradients(parameters))]
    assert_weights(trainer, parameters)
    assert int(trainer.optimizer.iterations.numpy()) == 4 and int(trainer.global_step) == 5
    assert [report["overflows"] for report in reports] == [0, 1, 0]
    for part in strategy.experimental_local_results(trainer.loss_scale.scale):
        assert part.numpy() == 2.0**14
    again = make()
    train(again, 6, strategy, model_dir=tmp_path)
    assert again.loss_scale.scale.numpy() == 2.0**14


def test_the_loss_scale_follows_overflows_and_rows_of_good_steps_as_a_plain_loop_does(monkeypatch):
    monkeypatch.setattr("looplib.task.gradient_trainer._GROWS_AFTER", 3)
    found, scale, row = DynamicLossScale(), 2.0**15, 0
    for finite in map(int, "1101111011101110" + 16 * "0"):
        found.adjust(tf.constant(bool(finite)))
        row = (row + 1) * finite
        scale = scale if finite else max(1.0, scale / 2)
        if row == 3:
            scale, row = 2 * scale, 0
        assert found.scale.numpy() == scale
    assert scale == 1


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_learns_as_float32_does(precision, keras):
    def accuracy(policy):
        keras.utils.set_random_seed(0)
        keras.mixed_precision.set_global_policy(policy)
        try:
            trainer = Tagger(keras, weighted=True)
        finally:
            keras.mixed_precision.set_global_policy("float32")
        assert (trainer.loss_scale is not None) == (policy == "mixed_float16")
        train(trainer, 40)
        logits = X @ trainer.model.get_weights()[0] + trainer.model.get_weights()[1]
        return ((logits.argmax(-1) == Y) * MASK).sum() / MASK.sum()

    assert accuracy(precision) == pytest.approx(accuracy("float32"), abs=0.01)


@pytest.mark.slow
def test_frozen_layers_keep_weights_and_statistics(keras):
    class Deep(Tagger):
        def __init__(self):
            layers = [
                keras.layers.InputLayer((TOKENS, FEATURES)), keras.layers.Dense(4, name="base_dense"),
                keras.layers.BatchNormalization(name="base_norm"), keras.layers.Dense(CLASSES, name="head"),
            ]  # fmt: skip
            looplib.GradientTrainer.__init__(
                self, keras.Sequential(layers), keras.optimizers.Adam(0.1), freeze="base", report=("weight_norm",)
            )
            self._weighted, self._blow_up_at = True, None

    trainer = Deep()
    before = [layer.get_weights() for layer in trainer.model.layers[-3:]]
    metrics = train(trainer, 3)
    after = [layer.get_weights() for layer in trainer.model.layers[-3:]]
    for old, new in zip(before[0] + before[1], after[0] + after[1]):
        np.testing.assert_array_equal(old, new)
    assert not np.allclose(before[2][0], after[2][0])
    assert metrics["weight_norm"] == pytest.approx(np.sqrt(sum((w**2).sum() for w in after[2])), rel=1e-5)


@pytest.mark.slow
def test_none_stands_for_nothing_where_names_or_actions_are_listed():
    nothing = Tagger(freeze=None, rematerialize=None, no_decay=None, report=None)
    assert nothing.frozen_variables == []
    metrics, plain = train(nothing, 2, checkpoints=None, actions=None), Tagger()
    assert metrics.keys() == train(plain, 2).keys()
    np.testing.assert_array_equal(nothing.model.get_weights()[0], plain.model.get_weights()[0])
    assert looplib.Guards(loss_limit=None) == looplib.Guards()


def test_the_table_of_the_model_says_of_one_frozen_variable_of_a_layer_that_it_is_not_trained(keras):
    class Half(Tagger):
        def __init__(self):
            layers = [keras.layers.InputLayer((TOKENS, FEATURES)), keras.layers.Dense(CLASSES)]
            looplib.GradientTrainer.__init__(self, keras.Sequential(layers), keras.optimizers.SGD(0.1), freeze="bias")

    table = model_table.describe(Half())
    rows = [(row.shape, row.trainable) for row in table.variables]
    assert rows == [([FEATURES, CLASSES], True), ([CLASSES], False)]
    assert table.trainable_parameters == FEATURES * CLASSES


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", [*more(["default"]), "mirrored_x2"])
def test_parts_of_a_model_have_optimizers_of_their_own(keras, name, tmp_path):
    strategy = make_strategy(name)
    with strategy.scope():
        optimizers = {"bias": keras.optimizers.SGD(0.1), "": keras.optimizers.SGD(RATE)}
        trainer = Tagger(keras, optimizers, report=("learning_rate",))
    metrics = train(trainer, 3, strategy, model_dir=tmp_path)
    assert_weights(trainer, numpy_weights(3, lambda g, p: [g[0], g[1] * 0.1 / RATE]))
    assert metrics["learning_rate/bias"] == pytest.approx(0.1) and metrics["learning_rate/rest"] == pytest.approx(RATE)


@pytest.mark.slow
def test_no_decay_leaves_out_the_variables_that_match(keras):
    optimizer = keras.optimizers.AdamW(0.0, weight_decay=0.1)  # without a rate only the decay of Keras's AdamW is left
    optimizer.learning_rate = 1.0
    trainer = Tagger(keras, optimizer, no_decay=["bias"])
    trainer.model.layers[-1].set_weights([KERNEL, np.ones(CLASSES)])
    plain = Tagger(keras, keras.optimizers.AdamW(1.0, weight_decay=0.0))
    plain.model.layers[-1].set_weights([KERNEL, np.ones(CLASSES)])
    train(trainer, 1), train(plain, 1)
    kernel, bias = trainer.model.get_weights()
    np.testing.assert_allclose(bias, plain.model.get_weights()[1], rtol=1e-6)
    np.testing.assert_allclose(kernel, plain.model.get_weights()[0] - 0.1 * KERNEL, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mirrored_x2", *more(["default"])])
def test_reported_norms_are_numpys(name):
    strategy = make_strategy(name)
    report = ("learning_rate", "gradient_norm", "weight_norm", "update_norm", "layer_norms")
    trainer = made(strategy, report=report, clip_global_norm=0.01, micro_batches=2)
    metrics = train(trainer, 1, strategy)
    kernel, bias = numpy_gradients([KERNEL.astype(np.float64), np.zeros(CLASSES)])
    norm = np.sqrt((kernel**2).sum() + (bias**2).sum())
    after = [KERNEL - RATE * kernel * 0.01 / norm, -RATE * bias * 0.01 / norm]
    expected = {
        "gradient_norm": norm, "learning_rate": RATE, "update_norm": 0.01 * RATE,
        "weight_norm": np.sqrt(sum((w**2).sum() for w in after)), "loss": metrics["loss"], "tokens": metrics["tokens"],
        "steps_per_second": metrics["steps_per_second"],
        "epoch": metrics["epoch"],
        "gradient_norm/kernel": np.sqrt((kernel**2).sum()), "gradient_norm/bias": np.sqrt((bias**2).sum()),
    }  # fmt: skip
    metrics = {name if "/" not in name else f"gradient_norm/{name.split('/')[-1]}": v for name, v in metrics.items()}
    assert metrics == pytest.approx(expected, rel=1e-4)


RATES = [1.0, 0.5, 0.25, 0.125, 0.0625]


def rated(keras):
    """A weight, and an optimizer whose rate is `RATES` by the count of its updates."""
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1, 2, 3], RATES)
    layers = [keras.layers.InputLayer((1,)), keras.layers.Dense(1, use_bias=False)]
    return keras.Sequential(layers), keras.optimizers.SGD(rate)


class Slope(looplib.GradientTrainer):
    """Its gradient is 1, so that the norm of the update is the rate."""

    def __init__(self, keras, **settings):
        super().__init__(*rated(keras), report=("learning_rate", "update_norm"), **settings)

    def dataset(self, context):
        return context.indices(8, repeat=True).map(lambda i: tf.ones_like(i, tf.float32)[:, None])

    def loss_fn(self, inputs):
        scale = tf.where(self.loss_scale is not None and tf.equal(self.global_step, 2), 1e36, 1.0)
        return self.model(inputs, training=True)[:, 0] * scale


class OwnSlope(looplib.Trainer):
    """A step of one's own."""

    def __init__(self, keras):
        self.model, self.optimizer = rated(keras)

    dataset = Slope.dataset

    def step_fn(self, inputs):
        (variable,) = self.model.trainable_variables
        before = tf.identity(_keras.tf_variable(variable))
        with tf.GradientTape() as tape:
            loss = self.global_mean(self.model(inputs, training=True)[:, 0])
        rate = looplib.learning_rate(self.optimizer)
        self.optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
        moved = before - _keras.tf_variable(variable)
        return {"learning_rate": looplib.last(rate), "update_norm": looplib.last(moved[0, 0])}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, name, settings",
    [
        (Slope, "mirrored_x2", dict(micro_batches=2)),
        (Slope, "default", dict(loss_scale="dynamic")),
        (OwnSlope, "default", {}),
    ],
)
def test_the_reported_learning_rate_is_that_of_the_reported_step(keras, kind, name, settings):
    strategy, seen = make_strategy(name), []
    with strategy.scope():
        trainer = kind(keras, **settings)
    train(trainer, 5, strategy, steps_per_loop=1, actions=[lambda event: seen.append(event.metrics)])
    used = RATES if "loss_scale" not in settings else [1.0, 0.5, 0.25, 0.25, 0.125]  # the overflow updates nothing
    assert [metrics["learning_rate"] for metrics in seen] == pytest.approx(used)
    moved = [rate * (step != 2 or "loss_scale" not in settings) for step, rate in enumerate(used)]
    assert [metrics["update_norm"] for metrics in seen] == pytest.approx(moved)


def test_the_learning_rate_of_an_optimizer_in_another_is_that_of_its_update():
    for keras in (keras3, tf_keras):
        _, inner = rated(keras)
        holder = keras.optimizers if keras is keras3 else keras.mixed_precision
        assert looplib.learning_rate(holder.LossScaleOptimizer(inner)) == 1.0
    legacy = tf_keras.optimizers.legacy.SGD(tf_keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.5, 0.1]))
    assert looplib.learning_rate(legacy) == 0.5 and looplib.learning_rate(tf_keras.optimizers.legacy.SGD(0.5)) == 0.5


class Contrastive(looplib.GradientTrainer):
    """Two views of an example are found among those of the global batch."""

    def __init__(self, keras=keras3):
        model = keras.Sequential([keras.layers.InputLayer((FEATURES,)), keras.layers.Dense(4, use_bias=False)])
        model.layers[-1].set_weights([np.eye(FEATURES, 4)])
        super().__init__(model, keras.optimizers.SGD(RATE))

    def dataset(self, context):
        return context.indices(BATCH).map(lambda i: (tf.gather(X[:, 0], i), tf.gather(X[:, 1], i)))

    def loss_fn(self, inputs):
        queries = tf.math.l2_normalize(self.model(inputs[0], training=True), axis=1)
        keys = looplib.all_gather(tf.math.l2_normalize(self.model(inputs[1], training=True), axis=1))
        logits = tf.matmul(queries, keys, transpose_b=True)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(looplib.global_positions(queries), logits)


@pytest.mark.slow
def test_examples_of_all_replicas_in_one_loss_train_alike_on_any_number_of_replicas(keras):
    found = []
    for name in ("default", "mirrored_x2", "mirrored_x4"):
        strategy = make_strategy(name)
        with strategy.scope():
            trainer = Contrastive(keras)
        train(trainer, 4, strategy)
        found.append(trainer.model.get_weights()[0])
    assert not np.allclose(found[0], np.eye(FEATURES, 4), rtol=1e-2)
    for weights in found[1:]:
        np.testing.assert_allclose(weights, found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("static", [True, False])
def test_positions_are_those_of_the_gathered_rows(static):
    """Also where replicas have batches of unlike sizes, which only an unknown static size allows."""
    strategy = make_strategy("mirrored_x2")
    rows = tf.range(6) * 10

    @tf.function
    def positions(replica):
        own = rows[:3] if static else rows[: 2 + replica]
        return looplib.global_positions(own), tf.gather(looplib.all_gather(own), looplib.global_positions(own)), own

    replica = strategy.experimental_distribute_values_from_function(lambda c: tf.constant(c.replica_id_in_sync_group))
    found, gathered, own = strategy.run(positions, (replica,))
    sizes = (3, 3) if static else (2, 3)
    np.testing.assert_array_equal(found.values[0], np.arange(sizes[0]))
    np.testing.assert_array_equal(found.values[1], sizes[0] + np.arange(sizes[1]))
    for one, other in zip(gathered.values, own.values):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mirrored_x2", *more(["default", "mirrored_x4"])])
def test_global_mean_with_weights_in_a_step_of_ones_own_equals_numpy(name):
    class Own(looplib.Trainer):
        def __init__(self):
            tagger = Tagger()
            self.model, self.optimizer, self.dataset = tagger.model, tagger.optimizer, tagger.dataset

        def dataset(self, context):
            raise NotImplementedError

        def step_fn(self, inputs):
            x, y, mask = inputs
            with tf.GradientTape() as tape:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, self.model(x, training=True))
                loss = self.global_mean(losses, mask)
            variables = self.model.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            return {"loss": looplib.mean(losses, mask)}

    strategy = make_strategy(name)
    with strategy.scope():
        trainer = Own()
    train(trainer, 4, strategy)
    assert_weights(trainer, numpy_weights(4))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("settings", [{}, {"report": ("gradient_norm",)}, {"micro_batches": 2}], ids=str)
def test_rows_of_an_embedding_that_come_twice_are_summed_before_they_are_squared(keras, settings):
    """Keras 3 squares them one by one, and an option would change the training."""

    class Word(looplib.GradientTrainer):
        def __init__(self):
            model = keras.Sequential([keras.layers.InputLayer((4,), dtype="int64"), keras.layers.Embedding(1, 1)])
            model.layers[-1].set_weights([np.ones([1, 1])])
            super().__init__(model, keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.0), **settings)

        def dataset(self, context):
            return context.indices(BATCH).map(lambda i: tf.zeros([context.per_replica_batch_size, 4], tf.int64))

        def loss_fn(self, inputs):
            return tf.reduce_sum(self.model(inputs, training=True), [1, 2])

    trainer = Word()
    train(trainer, 1)
    assert trainer.model.get_weights()[0].item() == pytest.approx(0.9, abs=1e-5)  # a gradient of 4 over its own size


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_sentences_of_an_unknown_length_train_in_micro_batches(keras, count):
    """The static shape of a gradient is then not known, as TensorFlow derives it."""

    class Open(Tagger):
        def __init__(self):
            layers = [keras.Input((None, FEATURES)), keras.layers.Dense(CLASSES, name="dense")]
            model = keras.Sequential(layers)
            model.layers[-1].set_weights([KERNEL, np.zeros(CLASSES)])
            looplib.GradientTrainer.__init__(self, model, keras.optimizers.SGD(RATE), micro_batches=count)
            self._weighted, self._blow_up_at = True, None

        def dataset(self, context):
            def cut(i):
                longest = tf.reduce_max(tf.gather(np.maximum(LENGTHS, 1), i))
                return tuple(tf.gather(array, i)[:, :longest] for array in (X, Y, MASK))

            return context.indices(BATCH).map(cut)

    trainer = Open()
    train(trainer, 3)
    assert_weights(trainer, numpy_weights(3))


@pytest.mark.slow
@pytest.mark.parametrize("name, count", [("mirrored_x2", 2), *more([("default", 1), ("mirrored_x2", 1)])])
def test_embeddings_train_as_their_dense_gradients_would(keras, name, count):
    class Words(looplib.GradientTrainer):
        def __init__(self):
            layers = [keras.layers.InputLayer((TOKENS,), dtype="int64"), keras.layers.Embedding(CLASSES, 2)]
            model = keras.Sequential(layers)
            model.layers[-1].set_weights([np.ones([CLASSES, 2])])
            super().__init__(model, keras.optimizers.SGD(RATE), micro_batches=count)

        def dataset(self, context):
            return context.indices(BATCH).map(lambda i: (tf.gather(Y, i), tf.gather(MASK, i)))

        def loss_fn(self, inputs):
            words, mask = inputs
            return looplib.mean(tf.reduce_sum(tf.square(self.model(words, training=True)), axis=2), mask)

    strategy = make_strategy(name)
    with strategy.scope():
        trainer = Words()
    train(trainer, 3, strategy)
    table = np.ones([CLASSES, 2])
    for _ in range(3):
        share = np.bincount(Y.ravel(), MASK.ravel(), CLASSES) / MASK.sum()
        table = table - RATE * 2 * table * share[:, None]
    np.testing.assert_allclose(trainer.model.get_weights()[0], table, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name, family", [("default", "tf_keras"), ("mirrored_x2", "keras")])
def test_rematerialized_layers_are_computed_twice_and_train_alike(name, family):
    """Their activations are not kept: the step multiplies matrices more often, and the weights are the same."""
    strategy, keras = make_strategy(name), FAMILIES[family]

    class Deep(Tagger):
        def __init__(self, **settings):
            keras.utils.set_random_seed(0)
            layers = [keras.layers.InputLayer((TOKENS, FEATURES))]
            block = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(8, "tanh")]
            layers += [keras.Sequential(block, name="block"), keras.layers.Dense(CLASSES)]
            optimizer = keras.optimizers.SGD(RATE)
            looplib.GradientTrainer.__init__(self, keras.Sequential(layers), optimizer, **settings)
            self._weighted, self._blow_up_at = True, None

    weights, products = [], []
    for settings in ({}, {"rematerialize": "block"}):
        with strategy.scope():
            trainer = Deep(**settings)
        settings = dict(strategy=strategy, global_batch_size=BATCH, writers=[])
        with flat_config.controller(trainer=trainer, **settings) as controller:
            controller.train(3)
            weights.append(trainer.model.get_weights())
        kernel = tf.function(lambda trainer=trainer: _gradient(trainer)).get_concrete_function()
        products.append(sum(op.type in ("MatMul", "BatchMatMulV2") for op in kernel.graph.get_operations()))
    for a, b in zip(*weights):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert products[1] >= products[0] + 1


def _gradient(trainer):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(trainer.model(X, training=True))
    variables = [_keras.tf_variable(v) for v in trainer.model.trainable_variables]
    return tape.gradient(loss, variables)


class Dropped(Tagger):
    def __init__(self, keras):
        layers = [keras.layers.InputLayer((TOKENS, FEATURES)), keras.layers.Dropout(0.5, name="drop")]
        model = keras.Sequential([*layers, keras.layers.Dense(CLASSES)])
        looplib.GradientTrainer.__init__(self, model, keras.optimizers.SGD(RATE), rematerialize="drop")


class Returns(Tagger):
    """A trainer whose `loss_fn` returns a function of the losses."""

    def __init__(self, change, **settings):
        super().__init__(**settings)
        self._change = change

    def loss_fn(self, inputs):
        return self._change(super().loss_fn(inputs)[0].value)


class Scalar(Tagger):
    def loss_fn(self, inputs):
        return tf.reduce_mean(super().loss_fn(inputs)[0].value)


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Scalar(), "loss_fn.*float32"),
        (lambda: Tagger(micro_batches=5), "micro_batches=5.*32"),
        (lambda: Tagger(jit_compile="False"), "jit_compile.*'False'"),
        (
            lambda: Returns(lambda losses: (losses, {"a": 1.0}), micro_batches=2),
            "'a'",
        ),
        (lambda: Tagger(micro_batches=0), "micro_batches.*0.*1"),
        (lambda: Tagger(freeze="encoder"), "'encoder'.*dense/kernel"),
        (lambda: Tagger(freeze=""), "matches all variables"),
        (lambda: Dropped(keras3), "matches drop, and computing it twice gives two results"),
        (lambda: Dropped(tf_keras), "matches drop, and computing it twice gives two results"),
        (lambda: Tagger(rematerialize="block"), "'block'"),
        (lambda: Tagger(clip_norm="1"), "clip_norm.*'1'"),
        (lambda: Tagger(average_decay="0.9"), "'0.9'"),
        (lambda: Tagger(tf_keras, keras3.optimizers.SGD(0.1)), "two Keras families are mixed"),
        (lambda: Tagger(optimizer=keras3.optimizers.SGD(0.1, loss_scale_factor=8.0)), "SGD"),
        (lambda: Tagger(tf_keras, old_sgd()), "SGD.*tf_keras.optimizers.legacy"),
        (lambda: Returns(lambda losses: losses[:4]), r"\(4.*6\).*32"),
        (lambda: Returns(lambda losses: losses[:4], micro_batches=2), "16"),
        (lambda: Returns(lambda losses: (losses, {"a": losses[:1]}), micro_batches=2), "'a'"),
        (lambda: Returns(lambda losses: (losses, {"a": 1.0})), r"^Returns\.loss_fn.*'a'"),
        (lambda: Returns(tf.zeros_like), "depend on none of the trained variables"),
        (lambda: Returns(tf.zeros_like, micro_batches=2), "depend on none of the trained variables"),
        (lambda: Returns(lambda losses: (losses, {"loss": losses})), "'loss'"),
        (
            lambda: Returns(lambda losses: (losses, {"gradient_norm": losses}), report=["gradient_norm"]),
            "'gradient_norm'.*GradientTrainer",
        ),
        (lambda: Returns(lambda losses: looplib.mean(losses, losses[..., None])), "weights that broadcast to the losses"),
        (lambda: Tagger(optimizer=dict.fromkeys(["bias", ""], keras3.optimizers.SGD(0.1))), "under two patterns"),
        (lambda: Tagger(no_decay="("), "no regular expression"),
        (lambda: Tagger(no_decay="bias"), "weight_decay"),
        (lambda: Tagger(optimizer={"bias": keras3.optimizers.SGD(0.1)}), "no pattern of optimizer matches .*kernel"),
        (lambda: Tagger(optimizer="sgd"), "optimizer"),
        (lambda: Tagger(clip_norm=-1.0), "clip_norm.*-1.0"),
        (lambda: Tagger(average_decay=1.5), "0.*1"),
        (lambda: Tagger(loss_scale="static"), "loss_scale.*'static'"),
        (lambda: Tagger(report=["gradient"]), "learning_rate"),
        (
            lambda: Tagger(optimizer=keras3.optimizers.LossScaleOptimizer(keras3.optimizers.SGD(0.1))),
            "scales the loss itself",
        ),
        (lambda: looplib.GradientTrainer.__init__(Tagger(), keras3.Sequential(), None), "no trainable variables yet"),
    ],
)  # fmt: skip
def test_bad_input_is_a_sentence(make, message):
    with pytest.raises(UsageError, match=message):
        train(make(), 1)


@pytest.mark.slow
def test_guards_see_values_that_clipping_could_hide(tmp_path):
    """An infinite gradient that is clipped by value would otherwise train on."""

    class Infinite(Tagger):
        def loss_fn(self, inputs):
            losses = super().loss_fn(inputs)[0]
            # Its value is finite, its gradient is not.
            weight = tf.convert_to_tensor(self.model.trainable_variables[1])[0]
            return losses.value[:, 0] + tf.sqrt(tf.abs(weight - weight))

    with pytest.raises(looplib.DivergenceError, match="gradient of"):
        train(Infinite(clip_value=1.0), 2, model_dir=tmp_path)


@pytest.mark.slow
def test_toy_regression_as_a_loss_equals_its_step_of_ones_own():
    """Without options, not one bit differs from a hand-written step."""

    class Loss(toy.Regression, looplib.GradientTrainer):
        def __init__(self):
            toy.Regression.__init__(self)
            looplib.GradientTrainer.__init__(self, self.model, self.optimizer)
            self._plan = self._report = self._clipping = None  # a trainer's own, whatever their names

        step_fn = looplib.GradientTrainer.step_fn

        def loss_fn(self, inputs):
            ids, x, y = inputs
            logits = self.model(x, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            if tf.reduce_mean(losses) > 1e6:  # AutoGraph converts what calls this, or Python refuses a tensor here
                losses *= 2.0
            return losses, {"ids": looplib.total(self._in_global_batch(ids))}

    own, loss = toy.Regression(), Loss()
    for trainer in (own, loss):
        with toy.controller(make_strategy("default"), trainer) as controller:
            controller.train(5)
    for a, b in zip(own.weights(), loss.weights()):
        np.testing.assert_array_equal(a, b)


PROBED = """
import sys
sys.path[:0] = {path!r}
import keras, tensorflow as tf, looplib

class Wide(looplib.GradientTrainer):
    def __init__(self):
        layers = [keras.Input((8,)), keras.layers.BatchNormalization(), keras.layers.Dense(100000), keras.layers.Dense(1)]
        super().__init__(keras.Sequential(layers), keras.optimizers.SGD(0.01), micro_batches="auto")

    def dataset(self, context):
        return context.indices(512).map(lambda i: tf.ones([context.per_replica_batch_size, 8]))

    def loss_fn(self, inputs):
        return tf.square(self.model(inputs, training=True))[:, 0]

trainer = Wide()
before = trainer.model.layers[0].get_weights()[2]
with looplib.Controller(looplib.RunConfig(global_batch_size=512), trainer=trainer, writers=[]) as controller:
    moved = (trainer.model.layers[0].get_weights()[2] != before).any()
    controller.train(1)
print("parts", trainer.micro_batches, "moved", moved)
"""


@pytest.mark.slow
@pytest.mark.parametrize("megabytes, expected", [(180, [2]), *more([(1500, [1])])])
def test_auto_takes_the_first_number_of_parts_that_fits_into_memory(megabytes, expected, tmp_path):
    """TensorFlow's own limit for the CPU's memory stands for a GPU's; one activation has 205 MB."""
    program = tmp_path / "program.py"
    program.write_text(PROBED.format(path=sys.path))
    limits = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(megabytes)}
    environment = {**os.environ, **limits, "TF_ENABLE_ONEDNN_OPTS": "0"}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    parts, moved = done.stdout.split()[-3], done.stdout.split()[-1]
    assert int(parts) in expected and moved == "False", done.stdout


@pytest.mark.slow
def test_an_apply_gradients_of_ones_own_is_called():
    class Own(Tagger):
        def apply_gradients(self, optimizer, grads_and_vars, *, summed=False):
            pairs = [(2 * gradient, variable) for gradient, variable in grads_and_vars]
            super().apply_gradients(optimizer, pairs, summed=summed)

    once, twice = Tagger(), Own()
    for trainer in (once, twice):
        with flat_config.controller(
            trainer=trainer, global_batch_size=BATCH, writers=[], steps_per_loop=1
        ) as controller:
            before = trainer.model.get_weights()
            controller.train(1)
            trainer.moves = [new - old for new, old in zip(trainer.model.get_weights(), before)]
    for one, two in zip(once.moves, twice.moves):
        np.testing.assert_allclose(two, 2 * one, rtol=1e-5, atol=1e-7)


def test_what_is_no_optimizer_is_refused_by_its_type():
    with pytest.raises(OptimizerError, match="str"):
        Tagger().apply_gradients("adam", [])


class OfSixteen(looplib.GradientTrainer):
    def __init__(self):
        super().__init__(keras3.Sequential([keras3.Input((4,)), keras3.layers.Dense(1)]), keras3.optimizers.SGD(0.1))

    def dataset(self, context):
        return context.indices(64).map(lambda ids: tf.ones([tf.size(ids), 4]))

    def loss_fn(self, inputs):
        return tf.square(self.model(inputs) - tf.zeros([16, 1]))[:, 0]


def test_a_global_batch_size_that_is_fixed_in_the_step_is_a_sentence_on_replicas():
    strategy = make_strategy("mirrored_x2")
    with strategy.scope():
        trainer = OfSixteen()
    with pytest.raises(StepError, match="each replica gets 8 of the 16 examples"):
        looplib.Controller(looplib.RunConfig(global_batch_size=16), trainer=trainer, strategy=strategy, writers=[])


class _Parts(looplib.GradientTrainer):
    """Reports the numbers that its parts draw, and uses the outputs of a part."""

    def __init__(self, micro_batches, use=None, jit_compile=False):
        model = keras3.Sequential([keras3.Input((2,)), keras3.layers.Dense(1)])
        super().__init__(model, keras3.optimizers.SGD(0.1), micro_batches=micro_batches, jit_compile=jit_compile)
        self.use = use or tf.identity

    def dataset(self, context):
        return context.indices(8).map(lambda i: tf.ones([tf.shape(i)[0], 2]))

    def loss_fn(self, inputs):
        outputs = self.model(inputs)[:, 0]
        drawn = tf.random.stateless_uniform(tf.shape(outputs), self.step_seed())
        others = tf.cast(self.use(outputs[:, None]), tf.float32)
        sums = {"drawn": tf.reduce_sum(drawn), "square": tf.reduce_sum(drawn**2)}
        return tf.square(outputs) + tf.reduce_mean(others), {name: looplib.total(one) for name, one in sums.items()}


def test_each_micro_batch_draws_numbers_of_its_own():
    config = looplib.RunConfig(global_batch_size=8)
    found = looplib.Controller(config, trainer=_Parts(8), writers=[]).train(1)
    assert found["square"] - found["drawn"] ** 2 / 8 > 1e-2  # the variance of eight equal numbers is 0


@pytest.mark.parametrize("loop", ["graph", "eager"])
@pytest.mark.parametrize("jit_compile", [False, True], ids=["", "jit"])
def test_what_needs_the_examples_of_all_parts_is_refused_in_micro_batches(loop, jit_compile):
    context, normalization = tf.distribute.get_replica_context, keras3.layers.BatchNormalization(synchronized=True)
    normalization.build((None, 1))
    uses = [
        looplib.all_gather,
        looplib.global_positions,
        lambda outputs: context().all_reduce(tf.distribute.ReduceOp.SUM, outputs),
        lambda outputs: context().all_gather(outputs, axis=0),
        lambda outputs: normalization(outputs, training=True),
    ]
    for use in uses:
        trainer = _Parts(4, use, jit_compile)
        config = looplib.RunConfig(global_batch_size=8, loop=loop)
        with pytest.raises(StepError, match="all_reduce.*all_gather.*micro_batches=1"):
            looplib.Controller(config, trainer=trainer, writers=[]).train(1)
