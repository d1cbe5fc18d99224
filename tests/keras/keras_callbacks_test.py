"""Callbacks of Keras that write models and restore the best weights, beside `fit`: files, stops and weights are equal."""

import itertools

import flat_config
import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from conftest import make_strategy

import looplib
from looplib.errors import CallbackError
from looplib.run.directory import RunDir

FAMILIES = ("keras", "tf_keras")
BATCH, EPOCHS = 16, 9  # 40 examples: 3 steps an epoch
X = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
OTHERS = X[:24] * 2, Y[:24] * 2


def rate(epoch, _):
    """Goes up the gradient after the third epoch, and down again from the sixth on, but not to the best."""
    return [0.02, 0.02, 0.02, -0.01, -0.01, 0.001, 0.001, 0.001, 0.001][epoch]


def build(keras):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.02, momentum=0.5), "mse", metrics=["mae"])
    return model


def callbacks(keras, folder, monitor="val_loss", **others):
    kinds = keras.callbacks
    every = str(folder / f"{{epoch:02d}}-{{{monitor}:.3f}}.weights.h5")
    return [
        kinds.LearningRateScheduler(rate),
        kinds.ModelCheckpoint(str(folder / "best.keras"), monitor=monitor, save_best_only=True),
        kinds.ModelCheckpoint(every, save_weights_only=True),
        kinds.EarlyStopping(monitor=monitor, restore_best_weights=True, **{"patience": 4, **others}),
        kinds.History(),
    ]


def fitted(keras, folder, **others):
    model, called = build(keras), callbacks(keras, folder, **others)
    model.fit(X, Y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, validation_data=OTHERS, callbacks=called)
    return model, called


def controlled(keras, called, strategy="default", **settings):
    strategy = make_strategy(strategy)
    with strategy.scope():
        model = build(keras)
        trainer = looplib.KerasTrainer(model, X, Y, shuffle=False, validation_data=OTHERS, callbacks=called)
    settings = {"writers": [], "strategy": strategy, "global_batch_size": BATCH, **settings}
    return model, flat_config.controller(trainer=trainer, evaluator=trainer.evaluator(), **settings)


def trained(keras, called, epochs=EPOCHS, **settings):
    model, controller = controlled(keras, called, **settings)
    with controller:
        controller.train_and_evaluate(epochs=epochs)
    return model


def assert_equal_files(ours, theirs, keras):
    names = sorted(path.name for path in theirs.iterdir())
    assert sorted(path.name for path in ours.iterdir()) == names and len(names) > 3
    for name in names:
        if name.endswith(".weights.h5"):
            models = build(keras), build(keras)
            for model, folder in zip(models, (ours, theirs)):
                model.load_weights(folder / name)
        else:
            models = [keras.models.load_model(folder / name) for folder in (ours, theirs)]
            assert_close(*([np.array(v) for v in model.optimizer.variables] for model in models))
        assert_close(*(model.get_weights() for model in models))


def assert_close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def assert_as_fit(ours, theirs):
    (model, called), (fit, fits) = ours, theirs
    assert called[-1].epoch == fits[-1].epoch
    assert_close(model.get_weights(), fit.get_weights())
    for name in ("stopped_epoch", "best_epoch", "wait", "best"):
        assert getattr(called[3], name) == pytest.approx(getattr(fits[3], name), rel=1e-5), name
    assert called[1].best == pytest.approx(fits[1].best, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keras, strategy",
    [("tf_keras", "default"), ("keras", "mirrored_x2"), ("tf_keras", "mirrored_x2"), ("keras", "default")],
    indirect=["keras"],
)
def test_files_stops_and_final_weights_are_those_of_fit(keras, strategy, tmp_path):
    theirs = fitted(keras, tmp_path / "fit")
    assert (theirs[1][3].best_epoch, theirs[1][3].stopped_epoch) == (2, 6)  # neither the first nor the last
    called = callbacks(keras, tmp_path / "ours")
    model = trained(keras, called, strategy=strategy)
    assert_as_fit((model, called), theirs)
    assert_equal_files(tmp_path / "ours", tmp_path / "fit", keras)


@pytest.mark.slow
@pytest.mark.parametrize("others", [dict(start_from_epoch=4, patience=3), dict(baseline=1e-9, patience=2)], ids=str)
def test_other_settings_of_early_stopping_are_those_of_fit(keras, others, tmp_path):
    theirs = fitted(keras, tmp_path / "fit", **others)
    called = callbacks(keras, tmp_path / "ours", **others)
    assert_as_fit((trained(keras, called), called), theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fails, monitor, keras",
    [*itertools.product([1, 4, 6], ["val_loss", "loss"], FAMILIES), (6, "loss", "tf_keras"), (4, "val_loss", "keras")],
    indirect=["keras"],
)
def test_a_run_that_was_killed_ends_with_the_files_and_the_best_weights_of_fit(keras, fails, monitor, tmp_path):
    """Before the best epoch, after it, and in the epoch in which it stops; saves are scarce where nothing is evaluated."""
    theirs = fitted(keras, tmp_path / "fit", monitor=monitor)
    settings = dict(
        model_dir=tmp_path / "run", checkpoints=looplib.CheckpointPolicy(every_steps=7, keep=looplib.KeepLast(1))
    )
    called = callbacks(keras, tmp_path / "ours", monitor)
    kill = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epoch == fails and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trained(keras, [*called, kill], **settings)
    called = callbacks(keras, tmp_path / "ours", monitor)
    assert_as_fit((trained(keras, called, **settings), called), theirs)
    assert_equal_files(tmp_path / "ours", tmp_path / "fit", keras)
    again = callbacks(keras, tmp_path / "ours", monitor)  # a run that has stopped trains no further
    assert_as_fit((trained(keras, again, **settings), again), theirs)
    assert_equal_files(tmp_path / "ours", tmp_path / "fit", keras)


