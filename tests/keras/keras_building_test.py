"""KerasTrainer makes all variables before the first step, and finds every optimizer: its steps are those of fit."""

import functools
import types

import flat_config
import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy, more

import looplib
from looplib.compat import keras as _keras
from looplib.errors import BatchSizeError, OptimizerError, StepError

BATCH, STEPS = 8, 3
X = np.random.RandomState(0).randn(STEPS * BATCH, 2).astype("float32")
X[::2] *= 3  # so that to clip each replica's own gradients makes a difference


def in_attribute(model, optimizer):
    model.d_optimizer = optimizer
    return lambda: model.d_optimizer


def in_list(model, optimizer):
    model.several = [optimizer]
    return lambda: model.several[0]


def in_sublayer(model, optimizer):
    model.discriminator.compile(optimizer)
    return lambda: model.discriminator.optimizer


def in_module(model, optimizer):
    model.module = tf.Module()
    model.module.held = optimizer
    return lambda: model.module.held


def elsewhere(model, optimizer):
    return lambda: optimizer


def gan(keras, keep=in_attribute, built=True, conditional=False):
    """A GAN as public scripts have it: without call and test_step, with two optimizers, which clip."""

    class Gan(keras.Model):
        def __init__(self):
            super().__init__()
            first = [keras.layers.InputLayer((2,))] if built else []
            self.discriminator = keras.Sequential([*first, keras.layers.Dense(1, kernel_initializer="ones")])
            self.generator = keras.Sequential([*first, keras.layers.Dense(2, kernel_initializer="ones")])
            self.d_loss = keras.metrics.Mean(name="d_loss")

        @property
        def metrics(self):
            return [self.d_loss]

        def compile(self, d_optimizer, g_optimizer):
            super().compile()
            self.g_optimizer = g_optimizer
            self.kept = keep(self, d_optimizer)

        def train_step(self, x):
            replicas = tf.distribute.get_replica_context().num_replicas_in_sync
            with tf.GradientTape() as tape:
                of_fake = self.discriminator(self.generator(x * 0.5)) - 1
                d_loss = tf.reduce_mean(tf.square(self.discriminator(x)) + tf.square(of_fake)) / replicas
            variables = self.discriminator.trainable_variables
            step = functools.partial(update, self.kept(), tape.gradient(d_loss, variables), variables)
            tf.cond(tf.reduce_sum(x) > -1e9, step, lambda: 0) if conditional else step()
            with tf.GradientTape() as tape:
                g_loss = tf.reduce_mean(tf.square(self.discriminator(self.generator(x * 0.5)))) / replicas
            variables = self.generator.trainable_variables
            update(self.g_optimizer, tape.gradient(g_loss, variables), variables)
            self.d_loss.update_state(d_loss * replicas)
            return {"d_loss": self.d_loss.result()}

    model = Gan()
    model.compile(keras.optimizers.SGD(0.1, clipnorm=0.3), keras.optimizers.SGD(0.1, momentum=0.5, global_clipnorm=0.2))
    return model


def update(optimizer, gradients, variables):
    optimizer.apply_gradients(zip(gradients, variables))
    return 0


def weights(model):
    return [np.array(variable) for variable in model.discriminator.variables + model.generator.variables]


def trained(make, strategy, data=(X,), steps=STEPS, evaluates=False, **settings):
    """Returns the model after a training in looplib."""
    strategy = make_strategy(strategy)
    with strategy.scope():
        model = make()
        trainer = looplib.KerasTrainer(model, *data, shuffle=False)
    settings = {"writers": [], "strategy": strategy, "global_batch_size": BATCH, **settings}
    evaluator = trainer.evaluator(*data) if evaluates else None
    with flat_config.controller(trainer=trainer, evaluator=evaluator, **settings) as controller:
        controller.train(steps)
        if evaluates:
            return model, controller.evaluate()["eval"]
    return model


