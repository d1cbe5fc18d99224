"""Optimizers train on several replicas as Keras trains on one device, and are given back as they were."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flat_config
import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from conftest import make_strategy, more, repetitions

import looplib
from looplib.cluster.updates import TrainingOptimizers
from looplib.errors import OptimizerError, StepError

STEPS, BATCH, FEATURES, CLASSES, WORDS = 7, 8, 5, 3, 7
_random = np.random.RandomState(0)
# Errors of very different size, so that replicas' own gradients are clipped otherwise than their sum.
X = _random.randn(STEPS * BATCH, FEATURES).astype(np.float32)
Y = (_random.randn(STEPS * BATCH, CLASSES) * np.exp(_random.randn(STEPS * BATCH, 1) * 2)).astype(np.float32)
KERNEL = _random.randn(FEATURES, CLASSES).astype(np.float32)
TABLE = _random.randn(WORDS, CLASSES).astype(np.float32)
SENTENCES = [_random.randint(1, WORDS, length) for length in _random.randint(1, 10, STEPS * BATCH)]


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer and what goes with it.

    Attributes:
      make: makes the optimizer.
      constraint: whether the kernel has a constraint.
      exclude: whether biases are left out of the decay of weights.
    """

    make: Callable[[], Any]
    constraint: bool = False
    exclude: bool = False


def classes(keras) -> dict[str, Case]:
    """Every class of optimizers of one Keras family, each of which clips."""
    kinds = ["SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor", "Ftrl", "Lion"]
    kinds += ["Nadam", "Lamb", "Muon", "ScheduleFreeAdamW"] if keras is keras3 else []
    found = {kind: Case(lambda kind=kind: getattr(keras.optimizers, kind)(0.01, clipvalue=0.5)) for kind in kinds}
    if keras is tf_keras:
        legacy = keras.optimizers.legacy
        for kind in ["SGD", "RMSprop", "Adam", "Adadelta", "Adagrad", "Adamax", "Ftrl", "Nadam"]:
            found[f"legacy {kind}"] = Case(lambda kind=kind: getattr(legacy, kind)(0.01, global_clipnorm=0.5))
    return found


def options(keras) -> dict[str, Case]:
    """Every option of one Keras family's optimizers."""
    sgd, adam = (functools.partial(getattr(keras.optimizers, kind), 0.02) for kind in ("SGD", "Adam"))
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    found = {
        "clipnorm": Case(lambda: adam(clipnorm=0.5)),
        "clipvalue": Case(lambda: sgd(clipvalue=0.3, momentum=0.9, nesterov=True)),
        "global_clipnorm": Case(lambda: adam(global_clipnorm=0.5, amsgrad=True)),
        "decay": Case(lambda: sgd(weight_decay=0.05, clipvalue=1.0)),
        "no decay of biases": Case(lambda: adam(weight_decay=0.5, clipvalue=0.1), exclude=True),
        "average": Case(lambda: adam(use_ema=True, ema_momentum=0.8, global_clipnorm=1.0)),
        "average overwrites": Case(
            lambda: sgd(use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3, clipnorm=1.0)
        ),
        "schedule": Case(lambda: keras.optimizers.AdamW(schedule, weight_decay=0.1, clipvalue=0.5)),
        "constraint": Case(lambda: sgd(clipnorm=1.0), constraint=True),
        **dynamic(keras),
    }
    if keras is tf_keras:
        return found
    kinds, accumulate = keras.optimizers, dict(gradient_accumulation_steps=3)
    return found | {
        "loss scale": Case(lambda: sgd(loss_scale_factor=8.0, clipnorm=0.5)),
        "accumulate": Case(lambda: sgd(**accumulate, global_clipnorm=0.5, weight_decay=0.05, momentum=0.9)),
        "accumulate, average": Case(
            lambda: adam(**accumulate, use_ema=True, ema_overwrite_frequency=2, clipnorm=1.0), constraint=True
        ),
        "accumulate, schedule": Case(lambda: kinds.Muon(schedule, **accumulate, clipnorm=0.5)),
        "several": Case(lambda: several(sgd(clipnorm=0.5), adam(**accumulate, clipvalue=0.1))),
    }


