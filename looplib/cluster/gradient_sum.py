"""The sum of gradients over replicas: one reduction for all of them, sparse ones included."""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence

import tensorflow as tf

from looplib.cluster.collectives import Workers
from looplib.errors import UsageError

Gradient = tf.Tensor | tf.IndexedSlices | None

MAKE_DENSE = (
    "make the gradient dense before the optimizer gets it, by tf.convert_to_tensor(gradient), which takes the memory "
    "of the whole table"
)
_state = threading.local()  # tf.distribute traces each replica in a thread of its own


@contextlib.contextmanager
def summed_already() -> Iterator[None]:
    """Marks the gradients that an optimizer gets in the `with` block as summed over replicas."""
    _state.summed = True
    try:
        yield
    finally:
        _state.summed = False


def is_summed() -> bool:
    """Returns whether the gradients that an optimizer gets now are summed over replicas."""
    return getattr(_state, "summed", False)


def varies(gradient: Gradient) -> bool:
    """Returns whether the number of rows of a sparse gradient is not known when the step is traced."""
    return isinstance(gradient, tf.IndexedSlices) and gradient.indices.shape[0] is None


def times(gradient: Gradient, factor: tf.Tensor | None) -> Gradient:
    """Returns a gradient, dense or sparse, times a scalar; a None of either changes nothing."""
    if gradient is None or factor is None:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(times(gradient.values, factor), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def over_replicas(strategy: tf.distribute.Strategy, who: str, gradients: Sequence[Gradient]) -> list[Gradient]:
    """Returns the sum of each gradient over replicas; in replica context.

    All in one reduction, as Keras does it. Sparse gradients whose number of rows is not known when the step is traced
    are concatenated instead, which is also their sum: TensorFlow's reduction of these fails in a loop where the number
    changes from step to step.

    Args:
      strategy: `tf.distribute.Strategy` of the replicas.
      who: the class name of what uses the gradients, for messages.
      gradients: tensors, `tf.IndexedSlices` or None.

    Raises:
      UsageError: for sparse gradients of varying length on several workers.
    """
    context, summed = tf.distribute.get_replica_context(), list(gradients)
    together = [i for i, gradient in enumerate(gradients) if gradient is not None and not varies(gradient)]
    if together:
        sums = context.all_reduce(tf.distribute.ReduceOp.SUM, [gradients[i] for i in together])
        for i, value in zip(together, sums):
            summed[i] = value
    varying = [i for i, gradient in enumerate(gradients) if varies(gradient)]
    if varying:
        if Workers(strategy).count > 1:
            raise UsageError(
                f"{who} is given a sparse gradient (of an embedding, say) whose number of rows varies with the batch, "
                "and TensorFlow cannot sum these over several workers; make batches of one shape (padded_batch with "
                f"padded_shapes, drop_remainder=True), or {MAKE_DENSE}"
            )
        parts = [part for i in varying for part in (gradients[i].values, gradients[i].indices)]
        joined = iter(context.merge_call(_join, args=tuple(parts)))
        for i in varying:
            summed[i] = tf.IndexedSlices(next(joined), next(joined), gradients[i].dense_shape)
    return summed


@tf.autograph.experimental.do_not_convert
def _join(strategy: tf.distribute.Strategy, *parts: Iterable) -> list[tf.Tensor]:
    """Concatenates each value over replicas; across replicas."""
    return [tf.concat(strategy.experimental_local_results(part), axis=0) for part in parts]
