"""Which variables a training is meant to change at a step, and which of them one optimizer updates."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from looplib.cluster import remote
from looplib.compat import keras as _keras
from looplib.compat import optimizers as _optimizers
from looplib.compat import tensorflow as _tf
from looplib.loop.base import Loop
from looplib.task.gradient_trainer import GradientTrainer
from looplib.task.state import state_of, variables_of


@dataclasses.dataclass(frozen=True)
class TrainedVariable:
    """A variable that a training is meant to change.

    Attributes:
      name: of the variable, unique in the trainer.
      variable: the `tf.Variable`.
      group: a number that the variables of one optimizer have in common.
    """

    name: str
    variable: tf.Variable
    group: int


class TrainedVariables:
    """The floating-point variables that a training is meant to change.

    These are trainable, in their layer too, and an optimizer was built for them, or the step may update them: weights
    that are frozen on purpose, of a teacher, or the base of an adapter are not among them. With parameter servers there
    are none, because reading them would take the network.

    Args:
      loop: of the trainer.
    """

    def __init__(self, loop: Loop) -> None:
        trainer = loop.task
        self._phases = trainer.training_phases
        built = dict(_built(trainer))
        self._all: list[TrainedVariable] = []
        strategy = loop.traced.strategy if loop.traced else tf.distribute.get_strategy()
        if remote.plugin_of(strategy) is not None:
            return
        updated = _tf.updated_by(loop.traced.function) if loop.traced else set()
        names: dict[str, int] = {}
        for name, variable in _trainable(trainer):
            parts = strategy.experimental_local_results(variable)
            if id(variable) in built or not updated.isdisjoint(map(_tf.identity_of, parts)):
                names[name] = number = names.get(name, 0) + 1
                unique = f"{name} ({number})" if number > 1 else name
                self._all.append(TrainedVariable(unique, variable, built.get(id(variable), -1)))

    def between(self, before: int, step: int) -> list[TrainedVariable]:
        """Returns the variables that are trained in all of the steps after `before`, up to `step`."""
        if self._phases is None:
            return self._all
        numbers = range(self._phases.number_at(min(before, step - 1)), self._phases.number_at(step - 1) + 1)
        phases = [{id(_keras.tf_variable(one)) for one in self._phases.trained_in(number)} for number in numbers]
        return [one for one in self._all if all(id(one.variable) in phase for phase in phases)]


def _built(trainer: Any) -> Iterator[tuple[int, int]]:
    """Yields (id, number of the optimizer) of each variable that a trainer's optimizers update, as far as is known."""
    for number, optimizer in enumerate(_keras.optimizers(trainer).values()):
        yield from ((id(_keras.tf_variable(one)), number) for one in _optimizers.variables_of(optimizer))
    if isinstance(trainer, GradientTrainer):
        for number, (_, _, variables) in enumerate(trainer.update_plan.parts):
            yield from ((id(_keras.tf_variable(one)), number) for one in variables)


def _trainable(trainer: Any) -> Iterator[tuple[str, tf.Variable]]:
    """Yields the trainable floating-point variables of a trainer's state, by name."""
    layers = [part for part in _keras.parts(vars(trainer)) if _keras.is_layer(part)]
    held = {id(_keras.tf_variable(one)) for layer in layers for one in layer.weights}
    trainable = {id(_keras.tf_variable(one)) for layer in layers for one in layer.trainable_weights}
    for name, variable in variables_of(state_of(trainer)):
        own = variable.trainable and id(variable) not in held
        if variable.dtype.is_floating and (own or id(variable) in trainable):
            yield name.removesuffix(":0"), variable
