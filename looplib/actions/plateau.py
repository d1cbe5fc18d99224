"""Actions that watch a metric: early stopping, exports of the best, and a lower rate where it no longer improves."""

import math
import numbers
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from absl import logging

from looplib.base import files, orders
from looplib.base.messages import whole_number
from looplib.compat import keras as _keras
from looplib.config.formats import ExportFormat, check_export
from looplib.errors import ActionError, MetricError, MissingPartError, SettingError
from looplib.exports.versions import Versions
from looplib.run.metric_names import Mode, gain, mode_of
from looplib.run.policy import KeepBest
from looplib.task.actions import Action, Event
from looplib.task.learning_rates import constant_rate, updating

_EXPORT = re.compile(r"step-\d{1,19}")  # the name of one


def check_reported(who: str, metric: str, loops: Mapping[str, Any]) -> None:
    """Raises `MetricError` for a metric that none of the loops reports, as far as that is known."""
    split = metric.partition("/")[0]
    if split not in loops:
        raise MetricError(
            f"{who}({metric!r}) needs a metric of {split!r}, which is not reported; expected a metric of "
            f"{' or '.join(sorted(loops))}"
        )
    if loops[split].metric_names is not None:
        check_known(who, metric, loops[split].metric_names)


def check_known(who: str, metric: str, known: Iterable[str]) -> None:
    """Raises `MetricError` for a metric that is not among the names that its evaluator reports."""
    split, _, name = metric.partition("/")
    if name not in known:
        raise MetricError(
            f"{who}({metric!r}) needs a metric that is not reported; expected one of "
            f"{', '.join(sorted(f'{split}/{one}' for one in known))}"
        )


class _MetricWatcher(Action):
    """The common part: the best value of a metric, and how many reports have passed without a better one.

    A value counts once for each step, so an evaluation that is called by hand or repeated changes nothing. The metric
    and the mode are part of the action's name, because the best value means nothing for others.
    """

    _remembered: tuple[str, ...] = ("_best", "_best_step", "_seen", "_waited")

    def __init__(self, metric: str, patience: int, min_change: float, mode: Mode | None, name: str) -> None:
        who = type(self).__name__
        self.metric, self.mode = metric, mode_of(who, metric, mode)
        if not isinstance(name, str):
            raise ActionError(f"{who}.name is {name!r:.100}; expected a text")
        self.name = ", ".join(filter(None, (metric, self.mode, name)))
        self.watched = "" if metric.startswith("train/") else f"{self.mode}:{metric}"
        self.patience = whole_number(f"{who}.patience", patience)
        self.min_change = number(f"{who}.min_change", min_change)
        self._best: float | None = None
        self._best_step = self._seen = -1
        self._waited = 0

    def on_start(self, controller: Any) -> None:
        """Checks that the metric is reported.

        Raises:
          UsageError: if it is not.
        """
        check_reported(type(self).__name__, self.metric, controller.loops)

    def _improves(self, event: Event) -> bool | None:
        """Takes a value; returns whether it is better than the best by `min_change`, None if it does not count."""
        split, _, name = self.metric.partition("/")
        if event.split != split or event.step <= self._seen:
            return None
        check_known(type(self).__name__, self.metric, event.metrics)
        value, self._seen = event.metrics[name], event.step
        better = gain(value, self._best, self.mode) > self.min_change
        if better:
            self._best, self._best_step = value, event.step
        return better

    def _since(self) -> str:
        """Returns what the action has seen, as a clause."""
        if self._best is None:
            return f"{self.metric} has had no finite value"
        return f"{self.metric} was best at step {self._best_step} ({self._best:.6g})"

    def state(self) -> list[Any]:
        """See `Action`."""
        return [getattr(self, name) for name in self._remembered]

    def load(self, state: list[Any]) -> None:
        """See `Action`."""
        best, *steps = state
        if not (best is None or type(best) in (int, float)) or any(type(number) is not int for number in steps):
            raise ValueError("expected a number or None, and whole numbers")
        vars(self).update(zip(self._remembered, state, strict=True))


