"""Whatever a checkpoint holds goes to what has its name, also after the program has changed."""

import types

import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy

import looplib
from looplib.errors import MismatchError, UsageError
from looplib.task.record import RunState
from looplib.task.state import state_of
from looplib.weights.loading import warm_start

WIDTH = 4


def sequential(keras, names, **dense):
    return keras.Sequential([keras.Input((WIDTH,)), *(keras.layers.Dense(WIDTH, name=name, **dense) for name in names)])


def functional(keras, names, **dense):
    x = inputs = keras.Input((WIDTH,))
    for name in names:
        x = keras.layers.Dense(WIDTH, name=name, **dense)(x)
    return keras.Model(inputs, x)


def subclassed(keras, names, **dense):
    class Blocks(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks = [keras.layers.Dense(WIDTH, name=name, **dense) for name in names]

        def call(self, inputs, training=False):
            for block in self.blocks:
                inputs = block(inputs)
            return inputs

    model = Blocks()
    model(tf.zeros([1, WIDTH]))
    return model


def nested(keras, names, **dense):
    inputs = keras.Input((WIDTH,))
    return keras.Model(inputs, keras.layers.Dense(2, name="head")(sequential(keras, names, **dense)(inputs)))


BUILDERS = {builder.__name__: builder for builder in (sequential, functional, subclassed, nested)}


def layers_in(model):
    """The layers with weights, of nested models too, by name."""
    found = {}
    for layer in model.layers:
        found |= layers_in(layer) if hasattr(layer, "layers") else {layer.name: layer} if layer.weights else {}
    return found


class Saved:
    """A model and its optimizer, in which each number is one of its own, saved as a run saves them.

    Args:
      model: the model.
      optimizer: the optimizer, or None.
      frozen: the names of layers that are not trained.
    """

    def __init__(self, model, optimizer=None, frozen=(), **others):
        self.model, self.optimizer = model, optimizer
        task = types.SimpleNamespace(model=model, **others)
        for name in frozen:
            layers_in(model)[name].trainable = False
        if optimizer is not None:
            optimizer.build(model.trainable_variables)
            task.optimizer = optimizer
        self.state = RunState()
        self.objects = {**state_of(task), "global_step": tf.Variable(0, dtype=tf.int64), "run_state": self.state}

    def fill(self, start=1.0):
        """Sets each element to another number."""
        variables = [*self.model.weights, *(self.optimizer.variables if self.optimizer is not None else [])]
        for variable in variables:
            if variable.dtype in ("float32", tf.float32):
                size = int(np.prod(variable.shape))
                variable.assign(tf.reshape(tf.range(start, start + size), variable.shape))
                start += size

    def save(self, folder, names=True):
        self.fill()
        if self.optimizer is not None:
            self.state.record.optimizers = {"optimizer": type(self.optimizer).__name__}
        checkpoints = toy.checkpoints(folder, self.objects)
        if names:
            checkpoints.note_in(self.state.record)
        else:
            self.state.record.names = None
        return checkpoints.save(0, wait=True)

    def restore(self, path, partial=True):
        toy.checkpoints(path.rpartition("/checkpoints/")[0], self.objects).restore(path, partial)

    def kernels(self):
        return {name: np.vstack(layer.get_weights()) for name, layer in layers_in(self.model).items()}

    def momenta(self):
        """The sum of what the optimizer keeps for each kernel, by the layer's name."""
        slots = {getattr(slot, "path", slot.name).replace("/", "_"): slot for slot in self.optimizer.variables}
        found = {}
        for name, layer in layers_in(self.model).items():
            kernel = layer.weights[0]
            part = getattr(kernel, "path", kernel.name.removesuffix(":0")).replace("/", "_")
            part = f"_{part}_" if hasattr(kernel, "path") else f"_{part}:"  # adam/a_kernel_momentum, m/a/kernel:0
            of_kernel = [slot.numpy() for own, slot in slots.items() if part in own]
            if of_kernel:
                found[name] = np.sum(of_kernel, axis=0)
        return found


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
@pytest.mark.parametrize(
    "before, after",
    [("abc", "xabc"), ("abc", "abxc"), ("abc", "cab"), ("abc", "ac"), ("abc", "xc")],
    ids=["in front", "between", "another order", "one less", "one for two"],
)
def test_a_partial_restore_gives_weights_and_momenta_to_the_layers_of_their_names(
    build, before, after, keras, tmp_path
):
    first = Saved(build(keras, before), keras.optimizers.Adam())
    path = first.save(tmp_path)
    second = Saved(build(keras, after), keras.optimizers.Adam())
    start = second.kernels(), second.momenta()
    second.restore(path)
    for now, saved, fresh in zip((second.kernels(), second.momenta()), (first.kernels(), first.momenta()), start):
        assert set(now) == set(after) | ({"head"} if build is nested else set())
        for name, value in now.items():
            np.testing.assert_array_equal(value, saved[name] if name in saved else fresh[name], err_msg=name)


OPTIMIZERS = {
    "momentum": lambda keras: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda keras: keras.optimizers.Adam(),
}


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(
    "before, after", [("a", ""), ("", "a"), ("a", "b"), ("ab", "c")], ids=lambda names: names or "none"
)
def test_momenta_stay_with_their_variables_where_others_are_frozen(build, optimizer, before, after, keras, tmp_path):
    first = Saved(build(keras, "abc"), optimizer(keras), frozen=before)
    path = first.save(tmp_path)
    second = Saved(build(keras, "abc"), optimizer(keras), frozen=after)
    with pytest.raises(MismatchError):
        second.restore(path, partial=False)
    second.restore(path)
    saved, now = first.momenta(), second.momenta()
    for name, kernel in first.kernels().items():
        np.testing.assert_array_equal(second.kernels()[name], kernel)
    assert set(now) == set("abc") - set(after) | ({"head"} if build is nested else set())
    for name, value in now.items():
        np.testing.assert_array_equal(value, saved.get(name, np.zeros_like(value)), err_msg=name)


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_a_strict_restore_refuses_names_in_another_order(build, keras, tmp_path):
    path = Saved(build(keras, "abc")).save(tmp_path)
    second = Saved(build(keras, "bac"))
    start = second.kernels()
    with pytest.raises(MismatchError, match="a/kernel.*b/kernel") as error:
        second.restore(path, partial=False)
    assert "\n" not in str(error.value)
    np.testing.assert_array_equal(second.kernels()["a"], start["a"])


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_names_that_keras_counts_in_each_process_are_no_difference(build, keras, tmp_path):
    for _ in range(2):
        keras.layers.Dense(1)  # as another program makes them before
    first = Saved(build(keras, [None] * 3), keras.optimizers.Adam())
    path = first.save(tmp_path)
    for partial in (False, True):
        second = Saved(build(keras, [None] * 3), keras.optimizers.Adam())
        second.restore(path, partial)
        for one, other in zip(first.model.weights, second.model.weights, strict=True):
            np.testing.assert_array_equal(one, other)
        for one, other in zip(first.optimizer.variables, second.optimizer.variables, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_value_that_fits_several_layers_without_names_is_refused_and_nothing_is_taken(keras, tmp_path):
    path = Saved(sequential(keras, [None] * 3)).save(tmp_path)
    second = Saved(sequential(keras, [None] * 4))
    start = second.model.get_weights()
    with pytest.raises(UsageError, match="fit several layers here, whose names Keras has made .*names of their own"):
        second.restore(path)
    for before, after in zip(start, second.model.get_weights()):
        np.testing.assert_array_equal(before, after)
    named = Saved(sequential(keras, ["adapter", None, None, None]))
    named.restore(path)  # the new layer has a name, so that the others are as many as in the checkpoint
    np.testing.assert_array_equal(named.model.layers[1].get_weights()[0].ravel(), np.arange(1, 17))


def test_another_optimizer_starts_from_the_beginning_and_says_so(keras, tmp_path, caplog):
    caplog.set_level("WARNING", logger="absl")
    path = Saved(sequential(keras, "ab"), keras.optimizers.SGD(0.1, momentum=0.9)).save(tmp_path)
    second = Saved(sequential(keras, "ab"), keras.optimizers.Adam(0.5))  # has a momentum, too
    second.restore(path)
    assert all(not value.any() for value in second.momenta().values())
    assert int(second.optimizer.iterations) == 0 and float(second.optimizer.learning_rate) == 0.5
    assert "only here: " in caplog.text and "only there: " in caplog.text


def test_two_models_with_layers_of_one_name_keep_their_own(keras, tmp_path):
    first = Saved(sequential(keras, "ab"), teacher=sequential(keras, "ab"))
    first.objects["teacher"].set_weights([-weight for weight in first.objects["teacher"].get_weights()])
    path = first.save(tmp_path)
    second = Saved(sequential(keras, "xab"), teacher=sequential(keras, "yab"))
    second.restore(path)
    for name in ("model", "teacher"):
        there, here = (layers_in(saved.objects[name]) for saved in (first, second))
        for layer in "ab":
            np.testing.assert_array_equal(there[layer].get_weights()[0], here[layer].get_weights()[0])


def test_averages_stay_with_their_variables(keras, tmp_path):
    def build(names, frozen=()):
        saved = Saved(sequential(keras, names), frozen=frozen)
        saved.objects["averages"] = looplib.WeightAverages(saved.model.trainable_variables, 0.9)
        return saved

    first = build("abc", frozen="a")
    for number, value in enumerate(first.objects["averages"].values):
        value.assign(tf.fill(value.shape, 100.0 + number))
    path = first.save(tmp_path)
    second = build("abc", frozen="b")
    second.restore(path)
    values = dict(zip(("a", "a bias", "c", "c bias"), second.objects["averages"].values))
    assert np.unique(values["c"]) == [102.0] and np.unique(values["c bias"]) == [103.0]
    assert not np.isin([100.0, 101.0], values["a"]).any()


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_a_checkpoint_without_recorded_names_is_restored_where_the_structure_is_the_same(build, keras, tmp_path):
    first = Saved(build(keras, "abc"), keras.optimizers.Adam())
    path = first.save(tmp_path, names=False)
    for partial in (False, True):
        second = Saved(build(keras, "abc"), keras.optimizers.Adam())
        second.restore(path, partial)
        for name, kernel in first.kernels().items():
            np.testing.assert_array_equal(second.kernels()[name], kernel)
    assert second.model.weights


@pytest.mark.slow
@pytest.mark.parametrize("build", [sequential, functional])
def test_a_checkpoint_without_recorded_names_gives_weights_by_the_names_that_tensorflow_keeps(build, keras, tmp_path):
    first = Saved(build(keras, "abc"), keras.optimizers.SGD(0.1, momentum=0.9))
    path = first.save(tmp_path, names=False)
    second = Saved(build(keras, "xabc"), keras.optimizers.SGD(0.1, momentum=0.9))
    second.restore(path)
    for name in "abc":
        np.testing.assert_array_equal(second.kernels()[name], first.kernels()[name])
        np.testing.assert_array_equal(second.momenta()[name], first.momenta()[name])


class Phase(looplib.GradientTrainer):
    """A linear model of two layers, whose batch is all of its data."""

    X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    Y = X.sum(axis=1)

    def __init__(self, keras, start=None, **settings):
        layers = [keras.layers.Dense(size, use_bias=False, name=name) for size, name in ((4, "encoder"), (1, "head"))]
        model = keras.Sequential([keras.Input((4,)), *layers])
        if start is not None:
            model.set_weights(start)
        super().__init__(model, keras.optimizers.SGD(0.02, momentum=0.9), **settings)

    def dataset(self, context):
        return context.indices(16).map(lambda i: (tf.gather(self.X, i), tf.gather(self.Y, i)))

    def loss_fn(self, inputs):
        return tf.square(self.model(inputs[0], training=True)[:, 0] - inputs[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default", "mirrored_x2"])
def test_a_run_in_two_phases_is_that_of_a_plain_loop(name, keras, tmp_path, caplog):
    caplog.set_level("INFO", logger="absl")
    random = np.random.default_rng(1)
    encoder, head = random.normal(size=(4, 4)).astype(np.float32), random.normal(size=(4, 1)).astype(np.float32)
    of_encoder, of_head = np.zeros_like(encoder), np.zeros_like(head)
    start = [encoder.copy(), head.copy()]
    for step in range(8):
        hidden = Phase.X @ encoder
        error = 2 * (hidden @ head - Phase.Y[:, None]) / 16
        gradients = Phase.X.T @ (error @ head.T), hidden.T @ error
        of_head = 0.9 * of_head - 0.02 * gradients[1]
        head = head + of_head
        if step >= 4:
            of_encoder = 0.9 * of_encoder - 0.02 * gradients[0]
            encoder = encoder + of_encoder
    phases = [(4, {"start": start, "freeze": "encoder"}), (8, {})]
    for until, settings in phases:
        strategy = make_strategy(name)
        with strategy.scope():
            trainer = Phase(keras, **settings)
        with toy.controller(
            strategy,
            trainer,
            global_batch_size=16,
            steps_per_loop=2,
            model_dir=tmp_path,
            start=looplib.Start(partial=until > 4),
        ) as controller:
            controller.train(until)
            assert controller.global_step == until
    np.testing.assert_allclose(trainer.model.get_weights()[0], encoder, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(trainer.model.get_weights()[1], head, rtol=1e-4, atol=1e-6)
    said = [record.message for record in caplog.records if record.message.startswith("not taken from")]
    assert len(said) == 1 and "encoder" in said[0] and "head" not in said[0]


@pytest.mark.slow
def test_layers_of_a_bidirectional_continue_where_keras_has_counted_on(keras, tmp_path):
    def build():
        layers = [keras.Input((3, WIDTH)), keras.layers.Bidirectional(keras.layers.LSTM(2)), keras.layers.Dense(1)]
        return Saved(keras.Sequential(layers), keras.optimizers.Adam())

    first = build()
    path = first.save(tmp_path)
    for partial in (False, True):
        second = build()
        second.restore(path, partial)
        for one, other in zip(first.model.weights, second.model.weights, strict=True):
            np.testing.assert_array_equal(one, other)


def test_weights_without_names_follow_the_attributes_of_their_layer(tmp_path):
    import keras

    class Own(keras.layers.Layer):
        def __init__(self, names, **settings):
            super().__init__(**settings)
            self.names = names

        def build(self, shape):
            for name in self.names:
                setattr(self, name, self.add_weight(shape=(2, 2)))

        def call(self, inputs):
            return inputs

    build = lambda names: Saved(keras.Sequential([keras.Input((2,)), Own(names, name="own")]))
    first = build(["gate", "a", "b"])
    path = first.save(tmp_path)
    second = build(["b", "a"])
    second.restore(path)
    for name in "ab":
        there, here = (getattr(saved.model.layers[-1], name) for saved in (first, second))
        np.testing.assert_array_equal(there, here)


class Holder:
    """Ways in which a trainer holds two models."""

    lists = staticmethod(lambda models: {"models": models})
    dicts = staticmethod(lambda models: {"models": dict(zip(("one", "two"), models))})
    attributes = staticmethod(lambda models: dict(zip(("one", "two"), models)))


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("hold", [Holder.lists, Holder.dicts, Holder.attributes], ids=["list", "dict", "attributes"])
@pytest.mark.parametrize("build", [sequential, subclassed])
def test_a_warm_start_takes_the_weights_of_models_wherever_they_are_and_no_optimizer(build, hold, keras, tmp_path):
    def state(names):
        models = [build(keras, names), build(keras, names)]
        optimizer = keras.optimizers.Adam(0.5 if names == "ab" else 0.25)
        optimizer.build([variable for model in models for variable in model.trainable_variables])
        return models, optimizer, state_of(types.SimpleNamespace(optimizer=optimizer, **hold(models)))

    models, optimizer, objects = state("ab")
    optimizer.iterations.assign(7)
    record = RunState()
    checkpoints = toy.checkpoints(
        tmp_path, {**objects, "global_step": tf.Variable(0, dtype=tf.int64), "run_state": record}
    )
    checkpoints.note_in(record.record)
    path = checkpoints.save(0, wait=True)
    again, other, objects = state("xab")
    warm_start(objects, path)
    for theirs, ours in zip(models, again):
        for name, layer in layers_in(theirs).items():
            np.testing.assert_array_equal(layers_in(ours)[name].get_weights()[0], layer.get_weights()[0])
    assert int(other.iterations) == 0 and float(other.learning_rate) == 0.25
