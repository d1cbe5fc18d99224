"""The table of what a trainer trains: each of its variables, for the log and `run.json`."""

import dataclasses
import math
from collections.abc import Iterator
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


@dataclasses.dataclass(frozen=True)
class Row:
    """One variable.

    Attributes:
      name: its name.
      shape: its shape.
      trainable: whether it is trained.
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool

    @property
    def parameters(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class ModelTable:
    """The variables of a trainer's layers, and its own floating-point ones; without the optimizers' variables.

    Attributes:
      rows: the variables, in order.
    """

    rows: list[Row]

    def count(self, trainable_only: bool = False) -> int:
        """Returns the number of parameters."""
        return sum(row.parameters for row in self.rows if row.trainable or not trainable_only)

    @property
    def noted(self) -> Model:
        """The table for `run.json`."""
        rows = [Variable(row.name, [*row.shape], row.parameters, row.trainable) for row in self.rows]
        return Model(self.count(), self.count(True), rows)

    def __str__(self) -> str:
        """Returns the counts as a line, and the first rows as a table."""
        lines = [f"the trainer has {self.count():,} parameters, of which {self.count(True):,} are trained"]
        shown, others = self.rows[:_SHOWN], len(self.rows) - _SHOWN
        width = max((len(row.name) for row in shown), default=0)
        for row in shown:
            note = "" if row.trainable else "  not trained"
            lines.append(f"  {row.name:{width}}  {str(list(row.shape)):20}{row.parameters:>14,}{note}")
        return "\n".join(lines + [f"  and {others} more variables, which run.json lists"] * (others > 0))


def note(trainer: Trainer) -> Model:
    """Logs the table of a trainer, and returns it for `run.json`; see `describe`."""
    table = describe(trainer)
    logging.info("%s", table)
    return table.noted


def describe(trainer: Trainer) -> ModelTable:
    """Returns the table of a trainer, once its variables exist."""
    rows = []
    for name, variable, trained in variables(trainer):
        known = variable.shape.is_fully_defined()
        rows.append(Row(name, shape_of(variable) if known else tuple(variable.read_value().shape), trained))
    return ModelTable(rows)


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