@pytest.mark.slow
def test_jobs_on_a_run_take_the_best_weights_and_a_longer_training_continues_from_the_last(tmp_path):
    best = 2
    theirs = fitted(keras3, tmp_path / "fit")
    settings = dict(model_dir=tmp_path / "run")
    model, controller = controlled(keras3, callbacks(keras3, tmp_path / "ours"), **settings)
    with controller:
        controller.train_and_evaluate(epochs=EPOCHS)
        assert controller.global_step == 3 * (best + 1)
    strategy = make_strategy("default")
    evaluator = looplib.KerasTrainer(build(keras3), X, Y, validation_data=OTHERS).evaluator()
    with flat_config.controller(
        evaluator=evaluator, strategy=strategy, global_batch_size=BATCH, writers=[], **settings
    ) as job:
        assert job.evaluate()["eval"]["loss"] == pytest.approx(theirs[1][-1].history["val_loss"][best], rel=1e-5)
    patient = callbacks(keras3, tmp_path / "ours", patience=9)
    trained(keras3, patient, **settings)
    theirs = callbacks(keras3, tmp_path / "fit", patience=9)
    build(keras3).fit(
        X, Y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, validation_data=OTHERS, callbacks=theirs
    )
    assert patient[-1].epoch == theirs[-1].epoch == list(range(EPOCHS))
    assert_close(patient[-1].history["val_loss"], theirs[-1].history["val_loss"])


def test_a_second_call_of_train_without_a_model_dir_keeps_the_best_weights(keras, tmp_path):
    called = callbacks(keras, tmp_path)
    model, controller = controlled(keras, called)
    with controller:
        controller.train_and_evaluate(epochs=5)
        best = model.get_weights()
        controller.train_and_evaluate(epochs=5)  # trains nothing
    assert called[3].best_epoch == 2
    for ours, theirs in zip(model.get_weights(), best, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_a_best_checkpoint_that_is_gone_is_said(tmp_path, caplog):
    settings = dict(model_dir=tmp_path / "run")
    trained(keras3, callbacks(keras3, tmp_path), epochs=5, **settings)
    for path in (tmp_path / "run" / "checkpoints").glob("ckpt-9*"):
        path.unlink()
    called = callbacks(keras3, tmp_path)
    trained(keras3, called, **settings)
    assert (
        "the best weights of EarlyStopping(val_loss, auto) were those of step 9, whose checkpoint is gone"
        in caplog.text
    )
    assert called[3].best_epoch > 4


def told(keras):
    """Returns a callback that notes what it is given, and whether a scope is entered, in `seen`."""

    class Told(keras.callbacks.Callback):
        def note(self, name, *given):
            if name == "on_train_begin":
                given = self.params["epochs"], self.params["steps"]
            self.__dict__.setdefault("seen", {})[name] = (*given, tf.distribute.has_strategy())

    for name in ("on_train_begin", "on_epoch_end", "on_train_end"):
        arguments = (lambda epoch, logs: (epoch, logs)) if name == "on_epoch_end" else (lambda logs=None: (logs,))
        setattr(Told, name, lambda self, *a, name=name, arguments=arguments, **k: self.note(name, *arguments(*a, **k)))
    return Told()


@pytest.mark.parametrize("name", ["default", "mirrored_x2"])
def test_callbacks_are_told_what_fit_tells_them_in_the_scope_that_fit_enters(keras, name, tmp_path):
    theirs, strategy = told(keras), make_strategy(name)
    with strategy.scope():
        model = build(keras)
    model.fit(X, Y, batch_size=BATCH, epochs=4, shuffle=False, verbose=0, validation_data=OTHERS, callbacks=[theirs])
    for epochs in (2, 4, 4):  # the last start finds nothing left to do
        ours = told(keras)
        trained(keras, [ours], epochs=epochs, strategy=name, model_dir=tmp_path)
        assert ours.seen["on_train_begin"] == (epochs, *theirs.seen["on_train_begin"][1:])
        assert "verbose" in ours.params
        (logs, scope), (fits, _) = ours.seen["on_train_end"], theirs.seen["on_train_end"]
        assert logs.keys() == fits.keys() and scope == theirs.seen["on_train_end"][1]
    assert logs == pytest.approx(fits, rel=1e-4)


REFUSED = {
    "batches": (lambda k: k.callbacks.ModelCheckpoint("a.keras", save_freq=3), "save_freq=3, a number of batches"),
    "own batches": (
        lambda k: type("Own", (k.callbacks.ModelCheckpoint,), {"on_train_batch_end": print})("a.keras"),
        "Own has on_train_batch_end",
    ),
}


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("case", REFUSED)
def test_a_checkpoint_of_batches_is_refused(case, keras):
    make, named = REFUSED[case]
    with pytest.raises(CallbackError, match=named):
        looplib.KerasTrainer(build(keras), X, Y, callbacks=[make(keras)])


@pytest.mark.slow
def test_a_callback_whose_work_looplib_does_is_not_called_and_said_or_refused_without_it(keras, tmp_path, caplog):
    kinds = keras.callbacks
    called = [
        kinds.BackupAndRestore(str(tmp_path / "a")),
        kinds.TensorBoard(str(tmp_path / "b")),
        kinds.TerminateOnNaN(),
    ]
    caplog.set_level("INFO", logger="absl")  # whose level an earlier test may have raised
    trained(keras, called, epochs=1, model_dir=tmp_path / "run")
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()
    assert caplog.text.count("is not called: ") == 3
    for callback, settings, named in [
        (called[0], {}, "BackupAndRestore is not called, because a model_dir does its work"),
        (called[1], {}, "TensorBoard is not called, because a model_dir does its work"),
        (
            called[2],
            dict(guards=looplib.Guards(non_finite="off")),
            "TerminateOnNaN is not called, because guards",
        ),
    ]:
        with pytest.raises(CallbackError, match=named):
            trained(keras, [callback], **settings)


def test_a_second_call_of_train_goes_on_with_what_callbacks_remember(keras):
    def rate(*epochs):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        model.optimizer.learning_rate = 0.125
        plateau = keras.callbacks.ReduceLROnPlateau(monitor="flat", mode="min", factor=0.5, patience=2)
        flat = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(flat=1.0))
        trainer = looplib.KerasTrainer(model, np.ones((8, 2)), np.ones((8, 1)), callbacks=[flat, plateau])
        config = looplib.RunConfig(global_batch_size=8)
        with looplib.Controller(config, trainer=trainer, writers=[]) as controller:
            for end in epochs:
                controller.train(epochs=end)
        return float(tf.convert_to_tensor(model.optimizer.learning_rate))

    assert rate(2, 4, 6) == rate(6) < 0.125


