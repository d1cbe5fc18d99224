"""KerasTrainer beside Keras `fit`: the same weights, losses and metrics from the same order of data."""

import json
import subprocess

import flat_config
import keras as keras3
import keras_scripts
import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy, more
from keras_scripts import BATCH, EPOCHS, fitted

import looplib
from looplib.errors import CallbackError, EndlessDataError, SettingError, UsageError
from looplib.keras.callbacks import KerasCallbacks

FAMILIES = ("keras", "tf_keras")


def trained(name, keras, strategy="default", epochs=EPOCHS, callbacks=(), **settings):
    """Returns (model, reports by split, step) after a training in looplib."""
    strategy = make_strategy(strategy)
    reports = {}
    with strategy.scope():
        model, arguments = keras_scripts.build(name, keras)
        trainer = looplib.KerasTrainer(model, **arguments, shuffle=False, callbacks=callbacks)
    evaluator = trainer.evaluator() if "validation_data" in arguments else None
    settings = {"writers": [], "actions": [lambda event: reports.setdefault(event.split, []).append(event)], **settings}
    with flat_config.controller(
        trainer=trainer, evaluator=evaluator, strategy=strategy, global_batch_size=BATCH, **settings
    ) as controller:
        if evaluator:
            controller.train_and_evaluate(epochs=epochs)
        else:
            controller.train(epochs=epochs)
        return model, reports, controller.global_step


def assert_as_in_fit(model, reports, expected):
    weights, history = expected
    for ours, theirs in zip(map(np.array, model.trainable_variables), weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    for name, values in history.items():
        split = "eval" if name.startswith("val_") else "train"
        found = [event.metrics[name.removeprefix("val_")] for event in reports[split]]
        np.testing.assert_allclose(found, values, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.slow
def test_an_evaluation_counts_each_example_once_and_leaves_the_metrics_of_the_training_alone():
    alone, reports, _ = trained("cnn", keras3, "mirrored_x2", epochs=2, steps_per_loop=4)
    evaluated = reports["eval"][-1].metrics
    _, arguments = keras_scripts.build("cnn", keras3)
    x, y = arguments["validation_data"]
    expected = alone.evaluate(x, y, verbose=0, return_dict=True)
    assert evaluated["examples"] == len(x)
    np.testing.assert_allclose([evaluated[name] for name in expected], list(expected.values()), rtol=1e-5)
    strategy = make_strategy("default")
    model, arguments = keras_scripts.build("cnn", keras3)
    trainer = looplib.KerasTrainer(model, **arguments, shuffle=False)
    with toy.controller(
        strategy, trainer, trainer.evaluator(), global_batch_size=BATCH, steps_per_loop=None
    ) as controller:
        controller.train_and_evaluate(8, eval_interval=3)  # in the middle of the reports' windows
        assert controller.train(8)["loss"] == pytest.approx(reports["train"][1].metrics["loss"], rel=1e-5)


def callbacks_of(keras):
    seen = []
    return seen, [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * (0.5 if epoch else 1.0)),
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.3, patience=1, min_delta=1.0),
        keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: seen.append(("begin", epoch)),
            on_epoch_end=lambda epoch, logs: seen.append(("end", epoch)),
            on_train_end=lambda logs: seen.append(("end", "all")),
        ),
        keras.callbacks.History(),
    ]


@pytest.mark.slow
def test_callbacks_observe_and_schedule_as_in_fit(keras):
    expected, theirs = callbacks_of(keras)
    weights, history = fitted("cnn", keras, callbacks=theirs)
    seen, callbacks = callbacks_of(keras)
    model, reports, _ = trained("cnn", keras, callbacks=callbacks)
    history = {name: values for name, values in history.items() if name not in ("lr", "learning_rate")}
    assert_as_in_fit(model, reports, (weights, history))
    assert seen == expected
    ours, theirs = callbacks[-1], theirs[-1]
    assert ours.epoch == theirs.epoch and ours.history.keys() == theirs.history.keys()
    for name, values in theirs.history.items():
        assert ours.history[name] == pytest.approx([float(value) for value in values], rel=1e-5)


