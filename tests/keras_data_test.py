"""Data of compiled Keras models beside `fit`: of unknown length, and of every kind of element."""

import itertools

import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
from conftest import make_strategy

import looplib
from looplib.errors import UsageError

pytestmark = pytest.mark.any_engine

FAMILIES = ("keras", "tf_keras")
BATCH, EPOCHS = 8, 3
X = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def build(keras, loss="mse"):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.5), loss, metrics=["mae"])
    return model


def controlled(model, x, strategy="default", arguments=(), **settings):
    """Returns a controller of a model that a function builds, and its reports of the training."""
    strategy, reports = make_strategy(strategy), []
    with strategy.scope():
        trainer = looplib.KerasTrainer(model(), x, **dict(arguments))
    seen = lambda event: reports.append(event.metrics) if event.split == "train" else None
    evaluator = trainer.evaluator() if "validation_data" in dict(arguments) else None
    settings = {"writers": [], "strategy": strategy, "global_batch_size": BATCH, "actions": [seen], **settings}
    return trainer.model, looplib.Controller(trainer=trainer, evaluator=evaluator, **settings), reports


def assert_as_fit(model, reports, fit, history):
    for ours, theirs in zip(model.get_weights(), fit.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    for name in ("loss", "mae"):
        np.testing.assert_allclose([report[name] for report in reports], history[name], rtol=1e-5, err_msg=name)


# Lengths that are not known.


def filtered(_):
    kept = tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: x[0] > -0.5)
    return kept.batch(BATCH)


def generated(_):
    signature = tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])
    batches = [(X[at : at + BATCH], Y[at : at + BATCH]) for at in range(0, 32, BATCH)]
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)


def lines(folder):
    folder.mkdir(exist_ok=True)
    rows = np.concatenate([X, Y], axis=1)
    (folder / "data.csv").write_text("".join(",".join(map(repr, row)) + "\n" for row in rows.tolist()))
    parse = lambda line: tf.stack(tf.io.decode_csv(line, [0.0] * 4))
    rows = tf.data.TextLineDataset(str(folder / "data.csv")).map(parse).batch(BATCH)
    return rows.map(lambda row: (row[:, :3], row[:, 3:]))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "make, keras, strategy",
    [
        *itertools.product([filtered, generated, lines], FAMILIES, ["default", "mirrored_x2"]),
        (filtered, "keras", "mirrored_x2"),
        (generated, "tf_keras", "default"),
        (lines, "keras", "default"),
    ],
    indirect=["keras"],
)
def test_an_epoch_of_unknown_length_is_one_pass_as_in_fit_also_after_a_kill(make, keras, strategy, tmp_path):
    fit = build(keras)
    history = fit.fit(make(tmp_path / "data"), epochs=EPOCHS, verbose=0).history
    new = lambda **settings: controlled(lambda: build(keras), make(tmp_path / "data"), strategy, **settings)
    model, controller, reports = new()
    with controller:
        controller.train(epochs=EPOCHS)
        assert controller.steps_per_loop == controller.steps_per_epoch == controller.global_step / EPOCHS
    assert_as_fit(model, reports, fit, history)
    assert [report["epoch"] for report in reports] == [1, 2, 3]
    settings = dict(model_dir=tmp_path / "run", checkpoints=looplib.CheckpointPolicy(every_steps=3))

    def killed(event):
        if event.step >= 2 * controller.steps_per_epoch:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), new(actions=[killed], **settings)[1] as interrupted:
        interrupted.train(epochs=EPOCHS)
    model, controller, reports = new(**settings)
    with controller:
        assert 0 < controller.global_step
        controller.train(epochs=EPOCHS)
    done = EPOCHS - len(reports)
    assert_as_fit(model, reports, fit, {name: values[done:] for name, values in history.items()})


def test_callbacks_take_epochs_of_unknown_length(keras):
    fit, theirs, ours = build(keras), keras.callbacks.History(), keras.callbacks.History()
    fit.fit(generated(None), epochs=EPOCHS, verbose=0, callbacks=[theirs])
    model, controller, _ = controlled(lambda: build(keras), generated(None), arguments={"callbacks": [ours]})
    with controller:
        controller.train(epochs=EPOCHS)
    assert ours.epoch == theirs.epoch
    np.testing.assert_allclose(ours.history["loss"], theirs.history["loss"], rtol=1e-5)


def test_a_pass_of_another_length_is_an_error():
    draws = itertools.count()

    def batches():  # one more in the second pass of the training; the first two look at the data
        return ((X[:BATCH], Y[:BATCH]) for _ in range(3 if next(draws) < 3 else 4))

    signature = tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])
    data = tf.data.Dataset.from_generator(batches, output_signature=signature)
    _, controller, reports = controlled(lambda: build(keras3), data)
    with controller, pytest.raises(UsageError, match="was to have 3 batches in each epoch, and one had at least 4"):
        controller.train(epochs=EPOCHS)
    assert len(reports) == 2  # what is too much is found where the next pass should begin


def test_data_that_never_ends_is_trained_on_by_steps():
    endless = filtered(None).repeat()
    for arguments in ({}, {"callbacks": [keras3.callbacks.History()]}):
        data = tf.data.Dataset.from_tensors((X[:BATCH], Y[:BATCH])).repeat()
        _, controller, _ = controlled(lambda: build(keras3), data, arguments=arguments)
        with controller, pytest.raises(UsageError, match="never ends; give steps"):
            controller.train(epochs=1)
    _, controller, _ = controlled(lambda: build(keras3), endless)
    with controller:
        controller.train(7)  # is not counted
        assert controller.global_step == 7
