"""From the gradients of a replica to one update of the weights.

On several replicas, an optimizer of Keras 3 clips each replica's own gradient and sums afterwards. looplib sums the
gradients before the optimizer gets them, so that clipping, decay, accumulation and averages see the gradient of the
global batch, as they do on one device. tf_keras sums first itself. Both families fail on sparse gradients whose number
of rows varies, and have rows of each replica where one device has one, so looplib sums sparse gradients for both.
"""

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from looplib.cluster.holders import joined
from looplib.compat import keras as _keras
from looplib.compat import optimizers as _optimizers
from looplib.compat import row_updates
from looplib.compat import tensorflow as _tf
from looplib.compat.patches import Collectives, collectives
from looplib.compat.tensorflow import converted
from looplib.errors import OptimizerError, StepError

Gradient = tf.Tensor | tf.IndexedSlices | None

KINDS = ("per_replica", "global")  # what a task's `batches` may be
MAKE_DENSE = (
    "make the gradient dense before the optimizer gets it, by tf.convert_to_tensor(gradient), which takes the memory "
    "of the whole table"
)
NEEDS_WHOLE = (
    "the step sums or gathers what all replicas have (all_reduce, all_gather, looplib.global_positions, a layer with "
    "synchronized=True) in a micro-batch, and the examples of the others are not there; a loss or a layer that needs "
    "the whole batch needs micro_batches=1, on one replica too"
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


@contextlib.contextmanager
def _having(**values: Any) -> Iterator[None]:
    """Sets values of the step in the `with` block."""
    vars(_step).update(values)
    try:
        yield
    finally:
        for name in values:
            vars(_step).pop(name, None)


def current() -> Share | None:
    """Returns the share of the step that this thread traces or runs; None for batches of a fixed size."""
    return _step.share


def in_use(share: Share) -> contextlib.AbstractContextManager[None]:
    """Makes a share the current one of the `with` block."""
    return _having(share=share)


def micro_batch() -> tf.Tensor | None:
    """Returns the number of the micro-batch that is computed, int32 scalar; None for a whole batch."""
    return _step.part


@contextlib.contextmanager
def in_micro_batch(number: tf.Tensor | None) -> Iterator[None]:
    """Makes a micro-batch, or None, the current one of the `with` block, where nothing sums over replicas."""
    whole = contextlib.nullcontext() if number is None else collectives(Collectives(refusal=NEEDS_WHOLE))
    with _having(part=number), whole:
        yield


@tf.autograph.experimental.do_not_convert
def counted(weights: tf.Tensor) -> tf.Tensor:
    """Returns the weights of examples or of parts of them; zeros where the replica's share has no example."""
    share = _step.share
    return weights if share is None else weights * tf.cast(share.examples > 0, weights.dtype)


def weighting_means() -> contextlib.AbstractContextManager[None]:
    """Makes optimizers weight the gradients in the `with` block by this replica's share of the global batch.

    For a loss that is the mean over this replica's examples, or otherwise over a batch of these examples alone.
    """
    share = _step.share
    if share is None or tf.distribute.get_replica_context().num_replicas_in_sync == 1:
        return _having()
    return _having(factor=tf.cast(share.examples, tf.float32) / tf.cast(share.of, tf.float32))


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
    noted: list[tuple[str, Gradient]] = []
    with _having(gradients=noted):
        yield noted


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


def over_replicas(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Returns the sum of each gradient over replicas, as one device has it for the global batch; in replica context.

    All in one reduction, as Keras does it. The rows of a sparse gradient are concatenated, because one device has one
    row for each id that an example looks up, and Keras 3 squares these one by one. A lookup whose ids depend on no
    example, such as that of positions, is done once on one device and once on each replica: its rows are summed.

    Where the number of rows is not known when the step is traced, TensorFlow's reduction fails in a loop where it
    changes from step to step. Then the rows of replicas are joined in another way.
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
        parts = [part for i in varying for part in (given[i].values, given[i].indices)]
        rows = iter(context.merge_call(joined, args=tuple(parts)))
        for i in varying:
            summed[i] = tf.IndexedSlices(next(rows), next(rows), given[i].dense_shape)
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


def apply_gradients(optimizer: Any, grads_and_vars: Iterable[tuple[Any, Any]], *, summed: bool = False) -> None:
    """Updates weights: weighs and sums the gradients, notes them for the guards, and has the optimizer clip and apply.

    Gradients belong to one replica, or with `summed` to all. The optimizer is of either Keras family.
    """
    if not _keras.is_optimizer(optimizer):
        raise OptimizerError(
            f"apply_gradients got a {type(optimizer).__name__} as its optimizer; expected a Keras optimizer, and then "
            "pairs of a gradient and its variable"
        )
    pairs = list(grads_and_vars)
    if _keras.family(optimizer) == "keras":
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        _apply(optimizer, _optimizers.own_method(optimizer, "apply"), gradients, variables, summed=summed)
    else:
        _apply_pairs(optimizer, _optimizers.own_method(optimizer, "apply_gradients"), pairs, summed=summed)


@tf.autograph.experimental.do_not_convert
def _apply(
    optimizer: Any, plain: Callable, grads: Iterable, trainable_variables: Iterable | None = None, *,
    summed: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """Replaces the method `apply` of a Keras 3 optimizer, which is `plain`."""
    grads = list(grads)
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    if tf.distribute.in_cross_replica_context() or _optimizers.is_summed():
        return converted(plain)(grads, trainable_variables, **kwargs)
    if _optimizers.num_replicas() > 1:
        _make_ready(optimizer, trainable_variables)
    grads, trainable_variables = _prepared(optimizer, grads, trainable_variables, summed)
    if not grads:
        return None
    if _optimizers.num_replicas() > 1 and not summed:
        grads = over_replicas(grads)
    with _optimizers.summed():
        return converted(plain)(grads, trainable_variables, **kwargs)


def _prepared(
    optimizer: Any, gradients: Sequence[Gradient], variables: Sequence[Any] | None, summed: bool, of_keras: bool = False
) -> tuple[Sequence[Gradient], Sequence[Any] | None]:
    """Weighs gradients unless they are sums over replicas, updates tables by theirs, and notes the others.

    Returns these, and their variables. `of_keras` says that the call tells tf_keras of sums, which have no weights yet.
    """
    if not summed:
        gradients = weighted(gradients)
    gradients, variables = update_tables(optimizer, gradients, variables, summed=summed or of_keras)
    if not _keras.scales_loss(optimizer):
        note_gradients(gradients, variables)
    return gradients, variables


def update_tables(
    optimizer: Any, gradients: Sequence[Gradient], variables: Sequence[Any] | None, *, summed: bool = False
) -> tuple[Sequence[Gradient], Sequence[Any] | None]:
    """Updates rows of the tables among some variables, and notes their gradients for the guards; in replica context.

    Args:
      optimizer: Keras optimizer of either family. If there are no others, it counts the step.
      gradients: one for each variable, of this replica.
      variables: None for those of the optimizer.
      summed: whether the gradients are sums over replicas, which cannot be told apart from a replica's own.

    Returns:
      The gradients of the other variables, and these.

    Raises:
      UsageError: for an optimizer, or a gradient, that would need a whole table.
    """
    pairs = list(zip(gradients, _optimizers.variables_of(optimizer) if variables is None else variables))
    tables = [pair for pair in pairs if row_updates.is_table(pair[1])]
    if not tables:
        return gradients, variables
    if summed and _optimizers.num_replicas() > 1:
        raise StepError(
            f"apply_gradients got the sum over replicas of the gradient of the table {tables[0][1].name}; give it the "
            "gradients of each replica, with summed=False"
        )
    if _keras.family(optimizer) != "keras" or not optimizer.built:  # tf_keras knows by itself if it is
        with tf.init_scope():
            optimizer.build([one for _, one in pairs])
    given = [(gradient, _keras.tf_variable(table)) for gradient, table in tables if gradient is not None]
    for gradient, table in given:
        row_updates.check(optimizer, gradient, table)
    note_gradients([gradient for gradient, _ in tables], [table for _, table in tables])
    if _optimizers.num_replicas() == 1:
        for gradient, table in given:
            row_updates.update(optimizer, gradient, table)
    elif given:
        # Across replicas, so that no replica looks up rows between the updates of the parts.
        parts = [part for gradient, _ in given for part in (gradient.values, gradient.indices)]
        update = functools.partial(_update_across_replicas, optimizer, [table for _, table in given])
        tf.distribute.get_replica_context().merge_call(update, args=tuple(parts))
    others = [(gradient, one) for gradient, one in pairs if not row_updates.is_table(one)]
    if not others:
        optimizer.iterations.assign_add(1)
    return [gradient for gradient, _ in others], [one for _, one in others]


@tf.autograph.experimental.do_not_convert
def _update_across_replicas(
    optimizer: Any, tables: list[tf.Variable], strategy: tf.distribute.Strategy, *parts: Iterable
) -> None:
    """Updates the rows of this process's tables with the values and ids of the gradients of replicas.

    The gradient of a part is on replicas of the worker that holds it; of a table that each replica has, on all.
    """
    local, rest = strategy.experimental_local_results, iter(parts)
    for table, values, ids in zip(tables, rest, rest):
        if row_updates.is_held(table):
            found = [tf.concat(local(part), axis=0) for part in (values, ids)]
        else:
            found = joined(strategy, values, ids)
        for number in range(len(local(table))):
            gradient = tf.IndexedSlices(*found)
            row_updates.update(optimizer, gradient, table, lambda held, at=number: local(held)[at])


def _make_ready(optimizer: Any, variables: list[Any] | None) -> None:
    """Builds an optimizer if needed; refuses variables that a replica cannot update by itself."""
    _optimizers.leave_out_sum(optimizer)
    if not optimizer.built and variables:  # Keras would build it next, and that may make others inside of it
        optimizer.build(variables)
    conditional = any(map(_optimizers.updates_conditionally, _keras.with_inner([optimizer])))
    for variable in variables or _optimizers.variables_of(optimizer):
        if getattr(variable, "overwrite_with_gradient", False):
            raise OptimizerError(
                f"{variable.path} is overwritten by its gradient (float8), and each replica has another; train in "
                "float8 on one replica, or use another precision"
            )
        aggregation = getattr(_keras.tf_variable(variable), "aggregation", None)
        if conditional and aggregation not in (None, tf.VariableAggregation.NONE):
            raise OptimizerError(
                f"{variable.name} aggregates what replicas write to it, and {type(optimizer).__name__} with "
                "gradient_accumulation_steps or ema_overwrite_frequency writes to each replica's own copy; make "
                "the variable without aggregation"
            )


_SKIP = {"skip_gradients_aggregation": True, "experimental_aggregate_gradients": False}  # of two versions of tf_keras


def sums_itself(arguments: Mapping[str, Any]) -> bool:
    """Returns whether a call of `apply_gradients` of a tf_keras optimizer says that its gradients are sums already."""
    return any(arguments.get(name) == value for name, value in _SKIP.items())


@tf.autograph.experimental.do_not_convert
def _apply_pairs(
    optimizer: Any, plain: Callable, grads_and_vars: Iterable, *args: Any, summed: bool = False, **kwargs: Any
) -> Any:
    """Replaces the method `apply_gradients` of a tf_keras optimizer, which is `plain`."""
    pairs = list(grads_and_vars)
    if tf.distribute.in_cross_replica_context() or _optimizers.is_summed():
        return converted(plain)(pairs, *args, **kwargs)
    gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
    gradients, variables = _prepared(optimizer, gradients, variables, summed, sums_itself(kwargs))
    if not gradients:
        return None
    parameters = inspect.signature(plain).parameters
    skip = {name: value for name, value in _SKIP.items() if name in parameters}
    several = _optimizers.num_replicas() > 1
    sparse = any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
    if several and not (len(args) > 1 or sums_itself(kwargs)) and (summed or sparse):
        if not skip:
            raise OptimizerError(
                f"{type(optimizer).__name__}.apply_gradients takes no skip_gradients_aggregation, which a "
                f"GradientTrainer and sparse gradients need on several replicas; {MAKE_DENSE}"
            )
        kwargs |= skip
        if not summed:
            gradients = over_replicas(gradients)
    with _optimizers.summed():
        return converted(plain)(list(zip(gradients, variables)), *args, **kwargs)


class TrainingOptimizers:
    """The optimizers of a trainer, whose steps may call them by themselves, until it is closed.

    - A call of `apply` or `apply_gradients` does what `apply_gradients` of this module does.
    - Tables are updated row by row, other variables by fused kernels where these are faster.

    On one replica and without tables, none of this adds an op to what Keras does.

    Args:
      trainer: the object that holds the optimizers.
      strategy: `tf.distribute.Strategy` that runs its steps.
      noted: whether the steps are watched, see `watching`.
      fuse: whether variables are updated by fused kernels where these are faster.

    Raises:
      UsageError: for an optimizer that cannot be right on this strategy.
    """

    def __init__(self, trainer: Any, strategy: tf.distribute.Strategy, *, noted: bool, fuse: bool = True) -> None:
        self._replacements: list[_optimizers.Replacement] = []
        sums = strategy.num_replicas_in_sync > 1
        try:
            for optimizer in _keras.optimizers(trainer).values():
                self._change(optimizer, sums, noted and not _keras.scales_loss(optimizer))
                if update := _optimizers.fused_update(optimizer) if fuse else None:
                    self._replacements.append(_optimizers.Replacement(optimizer, "update_step", update))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Restores the original methods of the optimizers."""
        for replacement in reversed(self._replacements):
            replacement.undo()

    def _change(self, optimizer: Any, sums: bool, noted: bool) -> None:
        if _keras.family(optimizer) == "keras":
            if sums:
                _optimizers.leave_out_sum(optimizer)
            name, function = "apply", _apply
        else:
            if sums and _optimizers.counts_while_traced(optimizer):
                raise OptimizerError(
                    "tf_keras.optimizers.Nadam counts its updates while TensorFlow traces them, once for each replica, "
                    "and computes different weights on several; use tf_keras.optimizers.legacy.Nadam, or Keras 3"
                )
            name, function = "apply_gradients", _apply_pairs
        if sums or noted or row_updates.any_tables():
            make = functools.partial(functools.partial, function, optimizer)
            self._replacements.append(_optimizers.Replacement(optimizer, name, make))


def refuse_others(strategy: tf.distribute.Strategy, variables: Iterable[tf.Variable], unheld: Iterable[str]) -> None:
    """Raises `UsageError` if a step uses an optimizer, or on several replicas a seed, that its trainer does not hold.

    On one replica, only if it also looks up rows of tables, which such an optimizer would update as a whole.

    Args:
      strategy: `tf.distribute.Strategy` that runs the step.
      variables: the variables of the step.
      unheld: names of those that the trainer does not hold: each optimizer reads its learning rate or its count of
        updates from one.
    """
    several = strategy.num_replicas_in_sync > 1
    if not several and not any(map(row_updates.is_table, variables)):
        return
    unheld = list(unheld)
    if several and any(_keras.GLOBAL_SEED in name for name in unheld):
        raise StepError(_keras.UNSEEDED)
    found = [name for name in unheld if re.search(r"(^|/)(iter|iteration|learning_rate)(_\d+)?:0$", name)]
    if found:
        wrong = "gradients looplib can neither sum over the replicas nor weigh by their examples"
        if not several:
            wrong = "updates of a ShardedEmbedding would read and write the whole table"
        raise OptimizerError(
            f"the step uses an optimizer that the trainer does not hold (its variable {found[0]}), and whose {wrong}; "
            "make it an attribute of the trainer, or of a model, layer or tf.Module in it"
        )
