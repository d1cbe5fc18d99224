"""What media cost in the steps that do not show them: `python -m benchmarks.media`.

The MLP of W1 trains as it is, and with images, a histogram of activations and a histogram of an input that went through
twenty products of matrices, which only that histogram needs. The two take turns, of steps that are not reported; a
turn of reported loops, which writes nothing, is shown beside it. The ratio is the processor time without media divided
by that with them, which other programs on the machine disturb less than wall time.
"""

import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import tensorflow as tf
from absl import app, flags, logging

import looplib
from benchmarks import records
from benchmarks.workloads import WORKLOADS
from looplib.loop.contracts import Request

_ROUNDS = flags.DEFINE_integer("rounds", 25, "Turns of each that count.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 400, "Steps of a turn.", lower_bound=2)
_ENGINES = flags.DEFINE_list("engines", ["graph", "xla"], "The loop engines to measure.")
_OUTPUT = flags.DEFINE_string("output", "build/bench.json", "The file to add the ratios to.")


class Mlp(looplib.GradientTrainer):
    """The MLP of W1, which may show images and histograms."""

    def __init__(self, arrays, shows):
        import keras

        super().__init__(WORKLOADS["W1"].model(), keras.optimizers.Adam(1e-3))
        self._arrays, self._shows = arrays, shows

    def dataset(self, context):
        """Returns rows of the arrays."""
        return context.indices(len(self._arrays[0])).map(lambda i: tuple(tf.gather(array, i) for array in self._arrays))

    def loss_fn(self, inputs):
        """Returns the losses, and what is shown."""
        features, labels = inputs
        logits = self.model(features, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return losses, self._media(features, logits) if self._shows else {}

    def _media(self, features, logits):
        mixed = features
        for _ in range(20):
            mixed = tf.matmul(features, tf.matmul(mixed, features, transpose_a=True)) * 1e-3
        return {
            "images": looplib.image(tf.reshape(features, [-1, 28, 28, 1])),
            "logits": looplib.histogram(logits),
            "mixed": looplib.histogram(mixed),
        }


def _seconds(controller, show):
    """Runs a turn past the controller's schedule; returns its seconds of processor time."""
    loop, steps = controller.loops["train"], _STEPS.value
    started = time.process_time()
    loop.run(Request(steps, read=True, show=show), "train")
    loop.read()
    loop.shown()
    return time.process_time() - started


def main(argv):
    """Measures each engine."""
    del argv
    logging.set_verbosity(logging.ERROR)
    found, arrays = [], WORKLOADS["W1"].arrays()
    for engine in _ENGINES.value:
        controllers = [
            looplib.Controller(
                looplib.RunConfig(global_batch_size=128, loop=engine), trainer=Mlp(arrays, shows), writers=[]
            )
            for shows in (False, True)
        ]
        for name, show in (("steps not shown", False), ("a step in each turn shown", True)):
            turns = [[_seconds(controller, show) for controller in controllers] for _ in range(_ROUNDS.value + 3)][3:]
            ratios = [without / with_media for without, with_media in turns]
            found.append(records.record(f"W1, media, {engine}", name, ratios, seconds=turns))
        for controller in controllers:
            controller.close()
    records.show(found)
    records.add(_OUTPUT.value, found)


if __name__ == "__main__":
    app.run(main)
