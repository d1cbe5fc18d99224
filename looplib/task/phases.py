"""The phases of a `GradientTrainer`: which of them a step belongs to, and what it trains in that."""

import bisect
import contextlib
import dataclasses
import math
import numbers
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.base.messages import whole_number
from looplib.compat import keras as _keras
from looplib.compat.tensorflow import converted
from looplib.errors import OptimizerError, SettingError
from looplib.task import parts, reductions
from looplib.task.gradient_trainer import GradientTrainer, UpdatePlan
from looplib.task.learning_rates import constant_rate


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a training of a `GradientTrainer`, with its own trained variables and learning rate.

    In a phase, the other variables have no update, no decay and no part in clipping; their optimizer slots and averages
    stay as they are. Batch normalization in a layer that is not trained keeps its statistics, and computes with them.

    Args:
      until: the global step that ends the phase; None, for the last phase, has no end.
      train: regular expressions, one or several, that are searched in the names of variables; "" matches all.
      learning_rate: the rate of the optimizers that train in the phase, from its first step on; None does not change
        it.

    Raises:
      UsageError: for bad input.
    """

    until: int | None = None
    train: Sequence[str] | str = ""
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        if self.until is not None:
            whole_number("Phase.until", self.until)
        patterns = [self.train] if isinstance(self.train, str) else self.train
        strings = isinstance(patterns, Sequence) and all(isinstance(one, str) for one in patterns)
        if not strings or not patterns:
            raise SettingError(f"Phase.train is {self.train!r:.200}; expected one or several regular expressions")
        rate = self.learning_rate
        is_number = isinstance(rate, numbers.Real) and not isinstance(rate, bool)
        if rate is not None and not (is_number and math.isfinite(rate) and rate >= 0):
            raise SettingError(
                f"Phase.learning_rate is {rate!r:.200}; expected a finite number, 0 or more; a schedule goes to "
                "the optimizer, and counts its updates over all phases"
            )


_LAYER_NORM = "gradient_norm/"


class PhasedTraining:
    """The phases of a trainer. The global step alone decides which of them a step belongs to.

    Args:
      phases: list of `Phase`, in their order.
      model: the model.
      variables: those of it that may be trained; what no phase trains is frozen.

    Attributes:
      trained: the variables that any phase trains.

    Raises:
      UsageError: for phases that do not follow each other, or a pattern that matches nothing.
    """

    def __init__(self, phases: Sequence[Phase], model: Any, variables: Sequence[Any]) -> None:
        self._phases = _checked(phases)
        self._model = model
        self._ends = [phase.until for phase in self._phases if phase.until is not None]
        self._own = [
            parts.matching(variables, phase.train, f"train of phase {number}", kind="trained variable")
            for number, phase in enumerate(self._phases, 1)
        ]
        wanted = {id(variable) for own in self._own for variable in own}
        self.trained = [variable for variable in variables if id(variable) in wanted]
        for layer in parts.layers_of(model, {id(one) for one in model.trainable_variables} - wanted):
            layer.trainable = False
        self._plans: list[UpdatePlan] = []
        self._whole: UpdatePlan | None = None
        self._frozen: list[list[Any]] = []  # the layers that a phase does not train, by phase
        self._lock, self._inside, self._flags = threading.Lock(), 0, _Flags([])

    def divide(self, plan: UpdatePlan) -> None:
        """Divides the plan of all phases, whose optimizers are built, among them; raises `UsageError` if one cannot."""
        self._whole = plan
        trainable = list(self._model.trainable_variables)
        for number, (phase, own) in enumerate(zip(self._phases, self._own), 1):
            wanted = {id(variable) for variable in own}
            divided = [
                (pattern, optimizer, [variable for variable in variables if id(variable) in wanted])
                for pattern, optimizer, variables in plan.parts
            ]
            for (_, optimizer, variables), (_, _, every) in zip(divided, plan.parts):
                _check_optimizer(number, phase, optimizer, bool(variables), len(variables) in (0, len(every)))
            self._frozen.append(parts.layers_of(self._model, {id(one) for one in trainable} - wanted))
            with _Flags(self._frozen[-1]):
                now = list(self._model.trainable_variables)
            self._plans.append(UpdatePlan([one for one in plan.trained if id(one) in wanted], now, divided))

    def __len__(self) -> int:
        return len(self._phases)

    def number_at(self, step: int) -> int:
        """Returns the number, from 0, of the phase that the step after `step` belongs to; the last one has no end."""
        return min(bisect.bisect_right(self._ends, step), len(self._phases) - 1)

    def trained_in(self, number: int) -> list[Any]:
        """Returns the variables that a phase, given by its number from 0, trains."""
        return self._plans[number].trained

    def left(self, step: int) -> int | None:
        """Returns how many steps after `step` belong to the same phase; None for the last one."""
        number = self.number_at(step)
        return None if number == len(self._phases) - 1 else self._ends[number] - step

    @property
    def end(self) -> int | None:
        """The step that the last phase ends with; None if it has no end."""
        return self._phases[-1].until

    def start(self, step: int) -> None:
        """Sets the learning rate of a phase if the step after `step` is its first one."""
        number = self.number_at(step)
        begins = step == (self._ends[number - 1] if number else 0)
        rate = self._phases[number].learning_rate
        if begins and rate is not None:
            for _, optimizer, variables in self._plans[number].parts:
                if variables:
                    optimizer.learning_rate = rate

    def rates(self, step: int, built: Mapping[str, float], optimizers: Mapping[str, Any]) -> dict[str, float]:
        """Returns the learning rates that the phases have set by the end of a step, or else the ones of `built`.

        Args:
          step: the global step.
          built: the rate that an optimizer was built with, by name.
          optimizers: the optimizers, by name.
        """
        found = dict(built)
        for number in range(self.number_at(step - 1) + 1 if step else 0):
            rate = self._phases[number].learning_rate
            trained = {id(optimizer) for _, optimizer, own in self._plans[number].parts if own}
            names = [name for name in found if id(optimizers[name]) in trained]
            if rate is not None:
                found.update(dict.fromkeys(names, float(np.float32(rate))))  # as the optimizers keep it
        return found

    def as_flags(self) -> list[dict[str, Any]]:
        """Returns the phases as a setting of the run, for `run.json`."""
        return [dataclasses.asdict(phase) for phase in self._phases]

    def step_fn(self, trainer: GradientTrainer, number: int) -> Callable[[Any], dict[str, Any]]:
        """Returns the `step_fn` of a trainer in a phase."""

        def step_fn(inputs: Any) -> dict[str, Any]:
            with self._applied(trainer, number):
                return self._with_all_norms(trainer, converted(trainer.step_fn)(inputs))

        return step_fn

    @contextlib.contextmanager
    def _applied(self, trainer: GradientTrainer, number: int) -> Iterator[None]:
        """Lets the model and the trainer be those of a phase within a step.

        Replicas trace or run their steps in threads, each of which may wait in the middle for the others.
        """
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._flags = _Flags(self._frozen[number])
                self._flags.__enter__()
                trainer.update_plan = self._plans[number]
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    trainer.update_plan = self._whole
                    self._flags.__exit__(None, None, None)

    @tf.autograph.experimental.do_not_convert
    def _with_all_norms(self, trainer: GradientTrainer, metrics: dict[str, Any]) -> dict[str, Any]:
        """Returns the metrics with the gradient norm 0 of what is not trained: a run has the same in all phases."""
        if any(name.startswith(_LAYER_NORM) for name in metrics):
            for variable in self.trained:
                metrics.setdefault(f"{_LAYER_NORM}{_keras.variable_path(variable)}", reductions.last(tf.zeros([])))
        return metrics


class _Flags:
    """Layers that are not trainable within a `with` block."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._before: list[tuple[Any, bool]] = []

    def __enter__(self) -> None:
        held = {id(part): part for layer in self._layers for part in _keras.sublayers(layer)}
        # Setting a layer sets what is in it too: those that are trainable first, and variables last.
        self._before = sorted(((part, part.trainable) for part in held.values()), key=lambda pair: not pair[1])
        variables = {id(one): one for layer in self._layers for one in layer.variables if _keras.is_variable(one)}
        self._before += [(variable, variable.trainable) for variable in variables.values()]
        for layer in self._layers:
            layer.trainable = False

    def __exit__(self, *_: object) -> None:
        for part, trainable in self._before:
            part.trainable = trainable