def remembering(keras):
    class Remembering(keras.callbacks.Callback):
        """Its memory is of every kind that is kept, and some that are not."""

        def __init__(self, kept=True):
            super().__init__()
            self.kept, self.notes, self.best, self.order = kept, {"text": "", "all": []}, None, ()
            self.phase, self.ring = np.complex64(1j), []
            self.ring.append(self.ring)

        def on_train_begin(self, logs=None):
            self.best = np.float32(np.inf)

        def on_epoch_end(self, epoch, logs=None):
            self.notes["all"].append([epoch, float(logs["loss"])])
            self.notes["text"] += f"{epoch} "
            self.best = min(self.best, np.float32(logs["loss"]))
            if not self.kept:
                self.order += (epoch,)

    return Remembering


@pytest.mark.slow
def test_what_callbacks_remember_continues_after_restarts_and_a_crash(keras, tmp_path, caplog):
    kind = remembering(keras)

    def run(epochs, first=(), **settings):
        made = [*first, kind(), keras.callbacks.History()]
        try:
            trained("mlp", keras, epochs=epochs, callbacks=made, **settings)
        except ZeroDivisionError:
            pass
        return made[-2:]

    whole, history = run(6)
    policy = looplib.CheckpointPolicy(every_steps=3)  # an epoch has 4 steps
    settings = dict(model_dir=tmp_path, checkpoints=policy)
    run(2, **settings)
    crash = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epoch == 4 and 1 / 0)
    run(6, [crash], **settings)  # two epochs after the last save are lost
    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=9)  # takes nobody's memory
    again, ours = run(6, [stop], **settings)
    assert again.notes == whole.notes and again.best == whole.best and again.notes["text"] == "0 1 2 3 4 5 "
    assert ours.epoch == history.epoch and ours.history == history.history
    assert not [record for record in caplog.records if "not kept" in record.getMessage()]
    with pytest.raises(CallbackError, match=r"Remembering\(\)"):
        run(7, [kind()], **settings)
    caplog.clear()
    (tmp_path / "other").mkdir()
    trained("mlp", keras, epochs=1, callbacks=[kind(kept=False)], model_dir=tmp_path / "other")
    (warning,) = {record.getMessage() for record in caplog.records if "not kept" in record.getMessage()}
    assert "attribute order of the callback Remembering has changed and is a tuple" in warning


def test_a_foreign_memory_of_callbacks_is_refused(keras):
    name = {"keras": "EarlyStopping(loss, auto)", "tf_keras": "EarlyStopping(loss, less)"}[keras.__name__]
    model, _ = keras_scripts.build("mlp", keras)
    stopping = keras.callbacks.EarlyStopping(monitor="loss")
    callbacks = KerasCallbacks(model, [stopping])
    callbacks.load({"callbacks": {name: {"best": 0.25, "wait": 2}}, "logs": None, "missing": [], "begun": 3})
    assert callbacks.state()["callbacks"] == {name: {"best": 0.25, "wait": 2}}
    for foreign in (3, [{"wait": 2}], {name: 3}, {name: {"on_epoch_end": 3}}):
        with pytest.raises(CallbackError):
            callbacks.load({"callbacks": foreign, "logs": None, "missing": [], "begun": 3})
    for foreign in (3, [1], {name: "3"}, {name: True}):
        with pytest.raises(ValueError, match="expected a dict of whole numbers"):
            callbacks.load({"callbacks": {}, "logs": None, "missing": [], "begun": 3, "best": foreign})