def dynamic(keras) -> dict[str, Case]:
    """Optimizers that scale the loss, and leave out steps whose gradients overflow."""
    if keras is keras3:
        make, accumulate = keras.optimizers, dict(gradient_accumulation_steps=2)
        scaled = lambda inner: make.LossScaleOptimizer(inner, initial_scale=4.0, dynamic_growth_steps=3)
        return {
            "dynamic": Case(lambda: scaled(make.SGD(0.02, clipnorm=0.5))),
            "dynamic, accumulate": Case(lambda: scaled(make.Adam(0.02, **accumulate, global_clipnorm=0.5))),
        }
    scaled = lambda inner: keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=4.0, dynamic_growth_steps=3)
    return {
        "dynamic": Case(lambda: scaled(keras.optimizers.SGD(0.02, clipnorm=0.5))),
        "legacy dynamic": Case(lambda: scaled(keras.optimizers.legacy.Adam(0.02, clipnorm=0.5))),
    }


def several(matrices, vectors):
    """One optimizer for matrices and another one for vectors."""
    return keras3.optimizers.MultiOptimizer(lambda variable: matrices if len(variable.shape) == 2 else vectors)


class Zoo(looplib.Trainer):
    """A linear regression for each optimizer, all trained on the same batches. Built under the strategy's scope."""

    def __init__(self, keras, cases, x=X):
        self.models, self.optimizers, self.cases, self.x = [], [], cases, x
        for case in cases.values():
            constraint = keras.constraints.MaxNorm(1.0) if case.constraint else None
            dense = keras.layers.Dense(CLASSES, kernel_constraint=constraint)
            model = keras.Sequential([keras.layers.InputLayer((FEATURES,)), dense])
            dense.set_weights([KERNEL, np.ones(CLASSES, np.float32)])
            optimizer = case.make()
            if case.exclude:
                optimizer.exclude_from_weight_decay(var_names=["bias"])
            if hasattr(optimizer, "build"):
                optimizer.build(model.trainable_variables)
            self.models.append(model)
            self.optimizers.append(optimizer)

    def dataset(self, context):
        return tf.data.Dataset.from_tensor_slices((self.x, Y[: len(self.x)])).batch(context.per_replica_batch_size)

    def step_fn(self, inputs):
        for model, optimizer in zip(self.models, self.optimizers):
            update(model, optimizer, *inputs, self.global_mean)
        return {}

    def values(self):
        """dict from the case's name to all its variables, of the model and the optimizer."""
        zipped = zip(self.cases, self.models, self.optimizers)
        return {name: values(model) + values(optimizer) for name, model, optimizer in zipped}


def update(model, optimizer, x, y, mean, apply=lambda optimizer, pairs: optimizer.apply_gradients(pairs)):
    """Updates a model once, for the mean of the squared errors."""
    with tf.GradientTape() as tape:
        loss = mean(tf.reduce_sum(tf.square(model(x) - y), axis=1))
        if hasattr(optimizer, "scale_loss"):
            loss = optimizer.scale_loss(loss)
        elif hasattr(optimizer, "get_scaled_loss"):
            loss = optimizer.get_scaled_loss(loss)
    gradients = tape.gradient(loss, model.trainable_variables)
    if hasattr(optimizer, "get_unscaled_gradients"):
        gradients = optimizer.get_unscaled_gradients(gradients)
    apply(optimizer, zip(gradients, model.trainable_variables))


def values(holder):
    variables = holder.variables() if callable(holder.variables) else holder.variables
    return [tf.convert_to_tensor(variable).numpy() for variable in variables]


def plainly(keras, cases, x=X):
    """The variables that Keras alone comes to, on one device, in a plain loop; dict from the case's name."""
    zoo = Zoo(keras, cases, x)
    for i in range(0, len(x), BATCH):
        for model, optimizer in zip(zoo.models, zoo.optimizers):
            update(model, optimizer, x[i : i + BATCH], Y[i : i + BATCH], tf.reduce_mean)
    return zoo.values()


def check(keras, cases, name, loop="graph", x=X):
    """Trains on replicas, and compares all variables with those of Keras alone."""
    with make_strategy(name).scope():
        zoo = Zoo(keras, cases, x)
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=BATCH, steps_per_loop=STEPS, loop=loop),
        trainer=zoo,
        strategy=make_strategy(name),
        writers=[],
    ) as controller:
        controller.train(-1)
    assert controller.global_step == len(x) // BATCH
    expected, wrong = plainly(keras, cases, x), {}
    for case, found in zoo.values().items():
        for one, other in zip(found, expected[case], strict=True):
            if not np.allclose(one, other, rtol=1e-4, atol=1e-5):
                wrong[case] = float(np.abs(one - other).max())
    assert not wrong
    return zoo


