"""Values that a model's own `train_step` or `test_step` returns are reported, and watched by guards."""

import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy, more

import looplib
from looplib.errors import MetricError

X = np.random.RandomState(0).randn(20, 3).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)
BATCH, RATE = 8, 0.05  # the last batch of an epoch has 4 examples


def compiled(keras, kind="plain"):
    """Returns a model with steps of its own, which leave the loss tracker of Keras 3 alone."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.tracker = keras.layers.Dense(1, use_bias=False), keras.metrics.Mean(name="tracked")

        def call(self, inputs):
            return self.dense(inputs)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            variables = self.trainable_variables
            count = tf.convert_to_tensor(self.optimizer.iterations)
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            if kind == "nothing":
                return {}
            if kind == "tracked":
                self.tracker.update_state(loss, tf.shape(x)[0])
                return {"tracked": self.tracker.result(), "twice": 2 * loss}
            return {"loss": tf.where(count == 1, np.nan, loss) if kind == "bad" else loss}

        def test_step(self, data):
            x, y = data
            return {"loss": tf.reduce_mean(tf.square(self(x, training=False) - y))}

    keras.utils.set_random_seed(1)
    model = Own()
    model(X)
    model.compile(keras.optimizers.SGD(RATE))
    return model


def numpy_epochs(kernel, count):
    """Returns the mean loss of the examples of each epoch, and the mean loss at the end."""
    found = []
    for _ in range(count):
        losses = []
        for start in range(0, len(X), BATCH):
            x, y = X[start : start + BATCH], Y[start : start + BATCH]
            error = x @ kernel - y
            losses += [np.square(error)]
            kernel = kernel - RATE * 2 * x.T @ error / len(x)
        found.append(np.concatenate(losses).mean())
    return found, np.square(X @ kernel - Y).mean()


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("name", ["default", *more(["mirrored_x2"])])
def test_metrics_of_one_name_each_begin_anew_in_an_epoch(name, keras):
    """As of layers of one class that keep their losses, of which the step returns a mean under another name."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, use_bias=False)
            self.first, self.second = (keras.metrics.Mean(name="layer_loss") for _ in range(2))

        @property
        def metrics(self):
            return [self.first, self.second]

        def call(self, inputs):
            return self.dense(inputs)

        def train_step(self, data):
            self.first.update_state(data, tf.ones_like(data))
            self.second.update_state(2 * data, tf.ones_like(data))
            return {"final": self.first.result() + self.second.result()}

    strategy, reports = make_strategy(name), []
    with strategy.scope():
        model = Own()
        model(X)
        model.compile(keras.optimizers.SGD(RATE))
        trainer = looplib.KerasTrainer(model, X[:16], shuffle=False)
    with toy.controller(
        strategy, trainer, global_batch_size=BATCH, actions=[lambda event: reports.append(event.metrics)]
    ) as controller:
        controller.train(epochs=1)
    assert [report["final"] for report in reports] == pytest.approx([3 * X[:8].mean(), 3 * X[8:16].mean()], rel=1e-4)
    assert all(report.keys() <= {"final", "steps_per_second", "epoch"} for report in reports)


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("name", ["mirrored_x2", *more(["default"])])
@pytest.mark.parametrize("kind", ["plain", "tracked"])
def test_what_a_step_returns_is_reported_as_the_mean_over_examples(kind, name, keras):
    strategy, reports = make_strategy(name), {"train": [], "eval": []}
    with strategy.scope():
        model = compiled(keras, kind)
        trainer = looplib.KerasTrainer(model, X, Y, shuffle=False, validation_data=(X, Y))
    expected, last = numpy_epochs(model.get_weights()[0].astype(np.float64), 2)
    with toy.controller(
        strategy,
        trainer,
        trainer.evaluator(),
        global_batch_size=BATCH,
        steps_per_loop=None,
        actions=[lambda event: reports[event.split].append(event.metrics)],
    ) as controller:
        controller.train_and_evaluate(epochs=2)
    found = [{key: report[key] for key in report.keys() - {"epoch", "steps_per_second"}} for report in reports["train"]]
    names = {"loss": 1} if kind == "plain" else {"tracked": 1, "twice": 2}
    for report, loss in zip(found, expected, strict=True):
        assert report == {key: pytest.approx(factor * loss, rel=1e-5) for key, factor in names.items()}
    assert reports["eval"][-1] == {"examples": len(X), "loss": pytest.approx(last, rel=1e-5)}


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("name, loop", [("default", "graph"), ("default", "eager"), ("mirrored_x2", "graph")])
def test_compiled_losses_and_metrics_that_a_step_does_not_update_are_left_out_as_in_fit(name, loop):
    """The step returns the results of all metrics, after it has updated only one of its own."""
    tf_keras = pytest.importorskip("tf_keras")

    class Own(tf_keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            self.optimizer.minimize(loss, self.trainable_variables, tape)
            self.tracker.update_state(loss, tf.shape(x)[0])
            return {metric.name: metric.result() for metric in self.metrics}

    def make():
        tf_keras.utils.set_random_seed(1)
        model = Own([tf_keras.Input((3,)), tf_keras.layers.Dense(1)])
        model.tracker = tf_keras.metrics.Mean(name="tracked")
        model.compile(tf_keras.optimizers.SGD(RATE), "mse", metrics=["mae"])
        return model

    expected = make().fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0).history
    assert expected.keys() == {"tracked"}
    strategy = make_strategy(name)
    with strategy.scope():
        trainer = looplib.KerasTrainer(make(), X, Y, shuffle=False, validation_data=(X, Y))
    config = looplib.RunConfig(global_batch_size=BATCH, loop=loop)
    with looplib.Controller(
        config, trainer=trainer, evaluator=trainer.evaluator(), strategy=strategy, writers=[]
    ) as run:
        evaluated = run.train_and_evaluate(epochs=1)["eval"]
        found = run.train(epochs=1)
    assert found.keys() == {"tracked", "steps_per_second", "epoch"}
    assert found["tracked"] == pytest.approx(expected["tracked"][0], rel=1e-5)
    assert evaluated["loss"] == pytest.approx(trainer.model.evaluate(X, Y, verbose=0)[0], rel=1e-5)


