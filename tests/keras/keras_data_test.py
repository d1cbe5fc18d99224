"""Data of compiled Keras models beside `fit`: of unknown length, and of every kind of element."""

import itertools

import flat_config
import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
from conftest import make_strategy

import looplib
from looplib.data.arrays import as_array
from looplib.errors import DataError, DatasetError, EndlessDataError
from looplib.keras import rows

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
    return trainer.model, flat_config.controller(trainer=trainer, evaluator=evaluator, **settings), reports


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_callbacks_take_epochs_of_unknown_length(keras):
    fit, theirs, ours = build(keras), keras.callbacks.History(), keras.callbacks.History()
    fit.fit(generated(None), epochs=EPOCHS, verbose=0, callbacks=[theirs])
    model, controller, _ = controlled(lambda: build(keras), generated(None), arguments={"callbacks": [ours]})
    with controller:
        controller.train(epochs=EPOCHS)
    assert ours.epoch == theirs.epoch
    np.testing.assert_allclose(ours.history["loss"], theirs.history["loss"], rtol=1e-5)


@pytest.mark.slow
def test_a_pass_of_another_length_is_an_error():
    draws = itertools.count()

    def batches():  # one more in the second pass of the training; the first two look at the data
        return ((X[:BATCH], Y[:BATCH]) for _ in range(3 if next(draws) < 3 else 4))

    signature = tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])
    data = tf.data.Dataset.from_generator(batches, output_signature=signature)
    _, controller, reports = controlled(lambda: build(keras3), data)
    with controller, pytest.raises(DataError, match="3.*4"):
        controller.train(epochs=EPOCHS)
    assert len(reports) == 2  # what is too much is found where the next pass should begin


@pytest.mark.slow
def test_data_that_never_ends_is_trained_on_by_steps():
    endless = filtered(None).repeat()
    for arguments in ({}, {"callbacks": [keras3.callbacks.History()]}):
        data = tf.data.Dataset.from_tensors((X[:BATCH], Y[:BATCH])).repeat()
        _, controller, _ = controlled(lambda: build(keras3), data, arguments=arguments)
        with controller, pytest.raises(EndlessDataError):
            controller.train(epochs=1)
    _, controller, _ = controlled(lambda: build(keras3), endless)
    with controller:
        controller.train(7)  # is not counted
        assert controller.global_step == 7


# Kinds of elements and arrays.


def unlabelled(keras):
    """Returns a model with a `train_step` that counts whether targets and weights are None."""

    class Autoencoder(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, inputs):
            return self.dense(inputs)

        def train_step(self, data):
            x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
            weights = tf.ones_like(x[:, 0]) if weights is None else tf.cast(weights, tf.float32)
            target = x if y is None else tf.zeros_like(x)
            with tf.GradientTape() as tape:
                losses = tf.reduce_sum((self(x) - target) ** 2, axis=1) * weights
                loss = tf.reduce_mean(losses)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
            return {"loss": loss}

    keras.utils.set_random_seed(3)
    model = Autoencoder()
    model.compile(keras.optimizers.SGD(0.05))
    return model


def sparse_or_dense(keras):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((3,), sparse=True)
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return model


def of_ragged(keras):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((None,), ragged=True)
    mean = keras.layers.Lambda(lambda rows: tf.reduce_mean(rows, axis=1)[:, None], output_shape=(1,))(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(mean))
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return model


def by_name(keras):
    keras.utils.set_random_seed(3)
    inputs = {name: keras.Input((1,), name=name) for name in ("a", "b")}
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()([*inputs.values()])))
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return model


def pandas():
    return pytest.importorskip("pandas")


def scipy():
    return pytest.importorskip("scipy.sparse")


