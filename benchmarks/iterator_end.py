"""How long the end of an iterator holds up its caller: `python -m benchmarks.iterator_end`.

A pipeline that tunes itself is read for a while and dropped, by turns as a plain Python object and as looplib does it.
"""

import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from absl import app, flags

from looplib.config.run_config import RunConfig
from looplib.data import pipelines

_ROUNDS = flags.DEFINE_integer("rounds", 60, "Iterators of each kind.")
_SECONDS = flags.DEFINE_float("seconds", 1.0, "How long each is read.")


class _Data:
    batches = "per_replica"
    batch_size_varies = False

    def dataset(self, context):
        numbers = tf.data.Dataset.range(10**9).map(lambda i: i + 1, num_parallel_calls=tf.data.AUTOTUNE)
        return numbers.batch(context.per_replica_batch_size).prefetch(tf.data.AUTOTUNE)


def _drop(stream, iterator):
    del stream, iterator  # the last reference to it


def _end(stream, iterator):
    stream.end(iterator)


def _seconds_to_let_go(let_go, stream):
    held = [stream.iterate()]
    started = time.perf_counter()
    while time.perf_counter() - started < _SECONDS.value:
        stream.next_as_optional(held[0])
        time.sleep(0.02)
    started = time.perf_counter()
    let_go(stream, held.pop())
    return time.perf_counter() - started


def main(argv):
    """Prints median, number above 50 ms and longest of each."""
    del argv
    strategy = tf.distribute.get_strategy()
    stream = pipelines.Pipelines(strategy, _Data(), RunConfig(global_batch_size=8), training=False).distribute()
    ways = {"dropped": _drop, "looplib": _end}
    found = {name: [] for name in ways}
    for _ in range(_ROUNDS.value):
        for name, let_go in ways.items():
            found[name].append(_seconds_to_let_go(let_go, stream))
    for name, seconds in found.items():
        late = sum(second > 0.05 for second in seconds)
        print(
            f"{name}: median {1000 * np.median(seconds):.1f} ms, {late} of {len(seconds)} over 50 ms, "
            f"longest {1000 * max(seconds):.0f} ms"
        )


if __name__ == "__main__":
    app.run(main)
