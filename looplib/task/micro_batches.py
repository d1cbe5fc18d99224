"""A batch computed in parts, one after the other, in the memory of one part; and the losses that layers add to each.

A part's own losses weigh by its share of the examples. That is right for means over examples, and for losses of the
weights alone. A sum over examples is none of these, and is refused.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base.messages import gist
from looplib.compat import keras as _keras
from looplib.compat import tensorflow as _tf
from looplib.data import rows
from looplib.errors import BatchSizeError, LossError, MetricError, StepError, UsageError
from looplib.task import reductions
from looplib.task.reductions import Media, Reduction
from looplib.task.state import values_kept


@tf.autograph.experimental.do_not_convert
def summed(
    compute: Callable[[Any, tf.Tensor], list[tf.Tensor]], inputs: Any, count: int, jit_compile: bool = False
) -> list[tf.Tensor]:
    """Returns the sums of what a function returns for each part of a batch.

    Parts are computed in a loop on the device, so that graph and memory are as large as for one part. A batch whose
    size is not known when the step is traced, or is no multiple of `count`, is divided as evenly as possible.

    Args:
      compute: function of a part of the batch, with the structure of `inputs`, and of its number, int32 scalar tensor;
        returns tensors of static shapes.
      inputs: the batch; tensors have the batch as their first dimension, scalars are passed to each part.
      count: number of parts.
      jit_compile: whether XLA compiles the function, unless it runs eagerly.

    Raises:
      UsageError: if a known batch size is no multiple of `count`, or the step is run eagerly with such a batch.
    """
    part = (lambda _: inputs) if count == 1 else _divided(inputs, count)
    if tf.executing_eagerly():
        every = [compute(part(number), number) for number in map(tf.constant, range(count))]
        return [tf.add_n(values) for values in zip(*every)]
    if count == 1:
        return _call(compute, inputs, tf.constant(0), jit_compile)
    # Traced once, which tells the shapes of the sums, and called in the loop.
    traced = tf.function(lambda number: _call(compute, part(number), number, jit_compile), autograph=False)
    traced = traced.get_concrete_function(tf.TensorSpec([], tf.int32))
    zeros = [tf.zeros(output.shape, output.dtype) for output in tf.nest.flatten(traced.structured_outputs)]

    def add(number: tf.Tensor, sums: list[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        values = tf.nest.flatten(traced(number))
        return number + 1, [total + value for total, value in zip(sums, values)]

    _, sums = tf.while_loop(lambda number, _: number < count, add, (tf.constant(0), zeros), parallel_iterations=1)
    return list(sums)


@tf.autograph.experimental.do_not_convert
def checked(who: str, inputs: Any) -> Any:
    """Returns a batch all of whose parts have one number of rows; where others turn up, a step with it fails.

    Raises:
      UsageError: for parts that are known to have different numbers of rows, in the name of `who`.
    """
    who, parts = f"{who}.dataset", rows.parts(inputs)
    rows.check_even(who, parts)
    if all(part.shape.rank and part.shape[0] is not None for part in parts):
        return inputs
    with tf.control_dependencies(rows.assert_even(who, [rows.count(part) for part in parts])):
        return rows.map_parts(tf.identity, inputs)


def _call(
    compute: Callable[[Any, tf.Tensor], list[tf.Tensor]], part: Any, number: tf.Tensor, jit_compile: bool
) -> list[tf.Tensor]:
    """Calls a function; in XLA, with only those tensors of the part that it uses. These may not be strings."""
    if not jit_compile:
        return compute(part, number)
    compiled = tf.function(lambda: compute(part, number), jit_compile=True, autograph=False).get_concrete_function()
    nodes = list(_tf.nodes_in(compiled.graph.as_graph_def()))
    if random := sorted({node.op for node in nodes} & _tf.RANDOM_OPS):
        logging.warning(
            "jit_compile: XLA draws other random numbers for %s in each process, so no run repeats another one; use "
            "layers of Keras 3, or tf.random.stateless_* with Trainer.step_seed",
            ", ".join(random),
        )
    if array := _tf.growing_array(nodes):
        raise StepError(
            f"{array} makes a tf.TensorArray grow, which XLA does not; give it its size, or leave out jit_compile"
        )
    return tf.nest.flatten(compiled())


def _divided(inputs: Any, count: int) -> Callable[[tf.Tensor], Any]:
    """Returns a function from the number of a part to that part of the batch."""
    for leaf in tf.nest.flatten(inputs):
        if not isinstance(leaf, (tf.Tensor, tf.RaggedTensor)):
            raise StepError(
                f"micro_batches={count} divides the batch, and its data has {leaf!r}; expected dense or ragged "
                "tensors, with the batch as their first dimension"
            )
        size = leaf.shape[0] if leaf.shape.rank else None
        if size is not None and size % count:
            raise BatchSizeError(
                f"micro_batches={count} does not divide the per-replica batch of {size} examples; choose a divisor of "
                f"{size}, or another global batch size"
            )

    def part(number: tf.Tensor) -> Any:
        return tf.nest.map_structure(lambda leaf: _rows(leaf, number, count), inputs)

    return part


def _rows(leaf: tf.Tensor | tf.RaggedTensor, number: tf.Tensor, count: int) -> tf.Tensor | tf.RaggedTensor:
    if leaf.shape.rank == 0:
        return leaf  # of no example, so it is the same for each part
    if isinstance(leaf, tf.Tensor) and leaf.shape[0] is not None:  # of a static shape, which XLA needs
        rows = leaf.shape[0] // count
        sizes = [tf.shape(leaf)[axis] if size is None else size for axis, size in enumerate(leaf.shape)][1:]
        return tf.gather(tf.reshape(leaf, [count, rows, *sizes]), number)
    size = tf.cast(leaf.nrows() if isinstance(leaf, tf.RaggedTensor) else tf.shape(leaf)[0], tf.int32)
    # Rounded up, so that the first part has an example if any has.
    start, end = (-(-each * size // count) for each in (number, number + 1))
    return leaf[start:end]


@tf.autograph.experimental.do_not_convert
def check_per_example(what: str, value: Any, inputs: Any, kind: type[UsageError] = MetricError) -> None:
    """Raises `UsageError` if the first dimension of a tensor, named `what`, is known to differ from its batch's."""
    shape = tf.convert_to_tensor(value).shape
    leaves = [leaf for leaf in tf.nest.flatten(inputs) if isinstance(leaf, (tf.Tensor, tf.RaggedTensor))]
    sizes = {leaf.shape[0] for leaf in leaves if leaf.shape.rank}
    if shape.rank and shape[0] is not None and sizes and None not in sizes and shape[0] not in sizes:
        raise kind(
            f"{what} has the shape {shape}, and its batch has {' or '.join(map(str, sorted(sizes)))} examples; "
            "expected one value per example, or looplib.mean, looplib.total or looplib.last to say how it reduces"
        )


