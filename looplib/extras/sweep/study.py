"""The database of a sweep: Optuna's, in a SQLite file that a kill at any moment leaves whole."""

import dataclasses
import functools
import glob
import itertools
import json
import math
import os
from collections.abc import Callable, Sequence

import numpy as np
import optuna

from looplib.errors import UsageError
from looplib.extras.sweep.space import Parameter

SEARCHES = ("grid", "random", "tpe")
PRUNERS = {
    "none": optuna.pruners.NopPruner,
    "median": optuna.pruners.MedianPruner,
    "halving": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
}
VALUES = ("last", "best")
_FILE, _NAME, _PLAN = "sweep.db", "sweep", "plan"
_LARGEST_GRID = 10_000
_VALUE, _ERROR, _DEVIATION = "value of seed", "error", "deviation"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a sweep does; it stays as it is when the sweep is started again.

    Attributes:
      command: the command, with its ranges and lists.
      search: one of `SEARCHES`.
      metric: what to compare: the split and the name in metrics.jsonl, such as "eval/accuracy".
      goal: "max" or "min"; None to read it from the name of the metric.
      prune: a name in `PRUNERS`.
      seeds: under how many seeds to run each configuration; 0: once, with the command's own seed.
      value: which value of the metric to compare, one of `VALUES`: the last of a run, or its best.
    """

    command: list[str]
    search: str
    metric: str
    goal: str | None
    prune: str
    seeds: int
    value: str = "last"  # as sweeps that were begun before there was a choice have it

    @property
    def compared(self) -> str:
        """What the trials are compared by, as a person reads it."""
        return self.metric if self.value == "last" else f"best {self.metric}"


class Study:
    """The trials of a sweep.

    Args:
      directory: the sweep's.
      plan: what it does.
      parameters: what it searches.

    Attributes:
      size: the number of combinations of the parameters' values; infinity if one of them is any number of a range.

    Raises:
      UsageError: if the directory holds a sweep with another plan, or a grid that has no end.
    """

    def __init__(self, directory: str, plan: Plan, parameters: Sequence[Parameter]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._plan, self._parameters = plan, parameters
        self._grid = {one.flag: one.grid() for one in parameters} if plan.search == "grid" else {}
        self.size = math.prod(one.count for one in parameters)
        if self._grid and self.size > _LARGEST_GRID:
            raise UsageError(
                f"the grid has {self.size:,} points; expected at most {_LARGEST_GRID:,}; list fewer values, or "
                "use --search=random"
            )
        path = os.path.join(directory, _FILE)
        if not os.path.exists(path):
            _create(path, plan)
        self._storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
        self._study = optuna.load_study(study_name=_NAME, storage=self._storage, pruner=PRUNERS[plan.prune]())
        before = Plan(**json.loads(self._study.user_attrs[_PLAN]))
        for field in dataclasses.fields(Plan):
            old, new = getattr(before, field.name), getattr(plan, field.name)
            if old != new:
                old, new = (" ".join(value) if isinstance(value, list) else value for value in (old, new))
                raise UsageError(
                    f"{directory} holds a sweep whose {field.name} is {old}, not {new}; start it as it was, or use "
                    "another --dir"
                )

    def all(self) -> list[optuna.trial.FrozenTrial]:
        """Returns all trials."""
        return self._study.get_trials(deepcopy=False)

    def unfinished(self) -> list[optuna.Trial]:
        """Returns the trials that were begun and have not ended, for the sweep's next start."""
        states = (optuna.trial.TrialState.RUNNING,)
        numbers = [one.number for one in self._study.get_trials(deepcopy=False, states=states)]
        return [self._complete(number, functools.partial(self._again, number)) for number in numbers]

    def _again(self, number: int) -> optuna.Trial:
        """Returns a trial that was begun, by its number."""
        study = self._storage.get_study_id_from_name(_NAME)
        return optuna.Trial(self._study, self._storage.get_trial_id_from_study_id_trial_number(study, number))

    def new(self) -> optuna.Trial:
        """Returns a new trial, with a value for each parameter."""
        return self._complete(len(self.all()), self._study.ask)

    def _complete(self, number: int, make: Callable[[], optuna.Trial]) -> optuna.Trial:
        """Makes a trial with this number's sampler: a start of the sweep draws what an uninterrupted one would."""
        if self._plan.search == "grid":
            self._study.sampler = optuna.samplers.GridSampler(self._grid, seed=0)
        elif self._plan.search == "random":
            self._study.sampler = self._sampler_of_a_new_point(number)
        else:
            self._study.sampler = optuna.samplers.TPESampler(seed=_seed(number))
        trial = make()
        for parameter in self._parameters:
            parameter.suggest(trial)
        self._study.sampler = optuna.samplers.RandomSampler()  # a grid's refuses the end of its last trial
        return trial

    def _sampler_of_a_new_point(self, number: int) -> optuna.samplers.RandomSampler:
        """Returns a sampler that draws a point which no trial before this number has, while there are any."""
        before = self.all()[:number]
        for attempt in itertools.count():
            drawn = optuna.create_study(sampler=optuna.samplers.RandomSampler(_seed(number, attempt))).ask()
            for parameter in self._parameters:
                parameter.suggest(drawn)
            if number >= self.size or all(drawn.params != trial.params for trial in before):
                return optuna.samplers.RandomSampler(_seed(number, attempt))

    def note(self, trial: optuna.Trial, seed: int, value: float) -> None:
        """Notes the result under one seed, and ends the trial if it was the last one."""
        trial.set_user_attr(f"{_VALUE} {seed}", value)
        self.end_if_complete(trial)

    def end_if_complete(self, trial: optuna.Trial) -> bool:
        """Ends a trial that has a result under each seed; returns whether it has."""
        found = values(trial)
        if len(found) < max(1, self._plan.seeds):
            return False
        if len(found) > 1:
            trial.set_user_attr(_DEVIATION, float(np.std(list(found.values()), ddof=1)))
        self._study.tell(trial, float(np.mean(list(found.values()))))
        return True

    def fail(self, trial: optuna.Trial, sentence: str) -> None:
        """Ends a trial that failed."""
        trial.set_user_attr(_ERROR, sentence)
        self._study.tell(trial, state=optuna.trial.TrialState.FAIL)

    def prune(self, trial: optuna.Trial) -> None:
        """Ends a trial that was stopped as hopeless."""
        self._study.tell(trial, state=optuna.trial.TrialState.PRUNED)


