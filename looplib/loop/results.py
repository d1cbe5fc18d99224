"""What a call on a worker returns, and the totals of the metrics, which the coordinator keeps."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from looplib.loop.base import Metrics
from looplib.loop.reducer import Reducer


class RemoteReducer(Reducer):
    """A `Reducer` whose steps run on workers, so that it keeps its totals on the coordinator."""

    def _make_totals(self, size: int) -> tf.Variable:
        return tf.Variable(tf.zeros([size], tf.float64), trainable=False, name=f"{self._who}_totals")

    @tf.autograph.experimental.do_not_convert
    def none(self) -> tf.Tensor:
        """Returns the totals of no step, float64 `[n]`; on a worker."""
        return tf.zeros(self._totals.shape, tf.float64)

    def add(self, contributions: tf.Tensor) -> None:
        """Adds the contribution of a call, float64 `[n]`."""
        self._totals.assign(self.joined(self._totals.read_value(), contributions))

    def finite(self) -> bool:
        """Returns whether all watched values were finite so far."""
        return not self._watched or bool(self.finite_in(self._totals.read_value()))

    def read(self) -> tuple[np.ndarray, Metrics]:
        """See `Reducer`."""
        totals, results = self._totals.numpy(), self.results()
        self._reset_local()
        return totals, results

    def clear(self) -> None:
        """See `Reducer`."""
        if self.created:
            self._reset_local()


class WorkerResult(NamedTuple):
    """What a call did on a worker.

    Attributes:
      done: steps.
      seconds: seconds that it took.
      waited: seconds that its steps waited for data.
      contribution: to the totals, float64 `[n]`.
    """

    done: int
    seconds: float
    waited: float
    contribution: np.ndarray


def packed(done: tf.Tensor, started: tf.Tensor, waited: tf.Tensor, totals: tf.Tensor) -> tf.Tensor:
    """Packs a `WorkerResult` into one float64 vector, on a worker."""
    with tf.control_dependencies([totals]):
        seconds = tf.timestamp() - started
    return tf.concat([tf.stack([tf.cast(done, tf.float64), seconds, waited]), totals], axis=0)


def unpacked(packed: tf.Tensor) -> WorkerResult:
    """Unpacks a vector of `packed`."""
    values = packed.numpy()
    return WorkerResult(int(values[0]), float(values[1]), float(values[2]), values[3:])
