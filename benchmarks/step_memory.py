"""Memory that a step takes beyond its model and data: `python -m benchmarks.step_memory`.

A residual network of dense blocks, each setting in a process of its own: the whole batch at once, in micro-batches,
with rematerialized blocks, and a batch of the size of a micro-batch for comparison.
"""

import os
import resource
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import looplib

_WIDTH, _POSITIONS, _BLOCKS = 128, 64, 12
_BATCH = flags.DEFINE_integer("batch", 64, "Global batch size.")
_STEPS = flags.DEFINE_integer("steps", 6, "Steps of each setting.")
_SETTING = flags.DEFINE_string("setting", None, "Runs one setting in this process: batch,micro_batches,rematerialize.")


class _Deep(looplib.GradientTrainer):
    def __init__(self, **settings):
        outputs = inputs = keras.Input((_POSITIONS, _WIDTH))
        for number in range(_BLOCKS):
            layers = [keras.layers.Dense(4 * _WIDTH, "gelu"), keras.layers.Dense(_WIDTH)]
            outputs = outputs + keras.Sequential(layers, name=f"block_{number}")(outputs)
        super().__init__(keras.Model(inputs, outputs), keras.optimizers.SGD(1e-3), **settings)
        self._x = np.random.default_rng(0).normal(size=(256, _POSITIONS, _WIDTH)).astype("float32")

    def dataset(self, context):
        return context.indices(len(self._x)).map(lambda i: tf.gather(self._x, i))

    def loss_fn(self, inputs):
        return tf.square(self.model(inputs, training=True) - 1)


def _peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _run(batch, micro_batches, rematerialize):
    trainer = _Deep(micro_batches=micro_batches, rematerialize=("block",) if rematerialize else ())
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=batch, steps_per_loop=1), trainer=trainer, writers=[]
    ) as controller:
        before = _peak()
        controller.train(2)
        started = time.perf_counter()
        controller.train(_STEPS.value)
        seconds = (time.perf_counter() - started) / (_STEPS.value - 2)
    print(f"{_peak() - before:.0f} {1000 * seconds:.0f}")


def main(argv):
    """Prints megabytes and milliseconds of a step, by setting."""
    del argv
    if _SETTING.value:
        _run(*map(int, _SETTING.value.split(",")))
        return
    batch = _BATCH.value
    settings = [(batch, count, 0) for count in (1, 2, 4, 8)] + [(batch, 1, 1), (batch, 8, 1), (batch // 8, 1, 0)]
    print("batch  micro-batches  rematerialized  MB beyond the model  ms a step")
    for setting in settings:
        flag = f"--setting={','.join(map(str, setting))}"
        command = [sys.executable, "-m", "benchmarks.step_memory", flag, f"--steps={_STEPS.value}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        memory, milliseconds = done.stdout.split()[-2:]
        print(f"{setting[0]:5}  {setting[1]:13}  {'yes' if setting[2] else 'no':>14}  {memory:>19}  {milliseconds:>9}")


if __name__ == "__main__":
    app.run(main)
