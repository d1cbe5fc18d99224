"""When to save checkpoints, which to keep, and where a run starts."""

import dataclasses
import os
from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

from looplib.base.messages import whole_number
from looplib.config import settings
from looplib.config.settings import setting
from looplib.errors import MetricError, SettingError, UsageError
from looplib.run.commits import Commit
from looplib.run.metric_names import Mode, best_first, mode_of


@runtime_checkable
class KeepRule(Protocol):
    """Selects the checkpoints to keep. `CheckpointPolicy.keep` takes any number of rules."""

    def select(self, kept: Sequence[Commit]) -> list[Commit]:
        """Returns those of `kept`, newest first, to keep."""
        ...


@dataclasses.dataclass(frozen=True)
class KeepLast:
    """Keeps the newest checkpoints.

    Attributes:
      number: how many; default 5.
    """

    number: int = 5

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", whole_number("KeepLast.number", self.number))

    def select(self, kept: Sequence[Commit]) -> list[Commit]:
        """Returns those of `kept`, newest first, to keep."""
        return list(kept[: self.number])


@dataclasses.dataclass(frozen=True)
class KeepBest:
    """Keeps the checkpoints with the best values of a metric. One that is not finite is never among them.

    Attributes:
      metric: evaluator and metric, such as "eval/accuracy".
      mode: "max" or "min", which of two values is better. The default, None, is for well-known names such as "loss" and
        "accuracy" (`looplib/run/metric_names.py` lists them), not for others that contain such a word.
      number: how many checkpoints to keep; default 1.

    Raises:
      UsageError: if the metric has another form, or no mode is given and the name does not decide it.
    """

    metric: str
    mode: Mode | None = None
    number: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", whole_number("KeepBest.number", self.number))
        object.__setattr__(self, "mode", mode_of("KeepBest", self.metric, self.mode))

    @classmethod
    def parse(cls, text: str) -> "KeepBest":
        """Returns the rule of a text such as `str` makes, or a user writes: max:eval/score, or eval/loss."""
        mode, colon, metric = text.partition(":")
        try:
            return cls(metric, mode) if colon else cls(text)
        except UsageError:
            raise SettingError(
                f"--keep_best is {text!r}; expected <evaluator>/<metric>, such as eval/accuracy or eval/loss, with "
                "max: or min: before it if the name does not say which is better, such as max:eval/score"
            ) from None

    def __str__(self) -> str:
        return f"{self.mode}:{self.metric}"

    def select(self, kept: Sequence[Commit]) -> list[Commit]:
        """Returns the ones in `kept`, newest first, to keep; among equal ones the earlier, which was better first."""
        return best_first(reversed(kept), lambda done: done.scores.get(self.metric), self.mode)[: self.number]


@dataclasses.dataclass(frozen=True)
class KeepEvery:
    """Keeps the checkpoints at multiples of a number of steps, forever.

    Attributes:
      steps: the number.
    """

    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", whole_number("KeepEvery.steps", self.steps))

    def select(self, kept: Sequence[Commit]) -> list[Commit]:
        """Returns the ones in `kept` to keep."""
        return [done for done in kept if done.step % self.steps == 0]


@dataclasses.dataclass(frozen=True)
class CheckpointPolicy:
    """When to save, and what to keep.

    A run also saves before each evaluation inside a training, and at its end, for any interval.

    Attributes:
      every_steps: save at exact multiples of this many steps; default 1000.
      keep: the rules that select checkpoints to keep: a tuple of `KeepLast`, `KeepBest`, `KeepEvery` or any `KeepRule`.
        A checkpoint is kept if one rule selects it. The newest one always is.
      in_background: writes while the training continues; default True.
    """

    every_steps: int = setting(
        1000, "Steps between checkpoints; each evaluation saves one too.", least=1, flag="checkpoint_interval"
    )
    keep: tuple[KeepRule, ...] = (KeepLast(),)
    in_background: bool = True

    def __post_init__(self) -> None:
        settings.check(self)
        keep = self.keep if isinstance(self.keep, (tuple, list)) else (self.keep,)
        if not keep or not all(isinstance(rule, KeepRule) for rule in keep):
            raise SettingError(f"CheckpointPolicy.keep is {self.keep!r}; expected a tuple such as (KeepLast(5),)")
        object.__setattr__(self, "keep", tuple(keep))

    @property
    def best(self) -> KeepBest | None:
        """The first rule that keeps the best checkpoints; None if no rule does."""
        return next((rule for rule in self.keep if isinstance(rule, KeepBest)), None)

    def check(self, metrics: dict[str, Collection[str] | None]) -> None:
        """Raises `UsageError` if a training lacks the metrics that choose the best checkpoints.

        Args:
          metrics: the names of each evaluator's metrics, by its name; None where they are not known yet.
        """
        for rule in self.keep:
            if not isinstance(rule, KeepBest):
                continue
            name, _, metric = rule.metric.partition("/")
            who = f"KeepBest({rule.metric!r}) (--keep_best={rule})"
            if name not in metrics:
                raise MetricError(
                    f"{who} needs the evaluator {name!r}, which does not exist; "
                    f"the evaluators are: {', '.join(sorted(metrics)) or 'none'}"
                )
            known = metrics[name]
            if known is not None and metric not in known:
                raise MetricError(
                    f"{who} needs a metric that the evaluation returns; it returns "
                    f"{', '.join(sorted(f'{name}/{one}' for one in known))}; name one of these"
                )


def _or_none(path: str | None) -> str:
    """Returns the path that a flag names; "" for none."""
    return path or ""


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run starts: one of its checkpoints, or, if it has none, other weights.

    Attributes:
      warm_start: a run directory, a file of weights, or anything else that `looplib.warm_start` takes, from which a run
        without a checkpoint of its own takes the weights that fit, also for an evaluation alone; default "" for none.
      continue_from: a checkpoint that another program wrote with `tf.train.Checkpoint`, as Orbit's and Model Garden's
        do, with `global_step` and the model and the optimizer under this run's attribute names; or a directory, for its
        newest. A new run continues with all of these, and with the data from the start; default "" for none.
      partial: restores what a checkpoint of this run has and leaves the rest as it was made, and the other way round;
        default False, which refuses a checkpoint of another model.
      start_anew: lets a run whose checkpoints are all damaged or gone start from the beginning; default False, which
        refuses that. It has no effect on a run that has an intact checkpoint, or never had one.
      checkpoint: the checkpoint of this run that the controller restores when it is built: "latest", "best", a step, or
        "final", the one that the training ended with: the newest, unless `EarlyStopping` has restored the best.
        Default None: "final" without a trainer; a training always continues from the newest.

    Raises:
      UsageError: for both `warm_start` and `continue_from`.
    """

    warm_start: str | os.PathLike[str] = setting(
        "", "First weights: RUN, RUN@best, a file, or a .yaml of rules.", flag_default=None, read=_or_none
    )
    continue_from: str = setting(
        "", "Orbit or Model Garden checkpoint from which a new run continues.", flag_default=None, read=_or_none
    )
    partial: bool = setting(False, "Restores only what the checkpoint and the model share.", flag="partial_restore")
    start_anew: bool = setting(False, "Lets a run start over if all its checkpoints are damaged or missing.")
    checkpoint: str | int | None = None

    def __post_init__(self) -> None:
        settings.check(self)
        if self.warm_start and self.continue_from:
            raise SettingError(
                f"a run starts from warm_start ({self.warm_start}) or from continue_from ({self.continue_from}), not "
                "from both; leave one out"
            )
