"""How fast looplib is beside Orbit on two replicas of one CPU: `python -m benchmarks.replicas --workload=W1`.

The training of a workload of `benchmarks.speed`, its batch divided between the replicas. looplib's strategy sums on one
device, as `--strategy=mirrored` makes it on CPUs; Orbit runs on that and on `tf.distribute.MirroredStrategy()`, whose
sums are collective ops. Turns alternate in one process, and no result counts unless all compute the same.
"""

import contextlib
import functools
import io
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import numpy as np
import orbit
import tensorflow as tf
from absl import app, flags, logging

import looplib
from benchmarks import records
from benchmarks.workloads import WORKLOADS, Task, means, take_turns, timed

_REPLICAS = 2
_WORKLOAD = flags.DEFINE_enum("workload", "W1", ["W1", "W2", "W3"], "The workload to run.")
_ROUNDS = flags.DEFINE_integer("rounds", 11, "Turns of each contestant that count.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 0.7, "Length of a turn, rounded to whole loops.", lower_bound=0)
_OUTPUT = flags.DEFINE_string("output", "build/bench.json", "The file to add the ratios to.")


class _Looplib(looplib.Trainer):
    def __init__(self, task, own_input):
        self.model, self.optimizer = task.model, task.optimizer
        self._task, self._own_input = task, own_input

    def dataset(self, context):
        return self._task.own_input(context) if self._own_input else self._task.dataset(_REPLICAS)

    def step_fn(self, inputs):
        losses, right = self._task.step(*inputs, mean=self.global_mean)
        return {"loss": losses, "accuracy": right}


class _Orbit(orbit.StandardTrainer):
    def __init__(self, task, strategy):
        super().__init__(strategy.distribute_datasets_from_function(lambda context: task.dataset(_REPLICAS)))
        self._task, self._strategy = task, strategy
        kind = dict(synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM)
        with strategy.scope():
            self._sums = tf.Variable(tf.zeros(3), **kind)
        self._reset = tf.function(lambda: strategy.run(lambda: self._sums.assign(tf.zeros(3))), autograph=False)

    def train_loop_begin(self):
        self._reset()

    def train_step(self, iterator):
        self._strategy.run(self._step, args=(next(iterator),))

    def _step(self, inputs):
        losses, right = self._task.step(*inputs, mean=lambda values: tf.reduce_sum(values) / self._task.workload.batch)
        self._sums.assign_add(tf.stack([tf.reduce_sum(losses), tf.reduce_sum(right), tf.cast(len(losses), tf.float32)]))

    def train_loop_end(self):
        return means(self._sums.read_value())


def looplib_loop(task, strategy, engine, own_input=False):
    """Builds looplib's loop."""
    controller = looplib.Controller(
        trainer=_Looplib(task, own_input),
        strategy=strategy,
        global_batch_size=task.workload.batch,
        steps_per_loop=task.steps_per_loop,
        loop=engine,
        writers=[],
    )
    return timed(lambda steps: controller.train(controller.global_step + steps), task.loss)


def orbit_loop(task, strategy):
    """Builds Orbit's controller, which prints to nowhere."""
    step, trainer = task.optimizer.iterations.value, _Orbit(task, strategy)
    controller = orbit.Controller(
        trainer=trainer, strategy=strategy, global_step=step, steps_per_loop=task.steps_per_loop
    )

    def run(steps):
        with contextlib.redirect_stdout(io.StringIO()):
            controller.train(int(step.read_value()) + steps)

    return timed(run, task.loss)


def measure(workload, rounds, seconds):
    """Gives all contestants turns.

    Args:
      workload: `Workload`.
      rounds: turns that count.
      seconds: about how long a turn is.

    Returns:
      dict from contestant to float array `[rounds]`, steps per second.

    Raises:
      RuntimeError: if the contestants do not compute the same.
    """
    devices = [f"/cpu:{i}" for i in range(_REPLICAS)]
    default = tf.distribute.MirroredStrategy(devices)
    summing = tf.distribute.MirroredStrategy(devices, cross_device_ops=tf.distribute.ReductionToOneDevice())
    makers = {
        "looplib, graph": (summing, functools.partial(looplib_loop, engine="graph")),
        "looplib, xla": (summing, functools.partial(looplib_loop, engine="xla")),
        "looplib, own input": (summing, functools.partial(looplib_loop, engine="xla", own_input=True)),
        "orbit": (default, orbit_loop),
        "orbit, sums on one device": (summing, orbit_loop),
    }
    if workload is WORKLOADS["W3"]:  # XLA runs convolutions on one thread, ten times slower
        makers = {name: maker for name, maker in makers.items() if "xla" not in name and "own input" not in name}
    arrays = tuple(tf.constant(array) for array in workload.arrays())
    loops, amounts, outcomes = {}, {}, {}
    for name, (strategy, make) in makers.items():
        with strategy.scope():
            task = Task(workload, arrays)
        loops[name] = make(task, strategy)
        loops[name].run(workload.loop)
        outcomes[name] = loops[name].loss()
        spent, _ = loops[name].run(3 * workload.loop)
        amounts[name] = workload.loop * max(1, round(3 * seconds / spent))
    for name, loss in outcomes.items():
        tolerance = 0.5 if "own input" in name else workload.tolerance  # which has another order
        if not abs(loss - outcomes["orbit"]) <= tolerance * outcomes["orbit"]:
            raise RuntimeError(f"{name} does not compute what Orbit does: a loss of {loss}, not {outcomes['orbit']}")
    return take_turns(loops, amounts, workload.loop, rounds)


def main(argv):
    """Runs the workload, prints its table and adds its ratios to the file."""
    del argv
    logging.set_verbosity(logging.WARNING)
    devices = [tf.config.LogicalDeviceConfiguration()] * _REPLICAS
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    speeds = measure(WORKLOADS[_WORKLOAD.value], _ROUNDS.value, _SECONDS.value)
    print(f"\n{_WORKLOAD.value} on {_REPLICAS} replicas; {_ROUNDS.value} rounds\n{'':<28}{'steps/s':>9} (quartiles)")
    for name, values in speeds.items():
        low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
        print(f"{name:<28}{median:>9.0f} ({low:.0f}-{high:.0f})")
    found = [
        records.record(f"{_WORKLOAD.value} x2, {name.removeprefix('looplib, ')}", peer, speeds[name] / speeds[peer])
        for name in speeds
        for peer in speeds
        if name.startswith("looplib") and peer.startswith("orbit")
    ]
    records.show(found)
    records.add(_OUTPUT.value, found)


if __name__ == "__main__":
    app.run(main)