@pytest.mark.slow
def test_a_step_that_returns_nothing_reports_no_loss(keras):
    trainer = looplib.KerasTrainer(compiled(keras, "nothing"), X, Y)
    run = looplib.Controller(looplib.RunConfig(global_batch_size=BATCH), trainer=trainer, writers=[])
    assert run.train(epochs=1).keys() == {"steps_per_second", "epoch"}


@pytest.mark.slow
def test_a_returned_loss_that_is_not_finite_ends_the_run_at_its_step(keras):
    trainer = looplib.KerasTrainer(compiled(keras, "bad"), X, Y, shuffle=False)
    with looplib.Controller(looplib.RunConfig(global_batch_size=BATCH), trainer=trainer, writers=[]) as controller:
        with pytest.raises(looplib.DivergenceError, match="at step 2, loss.* not finite"):
            controller.train(epochs=1)


@pytest.mark.slow
def test_the_step_of_the_guides_reports_as_in_fit(keras):
    """It returns the results of all metrics, among them the one object that Keras 3 has for the compiled ones."""

    class Guide(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                predicted = self(x, training=True)
                loss = self.compute_loss(x=x, y=y, y_pred=predicted)
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, predicted)
            return {metric.name: metric.result() for metric in self.metrics}

    def make():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((3,))
        model = Guide(inputs, keras.layers.Dense(1)(inputs))
        model.compile(keras.optimizers.SGD(RATE), "mse", metrics=["mae"])
        return model

    history = make().fit(X, Y, batch_size=5, epochs=1, shuffle=False, verbose=0).history
    trainer = looplib.KerasTrainer(make(), X, Y, shuffle=False)
    controller = toy.controller(make_strategy("default"), trainer, global_batch_size=5, steps_per_loop=4)
    found = controller.train(4)
    assert {name: found[name] for name in history} == pytest.approx(
        {name: values[0] for name, values in history.items()}, rel=1e-5
    )


@pytest.mark.slow
def test_a_metric_of_several_results_or_of_an_array_has_a_number_for_each(keras):
    class Both(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="both")
            self.total = self.add_weight(name="total", shape=(), initializer="zeros")

        def update_state(self, targets, predicted, sample_weight=None):
            self.total.assign_add(tf.reduce_sum(targets))

        def result(self):
            total = tf.convert_to_tensor(self.total)
            return {"total": total, "powers": tf.stack([total, total**2])} if keras.__name__ == "keras" else total

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[Both()])
    trainer = looplib.KerasTrainer(model, X, Y, shuffle=False)
    controller = toy.controller(make_strategy("default"), trainer, global_batch_size=10, steps_per_loop=2)
    found, total = controller.train(2), Y.sum()
    if keras.__name__ == "keras":
        assert (found["total"], found["powers_0"], found["powers_1"]) == pytest.approx(
            (total, total, total**2), rel=1e-4
        )
    else:
        assert found["both"] == pytest.approx(total, rel=1e-4)


