"""Clipping and norms of gradients that are summed over replicas, and the scale of the loss in float16."""

import dataclasses
import numbers
from collections.abc import Sequence

import tensorflow as tf

from looplib.errors import SettingError

_START, _GROWS_AFTER = 2.0**15, 2000  # of the scale of the loss
_SMALL = 1e-3  # the least norm of a unit's weights in adaptive clipping, so that zero weights can move


@dataclasses.dataclass(frozen=True)
class Clipping:
    """Limits for gradients, applied in the order of the attributes; None is no limit.

    Attributes:
      value: limit for the absolute value of each element.
      norm: limit for the Euclidean norm of each variable's gradient.
      global_norm: limit for the norm of all gradients together (Pascanu et al., 2013, arXiv:1211.5063).
      adaptive: limit for the norm of each unit's gradient over the norm of its weights (Brock et al., 2021,
        arXiv:2102.06171, which uses 0.01). A unit is all of a variable except the last dimension; a bias or scale is
        one unit.

    Raises:
      UsageError: for a limit that is not positive.
    """

    value: float | None = None
    norm: float | None = None
    global_norm: float | None = None
    adaptive: float | None = None

    def __post_init__(self) -> None:
        for name, limit in dataclasses.asdict(self).items():
            number = isinstance(limit, numbers.Real) and not isinstance(limit, bool)
            if limit is not None and not (number and limit > 0):
                raise SettingError(f"clip_{name} is {limit!r}; expected a positive number, or None for no clipping")

    @property
    def any(self) -> bool:
        """Whether there is a limit."""
        return self != Clipping()

    @tf.autograph.experimental.do_not_convert
    def clip(self, gradients: Sequence[tf.Tensor], weights: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the clipped gradients; one that is not finite stays so, for the guards to see."""
        gradients = list(gradients)
        if self.value is not None:
            # An infinite element would become the limit, and the fault invisible.
            gradients = [
                tf.where(tf.math.is_finite(g), tf.clip_by_value(g, -self.value, self.value), g) for g in gradients
            ]
        if self.norm is not None:
            gradients = [tf.clip_by_norm(g, self.norm) for g in gradients]
        if self.global_norm is not None:
            gradients, _ = tf.clip_by_global_norm(gradients, self.global_norm)
        if self.adaptive is not None:
            gradients = [self._clip_units(g, w) for g, w in zip(gradients, weights)]
        return gradients

    def _clip_units(self, gradient: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        limit = self.adaptive * tf.maximum(_unit_norm(weight), _SMALL)
        norm = _unit_norm(gradient)
        return tf.where(norm > limit, gradient * (limit / tf.maximum(norm, 1e-6)), gradient)


def _unit_norm(value: tf.Tensor) -> tf.Tensor:
    axes = list(range(value.shape.rank - 1)) if value.shape.rank > 1 else None
    return tf.sqrt(tf.reduce_sum(tf.square(value), axis=axes, keepdims=True))


@tf.autograph.experimental.do_not_convert
def global_norm(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the Euclidean norm of all values together: float32 scalar."""
    return tf.sqrt(tf.add_n([2 * tf.nn.l2_loss(tf.cast(value, tf.float32)) for value in values]))


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
        """Adjusts the factor after a step by whether all gradients were finite on all replicas; in replica context."""
        steps = tf.where(finite, self._good_steps + 1, tf.zeros_like(self._good_steps))
        grows = steps >= _GROWS_AFTER
        doubled, halved = tf.minimum(2 * self.scale, tf.float32.max / 2), tf.maximum(self.scale / 2, 1.0)
        self.scale.assign(tf.where(grows, doubled, tf.where(finite, self.scale, halved)))
        self._good_steps.assign(tf.where(grows, tf.zeros_like(steps), steps))
