"""Variables that a training is meant to change at a step, and those that do not change."""

import collections
import dataclasses
import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.actions.finding import LearningFinding, key
from looplib.base.messages import join_names
from looplib.cluster import runtime
from looplib.compat import keras as _keras
from looplib.compat import optimizers as _optimizers
from looplib.compat import tensorflow as _tf
from looplib.compat.row_updates import is_table
from looplib.loop.contracts import Loop
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

    Attributes:
      left_out: those that an optimizer was built for and that the traced step does not update, because they have no
        gradient: the loss does not depend on them.
    """

    def __init__(self, loop: Loop) -> None:
        trainer = loop.task
        self._phases = trainer.training_phases
        built = dict(_built(trainer))
        self._all: list[TrainedVariable] = []
        self.left_out: list[TrainedVariable] = []
        strategy = loop.traced.strategy if loop.traced else tf.distribute.get_strategy()
        if runtime.is_remote(strategy):
            return
        updated = _tf.updated_by(loop.traced.function) if loop.traced else set()
        names: dict[str, int] = {}
        for name, variable in _trainable(trainer):
            parts = strategy.experimental_local_results(variable)
            is_updated = not updated.isdisjoint(map(_tf.identity_of, parts))
            if id(variable) in built or is_updated:
                names[name] = number = names.get(name, 0) + 1
                unique = f"{name} ({number})" if number > 1 else name
                self._all.append(TrainedVariable(unique, variable, built.get(id(variable), -1)))
                if loop.traced and self._phases is None and not is_updated:
                    self.left_out.append(self._all[-1])

    def unreached(self, step: int, known: Collection[str]) -> list[LearningFinding]:
        """Returns a finding for all variables of `left_out` that have none yet."""
        own = [one.name for one in self.left_out if key(NO_CHANGE, one.name) not in known]
        if not own or len(self.left_out) == len(self._all):  # a step of all of whose updates nothing is known
            return []
        have = "has" if len(own) == 1 else "have"
        text = f"{join_names(own, 6)} {have} no gradient: the loss depends on {len(self._all) - len(self.left_out)} of "
        text += f"{len(self._all)} trained variables, and the others keep their first values"
        return [LearningFinding(NO_CHANGE, tuple(own), step, text, _UNREACHED)]

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
    """Yields the trainable floating-point variables of a trainer's state, by name.

    Parts of tables are left out: no batch may look up a row of one.
    """
    layers = [part for part in _keras.parts(vars(trainer)) if _keras.is_layer(part)]
    held = {id(_keras.tf_variable(one)) for layer in layers for one in layer.weights}
    trainable = {id(_keras.tf_variable(one)) for layer in layers for one in layer.trainable_weights}
    for name, variable in variables_of(state_of(trainer)):
        own = variable.trainable and id(variable) not in held
        if variable.dtype.is_floating and (own or id(variable) in trainable) and not is_table(variable):
            yield name.removesuffix(":0"), variable


NO_CHANGE, EXPLODING = "no change", "exploding norm"
_STILL = 3  # checks in a row without a change
_ALIKE = 1e-5  # up to this difference of their directions, weights are compared element by element at the next check
_MOST = 1 << 22  # elements of a variable that are compared
_SCALED = 8  # elements that a factor needs; any change of fewer could be one
_FINER = 4.0  # two binades
_HISTORY, _FEWEST = 20, 10  # norms of a variable: kept, and needed for a verdict
_RATIO, _LEAST_RMS = 10.0, 0.1  # of a norm that explodes: to the median of its history, and by element
_DIGITS = 6  # of a norm in a checkpoint
_UNREACHED = (
    "look for tf.stop_gradient, a rounded value, or a branch or head that the loss does not use, or set "
    "trainable=False on what is to stay"
)


@dataclasses.dataclass
class _Track:
    """The history of a variable."""

    norms: collections.deque[float] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=_HISTORY))
    direction: float | None = None  # the sum by the norm, which a common factor does not change
    copy: np.ndarray | None = None  # of its elements at the last check, once the direction did not change
    since: int = 0  # the step since when no change was seen
    checks: int = 0  # without a change, one after another
    scaled: bool = False  # whether all elements were multiplied by one factor, as weight decay does

    def forget(self) -> None:
        """Forgets everything except the norms."""
        self.direction, self.copy, self.checks, self.scaled = None, None, 0, False


class WeightChecks:
    """Follows the weights of a training from check to check.

    A variable whose elements keep every bit has a gradient of zero, or one that is too small to change it; so has one
    that weight decay alone changes, by one factor for all elements. That is a finding after three checks, where another
    variable of the same optimizer changes that is not finer: late in a training, an update may be too small for large
    elements and still change small ones. A norm explodes if it is ten times the median of its last checks.

    Two numbers of each variable are computed on its device. Only where they do not change are elements copied.
    """

    def __init__(self) -> None:
        self._tracks: dict[str, _Track] = {}
        self._step: int | None = None  # of the last check

    def check(self, step: int, trained: Sequence[TrainedVariable], known: Collection[str]) -> list[LearningFinding]:
        """Looks at the weights.

        Args:
          step: the global step.
          trained: the variables that were trained since the last check.
          known: the keys of earlier findings.
        """
        if self._step is not None and step <= self._step:  # the run went back
            self._step = None
        names = {one.name for one in trained}
        for name, track in self._tracks.items():
            if self._step is None or name not in names:
                track.forget()
        moved, still, found = [], [], []
        for one, (total, half) in zip(trained, _measured(trained)):
            track, norm = self._tracks.setdefault(one.name, _Track()), math.sqrt(2 * half)
            found += self._explosion(one, track, norm, known)
            change = self._change(one, track, total / norm if norm else 0.0, step)
            if change is not None:
                (moved if change else still).append(one)
        found += self._stuck(still, moved, len(trained), known)
        self._step = step
        return found

    def _change(self, one: TrainedVariable, track: _Track, direction: float, step: int) -> bool | None:
        """Returns whether a variable has changed since the last check by more than a factor; None if not known."""
        before, track.direction = track.direction, direction
        if before is None or not math.isfinite(direction):
            return None
        if abs(direction - before) > _ALIKE * (1 + abs(before)):
            track.copy, track.checks = None, 0
            return True
        if one.variable.dtype.size < 4:  # whose updates may round to nothing
            return None
        now, copy = _elements(one.variable), track.copy
        track.copy = now
        if copy is None:
            track.since, track.checks, track.scaled = step, 0, False
            return None
        same = np.array_equal(now, copy)
        if same or _is_scaled(now, copy, step - self._step):
            track.checks, track.scaled = track.checks + 1, track.scaled or not same
            return False
        track.since, track.checks, track.scaled = step, 0, False
        return True

    def _stuck(
        self, still: list[TrainedVariable], moved: list[TrainedVariable], count: int, known: Collection[str]
    ) -> list[LearningFinding]:
        """Returns a finding for all variables that have not changed since one step."""
        groups: dict[tuple[int, bool], list[TrainedVariable]] = {}
        for one in still:
            track = self._tracks[one.name]
            if track.checks < _STILL or key(NO_CHANGE, one.name) in known:
                continue
            others = [other for other in moved if other.group == one.group]
            if others and (track.scaled or any(_smallest(other) * _FINER >= _smallest(one) for other in others)):
                groups.setdefault((track.since, track.scaled), []).append(one)
        return [_no_change(since, scaled, own, len(moved), count) for (since, scaled), own in groups.items()]

    def _explosion(
        self, one: TrainedVariable, track: _Track, norm: float, known: Collection[str]
    ) -> list[LearningFinding]:
        """Returns a finding if the norm of a variable explodes, and adds it to the history."""
        history = [before for before in track.norms if before > 0]
        if math.isfinite(norm):  # the guards find any other
            track.norms.append(norm)
        size = max(1, one.variable.shape.num_elements() or 1)
        if len(history) < _FEWEST or not math.isfinite(norm) or norm / math.sqrt(size) <= _LEAST_RMS:
            return []
        usual = statistics.median(history)
        if norm <= _RATIO * usual or key(EXPLODING, one.name) in known:
            return []
        since = self._step or 0
        return [
            LearningFinding(
                EXPLODING,
                (one.name,),
                since,
                f"the norm of {one.name} is {norm:.4g}, {norm / usual:.3g} times the median of its last "
                f"{len(history)} checks ({usual:.4g}); it was {history[-1]:.4g} at step {since:,}",
                "lower the learning rate, clip gradients (clip_global_norm), or go back to a checkpoint before that",
            )
        ]

    def state(self) -> dict[str, list[float]]:
        """Returns the norms of the last checks, by variable."""
        return {
            name: [float(f"{norm:.{_DIGITS}g}") for norm in track.norms]
            for name, track in self._tracks.items() if track.norms
        }  # fmt: skip

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned; raises `ValueError` for anything else."""
        found = {}
        for name, norms in state.items():
            numbers = [norm for norm in norms if type(norm) in (int, float) and 0 <= norm < math.inf]
            if len(numbers) != len(norms):
                raise ValueError("expected norms of at least 0")
            found[name] = _Track(collections.deque(map(float, numbers), maxlen=_HISTORY))
        self._tracks, self._step = found, None


