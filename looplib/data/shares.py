"""A replica's share of a global batch, which a step knows while it is traced or run."""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from looplib.cluster import gradient_sum

KINDS = ("per_replica", "global")  # what a task's `batches` may be

_step = threading.local()  # each replica of a MirroredStrategy has a thread


class Share(NamedTuple):
    """A replica's share of a global batch whose size is not known before.

    Attributes:
      inputs: the examples; where a global batch has fewer examples than there are replicas, a replica without any gets
        the first one, which counts nothing: on no examples, batch normalization is NaN and some convolutions fail.
      examples: int64 scalar tensor, how many of them count: all, or none.
      of: int64 scalar tensor, the number of examples of the global batch.
    """

    inputs: Any
    examples: tf.Tensor
    of: tf.Tensor


def current() -> Share | None:
    """Returns the share of the step that this thread traces or runs; None for batches of a fixed size."""
    return getattr(_step, "share", None)


@tf.autograph.experimental.do_not_convert
def counted(weights: tf.Tensor) -> tf.Tensor:
    """Returns the weights of examples or of parts of them; zeros where the replica's share has no example."""
    share = current()
    return weights if share is None else weights * tf.cast(share.examples > 0, weights.dtype)


@contextlib.contextmanager
def in_use(share: Share) -> Iterator[None]:
    """Makes a share the current one of the `with` block."""
    _step.share = share
    try:
        yield
    finally:
        _step.share = None


@contextlib.contextmanager
def of_means() -> Iterator[None]:
    """Has optimizers weigh the gradients of the `with` block by this replica's part of the global batch.

    For a loss that is the mean over this replica's examples, or otherwise that of a batch of these examples alone.
    """
    share = current()
    if share is not None and tf.distribute.get_replica_context().num_replicas_in_sync > 1:
        _step.factor = tf.cast(share.examples, tf.float32) / tf.cast(share.of, tf.float32)
    try:
        yield
    finally:
        _step.factor = None


@tf.autograph.experimental.do_not_convert
def weighed(gradients: Iterable[Any]) -> list[Any]:
    """Returns gradients, times the factor of `of_means` if they are computed in one on several replicas."""
    factor = getattr(_step, "factor", None)
    return [gradient_sum.times(gradient, factor) for gradient in gradients]
