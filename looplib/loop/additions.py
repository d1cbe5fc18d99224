"""What looplib adds to the steps: shares of global batches of any size, sizes of batches, checksums of examples."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.base import orders
from looplib.base.messages import join_names
from looplib.cluster import updates
from looplib.cluster.updates import Share
from looplib.compat import keras as _keras
from looplib.data.order import mix
from looplib.data.streams import BatchProperties
from looplib.errors import BatchSizeError, MetricError
from looplib.loop.contracts import Metrics, Specification, StepAddition
from looplib.loop.packing import Packer, batch_size
from looplib.loop.step import Step, StepFn
from looplib.loop.step_checks import is_summed
from looplib.run import metric_names
from looplib.task import reductions
from looplib.task.reductions import Reduction, total
from looplib.task.state import state_of, variables_of
from looplib.task.trainer import Evaluator, Trainer

# Totals of a step: the examples that larger batches have too many, full batches, examples more than expected, batches.
METRICS = metric_names.BATCH_SIZES


class BatchSizes(StepAddition):
    """Compares the sizes of training batches with what is expected.

    The size of a batch is that of the first value per example that the step returns, else that of its input. No batch
    may be larger than expected. The last batch of the data or of an epoch may be smaller, so at least half of the
    batches have to be full.

    Args:
      who: the class name of the user's trainer, for messages.
      expected: examples of a batch.
      replicas: batches of a step.
    """

    def __init__(self, who: str, expected: int, replicas: int) -> None:
        self._who, self._expected, self._replicas = who, expected, replicas
        self._seen = np.zeros(len(METRICS))

    def add_to_step(self, step_fn: StepFn, task: Trainer) -> StepFn:
        """See `StepAddition`; adds the sizes of the batches, for `take`."""

        def measured(inputs: Any) -> Any:
            outputs = step_fn(inputs)
            size = _size(inputs, outputs) if isinstance(outputs, dict) else None
            if size is None:
                return outputs
            more = size - self._expected
            parts = tf.maximum(more, 0), tf.cast(more == 0, tf.float64), more, tf.constant(1, tf.float64)
            return {**outputs, **{name: total(part) for name, part in zip(METRICS, parts)}}

        return measured

    def take(self, metrics: Metrics) -> Metrics:
        """See `StepAddition`; raises `UsageError` for wrong batch sizes."""
        if METRICS[0] in metrics:
            self._seen += [metrics.pop(name) for name in METRICS]
            self._refuse(self._seen)
        return {}

    def check(self, packer: Packer, read: Callable[[], list[list[float]]]) -> None:
        """See `StepAddition`; raises as `take` does."""
        if METRICS[0] in packer.names:
            places = [packer.start_of(name) for name in METRICS]
            self._refuse(self._seen + np.sum(read(), axis=0)[places])

    def _refuse(self, seen: np.ndarray) -> None:
        larger, full, more, count = seen
        if larger > 0 or 2 * full < count - self._replicas:
            raise BatchSizeError(
                f"{self._who}.dataset made {'larger' if larger > 0 else 'smaller'} batches than "
                f"context.per_replica_batch_size, which is {self._expected}: the first {int(count)} have "
                f"{self._expected + more / count:g} examples on average, so that means and gradients are scaled "
                "wrongly; batch by that size, with drop_remainder=True to have it checked before the first step, or "
                "set batch_size_varies of the trainer if the batch size varies intentionally"
            )


@tf.autograph.experimental.do_not_convert
def _size(inputs: Any, outputs: dict[str, Any]) -> tf.Tensor | None:
    """Returns the examples of a batch, float64 scalar; None if unknown."""
    for _, value in sorted(outputs.items(), key=lambda item: str(item[0])):
        if isinstance(value, tf.Tensor) and value.shape.rank == 1:
            # The ops of packing a mean, which TensorFlow then runs once.
            return tf.cast(tf.size(tf.cast(value, tf.float64)), tf.float64)
    batch = batch_size(inputs)
    return None if batch is None else tf.cast(batch[1], tf.float64)


METRIC, COUNT = metric_names.CHECKSUM, "examples"
_UNSIGNED = {1: tf.uint8, 2: tf.uint16, 4: tf.uint32, 8: tf.uint64}  # by the bytes of a number
# A hash is summed in parts, because float64 sums such parts exactly over 2**35 examples, more than any report has.
_PARTS = ((0, 18), (18, 18), (36, 17))  # the first bit, and how many bits
_MODULUS = 2**53


def of_parts(parts: Sequence[float] | np.ndarray) -> tuple[int, int]:
    """Returns (the checksum, how many examples it covers), from the parts that `examples_checksum` returns."""
    *sums, examples = (int(part) for part in parts)
    return sum(one << first for one, (first, _) in zip(sums, _PARTS)) % _MODULUS, examples


class ExampleChecksum(StepAddition):
    """The checksum of the examples of a step as a metric of a training."""

    def add_to_step(self, step_fn: StepFn, task: Trainer) -> StepFn:
        """See `StepAddition`."""

        def checked(inputs: Any) -> Any:
            checksum = examples_checksum(inputs, task.global_step)
            outputs = step_fn(inputs)
            if checksum is None or not isinstance(outputs, dict):
                return outputs
            return {**outputs, METRIC: total(checksum)}

        return checked

    def take(self, metrics: Metrics) -> Metrics:
        """See `StepAddition`."""
        if (parts := metrics.pop(METRIC, None)) is None:
            return {}
        return dict(zip((METRIC, COUNT), of_parts(parts)))


def examples_checksum(inputs: Any, step: tf.Tensor) -> tf.Tensor | None:
    """Sums a hash of every example's content and the step; the sum does not depend on the division over replicas.

    Tensors without a batch dimension, or with another one than the first tensor, are left out. So are zeros and "" in
    tensors whose static shape leaves a dimension open, because in a padded batch the length of a row depends on the
    rows beside it. Padding by another value looks like content.

    Returns:
      The sums of the parts of the hashes, lowest bits first, and the number of examples, int64 `[4]`, for
      `of_parts`; None where nothing can be hashed.
    """
    columns = _columns(inputs)
    if not columns:
        return None
    steps = tf.fill([tf.shape(columns[0])[0]], tf.cast(step, tf.int64))
    hashes = _hash(tf.stack([*columns, steps], axis=1))
    shifted = [tf.bitwise.right_shift(hashes, tf.constant(first, tf.int64)) for first, _ in _PARTS]
    parts = [tf.bitwise.bitwise_and(one, 2**bits - 1) for one, (_, bits) in zip(shifted, _PARTS)]
    return tf.reduce_sum(tf.stack([*parts, tf.ones_like(hashes)], axis=1), axis=0)


def hash_of_each(inputs: Any) -> tf.Tensor | None:
    """Returns a hash of the content of each example of a batch, int64 `[batch]`; see `examples_checksum`."""
    columns = _columns(inputs)
    return _hash(tf.stack(columns, axis=1)) if columns else None


def _columns(inputs: Any) -> list[tf.Tensor]:
    """Returns the hashes of the rows of each tensor that has a row for each example."""
    leaves = [leaf for leaf in tf.nest.flatten(inputs) if _has_rows(leaf)]
    if not leaves:
        return []
    first, *others = map(_fingerprints, leaves)
    return [first, *(_aligned(x, first) for x in others)]


def _aligned(column: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
    """Returns hashes of rows, or zeros if they are not as many as in the first column; both int64 `[rows]`."""
    if None not in (column.shape[0], first.shape[0]):  # XLA cannot choose between shapes that differ
        return column if column.shape[0] == first.shape[0] else tf.zeros_like(first)
    alike = tf.shape(column)[0] == tf.shape(first)[0]
    return tf.cond(alike, lambda: column, lambda: tf.zeros_like(first))


def _has_rows(leaf: Any) -> bool:
    if not isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)):
        return False
    return bool(leaf.shape.rank) and leaf.dtype not in (tf.variant, tf.resource)


def _fingerprints(leaf: Any) -> tf.Tensor:
    """Returns a hash of the content of each row, independent of the number and length of other rows: int64 `[rows]`."""
    if isinstance(leaf, tf.RaggedTensor):
        row = leaf.value_rowids()
        position = tf.range(tf.size(row, row.dtype), dtype=row.dtype) - tf.gather(leaf.row_starts(), row)
        hashes = _hash(tf.stack([_fingerprints(leaf.values), tf.cast(position, tf.int64)], axis=1))
        return tf.math.unsorted_segment_sum(hashes, row, leaf.nrows())
    if isinstance(leaf, tf.SparseTensor):
        places = tf.concat([_fingerprints(leaf.values)[:, None], leaf.indices[:, 1:]], axis=1)
        return tf.math.unsorted_segment_sum(_hash(places), leaf.indices[:, 0], leaf.dense_shape[0])
    if None in leaf.shape[1:]:  # padded to the longest of the batch, by zeros or "", which are left out
        return _fingerprints(tf.sparse.from_dense(leaf))
    if leaf.dtype == tf.string:  # tf.fingerprint of rows of no strings is whatever was in memory (TensorFlow 2.20)
        leaf = tf.strings.to_hash_bucket_fast(leaf, 2**62)
    return _hash(leaf)


def _hash(rows: tf.Tensor) -> tf.Tensor:
    """Returns a hash of each row, int64 `[rows]`, by ops that XLA compiles, which lacks `tf.fingerprint`.

    Words of 32 bits times odd keys of 64 bits: two rows have one sum with a probability of about 2**-33 (Lemire and
    Kaser, 2014, Strongly universal string hashing is fast).
    """
    words = _words(rows)
    keys = tf.bitwise.bitwise_or(mix(tf.cast(tf.range(1, tf.shape(words)[1] + 1), tf.uint64)), 1)
    return tf.bitcast(mix(tf.reduce_sum(words * keys, axis=1)), tf.int64)


def _words(rows: tf.Tensor) -> tf.Tensor:
    """Returns the content of rows as words, uint64 `[rows, n]`."""
    if rows.dtype.is_complex:
        rows = tf.stack([tf.math.real(rows), tf.math.imag(rows)], axis=-1)
    size = math.prod(rows.shape[1:]) if rows.shape[1:].is_fully_defined() else tf.reduce_prod(tf.shape(rows)[1:])
    rows = tf.reshape(rows, [tf.shape(rows)[0], size])
    if rows.dtype == tf.bool:
        return tf.cast(rows, tf.uint64)
    rows = tf.bitcast(rows, _UNSIGNED[rows.dtype.size])
    in_word = 4 // rows.dtype.size
    if in_word == 0:
        return mix(rows)
    if in_word > 1:
        rows = tf.pad(rows, [[0, 0], [0, -size % in_word]])
        rows = tf.bitcast(tf.reshape(rows, [tf.shape(rows)[0], -(-size // in_word), in_word]), tf.uint32)
    return tf.cast(rows, tf.uint64)


def of_training(spec: Specification, batches: BatchProperties) -> list[StepAddition]:
    """Returns what is added to the steps of a training, of which the batches are known."""
    found: list[StepAddition] = []
    if orders.current().example_checksums:
        found.append(ExampleChecksum())
    if not batches.sized:
        found.append(BatchSizes(spec.who, batches.batch_size, spec.strategy.num_replicas_in_sync))
    return found


def add_share(step_fn: StepFn, task: Trainer | Evaluator) -> StepFn:
    """Wraps a step so that its results are exact for a global batch of any size."""
    metrics = functools.cache(lambda: _metric_variables(vars(task)))  # a model may make some when it is called

    def with_share(inputs: Any) -> Any:
        if isinstance(inputs, Share):
            outputs = _counted(step_fn, inputs, metrics(), isinstance(task, Trainer))
            _check_made(task, metrics(), _metric_variables(vars(task)))
            _check_known(task, _metric_variables(outputs), metrics())
            return outputs
        batch = batch_size(inputs)
        if batch is None:
            return step_fn(inputs)
        count = tf.distribute.get_replica_context().num_replicas_in_sync
        with updates.in_use(Share(inputs, batch[1], batch[1] * count)):  # as large as the others
            return step_fn(inputs)

    return with_share


def count_examples_alone(step_fn: StepFn, task: Trainer | Evaluator, joins: Callable[[], bool]) -> StepFn:
    """Wraps a step so that it counts nothing on a replica without examples, where it `joins` the replicas.

    Totals stay: those of no example are 0, and those over all replicas belong to all.
    """
    metrics = functools.cache(lambda: _metric_variables(vars(task)))

    def on_any_batch(inputs: Any) -> Any:
        batch = batch_size(inputs)
        if batch is None or not joins():
            return step_fn(inputs)
        counts = batch[1] > 0
        with _metrics_kept_unless(counts, metrics()):
            outputs = step_fn(inputs)
        if not isinstance(outputs, dict):
            return outputs
        return {name: value if _is_total(value) else _if(counts, value) for name, value in outputs.items()}

    return on_any_batch


def check_share(task: Trainer | Evaluator, step: Step, scratch: Iterable[tf.Variable]) -> None:
    """Raises `UsageError` if a traced step updates per-replica sums, such as metrics, that the task does not hold.

    Those of `StepAddition.scratch` may be elsewhere.
    """
    if isinstance(step.stream.element_spec, Share):
        used = [variable for variable in step.variables if is_summed(variable)]
        known = [*_metric_variables(vars(task)), *(variable for _, variable in variables_of(state_of(task))), *scratch]
        _check_known(task, used, [part for v in known for part in step.strategy.experimental_local_results(v)])


@tf.autograph.experimental.do_not_convert
def _check_made(task: Trainer | Evaluator, before: Iterable[tf.Variable], after: Iterable[tf.Variable]) -> None:
    known = {id(variable) for variable in before}
    if names := [variable.name for variable in after if id(variable) not in known]:
        raise MetricError(
            f"a metric of {type(task).__name__} makes {join_names(names)} in its first update, which is too late on "
            "several replicas; call its update_state once with zeros of the step's shapes, and reset_state, in __init__"
        )


@tf.autograph.experimental.do_not_convert
def _check_known(task: Trainer | Evaluator, used: Iterable[tf.Variable], known: Iterable[tf.Variable]) -> None:
    ids = {id(variable) for variable in known}
    if names := [variable.name for variable in used if id(variable) not in ids]:
        raise MetricError(
            f"{type(task).__name__}.step_fn changes {join_names(names)} of a metric that is not among the attributes "
            "of the task, so that examples would count twice where a global batch has fewer of them than there are "
            "replicas; keep the metric as an attribute of the task or its model, or in a list or dict there"
        )


def _metric_variables(holder: Any) -> list[tf.Variable]:
    """Lists the variables of the Keras metrics in a structure, its models and its modules."""
    metrics = filter(_keras.is_metric, _keras.parts(holder))
    return list({id(v): _keras.tf_variable(v) for metric in metrics for v in metric.variables}.values())


def _counted(step_fn: StepFn, share: Share, metrics: list[tf.Variable], training: bool) -> Any:
    """Runs a step; if the replica has no example of the global batch, the step counts nothing."""
    counts = share.examples > 0
    with updates.in_use(share), _metrics_kept_unless(counts, metrics):
        outputs = step_fn(share.inputs)
    if not isinstance(outputs, dict):
        return outputs
    outputs = {name: _if(counts, value) for name, value in outputs.items()}
    return outputs if training else {"examples": reductions.total(share.examples), **outputs}


@contextlib.contextmanager
def _metrics_kept_unless(counts: tf.Tensor, metrics: list[tf.Variable]) -> Iterator[None]:
    """Gives metrics the values from before the `with` block, unless the step `counts`."""
    before = [variable.read_value() for variable in metrics]
    yield
    for variable, value in zip(metrics, before):
        variable.assign(tf.where(counts, variable.read_value(), value))


def _is_total(value: Any) -> bool:
    return isinstance(value, Reduction) and value.kind == "total"


@tf.autograph.experimental.do_not_convert
def _if(counts: tf.Tensor, value: Any) -> Any:
    """Returns an output of a step, with the weight 0 unless it `counts`."""
    if isinstance(value, tf.Tensor) and value.shape.rank != 0:
        value = reductions.mean(value)
    if not isinstance(value, Reduction):
        return value
    if _is_total(value):
        return reductions.total(tf.where(counts, value.value, tf.zeros_like(value.value)))
    if value.kind == "each":
        return Reduction("each", value.value, counts)
    if value.kind == "last":
        return value
    if value.kind != "mean":
        raise NotImplementedError(f"a share of a global batch does not reduce by looplib.{value.kind}")
    weight = tf.cast(counts, tf.float64)
    return reductions.mean(value.value, weight if value.weight is None else tf.cast(value.weight, tf.float64) * weight)
