"""DynamicEmbedding: who has which row, and what is trained, beside a simulation with dicts, on any number of replicas."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from conftest import make_strategy

import looplib
from looplib.errors import EngineError, OptimizerError, SettingError, StepError

DIM, EXAMPLES, BATCH, STEPS = 3, 320, 8, 40
RNG = np.random.default_rng(11)
FAMILIES = {"keras": keras, "tf_keras": tf_keras}
# Ids that come in waves, so that some are admitted, expire and come again.
WAVES = (RNG.zipf(1.6, (EXAMPLES, 3)) % 12 + np.arange(EXAMPLES)[:, None] // 24 % 4 * 7) * 2**45 - 2**49
TARGETS = RNG.normal(size=(EXAMPLES, 1)).astype("float32")

KINDS = {
    "error": {"full": "error", "capacity": 20, "admit_after": 2, "expire_after": 3},
    "evict": {"full": "evict", "capacity": 12, "admit_after": 3, "expire_after": None},
}


class Places:
    """A map from ids to places, as a list."""

    def __init__(self, size):
        self.owner, self.seen = [None] * size, [-1] * size

    def place(self, one):
        return self.owner.index(one) if one in self.owner else -1

    def oldest(self, now):
        """The free places that are given next, as (step of the last sight, place)."""
        return sorted((seen, place) for place, seen in enumerate(self.seen) if seen < now)

    def give(self, place, one, now):
        self.owner[place], self.seen[place] = one, now


class Simulation:
    """The map, the ids that wait, and the updates, as lists and loops have them."""

    def __init__(self, layer, rule):
        self.layer, self.rule = layer, rule
        self.rows, self.waiting = Places(layer.capacity), Places(layer.capacity)
        self.sights = [0] * layer.capacity
        self.values = np.zeros((layer.capacity, DIM))
        self.slots = [{} for _ in range(layer.capacity)]
        self.step, self.taken, self.forgotten = 0, 0, 0

    def see(self, ids):
        now, layer, waiting = self.step, self.layer, self.waiting
        distinct, counts = np.unique(ids, return_counts=True)
        for places in (self.rows, waiting):
            for one in distinct:
                if one in places.owner:
                    places.seen[places.place(one)] = now
            if places is self.rows:
                new = [(one, count) for one, count in zip(distinct, counts) if one not in self.rows.owner]
                distinct = [one for one, _ in new]
        ready = []
        for one, count in new:
            place = waiting.place(one)
            sights = count + (self.sights[place] if place >= 0 else 0)
            if sights >= layer.admit_after:
                ready.append(one)
            elif place < 0 and (free := waiting.oldest(now)):
                place = free[0][1]
                self.forgotten += free[0][0] >= 0
                waiting.give(place, one, now)
            if place >= 0:
                self.sights[place] = sights * (sights < layer.admit_after)
        for one in ready:
            seen, row = self.rows.oldest(now)[0]
            assert seen < 0 or layer.full == "evict" or now - seen > layer.expire_after
            self.taken += seen >= 0
            self.rows.give(row, one, now)
            self.values[row], self.slots[row] = initial(layer, one), {}

    def train(self, ids, targets):
        self.see(ids.ravel())
        rows = np.vectorize(self.rows.place)(ids)
        vectors = np.where((rows >= 0)[..., None], self.values[rows], 0)
        error = 2 * (vectors.mean(axis=1) - targets) / len(ids)
        gradients = {}
        for each, mine in zip(rows, error):
            for row in each[each >= 0]:
                gradients[row] = gradients.get(row, 0) + mine / 3
        self.step += 1
        for row, gradient in gradients.items():
            self.rule(self.values[row], gradient, self.slots[row], self.step)


def initial(layer, one):
    """The initial value of an id, drawn by a layer of its own: it depends on nothing else."""
    key = type(layer), repr(layer.initializer.get_config()), one
    if key not in _drawn:
        alone = looplib.DynamicEmbedding(DIM, 1, initializer=layer.initializer, family=layer.family)
        _drawn[key] = alone(tf.constant([one], tf.int64), training=True)[0].numpy()
    return _drawn[key]


_drawn = {}


def sgd(value, gradient, *_):
    value -= 0.5 * gradient


def momentum(value, gradient, slots, _):
    slots["m"] = 0.9 * slots.get("m", 0) - 0.5 * gradient
    value += slots["m"]


def adagrad(value, gradient, slots, _):
    slots["a"] = slots.get("a", 0.3) + gradient**2
    value -= 0.1 * gradient / np.sqrt(slots["a"] + 1e-7)


def adam(value, gradient, slots, step):
    slots["m"] = slots.get("m", 0) + (gradient - slots.get("m", 0)) * 0.1
    slots["v"] = slots.get("v", 0) + (gradient**2 - slots.get("v", 0)) * 0.001
    value -= 0.1 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step) * slots["m"] / (np.sqrt(slots["v"]) + 1e-7)


def ftrl(value, gradient, slots, _):
    before = slots.get("a", 0.2)
    slots["a"] = after = before + gradient**2
    slots["l"] = linear = slots.get("l", 0) + gradient - (np.sqrt(after) - np.sqrt(before)) / 0.1 * value
    value[:] = (np.clip(linear, -0.001, 0.001) - linear) / (np.sqrt(after) / 0.1)


OPTIMIZERS = {
    "sgd": (sgd, lambda kind: kind.SGD(0.5)),
    "momentum": (momentum, lambda kind: kind.SGD(0.5, momentum=0.9)),
    "adagrad": (adagrad, lambda kind: kind.Adagrad(0.1, initial_accumulator_value=0.3)),
    "adam": (adam, lambda kind: kind.Adam(0.1)),
    "adamw": (adam, lambda kind: kind.AdamW(0.1, weight_decay=0.0)),
    "ftrl": (ftrl, lambda kind: kind.Ftrl(0.1, initial_accumulator_value=0.2, l1_regularization_strength=0.001)),
}


class Mean(looplib.GradientTrainer):
    """A regression on the mean of three vectors, which has no other variables."""

    def __init__(self, optimizer, layer, ids=WAVES, **settings):
        kind = "string" if ids.dtype.kind == "S" else "int64"
        inputs = FAMILIES[layer.family].Input((3,), dtype=kind)
        self.layer, self.ids = layer, ids
        super().__init__(FAMILIES[layer.family].Model(inputs, layer(inputs)), optimizer, **settings)

    def dataset(self, context):
        return context.indices(EXAMPLES, shuffle=False).map(lambda i: (tf.gather(self.ids, i), tf.gather(TARGETS, i)))

    def loss_fn(self, inputs):
        ids, targets = inputs
        return tf.reduce_sum(tf.square(self.model(ids, training=True) - targets), axis=1)


def make(family="keras", **settings):
    initializer = FAMILIES[family].initializers.RandomUniform(-0.5, 0.5, seed=3)
    settings = {**KINDS["evict"], "initializer": initializer, "combiner": "mean", **settings}
    return looplib.DynamicEmbedding(DIM, settings.pop("capacity"), family=family, **settings)


def trained(strategy, optimizer, steps=STEPS, ids=WAVES, folder=None, **settings):
    with strategy.scope():
        trainer = Mean(optimizer(), make(**settings), ids)
    config = looplib.RunConfig(global_batch_size=BATCH)
    looplib.Controller(config, trainer=trainer, strategy=strategy, model_dir=folder).train(steps=steps)
    return trainer.layer


def numbers(variable):
    return tf.convert_to_tensor(variable).numpy()


def table(layer):
    return numbers(layer.tables[0])


def check(layer, rule):
    """Compares a trained layer with the simulation; returns that."""
    simulation = Simulation(layer, rule)
    for step in range(STEPS):
        batch = [(step * BATCH + i) % EXAMPLES for i in range(BATCH)]
        simulation.train(WAVES[batch], TARGETS[batch])
    rows = simulation.rows
    given = [row for row, one in enumerate(rows.owner) if one is not None]
    assert numbers(layer.keys)[given].tolist() == [rows.owner[row] for row in given]
    assert numbers(layer.seen).tolist() == rows.seen
    np.testing.assert_allclose(table(layer)[given], simulation.values[given], rtol=3e-4, atol=3e-6)
    return simulation


@pytest.mark.slow(spread=6)
@pytest.mark.parametrize("rule", OPTIMIZERS)
@pytest.mark.parametrize(("strategy", "full", "family"), [
    ("one_device", "error", "keras"), ("one_device", "evict", "tf_keras"),
    ("mirrored_x2", "error", "tf_keras"), ("mirrored_x2", "evict", "keras"),
], indirect=["strategy"])  # fmt: skip
def test_rows_are_given_and_trained_as_the_simulation_does_it(strategy, full, family, rule):
    expected, optimizer = OPTIMIZERS[rule]
    layer = trained(strategy, lambda: optimizer(FAMILIES[family].optimizers), family=family, **KINDS[full])
    simulation = check(layer, expected)
    assert simulation.taken > 50 and simulation.forgotten > 10  # rows of other ids, and ids that waited


def test_words_get_the_rows_of_their_fingerprints():
    words = np.char.add("word ", (WAVES // 2**45).astype(str)).astype("S")
    layer = trained(tf.distribute.get_strategy(), lambda: keras.optimizers.Adam(0.1), ids=words)
    fingerprints = np.frombuffer(tf.fingerprint(words.ravel()).numpy().tobytes(), "int64").reshape(words.shape)
    again = trained(tf.distribute.get_strategy(), lambda: keras.optimizers.Adam(0.1), ids=fingerprints)
    for found, expected in zip(layer.weights, again.weights):
        np.testing.assert_array_equal(found, expected)
    rows = numbers(layer.seen) >= 0
    texts = {key: text for key, text in zip(fingerprints.ravel(), words.ravel())}
    given = [texts[key] for key in numbers(layer.keys)[rows]]
    np.testing.assert_array_equal(layer(np.array(given)[:, None]), table(layer)[rows])


def test_structures_have_zeros_for_ids_without_rows():
    layer = make(combiner=None, admit_after=1)
    ids = [[7, -5, 7], [], [2**62]]
    ragged, weights = tf.ragged.constant(ids, tf.int64), tf.ragged.constant([[1.0, 2, 3], [], [4]])
    assert not numbers(layer(ragged).flat_values).any() and (numbers(layer.seen) < 0).all()
    given = layer(ragged, training=True)
    assert given.row_lengths().numpy().tolist() == [3, 0, 1]
    vectors = dict(zip((-5, 7, 2**62), table(layer)))  # rows in the order of the ids
    np.testing.assert_array_equal(given.flat_values, [vectors[one] for row in ids for one in row])
    np.testing.assert_array_equal(layer(tf.constant([[7, 8]])), [[vectors[7], np.zeros(DIM)]])
    np.testing.assert_array_equal(layer(tf.constant(7)), vectors[7])
    layer.combiner = "sum"
    expected = [4 * vectors[7] + 2 * vectors[-5], np.zeros(DIM), 4 * vectors[2**62]]
    for structure in (lambda one: one, tf.RaggedTensor.to_sparse):
        np.testing.assert_allclose(layer(structure(ragged), weights=structure(weights)), expected, rtol=1e-6)
    layer.combiner = "mean"
    np.testing.assert_allclose(layer(tf.constant([[7, 8]])), [vectors[7] / 2], rtol=1e-6)


@pytest.mark.slow(spread=4)
@pytest.mark.parametrize(("name", "mean", "deviation"), [
    ("RandomUniform", 0, 0.05 / np.sqrt(3)), ("RandomNormal", 0, 0.05), ("TruncatedNormal", 0, 0.05 * 0.8796),
    ("Ones", 1, 0), ("Constant", 0.25, 0),
])  # fmt: skip
@pytest.mark.parametrize("family", FAMILIES)
def test_initial_values_depend_on_the_seed_and_the_id_alone(name, mean, deviation, family):
    kind = getattr(FAMILIES[family].initializers, name)
    settings = {"seed": 5} if name.startswith(("Random", "Trunc")) else {"value": 0.25} if name == "Constant" else {}

    def drawn(ids, **other):
        layer = looplib.DynamicEmbedding(8, 3000, initializer=kind(**{**settings, **other}), family=family)
        return numbers(tf.function(lambda: layer(tf.constant(ids, tf.int64), training=True))())

    ids = np.arange(3000) * 7 - 10_000
    values = drawn(ids)
    assert values.mean() == pytest.approx(mean, abs=0.001) and values.std() == pytest.approx(deviation, rel=0.02)
    np.testing.assert_array_equal(drawn(ids[::-1])[::-1], values)
    if deviation:
        assert len(np.unique(values)) > 0.95 * values.size
        assert abs(np.corrcoef(values.T) - np.eye(8)).max() < 0.08
        assert not np.isin(drawn(ids, seed=6), values).any(axis=1).mean() > 0.1


class Evaluated(looplib.Evaluator):
    def __init__(self, trainer):
        self.model = trainer.model

    def dataset(self, context):
        return context.indices(EXAMPLES).map(lambda i: tf.gather(WAVES + 1, i))  # ids that the training never sees

    def step_fn(self, inputs):
        return {"size": tf.reduce_sum(tf.abs(self.model(inputs, training=False)), axis=1)}

    def predict_fn(self, inputs):
        return {"vector": self.model(inputs)}


@pytest.mark.parametrize("strategy", ["one_device", "mirrored_x2"], indirect=True)
def test_evaluations_predictions_and_exports_leave_the_map_as_it_is(strategy, tmp_path):
    with strategy.scope():
        trainer = Mean(keras.optimizers.SGD(0.1), make())
    evaluator = Evaluated(trainer)
    config = looplib.RunConfig(global_batch_size=BATCH)
    controller = looplib.Controller(
        config, trainer=trainer, evaluator=evaluator, strategy=strategy, model_dir=str(tmp_path / "run")
    )
    controller.train(steps=9)
    before = [
        [numbers(part) for part in strategy.experimental_local_results(one.value)] for one in trainer.layer.weights
    ]
    assert controller.evaluate()["eval"]["size"] == 0  # all zeros
    controller.predict()
    controller.export(tmp_path / "export")
    for one, parts in zip(trainer.layer.weights, before):
        for part, value in zip(strategy.experimental_local_results(one.value), parts, strict=True):
            np.testing.assert_array_equal(part, value)  # on each replica
            np.testing.assert_array_equal(part, parts[0], err_msg=one.path)


def test_an_export_maps_ids_as_the_run_does_without_looplib(tmp_path):
    trainer = Mean(keras.optimizers.SGD(0.1), make())
    config = looplib.RunConfig(global_batch_size=BATCH)
    controller = looplib.Controller(config, trainer=trainer, model_dir=str(tmp_path / "run"))
    controller.train(steps=9)
    controller.export(tmp_path / "export")
    ids = np.concatenate([WAVES[:90], WAVES[:5] + 1])
    np.save(tmp_path / "ids.npy", ids)
    reader = (
        "import sys; sys.modules['looplib'] = None; import numpy as np, tensorflow as tf;"
        "serve = tf.saved_model.load('export/saved_model').signatures['serving_default'];"
        "np.save('out.npy', list(serve(tf.constant(np.load('ids.npy'))).values())[0])"
    )
    subprocess.run([sys.executable, "-c", reader], cwd=tmp_path, check=True, timeout=120)
    found = np.load(tmp_path / "out.npy")
    np.testing.assert_allclose(found, trainer.model(ids), rtol=1e-6)
    assert found[:90].any(axis=1).mean() > 0.5 and not found[90:].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_keeps_its_map(family, tmp_path):
    module = FAMILIES[family]
    inputs = module.Input((None,), dtype="int64")
    model = module.Model(inputs, make(family, expire_after=7)(inputs))
    ids = tf.constant([[1, 1, 1, 2, 2, 2]])
    expected = model(ids, training=True)
    model.save(tmp_path / "model.keras")
    read = module.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(read(ids), expected)
    assert read.layers[-1].expire_after == 7 and read.layers[-1].initializer.get_config()["seed"] == 3


@pytest.mark.parametrize("full", KINDS)
def test_a_full_table_ends_the_step_with_a_sentence(full, tmp_path):
    trainer = Mean(keras.optimizers.SGD(0.1), make(full=full, capacity=2, admit_after=1, expire_after=5))
    controller = looplib.Controller(looplib.RunConfig(global_batch_size=BATCH), trainer=trainer)
    words = (
        "of 2 rows is full, and none has been unseen for more than 5 steps" if full == "error" else "more ids in one"
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        controller.train(steps=STEPS)


def test_keras_alone_trains_until_a_row_would_go_to_another_id():
    inputs = keras.Input((None,), dtype="int64")
    model = keras.Model(inputs, make(capacity=4, admit_after=1)(inputs))
    model.compile("sgd", "mse")
    model.fit(np.array([[1, 2, 3]]), np.ones((1, DIM)), verbose=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="by an optimizer that its trainer does not hold"):
        model.fit(np.array([[4, 5, 6]]), np.ones((1, DIM)), verbose=0)


def test_a_step_that_calls_the_layer_several_times_is_one_step():
    class Twice(Mean):
        def loss_fn(self, inputs):
            ids, targets = inputs
            first, second = (self.layer(part, training=True) for part in (ids[:, :2], ids[:, 2:]))
            return tf.reduce_sum(tf.square(first - targets) + tf.square(second - targets), axis=1)

    trainer = Twice(keras.optimizers.Adam(0.1), make(capacity=64, admit_after=1))
    looplib.Controller(looplib.RunConfig(global_batch_size=BATCH), trainer=trainer).train(steps=7)
    assert numbers(trainer.layer.steps) == [7]
    last = {one: i // BATCH for i, ids in enumerate(WAVES[: 7 * BATCH]) for one in ids}
    rows = numbers(trainer.layer.seen) >= 0
    assert dict(zip(numbers(trainer.layer.keys)[rows], numbers(trainer.layer.seen)[rows])) == last


@pytest.mark.parametrize("strategy", ["mirrored_x2"], indirect=True)
def test_uneven_batches_count_each_example_once(strategy):
    def seen(where):
        with where.scope():
            trainer = Pipeline(keras.optimizers.SGD(0.1), make(capacity=64, admit_after=4))
        looplib.Controller(looplib.RunConfig(global_batch_size=BATCH), trainer=trainer, strategy=where).train(steps=-1)
        return numbers(trainer.layer.keys), numbers(trainer.layer.seen), numbers(trainer.layer.sights)

    class Pipeline(Mean):
        batches = "global"

        def dataset(self, context):
            return tf.data.Dataset.from_tensor_slices((WAVES[:17], TARGETS[:17])).batch(8)

    for found, expected in zip(seen(strategy), seen(tf.distribute.OneDeviceStrategy("/cpu:0"))):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("settings", "words"), [
    ({"capacity": 0}, "capacity is 0"), ({"admit_after": 0}, "admit_after is 0"), ({"full": "grow"}, "full is 'grow'"),
    ({"expire_after": 0}, "expire_after is 0"), ({"initializer": "glorot_uniform"}, "may depend on the whole table"),
])  # fmt: skip
def test_bad_arguments_are_refused(settings, words):
    with pytest.raises(SettingError, match=words):
        looplib.DynamicEmbedding(**{"dim": DIM, "capacity": 8, **settings})


def test_floats_which_would_be_rounded_are_refused():
    with pytest.raises(StepError, match="ids of float32"):
        make()(tf.constant([[1.0]]))


@pytest.mark.parametrize(("optimizer", "settings", "words"), [
    (lambda: keras.optimizers.RMSprop(0.1), {}, "RMSprop trains the table"),
    (lambda: keras.optimizers.SGD(0.1), {"micro_batches": 2}, "in a micro-batch"),
    (lambda: keras.optimizers.SGD(0.1), {"average_decay": 0.9}, "average_decay averages"),
])  # fmt: skip
def test_what_cannot_be_right_is_refused_when_the_controller_is_built(optimizer, settings, words):
    with pytest.raises((OptimizerError, StepError, SettingError), match=words):
        trainer = Mean(optimizer(), make(), **settings)
        looplib.Controller(looplib.RunConfig(global_batch_size=BATCH), trainer=trainer)


def test_a_loss_without_training_is_refused_and_so_is_xla():
    class Forgetful(Mean):
        def loss_fn(self, inputs):
            return tf.reduce_sum(tf.square(self.model(inputs[0]) - inputs[1]), axis=1)

    with pytest.raises(StepError, match="training=True"):
        looplib.Controller(
            looplib.RunConfig(global_batch_size=BATCH), trainer=Forgetful(keras.optimizers.SGD(0.1), make())
        )
    with pytest.raises(EngineError, match="XLA leaves out assertions"):
        config = looplib.RunConfig(global_batch_size=BATCH, loop="xla")
        looplib.Controller(config, trainer=Mean(keras.optimizers.SGD(0.1), make()))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_compiled_model_trains_alike_on_replicas(family):
    def fitted(where):
        module = FAMILIES[family]
        with where.scope():
            inputs = module.Input((3,), dtype="int64")
            model = module.Model(inputs, make(family)(inputs))
            model.compile(module.optimizers.Adam(0.1), "mse")
        trainer = looplib.KerasTrainer(model, WAVES, np.repeat(TARGETS, DIM, 1), shuffle=False)
        config = looplib.RunConfig(global_batch_size=BATCH)
        looplib.Controller(config, trainer=trainer, strategy=where).train(steps=STEPS)
        return model.layers[-1]

    one, two = fitted(tf.distribute.get_strategy()), fitted(make_strategy("mirrored_x2"))
    for name in ("keys", "seen", "sights", "steps"):
        np.testing.assert_array_equal(numbers(getattr(one, name)), numbers(getattr(two, name)))
    np.testing.assert_allclose(table(two), table(one), rtol=1e-4, atol=1e-6)
    assert numbers(one.steps) == [STEPS] and numbers(one.seen).min() > STEPS // 2


def test_a_step_that_is_undone_gives_no_row():
    class Bad(Mean):
        def loss_fn(self, inputs):
            return tf.where(self.global_step < 4, np.nan, 1.0) * super().loss_fn(inputs)

    trainer = Bad(keras.optimizers.Adam(0.1), make(capacity=64, admit_after=2))
    guards = looplib.Guards(non_finite="skip")
    controller = looplib.Controller(looplib.RunConfig(global_batch_size=BATCH), trainer=trainer, guards=guards)
    controller.train(steps=4)
    assert (numbers(trainer.layer.seen) < 0).all() and not numbers(trainer.layer.sights).any()
    assert not numbers(trainer.layer.index).any() and numbers(trainer.layer.steps) == [0]
    controller.train(steps=6)
    assert numbers(trainer.layer.seen).max() == 1 and np.isfinite(table(trainer.layer)).all()


def test_parameter_servers_are_refused(monkeypatch):
    servers = object.__new__(tf.distribute.ParameterServerStrategy)
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: servers)
    with pytest.raises(SettingError, match="ParameterServerStrategy"):
        make()
