"""The table of what a trainer trains: each of its variables, for the log and `run.json`."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from looplib.compat import keras as _keras
from looplib.compat.row_updates import shape_of
from looplib.run.report import Model, Variable
from looplib.task.gradient_trainer import GradientTrainer
from looplib.task.state import state_of, variables_of
from looplib.task.trainer import Trainer

_SHOWN = 40  # rows in the log


def note(trainer: Trainer) -> Model:
    """Logs the table of a trainer, and returns it for `run.json`; see `describe`."""
    table = describe(trainer)
    logging.info("%s", text_of(table))
    return table


def describe(trainer: Trainer) -> Model:
    """Returns the table of a trainer, once its variables exist.

    It has the variables of the layers, and the trainer's own floating-point ones; not those of the optimizers.
    """
    rows = []
    for name, variable, trained in variables(trainer):
        known = variable.shape.is_fully_defined()
        shape = shape_of(variable) if known else tuple(variable.read_value().shape)
        rows.append(Variable(name, [*shape], math.prod(shape), trained))
    return Model(_count(rows), _count(row for row in rows if row.trainable), rows)


def _count(rows: Iterable[Variable]) -> int:
    return sum(row.parameters for row in rows)


def text_of(table: Model) -> str:
    """Returns the counts as a line, and the first rows as a table."""
    counts = f"{table.parameters:,} parameters, of which {table.trainable_parameters:,} are trained"
    lines, shown, others = [f"the trainer has {counts}"], table.variables[:_SHOWN], len(table.variables) - _SHOWN
    width = max((len(row.name) for row in shown), default=0)
    for row in shown:
        note = "" if row.trainable else "  not trained"
        lines.append(f"  {row.name:{width}}  {str(row.shape):20}{row.parameters:>14,}{note}")
    return "\n".join(lines + [f"  and {others} more variables, which run.json lists"] * (others > 0))


def variables(trainer: Trainer) -> list[tuple[str, tf.Variable, bool]]:
    """Returns (name, variable, whether it is trained) for each row of the table of a trainer, in order."""
    seen, found = set(), []
    for optimizer in _keras.with_inner(_keras.optimizers(trainer).values()):
        own = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
        seen |= {id(_keras.tf_variable(variable)) for variable in own}
    frozen = trainer.frozen_variables if isinstance(trainer, GradientTrainer) else ()
    not_trained = {id(_keras.tf_variable(variable)) for variable in frozen}
    for name, variable, trainable in _variables(trainer):
        variable = _keras.tf_variable(variable)
        if id(variable) not in seen:
            seen.add(id(variable))
            found.append((name, variable, trainable and id(variable) not in not_trained))
    return found


def _variables(trainer: Trainer) -> Iterator[tuple[str, Any, bool]]:
    """Yields (name, variable, whether it is trained)."""
    layers_first = sorted(state_of(trainer).items(), key=lambda item: not _keras.is_layer(item[1]))
    for name, value in layers_first:  # so that their variables have the layers' names, not those of an optimizer
        if _keras.is_layer(value):
            trained = {id(variable) for variable in value.trainable_weights} if value.built else set()
            for variable in _keras.without_vocabularies(value.weights) if value.built else ():
                yield _keras.variable_path(variable), variable, id(variable) in trained
        elif not _keras.is_optimizer(value) and not _keras.is_metrics(getattr(trainer, name, None)):
            for own, variable in variables_of({name: value}):
                if isinstance(variable, tf.Variable) and variable.dtype.is_floating:
                    yield f"{name}: {own.removesuffix(':0')}", variable, variable.trainable
