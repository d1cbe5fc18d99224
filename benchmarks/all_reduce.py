"""How long all-reduce takes between the workers of a cluster, for `benchmarks.scaling_model`.

    python -m looplib launch --workers=2 -- python -m benchmarks.all_reduce

and on a cluster the same module, started once a worker (docs/cluster.md). Times are of one sum of a float32 tensor over
all workers in a `tf.function`, the median of rounds. The line printed last is the ring's: 2(n-1) messages in turn, each
of 1/n of the bytes, at the latency and the bandwidth that fit the times best, by least squares of relative errors.
"""

import argparse
import os
import statistics
import sys
import time

import numpy as np
import tensorflow as tf

from benchmarks.scaling_model import all_reduce_seconds
from looplib.cluster import environment
from looplib.cluster.peers import WatchedPeers
from looplib.errors import UsageError

SIZES = tuple(4**k for k in range(6, 14))  # bytes: 4 KiB to 64 MiB
_ROUND_SECONDS = 0.3


def main(argv=None):
    """Runs as one of the workers; the chief prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="rounds a size (default %(default)s)")
    options = parser.parse_args(argv)
    me = environment.resolve()
    if me is None:
        raise UsageError(f"the environment does not list the workers; {environment.EXPECTED}")
    peers = WatchedPeers(me)
    os.environ["TF_CONFIG"] = me.tf_config
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    times = {size: _measure(strategy, size, options.rounds) for size in SIZES}
    if me.is_chief:
        n = strategy.num_replicas_in_sync
        for size, seconds in times.items():
            print(f"{n} workers, {size / 1024:8.0f} KiB: {1000 * seconds:8.3f} ms")
        latency, bandwidth = fit(n, times)
        errors = [all_reduce_seconds(n, size, latency, bandwidth) / seconds - 1 for size, seconds in times.items()]
        print(
            f"--latency={latency:.3g} --bandwidth={bandwidth:.3g}  (seconds, bytes/s; the ring's times with these are "
            f"{min(errors):+.0%} to {max(errors):+.0%} of those measured)"
        )
    peers.leave()


def fit(n, times):
    """Latency and bandwidth of the ring that fit times best.

    Args:
      n: number of workers.
      times: dict from bytes to seconds.

    Returns:
      (seconds a message, bytes a second).
    """
    sizes, seconds = np.array(list(times)), np.array(list(times.values()))
    columns = np.stack([np.full(len(sizes), 2 * (n - 1)), 2 * (n - 1) / n * sizes], axis=1) / seconds[:, None]
    (latency, inverse), *_ = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)
    return max(latency, 0.0), 1 / max(inverse, 1e-15)


def _measure(strategy, size, rounds):
    """Median seconds of one all-reduce of a tensor of so many bytes."""
    n = strategy.num_replicas_in_sync

    @tf.function
    def loop(count):
        def replica(value):
            value = tf.identity(value)  # a loop's own variable has no device, which all_reduce needs
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value) / n

        value = tf.ones([size // 4])
        for _ in tf.range(count):
            value = strategy.run(replica, args=(value,))
        return value[0]

    loop(tf.constant(1))
    start = time.perf_counter()
    loop(tf.constant(3))
    seconds = tf.constant((time.perf_counter() - start) / 3, tf.float32)
    # All must run the same count, so they take the mean of what each has measured.
    mean = float(strategy.reduce(tf.distribute.ReduceOp.MEAN, strategy.run(lambda: seconds), axis=None))
    count = tf.constant(max(3, int(_ROUND_SECONDS / mean)))
    measured = []
    for _ in range(rounds):
        start = time.perf_counter()
        loop(count)
        measured.append((time.perf_counter() - start) / int(count))
    return statistics.median(measured)


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        sys.exit(f"error: {error}")
