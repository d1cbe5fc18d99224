"""Follows files of numbers; the checkpoint has how often each number came, and a hash of their order."""

import time

import tensorflow as tf
from absl import flags

import looplib

_FILES = flags.DEFINE_string("files", "", "The pattern of the files, lines with a number each.")
_SHUFFLE = flags.DEFINE_boolean("shuffle", True, "Shuffles each file.")
_SETTLED = flags.DEFINE_string("settled", None, "See looplib.Follow.")
_EVERY = flags.DEFINE_float("every", 0.05, "See looplib.Follow.")
_SLOW = flags.DEFINE_float("slow", 0.0, "Seconds that a step takes longer.")
MOST = 4096  # numbers are below


class Followed(looplib.Trainer):
    def __init__(self, files, shuffle=True, follow=None, slow=0.0):
        self._files, self._shuffle, self._slow = files, shuffle, slow
        self._follow = follow or looplib.Follow(settled=None, every=0.05)
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        self.seen = tf.Variable(tf.zeros([MOST], tf.int32), trainable=False, aggregation=first)
        self.hash = tf.Variable(0, dtype=tf.int64, trainable=False, aggregation=first)

    def dataset(self, context):
        lines = context.records(self._files, follow=self._follow, shuffle=self._shuffle)
        return lines.map(lambda lines: tf.strings.to_number(lines, tf.int64))

    def step_fn(self, numbers):
        everyone = looplib.all_gather(numbers)
        self.seen.assign_add(tf.reduce_sum(tf.one_hot(everyone, MOST, dtype=tf.int32), axis=0))
        places = tf.range(1, tf.size(everyone, tf.int64) + 1)
        if self._slow:
            tf.numpy_function(self._wait, [], [])
        self.hash.assign(self.hash * 31 + tf.reduce_sum(everyone * everyone * places))
        return {"loss": tf.cast(numbers, tf.float32)}

    def _wait(self):
        time.sleep(self._slow)


def _make(config):
    follow = looplib.Follow(settled=_SETTLED.value, every=_EVERY.value)
    return Followed(_FILES.value, _SHUFFLE.value, follow, _SLOW.value), None


if __name__ == "__main__":
    looplib.launch.run(_make, global_batch_size=8, steps_per_loop=4)
