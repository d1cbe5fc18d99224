"""Predictions for rows without targets: what Keras and numpy compute, in the order of the rows, with their ids."""

import csv
import json
import os
import pathlib
import subprocess

import numpy as np
import pytest
import tensorflow as tf
from conftest import make_strategy, more
from paths import PYTHONPATH

import looplib
from looplib.errors import (
    DatasetError,
    EmptyDataError,
    EndlessDataError,
    MissingPartError,
    PredictionError,
    SettingError,
)

N, BATCH = 37, 8  # the last batch has fewer rows
X = np.random.default_rng(0).normal(size=(N, 4)).astype("float32")
Y = (X[:, 0] > 0).astype("int64")
WORDS = np.array([f"row, {number}" for number in range(N)])
BOTH = [("keras", "mirrored_x2"), *more([("tf_keras", "mirrored_x2"), ("keras", "default"), ("tf_keras", "default")])]


def of_one_output(keras):
    return keras.Sequential([keras.layers.InputLayer((4,)), keras.layers.Dense(2, "tanh")])


def of_columns(keras):
    inputs = {name: keras.Input((1,), name=name) for name in "ab"}
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Concatenate()(list(inputs.values()))))


def of_many_outputs(keras):
    """Two inputs; outputs of two dimensions and of one, in a dict."""
    first, second = keras.Input((4,), name="first"), keras.Input((4,), name="second")
    both = keras.layers.Concatenate()([first, second])
    maps = keras.layers.Reshape((2, 3))(keras.layers.Dense(6)(both))
    return keras.Model([first, second], {"maps": maps, "score": keras.layers.Dense(1)(both)})


def of_a_list(keras):
    inputs = keras.Input((4,))
    return keras.Model(inputs, [keras.layers.Dense(2)(inputs), keras.layers.Dense(3)(inputs)])


MODELS = {
    "one": (of_one_output, X, Y),
    "columns": (of_columns, {"a": X[:, :1], "b": X[:, 1:2]}, X[:, :2]),
    "many": (of_many_outputs, (X, X[::-1].copy()), {"maps": np.zeros([N, 2, 3]), "score": X[:, :1]}),
    "list": (of_a_list, X, (np.zeros([N, 2]), np.zeros([N, 3]))),
}


