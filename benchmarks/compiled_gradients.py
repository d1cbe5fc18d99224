"""What `GradientTrainer(jit_compile=True)` gains, on one process or on several workers.

    python -m looplib launch --workers=2 -- python -m benchmarks.compiled_gradients

Each process holds two copies of each training, which take turns; alone, it is one device.
"""

import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags, logging

import looplib
from benchmarks.workloads import WORKLOADS, per_example

_WORKLOADS = flags.DEFINE_list("workloads", ["W1", "W2", "W4"], "Trainings of `benchmarks.workloads`, with XLA's ops.")
_ROUNDS = flags.DEFINE_integer("rounds", 11, "Turns that count.", lower_bound=1)
_LOOPS = flags.DEFINE_integer("loops", 2, "Loops of a turn.", lower_bound=1)
_STEPS = 50  # of a loop
_COPIES = 2  # of each training: two copies of one loop in a process differ by up to a tenth


class Training(looplib.GradientTrainer):
    """The training of a workload, as a loss."""

    def __init__(self, workload, jit_compile):
        keras.utils.set_random_seed(0)
        super().__init__(workload.model(), keras.optimizers.Adam(1e-3), jit_compile=jit_compile)
        self._arrays = workload.arrays()

    def dataset(self, context):
        """Returns the batches of a replica."""
        x, y = self._arrays
        return context.indices(len(x)).map(lambda i: (tf.gather(x, i), tf.gather(y, i)))

    def loss_fn(self, inputs):
        """Returns the cross entropy of each example."""
        x, y = inputs
        return per_example(tf.nn.sparse_softmax_cross_entropy_with_logits(y, self.model(x, training=True)))


def measure(workload, strategy):
    """Returns the speed of the compiled gradients over that of the others, float array `[rounds]`."""
    controllers, losses, seconds = {}, [], {False: [], True: []}
    for compiled in (False, True) * _COPIES:
        with strategy.scope():
            trainer = Training(workload, compiled)
        controller = looplib.Controller(
            looplib.RunConfig(global_batch_size=workload.batch, steps_per_loop=_STEPS),
            trainer=trainer,
            strategy=strategy,
            writers=[],
        )
        losses.append(controller.train(_STEPS)["loss"])
        controllers[compiled, len(controllers)] = controller
    if not np.allclose(losses, losses[0], rtol=1e-3):
        raise RuntimeError(f"the trainings do not compute the same: their losses are {losses}")
    for _ in range(_ROUNDS.value):
        for compiled in seconds:
            started = time.perf_counter()
            for (kind, _), controller in controllers.items():
                if kind == compiled:
                    controller.train(controller.global_step + _STEPS * _LOOPS.value)
            seconds[compiled].append(time.perf_counter() - started)
    for controller in controllers.values():
        controller.close()
    return np.array(seconds[False]) / seconds[True]


def main(argv):
    """Measures each workload; the chief prints."""
    del argv
    logging.set_verbosity(logging.WARNING)
    several = "TF_CONFIG" in os.environ
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if several else tf.distribute.get_strategy()
    for name in _WORKLOADS.value:
        low, median, high = np.quantile(measure(WORKLOADS[name], strategy), [0.25, 0.5, 0.75])
        print(f"{name}, replicas: {strategy.num_replicas_in_sync}: {median:.2f} ({low:.2f} to {high:.2f})", flush=True)


if __name__ == "__main__":
    app.run(main)