@pytest.mark.slow
@pytest.mark.parametrize("keras", ["keras", *more(["tf_keras"])], indirect=True)
def test_early_stopping_remembers_over_a_restart(keras, tmp_path):
    def stopping():
        return keras.callbacks.EarlyStopping(monitor="loss", min_delta=100.0, patience=3)  # never better than the first

    *_, expected = trained("mlp", keras, epochs=9, callbacks=[stopping()])
    assert expected == 4 * len(fitted_until(keras, stopping()))
    trained("mlp", keras, epochs=2, callbacks=[stopping()], model_dir=tmp_path)
    *_, step = trained("mlp", keras, epochs=9, callbacks=[stopping()], model_dir=tmp_path)
    assert step == expected


def fitted_until(keras, callback):
    model, arguments = keras_scripts.build("mlp", keras)
    return model.fit(**arguments, batch_size=BATCH, epochs=9, verbose=0, callbacks=[callback]).epoch


def watching(keras, monitor, patience=3):
    return keras.callbacks.EarlyStopping(monitor=monitor, min_delta=100.0, patience=patience)  # the first is the best


@pytest.mark.slow
def test_callbacks_remember_by_what_they_watch(keras, tmp_path, caplog):
    start = lambda epochs, callbacks: trained("mlp", keras, epochs=epochs, callbacks=callbacks, model_dir=tmp_path)[2]
    steps = start(2, [watching(keras, "loss")]) // 2  # of an epoch
    rate = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.3, patience=9)
    reached = start(9, [rate, watching(keras, "loss")])
    assert reached == 4 * steps  # 1 is the best, and 2, 3 and 4 are not better
    assert "start with a fresh one: ReduceLROnPlateau(val_loss, auto)" in caplog.text


