"""What `ReplicaAgreement` costs: `python -m benchmarks.agreement`.

A comparison of the replicas comes in every second window of a training, so that windows with and without one alternate.
Their difference is the cost of a comparison, given as a share of the default of 1,000 steps.
"""

import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags, logging

import looplib
from benchmarks import records
from benchmarks.workloads import WORKLOADS, mlp

_ROUNDS = flags.DEFINE_integer("rounds", 9, "Pairs of windows that count.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", "build/bench.json", "The file to add the ratios to.")
_EVERY = 1000  # the default
# By name: the model, and the steps of a window and of a loop.
_MODELS = {"W1": (WORKLOADS["W1"].model, 1000, 100), "784-2048-2048-10": (mlp(784, 2048, 2048, 10), 40, 20)}


class Classifier(looplib.GradientTrainer):
    """A classifier of the data of W1."""

    def __init__(self, model, arrays):
        super().__init__(model(), keras.optimizers.Adam(1e-3))
        self._arrays = arrays

    def dataset(self, context):
        """Returns rows of the arrays."""
        return context.indices(len(self._arrays[0])).map(lambda i: tuple(tf.gather(array, i) for array in self._arrays))

    def loss_fn(self, inputs):
        """Returns the losses."""
        return tf.nn.sparse_softmax_cross_entropy_with_logits(inputs[1], self.model(inputs[0], training=True))


def measure_replicas(name):
    """Trains on two replicas; returns the seconds of windows without a comparison and with one, and of comparisons."""
    model, window, per_loop = _MODELS[name]
    marks, began, spent = [], [0.0], []

    def before(event):
        began[0] = time.perf_counter()

    def after(event):
        now = time.perf_counter()
        if event.step % (2 * window) == 0:
            spent.append(now - began[0])
        if event.step % window == 0:
            marks.append(now)

    sums = tf.distribute.ReductionToOneDevice()
    strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"], cross_device_ops=sums)
    with strategy.scope():
        trainer = Classifier(model, WORKLOADS["W1"].arrays())
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=128, steps_per_loop=per_loop, loop="graph"), trainer=trainer,
        strategy=strategy, writers=[], actions=[before, looplib.ReplicaAgreement(2 * window), after],
    ) as controller:  # fmt: skip
        controller.train(2 * window * (_ROUNDS.value + 2))
    seconds = np.diff(marks[3:])  # the first windows compile
    return seconds[0::2], seconds[1::2], spent[1:]


def show_replicas(name):
    """Prints the cost of a comparison; returns the record of the speed with one beside that without."""
    window = _MODELS[name][1]
    without, with_one, spent = measure_replicas(name)
    pairs = min(len(without), len(with_one))
    step, direct = np.median(without) / window, np.median(spent)
    cost = np.median(with_one[:pairs] - without[:pairs])
    print(
        f"{name}, 2 replicas: a step {1000 * step:.2f} ms, a comparison {1000 * direct:.1f} ms (by windows "
        f"{1000 * cost:.1f} ms), of {_EVERY} steps {direct / (_EVERY * step):.3%}"
    )
    ratios = [1 / (1 + one / (_EVERY * step)) for one in spent]
    return records.record(f"{name} x2, replicas compared", f"none, of {_EVERY} steps", ratios)


def main(argv):
    """Measures each model."""
    del argv
    logging.set_verbosity(logging.ERROR)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    found = [show_replicas(name) for name in _MODELS]
    records.show(found)
    records.add(_OUTPUT.value, found)


if __name__ == "__main__":
    app.run(main)
