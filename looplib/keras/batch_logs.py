"""The logs of each batch of an epoch, for callbacks that observe batches; they come to the host with its report."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.task import reductions

_OF_EACH = " of each batch"


class BatchLogs:
    """What the steps of an epoch log, as in `fit`: the metrics since the epoch began.

    Attributes:
      steps: how many steps an epoch has; they have to be known before a step is traced.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._found: dict[str, np.ndarray] = {}

    def outputs(self, logs: dict[str, Any], step: tf.Tensor) -> dict[str, reductions.Reduction]:
        """Returns what a step reports besides its metrics, from its logs and the steps before it."""
        place = tf.one_hot(tf.cast(step, tf.int64) % self.steps, self.steps)
        found = {}
        for name, value in logs.items():
            value = tf.cast(value, tf.float32)
            alone = tf.reshape(place, [self.steps, *[1] * value.shape.rank])
            # A value that is not finite is only that of its own step.
            found[f"{name}{_OF_EACH}"] = reductions.total(tf.math.multiply_no_nan(value[None], alone))
        return found

    def taken(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Takes what the steps reported; returns the other metrics of a report."""
        found = {name: value for name, value in metrics.items() if name.endswith(_OF_EACH)}
        self._found = {name.removesuffix(_OF_EACH): np.asarray(value) for name, value in found.items()}
        return {name: value for name, value in metrics.items() if name not in found}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Returns the logs of the batches of the last report."""
        for index in range(self.steps):
            values = {name: value[index] for name, value in self._found.items()}
            yield {name: value if value.ndim else float(value) for name, value in values.items()}
