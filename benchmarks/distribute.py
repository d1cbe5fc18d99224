"""What a plain iterator gains over those of tf.distribute on CPUs: `python -m benchmarks.distribute`.

A classifier of 784-128-128-10 (W1) and one of 64-64-10 (W2) on a shuffled pipeline, with 1 and 2 replicas, read by one
and the other in alternation, in one process.
"""

import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags, logging

import looplib
from benchmarks import workloads

_ROUNDS = flags.DEFINE_integer("rounds", 9, "Measurements of each.")
_SECONDS = flags.DEFINE_float("seconds", 0.5, "Length of one.")
_MODELS = {"W1": ((784, 128, 128, 10), 128), "W2": ((64, 64, 10), 32)}


class _Shuffled(looplib.GradientTrainer):
    def __init__(self, widths):
        super().__init__(workloads.mlp(*widths)(), keras.optimizers.Adam(1e-3))
        random = np.random.default_rng(0)
        self._arrays = random.normal(size=(4096, widths[0])).astype("float32"), random.integers(10, size=4096)

    def dataset(self, context):
        data = tf.data.Dataset.from_tensor_slices(self._arrays).shuffle(4096, seed=context.seed).repeat()
        return data.batch(context.per_replica_batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    def loss_fn(self, inputs):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(inputs[1], self.model(inputs[0], training=True))


def _controller(strategy, widths, batch, distribute):
    with strategy.scope():
        trainer = _Shuffled(widths)
    return looplib.Controller(
        looplib.RunConfig(global_batch_size=batch, distribute=distribute),
        trainer=trainer,
        strategy=strategy,
        writers=[],
    )


def _rate(controller):
    """Steps per second of calls of 100 steps."""
    started, before = time.perf_counter(), controller.global_step
    while (seconds := time.perf_counter() - started) < _SECONDS.value:
        controller.train(controller.global_step + 100)
    return (controller.global_step - before) / seconds


def main(argv):
    """Prints the medians, and the quartiles of the ratio of neighbouring measurements."""
    del argv
    logging.set_verbosity(logging.WARNING)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategies = {
        "default, 1 replica": tf.distribute.get_strategy(),
        "one_device, 1 replica": tf.distribute.OneDeviceStrategy("/cpu:0"),
        "mirrored, 2 replicas": tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]),
    }
    for model, (widths, batch) in _MODELS.items():
        for name, strategy in strategies.items():
            ways = {how: _controller(strategy, widths, batch, how) for how in ("auto", "tf")}
            for controller in ways.values():
                controller.train(200)
            rates = [{how: _rate(controller) for how, controller in ways.items()} for _ in range(_ROUNDS.value)]
            ratios = [pair["auto"] / pair["tf"] for pair in rates]
            low, middle, high = statistics.quantiles(ratios, n=4)
            medians = {how: statistics.median(pair[how] for pair in rates) for how in ways}
            print(
                f"{model}, {name}: plain {medians['auto']:,.0f} steps/s, tf.distribute {medians['tf']:,.0f}, "
                f"ratio {middle:.2f} ({low:.2f} to {high:.2f})",
                flush=True,
            )
            for controller in ways.values():
                controller.close()


if __name__ == "__main__":
    app.run(main)
