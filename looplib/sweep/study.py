"""The trials of a sweep, and which process runs them.

A trial is in Optuna's storage from the moment it is to run. If the process that runs it ends or gives no sign of life,
Optuna's record of it is marked as failed and another record of the same trial, with all results that it has, waits for
the next process. Several processes do that, and take trials, one at a time, by the lock of a file in the directory of
the sweep. So a kill at any moment loses no trial, and none is taken twice.
"""

import contextlib
import dataclasses
import fcntl
import functools
import itertools
import json
import math
import os
import re
import secrets
import sqlite3
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import optuna
import sqlalchemy
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from looplib.base import files, folders
from looplib.base.console import printable
from looplib.base.decoding import number, text
from looplib.base.messages import gist
from looplib.errors import PluginError, SweepError, UsageError
from looplib.masks import masked
from looplib.run.metric_names import best_first
from looplib.run.sweep_results import SHARED, TRIALS
from looplib.sweep.space import Parameter, Value, points

GRACE = 120  # seconds without a sign of life of a process, after which others take over its trials
BEAT = 10  # seconds between two signs of life
STORAGE_ERRORS = (SQLAlchemyError, optuna.exceptions.OptunaError)
_EXAMPLE = "postgresql+psycopg://USER@HOST/DATABASE"
# Bounds of a file that is read, which may come from somebody else.
_MOST_BYTES, _MOST_TRIALS, _MOST_SECONDS = 1 << 28, 100_000, 60.0
_BESIDE = ("-journal", "-wal", "-shm")  # endings of the files that SQLite keeps beside a database
_OF_SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")  # at the end of a journal that names another file, to be removed


@dataclasses.dataclass(frozen=True)
class Database:
    """A database that several processes share.

    Attributes:
      url: SQLAlchemy's form of its URL.
      study: the name of the sweep there.
    """

    url: sqlalchemy.URL
    study: str

    @property
    def shown(self) -> str:
        """The name of the study for a user, without a password."""
        return f"the study {self.study!r} in {self.url.set(query={}).render_as_string(hide_password=True)}"


def parse(text: str | None, study: str | None) -> Database | None:
    """Returns the database of `--storage` and `--study`; None if the sweep has a file of its own.

    Raises:
      SweepError: if `text` is not the URL of a database, or `study` is not a name.
    """
    if text is None:
        if study is not None:
            raise SweepError(f"--study is the name of a sweep in --storage; give that too (--storage={_EXAMPLE})")
        return None
    study = "sweep" if study is None else study
    if not re.fullmatch(r"[\w.: /-]{1,100}", study):
        raise SweepError(f"--study is {study[:100]!r}; expected up to 100 letters, digits, spaces and -_.:/")
    try:
        url = sqlalchemy.make_url(text)
        url.get_dialect()
    except (ArgumentError, ValueError, ImportError):  # whose messages may have the password
        raise SweepError(
            f"--storage is no URL of a database that SQLAlchemy knows; expected one such as {_EXAMPLE}"
        ) from None
    masked([text, {"password": url.password, **url.query}])  # so that no message has one from now on
    return Database(url, study)


def check(database: Database) -> None:
    """Checks that a database answers.

    Raises:
      PluginError: if the driver is not installed.
      SweepError: if it does not answer.
    """
    url = database.url
    try:
        sqlalchemy.create_engine(url).connect().close()
    except ImportError as error:
        needed = "'looplib[postgresql]'" if url.drivername == "postgresql+psycopg" else error.name or "it"
        raise PluginError(
            f"--storage={url.drivername}:// needs a driver that cannot be imported ({gist(error)}); install it with "
            f"pip install {needed}"
        ) from error
    except (SQLAlchemyError, TypeError, ValueError, OSError) as error:
        raise SweepError(
            f"{database.shown} cannot be used ({printable(gist(cause_of(error)))}); check the URL of --storage, the "
            "password and the network"
        ) from error


def open_shared(database: Database) -> optuna.storages.RDBStorage:
    """Returns Optuna's storage in a database, in which trials have heartbeats."""
    text = database.url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")  # Optuna formats it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # heartbeats are an experimental part of Optuna
        options = {"pool_pre_ping": True}
        return optuna.storages.RDBStorage(text, options, heartbeat_interval=BEAT, grace_period=GRACE)


