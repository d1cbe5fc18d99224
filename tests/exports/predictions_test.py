"""Predictions: one record for each example, in order, whatever predicts them and however often it is killed."""

import csv
import itertools
import json
import pathlib
import random
import signal
import time

import faulty
import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy, more, repetitions

import looplib
from looplib.errors import PredictionError
from looplib.exports.folder import encode, rows_of

LOOP = repetitions("eager", "graph")  # where a test names none: tracing is most of what a small prediction costs
WORDS = [b"", b"digit", "Gl\u00fcck".encode()]


class Predicts(toy.RegressionEvaluator):
    """Predicts numbers and words, for arrays or a pipeline of its own."""

    def __init__(self, model, num_examples=toy.NUM_EXAMPLES, pipeline=False, x=toy.X):
        super().__init__(model, num_examples)
        self.pipeline, self.x = pipeline, x

    def dataset(self, context):
        if not self.pipeline:
            return context.indices(self.num_examples).map(lambda i: (tf.gather(self.x, i), tf.gather(toy.Y, i)))
        data = tf.data.Dataset.from_tensor_slices((self.x[: self.num_examples], toy.Y[: self.num_examples]))
        data = data.shard(context.num_pipelines, context.pipeline_index)
        return data.batch(context.per_replica_batch_size)

    def predict_fn(self, inputs):
        x, y = inputs
        return {"logits": self.model(x, training=False), "word": tf.gather(tf.constant(WORDS), y)}


class PredictsAll(Predicts):
    """Predicts every kind of output."""

    def predict_fn(self, inputs):
        x, y = inputs
        nested = tf.RaggedTensor.from_row_lengths(tf.repeat(y, 2 * y), tf.repeat(y, 2))
        return {
            **super().predict_fn(inputs),
            "outer": x[:, :2, None] * x[:, None, :3],
            "repeated": tf.RaggedTensor.from_row_lengths(tf.repeat(y, y), y),
            "nested": tf.RaggedTensor.from_row_lengths(nested, 2 * tf.ones_like(y)),
            "half": tf.cast(y, tf.bfloat16) / 2,
            "right": tf.equal(y, 1),
        }


def expected(n=toy.NUM_EXAMPLES):
    """The records, by numpy."""
    x, y = toy.X[:n], toy.Y[:n]
    return [
        {
            "logits": x[i] @ toy.KERNEL,
            "outer": np.outer(x[i, :2], x[i, :3]),
            "word": WORDS[y[i]].decode(),
            "repeated": [y[i]] * y[i],
            "nested": [[y[i]] * y[i]] * 2,
            "half": y[i] / 2,
            "right": y[i] == 1,
        }
        for i in range(n)
    ]  # fmt: skip


def check(records, n=toy.NUM_EXAMPLES, names=("logits", "word")):
    assert len(records) == n
    for record, right in zip(records, expected(n)):
        assert record.keys() == set(names or right)
        for name, value in record.items():
            if name in ("logits", "outer"):
                np.testing.assert_allclose(value, right[name], rtol=1e-5, atol=1e-6)
            else:
                assert value == right[name], name


def pieces(folder):
    return sorted(path for path in pathlib.Path(folder).iterdir() if path.name.startswith("piece-"))


def read(folder):
    return [json.loads(line) for path in pieces(folder) for line in path.read_text().splitlines()]


def predict(strategy, folder, build=Predicts, batch=8, loop=LOOP, weights=None, **settings):
    """Predicts with the toy regression; returns the folder of the pieces."""
    with strategy.scope():
        model = toy.Regression().model
    if weights is not None:
        model.set_weights(weights)
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=batch, loop=loop), evaluator=build(model), strategy=strategy, writers=[]
    )
    return controller.predict(folder, **settings)["eval"]


EACH = [
    ("default", 37, "graph"),
    ("mirrored_x2", 37, "graph"),
    ("one_device", 16, "eager"),
]
ALL = [
    case
    for case in itertools.product(
        ["default", "one_device", "mirrored_x2", "mirrored_x4"], [1, 16, 37], ["graph", "eager"]
    )
    if case not in EACH
]


