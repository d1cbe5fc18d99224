"""Steps a second and bytes of tables of embeddings, by their number of rows: `python -m benchmarks.embeddings`.

On one device: `ShardedEmbedding` in 1, 2 and 4 parts beside `keras.layers.Embedding`, in turn, medians of rounds.
With `--servers`, two parameter servers and a worker: bytes a step on Linux's loopback device, with those of other
programs.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags, logging

import looplib

_ROUNDS = flags.DEFINE_integer("rounds", 5, "Measurements of each.")
_ROWS = flags.DEFINE_multi_integer("rows", [10_000, 100_000, 1_000_000], "Sizes of the table.")
_SERVERS = flags.DEFINE_bool("servers", False, "Measures bytes with parameter servers.")
_DIM, _BATCH, _IDS, _EXAMPLES = 32, 256, 8, 25_600
_STEPS = {"few": 40, "many": 100}


class _Mean(looplib.GradientTrainer):
    """A regression on the mean of eight rows; `shards` is 0 for Keras's own layer."""

    def __init__(self, rows: int, shards: int) -> None:
        random = np.random.default_rng(0)
        self.ids = random.integers(0, rows, (_EXAMPLES, _IDS))
        self.targets = random.normal(size=(_EXAMPLES, 1)).astype("float32")
        inputs = keras.Input((_IDS,), dtype="int64")
        layer = looplib.ShardedEmbedding(rows, _DIM, shards=shards) if shards else keras.layers.Embedding(rows, _DIM)
        outputs = keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(layer(inputs)))
        super().__init__(keras.Model(inputs, outputs), keras.optimizers.Adagrad(0.1))

    def dataset(self, context: looplib.InputContext) -> tf.data.Dataset:
        ids, targets = self.ids, self.targets
        return context.indices(_EXAMPLES).map(lambda i: (tf.gather(ids, i), tf.gather(targets, i)))

    def loss_fn(self, inputs: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        ids, targets = inputs
        return tf.square(self.model(ids, training=True) - targets)[:, 0]


def _on_one_device(rows: int) -> None:
    kinds = {"keras.layers.Embedding": 0, "1 part": 1, "2 parts": 2, "4 parts": 4}
    config = looplib.RunConfig(global_batch_size=_BATCH)
    found: dict[str, list[float]] = {name: [] for name in kinds}
    controllers = {name: looplib.Controller(config, trainer=_Mean(rows, kind)) for name, kind in kinds.items()}
    done = 20
    for controller in controllers.values():
        controller.train(steps=done)
    for _ in range(_ROUNDS.value):
        # The dense update of Keras takes seconds a step for large tables.
        steps = _STEPS["few" if rows > 100_000 else "many"]
        done += steps
        for name, controller in controllers.items():
            start = time.perf_counter()
            controller.train(steps=done)
            found[name].append(steps / (time.perf_counter() - start))
    print(f"{rows:>11,} rows:", ", ".join(f"{name} {statistics.median(each):.1f}" for name, each in found.items()))


def _loopback() -> int:
    with open("/proc/net/dev") as file:
        return int(re.search(r"lo:\s*(\d+)", file.read())[1])


def _with_servers(rows: int) -> None:
    sizes = {}
    for steps in _STEPS.values():
        with tempfile.TemporaryDirectory() as folder:
            tool = ["-m", "looplib", "launch", "--workers=1", "--parameter_servers=2", "--", sys.executable]
            program = ["-m", "benchmarks.embeddings", f"--model_dir={folder}", "--strategy=parameter_server"]
            before = _loopback()
            subprocess.run([sys.executable, *tool, *program, f"--train_steps={steps}"], check=True,
                           env={**os.environ, "ROWS": str(rows)}, capture_output=True)  # fmt: skip
            sizes[steps] = _loopback() - before
    few, many = sorted(sizes)
    print(f"{rows:>11,} rows: {(sizes[many] - sizes[few]) / (many - few):,.0f} bytes a step", flush=True)


def main(argv: list[str]) -> None:
    """Prints a line for each number of rows."""
    del argv
    logging.set_verbosity(logging.ERROR)
    for rows in _ROWS.value:
        (_with_servers if _SERVERS.value else _on_one_device)(rows)


if __name__ == "__main__":
    if "ROWS" in os.environ:
        looplib.launch.run(lambda config: (_Mean(int(os.environ["ROWS"]), 4), None), global_batch_size=_BATCH)
    app.run(main)
