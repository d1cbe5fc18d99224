"""A change of what a traced step has read in Python is refused, as it would have no effect."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from conftest import make_strategy, more

import looplib
from looplib.errors import UsageError

X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)


@dataclasses.dataclass
class Settings:
    scale: float = 1.0
    unread: float = 1.0


def make(keras):
    class Scaled(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder = keras.layers.Dense(4, name="encoder")
            self.drop = keras.layers.Dropout(0.25)
            self.head = keras.layers.Dense(1, name="head")
            self.beta = 1.0

        def call(self, inputs, training=False):
            return self.head(self.drop(self.encoder(inputs), training=training)) * self.beta

    class Trainer(looplib.GradientTrainer):
        shared = half = 1.0

        def __init__(self):
            model = Scaled()
            model(X[:1])
            self.settings, self.weights, self.unread = Settings(), [1.0, 2.0], 0
            self.bad, self.traces = float("nan"), 0
            self.live = tf.Variable(1.0, trainable=False)
            super().__init__(model, keras.optimizers.SGD(0.01))

        def dataset(self, context):
            return context.indices(32).map(lambda i: tf.gather(X, i))

        @property
        def halved(self):
            return self.half

        def factor(self):
            return self.halved * self.settings.scale * self.weights[0] * self.shared * self.live + 0 * (self.bad == 0)

        def loss_fn(self, inputs):
            self.traces += 1  # as tests do
            return tf.square(self.model(inputs, training=True)[:, 0] - 1) * self.factor()

    return Trainer()


CHANGES = {
    "a frozen layer": (
        lambda t: setattr(t.model.encoder, "trainable", False),
        "encoder.trainable is False and was True",
    ),
    "a rate of a layer": (lambda t: setattr(t.model.drop, "rate", 0.5), "dropout.*rate is 0.5 and was 0.25"),
    "an attribute of the model": (lambda t: setattr(t.model, "beta", 2.0), "scaled.*beta is 2.0 and was 1.0"),
    "a field of settings": (lambda t: setattr(t.settings, "scale", 2.0), "settings is .*scale=2.0"),
    "an item of a list": (lambda t: t.weights.append(3.0), "weights is .*3.0"),
    "an activation": (
        lambda t: setattr(t.model.encoder, "activation", tf.nn.relu),
        "encoder.activation is <function relu",
    ),
    "another optimizer": (lambda t: setattr(t, "optimizer", type(t.optimizer)(0.5)), "optimizer is .* and was"),
    "what a property reads": (lambda t: setattr(t, "half", 3.0), "half is 3.0 and was 1.0"),
    "an attribute of the class": (lambda t: setattr(t, "shared", 2.0), "shared is 2.0 and was 1.0"),
}


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("change, said", CHANGES.values(), ids=CHANGES)
def test_a_change_that_a_traced_step_does_not_see_is_refused_before_the_next_step(change, said, keras):
    trainer = make(keras)

    def act(event):
        if event.step == 4:
            change(trainer)

    with looplib.Controller(
        looplib.RunConfig(global_batch_size=8, steps_per_loop=2), trainer=trainer, writers=[], actions=[act]
    ) as controller:
        with pytest.raises(UsageError, match=said) as error:
            controller.train(8)
        assert controller.global_step == 4 and "\n" not in str(error.value)


@pytest.mark.slow(spread=1)
def test_what_the_step_sees_or_never_reads_may_change(keras):
    trainer = make(keras)
    losses = []

    def act(event):
        losses.append(event.metrics["loss"])
        trainer.unread += 1
        trainer.settings = Settings(unread=5.0) if event.step == 2 else trainer.settings
        trainer.optimizer.learning_rate = 0.0
        trainer.live.assign(4.0 if event.step == 4 else 1.0)

    trainer.model.drop.rate = 0.0
    trainer.settings.unread = 5.0
    trainer.optimizer.learning_rate = 0.0
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=32, steps_per_loop=2), trainer=trainer, writers=[], actions=[act]
    ) as controller:
        controller.train(8)
    np.testing.assert_allclose(np.divide(losses, losses[0]), [1, 1, 4, 1], rtol=1e-5)


@pytest.mark.slow(spread=1)
def test_a_step_that_runs_eagerly_sees_every_change(keras):
    trainer = make(keras)
    trainer.model.drop.rate, losses = 0.0, []
    trainer.optimizer.learning_rate = 0.0

    def act(event):
        losses.append(event.metrics["loss"])
        trainer.shared = 3.0

    with looplib.Controller(
        looplib.RunConfig(global_batch_size=32, steps_per_loop=1, loop="eager"),
        trainer=trainer,
        writers=[],
        actions=[act],
    ) as controller:
        controller.train(2)
    np.testing.assert_allclose(losses[1] / losses[0], 3, rtol=1e-5)


def make_wrapped(keras):
    class Inner(keras.layers.Layer):
        def call(self, inputs):
            return inputs * self.factor

    class Wrapper(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = Inner()
            self.weight = self.add_weight(shape=(), initializer="ones", name="weight")

        def call(self, inputs):
            self.inner.factor = tf.round(10 * self.weight) / 10 + (self.weight - tf.stop_gradient(self.weight))
            return self.inner(inputs)

    return keras.Sequential([keras.Input((4,)), Wrapper(), keras.layers.Dense(1)])


@pytest.mark.parametrize("replicas", ["default", *more(["mirrored_x2"])])
def test_a_tensor_that_a_wrapper_gives_its_layer_in_each_trace_is_no_change(keras, replicas):
    keras.utils.set_random_seed(0)
    strategy, y = make_strategy(replicas), X.sum(axis=1, keepdims=True)
    with strategy.scope():
        model = make_wrapped(keras)
        model.compile(keras.optimizers.SGD(0.1), "mse")
    first = model.get_weights()
    expected = model.fit(X, y, batch_size=8, epochs=2, shuffle=False, verbose=0, validation_data=(X, y)).history
    model.set_weights(first)
    trainer = looplib.KerasTrainer(model, X, y, shuffle=False, validation_data=(X, y))
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=8, steps_per_loop=2),
        trainer=trainer,
        evaluator=trainer.evaluator(),
        strategy=strategy,
        writers=[],
        actions=[lambda event: model(X[:4])],
    ) as controller:
        found = [controller.train_and_evaluate(steps, 4)["eval"]["loss"] for steps in (4, 8)]
    np.testing.assert_allclose(found, expected["val_loss"], rtol=1e-5)


@pytest.mark.slow
def test_a_quantization_aware_model_trains_as_in_fit_and_resumes(tmp_path):
    pytest.importorskip("official", reason="needs Model Garden, which has tensorflow_model_optimization")
    import tensorflow_model_optimization as tfmot
    import tf_keras

    y = X.sum(axis=1, keepdims=True)

    def compiled():
        tf_keras.backend.clear_session()
        tf_keras.utils.set_random_seed(0)
        layers = [tf_keras.Input((4,)), tf_keras.layers.Dense(8, "relu"), tf_keras.layers.Dense(1)]
        model = tfmot.quantization.keras.quantize_model(tf_keras.Sequential(layers))
        model.compile(tf_keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        return model

    theirs = compiled()
    expected = theirs.fit(X, y, batch_size=8, epochs=2, shuffle=False, verbose=0, validation_data=(X, y)).history
    for epoch in (1, 2):
        trainer = looplib.KerasTrainer(compiled(), X, y, shuffle=False, validation_data=(X, y))
        with looplib.Controller(
            looplib.RunConfig(global_batch_size=8),
            trainer=trainer,
            evaluator=trainer.evaluator(),
            model_dir=str(tmp_path),
            writers=[],
        ) as controller:
            assert controller.global_step == 4 * (epoch - 1)
            found = controller.train_and_evaluate(4 * epoch, 4)["eval"]
        assert found["loss"] == pytest.approx(expected["val_loss"][epoch - 1], rel=1e-5)
    for ours, weight in zip(trainer.model.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(ours, weight, rtol=1e-5, atol=1e-6)
