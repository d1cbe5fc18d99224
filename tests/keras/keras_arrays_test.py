"""Arrays and structures of arrays of a compiled Keras model: a step gets them as `fit` gives them, on each path."""

import datetime
import json
import pathlib

import flat_config
import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
from conftest import make_strategy

import looplib
from looplib.errors import DatasetError
from looplib.keras import data as keras_data
from looplib.keras.data import KerasData

FAMILIES = ("keras", "tf_keras")
ROWS = 6
F = np.arange(12.0).reshape(ROWS, 2)
INTS = np.arange(ROWS)
ZEROS = np.zeros([ROWS, 1], "float32")


def arrays():
    """Yields (name, what is given as x or y) of each kind that an adapter of Keras takes, and of some that none does."""
    pandas, sparse = pytest.importorskip("pandas"), pytest.importorskip("scipy.sparse")
    objects = np.empty(ROWS, object)
    objects[:] = [np.ones(2, "float32") for _ in range(ROWS)]
    series = lambda values, kind=None: pandas.Series(values, dtype=kind)
    yield from {
        "float64": F, "float16": F.astype("float16"), "[n]": F[:, 0], "int": INTS, "bool": INTS > 2, "uint8": INTS.astype("u1"),
        "big endian": F.astype(">f8"), "fortran": np.asfortranarray(F), "complex": F.astype("complex64"),
        "matrix": np.matrix(F), "text": np.array(list("abcdef")), "bytes": np.array([b"a"] * ROWS),
        "object text": np.array(list("abcdef"), object), "object numbers": np.array([1, 2, 3, 4, 5, 6], object),
        "object mixed": np.array([1, "a", 3, 4, 5, 6], object), "object None": np.array([None] * ROWS, object),
        "object arrays": objects, "rank 0": np.float32(3), "array of rank 0": np.array(3.0),
        "masked": np.ma.masked_array(F, F > 5), "nothing masked": np.ma.masked_array(F, F < 0),
        "structured": np.array([(1, 2.0)] * ROWS, [("a", "i4"), ("b", "f4")]),
        "record": np.rec.array([(1, 2.0)] * ROWS, [("a", "i4"), ("b", "f4")]),
        "dates": np.array(["2020-01-01"] * ROWS, "datetime64[D]"), "durations": np.array([1] * ROWS, "timedelta64[s]"),
        "Series": series(F[:, 0]), "Series of int": series(INTS), "Series of bool": series(INTS > 2),
        "Series of NaN": series([1, np.nan, 3, 4, 5, 6]), "Series of another order": series(F[:, 0])[::-1],
        "Series of text": series(list("abcdef")), "Series of string": series(list("abcdef"), "string"),
        "Series of categories": series(list("aabbcc"), "category"), "Series of Int64": series(INTS, "Int64"),
        "Series of Int64 and NA": series([1, None, 3, 4, 5, 6], "Int64"), "Series of Float64": series(F[:, 0], "Float64"),
        "Series of boolean": series([True] * ROWS, "boolean"), "Series of None": series(["a", None, *"cdef"]),
        "Series of objects": series([1, 2, 3, 4, 5, 6], object), "Series of dates": series(pandas.date_range("2020", periods=6)),
        "sparse Series": pandas.Series(pandas.arrays.SparseArray(F[:, 0])),
        "frame": pandas.DataFrame(F), "frame of one": pandas.DataFrame({"a": INTS}),
        "mixed frame": pandas.DataFrame({"a": INTS, "b": F[:, 0]}), "frame of Int64": pandas.DataFrame({"a": series(INTS, "Int64")}),
        "frame of text and int": pandas.DataFrame({"a": list("abcdef"), "b": INTS}),
        "frame of dates": pandas.DataFrame({"a": pandas.date_range("2020", periods=ROWS)}),
        "dict of a frame": dict(pandas.DataFrame({"a": F[:, 0], "b": INTS})), "Index": pandas.Index(F[:, 0]),
        **{f"scipy {kind}": sparse.random(ROWS, 4, 0.5, kind, random_state=0)
           for kind in ("csr", "csc", "coo", "lil", "dok", "bsr", "dia")},
        "scipy array": sparse.csr_array(np.eye(ROWS)), "tensor": tf.constant(F, tf.float32), "bfloat16": tf.constant(F, tf.bfloat16),
        "text tensor": tf.constant(list("abcdef")), "variable": tf.Variable(F.astype("float32")),
        "ragged": tf.ragged.constant([[1.0], [2.0, 3.0], [], [1.0], [2.0], [3.0]]),
        "sparse": tf.sparse.from_dense(F.astype("float32")), "numbers": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "ints": [*range(ROWS)],
        "rows of numbers": [[1.0, 2.0]] * ROWS, "texts": list("abcdef"), "uneven rows": [[1.0], [1.0, 2.0]] * 3,
        "list": [F, INTS], "tuple": (F, INTS), "list of one": [F], "tuple of one": (F,), "nested": {"a": [F, (INTS, F)], "b": F},
        "date objects": [datetime.date(2020, 1, 1)] * ROWS,
    }.items()  # fmt: skip


def described(batch):
    """Returns the structure of a batch with the type, shape and values of each tensor; floats are of one type."""
    if isinstance(batch, dict):
        return {name: described(part) for name, part in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(described, batch))
    kind = type(batch).__name__ if isinstance(batch, (tf.RaggedTensor, tf.SparseTensor)) else "Tensor"
    dtype = "float" if batch.dtype.is_floating else batch.dtype.name
    if isinstance(batch, tf.SparseTensor):
        batch = tf.sparse.to_dense(tf.sparse.reorder(batch))
    values = batch.to_list() if isinstance(batch, tf.RaggedTensor) else np.asarray(batch).tolist()
    return kind, dtype, batch.shape.as_list(), str(values)


