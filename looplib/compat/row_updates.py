"""Updates of the rows of a table that a batch has looked up, by a Keras optimizer of either family.

Keras's optimizers read and write a whole table at each step: Adam, for example, decays the moments of every row. Here
an update reads and writes the rows of the gradient, in the table and in the optimizer's slots, where these are held.
The slots have no public names.

A row with a gradient is updated by Keras's formula, with the sum of the gradients of all its lookups, and, for Adam,
with the number of all updates in the correction of its bias. A row without one keeps its value and its slots. For
Adagrad and for SGD without momentum this is what Keras does; the momentum of SGD and the moments of Adam are "lazy", as
in TensorFlow Addons' `LazyAdam`. Ftrl of Keras also writes rows that no batch has looked up, from slots that are zero.
"""

import dataclasses
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from looplib.compat import keras as _keras
from looplib.compat import tensorflow as _tf
from looplib.compat.optimizers import handle_of, slot_of
from looplib.compat.versions import KNOWN_KERAS
from looplib.errors import OptimizerError, StepError

# What reads or writes whole variables at each step, or needs the norm of the gradient of all of a table's parts.
_WHOLE = (
    "amsgrad", "adaptive_epsilon", "use_ema", "gradient_accumulation_steps", "clipnorm", "clipvalue", "global_clipnorm",
)  # fmt: skip
CHECK = "ids_of_a_table"  # the name of the op that checks ids, without which wrong ones would be looked up
_SLOT = "add_variable_from_reference"  # the method of optimizers, of both families