@pytest.mark.slow
def test_every_class_of_optimizers_equals_keras_on_one_device(keras):
    check(keras, classes(keras), "mirrored_x2", loop="eager")


@pytest.mark.slow(spread=1)
def test_every_option_equals_keras_on_one_device(keras):
    steps = STEPS if keras is keras3 else repetitions(4, STEPS)  # of Keras 3 some accumulate gradients
    check(keras, options(keras), "mirrored_x2", loop="eager", x=X[: steps * BATCH])


@pytest.mark.slow
def test_every_option_equals_keras_on_one_device_in_a_graph_too(keras):
    check(keras, options(keras), "mirrored_x2")


@pytest.mark.slow
@pytest.mark.parametrize("keras", ["keras", *more(["tf_keras"])], indirect=True)
def test_four_replicas_equal_keras_on_one_device_too(keras):
    """In a graph, where an update that depends on the step or on the gradients is a branch."""
    names = ["accumulate, average", "average overwrites", "dynamic", "several"]
    check(keras, {name: case for name, case in options(keras).items() if name in names}, "mirrored_x4")


@pytest.mark.slow
@pytest.mark.parametrize(
    "keras, loop",
    [("keras", "graph"), ("tf_keras", "eager"), pytest.param("tf_keras", "graph", marks=pytest.mark.slow)],
    indirect=["keras"],
)
def test_a_gradient_that_overflows_on_one_replica_leaves_the_step_out_on_all(keras, loop):
    x = X.copy()
    x[3 * BATCH + 6] = np.inf  # of the last replica
    zoo = check(keras, dynamic(keras), "mirrored_x2", loop=loop, x=x)
    assert all(np.isfinite(value).all() for found in zoo.values().values() for value in found)


class Sentences(looplib.Trainer):
    """Trains embeddings, one for each optimizer, on sentences padded with word 0 to the longest of a replica's batch."""

    def __init__(self, keras, makes):
        self.models, self.optimizers = [], [make() for make in makes]
        for _ in makes:
            layers = [keras.layers.InputLayer((None,), dtype="int64"), keras.layers.Embedding(WORDS, CLASSES)]
            self.models.append(keras.Sequential(layers))
            self.models[-1].layers[-1].set_weights([TABLE])
        for model, optimizer in zip(self.models, self.optimizers):
            if hasattr(optimizer, "build"):
                optimizer.build(model.trainable_variables)

    def dataset(self, context):
        words = tf.data.Dataset.from_tensor_slices(tf.ragged.constant(SENTENCES, dtype=tf.int64))
        return words.map(lambda row: row).padded_batch(context.per_replica_batch_size, padded_shapes=[None])

    def step_fn(self, ids):
        for model, optimizer in zip(self.models, self.optimizers):
            with tf.GradientTape() as tape:
                errors = tf.reduce_sum(tf.square(model(ids) - 1), 2) * tf.cast(ids > 0, tf.float32)
                loss = self.global_mean(tf.reduce_sum(errors, axis=1))
            gradients = tape.gradient(loss, model.trainable_variables)
            assert isinstance(gradients[0], tf.IndexedSlices)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return {"loss": tf.reduce_sum(errors, axis=1)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "keras, name",  # with another reduction each
    [
        ("keras", "mirrored_x2"),
        *more([("tf_keras", "mirrored_x4"), ("keras", "mirrored_x4"), ("tf_keras", "mirrored_x2")]),
    ],
    indirect=["keras"],
)
def test_sparse_gradients_of_varying_length_equal_keras_on_one_device(keras, name):
    kinds = keras.optimizers
    makes = [lambda: kinds.SGD(0.1, clipnorm=0.5), lambda: kinds.Adam(0.1)]
    if keras is tf_keras:  # which updates only the rows that are in the batch
        makes.append(lambda: kinds.legacy.SGD(0.1, momentum=0.9))
    else:
        makes.append(lambda: kinds.RMSprop(0.1, gradient_accumulation_steps=2, clipvalue=0.1))
    with make_strategy(name).scope():
        trainer = Sentences(keras, makes)
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=BATCH, steps_per_loop=STEPS),
        trainer=trainer,
        strategy=make_strategy(name),
        writers=[],
    ) as controller:
        controller.train(-1)
    alone = Sentences(keras, makes)
    alone.global_batch_size = BATCH
    for i in range(0, len(SENTENCES), BATCH):
        alone.step_fn(tf.ragged.constant(SENTENCES[i : i + BATCH], dtype=tf.int64).to_tensor())
    for found, expected in zip(trainer.models, alone.models):
        np.testing.assert_allclose(values(found)[0], values(expected)[0], rtol=1e-4, atol=1e-5)


