"""Reductions: a step returns them to say how a value reduces over steps, replicas and workers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from looplib.cluster import replicas
from looplib.errors import MetricError, StepError


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


@tf.autograph.experimental.do_not_convert
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


@tf.autograph.experimental.do_not_convert
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


@tf.autograph.experimental.do_not_convert
def total(value: Any) -> Reduction:
    """Makes a sum over all steps and replicas, element by element, exact for whole numbers up to 2**53.

    Args:
      value: real tensor whose shape is fully known, often a scalar; an array reaches `loop_end` as numpy.
    """
    return Reduction("total", tf.convert_to_tensor(value))


@tf.autograph.experimental.do_not_convert
def last(value: Any) -> Reduction:
    """Keeps the value of the last step on the first replica; of the first micro-batch there.

    Args:
      value: real tensor whose shape is fully known, often a scalar such as a learning rate.
    """
    return Reduction("last", tf.convert_to_tensor(value))


@tf.autograph.experimental.do_not_convert
def each(value: Any) -> Reduction:
    """Hands the value of every step and replica to `Evaluator.collect` on the host, and reduces nothing.

    For metrics that no sum can express, such as boxes for a COCO evaluation or sentences for BLEU. An evaluation with
    such a value calls the device once a step.

    Args:
      value: tensor or nested structure of tensors of any dtype.
    """
    return Reduction("each", tf.nest.map_structure(tf.convert_to_tensor, value))


@tf.autograph.experimental.do_not_convert
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
    _check_whole("all_gather")
    return tf.distribute.get_replica_context().all_gather(tf.convert_to_tensor(value), axis=0)


@tf.autograph.experimental.do_not_convert
def global_positions(value: Any) -> tf.Tensor:
    """Returns where `all_gather` puts the rows of this replica; in `step_fn` or `loss_fn`.

    For losses that look for an example's partner among the examples of all replicas.

    Args:
      value: tensor `[per_replica_batch, ...]`; only its first dimension is used.

    Returns:
      int32 tensor `[per_replica_batch]` of positions in the global batch.
    """
    _check_whole("global_positions")
    context, value = tf.distribute.get_replica_context(), tf.convert_to_tensor(value)
    own, replica = tf.shape(value)[0], context.replica_id_in_sync_group
    if value.shape[0] is not None:  # alike on all replicas
        return replica * own + tf.range(own)
    sizes = context.all_gather(own[None], axis=0)
    return tf.reduce_sum(sizes[:replica]) + tf.range(own)


def _check_whole(name: str) -> None:
    """Raises `UsageError` within a micro-batch, which has not all examples of its replica."""
    if replicas.micro_batch() is not None:
        raise StepError(
            f"looplib.{name} is called in a micro-batch, and the examples of the others are not there; a loss that "
            "compares the examples of a batch needs micro_batches=1, on one replica too"
        )