@pytest.mark.slow
def test_callbacks_that_cannot_be_told_apart_are_refused(keras):
    with pytest.raises(CallbackError, match=r"EarlyStopping\(loss"):
        trained("mlp", keras, callbacks=[watching(keras, "loss"), watching(keras, "loss", 5)])

    class Late(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.seen = 0

    with pytest.raises(CallbackError, match=r"Late\(\)"):
        trained("mlp", keras, callbacks=[Late(), Late()])
    plain = keras.callbacks.LambdaCallback
    callbacks = [plain(), plain(), watching(keras, "loss"), watching(keras, "loss", 5)]
    callbacks[2].name = "one of them"
    assert trained("mlp", keras, epochs=1, callbacks=callbacks)[2] > 0


REFUSED = {
    "CSVLogger": (lambda k: k.callbacks.CSVLogger("a.csv", append=True), r"looplib.DEFAULT_WRITERS, 'csv'"),
    "a subclass": (
        lambda k: type("Own", (k.callbacks.CSVLogger,), {})("a.csv"),
        r"callback Own does.*looplib.DEFAULT_WRITERS, 'csv'",
    ),
    "RemoteMonitor": (lambda k: k.callbacks.RemoteMonitor(), "looplib.Writer"),
    "batches": (lambda k: k.callbacks.LambdaCallback(on_train_batch_end=print), "on_epoch_end"),
    "other": (lambda k: print, "callbacks"),
}


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("case", REFUSED)
def test_a_callback_that_cannot_work_is_refused_with_what_to_use(case, keras):
    make, named = REFUSED[case]
    model, arguments = keras_scripts.build("mlp", keras)
    with pytest.raises(CallbackError, match=named):
        looplib.KerasTrainer(model, **arguments, callbacks=[make(keras)])


WRONG = {
    "not compiled": (lambda m, x, y: dict(model=keras3.Sequential([keras3.Input((4,))])), "not compiled"),
    "no model": (lambda m, x, y: dict(model=print), "expected a Keras model"),
    "lengths": (lambda m, x, y: dict(y=y[:-1]), "48, 49 rows"),
    "two weights": (lambda m, x, y: dict(class_weight={0: 1.0}, sample_weight=y), "sample_weight"),
    "class weights": (lambda m, x, y: dict(class_weight=[1.0, 2.0]), "dict from class number"),
    "data set and y": (lambda m, x, y: dict(x=tf.data.Dataset.range(3)), "elements"),
    "no data set": (lambda m, x, y: dict(x=lambda: 3, y=None), "tf.data.Dataset"),
}


@pytest.mark.slow(spread=3)
@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused(case):
    model, arguments = keras_scripts.build("mlp", keras3)
    change, named = WRONG[case]
    with pytest.raises(UsageError, match=named):
        looplib.KerasTrainer(**{"model": model, **arguments, **change(model, **arguments)})


@pytest.mark.slow
def test_callbacks_refuse_reports_that_are_not_of_epochs():
    model, arguments = keras_scripts.build("mlp", keras3)
    trainer = looplib.KerasTrainer(model, **arguments, callbacks=[keras3.callbacks.ReduceLROnPlateau()])
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=BATCH, steps_per_loop=3), trainer=trainer, writers=[]
    ) as controller:
        with pytest.raises(CallbackError, match="steps_per_loop"):
            controller.train(epochs=1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy, keras", [("default", "keras"), ("mirrored_x2", "tf_keras")], indirect=["keras"])
def test_a_data_set_of_global_batches_trains_as_in_fit(strategy, keras):
    _, arguments = keras_scripts.build("class_weights", keras)
    data = tf.data.Dataset.from_tensor_slices((arguments["x"], arguments["y"])).batch(BATCH)
    model, _ = keras_scripts.build("class_weights", keras)
    weights = arguments["class_weight"]
    history = model.fit(data, epochs=EPOCHS, class_weight=weights, verbose=0).history
    strategy, reports = make_strategy(strategy), {"train": []}
    with strategy.scope():
        ours, _ = keras_scripts.build("class_weights", keras)
        trainer = looplib.KerasTrainer(ours, data, class_weight=weights)
    with toy.controller(
        strategy, trainer, global_batch_size=BATCH, steps_per_loop=None, actions=[reports["train"].append]
    ) as controller:
        controller.train(epochs=EPOCHS)
    assert_as_in_fit(ours, reports, ([np.array(variable) for variable in model.trainable_variables], history))


@pytest.mark.slow
def test_epochs_are_steps_of_any_trainer_whose_data_has_a_known_length():
    import toy

    trainer, evaluator = toy.build(make_strategy("default"))
    with toy.controller(make_strategy("default"), trainer, evaluator) as controller:
        assert controller.train(epochs=2)["epoch"] == round(controller.global_step / (37 / 8), 3)
        assert controller.global_step == 10  # 74 examples in batches of 8
        with pytest.raises(SettingError):
            controller.train(20, epochs=3)
        with pytest.raises(SettingError):
            controller.train(epochs=-1)
    unknown = type("Unknown", (toy.Regression,), {})
    unknown.dataset = lambda self, context: (
        tf.data.Dataset.range(37).repeat().batch(8, True).map(lambda i: (i, tf.gather(toy.X, i), tf.gather(toy.Y, i)))
    )
    with toy.controller(make_strategy("default"), unknown()) as controller:
        with pytest.raises(EndlessDataError):
            controller.train(epochs=1)
        assert "epoch" not in controller.train(2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "check, name",  # each third one, in turns
    [(("resume", "replicas")[number % 2], name) for number, name in [*enumerate(keras_scripts.SCRIPTS)][1::3]],
)
def test_a_script_passes_the_checks(check, name, python, tmp_path):
    command = [
        python,
        keras_scripts.__file__,
        f"--config.script={name}",
        "--checkpoint_interval=5",
        "--steps_per_loop=5",
        *([] if name == "cnn" else ["--mode=train"]),  # the others have nothing to evaluate on
    ]
    result = subprocess.run(
        [python, "-m", "looplib", "check", check, f"--dir={tmp_path}", "--", *command], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_the_reports_on_disk_have_the_names_of_fit_and_the_epoch(tmp_path):
    trained("cnn", keras3, model_dir=tmp_path, writers=None)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows if row["split"] == "train"] == [1, 2, 3]
    for row in rows:
        assert {"loss", "accuracy"} < row.keys() and not any("compile" in name for name in row)


@pytest.mark.parametrize("limit", ["max_epochs", "max_steps_per_epoch"])
def test_a_limit_of_fit_is_refused(limit):
    model = keras3.Sequential([keras3.Input((1,)), keras3.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((4, 1), np.float32)
    trainer = looplib.KerasTrainer(model, x, x, validation_data=(x, x))
    assert getattr(keras3.config, limit)() is None
    getattr(keras3.config, f"set_{limit}")(2)
    try:
        for make in (lambda: looplib.KerasTrainer(model, x, x), trainer.evaluator):
            with pytest.raises(SettingError, match=f"keras.config.{limit} is 2"):
                make()
    finally:
        getattr(keras3.config, f"set_{limit}")(None)


def _drawing(keras, holder):
    """Returns a class of a metric or a loss that draws from a state of its own, by TensorFlow in tf_keras."""
    base = keras.metrics.Mean if holder == "metric" else keras.losses.Loss

    class Drawing(base):
        def __init__(self):
            super().__init__(name="drawn")
            self.seeds = [
                keras.random.SeedGenerator(3) if keras.__name__ == "keras" else tf.random.Generator.from_seed(3)
            ]

        def draw(self):
            if keras.__name__ == "keras":
                return keras.random.uniform([], seed=self.seeds[0])
            return self.seeds[0].uniform([])

        def update_state(self, targets, predicted, sample_weight=None):
            return super().update_state(tf.reduce_mean(tf.abs(targets - predicted), axis=1) + self.draw())

        def call(self, targets, predicted):
            return tf.reduce_mean(tf.square(targets - predicted), axis=-1) * (1 + self.draw())

    return Drawing


@pytest.mark.parametrize("holder", ["metric", "loss"])
def test_random_numbers_of_a_metric_or_a_loss_are_resumed(holder, keras, tmp_path):
    x = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")

    def reported(folder, *stops):
        drawing, found = _drawing(keras, holder), {}
        for stop in stops:
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6)])
            loss, metrics = ("mse", [drawing()]) if holder == "metric" else (drawing(), [])
            model.compile(keras.optimizers.SGD(0.1), loss, metrics=metrics)
            trainer = looplib.KerasTrainer(model, x, x, shuffle=False)
            config = looplib.RunConfig(global_batch_size=16, steps_per_loop=1)
            with looplib.Controller(config, trainer=trainer, model_dir=folder, writers=[]) as controller:
                found |= {stop: controller.train(stop)["drawn" if holder == "metric" else "loss"]}
        return found

    whole, parts = reported(tmp_path / "whole", 6), reported(tmp_path / "parts", 3, 6)
    assert parts[6] == pytest.approx(whole[6], rel=1e-6) and parts[3] != pytest.approx(whole[6], rel=1e-3)


