"""Updates of the rows of a table that a batch has looked up, by a Keras optimizer of either family.

Keras's optimizers read and write a whole table at each step: Adam, for example, decays the moments of every row. Here
an update reads and writes the rows of the gradient, in the table and in the optimizer's slots, where these are held.
The slots have no public names.

A row with a gradient is updated by Keras's formula, with the sum of the gradients of all its lookups, and, for Adam,
with the number of all updates in the correction of its bias. A row without one keeps its value and its slots. For
Adagrad and for SGD without momentum this is what Keras does; the momentum of SGD and the moments of Adam are "lazy", as
in TensorFlow Addons' `LazyAdam`. Ftrl of Keras also writes rows that no batch has looked up, from slots that are zero.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from looplib.compat import keras as _keras
from looplib.errors import OptimizerError, StepError

# What reads or writes whole variables at each step, or needs the norm of the gradient of all of a table's parts.
_WHOLE = (
    "amsgrad", "adaptive_epsilon", "use_ema", "gradient_accumulation_steps", "clipnorm", "clipvalue", "global_clipnorm",
)  # fmt: skip
_UNKNOWN = (
    "{name} trains the table of a ShardedEmbedding, and looplib knows no update of single rows for it; train the table "
    "with one of Keras's {rules}, in a GradientTrainer's dict of optimizers, say"
)


CHECK = "ids_of_a_table"  # the name of the op that checks ids, without which wrong ones would be looked up


class RowTables:
    """A layer whose tables are updated row by row, and whose lookups are checked by an op named `CHECK`."""

    @property
    def tables(self) -> list[Any]:
        """The tables, float variables `[rows, dim]`."""
        raise NotImplementedError


def tables_of(holder: Any) -> list[tf.Variable]:
    """Returns the tables that are updated row by row, of all layers that something is and holds."""
    layers = [part for part in _keras.parts(holder) if isinstance(part, RowTables)]
    return [_keras.tf_variable(table) for layer in layers for table in layer.tables]


def by_row(
    optimizer: Any, tables: Iterable[tf.Variable], others: Callable[[Callable], Callable] | None
) -> Callable[[Callable], Callable]:
    """Returns a function that makes a method `update_step` which updates the rows of tables.

    Args:
      optimizer: Keras optimizer of either family.
      tables: what `tables_of` returns; on replicas, the variable of each.
      others: makes the method for other variables from the optimizer's own; None for its own.

    Raises:
      UsageError: for an optimizer without such a method; from the method, for an optimizer or a gradient that would
        need a whole table.
    """
    handles = {id(table.handle) for table in tables}  # with parameter servers, variables come in wrappers
    if getattr(optimizer, "update_step", None) is None:
        raise OptimizerError(_UNKNOWN.format(name=type(optimizer).__name__, rules=", ".join(_RULES)))

    def updating(plain: Callable) -> Callable:
        plain = others(plain) if others else plain

        def update(gradient: Any, variable: Any, *rate: Any) -> Any:
            if id(variable.handle) not in handles:
                return plain(gradient, variable, *rate)
            _check(optimizer, gradient, variable)
            return _update(optimizer, gradient, variable, *(rate or [optimizer.learning_rate]))

        return update

    return updating


def _check(optimizer: Any, gradient: Any, table: tf.Variable) -> None:
    name = type(optimizer).__name__
    if name not in _RULES or not _keras.is_own_class(optimizer):
        raise OptimizerError(_UNKNOWN.format(name=name, rules=", ".join(_RULES)))
    found = [setting for setting in _WHOLE if getattr(optimizer, setting, None)]
    if getattr(optimizer, "weight_decay", None) and optimizer._use_weight_decay(table):
        found.append("weight_decay")
    if found:
        raise OptimizerError(
            f"{name} has {found[0]}, which reads or writes all rows of the table {table.name} at each step; leave it "
            "out (weight_decay for this table: by optimizer.exclude_from_weight_decay, or no_decay of a "
            "GradientTrainer), or give the table an optimizer of its own, in a GradientTrainer's dict of optimizers"
        )
    if not isinstance(gradient, tf.IndexedSlices):
        raise StepError(
            f"the gradient of the table {table.name} is dense, so each step would read and write all its rows; "
            "micro-batches, jit_compile, clip_*, norms in the report, loss_scale and regularization "
            "make it dense: leave them out, or use keras.layers.Embedding"
        )


class _TouchedRows(NamedTuple):
    """The rows of one variable that an update is about."""

    handle: tf.Tensor
    ids: tf.Tensor
    dtype: tf.DType

    def read(self) -> tf.Tensor:
        return tf.raw_ops.ResourceGather(resource=self.handle, indices=self.ids, dtype=self.dtype)

    def write(self, values: tf.Tensor) -> None:
        tf.raw_ops.ResourceScatterUpdate(resource=self.handle, indices=self.ids, updates=values)

    def add(self, values: tf.Tensor) -> None:
        # In one op, so that workers that do not wait for each other lose no part of a sum.
        tf.raw_ops.ResourceScatterAdd(resource=self.handle, indices=self.ids, updates=values)


def _update(optimizer: Any, gradient: tf.IndexedSlices, variable: tf.Variable, rate: Any) -> None:
    ids, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(tf.cast(gradient.values, variable.dtype), places, tf.size(ids))

    def rows_of(held: Any) -> _TouchedRows:
        held = _keras.tf_variable(held)
        held.value()  # unused, but the trace then counts the variable as one of the step's; a handle is not enough
        return _TouchedRows(held.handle, ids, held.dtype)

    def slot(slots: Sequence[Any]) -> _TouchedRows:
        if _keras.family(optimizer) == "keras":
            return rows_of(slots[optimizer._get_variable_index(variable)])
        return rows_of(slots[optimizer._index_dict[optimizer._var_key(variable)]])

    _RULES[type(optimizer).__name__](optimizer, rows_of(variable), slot, values, tf.cast(rate, variable.dtype))


def _sgd(optimizer: Any, rows: _TouchedRows, slot: Callable, gradient: tf.Tensor, rate: tf.Tensor) -> None:
    if not optimizer.momentum:
        return rows.add(-rate * gradient)
    momentum, factor = slot(optimizer.momentums), tf.cast(optimizer.momentum, rows.dtype)
    moved = factor * momentum.read() - rate * gradient
    momentum.write(moved)
    return rows.add(factor * moved - rate * gradient if optimizer.nesterov else moved)


def _adagrad(optimizer: Any, rows: _TouchedRows, slot: Callable, gradient: tf.Tensor, rate: tf.Tensor) -> None:
    accumulator = slot(optimizer._accumulators)
    accumulator.add(tf.square(gradient))
    rows.add(-rate * gradient / tf.sqrt(accumulator.read() + optimizer.epsilon))


def _adam(optimizer: Any, rows: _TouchedRows, slot: Callable, gradient: tf.Tensor, rate: tf.Tensor) -> None:
    first, second = slot(optimizer._momentums), slot(optimizer._velocities)
    beta_1, beta_2 = (tf.cast(beta, rows.dtype) for beta in (optimizer.beta_1, optimizer.beta_2))
    step = tf.cast(_keras.tf_variable(optimizer.iterations) + 1, rows.dtype)
    mean, square = first.read(), second.read()
    mean += (gradient - mean) * (1 - beta_1)
    square += (tf.square(gradient) - square) * (1 - beta_2)
    first.write(mean)
    second.write(square)
    corrected = rate * tf.sqrt(1 - tf.pow(beta_2, step)) / (1 - tf.pow(beta_1, step))
    rows.add(-corrected * mean / (tf.sqrt(square) + optimizer.epsilon))


def _ftrl(optimizer: Any, rows: _TouchedRows, slot: Callable, gradient: tf.Tensor, rate: tf.Tensor) -> None:
    accumulator, linear, power = slot(optimizer._accumulators), slot(optimizer._linears), -optimizer.learning_rate_power
    weights, before = rows.read(), accumulator.read()
    after = before + tf.square(gradient)
    shrunk = gradient + 2 * optimizer.l2_shrinkage_regularization_strength * weights
    linear.add(shrunk - (tf.pow(after, power) - tf.pow(before, power)) / rate * weights)
    accumulator.write(after)
    l2 = optimizer.l2_regularization_strength + optimizer.beta / (2 * rate)
    l1, sums = optimizer.l1_regularization_strength, linear.read()
    rows.write((tf.clip_by_value(sums, -l1, l1) - sums) / (tf.pow(after, power) / rate + 2 * l2))


_RULES = {"SGD": _sgd, "Adagrad": _adagrad, "Adam": _adam, "AdamW": _adam, "Ftrl": _ftrl}