class MetricSums:
    """The metrics of a step as tensors that sum over the parts of its batch.

    `pack` runs for a part, also in a loop on the device, and learns the structure; `unpack` runs after the loop.
    """

    def __init__(self) -> None:
        self._slots: list[tuple[str, str, tf.DType]] = []
        self._keras: dict[str, Any] = {}

    @tf.autograph.experimental.do_not_convert
    def pack(self, metrics: dict[str, Any], inputs: Any, number: tf.Tensor) -> list[tf.Tensor]:
        """Returns the tensors of the metrics of a part with a number, float64; `UsageError` for one that does not sum.

        A `last` is that of the first part, as of several replicas it is that of the first one.
        """
        self._slots, self._keras, parts = [], {}, []
        for name, value in metrics.items():
            if _keras.is_metric(value):
                self._keras[name] = value  # it keeps its own sums
                continue
            if isinstance(value, Media):
                raise MetricError(
                    f"the metric {name!r} is a looplib.{value.kind}, which is not computed in parts, nor by "
                    "jit_compile; show it in an evaluator, or train with micro_batches=1 and without jit_compile"
                )
            if not isinstance(value, Reduction):
                if tf.convert_to_tensor(value).shape.rank == 0:
                    raise MetricError(
                        f"the metric {name!r} is a scalar without a reduction; return one value per example, or "
                        "looplib.mean(value, weight=<examples>), looplib.total(value) or looplib.last(value)"
                    )
                check_per_example(f"the metric {name!r}", value, inputs)
                value = reductions.mean(value)
            if value.kind == "each":
                raise MetricError(f"the metric {name!r} is a looplib.each, which only an evaluator can return")
            self._slots.append((name, value.kind, value.value.dtype))
            data = tf.cast(value.value, tf.float64)
            if value.kind == "mean":
                if value.weight is None:  # not by a sum of ones: XLA would count those beyond a masked value's end
                    data, weight = tf.reduce_sum(data), tf.cast(tf.size(data), tf.float64)
                else:
                    data, weight = reductions.weighted_sum(data, tf.cast(value.weight, tf.float64))
                parts.append(weight)
            if value.kind == "last":
                data = tf.where(tf.equal(number, 0), data, tf.zeros_like(data))
            parts.append(data)
        return parts

    @tf.autograph.experimental.do_not_convert
    def unpack(self, sums: list[tf.Tensor]) -> dict[str, Any]:
        """Returns the metrics of the whole batch, from the sums over its parts."""
        metrics, sums = dict(self._keras), iter(sums)
        for name, kind, dtype in self._slots:
            value = next(sums)
            if kind == "mean":
                metrics[name] = reductions.mean(tf.math.divide_no_nan(next(sums), value), value)
            elif kind == "total":
                metrics[name] = reductions.total(tf.cast(value, dtype))
            elif kind == "last":
                metrics[name] = reductions.last(tf.cast(value, dtype))
            else:
                raise NotImplementedError(f"the parts of a batch do not reduce by looplib.{kind}")
        return metrics