class Lookups(looplib.Trainer):
    """Trains tables whose rows are looked up by the words, positions and segments of sentences, one for each optimizer.

    A sentence has the ids of words, that of its one segment, and the positions of the longest sentence of the batch.
    """

    def __init__(self, keras, makes, varies):
        self.optimizers, self.varies = [make() for make in makes], varies
        make = lambda: [keras.Variable(TABLE) if keras is keras3 else tf.Variable(TABLE) for _ in range(4)]
        self.tables = [make() for _ in makes]
        for optimizer, tables in zip(self.optimizers, self.tables):
            if hasattr(optimizer, "build"):
                optimizer.build(tables)

    def dataset(self, context):
        words = tf.data.Dataset.from_tensor_slices(tf.ragged.constant(SENTENCES, dtype=tf.int64)).map(lambda row: row)
        shapes = [None if self.varies else WORDS]
        words = words.map(lambda row: row[:WORDS])
        return words.padded_batch(context.per_replica_batch_size, padded_shapes=shapes, drop_remainder=True)

    def step_fn(self, ids):
        mask = tf.cast(ids > 0, tf.float32)
        for optimizer, tables in zip(self.optimizers, self.tables):
            with tf.GradientTape() as tape:
                words, positions, segments, both = (tf.convert_to_tensor(table) for table in tables)
                tape.watch([words, positions, segments, both])
                longest = tf.range(tf.shape(ids)[1])
                outputs = tf.gather(words, ids) + tf.gather(positions, longest) + tf.gather(both, longest)
                outputs += tf.gather(segments, tf.zeros_like(ids)) * tf.gather(both, ids)
                losses = tf.reduce_sum(tf.reduce_sum(tf.square(outputs - 1), 2) * mask, axis=1)
                loss = self.global_mean(losses)
            gradients = tape.gradient(loss, [words, positions, segments, both])
            assert all(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
            self.apply_gradients(optimizer, zip(gradients, tables))
        return {"loss": losses}


@pytest.mark.slow
@pytest.mark.parametrize("varies", [True, *more([False])])
@pytest.mark.parametrize("name", ["mirrored_x2", *more(["mirrored_x4"])])
def test_rows_that_each_replica_looks_up_once_are_one_row_as_on_one_device(keras, name, varies):
    """The square of a sum is another one than the sum of squares; Keras 3 takes that of each row of a gradient."""
    kinds = keras.optimizers
    makes = [lambda: kinds.SGD(0.1, momentum=0.9, clipnorm=0.5)]
    makes += [functools.partial(getattr(kinds, kind), 0.1) for kind in ("Adam", "Adagrad", "RMSprop")]
    if keras is tf_keras:
        makes.append(lambda: kinds.legacy.Adam(0.1))
    with make_strategy(name).scope():
        trainer = Lookups(keras, makes, varies)
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=BATCH, steps_per_loop=STEPS),
        trainer=trainer,
        strategy=make_strategy(name),
        writers=[],
    ) as controller:
        controller.train(STEPS)
    alone = Lookups(keras, makes, varies)
    alone.global_batch_size = BATCH
    step = tf.function(alone.step_fn, reduce_retracing=True)
    for i in range(0, len(SENTENCES), BATCH):
        batch = [sentence[:WORDS] for sentence in SENTENCES[i : i + BATCH]]
        step(tf.ragged.constant(batch, dtype=tf.int64).to_tensor(shape=None if varies else [None, WORDS]))
    for number, (found, expected) in enumerate(zip(trainer.tables, alone.tables)):
        for table, wanted in zip(found, expected):
            ours, theirs = (tf.convert_to_tensor(value).numpy() for value in (table, wanted))
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5, err_msg=str(number))


def small_zoo(name, make=lambda: keras3.optimizers.SGD(0.1, clipnorm=0.5)):
    with make_strategy(name).scope():
        return Zoo(keras3, {"one": Case(make)})