@pytest.mark.slow
@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("strategy", ["mirrored_x2", *more(["default"])])
def test_a_gan_trains_as_in_fit_on_one_device(strategy, built, keras):
    expected = gan(keras)
    expected.fit(X, batch_size=BATCH, shuffle=False, verbose=0)
    model = trained(lambda: gan(keras, built=built), strategy)
    for ours, theirs in zip(weights(model), weights(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.slow(spread=1)
def test_optimizers_are_named_by_the_attributes_that_hold_them(keras):
    for keep, path in ((in_attribute, "d_optimizer"), (in_list, "several/0"), (in_module, "module/held")):
        model = gan(keras, keep)
        trainer = types.SimpleNamespace(model=model, optimizer=model.optimizer, again=[model.g_optimizer])
        assert set(_keras.optimizers(trainer)) == {"optimizer", "again/0", f"model/{path}"}
        del trainer.optimizer, trainer.again
        assert list(_keras.optimizers(trainer))[0] == "model/optimizer"


@pytest.mark.slow
@pytest.mark.parametrize("keep", [in_list, *more([in_sublayer, in_module])])
def test_an_optimizer_that_a_model_holds_anywhere_sums_before_it_clips_and_resumes(keep, keras, tmp_path):
    expected = gan(keras)
    expected.fit(X, batch_size=BATCH, shuffle=False, verbose=0)
    trained(lambda: gan(keras, keep), "mirrored_x2", steps=1, model_dir=tmp_path)
    model = trained(lambda: gan(keras, keep), "mirrored_x2", model_dir=tmp_path)
    for ours, theirs in zip(weights(model), weights(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("legacy", [False, True])
def test_an_optimizer_that_nobody_holds_is_refused_on_several_replicas(legacy, keras, caplog):
    if legacy and keras is keras3:
        pytest.skip("only tf_keras has legacy optimizers")
    keep = elsewhere if not legacy else lambda model, optimizer: elsewhere(model, keras.optimizers.legacy.SGD(0.1))
    with pytest.raises(OptimizerError, match="(iter|rate)"):
        trained(lambda: gan(keras, keep), "mirrored_x2")
    trained(lambda: gan(keras, keep), "default")
    assert "variables that are not attributes of the trainer" in caplog.text


@pytest.mark.slow
def test_an_update_in_a_condition_is_refused_on_several_replicas_with_its_line(keras):
    with pytest.raises(StepError, match="keras_building_test.py.*apply_gradients"):
        trained(lambda: gan(keras, conditional=True), "mirrored_x2")
    expected = gan(keras)
    expected.fit(X, batch_size=BATCH, shuffle=False, verbose=0)
    for ours, theirs in zip(weights(trained(lambda: gan(keras, conditional=True), "default")), weights(expected)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


SEQUENCES = np.random.RandomState(1).randn(STEPS * BATCH, 3, 2).astype("float32")
SUMS = SEQUENCES.sum(axis=(1, 2))


def stateful(keras, first):
    """A model whose layer has a state for each example of a batch."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([*first, keras.layers.LSTM(4, stateful=True), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


def fixed(keras):
    """A model that computes with the size of its batches."""
    keras.utils.set_random_seed(3)

    class Mixing(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(tf.reshape(x, [BATCH, 6]) - tf.reduce_mean(x))

    model = Mixing()
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


def batches():
    return tf.data.Dataset.from_tensor_slices((SEQUENCES, SUMS)).batch(BATCH, drop_remainder=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["declared", "data set", "fixed"])
def test_a_model_for_batches_of_one_size_trains_as_in_fit(case, keras):
    make = {
        "declared": lambda: stateful(keras, [keras.Input((3, 2), batch_size=BATCH)]),
        "data set": lambda: stateful(keras, []),
        "fixed": lambda: fixed(keras),
    }[case]
    expected = make()
    history = expected.fit(batches(), epochs=1, verbose=0).history
    data = (SEQUENCES, SUMS) if case == "declared" else (batches(),)
    model, metrics = trained(make, "default", data, evaluates=True)
    for ours, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    assert metrics["examples"] == len(SUMS) and history


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("place", ["layer", "step"])
def test_random_numbers_without_a_seed_are_refused_on_several_replicas(place):
    class Noise(keras3.layers.Layer):
        def call(self, values):
            return values + keras3.random.normal(keras3.ops.shape(values))

    class Model(keras3.Model):
        def train_step(self, data):
            return super().train_step((data[0] + keras3.random.normal(keras3.ops.shape(data[0])), data[1]))

    strategy = make_strategy("mirrored_x2")
    with strategy.scope(), pytest.raises(StepError, match="^the step draws from keras.random.*SeedGenerator"):
        inputs = keras3.Input(X.shape[1:])
        outputs = keras3.layers.Dense(1)(Noise()(inputs) if place == "layer" else inputs)
        model = (keras3.Model if place == "layer" else Model)(inputs, outputs)
        model.compile("sgd", "mse")
        trainer = looplib.KerasTrainer(model, X, X[:, :1])
        looplib.Controller(looplib.RunConfig(global_batch_size=BATCH), trainer=trainer, strategy=strategy, writers=[])


class Accumulating(keras3.Model):
    """Sums gradients in a list of variables, as gradient accumulation is often written."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sums = [tf.Variable(tf.zeros(variable.shape)) for variable in self.trainable_variables]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(data[0], training=True) - data[1]))
        for total, gradient in zip(self.sums, tape.gradient(loss, self.trainable_variables)):
            total.assign(0.5 * total + gradient)
        self.optimizer.apply(list(self.sums), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.slow
def test_variables_in_a_list_of_a_keras_3_model_are_saved(tmp_path):
    weights = []
    for folder, ends in ((None, [4]), (tmp_path, [2, 4])):
        for end in ends:
            keras3.utils.set_random_seed(1)
            inputs = keras3.Input(X.shape[1:])
            model = Accumulating(inputs, keras3.layers.Dense(1)(inputs))
            model.compile(keras3.optimizers.SGD(0.05))
            trainer = looplib.KerasTrainer(model, X, X[:, :1], shuffle=False)
            with toy.controller(
                None, trainer, global_batch_size=BATCH, steps_per_loop=None, model_dir=folder and str(folder)
            ) as controller:
                controller.train(end)
        weights.append(np.concatenate([np.ravel(value) for value in model.get_weights()]))
    np.testing.assert_array_equal(*weights)


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_states_of_recurrent_layers_of_tf_keras_are_saved(wrapped, tmp_path):
    import tf_keras

    layers, x = tf_keras.layers, np.random.RandomState(1).randn(STEPS * BATCH, 5, 2).astype("float32")
    weights = []
    for folder, ends in ((None, [3]), (tmp_path, [2, 3])):
        for end in ends:
            tf_keras.utils.set_random_seed(1)
            recurrent = layers.LSTM(3, stateful=True)
            recurrent = layers.Bidirectional(recurrent) if wrapped else recurrent
            model = tf_keras.Sequential([tf_keras.Input((5, 2), batch_size=BATCH), recurrent, layers.Dense(1)])
            model.compile(tf_keras.optimizers.SGD(0.1), "mse")
            trainer = looplib.KerasTrainer(model, x, x[:, 0, :1], shuffle=False)
            with toy.controller(
                None, trainer, global_batch_size=BATCH, steps_per_loop=None, model_dir=folder and str(folder)
            ) as controller:
                controller.train(end)
        weights.append(np.concatenate([np.ravel(value) for value in model.get_weights()]))
    np.testing.assert_array_equal(*weights)


@pytest.mark.slow
def test_a_stateful_model_for_another_batch_than_a_replica_s_is_refused():
    strategy, layers = make_strategy("mirrored_x2"), keras3.layers
    with strategy.scope():
        model = keras3.Sequential([keras3.Input((5, 2), batch_size=BATCH), layers.LSTM(3, stateful=True)])
        model.compile("sgd", "mse")
        trainer = looplib.KerasTrainer(model, np.zeros([16, 5, 2], "float32"), np.zeros([16, 3], "float32"))
    with pytest.raises(BatchSizeError, match="8.*2.*4"):
        looplib.Controller(looplib.RunConfig(global_batch_size=BATCH), trainer=trainer, strategy=strategy, writers=[])
    data = tf.data.Dataset.from_tensors((tf.zeros([BATCH, 5, 2]), tf.zeros([BATCH, 3])))
    with strategy.scope(), pytest.raises(BatchSizeError, match="8.*2.*4"):
        looplib.KerasTrainer(model, data)


@pytest.mark.slow(pairs=True)
@pytest.mark.parametrize("strategy", ["default", "mirrored_x2"])
@pytest.mark.parametrize("step", ["train_step", "test_step"])
def test_an_error_of_a_model_s_own_step_is_raised_before_the_first_step_though_its_building_passes_over_it(
    step, strategy, keras
):
    class Model(keras.Model):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(data[0]) - data[1]))
            self.optimizer.apply_gradients(zip(tape.gradient(loss, self.weights), self.weights))
            return {"loss": loss}

        def test_step(self, data):
            return {"loss": tf.reduce_mean(tf.square(self(data[0]) - data[1]))}

    def refuses(self, data):
        raise ValueError("a sentence of the user")

    setattr(Model, step, refuses)
    strategy = make_strategy(strategy)
    with pytest.raises(ValueError, match="a sentence of the user"):
        with strategy.scope():
            inputs = keras.Input((2,))
            model = Model(inputs, keras.layers.Dense(1)(inputs))
            model.compile(keras.optimizers.SGD(0.1))
            trainer = looplib.KerasTrainer(model, X, X[:, :1])
            evaluator = trainer.evaluator(X, X[:, :1])
        settings = looplib.RunConfig(global_batch_size=BATCH)
        looplib.Controller(settings, trainer=trainer, evaluator=evaluator, strategy=strategy, writers=[])