class EarlyStopping(_MetricWatcher):
    """Ends the training when a metric no longer improves.

    The log, `status` and the report page say that it has, with the best value and the last. A run that has stopped, and
    is started again, trains no further step, unless `patience` is raised.

    Args:
      metric: evaluator and metric, such as "eval/loss"; "train/loss" for one of the training's reports.
      patience: evaluations (or reports) in a row without an improvement, after which the training ends.
      min_change: an improvement is a change by more than this; default 0. A value that is not finite is never one.
      mode: "max" or "min", which of two values is better; default None is for the names that `KeepBest` knows.
      restore_best: whether the controller is at its best checkpoint once a training has ended, early or not: step,
        weights and the rest of the state, as by `controller.restore_checkpoint("best")`. It needs a `model_dir`, in
        which this checkpoint is kept as by `KeepBest`. Jobs that evaluate, predict or export take it too. No checkpoint
        is moved or removed, and the next start of the program continues from the last.
      name: distinguishes it from another one of this class for this metric and mode; default "".

    Raises:
      UsageError: for bad input.
    """

    def __init__(
        self,
        metric: str,
        patience: int = 3,
        min_change: float = 0.0,
        mode: Mode | None = None,
        restore_best: bool = False,
        name: str = "",
    ) -> None:
        super().__init__(metric, patience, min_change, mode, name)
        self.restore_best = restore_best
        self.keeps = KeepBest(self.metric, self.mode) if restore_best else None

    def on_start(self, controller: Any) -> None:
        """Checks the settings, and stops a training that has stopped before.

        Raises:
          UsageError: if the metric is not reported, or another one decides which checkpoint is the best.
        """
        super().on_start(controller)
        rule = controller.policy.best
        if self.restore_best and str(rule) != str(self.keeps):
            raise ActionError(
                f"EarlyStopping({self.metric!r}, restore_best=True) would restore another checkpoint than the best of "
                f"the run, which is that by {rule}; leave out --keep_best and KeepBest, or name {self.keeps} first"
            )
        if self.restore_best and not controller.model_dir:
            raise MissingPartError("EarlyStopping(restore_best=True) needs checkpoints; give Controller(model_dir=...)")
        self._stop_if_due(controller)

    def __call__(self, event: Event) -> None:
        """Takes an event."""
        improves = self._improves(event)
        if improves is not None:
            self._waited = 0 if improves else self._waited + 1
            self._stop_if_due(event.controller, f", and is {event.metrics[self.metric.partition('/')[2]]:.6g} now")

    def _stop_if_due(self, controller: Any, now: str = "") -> None:
        if self._waited >= self.patience:
            controller.stop(f"early stopping at step {controller.global_step:,}: {self._since()}{now}")

    def on_end(self, controller: Any) -> None:
        """Restores the best checkpoint, if that was asked for."""
        if self.restore_best and self._best is not None:
            controller.restore_checkpoint("best")


class ExportBest(_MetricWatcher):
    """Exports the model after each evaluation that is better than all before, by `controller.export`.

    A run that is killed and resumed exports at the steps of an uninterrupted one.

    Args:
      metric: evaluator and metric, such as "eval/loss".
      directory: gets an export `step-<step>` each; default `export` in the controller's `model_dir`. It is for one run,
        which a file in it names: another run, also one that continues in a copy of a run directory, is refused.
      number: how many exports to keep, the newest; those before, which this run has made, are removed.
      min_change: an improvement is a change by more than this; default 0. NaN is never one.
      mode: "max" or "min", which of two values is better; default None is for the names that `KeepBest` knows.
      averages: whether averaged weights are exported, if there are any.
      formats: what to write too, see `Controller.export`.
      license: of the model, for its card.
      name: distinguishes it from another one of this class for this metric and mode; default "".

    Raises:
      UsageError: for bad input.
    """

    def __init__(
        self,
        metric: str,
        directory: str | os.PathLike[str] | None = None,
        number: int = 1,
        min_change: float = 0.0,
        mode: Mode | None = None,
        averages: bool = True,
        formats: Sequence[ExportFormat] = (),
        license: str = "unknown",
        name: str = "",
    ) -> None:
        super().__init__(metric, 1, min_change, mode, name)
        self.directory = files.resolve(directory, "ExportBest.directory") if directory is not None else None
        self._number = whole_number("ExportBest.number", number)
        check_export(formats, license)
        self._averages, self._formats, self._license = averages, tuple(formats), license
        self._kept: list[str] = []  # names in the directory
        self._began = 0  # the step at the start

    def on_start(self, controller: Any) -> None:
        """Checks that the metric is reported, that the model can be exported, and that there is a local directory.

        Raises:
          UsageError: if not.
        """
        super().on_start(controller)
        from looplib.exports.exports import check_exportable  # here, as it imports much

        check_exportable(controller.loops)
        self._began = controller.global_step
        if orders.current().until:  # steps are repeated, and write nothing elsewhere
            self.directory = None
        place = self.directory or controller.model_dir
        if place is None:
            raise MissingPartError("ExportBest has no directory, and the controller no model_dir; give one of them")
        if self.directory and controller.is_chief and "train" in controller.loops:
            Versions(self.directory).claim("ExportBest", controller, _EXPORT)

    def __call__(self, event: Event) -> None:
        """See `Action`."""
        if "train" not in event.controller.loops or not self._improves(event):
            return  # a job that only evaluates has no memory of what was better
        folder = self.directory or os.path.join(event.controller.model_dir, "export")
        name = f"step-{event.step}"
        if not self._is_there(event, os.path.join(folder, name)):
            event.controller.export(
                os.path.join(folder, name), averages=self._averages, formats=self._formats, license=self._license
            )
        self._kept = [*(kept for kept in self._kept if kept != name), name]
        *old, self._kept = *self._kept[: -self._number], self._kept[-self._number :]
        if event.controller.is_chief:
            for name in old:
                if _is_export(os.path.join(folder, name)):
                    Versions(folder).remove(name)

    def _is_there(self, event: Event, path: str) -> bool:
        """Returns whether the step that a start begins with is exported, as when a finished run starts again."""
        if event.step != self._began:
            return False
        return bool(event.controller.gather(float(_is_export(path)))[0])  # as the chief sees it

    def state(self) -> list[Any]:
        """See `Action`."""
        return [*super().state(), self._kept]

    def load(self, state: list[Any]) -> None:
        """See `Action`."""
        *state, names = state
        if others := [name for name in names if not _EXPORT.fullmatch(name)]:
            raise ValueError(f"{others[0]!r:.100} is not the name of an export")
        super().load(state)
        self._kept = names