def controller_of(zoo, name, **settings):
    settings = {"global_batch_size": BATCH, "writers": [], "strategy": make_strategy(name), **settings}
    return flat_config.controller(trainer=zoo, **settings)


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("name, loop", [("default", "graph"), ("mirrored_x2", "eager")])
def test_a_closed_controller_leaves_optimizers_as_they_were(name, loop, keras):
    with make_strategy(name).scope():
        zoo = Zoo(keras, {key: case for key, case in options(keras).items() if key in ("several", "dynamic")})
    inner = [getattr(optimizer, "inner_optimizer", optimizer) for optimizer in zoo.optimizers]
    mine = vars(inner[0])["update_step"] = functools.partial(type(inner[0]).update_step, inner[0])  # a user's own
    every = [*zoo.optimizers, *inner]
    before = [dict(vars(optimizer)) for optimizer in every]
    with controller_of(zoo, name, loop=loop) as controller:
        assert [dict(vars(optimizer)) for optimizer in every] != before
        controller.train(-1)
    assert vars(inner[0])["update_step"] is mine
    for optimizer, names in zip(every, before):
        assert {key for key, value in vars(optimizer).items() if callable(value)} == {
            key for key, value in names.items() if callable(value)
        }


@pytest.mark.slow
def test_a_trainer_of_two_controllers_sums_once():
    """Also while the first one is not closed, or closed after the second one was built."""
    zoo = small_zoo("mirrored_x2")
    first = controller_of(zoo, "mirrored_x2")
    with controller_of(zoo, "mirrored_x2") as second:
        first.close()
        second.train(-1)
    expected = plainly(keras3, zoo.cases)["one"]
    for found, wanted in zip(zoo.values()["one"], expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["accumulate", "several"])
def test_an_optimizer_that_is_built_in_the_first_step_sums_once(option):
    make = options(keras3)[option].make
    zoo = small_zoo("mirrored_x2", make)
    with make_strategy("mirrored_x2").scope():
        zoo.optimizers[0] = make()
    with controller_of(zoo, "mirrored_x2", loop="eager") as controller:
        controller.train(-1)
    expected = plainly(keras3, {"one": Case(make)})["one"]
    np.testing.assert_allclose(zoo.values()["one"][0], expected[0], rtol=1e-4, atol=1e-5)