@pytest.mark.parametrize("keras", [keras3, tf_keras])
def test_a_callback_that_reads_or_sets_the_rate_when_a_training_begins_resumes_as_if_it_had_not_stopped(
    keras, tmp_path
):
    class Warm(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.initial = float(tf.convert_to_tensor(self.model.optimizer.learning_rate))
            self.model.optimizer.learning_rate = 0.5 * self.initial

        def on_epoch_begin(self, epoch, logs=None):
            if epoch % 2:
                self.model.optimizer.learning_rate = self.initial * 0.7**epoch

    model = build(keras)
    model.fit(X, Y, batch_size=BATCH, epochs=6, shuffle=False, verbose=0, callbacks=[Warm()])
    for epochs in (3, 6):
        ours, controller = controlled(keras, [Warm()], model_dir=tmp_path / "run")
        with controller:
            controller.train(epochs=epochs)
    for one, other in zip(ours.get_weights(), model.get_weights()):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "name, arguments, watched",
    [
        ("EarlyStopping", dict(monitor="val_loss"), "min:eval/loss"),
        ("EarlyStopping", dict(monitor="val_recall_at", mode="max"), "max:eval/recall_at"),
        ("EarlyStopping", dict(monitor="loss"), None),  # of the training
        ("ReduceLROnPlateau", dict(monitor="val_accuracy"), "max:eval/accuracy"),
        ("ModelCheckpoint", dict(filepath="a.keras", monitor="val_mae", save_best_only=True), "min:eval/mae"),
        ("ModelCheckpoint", dict(filepath="a.keras", monitor="val_mae"), None),
    ],
)
def test_what_a_callback_monitors_is_the_watched_metric_of_the_run(family, name, arguments, watched):
    keras = {"keras": keras3, "tf_keras": tf_keras}[family]
    _, controller = controlled(keras, [keras.callbacks.History(), getattr(keras.callbacks, name)(**arguments)])
    assert controller.report.facts.flags["keep_best"] == watched


@pytest.mark.parametrize("name", FAMILIES)
def test_the_end_by_a_callback_names_it_and_the_values_of_what_it_monitors(name, tmp_path):
    keras = {"keras": keras3, "tf_keras": tf_keras}[name]
    evaluations = itertools.count()

    class ToNan(keras.callbacks.Callback):  # as a metric that is 0 / 0
        def on_epoch_end(self, epoch, logs=None):
            logs["val_odd"] = 0.25 if next(evaluations) == 0 else float("nan")

    trained(keras, [ToNan(), keras.callbacks.EarlyStopping("val_odd", patience=2, mode="max")], model_dir=tmp_path)
    (start,) = RunDir(tmp_path).report().starts
    assert start.outcome == (
        "EarlyStopping has ended the training at step 9: val_odd is nan, and the value to improve was 0.25"
    )
