"""The database of a sweep: Optuna's, in a SQLite file that a kill at any moment leaves whole."""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from looplib import files, folders
from looplib.console import printable
from looplib.errors import SweepError, UsageError
from looplib.extras.outputs.new_folder import new_folder
from looplib.extras.page.values import number, text
from looplib.extras.sweep.place import FILE, has_runs
from looplib.extras.sweep.space import Parameter
from looplib.masks import masked
from looplib.messages import gist

SEARCHES = ("grid", "random", "tpe")
PRUNERS = {
    "none": optuna.pruners.NopPruner,
    "median": optuna.pruners.MedianPruner,
    "halving": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
}
VALUES = ("last", "best")
PLAN = "plan"
_LARGEST_GRID = 10_000
_VALUE, _ERROR, _DEVIATION = "value of seed", "error", "deviation"
RUNS_BEFORE = "runs before"  # whether the directory had runs when the database was made
# Bounds of a database that is read, which may come from somebody else.
MOST_BYTES, MOST_TRIALS, _MOST_SECONDS = 1 << 28, 100_000, 60.0
_OF_SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")  # at the end of a journal that names another file, to be removed
_LONGEST = 300  # characters of a setting in a sentence


@dataclasses.dataclass(frozen=True)
class SweepPlan:
    """What a sweep does; it does not change when the sweep is started again.

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

    @property
    def direction(self) -> str:
        """Optuna's name of the goal."""
        return "maximize" if self.goal == "max" else "minimize"