@dataclasses.dataclass
class RowOwners:
    """What an update tells a layer that gives the rows of its table to other ids, and is told by it.

    Attributes:
      new: int64 variable `[rows]`, 1 for a row that has not been updated since it got its owner: its slots begin anew.
      steps: int64 variable `[1]`, the number of updates.
      grows: whether the layer was called with training=True.
    """

    new: Any
    steps: Any
    grows: bool = False


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What is known of a variable."""

    is_table: bool = False  # whether it is updated row by row
    is_divided: bool = False  # whether workers have its part, and others, of a table alone
    owners: RowOwners | None = None  # of a table whose rows change their owners
    knows_owners: bool = False
    held_shape: tuple[int, ...] | None = None  # of what `held` has made


_facts: dict[int, _Facts] = {}  # by the identity of the variable's handle


def add_table(table: Any, divided: bool, owners: RowOwners | None = None, maps: Sequence[Any] = ()) -> None:
    """Notes that a variable is updated row by row.

    Args:
      table: floats `[rows, dim]`.
      divided: whether workers have its part, and others, of a table alone.
      owners: of a table whose rows change their owners.
      maps: variables that know the owners.
    """
    _note(table, is_table=True, is_divided=divided, owners=owners)
    for variable in maps:
        _note(variable, knows_owners=True)


def knows_owners(variable: tf.Variable) -> bool:
    """Returns whether a variable knows the owners of the rows of a table."""
    return _facts_of(variable).knows_owners


def changes_owners(table: Any) -> bool:
    """Returns whether the rows of a variable change their owners."""
    return _facts_of(table).owners is not None


def shape_of(variable: Any) -> tuple[int, ...]:
    """Returns the shape of a variable, of a part of a table and its slots with the rows that another worker has."""
    return _facts_of(variable).held_shape or tuple(variable.shape)


def is_table(variable: Any) -> bool:
    """Returns whether a variable of either Keras family, or of TensorFlow, is updated row by row."""
    return _facts_of(variable).is_table


def without_copy(variable: tf.Variable) -> tf.Tensor:
    """Returns the value of a variable; TensorFlow would copy it if its rows are updated."""
    if is_table(variable) or is_held(variable):
        for part in _parts(variable):
            tf.raw_ops.DisableCopyOnRead(resource=part.handle)
    return tf.convert_to_tensor(variable)


def emptied(table: tf.Variable) -> None:
    """Frees the memory of a variable that gets another value next."""
    for part in _parts(table):
        tf.raw_ops.DisableCopyOnRead(resource=part.handle)  # or the next value would be copied
        tf.raw_ops.AssignVariableOp(resource=part.handle, value=tf.zeros([0, *part.shape[1:]], part.dtype))


def held(device: str, make: Callable[[], Any], shape: tuple[int, ...]) -> Any:
    """Makes a variable on a device, outside of the strategy whose scope is entered, which would copy it.

    Args:
      device: name of the device.
      make: makes the variable; without rows where another worker has them.
      shape: the shape with these rows.
    """

    def made() -> Any:
        with tf.device(device):
            return make()

    variable = _tf.outside(made)
    _note(variable, held_shape=shape)
    return variable


def is_held(variable: Any) -> bool:
    """Returns whether `held` made a variable: a part of a table, or a slot of one, that one replica holds."""
    return _facts_of(variable).held_shape is not None


def is_divided(variable: Any) -> bool:
    """Returns whether a variable is a part of a table of which each worker has some parts."""
    return _facts_of(variable).is_divided


def any_tables() -> bool:
    """Returns whether this process has a table."""
    return any(facts.is_table for facts in _facts.values())


def _note(variable: Any, **facts: Any) -> None:
    found, variable = _facts_of(variable), _keras.tf_variable(variable)
    for key in map(_tf.identity_of, _parts(variable)):
        _facts[key] = dataclasses.replace(found, **facts)
        weakref.finalize(variable, _facts.pop, key, None)


def _facts_of(variable: Any) -> _Facts:
    return _facts.get(_tf.identity_of(_parts(_keras.tf_variable(variable))[0]), _Facts())


def _parts(variable: Any) -> Sequence[Any]:
    """Returns the variable of each replica of this process, or the one."""
    if isinstance(variable, tf.distribute.DistributedValues):
        return variable.distribute_strategy.experimental_local_results(variable)
    return [variable]


def keep_slots_with_tables(family: str) -> None:
    """Changes the class that adapts optimizers of a Keras family to tf.distribute, which refuses what `held` has made.

    The slots of such a table are then made on its device, outside of the strategy too.

    Args:
      family: "keras" or "tf_keras", imported.

    Raises:
      UsageError: if this version of Keras has no such class.
    """
    classes = sys.modules[family].optimizers.Optimizer.__mro__
    adapter = next((cls for cls in classes if _SLOT in vars(cls)), None)
    if adapter is None or not any(_SLOT in vars(cls) for cls in classes[classes.index(adapter) + 1 :]):
        raise OptimizerError(
            f"looplib does not know how this version of {family} makes the slots of optimizers (it knows Keras "
            f"{KNOWN_KERAS}), so a ShardedEmbedding needs one replica, parameter servers, or another version"
        )
    original = vars(adapter)[_SLOT]
    if original.__module__ == __name__:
        return

    signature = inspect.signature(original)  # of which each family names the first argument in its way

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        variable = signature.bind(self, *args, **kwargs).args[1]
        if not is_held(variable):
            return original(self, *args, **kwargs)
        make = functools.partial(getattr(super(adapter, self), _SLOT), *args, **kwargs)
        return held(_keras.tf_variable(variable).device, make, shape_of(variable))

    method.__module__ = __name__
    setattr(adapter, _SLOT, method)


def update(
    optimizer: Any,
    gradient: tf.IndexedSlices,
    table: tf.Variable,
    local: Callable[[tf.Variable], tf.Variable] = lambda variable: variable,
) -> None:
    """Updates the rows of a table that a gradient is about, on the device of the table.

    So a parameter server gets the gradient, and no row of a slot leaves it. The caller has called `check`, and counts
    the step.

    Args:
      optimizer: Keras optimizer of either family, built.
      gradient: the sum over replicas.
      table: the variable that the optimizer was built with.
      local: returns the variable that one replica has of a distributed one.
    """
    with tf.device(local(table).device):
        ids, places = tf.unique(gradient.indices)
        values = tf.math.unsorted_segment_sum(tf.cast(gradient.values, table.dtype), places, tf.size(ids))

        def rows_of(held: Any) -> _TouchedRows:
            variable = local(_keras.tf_variable(held))
            return _TouchedRows(handle_of(variable), ids, variable.dtype)

        owners = _facts_of(table).owners
        new = None if owners is None else _of_new_owners(owners, rows_of, table)

        def slot(slots: Sequence[Any], initial: float = 0.0) -> _TouchedRows:
            rows = rows_of(slot_of(optimizer, slots, table))
            if new is not None:
                value = tf.fill([tf.size(new), table.shape[1]], tf.cast(initial, rows.dtype))
                rows._replace(ids=new).write(value)
            return rows

        rate = _keras.rate_or_schedule(optimizer, optimizer.learning_rate)
        rate = tf.cast(rate(optimizer.iterations) if callable(rate) else rate, table.dtype)
        _RULES[type(optimizer).__name__](optimizer, rows_of(table), slot, values, rate)


def check(optimizer: Any, gradient: Any, table: tf.Variable) -> None:
    """Raises `UsageError` for an optimizer or a gradient that would need the whole table."""
    name = type(optimizer).__name__
    legacy = getattr(optimizer, "update_step", None) is None  # of tf_keras, with slots of another kind
    if name not in _RULES or legacy or not _keras.is_own_class(optimizer):
        raise OptimizerError(
            f"{name} trains the table of a ShardedEmbedding, and looplib knows no update of single rows for it; train "
            f"the table with one of Keras's {', '.join(_RULES)}, in a GradientTrainer's dict of optimizers, say"
        )
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


def _of_new_owners(owners: RowOwners, rows_of: Callable[[Any], _TouchedRows], table: tf.Variable) -> tf.Tensor:
    """Counts an update; returns those of its rows that have new owners, which have them no longer."""
    if not owners.grows:
        raise StepError(
            f"the table {table.name} of a DynamicEmbedding is trained, and its layer was never called with "
            "training=True, so that no id would get a row; call self.model(inputs, training=True) in the loss"
        )
    flags = rows_of(owners.new)
    new = tf.boolean_mask(flags.ids, flags.read() > 0)
    flags.write(tf.zeros_like(flags.ids, tf.int64))
    steps = rows_of(owners.steps)
    steps._replace(ids=tf.constant([0])).add(tf.constant([1], tf.int64))
    return new


def _sgd(optimizer: Any, rows: _TouchedRows, slot: Callable, gradient: tf.Tensor, rate: tf.Tensor) -> None:
    if not optimizer.momentum:
        return rows.add(-rate * gradient)
    momentum, factor = slot(optimizer.momentums), tf.cast(optimizer.momentum, rows.dtype)
    moved = factor * momentum.read() - rate * gradient
    momentum.write(moved)
    return rows.add(factor * moved - rate * gradient if optimizer.nesterov else moved)


def _adagrad(optimizer: Any, rows: _TouchedRows, slot: Callable, gradient: tf.Tensor, rate: tf.Tensor) -> None:
    accumulator = slot(optimizer._accumulators, optimizer.initial_accumulator_value)
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
    accumulator = slot(optimizer._accumulators, optimizer.initial_accumulator_value)
    linear, power = slot(optimizer._linears), -optimizer.learning_rate_power
    weights, before = rows.read(), accumulator.read()
    after = before + tf.square(gradient)
    shrunk = gradient + 2 * optimizer.l2_shrinkage_regularization_strength * weights
    linear.add(shrunk - (tf.pow(after, power) - tf.pow(before, power)) / rate * weights)
    accumulator.write(after)
    l2 = optimizer.l2_regularization_strength + optimizer.beta / (2 * rate)
    l1, sums = optimizer.l1_regularization_strength, linear.read()
    rows.write((tf.clip_by_value(sums, -l1, l1) - sums) / (tf.pow(after, power) / rate + 2 * l2))


_RULES = {"SGD": _sgd, "Adagrad": _adagrad, "Adam": _adam, "AdamW": _adam, "Ftrl": _ftrl}