def _seed(number: int, attempt: int = 0) -> int:
    """Returns the seed of an attempt to draw the point of a trial."""
    return int(np.random.SeedSequence((0, number, attempt)).generate_state(1)[0])


def _create(path: str, plan: Plan) -> None:
    """Makes the database under another name first: a kill in the middle leaves no half of one."""
    new = f"{path}.new"
    for left in glob.glob(f"{glob.escape(new)}*"):
        os.remove(left)
    storage = optuna.storages.RDBStorage(f"sqlite:///{new}")
    direction = "maximize" if plan.goal == "max" else "minimize"
    study = optuna.create_study(storage=storage, study_name=_NAME, direction=direction)
    study.set_user_attr(_PLAN, json.dumps(dataclasses.asdict(plan)))
    storage.remove_session()
    storage.engine.dispose()
    os.rename(new, path)


def name_of(trial: optuna.Trial | optuna.trial.FrozenTrial) -> str:
    """Returns the name of a trial, which is also that of its folder in the sweep's directory."""
    return f"trial-{trial.number:04}"


def values(trial: optuna.Trial | optuna.trial.FrozenTrial) -> dict[int, float]:
    """Returns the results of a trial by seed."""
    return {
        int(name.removeprefix(_VALUE)): value for name, value in trial.user_attrs.items() if name.startswith(_VALUE)
    }


def deviation(trial: optuna.trial.FrozenTrial) -> float | None:
    """Returns the standard deviation of a trial's results over its seeds; None with one seed."""
    return trial.user_attrs.get(_DEVIATION)


def error(trial: optuna.trial.FrozenTrial) -> str:
    """Returns the last line of a trial that failed, "" otherwise."""
    return trial.user_attrs.get(_ERROR, "")
