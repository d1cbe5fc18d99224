"""What `context.loader` costs beside the loader alone, and how fast it resumes: `python -m benchmarks.loaders`.

Batches of 128 rows of 784 numbers: looplib's steps, which compute nothing, read them in alternation with a bare loop.
The resume is at example 10 million, from the loader's making to its first batch.
"""

import collections
import itertools
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import grain
import numpy as np
import tensorflow as tf
from absl import app, flags, logging

import looplib
from looplib.data import loader
from looplib.data.loader_state import LoaderPosition, pack

_ROUNDS = flags.DEFINE_integer("rounds", 9, "Measurements of each.")
_BATCH, _WIDTH, _STEPS, _FAR = 128, 784, 400, 10_000_000
_OPTIONS = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)  # a full buffer of 500 batches slows Grain itself
_WORK = flags.DEFINE_integer("work", 200_000, "Numbers that the loader sorts for each batch.")


def _batches(seed: int) -> grain.IterDataset:
    table = np.random.default_rng(0).normal(size=(4096, _WIDTH)).astype("float32")
    work = np.random.default_rng(0).permutation(_WORK.value)

    def read(start: int) -> np.ndarray:
        np.sort(work)
        return table[(np.arange(_BATCH) + start * _BATCH) % 4096]

    return grain.MapDataset.range(_FAR).seed(seed).shuffle().repeat().map(read).to_iter_dataset(_OPTIONS)


class _Reads(looplib.Trainer):
    def __init__(self) -> None:
        self.sum = tf.Variable(0.0)

    def dataset(self, context: looplib.InputContext) -> tf.data.Dataset:
        return context.loader(lambda index, count: _batches(context.seed))

    def step_fn(self, inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        self.sum.assign_add(inputs[0, 0])
        return {"loss": inputs[:, 0]}


def _timed(read: Callable[[], object]) -> tuple[float, float]:
    """Reads the batches of as many steps; returns the examples a second, and the milliseconds of all cores a batch."""
    start, cpu = time.perf_counter(), time.process_time()
    read()
    return _STEPS * _BATCH / (time.perf_counter() - start), 1e3 * (time.process_time() - cpu) / _STEPS


def main(argv: list[str]) -> None:
    """Prints the two rates, their ratio, the bytes of a position, and the time of a resume."""
    logging.set_verbosity(logging.ERROR)
    config = looplib.RunConfig(global_batch_size=_BATCH, steps_per_loop=100)
    controller = looplib.Controller(config, trainer=_Reads(), writers=[])
    controller.train(steps=100)
    ratios, rates, added = [], [], []
    for number in range(_ROUNDS.value):
        iterator = iter(_batches(0))
        next(iterator)
        bare, least = _timed(lambda iterator=iterator: collections.deque(itertools.islice(iterator, _STEPS), maxlen=0))
        rate, cpu = _timed(lambda steps=100 + (number + 1) * _STEPS: controller.train(steps=steps))
        rates, ratios, added = [*rates, rate], [*ratios, rate / bare], [*added, cpu - least]
    print(f"examples a second {statistics.median(rates):,.0f}, {statistics.median(ratios):.3f} of the loader alone")
    print(f"milliseconds of a core for a batch beside the loader alone: {statistics.median(added):.2f}")
    position = controller.loops["train"].position(100 + _ROUNDS.value * _STEPS)
    print(f"bytes of the position in a checkpoint: {len(position)}")
    _resume()


def _resume() -> None:
    """Measures a reader that begins at a position far on, by the loader's state."""
    steps, settings = _FAR // _BATCH, dict(size=_BATCH, training=True, mismatch="refuse", float_type=None)
    far = iter(_batches(0))
    far.set_state({**far.get_state(), "next_index": steps})
    state = pack(far.get_state())
    digests = [loader._digest([next(far)]) for _ in range(2)]
    position = LoaderPosition(
        loader="x", part="all", consumed=steps, number=steps, epoch=0, index=steps, state=state, digests=digests
    )
    start = time.perf_counter()
    reader = loader.LoaderReader(lambda: _batches(0), "all", start=steps, **settings)
    reader.begin_at(position.to_bytes())
    next(iter(reader.dataset()))
    print(f"seconds to the first batch at example {steps * _BATCH:,}: {time.perf_counter() - start:.2f}")


if __name__ == "__main__":
    app.run(main)