def ops_of_a_step(make, strategy, *, changed):
    """The types of the ops in a step, in order, with looplib's changes and without."""
    zoo = small_zoo("default", make)
    zoo.global_batch_size = BATCH
    optimizers = TrainingOptimizers(zoo, strategy, noted=True) if changed else None
    step = tf.function(lambda: zoo.step_fn((X[:BATCH], Y[:BATCH]))).get_concrete_function()
    if optimizers:
        optimizers.close()
    return [op.type for op in step.graph.get_operations()]


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("option", ["global_clipnorm", "accumulate, average", "dynamic", "several"])
def test_on_one_replica_a_step_is_what_keras_makes_of_it(option):
    make = options(keras3)[option].make
    strategy = make_strategy("default")
    assert ops_of_a_step(make, strategy, changed=True) == ops_of_a_step(make, strategy, changed=False)


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("option", ["clipnorm", "average overwrites", "dynamic"])
def test_apply_gradients_of_a_trainer_needs_no_method_replaced(option, keras):
    case = {option: options(keras)[option]}
    strategy = make_strategy("mirrored_x2")
    with strategy.scope():
        zoo = Zoo(keras, case)
    zoo.global_batch_size = BATCH

    def step(i):
        start = i * BATCH + BATCH // 2 * int(tf.distribute.get_replica_context().replica_id_in_sync_group)
        batch = X[start : start + BATCH // 2], Y[start : start + BATCH // 2]
        update(zoo.models[0], zoo.optimizers[0], *batch, zoo.global_mean, zoo.apply_gradients)

    for i in range(STEPS):
        strategy.run(step, args=(i,))
    assert not {"apply", "apply_gradients", "update_step"} & set(vars(zoo.optimizers[0]))
    for found, wanted in zip(zoo.values()[option], plainly(keras, case)[option], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


class Wrapper(keras3.optimizers.Optimizer):
    """A user's own optimizer around another one."""

    def __init__(self, inner):
        super().__init__(0.0)
        self.inner = inner

    def build(self, variables):
        super().build(variables)
        self.inner.build(variables)

    def apply(self, grads, trainable_variables=None):
        self.inner.apply([2 * gradient for gradient in grads], trainable_variables)


@pytest.mark.slow
def test_an_optimizer_inside_of_another_one_sums_once_and_alone_too():
    class Both(Zoo):
        def __init__(self):
            super().__init__(keras3, {"one": Case(lambda: Wrapper(keras3.optimizers.SGD(0.02, clipnorm=0.5)))})
            self.inner = self.optimizers[0].inner

        def step_fn(self, inputs):
            update(self.models[0], self.optimizers[0], *inputs, self.global_mean)
            update(self.models[0], self.inner, *inputs, self.global_mean)
            return {}

    with make_strategy("mirrored_x2").scope():
        zoo = Both()
    with controller_of(zoo, "mirrored_x2", loop="eager") as controller:
        controller.train(-1)
    alone = Both()
    alone.global_batch_size = BATCH
    for i in range(0, len(X), BATCH):
        alone.step_fn((X[i : i + BATCH], Y[i : i + BATCH]))
    for found, wanted in zip(zoo.values()["one"], alone.values()["one"], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_trainer_of_orbits_kind_sums_first_too():
    strategy, zoo = make_strategy("mirrored_x2"), small_zoo("mirrored_x2")

    class Orbits:
        def __init__(self):
            self.models, self.optimizers = zoo.models, zoo.optimizers
            self.global_step = tf.Variable(0, dtype=tf.int64)

        def train(self, num_steps):
            for _ in range(int(num_steps)):
                strategy.run(self.step, args=(int(self.global_step.numpy()),))
                self.global_step.assign_add(1)

        def step(self, number):
            size = BATCH // 2
            start = number * BATCH + size * int(tf.distribute.get_replica_context().replica_id_in_sync_group)
            mean = lambda values: tf.reduce_sum(values) / BATCH
            update(zoo.models[0], zoo.optimizers[0], X[start : start + size], Y[start : start + size], mean)

    with strategy.scope():
        trainer = looplib.OrbitTrainer(Orbits())
    with looplib.Controller(trainer=trainer, strategy=strategy, writers=[]) as controller:
        controller.train(STEPS)
    assert "apply" not in vars(zoo.optimizers[0])
    np.testing.assert_allclose(zoo.values()["one"][0], plainly(keras3, zoo.cases)["one"][0], rtol=1e-5, atol=1e-6)


def test_what_cannot_be_right_on_replicas_is_refused_when_the_controller_is_built(monkeypatch):
    with make_strategy("mirrored_x2").scope():
        nadam = Zoo(tf_keras, {"one": Case(lambda: tf_keras.optimizers.Nadam(0.01))})
    with pytest.raises(OptimizerError, match="tf_keras.optimizers.Nadam.*tf_keras.optimizers.legacy.Nadam"):
        controller_of(nadam, "mirrored_x2")

    accumulating = lambda: keras3.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    zoo = small_zoo("mirrored_x2", accumulating)
    with make_strategy("mirrored_x2").scope():
        zoo.models[0].weight = tf.Variable(np.ones(3, np.float32), aggregation=tf.VariableAggregation.MEAN, name="mine")
        zoo.optimizers[0] = accumulating()
        zoo.optimizers[0].build([zoo.models[0].weight])
    zoo.step_fn = lambda inputs: zoo.optimizers[0].apply([tf.ones([3])], [zoo.models[0].weight]) or {}
    with pytest.raises(OptimizerError):
        controller_of(zoo, "mirrored_x2")

    zoo = small_zoo("mirrored_x2")
    zoo.models[0].layers[-1].bias.overwrite_with_gradient = True  # as of float8
    with pytest.raises(OptimizerError, match="bias"):
        controller_of(zoo, "mirrored_x2")

    adapter = next(cls for cls in keras3.optimizers.SGD.__mro__ if cls.__module__.endswith("tensorflow.optimizer"))
    monkeypatch.delattr(adapter, "_all_reduce_sum_gradients")  # as of a Keras that calls it otherwise
    with pytest.raises(OptimizerError, match="SGD"):
        controller_of(small_zoo("mirrored_x2"), "mirrored_x2")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default", "mirrored_x2"])
def test_a_run_with_an_optimizer_made_of_several_resumes(name, tmp_path):
    class Line(looplib.GradientTrainer):
        def __init__(self):
            model = keras3.Sequential([keras3.layers.InputLayer((FEATURES,)), keras3.layers.Dense(CLASSES)])
            model.set_weights([KERNEL, np.ones(CLASSES, np.float32)])
            super().__init__(model, several(keras3.optimizers.SGD(0.02, momentum=0.9), keras3.optimizers.Adam(0.02)))

        def dataset(self, context):
            return context.indices(len(X)).map(lambda i: (tf.gather(X, i), tf.gather(Y, i)))

        def loss_fn(self, inputs):
            return tf.reduce_sum(tf.square(self.model(inputs[0]) - inputs[1]), axis=1)

    def ended(folder, *stops):
        for stop in stops:
            with make_strategy(name).scope():
                trainer = Line()
            with looplib.Controller(
                looplib.RunConfig(global_batch_size=BATCH, steps_per_loop=2, loop="graph"),
                trainer=trainer, strategy=make_strategy(name), model_dir=tmp_path / folder, writers=[],
            ) as controller:  # fmt: skip
                controller.train(stop)
        inner = [value for one in trainer.optimizer.optimizers for value in values(one)]
        return [*values(trainer.model), *inner]

    for one, other in zip(ended("whole", 6), ended("parts", 3, 6), strict=True):
        np.testing.assert_array_equal(one, other)


class Momentum(tf.Module):
    """An optimizer that no Keras knows, with the methods that Sonnet's have."""

    def __init__(self, parameters):
        super().__init__()
        self.sums = [tf.Variable(tf.zeros_like(parameter), trainable=False) for parameter in parameters]

    def apply(self, updates, parameters):
        for total, update, parameter in zip(self.sums, updates, parameters):
            total.assign(0.9 * total + update)
            parameter.assign_sub(0.1 * total)


class OwnUpdate(looplib.Trainer):
    """Fits a line by an optimizer of its own, whose gradients it may sum over the replicas; or misuses the strategy."""

    x = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")

    def __init__(self, how):
        self.how, self.weight = how, tf.Variable(tf.zeros([3, 1]))
        self.optimizer = Momentum([self.weight])
        if how == "beside one of Keras":
            self.of_keras, self.other = keras3.optimizers.SGD(0.1), tf.Variable(tf.zeros([3, 1]))

    def dataset(self, context):
        return context.indices(32, shuffle=False).map(lambda ids: tf.gather(self.x, ids))

    def step_fn(self, x):
        with tf.GradientTape() as tape:
            losses = tf.square(x @ self.weight - tf.reduce_sum(x, axis=1, keepdims=True))[:, 0]
            loss = tf.reduce_mean(losses)
        gradients = [tape.gradient(loss, self.weight)]
        if self.how == "all_reduce":
            gradients = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
        if self.how == "reduce":
            loss = tf.distribute.get_strategy().reduce(tf.distribute.ReduceOp.MEAN, loss, axis=None)
        self.optimizer.apply(gradients, [self.weight])
        if self.how == "beside one of Keras":
            self.of_keras.apply(gradients, [self.other])
        return {"loss": losses}


def own_update(how, strategy="mirrored_x2", **settings):
    strategy = make_strategy(strategy)
    with strategy.scope():
        trainer = OwnUpdate(how)
    settings = looplib.RunConfig(global_batch_size=8, **settings)
    with looplib.Controller(settings, trainer=trainer, strategy=strategy, writers=[]) as controller:
        controller.train(6)
    return [part.numpy() for part in strategy.experimental_local_results(trainer.weight)]


def test_an_optimizer_that_is_none_of_keras_follows_the_gradient_of_all_replicas_or_is_refused():
    weight, total = np.zeros([3, 1]), np.zeros([3, 1])
    for step in range(6):
        x = OwnUpdate.x[step % 4 * 8 : step % 4 * 8 + 8]
        total = 0.9 * total + 2 / 8 * x.T @ (x @ weight - x.sum(axis=1, keepdims=True))
        weight = weight - 0.1 * total
    for found in (*own_update("all_reduce"), *own_update("alone", "default")):
        np.testing.assert_allclose(found, weight, rtol=1e-4)
    with pytest.raises(StepError, match="differ between the replicas.*OwnUpdate.step_fn"):
        own_update("alone")
    with pytest.raises(StepError, match="OwnUpdate would differ"):
        own_update("beside one of Keras")


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("loop", ["graph", "eager"])
@pytest.mark.parametrize("strategy", ["default", "mirrored_x2"])
def test_a_step_that_reduces_by_the_strategy_is_refused_with_its_line(strategy, loop):
    with pytest.raises(StepError, match="optimizers_test.py.*reduce"):
        own_update("reduce", strategy, loop=loop)
