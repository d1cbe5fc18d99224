"""Steps a second and bytes of tables of embeddings, by their number of rows: `python -m benchmarks.embeddings`.

On one device: `ShardedEmbedding` in 1, 2 and 4 parts beside `keras.layers.Embedding`, in turn, medians of rounds.
With `--on=servers`, two parameter servers and a worker, beside `benchmarks.embeddings_by_hand`; with `--on=workers`,
two workers that train in step; and bytes a step on the loopback device of Linux, with those of other programs. With
`--growing`, `DynamicEmbedding` beside one part, in batches of 10,000 ids: where all have rows, and where some are new
and get free rows, or those of others.
"""

import json
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
_ON = flags.DEFINE_enum("on", "device", ["device", "servers", "workers"], "What holds the table.")
_PARTS = flags.DEFINE_integer("parts", 2, "Parts of the table on servers or workers.")
_GROWING = flags.DEFINE_bool("growing", False, "Measures tables that give rows to new ids.")
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


class _Growing(_Mean):
    """The same regression in batches of 10,000 ids, of which a share is new; `kind` is a key of `_KINDS`."""

    def __init__(self, rows: int, kind: str) -> None:
        inputs = keras.Input((_IDS,), dtype="int64")
        self.rows, (self.new, capacity, settings) = rows, _KINDS[kind]
        if capacity:
            layer = looplib.DynamicEmbedding(_DIM, int(capacity * rows), full="evict", **settings)
            for _ in range(settings.get("admit_after", 1)):
                layer(tf.range(rows, dtype=tf.int64), training=True)
            layer.steps.assign([1])
        else:
            layer = looplib.ShardedEmbedding(rows, _DIM)
        outputs = keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(layer(inputs)))
        super(_Mean, self).__init__(keras.Model(inputs, outputs), keras.optimizers.Adagrad(0.1))

    def dataset(self, context: looplib.InputContext) -> tf.data.Dataset:
        def batch(positions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            shape, first = [tf.size(positions), _IDS], positions[0]
            known = tf.random.stateless_uniform(shape, [1, first], maxval=self.rows, dtype=tf.int64)
            fresh = tf.random.stateless_uniform(shape, [2, first], minval=2**32, maxval=2**62, dtype=tf.int64)
            is_new = tf.random.stateless_uniform(shape, [3, first]) < self.new
            return tf.where(is_new, fresh, known), tf.random.stateless_normal([tf.size(positions), 1], [4, first])

        return context.indices(10**9, shuffle=False).map(batch)


# The share of new ids, the capacity by the number of known ids (0 for a ShardedEmbedding), and other arguments.
_KINDS: dict[str, tuple[float, float, dict[str, int]]] = {
    "1 part": (0.0, 0, {}),
    "no new ids": (0.0, 1, {}),
    "5% new, rows free": (0.05, 3, {}),
    "5% new, full": (0.05, 1, {}),
    "5% new, at the second sight": (0.05, 1, {"admit_after": 2}),
}


def _growing(rows: int) -> None:
    config = looplib.RunConfig(global_batch_size=1250, steps_per_loop=50)
    for kind in _KINDS:
        controller, times, done = looplib.Controller(config, trainer=_Growing(rows, kind)), [], 50
        controller.train(steps=done)
        for _ in range(_ROUNDS.value):
            done += 200
            start = time.perf_counter()
            controller.train(steps=done)
            times.append(5 * (time.perf_counter() - start))
        controller.close()
        print(f"{rows:>11,} rows, {kind}: {statistics.median(times):.1f} ms a step, most {max(times):.1f}", flush=True)


def _loopback() -> int:
    with open("/proc/net/dev") as file:
        return int(re.search(r"lo:\s*(\d+)", file.read())[1])


def _launched(*program: str, **environment: str) -> str:
    processes = ["--workers=1", "--parameter_servers=2"] if _ON.value == "servers" else ["--workers=2"]
    tool = ["-m", "looplib", "launch", *processes, "--", sys.executable, "-m"]
    done = subprocess.run([sys.executable, *tool, *program], check=True, env={**os.environ, **environment},
                          capture_output=True, text=True)  # fmt: skip
    return done.stdout


def _by_looplib(rows: int, steps: int) -> tuple[float, int]:
    """Returns steps a second, of the later reports of 500 steps, and bytes."""
    with tempfile.TemporaryDirectory() as folder:
        strategy = "parameter_server" if _ON.value == "servers" else "multi_worker"
        flags_ = [f"--model_dir={folder}", f"--strategy={strategy}", "--steps_per_loop=500",
                  f"--train_steps={steps}"]  # fmt: skip
        before = _loopback()
        _launched("benchmarks.embeddings", *flags_, ROWS=str(rows), PARTS=str(_PARTS.value))
        sent = _loopback() - before
        with open(os.path.join(folder, "metrics.jsonl")) as file:
            rates = [json.loads(line)["steps_per_second"] for line in file]
    return statistics.median(rates[1:] or rates), sent


def _with_servers(rows: int) -> None:
    few, many = 500, 1500
    ours, by_hand = [], []
    for _ in range(_ROUNDS.value):
        rate, sent = _by_looplib(rows, many)
        ours.append(rate)
        flags_ = [f"--rows={rows}", f"--steps={many}", f"--parts={_PARTS.value}"]
        text = _launched("benchmarks.embeddings_by_hand", *flags_)
        by_hand.append(float(re.search(r"rate (\S+)", text)[1]))
    size = (sent - _by_looplib(rows, few)[1]) / (many - few)
    ratio = statistics.median(one / other for one, other in zip(ours, by_hand))
    rates = f"looplib {statistics.median(ours):.1f}, by hand {statistics.median(by_hand):.1f}, ratio {ratio:.2f}"
    print(f"{rows:>11,} rows: {rates}; {size:,.0f} bytes a step", flush=True)


def _with_workers(rows: int) -> None:
    few, many = 500, 1500
    rates, sent = zip(*(_by_looplib(rows, many) for _ in range(_ROUNDS.value)))
    size = (statistics.median(sent) - _by_looplib(rows, few)[1]) / (many - few)
    print(f"{rows:>11,} rows: {statistics.median(rates):.1f}; {size:,.0f} bytes a step", flush=True)


def main(argv: list[str]) -> None:
    """Prints a line for each number of rows."""
    del argv
    logging.set_verbosity(logging.ERROR)
    for rows in _ROWS.value:
        on = {"device": _on_one_device, "servers": _with_servers, "workers": _with_workers}[_ON.value]
        (_growing if _GROWING.value else on)(rows)


if __name__ == "__main__":
    if "ROWS" in os.environ:
        sizes = [int(os.environ[name]) for name in ("ROWS", "PARTS")]
        looplib.launch.run(lambda config: (_Mean(*sizes), None), global_batch_size=_BATCH)
    app.run(main)
