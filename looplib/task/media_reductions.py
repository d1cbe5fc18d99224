"""Images, texts and histograms, which a step returns to show them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.base.messages import whole_number
from looplib.errors import MetricError
from looplib.task.media import Media

_CHANNELS = (1, 2, 3, 4)  # gray, gray and alpha, RGB, RGBA: what PNG has


@tf.autograph.experimental.do_not_convert
def image(value: Any, most: int = 4) -> Media:
    """Shows images: of the reported step of a training, of the first step of an evaluation, on the first replica.

    Args:
      value: tensor `[batch, height, width, channels]` with 1 to 4 channels (gray, gray and alpha, RGB, RGBA): float in
        [0, 1], where values outside are clipped, uint8, or boolean.
      most: how many images to show, the first of the batch.

    Returns:
      A `Media` to return from `step_fn`.

    Raises:
      UsageError: for another shape or type.
    """
    value, most = tf.convert_to_tensor(value), whole_number("most", most)
    channels = value.shape[3] if value.shape.rank == 4 else 0
    if channels is not None and channels not in _CHANNELS:
        raise MetricError(
            f"looplib.image got a tensor of shape {value.shape}; expected [batch, height, width, channels] with 1 to 4 "
            "channels; add a channel by value[..., None], or a batch by value[None]"
        )
    if not value.dtype.is_floating and value.dtype not in (tf.uint8, tf.bool):
        raise MetricError(f"looplib.image got {value.dtype.name}; expected floats in [0, 1], uint8 or bool; cast it")
    value = value[:most]
    if value.dtype != tf.uint8:
        value = tf.cast(value, tf.float32)
        value = tf.clip_by_value(tf.where(tf.math.is_nan(value), tf.zeros_like(value), value), 0.0, 1.0)
        value = tf.cast(value * 255 + 0.5, tf.uint8)
    return Media("image", (value,))


@tf.autograph.experimental.do_not_convert
def text(value: Any, most: int = 4, decode: Callable[[np.ndarray], str] | None = None) -> Media:
    """Shows texts: of the reported step of a training, of the first step of an evaluation, on the first replica.

    Args:
      value: string tensor `[batch]` or a scalar. Or, with `decode`, an integer tensor `[batch, ...]`, such as token
        ids; these also run where strings do not, in XLA.
      most: how many texts to show, the first of the batch.
      decode: function that makes a `str` of one example, a numpy array; called on the host, when the text is shown.

    Returns:
      A `Media` to return from `step_fn`.

    Raises:
      UsageError: for another shape or type.
    """
    value, most = tf.convert_to_tensor(value), whole_number("most", most)
    if decode is None and value.dtype == tf.string and value.shape.rank == 0:
        value = value[None]
    right = value.shape.rank in (1, None) if decode is None else value.shape.rank != 0
    if not right or (value.dtype != tf.string if decode is None else not value.dtype.is_integer):
        expected = (
            "strings [batch]; give decode=<function> to show integers" if decode is None else "integers [batch, ...]"
        )
        raise MetricError(
            f"looplib.text got {value.dtype.name} of shape {value.shape}{' with decode' if decode else ''}; expected "
            f"{expected}"
        )
    return Media("text", (value[:most],), decode)


@tf.autograph.experimental.do_not_convert
def histogram(value: Any, bins: int = 30) -> Media:
    """Shows how values spread: of the reported step of a training, of the first of an evaluation, on the first replica.

    Args:
      value: real tensor of any shape, such as activations or a weight. Values that are not finite are left out.
      bins: number of bins of equal width, from the least to the largest value.

    Returns:
      A `Media` to return from `step_fn`.

    Raises:
      UsageError: for another type.
    """
    value, bins = tf.convert_to_tensor(value), whole_number("bins", bins)
    if not (value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_bool):
        raise MetricError(f"looplib.histogram got {value.dtype.name}; expected real numbers, integers or booleans")
    value = tf.reshape(tf.cast(value, tf.float32), [-1])
    finite = tf.math.is_finite(value)
    value = tf.where(finite, value, tf.zeros_like(value))
    some = tf.reduce_any(finite)
    low = tf.where(some, tf.reduce_min(tf.where(finite, value, value.dtype.max)), 0.0)
    high = tf.where(some, tf.reduce_max(tf.where(finite, value, value.dtype.min)), 0.0)
    low, high = tf.where(low < high, low, low - 0.5), tf.where(low < high, high, high + 0.5)  # as numpy does
    place = tf.cast((value - low) / (high - low) * bins, tf.int32)
    place = tf.clip_by_value(place, 0, bins - 1)  # the largest value belongs to the last bin
    counts = tf.math.unsorted_segment_sum(tf.cast(finite, tf.int32), place, bins)
    return Media("histogram", (tf.stack([low, high]), counts))
