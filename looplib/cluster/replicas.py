"""What one replica knows of its step while this is traced or run, and the sum of gradients over replicas."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from looplib.cluster.collectives import Workers
from looplib.compat import keras as _keras
from looplib.compat import optimizers as _optimizers
from looplib.compat import tensorflow as _tf
from looplib.errors import StepError

Gradient = tf.Tensor | tf.IndexedSlices | None

KINDS = ("per_replica", "global")  # what a task's `batches` may be
MAKE_DENSE = (
    "make the gradient dense before the optimizer gets it, by tf.convert_to_tensor(gradient), which takes the memory "
    "of the whole table"
)


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


class _ReplicaStep(_tf.ReplicaLocal):
    """The step that a replica does."""

    share: Share | None = None  # of the global batch; None for batches of a fixed size
    factor: tf.Tensor | None = None  # what optimizers multiply gradients by, see `weighting_means`; None for nothing
    part: tf.Tensor | None = None  # the number of the micro-batch that is computed; None for a whole batch
    gradients: list[tuple[str, Gradient]] | None = None  # by variables' names, of optimizers; None: not watched


_step = _ReplicaStep()


def current() -> Share | None:
    """Returns the share of the step that this thread traces or runs; None for batches of a fixed size."""
    return _step.share


@contextlib.contextmanager
def in_use(share: Share) -> Iterator[None]:
    """Makes a share the current one of the `with` block."""
    _step.share = share
    try:
        yield
    finally:
        _step.share = None


def micro_batch() -> tf.Tensor | None:
    """Returns the number of the micro-batch that is computed, int32 scalar; None for a whole batch."""
    return _step.part


@contextlib.contextmanager
def in_micro_batch(number: tf.Tensor | None) -> Iterator[None]:
    """Makes a micro-batch, or None, the current one of the `with` block."""
    _step.part = number
    try:
        yield
    finally:
        _step.part = None


@tf.autograph.experimental.do_not_convert
def counted(weights: tf.Tensor) -> tf.Tensor:
    """Returns the weights of examples or of parts of them; zeros where the replica's share has no example."""
    share = _step.share
    return weights if share is None else weights * tf.cast(share.examples > 0, weights.dtype)


@contextlib.contextmanager
def weighting_means() -> Iterator[None]:
    """Makes optimizers weight the gradients in the `with` block by this replica's share of the global batch.

    For a loss that is the mean over this replica's examples, or otherwise over a batch of these examples alone.
    """
    share = _step.share
    if share is not None and tf.distribute.get_replica_context().num_replicas_in_sync > 1:
        _step.factor = tf.cast(share.examples, tf.float32) / tf.cast(share.of, tf.float32)
    try:
        yield
    finally:
        _step.factor = None


def weight_of_part(dtype: tf.DType) -> tf.Tensor:
    """Returns the factor that `weighting_means` sets, a scalar; 1 outside of its block."""
    return tf.cast(1 if _step.factor is None else _step.factor, dtype)


@tf.autograph.experimental.do_not_convert
def weighted(gradients: Iterable[Gradient]) -> list[Gradient]:
    """Returns gradients times the factor that `weighting_means` sets; unchanged outside of its block."""
    return [times(gradient, _step.factor) for gradient in gradients]


@contextlib.contextmanager
def watching() -> Iterator[list[tuple[str, Gradient]]]:
    """Collects what `note_gradients` is given in the `with` block: (name of the variable, gradient)."""
    _step.gradients = noted = []
    try:
        yield noted
    finally:
        _step.gradients = None


@tf.autograph.experimental.do_not_convert
def note_gradients(gradients: Sequence[Gradient], variables: Sequence[Any] | None) -> None:
    """Notes the gradients that an optimizer is given, if the step is watched; variables are None if not known."""
    if _step.gradients is not None:
        names = map(_keras.variable_path, variables) if variables else (f"variable {i}" for i in range(len(gradients)))
        _step.gradients += zip(names, gradients)


# The sum over replicas.


def varies(gradient: Gradient) -> bool:
    """Returns whether the number of rows of a sparse gradient is not known when the step is traced."""
    return isinstance(gradient, tf.IndexedSlices) and gradient.indices.shape[0] is None