def _no_change(since: int, scaled: bool, own: Sequence[TrainedVariable], moved: int, count: int) -> LearningFinding:
    names = tuple(one.name for one in own)
    have = "has" if len(names) == 1 else "have"
    what = (
        "changed only by one factor for all elements, as by weight decay," if scaled else "not changed by a single bit"
    )
    return LearningFinding(
        NO_CHANGE,
        names,
        since,
        f"{join_names(names, 6)} {have} {what} since step {since:,}, in {_STILL} checks, while {moved} of {count} "
        "trained variables did: the gradient is zero, or too small to change a float",
        "look for a ReLU whose inputs are all negative, for a part that the loss does not depend on "
        "(tf.stop_gradient, a rounded value, an unused branch), or set trainable=False on what is to stay",
    )


def _measured(trained: Sequence[TrainedVariable]) -> np.ndarray:
    """Returns the sum, and half of the squared norm, of each variable: float64 `[n, 2]`."""
    rows = []
    for one in trained:
        value = tf.convert_to_tensor(one.variable)
        value = tf.cast(value, tf.float32) if value.dtype.size < 4 else value
        rows.append(tf.cast(tf.stack([tf.reduce_sum(value), tf.nn.l2_loss(value)]), tf.float64))
    return tf.stack(rows).numpy() if rows else np.zeros([0, 2])


def _elements(variable: tf.Variable) -> np.ndarray:
    """Returns the elements of a variable, of a large one some that are spread over it evenly."""
    flat = tf.reshape(tf.convert_to_tensor(variable), [-1])
    return np.array(flat[:: -(-max(1, int(flat.shape[0])) // _MOST)])  # a copy: numpy may share the variable's memory


def _is_scaled(now: np.ndarray, before: np.ndarray, steps: int) -> bool:
    """Returns whether all elements were multiplied by one factor below 1, up to the rounding of so many steps."""
    used = np.abs(before) > 1e-30
    if np.count_nonzero(used) < _SCALED or np.any(now[~used] != before[~used]):
        return False
    ratios = now[used].astype(np.float64) / before[used]
    factor = float(np.median(ratios))
    rounding = (steps / 2 + 4) * float(np.finfo(before.dtype).eps)
    return 0 < factor < 1 - 4 * rounding and bool(np.abs(ratios - factor).max() <= rounding)


def _smallest(one: TrainedVariable) -> float:
    """Returns the smallest absolute value among the elements of a variable."""
    return float(tf.reduce_min(tf.abs(tf.convert_to_tensor(one.variable))))
