"""Sources that read into memory of their own, again and again: each batch has the examples that were read."""

import time

import keras
import numpy as np
import pytest

import looplib
from looplib.data.context import InputContext
from looplib.keras.data import KerasData
from looplib.keras.python_data import one_pass

EXAMPLES, BATCH = 48, 8


def buffer(shape, dtype):
    """Makes an array where TensorFlow can read it without a copy: from a multiple of 64 bytes on."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 64, "uint8")
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


class Examples:
    def __init__(self, dtype):
        self._row = buffer([16], dtype)

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, number):
        self._row[:] = number
        return {"x": (self._row,)}


class ManyExamples(Examples):
    def __init__(self, dtype):
        super().__init__(dtype)
        self._rows = buffer([4096, 16], dtype)

    def __getitems__(self, numbers):
        self._rows[: len(numbers)] = np.asarray(numbers)[:, None]
        return [{"x": (row,)} for row in self._rows[: len(numbers)]]


class Batches(keras.utils.PyDataset):
    def __init__(self, dtype):
        super().__init__()
        self._rows = buffer([BATCH, 16], dtype)

    def __len__(self):
        return EXAMPLES // BATCH

    def __getitem__(self, number):
        self._rows[:] = number * BATCH + np.arange(BATCH)[:, None]
        return {"x": (self._rows,)}


class Loader:
    def __init__(self, dtype):
        self._batches = Batches(dtype)

    def __len__(self):
        return len(self._batches)

    def __iter__(self):
        return (self._batches[number] for number in range(len(self)))


def context(training=False):
    return InputContext(
        global_batch_size=BATCH, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=0, training=training,
        start_step=0, global_batches=True,
    )  # fmt: skip


def sampled(dtype):
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return [KerasData(model, Examples(dtype), None, None, None).sample(BATCH)]


SOURCES = {
    "examples": lambda dtype: context().records(Examples(dtype)),
    "many examples": lambda dtype: context().records(ManyExamples(dtype)),
    "blocks": lambda dtype: context(True).records(ManyExamples(dtype), shuffle=False, block=16).take(EXAMPLES // BATCH),
    "a PyDataset": lambda dtype: looplib.python_batches(context(), Batches(dtype)),
    "a loader": lambda dtype: context().loader(lambda index, count: Loader(dtype)),
    "a generator": lambda dtype: one_pass(lambda: iter(Loader(dtype)), "float32").dataset(),
    "a sample": sampled,
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8"])
def test_each_batch_has_the_examples_that_were_read(source, dtype):
    given = SOURCES[source](dtype)
    batches = given if isinstance(given, list) else iter(given.prefetch(6))
    time.sleep(0.2)  # in which the batches are read ahead
    found = np.concatenate([batch["x"][0].numpy() for batch in batches])
    np.testing.assert_array_equal(found, np.repeat(np.arange(len(found))[:, None], 16, axis=1))
    assert len(found) in (BATCH, EXAMPLES)