def times(gradient: Gradient, factor: tf.Tensor | None) -> Gradient:
    """Returns a dense or sparse gradient times a scalar; unchanged if either is None."""
    if gradient is None or factor is None:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(times(gradient.values, factor), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def over_replicas(who: str, gradients: Sequence[Gradient]) -> list[Gradient]:
    """Returns the sum of each gradient over replicas, as one device has it for the global batch; in replica context.

    All in one reduction, as Keras does it. The rows of a sparse gradient are concatenated, because one device has one
    row for each id that an example looks up, and Keras 3 squares these one by one. A lookup whose ids depend on no
    example, such as that of positions, is done once on one device and once on each replica: its rows are summed.

    Where the number of rows is not known when the step is traced, TensorFlow's reduction fails in a loop where it
    changes from step to step. Then the rows of replicas are joined in another way, and are refused on several workers,
    in the name of `who` uses them.
    """
    context, lookups = tf.distribute.get_replica_context(), [_lookups(gradient) for gradient in gradients]
    given = [part for parts in lookups for part in parts]
    together = [i for i, gradient in enumerate(given) if gradient is not None and not varies(gradient)]
    varying = [i for i, gradient in enumerate(given) if varies(gradient)]
    constant = [
        i
        for i, gradient in enumerate(given)
        if isinstance(gradient, tf.IndexedSlices) and not _tf.depends_on_values(gradient.indices)
    ]
    distinct = [_is_distinct(given[i].indices) for i in constant]
    summed, several = list(given), []
    if together or distinct:
        reduced = context.all_reduce(tf.distribute.ReduceOp.SUM, [*(given[i] for i in together), *distinct])
        for i, value in zip(together, reduced):
            summed[i] = value
        several = reduced[len(together) :]
    if varying:
        if Workers(context.strategy).count > 1:
            raise StepError(
                f"{who} is given a sparse gradient (of an embedding, say) whose number of rows varies with the batch, "
                "and TensorFlow cannot sum these over several workers; make batches of one shape (padded_batch with "
                f"padded_shapes, drop_remainder=True), or {MAKE_DENSE}"
            )
        parts = [part for i in varying for part in (given[i].values, given[i].indices)]
        joined = iter(context.merge_call(_join, args=tuple(parts)))
        for i in varying:
            summed[i] = tf.IndexedSlices(next(joined), next(joined), given[i].dense_shape)
    for i, replicas in zip(constant, several):
        summed[i] = _by_row(summed[i], tf.equal(replicas, _optimizers.num_replicas()))
    parts = iter(summed)
    return [_together([next(parts) for _ in each]) for each in lookups]


def _lookups(gradient: Gradient) -> list[Gradient]:
    """Returns the parts of a sparse gradient by lookup, where the ids of some depend on the examples and others not."""
    if not isinstance(gradient, tf.IndexedSlices):
        return [gradient]
    ids = _tf.concatenated(gradient.indices)
    if len({_tf.depends_on_values(part) for part in ids}) == 1:
        return [gradient]
    sizes = [tf.size(part) if part.shape[0] is None else part.shape[0] for part in ids]
    values = tf.split(gradient.values, sizes)
    return [tf.IndexedSlices(*part, gradient.dense_shape) for part in zip(values, ids)]


def _together(parts: list[Gradient]) -> Gradient:
    if len(parts) == 1:
        return parts[0]
    values, ids = (tf.concat(each, axis=0) for each in zip(*((part.values, part.indices) for part in parts)))
    return tf.IndexedSlices(values, ids, parts[0].dense_shape)


def _is_distinct(ids: tf.Tensor) -> tf.Tensor:
    """Returns 1.0 if no id repeats, as those of examples would that do not depend on their values; else 0.0."""
    return tf.cast(tf.equal(tf.size(tf.unique(ids)[0]), tf.size(ids)), tf.float32)


def _by_row(gradient: tf.IndexedSlices, distinct: tf.Tensor) -> tf.IndexedSlices:
    """Sums concatenated rows by row if their ids are distinct on each replica; else returns them unchanged."""
    rows, places, counts = tf.unique_with_counts(gradient.indices)
    if tf.executing_eagerly():  # where it is not known what ids depend on: those of examples are hardly all alike
        distinct &= tf.reduce_all(tf.equal(counts, _optimizers.num_replicas()))
    places = tf.where(distinct, places, tf.range(tf.size(places)))
    number = tf.where(distinct, tf.size(rows), tf.size(places))
    values = tf.math.unsorted_segment_sum(gradient.values, places, number)
    ids = tf.math.unsorted_segment_max(gradient.indices, places, number)
    return tf.IndexedSlices(values, ids, gradient.dense_shape)


@tf.autograph.experimental.do_not_convert
def _join(strategy: tf.distribute.Strategy, *parts: Iterable) -> list[tf.Tensor]:
    """Concatenates each value over replicas; across replicas."""
    return [tf.concat(strategy.experimental_local_results(part), axis=0) for part in parts]
