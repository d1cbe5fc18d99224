"""Reductions: a step returns them to say how a value reduces over steps, replicas and workers."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.base.messages import whole_number
from looplib.cluster import updates
from looplib.compat.tensorflow import not_converted
from looplib.errors import MetricError, StepError


@dataclasses.dataclass(frozen=True)
class Media:
    """Something to look at; made by `image`, `text` and `histogram`.

    Attributes:
      kind: the name of the function that made it.
      tensors: an image's uint8 `[n, height, width, channels]`; a text's strings, or integers, `[n, ...]`; a histogram's
        least and largest value, float32 `[2]`, and its counts, int32 `[bins]`.
      decode: for a text of integers: the function that turns the integers of one example into text.
    """

    kind: str
    tensors: tuple[tf.Tensor, ...]
    decode: Callable[[np.ndarray], str] | None = None


_CHANNELS = (1, 2, 3, 4)  # gray, gray and alpha, RGB, RGBA: what PNG has


@not_converted
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


@not_converted
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


@not_converted
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


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A value and how it reduces; made by `mean`, `total`, `last` and `each`.

    Attributes:
      kind: the name of the function that made it.
      value: the value.
      weight: of a mean; for `each`, a boolean scalar tensor that says whether the value counts, None for yes.
    """

    kind: str
    value: Any
    weight: tf.Tensor | None = None


@not_converted
def weighted_sum(
    values: tf.Tensor, weights: tf.Tensor, axis: Sequence[int] | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the sum of `values * weights` and the sum of `weights`. A value of weight 0 is ignored, even NaN.

    Args:
      values: tensor of any shape.
      weights: tensor of the same dtype; both are broadcast to a common shape, so that a weight is summed as often as it
        is used.
      axis: the dimensions to sum over; None for all.
    """
    shape = tf.broadcast_dynamic_shape(tf.shape(values), tf.shape(weights))
    weights = tf.broadcast_to(weights, shape)
    return tf.reduce_sum(tf.math.multiply_no_nan(values, weights), axis), tf.reduce_sum(weights, axis)


@not_converted
def mean(value: Any, weight: Any = None) -> Reduction:
    """Makes a weighted mean over all steps and replicas: sum(value * weight) / sum(weight).

    Args:
      value: real tensor of any shape. Where the weight is 0 the value is ignored, even if it is not finite.
      weight: real tensor that broadcasts to `value`; default 1 for each element. A scalar `value` needs a weight, such
        as the number of examples that it already averages; it is a `UsageError` without.
    """
    value = tf.convert_to_tensor(value)
    if weight is None and value.shape.rank == 0:
        raise MetricError(
            "looplib.mean got a scalar without a weight, and means of means are wrong when batches differ in size; "
            "write looplib.mean(value, weight=<the number of examples it averages>) or return the value per example"
        )
    return Reduction("mean", value, None if weight is None else tf.convert_to_tensor(weight))


@not_converted
def total(value: Any) -> Reduction:
    """Makes a sum over all steps and replicas, element by element, exact for whole numbers up to 2**53.

    Args:
      value: real tensor whose shape is fully known, often a scalar; an array reaches `loop_end` as numpy.
    """
    return Reduction("total", tf.convert_to_tensor(value))


@not_converted
def last(value: Any) -> Reduction:
    """Keeps the value of the last step on the first replica; of the first micro-batch there.

    A step counts if it is not skipped by `Guards(non_finite="skip")` and that replica has examples in it. If no step of
    a report does, the metric is NaN.

    Args:
      value: real tensor whose shape is fully known, often a scalar such as a learning rate.
    """
    return Reduction("last", tf.convert_to_tensor(value))


@not_converted
def each(value: Any) -> Reduction:
    """Hands the value of every step and replica to `Evaluator.collect` on the host, and reduces nothing.

    For metrics that no sum can express, such as boxes for a COCO evaluation or sentences for BLEU. An evaluation with
    such a value calls the device once a step.

    Args:
      value: tensor or nested structure of tensors of any dtype.
    """
    return Reduction("each", tf.nest.map_structure(tf.convert_to_tensor, value))


INPUTS = "inputs/"  # what the names of metrics of inputs begin with


@not_converted
def input_means(features: Mapping[str, Any]) -> dict[str, Reduction]:
    """Makes metrics of the numeric inputs of a batch: the mean over their elements, as "inputs/<name>/mean".

    `looplib.Prequential` reports such metrics beside their values at the start of the run.

    Args:
      features: dict from name to tensor `[batch, ...]`, ragged or sparse too. Texts are left out.

    Raises:
      UsageError: for anything but a dict, whose keys are the names.
    """
    if not isinstance(features, Mapping):
        found = type(features).__name__
        raise MetricError(f"looplib.input_means got a {found}; expected a dict, whose keys are the names of the inputs")
    kinds = {tf.RaggedTensor: lambda value: value.flat_values, tf.SparseTensor: lambda value: value.values}
    tensors = {name: kinds.get(type(value), tf.convert_to_tensor)(value) for name, value in features.items()}
    return {f"{INPUTS}{name}/mean": mean(value) for name, value in tensors.items() if value.dtype != tf.string}


@not_converted
def all_gather(value: Any) -> tf.Tensor:
    """Concatenates the values of all replicas, in the order of the global batch; in `step_fn` or `loss_fn`.

    For losses that compare the examples of all replicas, such as contrastive ones. The gradient of a value is summed
    over the replicas that used it. So a loss over this replica's examples, divided by the global batch size, has the
    gradient of the loss of the global batch on one replica.

    Args:
      value: tensor `[per_replica_batch, ...]`.

    Returns:
      tensor `[global_batch, ...]`.

    Example:
        ```python
        queries, keys = normalized(self.model(x)), looplib.all_gather(normalized(self.model(y)))
        labels = looplib.global_positions(queries)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.matmul(queries, keys, transpose_b=True))
        ```
    """
    # TensorFlow gathers to the device of the value, and an input of the step has none where workers have one replica.
    value = tf.identity(tf.convert_to_tensor(value))
    return tf.distribute.get_replica_context().all_gather(value, axis=0)


@not_converted
def global_positions(value: Any) -> tf.Tensor:
    """Returns where `all_gather` puts the rows of this replica; in `step_fn` or `loss_fn`.

    For losses that look for an example's partner among the examples of all replicas.

    Args:
      value: tensor `[per_replica_batch, ...]`; only its first dimension is used.

    Returns:
      int32 tensor `[per_replica_batch]` of positions in the global batch.
    """
    if updates.micro_batch() is not None:
        raise StepError(updates.NEEDS_WHOLE)
    context, value = tf.distribute.get_replica_context(), tf.convert_to_tensor(value)
    own, replica = tf.shape(value)[0], context.replica_id_in_sync_group
    if value.shape[0] is not None:  # alike on all replicas
        return replica * own + tf.range(own)
    sizes = context.all_gather(own[None], axis=0)
    return tf.reduce_sum(sizes[:replica]) + tf.range(own)
