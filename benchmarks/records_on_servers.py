"""Examples a second with parameter servers, of records in files beside `context.indices` from memory.

Two workers, one parameter server, on this machine, and a model that costs little; in turn, medians of rounds:

    python -m looplib launch --workers=2 --parameter_servers=1 -- python -m benchmarks.records_on_servers
"""

import os
import statistics
import tempfile
import time
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags, logging

import looplib

_ROUNDS = flags.DEFINE_integer("rounds", 5, "Measurements of each.")
_BATCH = flags.DEFINE_integer("batch", 256, "Examples of a batch.")
_STEPS = flags.DEFINE_integer("steps", 500, "Steps of a measurement.")
_EXAMPLES, _BYTES, _FILES = 50_000, 1024, 8


class _Own:
    """Files of records as an object that the coordinator alone has."""

    def __init__(self, files: str) -> None:
        self._files = looplib.open_records(files)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> bytes:
        return self._files[number]

    def __getitems__(self, numbers: Sequence[int]) -> Sequence[bytes]:
        return self._files.__getitems__(numbers)


class _Linear(looplib.GradientTrainer):
    """A regression on the bytes of examples; `block` is that of `context.records`, 0 for examples in memory."""

    def __init__(self, examples: np.ndarray, source: str | _Own, block: int) -> None:
        self.examples, self.source, self.block = examples, source, block
        super().__init__(keras.Sequential([keras.Input((_BYTES,)), keras.layers.Dense(1)]), keras.optimizers.SGD(1e-9))

    def dataset(self, context: looplib.InputContext) -> tf.data.Dataset:
        if self.block == 0:
            return context.indices(_EXAMPLES).map(lambda ids: tf.gather(self.examples, ids))
        records = context.records(self.source, block=self.block)
        return records.map(lambda batch: tf.io.decode_raw(batch, tf.uint8, fixed_length=_BYTES))

    def loss_fn(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.square(self.model(tf.cast(inputs, tf.float32), training=True))[:, 0]


def main(argv: list[str]) -> None:
    """Prints a line for each way to read."""
    del argv
    strategy = looplib.runtime.setup("parameter_server")
    logging.set_verbosity(logging.ERROR)
    examples = np.random.default_rng(0).integers(0, 256, (_EXAMPLES, _BYTES), np.uint8)
    kinds = {"indices, in memory": 0, "files, block=1": 1, "files, block=64": 64, "the coordinator's": 1}
    config = looplib.RunConfig(global_batch_size=_BATCH.value, steps_per_loop=_STEPS.value)
    found: dict[str, list[float]] = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory() as folder:
        for number, part in enumerate(np.split(examples, _FILES)):
            with tf.io.TFRecordWriter(f"{folder}/{number}.tfrecord") as writer:
                for example in part:
                    writer.write(example.tobytes())
        controllers = {}
        for name, block in kinds.items():
            with strategy.scope():
                files = f"{folder}/*.tfrecord"
                trainer = _Linear(examples, _Own(files) if name.startswith("the") else files, block)
            controllers[name] = looplib.Controller(config, trainer=trainer, strategy=strategy, writers=[])
        for number in range(_ROUNDS.value + 1):
            for name, controller in controllers.items():
                start = time.perf_counter()
                controller.train((number + 1) * _STEPS.value)
                seconds = time.perf_counter() - start
                if number:  # the first round warms up
                    found[name].append(_STEPS.value * _BATCH.value / seconds)
    for name, rates in found.items():
        print(f"{name:20} {statistics.median(rates):10,.0f} examples a second", flush=True)


if __name__ == "__main__":
    app.run(main)