@pytest.mark.slow
@pytest.mark.parametrize("name, n, loop", [*EACH, *more(ALL)])
def test_each_example_has_one_record_in_order(name, n, loop, tmp_path):
    folder = predict(make_strategy(name), tmp_path, lambda model: PredictsAll(model, n), loop=loop, piece=5)
    check(read(folder), n, names=None)
    assert [len(path.read_text().splitlines()) for path in pieces(folder)] == [5] * (n // 5) + [n % 5] * (n % 5 > 0)


@pytest.mark.parametrize("name", ["mirrored_x2", *more(["default", "mirrored_x4"])])
def test_a_pipeline_of_its_own_keeps_its_order(name, tmp_path):
    check(read(predict(make_strategy(name), tmp_path, lambda model: Predicts(model, pipeline=True), piece=7)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, family",
    [("mirrored_x2", "keras"), *more([("default", "tf_keras"), ("mirrored_x4", "keras"), ("mirrored_x2", "tf_keras")])],
)
def test_a_keras_trainer_predicts_as_model_predict_does(name, family, tmp_path):
    keras, strategy = pytest.importorskip(family), make_strategy(name)
    with strategy.scope():
        model = keras.Sequential([keras.layers.InputLayer((toy.NUM_FEATURES,)), keras.layers.Dense(2, "tanh")])
        model.compile("sgd", "mse")
        trainer = looplib.KerasTrainer(model, toy.X, toy.X[:, :2])
        evaluator = trainer.evaluator(toy.X, toy.X[:, :2])
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=12), evaluator=evaluator, strategy=strategy, writers=[]
    )
    records = read(controller.predict(tmp_path)["eval"])  # the last global batch has one example
    kernel, bias = model.get_weights()
    np.testing.assert_allclose([r["prediction"] for r in records], np.tanh(toy.X @ kernel + bias), rtol=1e-5, atol=1e-6)


def test_tfrecord_files_hold_examples(tmp_path):
    class Flat(PredictsAll):
        def predict_fn(self, inputs):
            outputs = super().predict_fn(inputs)
            del outputs["nested"]
            return outputs

    folder = predict(make_strategy("default"), tmp_path, Flat, format="tfrecord", piece=10)
    files = [str(path) for path in pieces(folder)]
    assert [path[-8:] for path in files] == ["tfrecord"] * 4
    kinds = {"logits": (3, tf.float32), "outer": (6, tf.float32), "outer/shape": (2, tf.int64), "word": ((), tf.string),
             "half": ((), tf.float32), "right": ((), tf.int64)}  # fmt: skip
    spec = {name: tf.io.FixedLenFeature(shape, dtype) for name, (shape, dtype) in kinds.items()}
    spec["repeated"] = tf.io.RaggedFeature(tf.int64)
    records = [
        {name: value.numpy() for name, value in tf.io.parse_single_example(example, spec).items()}
        for example in tf.data.TFRecordDataset(files)
    ]
    for record in records:
        record["outer"] = record["outer"].reshape(record.pop("outer/shape"))
        record["repeated"], record["word"] = record["repeated"].tolist(), record["word"].decode()
    check(records, names=expected()[0].keys() - {"nested"})