@tf.autograph.experimental.do_not_convert
def fitting(compute: Callable[[Any, int], list[tf.Tensor]], inputs: Any) -> int:
    """Returns the smallest number of parts of a batch whose gradients, by `compute(batch, parts)`, fit into memory.

    Each number is tried on a batch of zeros, outside of the graph that is being traced. What that changes, such as
    moving statistics, is restored.
    """
    leaves = tf.nest.flatten(inputs)
    if not all(isinstance(leaf, tf.Tensor) and leaf.shape.is_fully_defined() for leaf in leaves):
        raise StepError(
            'micro_batches="auto" needs batches of static shapes, with the batch as the first dimension of each '
            "tensor; give a number"
        )
    size = next((leaf.shape[0] for leaf in leaves if leaf.shape.rank), 1)
    specs = [tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves]
    for count in (number for number in range(1, size + 1) if size % number == 0):
        function = tf.function(lambda *batch, count=count: compute(tf.nest.pack_sequence_as(inputs, batch), count))
        # In a thread that is not tracing; tf.init_scope would leave the graph too, but stops all gradient tapes.
        if _tf.outside(lambda function=function: _fits(function, specs)):
            logging.info("micro_batches=auto: a per-replica batch of %d fits into memory in %d parts", size, count)
            return count
    raise StepError(
        "the memory does not suffice for the gradients of one example; use a smaller model, or rematerialize"
    )


def _fits(function: tf.types.experimental.PolymorphicFunction, specs: list[tf.TensorSpec]) -> bool:
    """Runs a function on zeros; returns whether the memory suffices. Restores the variables."""
    traced = function.get_concrete_function(*specs)
    with values_kept(traced.variables):
        try:
            return traced(*(tf.zeros(spec.shape, spec.dtype) for spec in specs)) is not None
        except tf.errors.ResourceExhaustedError:
            return False


_EXAMPLES, _LENGTH, _DRAWS = 8, 4, 8  # where a size is not known when a step is traced; of random numbers
_MOST = 2**0.5  # the factor between a mean, which is 1 for a batch that has each example twice, and a sum


@tf.autograph.experimental.do_not_convert
def examples_of(losses: tf.Tensor, inputs: Any) -> tf.Tensor:
    """Returns the number of examples of a batch, or of a part of it: float32 scalar.

    It is the first dimension of the batch; without any, that of the losses.
    """
    for leaf in (*tf.nest.flatten(inputs), losses):
        if isinstance(leaf, tf.RaggedTensor):
            return tf.cast(leaf.nrows(), tf.float32)
        if isinstance(leaf, tf.Tensor) and leaf.shape.rank:
            return tf.cast(tf.shape(leaf)[0], tf.float32)
    return tf.constant(1.0)