def test_a_metric_with_a_seed_generator_runs_on_two_replicas():
    keras = pytest.importorskip("keras")
    x, strategy = np.ones((64, 6), "float32"), make_strategy("mirrored_x2")
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[_drawing(keras, "metric")()])
        trainer = looplib.KerasTrainer(model, x, x, shuffle=False)
    config = looplib.RunConfig(global_batch_size=16)
    found = looplib.Controller(config, trainer=trainer, strategy=strategy, writers=[]).train(4)["drawn"]
    assert 1 < found < 2  # the error, 1, and a number drawn for each of 8 parts


def test_metrics_that_a_model_does_not_list_are_saved(keras, caplog, tmp_path):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.tracker = keras.layers.Dense(1), keras.metrics.Mean(name="tracked")

        @property
        def metrics(self):
            return [self.tracker]

        def call(self, inputs):
            return self.dense(inputs)

    x, model = np.ones((16, 3), "float32"), Own()
    model(x)
    model.compile("sgd", "mse")
    trainer = looplib.KerasTrainer(model, x, x[:, :1])
    config = looplib.RunConfig(global_batch_size=8)
    with looplib.Controller(config, trainer=trainer, model_dir=str(tmp_path), writers=[]) as controller:
        controller.train(2)
    assert "not saved" not in caplog.text