SPARSE = np.where(X > 0.3, X, 0)
RAGGED = tf.RaggedTensor.from_row_lengths(np.linspace(-1, 1, 100, dtype="float32"), [2, 3] * 20)
WEIGHTS = np.linspace(0, 2, 40).astype("float32")
slices = lambda *parts: tf.data.Dataset.from_tensor_slices(parts if len(parts) > 1 else parts[0]).batch(BATCH)
KINDS = {  # of a model, and the arguments of fit
    "(x, y, None)": (build, lambda: dict(x=slices(X, Y).map(lambda x, y: (x, y, None)))),
    "(x, None)": (unlabelled, lambda: dict(x=slices(X).map(lambda x: (x, None)))),
    "(x, None, w)": (unlabelled, lambda: dict(x=slices(X, WEIGHTS).map(lambda x, w: (x, None, w)))),
    "a data set of sparse tensors": (sparse_or_dense, lambda: dict(x=slices(tf.sparse.from_dense(SPARSE), Y))),
    "a sparse tensor": (sparse_or_dense, lambda: dict(x=tf.sparse.from_dense(SPARSE), y=Y)),
    "scipy": (sparse_or_dense, lambda: dict(x=scipy().csr_matrix(SPARSE.astype("float64")), y=Y)),
    "a data set of ragged tensors": (of_ragged, lambda: dict(x=slices(RAGGED, Y))),
    "a ragged tensor": (of_ragged, lambda: dict(x=RAGGED, y=Y)),
    "pandas": (
        build,
        lambda: dict(x=pandas().DataFrame(X), y=pandas().Series(Y[:, 0]), sample_weight=pandas().Series(WEIGHTS)),
    ),
    "pandas by name": (by_name, lambda: dict(x={"a": pandas().Series(X[:, 0]), "b": pandas().Series(X[:, 1])}, y=Y)),
}


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["default", "mirrored_x2"])
def test_each_kind_of_data_that_fit_takes_trains_as_in_fit(kind, keras, strategy):
    make, arguments = KINDS[kind]
    fit = make(keras)
    own_batches = {} if isinstance(arguments()["x"], tf.data.Dataset) else {"batch_size": BATCH}
    fit.fit(**arguments(), **own_batches, epochs=2, shuffle=False, verbose=0)
    x = arguments().pop("x")
    others = {name: value for name, value in arguments().items() if name != "x"}
    model, controller, _ = controlled(lambda: make(keras), x, strategy, {**others, "shuffle": False})
    with controller:
        controller.train(epochs=2)
    for ours, theirs in zip(model.get_weights(), fit.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_what_fit_does_not_take_or_leaves_out_is_refused_in_a_sentence():
    frame = pandas().DataFrame({"a": X[:, 0], "b": X[:, 1] > 0})
    with pytest.raises(DatasetError, match="DataFrame"):
        looplib.KerasTrainer(by_name(keras3), frame, Y)
    with pytest.raises(DatasetError, match="sample_weight"):
        looplib.KerasTrainer(unlabelled(keras3), X, sample_weight=WEIGHTS)


@pytest.mark.slow
def test_class_weights_of_sparse_examples_are_those_of_fit():
    x, y, weights = tf.sparse.from_dense(SPARSE), (Y[:, 0] > 0).astype("int64"), {0: 0.5, 1: 2.0}
    fit = sparse_or_dense(keras3)
    fit.fit(x, y, class_weight=weights, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    arguments = {"y": y, "class_weight": weights, "shuffle": False}
    model, controller, _ = controlled(lambda: sparse_or_dense(keras3), x, arguments=arguments)
    with controller:
        controller.train(epochs=2)
    np.testing.assert_allclose(model.get_weights()[0], fit.get_weights()[0], rtol=1e-5)


def test_rows_of_sparse_arrays_are_those_of_dense_ones():
    """Of more dimensions too, and of places that are out of order, or given twice."""
    ids = [3, 0, 3, 1]
    repeated = scipy().coo_matrix(([1.0, 2.0, 3.0], ([3, 0, 3], [0, 1, 0])), (4, 3))
    cube = np.where(np.arange(24) % 5 == 0, np.arange(24), 0).reshape(4, 2, 3)
    for given, dense in [(repeated, repeated.toarray()), (tf.sparse.from_dense(cube), cube)]:
        found = rows.take(as_array(given, "float32", "KerasTrainer"), ids)
        np.testing.assert_array_equal(tf.sparse.to_dense(found), dense[ids])


@pytest.mark.slow
def test_an_evaluation_takes_sparse_and_ragged_data_and_none():
    for kind in ("(x, y, None)", "scipy", "a ragged tensor"):
        make, arguments = KINDS[kind]
        model, data = make(keras3), arguments()
        held_out = (data["x"], data["y"]) if "y" in data else data["x"]
        own_batches = {} if isinstance(data["x"], tf.data.Dataset) else {"batch_size": BATCH}
        expected = model.evaluate(**data, **own_batches, verbose=0, return_dict=True)
        others = {"y": data.get("y"), "validation_data": held_out}
        _, controller, _ = controlled(lambda: model, data["x"], "default", others)
        with controller:
            found = controller.evaluate()["eval"]
        np.testing.assert_allclose([found[name] for name in expected], [*expected.values()], rtol=1e-5)
        assert found["examples"] == 40
