"""Dynamic loss scaling, without which small gradients are zero in float16."""

from collections.abc import Sequence

import tensorflow as tf

_START = 2.0**15
_GROWS_AFTER = 2000


class DynamicLossScale(tf.Module):
    """A factor for the loss that keeps float16 gradients in range (Micikevicius et al., 2018, arXiv:1710.03740).

    It starts at 2**15, is halved by each step whose gradients overflow, and doubled after 2,000 steps in a row without
    an overflow. Both numbers are variables, and part of a checkpoint.

    Attributes:
      scale: float32 scalar variable.
    """

    def __init__(self) -> None:
        super().__init__(name="loss_scale")
        self.scale = tf.Variable(_START, trainable=False, name="loss_scale")
        self._good_steps = tf.Variable(0, trainable=False, dtype=tf.int64, name="steps_since_overflow")

    @tf.autograph.experimental.do_not_convert
    def adjust(self, finite: tf.Tensor) -> None:
        """Adjusts the factor after a step; in replica context.

        Args:
          finite: boolean scalar, whether all gradients were finite; equal on all replicas.
        """
        steps = tf.where(finite, self._good_steps + 1, tf.zeros_like(self._good_steps))
        grows = steps >= _GROWS_AFTER
        doubled = tf.minimum(2 * self.scale, tf.float32.max / 2)
        halved = tf.maximum(self.scale / 2, 1.0)
        self.scale.assign(tf.where(grows, doubled, tf.where(finite, self.scale, halved)))
        self._good_steps.assign(tf.where(grows, tf.zeros_like(steps), steps))


@tf.autograph.experimental.do_not_convert
def read(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    """Returns the values of variables, for `restore_unless`."""
    return [variable.read_value() for variable in variables]


@tf.autograph.experimental.do_not_convert
def restore_unless(finite: tf.Tensor, variables: Sequence[tf.Variable], before: Sequence[tf.Tensor]) -> None:
    """Gives variables their earlier values back unless a boolean scalar is true; in replica context."""
    for variable, value in zip(variables, before):
        variable.assign(tf.where(finite, variable.read_value(), value))