def tracking(keras, mixes=False):
    """Returns a model whose steps return what they compute from trackers, by other names than theirs."""

    class Tracking(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, use_bias=False)
            self.total, self.size = keras.metrics.Mean(name="total"), keras.metrics.Mean(name="size")

        @property
        def metrics(self):
            return [self.total, self.size]

        def call(self, inputs):
            return self.dense(inputs)

        def logs(self, data, training):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=training) - y))
            self.total.update_state(loss, tf.shape(x)[0])
            self.size.update_state(tf.reduce_mean(tf.abs(x)), tf.shape(x)[0])
            total, size = self.total.result(), self.size.result()
            found = {"loss": total, "nested": {"ratio": total / size}, "both": tf.stack([total, size]), "alone": loss}
            return tape, loss, found | ({"mixed": total + loss} if mixes else {})

        def train_step(self, data):
            tape, loss, found = self.logs(data, True)
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            return found

        def test_step(self, data):
            return self.logs(data, False)[2]

    keras.utils.set_random_seed(1)
    model = Tracking()
    model(X)
    model.compile(keras.optimizers.SGD(RATE))
    return model


def flat(history):
    """Returns the logs of an epoch as looplib names them in reports; in tf_keras there is a dict in them."""
    logs = history | history.get("nested", {})
    arrays = {f"both_{number}": value for number, value in enumerate(logs["both"])}
    return arrays | {name: logs[name] for name in ("loss", "ratio", "alone")}


@pytest.mark.parametrize(("name", "loop"), [("mirrored_x2", "graph"), ("default", "eager"), *more([("default", "auto"), ("mirrored_x2", "eager")])])  # fmt: skip
def test_what_a_step_computes_from_metrics_is_the_last_value_by_any_name(name, loop, keras):
    strategy, reports = make_strategy(name), {}
    expected = tracking(keras).fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0, validation_data=(X, Y))
    theirs = {key: values[0] for key, values in expected.history.items()}
    evaluated = flat({key.removeprefix("val_"): value for key, value in theirs.items() if key.startswith("val_")})
    trained = flat({key: value for key, value in theirs.items() if not key.startswith("val_")})
    with strategy.scope():
        trainer = looplib.KerasTrainer(tracking(keras), X, Y, shuffle=False, validation_data=(X, Y))
    with toy.controller(
        strategy,
        trainer,
        trainer.evaluator(),
        global_batch_size=BATCH,
        steps_per_loop=None,
        loop=loop,
        actions=[lambda event: reports.update({event.split: event.metrics})],
    ) as controller:
        controller.train_and_evaluate(epochs=1)
    for split, logs in (("train", trained), ("eval", evaluated)):
        alone = {"alone": logs["loss"]}  # a mean over examples, where fit has the last batch
        assert {key: reports[split][key] for key in logs} == pytest.approx(logs | alone, rel=1e-5), split


def test_a_value_of_metrics_and_of_the_batch_is_that_of_no_replica(keras):
    strategy = make_strategy("mirrored_x2")
    with strategy.scope(), pytest.raises(MetricError, match="mixed.*metrics.*one replica"):
        trainer = looplib.KerasTrainer(tracking(keras, mixes=True), X, Y, shuffle=False)
        looplib.Controller(looplib.RunConfig(global_batch_size=BATCH), trainer=trainer, strategy=strategy, writers=[])


def test_callbacks_get_arrays_as_in_fit(keras):
    seen = {"fit": [], "looplib": []}
    targets = np.eye(3, dtype=np.float32)[np.abs(X).argmax(1)]

    def model():
        class PerClass(keras.metrics.Metric):
            def __init__(self):
                super().__init__(name="per_class")
                self.total = self.add_weight(name="total", shape=(3,), initializer="zeros")

            def update_state(self, targets, predicted, sample_weight=None):
                self.total.assign_add(tf.reduce_sum(targets * predicted, axis=0))

            def result(self):
                return tf.convert_to_tensor(self.total)

            def reset_state(self):
                self.total.assign(tf.zeros([3]))

        keras.utils.set_random_seed(1)
        made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
        made.compile(keras.optimizers.SGD(RATE), "mse", metrics=[PerClass()])
        return made

    def calling(kind):
        class Logs(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                seen[kind].append(dict(logs))

        return [Logs()]

    model().fit(
        X, targets, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, validation_data=(X, targets),
        callbacks=calling("fit"),
    )  # fmt: skip
    trainer = looplib.KerasTrainer(
        model(), X, targets, shuffle=False, validation_data=(X, targets), callbacks=calling("looplib")
    )
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=BATCH), trainer=trainer, evaluator=trainer.evaluator(), writers=[]
    ) as controller:
        controller.train_and_evaluate(epochs=2)
    for theirs, ours in zip(seen["fit"], seen["looplib"], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, rtol=1e-5, err_msg=name)
