"""Clocks inside of a `tf.function`: the time of day, and the seconds that a step waits for its data."""

from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

_Batch = TypeVar("_Batch")


@tf.autograph.experimental.do_not_convert
def now() -> tf.Tensor:
    """Returns the time in seconds, float64 scalar tensor; 0 if ops have to be deterministic.

    With `tf.config.experimental.enable_op_determinism` TensorFlow refuses to run a clock.
    """
    with tf.init_scope():
        try:
            tf.timestamp()
        except tf.errors.FailedPreconditionError:
            return tf.constant(0, tf.float64)
    return tf.timestamp()


def _leaves(batch: object) -> list[tf.Tensor]:
    return tf.nest.flatten(batch, expand_composites=True)


# AutoGraph has to convert this: without it, TensorFlow refuses a trace with more than some 30 calls of next().
def timed(
    fetch: Callable[[], _Batch], ready: Callable[[_Batch], list[tf.Tensor]] = _leaves
) -> tuple[_Batch, tf.Tensor]:
    """Calls a function that fetches a batch.

    Args:
      fetch: the function.
      ready: returns the tensors that exist once the batch has arrived.

    Returns:
      (what `fetch` returned, the seconds until it was `ready` as a float64 tensor).
    """
    start = now()
    with tf.control_dependencies([start]):
        batch = fetch()
    with tf.control_dependencies(ready(batch)):
        return batch, now() - start
