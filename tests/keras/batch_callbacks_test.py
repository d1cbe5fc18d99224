"""Callbacks that are said to observe batches are called as `fit` calls them, once each epoch has ended."""

import keras as keras3
import numpy as np
import pytest
from conftest import make_strategy

import looplib
from looplib.errors import CallbackError

BATCH, EPOCHS = 8, 3  # 36 examples: the last batch has 4
X = np.random.default_rng(0).normal(size=(36, 3)).astype("float32")
Y = (X.sum(axis=1, keepdims=True) > 0).astype("float32")


def recorder(keras):
    """Notes its calls in their order, with their logs, where checkpoints keep them."""

    class Recorder(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.calls = []

        def note(self, name, number, logs):
            self.calls.append([name, number, {key: float(value) for key, value in (logs or {}).items()}])

        def on_epoch_begin(self, epoch, logs=None):
            self.note("epoch begins", epoch, {})

        def on_epoch_end(self, epoch, logs=None):
            self.note("epoch ends", epoch, logs)

        def on_train_batch_begin(self, number, logs=None):
            self.note("batch begins", number, {})

        def on_train_batch_end(self, number, logs=None):
            self.note("batch ends", number, logs)

    return Recorder()


def build(keras):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1, "sigmoid")])
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")])
    return model


def trained(keras, callback, epochs=EPOCHS, **settings):
    trainer = looplib.KerasTrainer(build(keras), X, Y, shuffle=False, callbacks=[callback], observes_batches=True)
    config = looplib.RunConfig(global_batch_size=BATCH)
    with looplib.Controller(config, trainer=trainer, writers=[], **settings) as controller:
        metrics = controller.train(epochs=epochs)
    assert not any("batch" in name for name in metrics)


def assert_calls(ours, theirs):
    assert [call[:2] for call in ours] == [call[:2] for call in theirs]
    for (*_, found), (*_, expected) in zip(ours, theirs):
        np.testing.assert_allclose([found[name] for name in expected], [*expected.values()], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("keras", ["tf_keras", "keras"], indirect=True)
def test_batches_are_observed_with_the_logs_of_fit_also_over_a_restart_within_an_epoch(keras, tmp_path):
    theirs, ours, first, second = (recorder(keras) for _ in range(4))
    build(keras).fit(X, Y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[theirs])
    trained(keras, ours)
    assert_calls(ours.calls, theirs.calls)
    trained(keras, first, epochs=1.4, model_dir=tmp_path)
    trained(keras, second, model_dir=tmp_path)
    assert_calls(second.calls, theirs.calls)


def test_what_is_not_said_to_observe_and_batches_of_evaluations_or_replicas_are_refused():
    with pytest.raises(CallbackError, match="on_train_batch_begin.*observes_batches=True"):
        looplib.KerasTrainer(build(keras3), X, Y, callbacks=[recorder(keras3)])
    tests = keras3.callbacks.LambdaCallback(on_train_begin=print)
    tests.on_test_batch_end = print
    with pytest.raises(CallbackError, match="on_test_batch_end.*on_epoch_end"):
        looplib.KerasTrainer(build(keras3), X, Y, callbacks=[tests], observes_batches=True)
    with make_strategy("mirrored_x2").scope(), pytest.raises(CallbackError, match="one replica"):
        looplib.KerasTrainer(build(keras3), X, Y, callbacks=[recorder(keras3)], observes_batches=True)
