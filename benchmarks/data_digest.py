"""What the data digest costs in each step: `python -m benchmarks.data_digest`.

The models of W1 to W4 train without and with `RunConfig(data_digest=True)`. The two take turns, of steps of the inner
loop alone. The ratio is the processor time without the digest divided by that with it, which other programs on the
machine disturb less than wall time.
"""

import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import tensorflow as tf
from absl import app, flags, logging

import looplib
from benchmarks import records
from benchmarks.workloads import WORKLOADS, per_example
from looplib.loop.base import Request

_ROUNDS = flags.DEFINE_integer("rounds", 11, "Turns of each that count.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 1.0, "Length of a turn, about.", lower_bound=0)
_ENGINES = flags.DEFINE_list("engines", ["graph", "auto"], "The loop engines to measure.")
_WORKLOADS = flags.DEFINE_list("workloads", ["W1", "W2", "W3", "W4"], "The workloads.")
_OUTPUT = flags.DEFINE_string("output", "build/bench.json", "The file to add the ratios to.")


class Plain(looplib.GradientTrainer):
    """The model of a workload, with Adam."""

    def __init__(self, workload, arrays):
        import keras

        super().__init__(workload.model(), keras.optimizers.Adam(1e-3))
        self._arrays = arrays

    def dataset(self, context):
        """Returns rows of the arrays."""
        return context.indices(len(self._arrays[0])).map(lambda i: tuple(tf.gather(array, i) for array in self._arrays))

    def loss_fn(self, inputs):
        """Returns the losses."""
        logits = self.model(inputs[0], training=True)
        return per_example(tf.nn.sparse_softmax_cross_entropy_with_logits(inputs[1], logits))


def _turn(controller, steps):
    """Runs steps past the controller's schedule; returns their seconds of processor time."""
    loop = controller.loops["train"]
    started = time.process_time()
    loop.run(Request(steps, read=True, horizon=10**6), "train")
    loop.read_metrics()
    return time.process_time() - started


def _measure(workload, engine):
    """Returns the seconds of processor time of turns: without and with the digest."""
    arrays = workload.arrays()
    controllers = [
        looplib.Controller(
            looplib.RunConfig(global_batch_size=workload.batch, loop=engine, data_digest=asks),
            trainer=Plain(workload, arrays),
            writers=[],
        )
        for asks in (False, True)
    ]
    for controller in controllers:  # an engine is chosen in the first loops
        for _ in range(10):
            _turn(controller, workload.loop)
    seconds = _turn(controllers[0], workload.loop)
    steps = workload.loop * max(1, round(_SECONDS.value / seconds))
    turns = [[_turn(controller, steps) for controller in controllers] for _ in range(_ROUNDS.value)]
    for controller in controllers:
        controller.close()
    return turns


def main(argv):
    """Measures each workload and engine."""
    del argv
    logging.set_verbosity(logging.ERROR)
    found = []
    for name in _WORKLOADS.value:
        for engine in _ENGINES.value:
            turns = _measure(WORKLOADS[name], engine)
            ratios = [without / with_digest for without, with_digest in turns]
            found.append(records.record(f"{name}, data digest, {engine}", "with it", ratios, seconds=turns))
    records.show(found)
    records.add(_OUTPUT.value, found)


if __name__ == "__main__":
    app.run(main)
