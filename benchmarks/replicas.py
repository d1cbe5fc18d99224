"""How fast looplib is beside Orbit on two replicas of one CPU: `python -m benchmarks.replicas --workload=W1`.

The training of a workload of `benchmarks.speed`, its batch divided between the replicas. looplib's strategy sums on one
device, as `--strategy=mirrored` makes it on CPUs; Orbit runs on that and on `tf.distribute.MirroredStrategy()`, whose
sums are collective ops. Turns alternate in one process, and no result counts unless all compute the same.
"""

import functools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import numpy as np
import tensorflow as tf
from absl import app, flags, logging

from benchmarks import contestants, records
from benchmarks.workloads import WORKLOADS, Task, take_turns

_REPLICAS = 2
_WORKLOAD = flags.DEFINE_enum("workload", "W1", ["W1", "W2", "W3"], "The workload to run.")
_ROUNDS = flags.DEFINE_integer("rounds", 11, "Turns of each contestant that count.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 0.7, "Length of a turn, rounded to whole loops.", lower_bound=0)
_OUTPUT = flags.DEFINE_string("output", "build/bench.json", "The file to add the ratios to.")


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
    ours, orbit = contestants.looplib_loop, contestants.orbit_loop
    makers = {
        "looplib, graph": (summing, functools.partial(ours, engine="graph")),
        "looplib, own input": (summing, functools.partial(ours, engine="graph", own_input=True)),
        "orbit": (default, orbit),
        "orbit, sums on one device": (summing, orbit),
    }
    arrays = tuple(tf.constant(array) for array in workload.arrays())
    loops, amounts, outcomes = {}, {}, {}
    for name, (strategy, make) in makers.items():
        with strategy.scope():
            task = Task(workload, arrays)
        loops[name] = make(task, strategy=strategy)
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
