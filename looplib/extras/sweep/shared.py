"""The study of a sweep on several machines: each takes its trials from the one database, in the order of their numbers.

Who has the lease of a number makes the trial, or takes it over. So there are never more trials than the sweep is to
have, each runs on one machine at a time, and a point is drawn only once all trials before it have theirs, as one
machine would draw it.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import optuna
import sqlalchemy

from looplib.console import printable
from looplib.errors import LockedError, SweepError, UsageError
from looplib.extras.sweep.database import Database, connect, wait_for
from looplib.extras.sweep.leases import SECONDS, Leases
from looplib.extras.sweep.place import Place
from looplib.extras.sweep.space import Parameter
from looplib.extras.sweep.study import MOST_TRIALS, PLAN, RUNS_BEFORE, Study, SweepPlan, cause_of
from looplib.messages import gist

_LOOK = 1.0  # seconds between two looks for a trial that has become free
_MADE = 10.0  # seconds that the machine which makes a study takes at most
_PLACE = "place"  # beside the fields of the plan


class SharedStudy(Study):
    """The trials of a sweep that several machines run.

    Args:
      database: where the study is.
      place: the directory that all machines use.
      plan: what the sweep does.
      parameters: what it searches.
      stops: returns whether a signal has asked this machine to end.

    Raises:
      UsageError: as `Study`, or if the database cannot be used, or the directory is not that of the other machines.
    """

    shared = True
    _other = "--study"

    def __init__(
        self,
        database: Database,
        place: Place,
        plan: SweepPlan,
        parameters: Sequence[Parameter],
        stops: Callable[[], bool],
    ) -> None:
        self.name, self._database, self._place, self._stops = database.study, database, place, stops
        self._next_look, self._is_over = 0.0, False
        super().__init__(place.directory, plan, parameters)
        engine = self._storage.engine
        self._leases = Leases(engine, self._storage.get_study_id_from_name(self.name))
        wait_for(engine, self._patience)

    def _patience(self) -> float:
        return 0.0 if self._stops() or self._leases.ending.is_set() else self._leases.sure_until

    def _open(self, directory: str) -> optuna.storages.RDBStorage:
        self._where = self._database.shown
        storage = connect(self._database)
        with self._reading():
            try:
                study = optuna.create_study(storage=storage, study_name=self.name, direction=self._plan.direction)
            except optuna.exceptions.DuplicatedStudyError:
                self._wait_for_plan(storage)
            else:
                self._describe(study)
            count = sqlalchemy.text("SELECT count(*) FROM trials WHERE study_id = :study")
            with storage.engine.connect() as connection:
                found = connection.execute(count, {"study": storage.get_study_id_from_name(self.name)}).scalar_one()
            if found > MOST_TRIALS:
                raise ValueError(f"it has {found:,} trials; expected at most {MOST_TRIALS:,}")
        return storage

    def _wait_for_plan(self, storage: optuna.storages.RDBStorage) -> None:
        """Waits until the machine that makes the study has described it; does so if that one was killed."""
        study, end = optuna.load_study(study_name=self.name, storage=storage), time.monotonic() + _MADE
        while PLAN not in study.user_attrs:
            if study.get_trials(deepcopy=False):
                raise ValueError("it has trials, and no sweep has made it")
            if time.monotonic() > end:
                self._describe(study)
                return
            time.sleep(_LOOK / 5)

    def _describe(self, study: optuna.Study) -> None:
        if self._place.has_runs():
            study.set_user_attr(RUNS_BEFORE, True)
        plan = {**dataclasses.asdict(self._plan), _PLACE: self._place.mark(make=True)}
        study.set_user_attr(PLAN, json.dumps(plan))

    def _refuse_another(self, before: dict[str, Any]) -> None:
        super()._refuse_another(before)
        if before.get(_PLACE) != self._place.mark():
            raise SweepError(
                f"{self._where} has its runs in another directory than {self._place.shown}; give all machines one "
                "--dir, in a file system that they share or in an object store, or use another --study"
            )

    def _proves_damage(self, error: BaseException) -> bool:
        return False  # a server says that of a connection too

    def _damaged(self, error: Exception) -> UsageError:
        return SweepError(
            f"{self._where} is damaged, or not of a sweep ({printable(gist(cause_of(error)))}); use another --study, "
            "or restore the database"
        )

    def unfinished(self) -> list[optuna.Trial]:
        """Returns nothing: a start takes trials one at a time, and those of other machines once they are free."""
        return []

    def next(self, limit: int) -> optuna.Trial | None:
        """Returns a trial that this machine has taken, with a value for each parameter; None if there is none yet."""
        if time.monotonic() < self._next_look:
            return None
        self._leases.refresh()
        trials = self.all()[:limit]
        self._is_over = len(trials) >= limit and all(trial.state.is_finished() for trial in trials)
        for number in range(min(len(trials) + 1, limit)):
            if number < len(trials) and trials[number].state.is_finished():
                continue
            if self._leases.take(number) and (trial := self._taken(number)):
                return trial
            if number == len(trials) or len(trials[number].params) < len(self._parameters):
                break  # the points after it are drawn once it has its own
        self._next_look = time.monotonic() + _LOOK
        return None

    def _taken(self, number: int) -> optuna.Trial | None:
        """Returns the trial of a number that this machine has taken; None if it has ended just before."""
        with self._reading():
            trials = self.all()
            if number == len(trials):
                return self._complete(number, functools.partial(self._made, number))
            if wrong := self._wrong_in(number, trials[number]):
                raise ValueError(f"its trial {number} has {wrong}")
            if trials[number].state.is_finished():
                return None
            trial = self._complete(number, functools.partial(self._again, number))
            return None if self.end_if_complete(trial) else trial

    def _made(self, number: int) -> optuna.Trial:
        """Makes the trial of a number; no other machine does, unless this one was stopped for long just now."""
        trial = self._study.ask()
        if trial.number != number:
            raise LockedError(
                f"another machine has made trial {number} of {self._where}, because this one did nothing for "
                f"{SECONDS:g} s; run the same command again"
            )
        return trial

    def is_over(self) -> bool:
        """Returns whether all trials had ended, whichever machine ran them, when `next` looked last."""
        return self._is_over

    def lost(self) -> set[int]:
        """Returns the numbers of trials that another machine has taken from this one since the last call."""
        return self._leases.lost()

    def hand_back(self) -> None:
        """Lets other machines take the trials of this one at once."""
        self._leases.hand_back()