class Study:
    """The trials of a sweep.

    Args:
      directory: the sweep's.
      plan: what it does.
      parameters: what it searches.

    Attributes:
      name: Optuna's name of it.
      shared: whether other machines take trials of it too.
      size: the number of combinations of the parameters' values; infinity if one of them is any number of a range.
      had_runs_before: whether the database was made in a directory that had runs of trials.

    Raises:
      UsageError: if the directory holds a sweep with another plan, or a database that is damaged; or for a grid that
        has no end.
    """

    name, shared = "sweep", False
    _other = "--dir"  # the option with which a user has another one

    def __init__(self, directory: str, plan: SweepPlan, parameters: Sequence[Parameter]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._plan, self._parameters = plan, parameters
        self._grid = {one.flag: one.grid() for one in parameters} if plan.search == "grid" else {}
        self.size = math.prod(one.count for one in parameters)
        if self._grid and self.size > _LARGEST_GRID:
            raise SweepError(
                f"the grid has {self.size:,} points; expected at most {_LARGEST_GRID:,}; list fewer values, or "
                "use --search=random"
            )
        self._storage = self._open(directory)
        with self._reading():
            self._study = optuna.load_study(study_name=self.name, storage=self._storage, pruner=PRUNERS[plan.prune]())
            self._refuse_another(json.loads(self._study.user_attrs[PLAN]))
            for place, trial in enumerate(self.all()):
                if wrong := self._wrong_in(place, trial):
                    raise ValueError(f"its trial {place} has {wrong}")
            self.had_runs_before = bool(self._study.user_attrs.get(RUNS_BEFORE))

    def _open(self, directory: str) -> optuna.storages.RDBStorage:
        """Opens the database, which is made if it is not there."""
        self._where, self._path = directory, os.path.join(directory, FILE)
        if not os.path.lexists(self._path):
            _create(self._path, self.name, self._plan)
        with self._reading():
            _check_file(self._path)
            return _storage_of(self._path)

    def _refuse_another(self, before: dict[str, Any]) -> None:
        """Refuses to continue a sweep that was begun with another plan.

        Args:
          before: the fields of that plan.

        Raises:
          UsageError: if a field differs.
        """
        for name, new in dataclasses.asdict(self._plan).items():
            if (old := before.get(name, SweepPlan.value if name == "value" else None)) != new:
                old, new = (" ".join(masked(v)) if isinstance(v, list) else str(v) for v in (old, new))
                raise SweepError(
                    f"{self._where} holds a sweep whose {name} is {printable(old[:_LONGEST])}, not {new[:_LONGEST]}; "
                    f"start it as it was, or use another {self._other}"
                )

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Says in a sentence what is wrong with the database, if the block finds any part damaged."""
        try:
            yield
        except (UsageError, SQLAlchemyError, optuna.exceptions.OptunaError) as error:
            if isinstance(error, UsageError) or not self._proves_damage(error):
                raise
            raise self._damaged(error) from error
        except Exception as error:  # Optuna raises anything for a database of another program
            raise self._damaged(error) from error

    def _proves_damage(self, error: BaseException) -> bool:
        """Returns whether an error is of a damaged file, and not of one that cannot be read or written now."""
        cause = cause_of(error)
        return not isinstance(cause, sqlite3.OperationalError) or "no such" in str(cause) or "interrupted" in str(cause)

    def _damaged(self, error: Exception) -> UsageError:
        return SweepError(
            f"{self._path} is damaged, or no database of a sweep ({printable(gist(cause_of(error)))}); restore a copy, "
            "or move it away and run the same command: each trial then continues its run, if it draws the settings "
            "which that run was started with"
        )

    def _wrong_in(self, place: int, trial: optuna.trial.FrozenTrial) -> str:
        """Returns what no sweep has written into a trial; "" if there is nothing."""
        expected = {one.flag: one.values for one in self._parameters}
        seeds = max(1, self._plan.seeds)
        if trial.number != place:
            return f"the number {trial.number}"
        if any(expected.get(flag) != values for flag, values in trial.distributions.items()):
            return "other flags or values"
        for flag, setting in trial.params.items():
            of = expected[flag]
            if not isinstance(of, CategoricalDistribution) and not of.low <= setting <= of.high:
                return f"{flag}={setting:.6g}"
        names = [name for name in trial.user_attrs if name.startswith(_VALUE)]
        if len(names) != len(values(trial)) or any(seed >= seeds for seed in values(trial)):
            return "results that are not numbers, or of other seeds"
        if "fixed_params" in trial.system_attrs or trial.state == TrialState.WAITING:
            return "values that were not drawn"
        if trial.state == TrialState.COMPLETE:
            if trial.params.keys() != expected.keys() or len(names) != seeds or number(trial.value) is None:
                return "ended, and lacks settings or results"
        return ""

    def all(self) -> list[optuna.trial.FrozenTrial]:
        """Returns all trials."""
        return self._study.get_trials(deepcopy=False)

    def unfinished(self) -> list[optuna.Trial]:
        """Returns the trials that were begun and have not ended, for the sweep's next start."""
        states = (TrialState.RUNNING,)
        numbers = [one.number for one in self._study.get_trials(deepcopy=False, states=states)]
        with self._reading():
            return [self._complete(number, functools.partial(self._again, number)) for number in numbers]

    def _again(self, number: int) -> optuna.Trial:
        """Returns a trial that was begun, by its number."""
        study = self._storage.get_study_id_from_name(self.name)
        return optuna.Trial(self._study, self._storage.get_trial_id_from_study_id_trial_number(study, number))

    def new(self) -> optuna.Trial:
        """Returns a new trial, with a value for each parameter."""
        with self._reading():
            return self._complete(len(self.all()), self._study.ask)

    def next(self, limit: int) -> optuna.Trial | None:
        """Returns the next trial to run, new or taken over; None if there is none, or none yet.

        Args:
          limit: how many trials the sweep is to have.
        """
        return self.new() if len(self.all()) < limit else None

    def is_over(self) -> bool:
        """Returns whether no trial runs elsewhere, which this sweep would have to wait for or to take over."""
        return True

    def lost(self) -> set[int]:
        """Returns the numbers of trials that another machine has taken from this one since the last call."""
        return set()

    def hand_back(self) -> None:
        """Lets other machines take the trials of this one at once."""

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

    def _sampler_of_a_new_point(self, number: int) -> "_Drawn":
        """Returns a sampler that draws a point which no trial before this number has, while there are any."""
        before = self.all()[:number]
        for attempt in itertools.count():
            drawn = optuna.create_study(sampler=optuna.samplers.RandomSampler(_seed(number, attempt))).ask()
            for parameter in self._parameters:
                parameter.suggest(drawn)
            if number >= self.size or all(drawn.params != trial.params for trial in before):
                return _Drawn(drawn.params)

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
        self._study.tell(trial, state=TrialState.FAIL)

    def prune(self, trial: optuna.Trial) -> None:
        """Ends a trial that was stopped as hopeless."""
        self._study.tell(trial, state=TrialState.PRUNED)


class _Drawn(optuna.samplers.RandomSampler):
    """Gives a trial a point that was drawn before, of which it may have a part from a start that was killed."""

    def __init__(self, point: dict[str, Any]) -> None:
        super().__init__(seed=0)
        self._point = point

    def sample_independent(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        return self._point[param_name]


def _seed(number: int, attempt: int = 0) -> int:
    """Returns the seed of an attempt to draw the point of a trial."""
    return int(np.random.SeedSequence((0, number, attempt)).generate_state(1)[0])


def _create(path: str, name: str, plan: SweepPlan) -> None:
    """Makes the database in another folder first: a kill in the middle leaves no half of one."""
    directory = os.path.dirname(path)
    had_runs = has_runs(directory)
    for suffix in ("-journal", "-wal", "-shm"):  # of a database that was removed
        if not os.path.isdir(f"{path}{suffix}"):
            folders.remove(directory, f"{FILE}{suffix}")
    with new_folder(path) as new:
        storage = _storage_of(os.path.join(new, FILE))
        study = optuna.create_study(storage=storage, study_name=name, direction=plan.direction)
        study.set_user_attr(PLAN, json.dumps(dataclasses.asdict(plan)))
        if had_runs:
            study.set_user_attr(RUNS_BEFORE, True)
        storage.remove_session()
        storage.engine.dispose()
        folders.move(new, FILE, directory)
    files.make_durable(directory)


def _storage_of(path: str) -> optuna.storages.RDBStorage:
    """Returns Optuna's storage in a file; a URL could not name each path."""
    return optuna.storages.RDBStorage("sqlite://", {"creator": lambda: sqlite3.connect(path, check_same_thread=False)})


def _check_file(path: str) -> None:
    """Checks that a file, with those that SQLite keeps beside it, is a database that can be read at a bounded cost.

    Raises:
      ValueError, sqlite3.Error: if it is not.
      OSError: if it cannot be read.
    """
    for suffix in ("", "-journal", "-wal", "-shm"):
        if suffix and not os.path.lexists(f"{path}{suffix}"):
            continue
        with files.open_regular(f"{path}{suffix}") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - len(_OF_SUPER_JOURNAL)))
            if size > MOST_BYTES:
                raise ValueError(f"{FILE}{suffix} has {size:,} bytes; expected at most {MOST_BYTES:,}")
            if suffix == "-journal" and file.read() == _OF_SUPER_JOURNAL:
                raise ValueError(f"{FILE}{suffix} names a file to be removed")
    end = time.monotonic() + _MOST_SECONDS
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.set_progress_handler(lambda: time.monotonic() > end, 100_000)
        found = database.execute("SELECT name FROM sqlite_master WHERE type NOT IN ('table', 'index')").fetchone()
        if found:
            raise ValueError(f"it has {found[0]!r:.50}, which is no table")
        if (problem := database.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise ValueError(problem)
        (trials,) = database.execute("SELECT count(*) FROM trials").fetchone()
        if trials > MOST_TRIALS:
            raise ValueError(f"it has {trials:,} trials; expected at most {MOST_TRIALS:,}")


def cause_of(error: BaseException) -> BaseException:
    """Returns the error that led to one of Optuna's, which do not say what is wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def name_of(trial: optuna.Trial | optuna.trial.FrozenTrial) -> str:
    """Returns the name of a trial and of its folder in the sweep's directory."""
    return f"trial-{trial.number:04}"


def values(trial: optuna.Trial | optuna.trial.FrozenTrial) -> dict[int, float]:
    """Returns the results of a trial by seed."""
    found = ((re.fullmatch(rf"{_VALUE} (\d{{1,9}})", name), number(value)) for name, value in trial.user_attrs.items())
    return {int(match[1]): value for match, value in found if match and value is not None}


def deviation(trial: optuna.trial.FrozenTrial) -> float | None:
    """Returns the standard deviation of a trial's results over its seeds; None with one seed."""
    return number(trial.user_attrs.get(_DEVIATION))


def error(trial: optuna.trial.FrozenTrial) -> str:
    """Returns the last line of a trial that failed, "" otherwise."""
    return text(trial.user_attrs.get(_ERROR))
