"""ShardedEmbedding: rows are looked up, updated alone, by Keras's formulas, and saved, in any number of parts."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import looplib
from looplib.errors import EngineError, OptimizerError, SettingError, StepError

ROWS, DIM, EXAMPLES, STEPS = 50, 4, 640, 10
RNG = np.random.default_rng(7)
IDS = RNG.integers(0, ROWS // 2, (EXAMPLES, 3))  # the second half of the table is never looked up
TARGETS = RNG.normal(size=(EXAMPLES, 1)).astype("float32")
FAMILIES = {"keras": keras, "tf_keras": tf_keras}


class Mean(looplib.GradientTrainer):
    """A regression on the mean of three rows, which has no other variables, so that numpy can train it too."""

    def __init__(self, optimizer, layer, **settings):
        inputs = FAMILIES[layer.family].Input((3,), dtype="int64")
        self.layer = layer
        super().__init__(FAMILIES[layer.family].Model(inputs, layer(inputs)), optimizer, **settings)

    def dataset(self, context):
        return context.indices(EXAMPLES, shuffle=False).map(lambda i: (tf.gather(IDS, i), tf.gather(TARGETS, i)))

    def loss_fn(self, inputs):
        ids, targets = inputs
        return tf.reduce_sum(tf.square(self.model(ids, training=True) - targets), axis=1)


def layer(shards=2, family="keras", initializer=None, **settings):
    initializer = initializer or FAMILIES[family].initializers.RandomUniform(seed=3)
    settings = {"combiner": "mean", **settings}
    return looplib.ShardedEmbedding(ROWS, DIM, shards=shards, family=family, initializer=initializer, **settings)


def whole(parts):
    return np.concatenate([tf.convert_to_tensor(part).numpy() for part in parts.tables])


def trained(strategy, optimizer, steps=STEPS, **settings):
    """Returns the table before and after a training of 32 examples a step."""
    with strategy.scope():
        trainer = Mean(optimizer(), layer(**settings))
    before = whole(trainer.layer)
    looplib.Controller(looplib.RunConfig(global_batch_size=32), trainer=trainer, strategy=strategy).train(steps=steps)
    return before, whole(trainer.layer)


def by_numpy(table, update):
    """Trains with a function (rows, gradient, touched, step), which changes the rows in place."""
    table = table.astype("float64").copy()
    for step in range(STEPS):
        batch = [(step * 32 + i) % EXAMPLES for i in range(32)]
        error = 2 * (table[IDS[batch]].mean(axis=1) - TARGETS[batch]) / 32
        gradient = np.zeros_like(table)
        for ids, each in zip(IDS[batch], error):
            for one in ids:
                gradient[one] += each / 3
        update(table, gradient, np.unique(IDS[batch]), step + 1)
    return table


class Rules:
    """Each optimizer beside its formula in numpy, on the rows that a step touches."""

    def __init__(self):
        self.first, self.second = np.zeros((ROWS, DIM)), np.zeros((ROWS, DIM))

    def sgd(self, table, gradient, rows, _):
        table[rows] -= 0.5 * gradient[rows]

    def momentum(self, table, gradient, rows, _):
        self.first[rows] = 0.9 * self.first[rows] - 0.5 * gradient[rows]
        table[rows] += self.first[rows]

    def nesterov(self, table, gradient, rows, _):
        self.first[rows] = 0.9 * self.first[rows] - 0.5 * gradient[rows]
        table[rows] += 0.9 * self.first[rows] - 0.5 * gradient[rows]

    def adagrad(self, table, gradient, rows, _):
        self.first[rows] += gradient[rows] ** 2
        table[rows] -= 0.1 * gradient[rows] / np.sqrt(0.1 + self.first[rows] + 1e-7)

    def adam(self, table, gradient, rows, step):
        self.first[rows] += (gradient[rows] - self.first[rows]) * 0.1
        self.second[rows] += (gradient[rows] ** 2 - self.second[rows]) * 0.001
        rate = 0.1 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        table[rows] -= rate * self.first[rows] / (np.sqrt(self.second[rows]) + 1e-7)

    def ftrl(self, table, gradient, rows, _):
        before = 0.1 + self.first[rows]
        self.first[rows] += gradient[rows] ** 2
        after = 0.1 + self.first[rows]
        self.second[rows] += gradient[rows] - (np.sqrt(after) - np.sqrt(before)) / 0.1 * table[rows]
        linear = self.second[rows]
        table[rows] = (np.clip(linear, -0.001, 0.001) - linear) / (np.sqrt(after) / 0.1 + 0.02)


OPTIMIZERS = {
    "sgd": lambda kind: kind.SGD(0.5),
    "momentum": lambda kind: kind.SGD(0.5, momentum=0.9),
    "nesterov": lambda kind: kind.SGD(0.5, momentum=0.9, nesterov=True),
    "adagrad": lambda kind: kind.Adagrad(0.1),
    "adam": lambda kind: kind.Adam(0.1),
    "ftrl": lambda kind: kind.Ftrl(0.1, l1_regularization_strength=0.001, l2_regularization_strength=0.01),
}


@pytest.mark.parametrize("rule", OPTIMIZERS)
@pytest.mark.parametrize(("strategy", "shards", "family"), [
    ("one_device", 1, "keras"), ("one_device", 4, "tf_keras"), ("mirrored_x2", 3, "keras"), ("mirrored_x2", 1, "tf_keras"),
], indirect=["strategy"])  # fmt: skip
def test_rows_are_updated_as_numpy_does_it_and_others_stay(strategy, shards, family, rule):
    make = OPTIMIZERS[rule]
    before, after = trained(strategy, lambda: make(FAMILIES[family].optimizers), shards=shards, family=family)
    expected = by_numpy(before, getattr(Rules(), rule))
    np.testing.assert_allclose(after, expected, rtol=2e-4, atol=2e-6)
    assert np.abs(after - before)[: ROWS // 2].max() > 1e-3
    np.testing.assert_array_equal(after[ROWS // 2 :], before[ROWS // 2 :])


def test_initial_rows_do_not_depend_on_the_number_of_parts():
    one, many = (whole(looplib.ShardedEmbedding(
        40_000, 40, shards=shards, initializer=keras.initializers.RandomNormal(seed=5))) for shards in (1, 7))  # fmt: skip
    np.testing.assert_array_equal(one, many)
    assert one.std() == pytest.approx(0.05, rel=0.01) and len(np.unique(one, axis=0)) == len(one)  # no chunk repeats
    assert not np.array_equal(whole(looplib.ShardedEmbedding(9, 4)), whole(looplib.ShardedEmbedding(9, 4)))


def structures():
    rows = [[1, 7, 7], [4], [], [9, 0]]
    weights = [[0.5, 2.0, 1.0], [3.0], [], [1.0, 4.0]]
    dense = np.array([[1, 7, 7], [4, 2, 0]])
    positions = [[i, j] for i, row in enumerate(rows) for j, _ in enumerate(row)]
    flat = [value for row in rows for value in row], [value for row in weights for value in row]
    sparse = [tf.SparseTensor(positions, tf.constant(values), [4, 3]) for values in flat]
    yield "ragged", tf.ragged.constant(rows), tf.ragged.constant(weights), rows, weights
    yield "sparse", *sparse, rows, weights
    yield "dense", dense, dense.astype("float32"), dense.tolist(), dense.tolist()


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
def test_combiners_are_those_of_numpy_for_each_structure(combiner, weighted):
    parts = layer(shards=3, combiner=combiner)
    table = whole(parts)
    for name, ids, weights, rows, numbers in structures():
        expected = []
        for row, factors in zip(rows, numbers):
            factors = np.array(factors if weighted else [1.0] * len(row))[:, None]
            total = (table[np.array(row, int)] * factors).sum(axis=0)
            divisor = {"sum": 1, "mean": factors.sum(), "sqrtn": np.sqrt((factors**2).sum())}[combiner]
            expected.append(total / divisor if len(row) else np.zeros(DIM))
        found = parts(ids, weights=weights) if weighted else parts(ids)
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=name)


def test_without_a_combiner_each_id_has_a_row():
    parts = layer(combiner=None)
    table = whole(parts)
    ids = np.arange(12).reshape(2, 2, 3)
    np.testing.assert_array_equal(parts(ids), table[ids])
    ragged = parts(tf.ragged.constant([[3, 30], [49]]))
    np.testing.assert_array_equal(ragged.flat_values, table[[3, 30, 49]])
    assert ragged.row_lengths().numpy().tolist() == [2, 1]
    pairs = parts(tf.RaggedTensor.from_row_lengths([[3, 30], [49, 0], [1, 1]], [2, 1]))
    np.testing.assert_array_equal(pairs.flat_values, table[[[3, 30], [49, 0], [1, 1]]])
    for kind in ("uint8", "int32", "float32"):
        np.testing.assert_array_equal(parts(ids.astype(kind)), table[ids])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", [{}, {"ragged": True}, {"sparse": True}])
def test_a_saved_model_is_read_by_keras_and_its_export_by_tensorflow(tmp_path, family, kind):
    module = FAMILIES[family]
    inputs = module.Input((None,), dtype="int64", **kind)
    model = module.Model(inputs, layer(family=family)(inputs))
    ids = tf.ragged.constant([[1, 30], [49, 2]], tf.int64)
    given = {"ragged": ids, "sparse": ids.to_sparse()}.get(next(iter(kind), ""), ids.to_tensor())
    expected = whole(model.layers[-1])[[[1, 30], [49, 2]]].mean(axis=1)
    path = str(tmp_path / "model.keras")
    model.save(path)
    np.testing.assert_allclose(module.models.load_model(path)(given), expected, rtol=1e-6)
    if not kind:  # Keras exports a signature for dense tensors alone
        model.export(str(tmp_path / "export"))
        exported = tf.saved_model.load(str(tmp_path / "export"))
        np.testing.assert_allclose(exported.serve(given), expected, rtol=1e-6)


@pytest.mark.parametrize("strategy", ["mirrored_x2"], indirect=True)
def test_a_run_resumes_on_another_number_of_replicas_as_if_it_had_not_stopped(strategy, tmp_path):
    def run(where, steps, path):
        with where.scope():
            trainer = Mean(keras.optimizers.Adam(0.1), layer(shards=3))
        config = looplib.RunConfig(global_batch_size=32)
        looplib.Controller(config, trainer=trainer, strategy=where, model_dir=str(path)).train(steps=steps)
        return whole(trainer.layer), np.asarray(trainer.optimizer.variables[3])

    one = tf.distribute.OneDeviceStrategy("/cpu:0")
    whole_run = run(one, 10, tmp_path / "whole")
    run(strategy, 4, tmp_path / "parts")
    for found, expected in zip(run(one, 10, tmp_path / "parts"), whole_run):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


REFUSED = [
    (lambda: keras.optimizers.RMSprop(0.1), {}, "RMSprop trains the table"),
    (lambda: keras.optimizers.AdamW(0.1), {}, "weight_decay"),
    (lambda: keras.optimizers.Adam(0.1, amsgrad=True), {}, "amsgrad"),
    (lambda: keras.optimizers.Adam(0.1, clipnorm=1.0), {}, "clipnorm"),
    (lambda: keras.optimizers.SGD(0.1, use_ema=True), {}, "use_ema"),
    (lambda: keras.optimizers.SGD(0.1), {"micro_batches": 2}, "is dense"),
    (lambda: keras.optimizers.SGD(0.1), {"clip_global_norm": 1.0}, "is dense"),
]


@pytest.mark.parametrize(("optimizer", "settings", "words"), REFUSED)
def test_what_needs_a_whole_table_is_refused_when_the_controller_is_built(optimizer, settings, words):
    trainer = Mean(optimizer(), layer(), **settings)
    with pytest.raises((OptimizerError, StepError), match=words):
        looplib.Controller(looplib.RunConfig(global_batch_size=32), trainer=trainer)


class Closed(looplib.Trainer):
    """A step whose layer and optimizer are in closures."""

    def __init__(self, optimizer, table, holds):
        self.update = lambda pairs: optimizer.apply_gradients(pairs)
        self.lookup = lambda ids: table(ids)
        self.variables = [part.value for part in table.tables]
        if holds:
            self.optimizer = optimizer

    def dataset(self, context):
        return context.indices(EXAMPLES, shuffle=False).map(lambda i: tf.gather(IDS, i))

    def step_fn(self, inputs):
        with tf.GradientTape() as tape:
            losses = tf.reduce_sum(self.lookup(inputs), axis=-1)
            loss = self.global_mean(losses)
        self.update(zip(tape.gradient(loss, self.variables), self.variables))
        return {"loss": losses}


def test_a_layer_in_a_closure_is_updated_by_rows_and_an_optimizer_in_one_is_refused():
    config = looplib.RunConfig(global_batch_size=32)
    with pytest.raises(OptimizerError, match="read and write the whole table"):
        looplib.Controller(config, trainer=Closed(keras.optimizers.Adam(0.1), layer(), holds=False))
    parts = layer()
    trainer, before = Closed(keras.optimizers.SGD(0.1, momentum=0.9), parts, holds=True), whole(parts)
    looplib.Controller(config, trainer=trainer).train(steps=1)
    changed = (whole(parts) != before).any(axis=1)
    np.testing.assert_array_equal(changed, np.isin(np.arange(ROWS), IDS[:32]))


@pytest.mark.parametrize("shards", [1, 3])
def test_xla_which_checks_no_ids_is_refused(shards):
    config = looplib.RunConfig(global_batch_size=32, loop="xla")
    with pytest.raises(EngineError, match="XLA leaves out assertions"):
        looplib.Controller(config, trainer=Mean(keras.optimizers.SGD(0.5), layer(shards=shards)))


def test_decay_that_leaves_out_the_table_trains():
    trainer = Mean(keras.optimizers.AdamW(0.1), layer(), no_decay="/rows_")
    looplib.Controller(looplib.RunConfig(global_batch_size=32), trainer=trainer).train(steps=2)


def test_a_part_of_which_no_row_is_looked_up_is_no_warning(caplog):
    trainer = Mean(keras.optimizers.SGD(0.5), layer(shards=4))
    config = looplib.RunConfig(global_batch_size=32, steps_per_loop=20)
    actions = [looplib.LearningWarnings(every=20, share=1.0)]
    looplib.Controller(config, trainer=trainer, actions=actions).train(steps=200)
    assert "have not changed" not in caplog.text


@pytest.mark.parametrize("wrong", [-1, ROWS])
def test_an_id_that_the_table_does_not_have_is_named(wrong):
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=f"of {ROWS} rows does not have; expected 0 to {ROWS - 1}(.|\n)*{wrong}"
    ):
        layer()(np.array([[1, wrong]]))


@pytest.mark.parametrize(("settings", "words"), [
    ({"rows": 0}, "rows is 0"), ({"shards": 99}, "shards is 99"), ({"combiner": "max"}, "combiner is 'max'"),
    ({"dtype": "int32"}, "dtype int32"), ({"initializer": keras.initializers.Constant([1.0])}, "of an array"),
    ({"initializer": "glorot_uniform"}, "may depend on the whole table"), ({"family": "torch"}, "family is 'torch'"),
])  # fmt: skip
def test_bad_arguments_are_refused(settings, words):
    with pytest.raises(SettingError, match=words):
        looplib.ShardedEmbedding(**{"rows": ROWS, "dim": DIM, **settings})


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_combines_in_the_type_of_the_table(family):
    initializer = FAMILIES[family].initializers.Constant(40.0)
    parts = looplib.ShardedEmbedding(
        2, 2, combiner="mean", dtype="mixed_float16", initializer=initializer, family=family
    )
    found = parts(np.zeros((1, 4000), "int64"))  # whose sum float16 cannot hold
    assert found.dtype == tf.float16
    np.testing.assert_array_equal(found, [[40, 40]])
    variable = parts.tables[0].value if family == "keras" else parts.tables[0]
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(parts(np.array([[0, 1, 1]])))
    (gradient,) = tape.gradient(total, [variable])
    assert isinstance(gradient, tf.IndexedSlices) and gradient.dtype == tf.float32


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_weights_are_not_rounded_in_mixed_precision(family):
    module = FAMILIES[family]
    parts = looplib.ShardedEmbedding(
        6000, 1, shards=3, combiner="mean", dtype="mixed_bfloat16", family=family, initializer="zeros"
    )
    for part, start in zip(parts.tables, (0, 2000, 4000)):
        part.assign(np.arange(start, start + 2000, dtype="float32")[:, None] % 7)
    inputs = module.Input((1,))  # of float32, as Keras makes it
    model = module.Model(inputs, parts(inputs))
    ids = np.array([[2999.0], [1001.0], [5999.0]], "float32")
    np.testing.assert_array_equal(tf.cast(model(ids), tf.float32), ids % 7)
    found = parts(np.array([[8, 8]]), weights=np.array([[1e-9, 3e-9]], "float32"))
    np.testing.assert_array_equal(tf.cast(found, tf.float32), [[1]])


def test_weights_are_broadcast_or_refused():
    parts = layer(combiner="mean", initializer=keras.initializers.Ones())
    ids = np.array([[1, 2, 3], [4, 5, 6]])
    np.testing.assert_allclose(parts(ids, weights=np.array([[2.0], [3.0]])), np.ones((2, DIM)))
    ragged, other = tf.ragged.constant([[1, 2, 3], [4]]), tf.ragged.constant([[1.0], [2, 3, 4]])
    for given, weights in ((ragged, other), (ragged, other[:1]), (ragged.to_sparse(), other.to_sparse())):
        with pytest.raises(tf.errors.InvalidArgumentError, match="another structure than its ids"):
            parts(given, weights=weights)
    with pytest.raises(StepError, match="ids as a RaggedTensor and weights as a"):
        parts(ragged, weights=np.ones((2, 3), "float32"))


@pytest.mark.parametrize("shards", [1, 3])
def test_a_graph_names_a_wrong_id_before_it_looks_it_up(shards):
    parts = layer(shards=shards)
    looked_up = tf.function(lambda ids: parts(ids), reduce_retracing=True)
    for _ in range(20):
        with pytest.raises(tf.errors.InvalidArgumentError, match=rf"of {ROWS} rows does not have(.|\n)*70"):
            looked_up(tf.constant([[1, 70]]))


def test_one_id_is_a_row_and_a_text_is_none():
    parts = layer(combiner=None)
    np.testing.assert_array_equal(parts(tf.constant(7)), whole(parts)[7])
    with pytest.raises(StepError, match="StringLookup"):
        parts(tf.constant(["a"]))


def test_weights_without_a_combiner_are_refused():
    with pytest.raises(StepError, match="has no combiner"):
        layer(combiner=None)(np.array([1]), weights=np.array([1.0]))