@tf.autograph.experimental.do_not_convert
def check_means(who: str, compute: Callable[[Any], Sequence[tf.Tensor]], own: Sequence[tf.Tensor], inputs: Any) -> None:
    """Checks that a model's own losses are means over examples, by a batch that has each example twice.

    The batch is one of random numbers between 0 and 1, and zeros for whole numbers. It is computed outside of the graph
    that is being traced, and the variables get their values back. Losses that depend on the weights alone are not
    tried.

    Args:
      who: the trainer, for messages.
      compute: returns the model's own losses for a batch.
      own: those of the step that is traced.
      inputs: its batch.

    Raises:
      UsageError: if a loss is none.
    """
    of_examples = [_tf.depends_on_inputs(loss) for loss in own]
    if not any(of_examples):
        return
    try:
        # In a thread that is not tracing; tf.init_scope would leave the graph too, but stops all gradient tapes.
        first, second = _tf.outside(lambda: _once_and_twice(compute, inputs))
    except Exception as error:  # of the user's loss_fn, which may take no such batch
        logging.warning(
            "whether the losses that layers of %s add are means over examples could not be tried (%s); a sum over "
            "examples would weigh too little on several replicas or in micro_batches", who, gist(error),
        )  # fmt: skip
        return
    for one, two in zip(first, second):
        if _is_known(one) and not 1 / _MOST < two / one < _MOST:
            raise LossError(
                f"with each example twice, a batch has {two / one:.3g} times the loss that a layer of {who}'s model "
                "adds (add_loss, an activity regularizer), so that it is no mean over examples, and parts of a batch, "
                "on replicas or in micro_batches, would have another sum; divide it by the examples of the batch, or "
                "return it with the losses of loss_fn"
            )
    if nothing := sum(not _is_known(one) for one, concerned in zip(first, of_examples) if concerned):
        logging.warning(
            "losses that layers of %s add are 0 or not finite at first (%d of %d), so that it is not known whether "
            "they are means over examples; a sum over examples would weigh too little on several replicas or in "
            "micro_batches", who, nothing, sum(of_examples),
        )  # fmt: skip


def _is_known(loss: float) -> bool:
    return 1e-12 < abs(loss) < np.inf


def _once_and_twice(
    compute: Callable[[Any], Sequence[tf.Tensor]], inputs: Any
) -> tuple[Sequence[float], Sequence[float]]:
    """Returns the values of each loss for a batch like `inputs`, and for one that has each example twice."""
    once = tf.nest.map_structure(_random, inputs)
    twice = tf.nest.map_structure(lambda leaf: tf.concat([leaf, leaf], 0) if leaf.shape.rank else leaf, once)
    return _values(compute, once), _values(compute, twice)


def _random(leaf: Any) -> tf.Tensor:
    if not isinstance(leaf, tf.Tensor):
        raise TypeError(f"its batch has a {type(leaf).__name__}")
    unknown = [_EXAMPLES, *[_LENGTH] * (leaf.shape.rank - 1)] if leaf.shape.rank else []
    shape = [most if size is None else size for size, most in zip(leaf.shape, unknown)]
    if leaf.dtype.is_floating:
        return tf.cast(tf.random.stateless_uniform(shape, (1, len(shape))), leaf.dtype)
    return tf.zeros(shape, leaf.dtype)


def _values(compute: Callable[[Any], Sequence[tf.Tensor]], batch: Any) -> np.ndarray:
    """Returns the mean of each loss over some draws of random numbers; restores the variables."""
    leaves = tf.nest.flatten(batch)
    function = tf.function(lambda *leaves: list(compute(tf.nest.pack_sequence_as(batch, leaves))))
    traced = function.get_concrete_function(*(tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves))
    with values_kept(traced.variables):
        return np.mean([[float(loss) for loss in traced(*leaves)] for _ in range(_DRAWS)], axis=0)