def _is_export(path: str) -> bool:
    return os.path.isfile(os.path.join(path, "export.json"))


class ReduceOnPlateau(_MetricWatcher):
    """Reduces the learning rate of the trainer's optimizers when a metric no longer improves.

    The rate is part of the checkpoints, as all of an optimizer's state is. A program that is started again with
    another rate than at its last start trains with that one, which is then reduced further.

    Args:
      metric: evaluator and metric, such as "eval/loss"; "train/loss" for one of the training's reports.
      factor: the new rate is the old one times this.
      patience: evaluations (or reports) in a row without an improvement, after which the rate is reduced.
      min_change: an improvement is a change by more than this; default 0. NaN is never one.
      mode: "max" or "min", which of two values is better; default None is for the names that `KeepBest` knows.
      cooldown: evaluations (or reports) after a reduction that do not count as ones without an improvement.
      min_rate: the rate is not reduced below this.
      name: distinguishes it from another one of this class for this metric and mode; default "".

    Raises:
      UsageError: for bad input.
    """

    _remembered = (*_MetricWatcher._remembered, "_cooling")

    def __init__(
        self,
        metric: str,
        factor: float = 0.1,
        patience: int = 3,
        min_change: float = 0.0,
        mode: Mode | None = None,
        cooldown: int = 0,
        min_rate: float = 0.0,
        name: str = "",
    ) -> None:
        super().__init__(metric, patience, min_change, mode, name)
        self.factor = number("ReduceOnPlateau.factor", factor)
        if not 0 < self.factor < 1:
            raise SettingError(f"ReduceOnPlateau.factor is {factor!r}; expected a number between 0 and 1")
        self.cooldown = whole_number("ReduceOnPlateau.cooldown", cooldown, least=0)
        self.min_rate = number("ReduceOnPlateau.min_rate", min_rate)
        self._cooling = 0

    def on_start(self, controller: Any) -> None:
        """Checks the metric, and that there are learning rates to reduce.

        Raises:
          UsageError: if not.
        """
        super().on_start(controller)
        optimizers = _optimizers(controller)
        if not optimizers:
            raise ActionError(
                f"ReduceOnPlateau needs a Keras optimizer in an attribute of the trainer; "
                f"{controller.loops['train'].who} has none"
            )
        for optimizer in optimizers:
            if constant_rate(optimizer) is None:
                raise ActionError(
                    f"ReduceOnPlateau needs a constant learning rate, but {type(optimizer).__name__} has a schedule; "
                    "give the optimizer a number"
                )

    def __call__(self, event: Event) -> None:
        """Takes an event."""
        improves = self._improves(event)
        if improves is None:
            return
        self._cooling = max(0, self._cooling - 1)
        self._waited = 0 if improves or self._cooling else self._waited + 1
        if self._waited >= self.patience:
            self._waited, self._cooling = 0, self.cooldown + 1  # counted down before it is looked at
            self._reduce(event)

    def _reduce(self, event: Event) -> None:
        for optimizer in _optimizers(event.controller):
            rate = constant_rate(optimizer)
            reduced = max(rate * self.factor, self.min_rate)
            if reduced < rate:
                optimizer.learning_rate = reduced
                logging.info(
                    "the learning rate of %s is %g after step %d, and was %g: %s",
                    type(optimizer).__name__, reduced, event.step, rate, self._since(),
                )  # fmt: skip


def number(name: str, value: Any) -> float:
    """Returns a number as a float; raises `UsageError` if it is none, negative or not finite."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= value < math.inf:
        raise SettingError(f"{name} is {value!r}; expected a number of at least 0")
    return float(value)


def _optimizers(controller: Any) -> list[Any]:
    return [updating(optimizer) for optimizer in _keras.optimizers(controller.loops["train"].task).values()]
