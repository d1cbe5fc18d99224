"""Leases of trials in the database of a sweep: one machine at a time has a trial.

A lease is a row, by the number of the trial, in a table beside Optuna's. A machine counts its rows up while it lives.
Another one takes a trial by adding a row where there is none, or by changing one that was handed back, or that it has
not seen counted up for `SECONDS`; the database lets one of several do so. A machine that could not count up for half of
that time ends its runs, before another one may begin them.
"""

import dataclasses
import secrets
import threading
import time

import sqlalchemy
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from looplib.extras.buckets import lease
from looplib.extras.sweep.database import LEASES

SECONDS = 2 * lease.SECONDS  # half of it is for the database to be restarted, and for runs to be saved and ended
_EVERY = SECONDS / 12  # seconds between two signs of life


@dataclasses.dataclass(frozen=True)
class _Seen:
    """A lease as it was read; `since` is when it was first seen so."""

    owner: str
    beat: int
    since: float


class Leases:
    """The leases of a study's trials, those of this machine among them; a thread counts these up until `hand_back`.

    Args:
      engine: of the database.
      study: Optuna's number of the study.

    Attributes:
      sure_until: the time of `time.monotonic` up to which no other machine can have taken a trial of this one.
      ending: set once the trials are handed back.
    """

    def __init__(self, engine: sqlalchemy.Engine, study: int) -> None:
        self._engine, self._study, self._of_study = engine, study, LEASES.c.study_id == study
        self._me = secrets.token_hex(8)
        self._mine = LEASES.c.owner == self._me
        self._held: set[int] = set()
        self._lost: set[int] = set()
        self._seen: dict[int, _Seen] = {}
        self._asked = self._looked = self.sure_until = time.monotonic()
        self._changing, self.ending = threading.Lock(), threading.Event()
        self.refresh()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        while not self.ending.wait(_EVERY):
            try:
                self.refresh()
            except SQLAlchemyError:  # `lost` raises it, once that has lasted too long
                continue

    def refresh(self) -> None:
        """Counts the leases of this machine up, and reads all.

        Raises:
          SQLAlchemyError: if the database does not answer.
        """
        begun, held = time.monotonic(), set(self._held)
        with self._engine.begin() as connection:
            connection.execute(LEASES.update().where(self._of_study, self._mine).values(beat=LEASES.c.beat + 1))
            columns = sqlalchemy.select(LEASES.c.number, LEASES.c.owner, LEASES.c.beat)
            rows = connection.execute(columns.where(self._of_study)).all()
        now = time.monotonic()
        with self._changing:
            # Who has not looked for a while cannot tell machines that ended from a database that did not answer.
            known = self._seen if begun < self._looked + SECONDS / 3 else {}
            self._seen = {}
            for number, owner, beat in rows:
                before = known.get(number)
                is_equal = before is not None and (before.owner, before.beat) == (owner, beat)
                self._seen[number] = before if is_equal else _Seen(owner, beat, now)
            mine = {number for number, owner, _ in rows if owner == self._me}
            self._lost |= held - mine
            self._asked, self._looked, self.sure_until = begun, now, max(self.sure_until, begun + SECONDS / 2)

    def take(self, number: int) -> bool:
        """Takes a trial that no machine has, as far as the last `refresh` has seen; returns whether it did."""
        with self._changing:
            seen, asked = self._seen.get(number), self._asked
        if number in self._held:
            return False
        if seen is None:
            statement = LEASES.insert().values(study_id=self._study, number=number, owner=self._me, beat=0)
        elif not seen.owner or asked - seen.since > SECONDS:
            unchanged = (LEASES.c.number == number, LEASES.c.owner == seen.owner, LEASES.c.beat == seen.beat)
            statement = LEASES.update().where(self._of_study, *unchanged).values(owner=self._me, beat=seen.beat + 1)
        else:
            return False
        try:
            with self._engine.begin() as connection:
                result = connection.execute(statement)
                if seen is not None and result.rowcount != 1:  # it was changed in the meantime
                    return False
        except IntegrityError:  # another machine has added it
            return False
        with self._changing:
            self._held.add(number)
        return True

    def lost(self) -> set[int]:
        """Returns the trials that another machine has taken from this one since the last call.

        Raises:
          SQLAlchemyError: if the database has not answered for so long that nobody can say.
        """
        if time.monotonic() > self.sure_until:
            self.refresh()
        with self._changing:
            found, self._lost = self._lost & self._held, set()
            self._held -= found
        return found

    def hand_back(self) -> None:
        """Lets other machines take the trials of this one at once, if the database answers."""
        self.ending.set()
        self._thread.join()
        try:
            with self._engine.begin() as connection:
                connection.execute(LEASES.update().where(self._of_study, self._mine).values(owner=""))
        except SQLAlchemyError:
            return  # they are free after `SECONDS`