def _checked(phases: Sequence[Phase]) -> list[Phase]:
    found = list(phases) if isinstance(phases, (list, tuple)) else []
    if not found or not all(isinstance(phase, Phase) for phase in found):
        raise SettingError(
            f"phases is {phases!r:.200}; expected a list such as [looplib.Phase(until=500, train='head'), "
            "looplib.Phase()]"
        )
    ends = [phase.until for phase in found]
    if None in ends[:-1]:
        raise SettingError(f"phase {ends.index(None) + 1} has no until; only the last phase may have no end")
    known = [end for end in ends if end is not None]
    for number, (before, end) in enumerate(zip(known, known[1:]), 2):
        if end <= before:
            raise SettingError(
                f"phase {number} ends at step {end}, and the phase before at step {before}; expected a later step: "
                "until counts from the start of the run"
            )
    return found


def _check_optimizer(number: int, phase: Phase, optimizer: Any, trains: bool, whole: bool) -> None:
    """Raises `UsageError` for an optimizer that cannot train in a phase, all (`whole`) or some of its variables."""
    name = type(optimizer).__name__
    if trains and phase.learning_rate is not None and constant_rate(optimizer) is None:
        raise OptimizerError(
            f"phase {number} has learning_rate={phase.learning_rate}, and {name} has a schedule; give the optimizer a "
            "number, or leave out the learning rates of phases"
        )
    for setting in ("use_ema", "gradient_accumulation_steps"):
        if getattr(optimizer, setting, None) and not whole:
            raise OptimizerError(
                f"{name} has {setting}, which covers all of its variables in each update, and phase {number} trains a "
                "part of them; use average_decay and micro_batches of GradientTrainer"
            )