def test_parquet_files_are_one_table(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = predict(make_strategy("default"), tmp_path, PredictsAll, format="parquet", piece=10)
    assert len(pieces(folder)) == 4
    records = parquet.read_table(folder).to_pylist()
    for record in records:
        record["word"] = record["word"].decode()
    check(records, names=None)


def test_csv_files_have_a_column_for_each_element_and_read_back_equal(tmp_path):
    class Flat(PredictsAll):
        def predict_fn(self, inputs):
            outputs = super().predict_fn(inputs)
            del outputs["nested"], outputs["repeated"]
            return outputs | {"odd": inputs[0][:, 0] / 0}

    folder = predict(make_strategy("mirrored_x2"), tmp_path, Flat, format="csv", piece=10)
    rows = [row for path in pieces(folder) for row in csv.DictReader(path.open(newline="", encoding="utf-8"))]
    records = [
        {
            "logits": np.float32([row[f"logits[{i}]"] for i in range(3)]),
            "outer": np.float32([[row[f"outer[{i}][{j}]"] for j in range(3)] for i in range(2)]),
            "word": row["word"],
            "half": float(row["half"]),
            "right": row["right"] == "True",
        }
        for row in rows
    ]
    check(records, names=expected()[0].keys() - {"nested", "repeated"})
    assert {row["odd"] for row in rows} == {"inf", "-inf"} and len(rows[0]) == 13
    np.testing.assert_array_equal([record["outer"][1, 0] for record in records], toy.X[:, 1] * toy.X[:, 0])  # every bit


@pytest.mark.parametrize("records", [
    [{"a": np.arange(2)}, {"a": np.arange(3)}],
    [{"a": np.arange(1), "a[0]": np.int64(1)}],
    [{"a": rows_of(np.arange(3), [np.array([0, 1, 2]), np.array([0, 2, 3])])[0]}],
    [{"a": b"\xff"}],
])  # fmt: skip
def test_what_csv_cannot_hold_is_a_sentence(records):
    with pytest.raises(PredictionError, match="CSV"):
        encode("csv", records)


def test_numbers_that_are_not_finite_are_null_in_json(tmp_path):
    class Odd(Predicts):
        def predict_fn(self, inputs):
            return {"pair": tf.stack([inputs[0][:, 0], inputs[0][:, 0] / 0], 1), "one": inputs[0][:, 0] * np.nan}

    for record, x in zip(read(predict(make_strategy("default"), tmp_path, Odd)), toy.X):
        assert record == {"pair": [float(x[0]), None], "one": None}


class Killed(Exception):
    pass


def stop_after(monkeypatch, records):
    """Has the process fail once so many records were handed over, as a kill would end it."""
    from looplib.exports.folder import PredictionFolder

    take, seen = PredictionFolder.take, []

    def failing(self, part, examples):
        take(self, part, examples)
        seen.extend(part)
        if len(seen) >= records:
            raise Killed

    monkeypatch.setattr(PredictionFolder, "take", failing)


@pytest.mark.parametrize("first, second", [("mirrored_x2", "default"), *more([("default", "mirrored_x4")])])
def test_a_prediction_resumes_on_another_number_of_replicas(first, second, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        stop_after(patch, 24)
        predict(make_strategy(first), tmp_path, piece=10)
    finished = {path: path.stat().st_mtime_ns for path in pieces(tmp_path / "eval")}
    assert len(finished) == 2
    check(read(predict(make_strategy(second), tmp_path, piece=10)))
    assert all(path.stat().st_mtime_ns == time for path, time in finished.items())


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("pipeline", [False, True])
def test_no_finished_piece_is_predicted_twice(pipeline, tmp_path, monkeypatch):
    seen = []

    class Noted(Predicts):
        def predict_fn(self, inputs):
            tf.py_function(lambda x: seen.extend(x.numpy()[:, 0]), [inputs[0]], [])
            return super().predict_fn(inputs)

    build = lambda model: Noted(model, pipeline=pipeline)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        stop_after(patch, 16)
        predict(make_strategy("default"), tmp_path, build, piece=15)
    del seen[:]
    check(read(predict(make_strategy("default"), tmp_path, build, piece=15)))
    assert seen == toy.X[8:, 0].tolist()  # from the step that the first piece ends in


CHANGES = {
    "other weights": (dict(weights=[toy.KERNEL + 1, np.zeros(3)]), "with another source (weights was"),
    "fewer examples": (dict(build=lambda model: Predicts(model, 30)), "examples was 37 and is 30"),
    "other examples": (dict(build=lambda model: Predicts(model, x=toy.X[::-1].copy())), "its examples differ at record 20"),
    "another order": (dict(build=lambda model: Predicts(model, x=np.roll(toy.X, 1, 0), pipeline=False)), "its examples differ"),
    "another batch": (dict(batch=4), "global_batch_size was 8 and is 4"),
    "another piece": (dict(piece=5), "piece was 10 and is 5"),
    "another format": (dict(format="tfrecord"), "format was 'jsonl' and is 'tfrecord'"),
}  # fmt: skip


FEW = ["other weights", "fewer examples", "other examples", "another batch"]


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("change", [*FEW, *more([change for change in CHANGES if change not in FEW])])
def test_pieces_of_two_sources_are_never_mixed(change, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        stop_after(patch, 24)
        predict(make_strategy("default"), tmp_path, piece=10)
    contents = lambda: {path: path.read_bytes() for path in (tmp_path / "eval").iterdir() if path.name != "_lock"}
    before = contents()
    settings, words = CHANGES[change]
    with pytest.raises(PredictionError) as raised:
        predict(make_strategy("default"), tmp_path, **{"piece": 10, **settings})
    assert words in str(raised.value)
    assert contents() == before


def test_a_complete_prediction_is_left_as_it_is_and_notices_data_that_has_grown(tmp_path):
    grown = lambda n: lambda model: Predicts(model, n, pipeline=True)
    predict(make_strategy("default"), tmp_path, grown(20), piece=8)
    before = {path: path.stat().st_mtime_ns for path in pieces(tmp_path / "eval")}
    predict(make_strategy("default"), tmp_path, grown(20), piece=8)
    assert {path: path.stat().st_mtime_ns for path in pieces(tmp_path / "eval")} == before
    for n in (19, 21):
        with pytest.raises(PredictionError):
            predict(make_strategy("default"), tmp_path, grown(n), piece=8)


class Wrong(Predicts):
    def __init__(self, model, outputs):
        super().__init__(model)
        self.outputs = outputs

    def predict_fn(self, inputs):
        return self.outputs(inputs[0])


WRONG = {
    "a tensor": (lambda x: x, "returned SymbolicTensor; expected a dict"),
    "a scalar": (lambda x: {"a": tf.reduce_sum(x)}, "returned 'a' as float32 of shape ()"),
    "complex": (lambda x: {"a": tf.cast(x, tf.complex64)}, "returned 'a' as complex64"),
    "sparse": (lambda x: {"a": tf.sparse.from_dense(x)}, "returned 'a' as a sparse tensor"),
    "too few rows": (lambda x: {"a": x[1:]}, "returned 'a' with 7 rows for a batch of 8 examples"),
    "bytes in JSON": (lambda x: {"a": tf.fill([tf.shape(x)[0]], b"\xff")}, "'a' has bytes that are not UTF-8"),
}


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("case", WRONG)
def test_outputs_that_cannot_be_written_are_sentences(case, tmp_path):
    outputs, words = WRONG[case]
    with pytest.raises(PredictionError) as raised:
        predict(make_strategy("default"), tmp_path, lambda model: Wrong(model, outputs), loop="graph")
    assert words in str(raised.value)


@pytest.mark.parametrize("record, words", [
    ({"id": np.uint64(2**63 + 5)}, "'id' has 9223372036854775813"),
    ({"a": np.zeros((2, 3)), "a/shape": np.array([7])}, "'a/shape' beside 'a'"),
    ({"a/shape": np.array([7]), "a": np.zeros((2, 3))}, "'a/shape' beside 'a'"),
])  # fmt: skip
def test_examples_that_would_lose_a_value_are_refused(record, words):
    with pytest.raises(PredictionError, match=words):
        encode("tfrecord", [record])
    assert encode("tfrecord", [{"id": np.uint64(2**63 - 1), "a/shape": np.array([7])}])


def test_what_cannot_be_predicted_is_a_sentence(tmp_path):
    for folder, build, settings, words in [
        (tmp_path, toy.RegressionEvaluator, {}, "RegressionEvaluator has no predict_fn"),
        (None, Predicts, {}, "predict without a directory needs a model_dir"),
        (tmp_path, Predicts, dict(format="xml"), "the predictions' format is 'xml'; expected one of jsonl"),
        (tmp_path, Predicts, dict(piece=0), "expected a whole number of at least 1"),
        ("/proc/x", Predicts, {}, "cannot be written to /proc/x"),
        (tmp_path, lambda model: Predicts(model, tf.data.INFINITE_CARDINALITY, True), {}, "no _index.json"),
    ]:
        if words == "no _index.json":
            (tmp_path / "eval").mkdir()
            (tmp_path / "eval" / "piece-00000.jsonl").write_text("{}")
        with pytest.raises(looplib.UsageError, match=words):
            predict(make_strategy("default"), folder, build, **settings)


@pytest.fixture(scope="module")
def trained(nursery, tmp_path_factory):
    """A run of a binary, and its predictions without a kill."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    for arguments in (
        ["--mode=train", "--train_steps=8", "--loop=eager"],
        ["--mode=predict", "--predictions_piece=10"],
    ):
        life = nursery.life(folder, "--config.state_mb=0.01", *arguments)
        assert life.code() == 0, life.output()
    return folder


def check_binary(folder, trained):
    """Checks the predictions of `faulty` against numpy."""
    reader = tf.train.load_checkpoint(str(trained / "checkpoints" / "ckpt-8"))
    names = (f"optimizer/_trainable_variables/{number}/.ATTRIBUTES/VARIABLE_VALUE" for number in range(4))
    first, bias, second, last = map(reader.get_tensor, names)
    logits = np.maximum(faulty.X.reshape(len(faulty.X), -1) @ first + bias, 0) @ second + last
    records = read(folder)
    assert [record["label"] for record in records] == faulty.Y.tolist()
    np.testing.assert_allclose([r["logits"] for r in records], logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_binary_that_is_killed_at_any_moment_writes_what_one_writes_that_is_not(nursery, trained, tmp_path):
    check_binary(trained / "predictions" / "eval", trained)
    arguments = [
        "--config.state_mb=0.01", "--mode=predict", "--predictions_piece=10", "--config.slow_evaluation=0.3",
        "--loop=eager",
    ]  # fmt: skip
    moments, kept, kills = random.Random(3), {}, 0
    for attempt in itertools.count():
        devices = [f"--num_virtual_devices={(1, 2, 4)[attempt % 3]}"]
        life = nursery.life(trained, *arguments, f"--predictions={tmp_path}", *devices)
        if kills < 6:
            until = time.monotonic() + 60
            while life.note()[1] != "predict" and time.monotonic() < until and not life.ended():
                time.sleep(0.01)
            life.ended(moments.uniform(0, 0.9))
            kills += not life.ended()
            life.kill(signal.SIGTERM if attempt == 1 else signal.SIGKILL)
        code = life.code()
        assert code in (0, 75 if attempt == 1 else -signal.SIGKILL), life.output()
        now = {path.name: path.stat().st_mtime_ns for path in pieces(tmp_path / "eval")}
        assert kept.items() <= now.items(), "a finished piece was written again"
        index = json.loads((tmp_path / "eval" / "_index.json").read_text())
        kept = {name: now[name] for name in sorted(now)[: len(index["pieces"])]}
        if code == 0:
            break
        assert attempt < 30, life.output()
    assert kills >= 6
    whole = [path.read_bytes() for path in pieces(trained / "predictions" / "eval")]
    assert [len(piece.splitlines()) for piece in whole] == [10] * 9 + [6]
    check_binary(tmp_path / "eval", trained)


@pytest.mark.slow
def test_two_workers_predict_each_example_once_and_in_order(nursery, trained, tmp_path):
    lives = nursery.workers(
        2, trained, "--config.state_mb=0.01", "--mode=predict", "--predictions_piece=10", f"--predictions={tmp_path}"
    )
    assert [life.code() for life in lives] == [0, 0], lives[0].output()
    check_binary(tmp_path / "eval", trained)