def open_file(path: str) -> optuna.storages.RDBStorage:
    """Returns Optuna's storage in a SQLite file, which is made if it is not there.

    Raises:
      ValueError, sqlite3.Error: if the file is not the database of a sweep, or cannot be read at a bounded cost.
      OSError: if it cannot be read.
    """
    if os.path.lexists(path):
        _check_file(path)
    else:
        for ending in _BESIDE:  # of a database that was removed
            folders.remove(os.path.dirname(path), f"{TRIALS}{ending}")
    # A URL could not name each path.
    return optuna.storages.RDBStorage("sqlite://", {"creator": lambda: sqlite3.connect(path, check_same_thread=False)})


def _check_file(path: str) -> None:
    for ending in ("", *_BESIDE):
        if ending and not os.path.lexists(f"{path}{ending}"):
            continue
        with files.open_regular(f"{path}{ending}") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - len(_OF_SUPER_JOURNAL)))
            if size > _MOST_BYTES:
                raise ValueError(f"{TRIALS}{ending} has {size:,} bytes; expected at most {_MOST_BYTES:,}")
            if ending == "-journal" and file.read() == _OF_SUPER_JOURNAL:
                raise ValueError(f"{TRIALS}{ending} names a file to be removed")
    end = time.monotonic() + _MOST_SECONDS
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.set_progress_handler(lambda: time.monotonic() > end, 100_000)
        found = dict(database.execute("SELECT name, type FROM sqlite_master").fetchall())
        if others := [name for name, kind in found.items() if kind not in ("table", "index")]:
            raise ValueError(f"it has {others[0]!r:.50}, which is no table")
        if found and "studies" not in found and "version_info" not in found:  # the tables that are made first
            raise ValueError("it has tables of another program")
        if (problem := database.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise ValueError(problem)
        if "trials" in found:
            (trials,) = database.execute("SELECT count(*) FROM trials").fetchone()
            if trials > _MOST_TRIALS:
                raise ValueError(f"it has {trials:,} trials; expected at most {_MOST_TRIALS:,}")


def cause_of(error: BaseException) -> BaseException:
    """Returns the error that led to one of Optuna's, which do not say what is wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


_FIRST = 2  # trials that the rule of medians lets end; Optuna's 5 are most of a small sweep


class _Median(optuna.pruners.MedianPruner):
    """The rule of medians, which asks Optuna for no median or best of values that are all NaN."""

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        ended = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if not any(math.isfinite(one.intermediate_values.get(trial.last_step, math.nan)) for one in ended):
            return False
        if not any(map(math.isfinite, trial.intermediate_values.values())):
            return len(ended) >= _FIRST
        return super().prune(study, trial)


PRUNERS = {
    "none": optuna.pruners.NopPruner,
    "median": functools.partial(_Median, n_startup_trials=_FIRST),
    "halving": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
}
_PLAN, _DIRECTORY = "plan", "directory"  # what a sweep notes beside its trials
# What it notes of a trial: which one it is, its results, and why it failed.
_TRIAL, _VALUE, _ERROR = "trial", "value of seed", "error"
_LOCK_WAIT = 30.0  # seconds
_LOOK = 1.0  # seconds between two looks for a trial that has become free
_LONGEST = 300  # characters of a setting in a sentence
_LOST = re.compile("no such|interrupted")  # in what SQLite says of a damaged file


@dataclasses.dataclass(frozen=True)
class SweepPlan:
    """The plan of a sweep, which does not change when the sweep is started again.

    Attributes:
      command: the command, with its ranges and lists.
      search: "grid", "random" or "tpe".
      metric: what to compare: the split and the name in metrics.jsonl, such as "eval/accuracy".
      goal: "max" or "min"; None to read it from the name of the metric.
      prune: a name in `PRUNERS`.
      seeds: under how many seeds to run each configuration; 0: once, with the command's own seed.
      value: which value of the metric to compare: "last" of a run, or its "best".
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
        """The value by which trials are compared, as a person reads it."""
        return self.metric if self.value == "last" else f"best {self.metric}"

    def value_of(self, curve: Mapping[int, float]) -> float | None:
        """Returns the value by which a run is compared, from those of the metric by step; None without a finite one."""
        found = [curve[max(curve)]] if curve and self.value == "last" else list(curve.values())
        return next(iter(best_first(found, lambda value: value, self.goal)), None)

    def result_of(self, trial: FrozenTrial) -> float | None:
        """Returns the value by which a trial is compared, of a pruned one what it had come to; None without one."""
        return self.value_of(trial.intermediate_values) if trial.state == TrialState.PRUNED else trial.value


class Study:
    """The trials of a sweep.

    Args:
      directory: the sweep's.
      plan: what it does.
      parameters: what it searches.
      trials: how many to have; None for all points of a grid.
      database: of several processes; None for a file in the directory, which this process has locked.

    Attributes:
      shared: whether other processes take trials of the sweep too.
      limit: how many trials the sweep is to have; the caller may lower it.
      is_over: whether all trials had ended, whichever process ran them, when `next` found none.

    Raises:
      UsageError: if there is a sweep with another plan, or a file that is damaged; or for a grid that has no end.
    """

    def __init__(
        self,
        directory: str,
        plan: SweepPlan,
        parameters: Sequence[Parameter],
        trials: int | None = None,
        database: Database | None = None,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._plan, self._parameters, self._database = plan, parameters, database
        self.shared = database is not None
        found, size = points(plan.search, parameters), math.prod(one.count for one in parameters)
        self.limit = trials if trials and (plan.search == "tpe" or trials <= size) else int(size)
        self._points = list(itertools.islice(found, self.limit))
        self._own: set[int] = set()  # Optuna's numbers of the trials that this process runs
        self._next_look = self._next_beat = 0.0
        self.is_over = False
        self._path, self._mark = os.path.join(directory, TRIALS), os.path.join(directory, SHARED)
        self._where = database.shown if database else directory
        other = self._path if database else self._mark
        if os.path.lexists(other) and not (database and os.path.lexists(self._mark)):
            kind = "without" if database else "with"
            raise SweepError(f"{other} is of a sweep {kind} --storage; start it as it was, or use another --dir")
        if database:
            check(database)
        with self.alone(), self._reading():
            self._open(directory)

    def _open(self, directory: str) -> None:
        name, direction = self._database.study if self._database else "sweep", f"{self._plan.goal}imize"
        self._storage = open_shared(self._database) if self._database else open_file(self._path)
        pruner = PRUNERS[self._plan.prune]()
        self._study = optuna.create_study(
            storage=self._storage, study_name=name, direction=direction, pruner=pruner, load_if_exists=True
        )
        self._id = self._storage.get_study_id_from_name(name)
        before = self._study.user_attrs
        if _PLAN not in before:
            if self._records():
                raise ValueError("it has trials, and no sweep has made it")
            if any(re.fullmatch(r"trial-\d{4,}", name) for name in os.listdir(directory)):
                raise SweepError(
                    f"{directory} has runs of another sweep, of which {self._where} knows nothing; restore the "
                    f"{'database' if self.shared else TRIALS} of that sweep, or use another --dir"
                )
            self._study.set_user_attr(_DIRECTORY, self._token())
            self._study.set_user_attr(_PLAN, json.dumps(dataclasses.asdict(self._plan)))
            before = self._study.user_attrs
        self._refuse_another(json.loads(before[_PLAN]))
        if self.shared and before.get(_DIRECTORY) != self._token():
            raise SweepError(
                f"{self._where} has its runs in another directory than {directory}, or is of an earlier version of "
                "looplib; give all processes one --dir, or use another --study"
            )
        if [one.number for one in self._records()] != list(range(len(self._records()))):
            raise ValueError("its trials have other numbers")
        for place, trial in enumerate(self.trials()):
            if not self._fits(place, trial):
                raise ValueError(f"its trial {place} is not one of this sweep")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps other processes of the sweep from taking and ending trials while the block runs.

        Raises:
          TimeoutError: if another process has the lock for long.
          OSError: if the file system has no locks.
        """
        if not self.shared:  # the directory is locked
            yield
            return
        with files.appending(self._mark, _LOCK_WAIT) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # which `appending` does without in a file system that has no locks
            if not os.path.getsize(self._mark):
                file.write(secrets.token_hex(16).encode())
                file.flush()
                os.fsync(file.fileno())
            yield

    def _token(self) -> str:
        """Returns what tells the directory of several processes from any other, by whatever path they have it."""
        return files.read_text(self._mark, most=100) if self.shared else ""

    def _refuse_another(self, before: dict[str, Any]) -> None:
        for name, new in dataclasses.asdict(self._plan).items():
            if (old := before.get(name, SweepPlan.value if name == "value" else None)) != new:
                old, new = (" ".join(masked(v)) if isinstance(v, list) else str(v) for v in (old, new))
                raise SweepError(
                    f"{self._where} holds a sweep whose {name} is {printable(old[:_LONGEST])}, not {new[:_LONGEST]}; "
                    f"start it as it was, or use another {'--study' if self.shared else '--dir'}"
                )

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Says in a sentence what is wrong with the storage, if the block finds any part damaged."""
        try:
            yield
        except Exception as error:  # Optuna raises anything for a database of another program
            cause = cause_of(error)
            # A server says anything of a connection; a file may only be locked, or on a full disk.
            passes = self.shared or (isinstance(cause, sqlite3.OperationalError) and not _LOST.search(str(cause)))
            if isinstance(error, (UsageError, OSError)) or (isinstance(error, STORAGE_ERRORS) and passes):
                raise
            shown, cure = self._where, "use another --study, or restore the database"
            if not self.shared:
                shown, cure = self._path, "restore a copy, or use another --dir"
            text = f"{shown} is damaged, or no database of a sweep ({printable(gist(cause))}); {cure}"
            raise SweepError(text) from error

    def _fits(self, place: int, trial: FrozenTrial) -> bool:
        """Returns whether a sweep can have written a trial."""
        expected, found = {one.flag: one.values for one in self._parameters}, values(trial)
        seeds = max(1, self._plan.seeds)
        complete = trial.state == TrialState.COMPLETE
        return (
            place_of(trial) == place
            and "fixed_params" not in trial.system_attrs  # which would be run in place of what is drawn
            and all(expected.get(flag) == of for flag, of in trial.distributions.items())
            and all(
                isinstance(of := expected[flag], CategoricalDistribution) or of.low <= setting <= of.high
                for flag, setting in trial.params.items()
            )
            and (trial.params.keys() == expected.keys() or (self._plan.search == "tpe" and not complete))
            and len(found) == sum(name.startswith(_VALUE) for name in trial.user_attrs)
            and all(seed < seeds for seed in found)
            and (not complete or (len(found) == seeds and number(trial.value) is not None))
        )

    def _records(self) -> list[FrozenTrial]:
        """Returns all of Optuna's records, by their numbers."""
        return self._study.get_trials(deepcopy=False)

    def trials(self) -> list[FrozenTrial]:
        """Returns the newest record of each trial, in the order of the trials."""
        newest = {place_of(record): record for record in self._records()}
        return [newest[place] for place in sorted(newest)]

    def next(self) -> optuna.Trial | None:
        """Returns the next trial to run, with a value for each parameter; None if there is none, or none yet."""
        if time.monotonic() < self._next_look:
            return None
        with self.alone(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # heartbeats are an experimental part of Optuna
            if self.shared:
                optuna.storages.fail_stale_trials(self._study)
            for trial in self.trials():
                if self._was_left(trial):
                    self._queue_again(trial)
            while True:
                trials = self.trials()
                waiting = [one.number for one in self._records() if one.state == TrialState.WAITING]
                if waiting:
                    trial = self._take(waiting[0])
                    if not self.end_if_complete(trial):
                        return trial
                elif len(trials) < self.limit:
                    self._queue(self._new_point(trials), {_TRIAL: len(trials)})
                else:
                    break
        self.is_over = all(trial.state.is_finished() for trial in trials)
        self._next_look = time.monotonic() + _LOOK
        return None

    def _was_left(self, trial: FrozenTrial) -> bool:
        """Returns whether the process that ran a trial is gone. The trials that a sweep fails have an error."""
        if self.shared or trial.state != TrialState.RUNNING:
            return trial.state == TrialState.FAIL and _ERROR not in trial.user_attrs
        return trial.number not in self._own

    def _queue_again(self, trial: FrozenTrial) -> None:
        """Ends a record, and has another one of the same trial wait."""
        if trial.state == TrialState.RUNNING:
            self._study.tell(trial.number, state=TrialState.FAIL)
        notes = {name: note for name, note in trial.user_attrs.items() if name != _ERROR}
        self._queue(trial.params, {**notes, _TRIAL: place_of(trial)}, trial)

    def _queue(self, params: dict[str, Value], notes: dict[str, Any], of: FrozenTrial | None = None) -> None:
        of_flags = {one.flag: one.values for one in self._parameters if one.flag in params}
        trial = optuna.create_trial(state=TrialState.WAITING, params=params, distributions=of_flags, user_attrs=notes)
        if of:
            trial.system_attrs, trial.intermediate_values = of.system_attrs, of.intermediate_values
        self._study.add_trial(trial)

    def _new_point(self, trials: Sequence[FrozenTrial]) -> dict[str, Value]:
        """Returns the first point that no trial has, of those that an uninterrupted sweep tries in this order."""
        if self._plan.search == "tpe":  # which draws it from the results, once the trial is taken
            return {}
        tried = {tuple(trial.params[one.flag] for one in self._parameters) for trial in trials}
        return next(point for point in self._points if tuple(point.values()) not in tried)

    def _take(self, number: int) -> optuna.Trial:
        """Returns the first trial that waits, as one of this process."""
        if self.shared:
            self._show_life(number)  # before it runs: Optuna takes no trial for stale that has never shown any
        place = place_of(self._records()[number])
        seed = int(np.random.SeedSequence((0, place, 0)).generate_state(1)[0])
        self._study.sampler = optuna.samplers.TPESampler(seed=seed)  # draws what an uninterrupted sweep would
        trial = self._study.ask()
        for parameter in self._parameters:
            parameter.suggest(trial)
        self._own.add(trial.number)
        return trial

    def _show_life(self, number: int) -> None:
        self._storage.record_heartbeat(self._storage.get_trial_id_from_study_id_trial_number(self._id, number))

    def beat(self) -> set[int]:
        """Shows that this process is alive, if it is time; returns the numbers of records that others have ended."""
        if not self.shared or time.monotonic() < self._next_beat:
            return set()
        records = self._records()
        lost = {one for one in self._own if records[one].state != TrialState.RUNNING}
        for one in self._own - lost:
            self._show_life(one)
        self._own -= lost
        self._next_beat = time.monotonic() + BEAT
        return lost

    def has(self, trial: optuna.Trial) -> bool:
        """Returns whether a trial is still of this process."""
        return trial.number in self._own and self._records()[trial.number].state == TrialState.RUNNING

    def hand_back(self) -> None:
        """Lets the next start, and other processes at once, take the trials of this one, if the storage answers."""
        with contextlib.suppress(*STORAGE_ERRORS, OSError), self.alone():
            records = self._records()
            for one in sorted(self._own):
                if records[one].state == TrialState.RUNNING:
                    self._queue_again(records[one])

    def is_hopeless(self, trial: optuna.Trial, curve: dict[int, float]) -> bool:
        """Passes new values of a trial's metric on to the pruner; returns whether it is to be stopped.

        Args:
          trial: the trial.
          curve: the values by step.
        """
        known = self._records()[trial.number].intermediate_values
        for step in sorted(curve.keys() - known.keys()):
            if step >= 0:
                trial.report(curve[step], step)
        return max(curve) >= max(known, default=0) and trial.should_prune()  # else by what a rollback has taken back

    def note(self, trial: optuna.Trial, seed: int, value: float) -> None:
        """Notes the result under one seed, and ends the trial if it was the last one."""
        trial.set_user_attr(f"{_VALUE} {seed}", value)
        self.end_if_complete(trial)

    def end_if_complete(self, trial: optuna.Trial) -> bool:
        """Ends a trial that has a result under each seed; returns whether it has."""
        found = list(values(trial).values())
        if len(found) < max(1, self._plan.seeds):
            return False
        self._end(trial, TrialState.COMPLETE, float(np.mean(found)))
        return True

    def fail(self, trial: optuna.Trial, sentence: str) -> None:
        """Ends a trial that failed."""
        trial.set_user_attr(_ERROR, sentence)
        self._end(trial, TrialState.FAIL)

    def prune(self, trial: optuna.Trial) -> FrozenTrial:
        """Ends a trial that was stopped as hopeless; returns its record, whose last step decided."""
        self._end(trial, TrialState.PRUNED)
        return self._records()[trial.number]

    def _end(self, trial: optuna.Trial, state: TrialState, value: float | None = None) -> None:
        self._study.tell(trial, value, state)
        self._own.discard(trial.number)
        self._next_look = 0.0


def place_of(trial: optuna.Trial | FrozenTrial) -> int:
    """Returns which trial of the sweep a record is of; Optuna counts records."""
    return trial.user_attrs.get(_TRIAL, trial.number)


def name_of(trial: optuna.Trial | FrozenTrial) -> str:
    """Returns the name of a trial and of its folder in the sweep's directory."""
    return f"trial-{place_of(trial):04}"


def values(trial: optuna.Trial | FrozenTrial) -> dict[int, float]:
    """Returns the results of a trial by seed."""
    found = ((re.fullmatch(rf"{_VALUE} (\d{{1,9}})", name), number(value)) for name, value in trial.user_attrs.items())
    return {int(match[1]): value for match, value in found if match and value is not None}


def deviation(trial: FrozenTrial) -> float | None:
    """Returns the standard deviation of a trial's results over its seeds; None with one seed."""
    found = list(values(trial).values())
    return float(np.std(found, ddof=1)) if len(found) > 1 else None


def error(trial: FrozenTrial) -> str:
    """Returns the last line of a trial that failed, "" otherwise."""
    return text(trial.user_attrs.get(_ERROR))
