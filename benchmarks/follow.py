"""What it costs to follow files, and how soon a new one is trained on: `python -m benchmarks.follow`.

A dense model of 784 numbers trains on files of records: in alternation those that it follows, and the same ones by
`context.records`. Then a file appears while a run waits; the time is that from its rename to the end of the first step.
"""

import os
import pathlib
import statistics
import tempfile
import threading
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags, logging

import looplib

_ROUNDS = flags.DEFINE_integer("rounds", 7, "Measurements of each.")
_BATCH, _WIDTH, _STEPS, _FILES = 128, 784, 100, 8


class _Dense(looplib.GradientTrainer):
    def __init__(self, files: str, follow: looplib.Follow | bool) -> None:
        self._files, self._follow = files, follow
        layers = [keras.Input([_WIDTH]), keras.layers.Dense(256, "relu"), keras.layers.Dense(10)]
        super().__init__(keras.Sequential(layers), keras.optimizers.SGD(0.01))

    def dataset(self, context: looplib.InputContext) -> tf.data.Dataset:
        records = context.records(self._files, follow=self._follow)
        return records.map(lambda one: tf.reshape(tf.io.decode_raw(one, tf.float32), [-1, _WIDTH]))

    def loss_fn(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(self.model(inputs, training=True)), axis=-1)


def _write(folder: str, number: int, records: int = _BATCH * _STEPS) -> None:
    rows, path = (
        np.random.default_rng(number).normal(size=(records, _WIDTH)).astype("float32"),
        f"{folder}/day-{number:04}.tfrecord",
    )
    with tf.io.TFRecordWriter(f"{path}.new") as writer:
        for row in rows:
            writer.write(row.tobytes())
    os.rename(f"{path}.new", path)


def _controller(folder: str, follow: looplib.Follow | bool) -> looplib.Controller:
    config = looplib.RunConfig(global_batch_size=_BATCH, steps_per_loop=_STEPS // 2, loop="graph")
    return looplib.Controller(config, trainer=_Dense(f"{folder}/day-*.tfrecord", follow), writers=[])


def _seconds(folder: str, follow: looplib.Follow | bool) -> float:
    with _controller(folder, follow) as run:
        run.train(steps=_STEPS)
        begin = time.perf_counter()
        run.train(steps=_STEPS * _FILES)
        return (time.perf_counter() - begin) / (_STEPS * (_FILES - 1))


def _delay(every: float) -> float:
    """Returns the seconds from the rename of a file to the end of the step that is first trained on it."""
    with tempfile.TemporaryDirectory() as folder:
        _write(folder, 0, _BATCH)
        with _controller(folder, looplib.Follow(settled=None, every=every)) as run:
            run.train(steps=1)
            written: list[float] = []

            def write() -> None:
                time.sleep(1.3)
                _write(folder, 1, _BATCH)
                written.append(time.perf_counter())

            threading.Thread(target=write).start()
            run.train(steps=2)
            return time.perf_counter() - written[0]


def main(_: list[str]) -> None:
    """Prints the ratio of both, and the delay of a new file."""
    logging.set_verbosity(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(_FILES):
            _write(folder, number)
        kinds = {"followed": looplib.Follow(settled=None), "by number": False}
        found: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(_ROUNDS.value):
            for name, follow in kinds.items():
                found[name].append(_seconds(folder, follow))
        for path in pathlib.Path(folder).iterdir():
            path.unlink()
    followed, plain = (1e6 * statistics.median(found[name]) for name in kinds)
    ratio = statistics.median(one / other for one, other in zip(*found.values(), strict=True))
    print(f"a step: followed {followed:.0f} us, by number {plain:.0f} us, ratio {ratio:.3f}")
    for every in (1.0, 0.1):
        delays = [_delay(every) for _ in range(_ROUNDS.value)]
        print(
            f"from a rename to a step, every={every:g}: median {statistics.median(delays):.2f} s, "
            f"at most {max(delays):.2f} s"
        )


if __name__ == "__main__":
    app.run(main)