def trained(keras, name, kind="one", **settings):
    """A trainer on a strategy, with a controller that has trained it a little."""
    make, x, y = MODELS[kind]
    strategy = make_strategy(name)
    with strategy.scope():
        model = make(keras)
        model.compile("sgd", "mse" if kind != "one" else keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        trainer = looplib.KerasTrainer(model, x, y, validation_data=(x, y))
        evaluator = trainer.evaluator(**settings)
    config = looplib.RunConfig(global_batch_size=BATCH)
    controller = looplib.Controller(config, trainer=trainer, evaluator=evaluator, strategy=strategy, writers=[])
    controller.train(3)
    return trainer, controller


def by_keras(keras, model, kind="one", x=None):
    """What `model.predict` says of the same weights on one device."""
    alone = MODELS[kind][0](keras)
    alone.set_weights(model.get_weights())
    x = MODELS[kind][1] if x is None else x
    return alone.predict(list(x) if isinstance(x, tuple) else x, batch_size=BATCH, verbose=0)


def check(found, expected):
    tf.nest.assert_same_structure(found, expected)
    for ours, theirs in zip(tf.nest.flatten(found), tf.nest.flatten(expected)):
        assert type(ours) is np.ndarray and ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def read(folder):
    pieces = sorted(pathlib.Path(folder).glob("piece-*"))
    return [json.loads(line) for path in pieces for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("family, name", BOTH)
def test_arrays_are_predicted_as_by_keras(family, name, kind):
    keras = pytest.importorskip(family)
    trainer, controller = trained(keras, name, kind)
    x = MODELS[kind][1]
    for size in (None, 1, 6, 64):  # one example is less than there are replicas
        check(trainer.predict(x, batch_size=size), by_keras(keras, trainer.model, kind))
    controller.train(6)  # goes on as if nothing was predicted
    controller.close()
    check(trainer.predict(x), by_keras(keras, trainer.model, kind))


@pytest.mark.parametrize("family", ["keras", *more(["tf_keras"])])
def test_a_prediction_needs_no_controller_and_equals_numpy(family):
    keras = pytest.importorskip(family)
    model = of_one_output(keras)
    model.compile("sgd", "mse")
    trainer = looplib.KerasTrainer(model, X, X[:, :2])
    kernel, bias = model.get_weights()
    data = tf.data.Dataset.from_tensor_slices((X, X[:, :2])).batch(33)
    for x in (X, X.tolist(), data, data.map(lambda x, y: x), lambda: (X[i : i + 9] for i in range(0, N, 9))):
        np.testing.assert_allclose(trainer.predict(x), np.tanh(X @ kernel + bias), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("family, name", BOTH)
def test_rows_without_targets_are_predicted_in_files_beside_an_evaluation(family, name, tmp_path):
    keras = pytest.importorskip(family)
    new = np.concatenate([X, X + 1])[: N + 8]
    ids = np.arange(len(new)) * 10**15
    trainer, controller = trained(keras, name, predict_data=new, predict_ids=ids)
    assert controller.evaluate()["eval"]["examples"] == N
    records = read(controller.predict(tmp_path, piece=10)["eval"])
    assert [record["id"] for record in records] == ids.tolist()
    check(np.array([record["prediction"] for record in records], "float32"), by_keras(keras, trainer.model, x=new))


@pytest.mark.parametrize("as_dataset", [True, *more([False])])
def test_a_column_names_the_rows_and_is_no_input(as_dataset, tmp_path):
    import keras

    columns = {**MODELS["columns"][1], "word": WORDS}
    data = tf.data.Dataset.from_tensor_slices(columns).batch(BATCH) if as_dataset else columns
    trainer, controller = trained(keras, "default", "columns", predict_data=data, predict_ids="word")
    (folder,) = controller.predict(tmp_path, format="csv", piece=20).values()
    rows = [row for path in sorted(pathlib.Path(folder).glob("*.csv")) for row in csv.DictReader(path.open(newline=""))]
    assert [row["word"] for row in rows] == WORDS.tolist() and rows[0].keys() == {
        "word",
        "prediction[0]",
        "prediction[1]",
    }
    found = np.array([[row["prediction[0]"], row["prediction[1]"]] for row in rows], "float32")
    check(found, by_keras(keras, trainer.model, "columns"))


def test_a_column_of_a_table_names_the_rows_and_is_no_input(tmp_path):
    import keras

    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(X, columns=list("abcd"))
    table.insert(1, "word", WORDS)
    trainer, controller = trained(keras, "default", predict_data=table, predict_ids="word")
    records = read(controller.predict(tmp_path)["eval"])
    assert [record["word"] for record in records] == WORDS.tolist()
    check(np.array([record["prediction"] for record in records], "float32"), by_keras(keras, trainer.model))
    with pytest.raises(DatasetError, match="'words', and the rows have 'a', 'word'"):
        trainer.evaluator(predict_data=table, predict_ids="words")
    with pytest.raises(PredictionError, match=r"predict for, which are float32 \(None, 3\): "):  # and no word "ids"
        trainer.evaluator(predict_data=table.drop(columns="a"), predict_ids="word")


def test_columns_of_a_table_are_taken_by_their_names():
    import keras

    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(X, columns=list("abcd"))
    model = of_one_output(keras)
    model.compile("sgd", "mse", metrics=["mae"])
    turned = table[list("dbca")]
    trainer = looplib.KerasTrainer(model, table, X[:, :2], validation_data=(turned, X[:, :2]))
    np.testing.assert_allclose(trainer.predict(turned), model.predict(X), atol=1e-6)
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=BATCH), trainer=trainer, evaluator=trainer.evaluator()
    )
    expected = model.evaluate(X, X[:, :2], return_dict=True)
    assert controller.evaluate()["eval"]["mae"] == pytest.approx(expected["mae"], rel=1e-5)
    for wrong in (table.rename(columns={"a": "e"}), table.assign(e=1.0), table.drop(columns="d")):
        with pytest.raises(DatasetError, match="'a', 'b', 'c', 'd', and now gets one with"):
            trainer.predict(wrong)


@pytest.mark.parametrize("family", ["keras", *more(["tf_keras"])])
def test_the_arguments_of_predict_are_those_of_keras(family, capsys):
    keras = pytest.importorskip(family)
    model = of_one_output(keras)
    model.compile("sgd", "mse")
    trainer = looplib.KerasTrainer(model, X, X[:, :2])
    theirs = model.predict(X, BATCH, 2, 3)
    assert "3/3" in capsys.readouterr().out
    np.testing.assert_allclose(trainer.predict(X, BATCH, 2, 3), theirs, rtol=1e-5, atol=1e-6)
    assert "3/3" in capsys.readouterr().out
    trainer.predict(X, BATCH, verbose=1)
    assert "5/5" in capsys.readouterr().out
    trainer.predict(X, BATCH)
    assert not capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("family", ["keras", *more(["tf_keras"])])
def test_a_job_that_predicts_restores_the_model_of_the_training(family, tmp_path):
    """As `--mode=predict` does: an evaluator without a trainer."""
    keras = pytest.importorskip(family)

    def built():
        model = of_one_output(keras)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        trainer = looplib.KerasTrainer(model, X, Y, validation_data=(X, Y))
        return trainer, trainer.evaluator(predict_data=X + 1)

    trainer, evaluator = built()
    config = looplib.RunConfig(global_batch_size=BATCH)
    settings = dict(model_dir=tmp_path / "run", writers=[])
    with looplib.Controller(config, trainer=trainer, evaluator=evaluator, **settings) as controller:
        controller.train(3)
        (folder,) = controller.predict().values()
    with looplib.Controller(config, evaluator=built()[1], **settings) as controller:
        records = read(controller.predict(tmp_path / "again")["eval"])
    expected = by_keras(keras, trainer.model, x=X + 1)
    check(np.array([record["prediction"] for record in records], "float32"), expected)
    assert records == read(folder)


class Unlabelled(looplib.Evaluator):
    """Evaluates on labels, and predicts for rows that have none."""

    def dataset(self, context):
        return context.resident((X, Y))

    def step_fn(self, inputs):
        return {"accuracy": tf.equal(tf.argmax(self.model(inputs[0]), 1), inputs[1])}

    def predict_dataset(self, context):
        rows = {"x": X + 1, "name": WORDS}
        return context.indices(N).map(lambda i: {key: tf.gather(value, i) for key, value in rows.items()})

    def predict_fn(self, inputs):
        return {"name": inputs["name"], "logits": self.model(inputs["x"], training=False)}


@pytest.mark.parametrize("name", ["mirrored_x2", *more(["default"])])
def test_an_evaluator_predicts_for_another_data_set_than_it_evaluates(name, tmp_path):
    import keras

    with make_strategy(name).scope():
        model = of_one_output(keras)
    config = looplib.RunConfig(global_batch_size=BATCH)
    with looplib.Controller(
        config, evaluator=Unlabelled(model), strategy=make_strategy(name), writers=[]
    ) as controller:
        assert controller.evaluate()["eval"]["examples"] == N
        records = read(controller.predict(tmp_path)["eval"])
    kernel, bias = model.get_weights()
    assert [record["name"] for record in records] == WORDS.tolist()
    expected = np.tanh((X + 1) @ kernel + bias)
    np.testing.assert_allclose([record["logits"] for record in records], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["keras", *more(["tf_keras"])])
def test_targets_that_are_missing_are_a_sentence(family):
    keras = pytest.importorskip(family)
    model = of_one_output(keras)
    model.compile("sgd", "mse")
    trainer = looplib.KerasTrainer(model, X, X[:, :2])
    data = tf.data.Dataset.from_tensor_slices(X).batch(BATCH)
    for build in (
        lambda: looplib.KerasTrainer(model, X),
        lambda: looplib.KerasTrainer(model, data),
        lambda: trainer.evaluator(X),
        lambda: trainer.evaluator(data.map(lambda x: (x, None))),
    ):
        with pytest.raises(DatasetError, match=r"no targets.*trainer\.predict\(x\)"):
            build()


def test_ids_that_fit_no_rows_are_a_sentence():
    import keras

    trainer, _ = trained(keras, "default")
    data = tf.data.Dataset.from_tensor_slices(X).batch(BATCH)
    columns = {"x": X, "word": np.arange(N) / 2}
    for settings, words in [
        (dict(predict_ids=np.arange(N)), "without predict_data"),
        (dict(predict_data=data, predict_ids=np.arange(N)), "the rows are a data set"),
        (dict(predict_data=X, predict_ids=np.arange(N - 1)), "predict_ids has 36 ids, and predict_data 37 rows"),
        (dict(predict_data=X, predict_ids=np.arange(N) / 2), "ids of rows are float32"),
        (dict(predict_data=columns, predict_ids="word"), "ids of rows are float"),
        (dict(predict_data=X, predict_ids="word"), "the rows have no columns; expected a dict of columns"),
        (dict(predict_data=data, predict_ids="word"), "the rows have no columns; expected a dict of columns"),
        (dict(predict_data="new.csv"), "'new.csv'; read the file"),
        (dict(predict_data={"x": X}, predict_ids="word"), "'word', and the rows have 'x'"),
    ]:
        with pytest.raises(DatasetError, match=words):
            trainer.evaluator(**settings)


@pytest.mark.parametrize(
    "family, name", [("keras", "default"), *more([("tf_keras", "default"), ("keras", "mirrored_x2")])]
)
def test_rows_that_the_model_does_not_take_are_a_sentence_before_a_controller_is_built(family, name):
    keras = pytest.importorskip(family)
    trainers = []
    for kind in ("one", "columns"):
        make, x, y = MODELS[kind]
        with make_strategy(name).scope():
            model = make(keras)
            model.compile("sgd", "mse")
            trainers.append(looplib.KerasTrainer(model, x, X[:, :2], validation_data=(x, X[:, :2])))
    plain, columns = trainers
    data, texts = tf.data.Dataset.from_tensor_slices(X), MODELS["columns"][1] | {"a": WORDS[:, None]}
    for trainer, rows, error, words in [
        (plain, X[:, :3], PredictionError, r"float32 \(None, 3\): .*4"),
        (plain, X.astype(str), PredictionError, "string is no float32"),
        (plain, data, PredictionError, r"float32 \(4,\): "),
        (plain, X[:0], EmptyDataError, "0 rows"),
        (plain, data.batch(BATCH).take(0), EmptyDataError, "0 rows"),
        (plain, data.batch(BATCH).repeat(), EndlessDataError, "never end"),
        (columns, {"a": X[:, :1]}, PredictionError, "a: float32 .*b"),
        (columns, texts, PredictionError, "a: string .* string is no float32"),
    ]:
        with pytest.raises(error, match=words):
            trainer.evaluator(predict_data=rows)
        with pytest.raises(error, match=words):
            trainer.predict(rows)


def test_an_evaluator_may_have_rows_to_predict_for_alone(tmp_path):
    import keras

    model = of_one_output(keras)
    model.compile("sgd", "mse")
    trainer = looplib.KerasTrainer(model, X, X[:, :2])
    config = looplib.RunConfig(global_batch_size=BATCH)
    evaluator = trainer.evaluator(predict_data=X + 1, predict_ids=WORDS)
    with looplib.Controller(config, trainer=trainer, evaluator=evaluator, writers=[]) as controller:
        for evaluate in (controller.evaluate, lambda: controller.train_and_evaluate(3, 1)):
            with pytest.raises(MissingPartError, match=r"'eval' has rows to predict for.*trainer\.evaluator\(x, y"):
                evaluate()
        controller.train(3)
        records = read(controller.predict(tmp_path)["eval"])
    kernel, bias = model.get_weights()
    assert [record["id"] for record in records] == WORDS.tolist()
    expected = np.tanh((X + 1) @ kernel + bias)
    np.testing.assert_allclose([record["prediction"] for record in records], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_binary_predicts_for_new_rows_without_data_to_evaluate_on(python, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    np.save(tmp_path / "rows.npy", X + 1)

    def run(*flags):
        command = [python, program, f"--model_dir={tmp_path}/run", *flags]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": PYTHONPATH})
        return done.returncode, done.stderr

    rows = ["--mode=predict", f"--config.rows={tmp_path}/rows.npy"]
    assert run()[0] == 0
    code, log = run(*rows, "--config.breaks=false")
    assert code == 0 and "settings differ" not in log  # which the command gives
    assert len(read(tmp_path / "run" / "predictions" / "eval")) == N
    code, log = run(*rows, "--config.breaks", f"--predictions={tmp_path}/others")
    line = log.strip().splitlines()[-1]
    assert code == 1 and "ZeroDivisionError" in line and "resume" not in line


PROGRAM = """
import dataclasses, keras, looplib, numpy as np, tensorflow as tf
from looplib import launch

@dataclasses.dataclass
class Config:
    rows: str = ""
    breaks: bool = False

class Breaks(keras.layers.Layer):
    def call(self, x):
        return tf.ensure_shape(tf.numpy_function(lambda x: x / (1 // 0), [x], tf.float32), x.shape)

def build(config):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), *[Breaks()] * config.breaks])
    model.compile("sgd", "mse")
    trainer = looplib.KerasTrainer(model, np.ones([8, 4]), np.ones([8, 2]))
    return trainer, trainer.evaluator(predict_data=np.load(config.rows)) if config.rows else None

launch.run(build, Config(), train_steps=2, global_batch_size=8)
"""


@pytest.mark.parametrize("name", ["default", *more(["mirrored_x2"])])
def test_a_prediction_is_traced_once_for_one_form_of_rows(name):
    import keras

    traces = []

    class Counting(keras.layers.Layer):
        scale = 1.0

        def call(self, x):
            traces.append(x.shape)
            return x * self.scale

    with make_strategy(name).scope():
        counting = Counting()
        model = keras.Sequential([keras.Input((4,)), counting])
        model.compile("sgd", "mse")
        trainer = looplib.KerasTrainer(model, X, X)
    trainer.predict(X)
    before = len(traces)
    for x in (X + 1, X[:5], X[:1]):
        np.testing.assert_array_equal(trainer.predict(x, verbose=0), x)
    np.testing.assert_array_equal(trainer.predict(X, batch_size=BATCH, steps=2), X[: 2 * BATCH])
    assert len(traces) == before
    counting.scale = 2.0  # which the trace has as a constant
    np.testing.assert_array_equal(trainer.predict(X), 2 * X)
    with pytest.raises(SettingError, match=r"KerasTrainer.predict got callbacks=\[\]"):
        trainer.predict(X, callbacks=[])


def test_outputs_that_make_no_array_are_a_sentence():
    import keras

    model = keras.Sequential([keras.Input((None, 1)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    trainer = looplib.KerasTrainer(model, X[..., None], X[..., None])
    with pytest.raises(PredictionError, match="in different batches"):
        trainer.predict(lambda: (X[:4, :length, None] for length in (2, 3)))


def test_predictions_of_rows_or_ids_that_have_changed_are_refused(tmp_path):
    strategy, keras = make_strategy("default"), pytest.importorskip("keras")
    with strategy.scope():
        model = of_one_output(keras)
        model.compile("sgd", "mse")
        trainer = looplib.KerasTrainer(model, X, X[:, :2], validation_data=(X, X[:, :2]))

    def predict(rows, ids):
        evaluator = trainer.evaluator(predict_data=rows, predict_ids=ids)
        config = looplib.RunConfig(global_batch_size=BATCH)
        with looplib.Controller(config, trainer=trainer, evaluator=evaluator, writers=[]) as controller:
            controller.predict(tmp_path / "rows")

    changed, moved = X.copy(), WORDS.copy()
    changed[3, 0], moved[:2] = 7.0, moved[1::-1]
    predict(X, WORDS)
    predict(X.copy(), WORDS.copy())
    for rows, ids in ((changed, WORDS), (X, moved)):
        with pytest.raises(PredictionError, match="begun with another source .data was"):
            predict(rows, ids)