def recording(keras):
    class Recording(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs):
            return self.dense(tf.ones([2, 1]))

        def train_step(self, data):
            self.seen = described(data)
            return {"loss": tf.constant(0.0)}

    model = Recording()
    model.compile("sgd", "mse", run_eagerly=True)
    return model


@pytest.mark.parametrize("keras", FAMILIES, indirect=True)
def test_a_step_gets_arrays_of_each_kind_as_fit_gives_them_or_they_are_refused(keras):
    model, taken, refused = recording(keras), [], []
    for name, given in arrays():
        for arguments in ((given,), (ZEROS, given)):
            if (
                isinstance(given, list)
                and len(arguments) == 2
                and keras is not keras3
                and not isinstance(given[0], np.ndarray)
            ):
                arguments = ZEROS.tolist(), given  # the adapter of lists takes nothing else
            try:
                model.fit(*arguments, batch_size=ROWS, shuffle=False, verbose=0)
            except Exception:  # of many types
                model.seen = None
            try:
                batch = KerasData(model, *arguments, *[None] * (4 - len(arguments))).sample(ROWS)
            except DatasetError:
                refused.append(name)
                continue
            taken.append(name)
            if model.seen is not None:
                assert described(batch) == model.seen, name
    lacking = {"object numbers", "object mixed", "object None", "object arrays", "rank 0", "array of rank 0"}
    lacking |= {"masked", "structured", "record", "dates", "durations", "Series of None", "Series of objects"}
    lacking |= {"Series of dates", "frame of text and int", "frame of dates", "uneven rows", "date objects"}
    assert set(refused) == lacking and not lacking & set(taken)


# Structures on each path.

BATCH, EXAMPLES = 4, 10
rng = np.random.default_rng(0)
PARTS = [rng.normal(size=(EXAMPLES, 2)).astype("float32") for _ in range(3)]
STRUCTURES = {
    "list": lambda a, b, c: [a, b, c],
    "nested": lambda a, b, c: {"a": [a, (b,)], "c": [c]},
}
TARGETS = [PARTS[0] - 2 * PARTS[1], PARTS[2] + 1]


def summing(keras, structure):
    class Summing(keras.Model):
        def __init__(self):
            super().__init__()
            self.own = [keras.layers.Dense(2, kernel_initializer="ones", name=f"d{i}") for i in range(3)]

        def call(self, x):
            tf.nest.assert_same_structure(x, tf.nest.map_structure(lambda _: 0, structure), check_types=False)
            a, b, c = tf.nest.flatten(x)  # tf.data keeps the order
            return self.own[0](a) + self.own[1](b), self.own[2](c)

    model = Summing()
    model.compile(keras.optimizers.SGD(0.05), ["mse", "mse"])
    return model


class Numbered:
    def __init__(self, make):
        self._make = make

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, number):
        return self._make(*[part[number] for part in PARTS]), [target[number] for target in TARGETS]


def path_of(source, make, keras, monkeypatch):
    """Returns the arguments x and y of a trainer."""
    of_rows = lambda rows: (make(*[part[rows] for part in PARTS]), [target[rows] for target in TARGETS])
    batches = [slice(at, at + BATCH) for at in range(0, EXAMPLES, BATCH)]
    if source in ("resident", "host"):
        monkeypatch.setattr(keras_data, "_MOST_RESIDENT_BYTES", 2**28 if source == "resident" else 0)
        return of_rows(slice(None))
    if source == "numbered":
        return Numbered(make), None
    if source == "generator":
        return (lambda: (of_rows(rows) for rows in batches)), None
    base = getattr(keras.utils, "PyDataset", None) or keras.utils.Sequence

    class Data(base):
        __len__ = lambda self: len(batches)
        __getitem__ = lambda self, number: of_rows(batches[number])

    return Data(), None


SOURCES = ("resident", "host", "numbered", "generator", "py_dataset")


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("strategy", ["default", "mirrored_x2"])
@pytest.mark.parametrize("keras", FAMILIES, indirect=True)
def test_each_structure_trains_evaluates_and_predicts_as_in_keras_on_each_path(
    source, kind, strategy, keras, monkeypatch, tmp_path
):
    make, strategy = STRUCTURES[kind], make_strategy(strategy)
    fit = summing(keras, make(0, 0, 0))
    fit.fit(make(*PARTS), TARGETS, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    expected = fit.evaluate(make(*PARTS), TARGETS, batch_size=BATCH, verbose=0, return_dict=True)
    x, y = path_of(source, make, keras, monkeypatch)
    with strategy.scope():
        model = summing(keras, make(0, 0, 0))
        trainer = looplib.KerasTrainer(model, x, y, shuffle=False)
        evaluator = trainer.evaluator(x, y)
    settings = {"strategy": strategy, "writers": [], "global_batch_size": BATCH}
    with flat_config.controller(trainer=trainer, evaluator=evaluator, **settings) as controller:
        found = controller.train_and_evaluate(epochs=2)["eval"]
        (folder,) = controller.predict(tmp_path).values()
    lines = [line for path in sorted(pathlib.Path(folder).glob("*.jsonl")) for line in path.read_text().splitlines()]
    records = [json.loads(line) for line in lines]
    for ours, theirs in zip(model.get_weights(), fit.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert found["examples"] == EXAMPLES
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
    for number, one in enumerate(fit.predict(make(*PARTS), verbose=0)):
        ours = [record[f"prediction_{number}"] for record in records]
        np.testing.assert_allclose(ours, one, rtol=1e-4, atol=1e-5)
