"""What a call of the loop on the device takes and returns."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf


class Numbers(NamedTuple):
    """What the loop on the device is called with, as one int64 tensor `[4]`, so that a new number traces nothing.

    Attributes:
      steps: steps to run.
      chunks: how many chunks of them the data is sure to last for; single steps without a chunk.
      stride: steps between two looks at the stop flag.
      read: 1 if the totals are to be read and reset after the last step.
    """

    steps: int
    chunks: int
    stride: int
    read: int


class Status(NamedTuple):
    """Whether to stop, and whether all values are finite: boolean scalar tensors, equal on all workers."""

    stopped: tf.Tensor
    finite: tf.Tensor

    @property
    def go(self) -> tf.Tensor:
        """Whether to do another step."""
        return self.finite & ~self.stopped


class Outcome(NamedTuple):
    """What the loop on the device returns, as one float64 vector `[7 + n]` with the totals, read by the host at once.

    Attributes:
      done: steps.
      stopped: `Status.stopped` after the last step, 0 or 1.
      finite: `Status.finite` after the last step, 0 or 1.
      waited: seconds that steps waited for data.
      seconds: of the loop, the mean of all workers.
      counted: the step's counter after the last step.
      taken: whether the totals were reset, 0 or 1.
    """

    done: float | tf.Tensor
    stopped: float | tf.Tensor
    finite: float | tf.Tensor
    waited: float | tf.Tensor
    seconds: float | tf.Tensor
    counted: float | tf.Tensor
    taken: float | tf.Tensor

    @tf.autograph.experimental.do_not_convert
    def with_totals(self, totals: tf.Tensor) -> tf.Tensor:
        """Returns the vector: these tensors, and totals, float64 `[n]`."""
        return tf.concat([tf.stack([tf.cast(part, tf.float64) for part in self]), totals], axis=0)

    @classmethod
    def divide(cls, vector: np.ndarray) -> tuple["Outcome", np.ndarray]:
        """Returns the outcome, of Python floats, and the totals, float64 `[n]`, of a vector that the host has read."""
        parts = len(cls._fields)
        return cls(*vector[:parts].tolist()), vector[parts:]
