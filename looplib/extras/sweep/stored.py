"""A sweep in an object store: a local directory that is copied there.

Each run of a trial copies its own directory, see `looplib.extras.buckets.mirror`. What is copied here is beside them:
the database, the results and what the runs print. A run is started only once the store has the database with its trial,
so that a start on another machine knows of each run that the store can have.
"""

import contextlib
import functools
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from absl import logging

from looplib import folders
from looplib.errors import FileError, LockedError, StoreError, SweepError, UsageError
from looplib.extras.buckets import lease as leases
from looplib.extras.buckets import stores
from looplib.extras.buckets.copies import fetch_runs
from looplib.extras.buckets.copying import EVERY
from looplib.extras.buckets.fetching import Fetcher
from looplib.extras.buckets.lease import Lease
from looplib.extras.buckets.note import OUTGOING, LocalCopy, steps_of
from looplib.extras.buckets.stores import Store, StoredFile
from looplib.extras.sweep.place import FILE, LOCKED, Place
from looplib.extras.sweep.study import MOST_BYTES
from looplib.extras.tools.runs import say
from looplib.masks import masked_text
from looplib.messages import gist, join_names

_LEASE = ".sweep"  # the folder of the leases; that of a run's would have readers take the sweep for a run
_RESULTS = ("results.csv", "results.txt", "results.png")
_LOG = re.compile(r"trial-\d{4,}(/seed-\d+)?\.log")
_OF_A_TRIAL = re.compile(r"trial-\d{4,}/")
_TICK, _LONGEST_TICK = 0.5, 15.0  # seconds between two looks at the local directory; the longer while the store fails
_LAST = 600.0  # seconds that the end of a sweep waits for the store
_BYTES_A_SECOND = 1 << 20  # a larger log waits longer
_PASSING = (StoreError, FileError, OSError, sqlite3.Error)  # what the store says, or this machine lacks; tried again


class StoredPlace(Place):
    """The local directory of a sweep in an object store, in the cache.

    Args:
      url: the directory of the sweep in the store.
      signals: returns how many signals have asked the sweep to end.
    """

    stored = True

    def __init__(self, url: str, signals: Callable[[], int]) -> None:
        self._begun = 0  # a first signal ends a start; later, it has the runs save, and a second one ends that
        self._store = Store(url, lambda: signals() > self._begun)
        super().__init__(stores.cache("sweeps", self._store.url))
        self.shown = masked_text(self._store.url)
        self._steps: dict[str, int] = {}  # of the newest checkpoint in the store at the start, by run
        self._noted = self._copied = 0
        self._error, self._told = "", False
        self._lost: UsageError | None = None  # another sweep has the place, or a thread has ended
        self._next = 0.0
        self._sent_at: dict[str, float] = {}
        self._awake, self._ending = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def prepare(self) -> None:
        """Notes whose copy the directory is, before anything else is written there."""
        self._copy = LocalCopy(self._store.url, self.directory, self._replaced)
        self._fetcher = Fetcher(self._store, self._copy)
        if not os.path.lexists(os.path.join(self.directory, LOCKED.name)):  # else a sweep may be writing it
            self._copy.write_note()

    def __enter__(self) -> Place:
        """Takes the lease, fetches what a start needs, and begins to copy.

        Raises:
          UsageError: if another sweep has the place, or the store does not answer.
        """
        self._lease = Lease(self._store, LOCKED, _LEASE)
        try:
            self._copy.move_back()
            self._copy.note = self._copy.read_note()
            token = self._copy.note.token
            if not token or token != self._lease.before.get("token") or not os.path.exists(self._copy.path(FILE)):
                with self._copy.replaced() as before:
                    there = self._start_over()
                self._copy.settle(before, there.__contains__)
            self._copy.note.token = self._lease.token
            self._copy.write_note()
        except BaseException:
            with contextlib.suppress(StoreError, FileError):
                self._lease.withdraw(0.0)
            raise
        self._begun = 1
        self._threads = [
            threading.Thread(target=self._watched, args=(work,), daemon=True) for work in (self._work, self._renew)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def _replaced(self) -> list[str]:
        """Returns the names of what a start replaces by that of the store."""
        names = os.listdir(self.directory)  # also a journal, which belongs to the database that goes
        return [name for name in names if name.startswith(FILE) or name in _RESULTS or _LOG.fullmatch(name)]

    def _start_over(self) -> dict[str, StoredFile]:
        """Fetches the sweep as the store has it, for an empty directory; returns what the store has, by name."""
        there = self._store.listed()
        with contextlib.suppress(FileNotFoundError):
            found = self._store.look_up(FILE).bytes  # also where the listing is old
            if found > MOST_BYTES:
                raise SweepError(
                    f"{self.shown}/{FILE} has {found:,} bytes; expected at most {MOST_BYTES:,}; restore a copy, or "
                    "move it away"
                )
            self._fetcher.fetch(FILE)
        of_trials = {name: file for name, file in there.items() if _OF_A_TRIAL.match(name)}
        runs = fetch_runs(self._store, of_trials, self.directory, checkpoints=False)
        self._steps = {run: max(steps_of(objects), default=0) for run, objects in runs.items()}
        return there

    def flags(self, folder: str) -> list[str]:
        """Returns the flags by which a run has its run directory, and its local one in that of the sweep."""
        return [f"--model_dir={self._store.url}/{self._name(folder)}", f"--local_dir={folder}"]

    def _name(self, folder: str) -> str:
        return os.path.relpath(folder, self.directory)

    def take(self, folder: str) -> int:
        """Fetches what is beside a run that continues; returns the step of its newest checkpoint in the store."""
        name = self._name(folder)
        if name in self._steps and not os.path.lexists(f"{folder}.log"):
            self._fetcher.fetch(f"{name}.log")  # which goes on there
        return self._steps.get(name, 0)

    def note(self) -> int:
        """Has the database copied, which has changed; returns a number for `has`."""
        self._noted += 1
        self._awake.set()
        return self._noted

    def has(self, noted: int) -> bool:
        """Returns whether the database was copied since it was noted; says once why not."""
        if self._copied >= noted:
            self._told = False
            return True
        if self._error and not self._told:
            self._told = True
            say(f"sweep: runs that are under way go on, and others wait for the store: {self._error}")
        return False

    def check(self) -> None:
        """Raises `LockedError` if another sweep has taken the place, and `SweepError` if the copy has ended."""
        if self._lost:
            raise self._lost

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Copies what is missing, and lets other sweeps in; after an error, only if the store answers soon.

        Raises:
          StoreError: if the store did not take all of it in time; the local directory has it.
        """
        self._ending.set()
        self._awake.set()
        for thread in self._threads:
            thread.join()
        patience = _LAST if error is None else leases.SECONDS / 4
        try:
            self.check()
            if self._noted:  # else nobody has looked at the database
                self._copy_new(True, patience)
            self._release(patience)
        except (LockedError, SweepError, *_PASSING) as failed:
            if error is not None:
                return  # that is what the user should know
            if failed is self._lost or isinstance(failed, LockedError):
                raise
            missing = join_names([name for name in (FILE, *self._names()) if self._copy.has_changed(name)])
            raise StoreError(
                f"{failed}; what is missing in {self.shown} ({missing or 'only the end of the lease'}) is in "
                f"{self.directory}, and the same command copies it"
            ) from failed
        finally:
            self._copy.write_note()

    def _watched(self, work: Callable[[], None]) -> None:
        """Does the work of a thread; an error that nobody expected ends the sweep."""
        try:
            work()
        except Exception as error:
            logging.exception("the copy in %s has ended", self.shown)
            text = f"{type(error).__name__}: {masked_text(gist(error))}"
            self._lost = SweepError(
                f"the copy in {self.shown} has ended by an error ({text}); the same command continues from it"
            )

    def _work(self) -> None:
        """Copies until the end."""
        tick = _TICK
        while not self._ending.is_set():
            self._awake.wait(tick)
            self._awake.clear()
            try:
                if self._noted != self._copied or (self._noted and time.monotonic() > self._next):
                    self._copy_new(False, leases.SECONDS / 4)
                self._error, tick = "", _TICK
            except LockedError as error:
                self._lost = error
                return
            except _PASSING as error:
                self._error, tick = str(error), min(2 * tick, _LONGEST_TICK)
                logging.log_every_n_seconds(logging.WARNING, "%s", 60, error)

    def _renew(self) -> None:
        """Renews the lease until the end."""
        self._lost = self._lease.keep(self._ending) or self._lost

    def _check_lease(self, patience: float, surely: bool = False) -> None:
        """Raises `LockedError` if another sweep has taken the place, see `Lease.check`."""
        self._lease.check(patience, surely)

    def _release(self, patience: float) -> None:
        """Lets other sweeps in."""
        self._lease.release(patience)

    def _copy_new(self, everything: bool, patience: float) -> None:
        """Copies what has changed, the database first.

        Raises:
          LockedError: if another sweep has taken the place.
          StoreError: if the store does not answer.
        """
        noted = self._noted
        self._check_lease(patience, surely=True)
        # Times of change have ticks of some milliseconds.
        if not self.shared and (noted != self._copied or self._copy.has_changed(FILE)):
            self._send(FILE, patience)
        self._copied = noted
        for name in filter(self._copy.has_changed, self._names()):
            wait = os.path.getsize(self._copy.path(name)) / _BYTES_A_SECOND
            if everything or time.monotonic() - self._sent_at.get(name, 0.0) >= wait:
                self._send(name, patience)
        self._copy.write_note()
        self._next = time.monotonic() + EVERY

    def _names(self) -> Iterator[str]:
        """Yields the names of what is copied here beside the database; some may not be there."""
        yield from _RESULTS
        for place, below, names in os.walk(self.directory):
            folder = os.path.relpath(place, self.directory)
            below[:] = [name for name in below if folder == "." and _OF_A_TRIAL.fullmatch(f"{name}/")]
            found = [name if folder == "." else f"{folder}/{name}" for name in names]
            yield from filter(_LOG.fullmatch, found)

    def _send(self, name: str, patience: float) -> None:
        found = os.stat(self._copy.path(name))
        path = self._backup() if name == FILE else self._copy.path(name)
        self._store.put(path, name, patience, functools.partial(self._check_lease, patience))
        self._copy.remember(name, found)
        self._sent_at[name] = time.monotonic()

    def _backup(self) -> str:
        """Returns the path of a copy of the database between two of its transactions."""
        outgoing = self._copy.folder(OUTGOING)
        folders.remove(outgoing, FILE)
        path = os.path.join(outgoing, FILE)
        with (
            contextlib.closing(sqlite3.connect(self._copy.path(FILE))) as source,
            contextlib.closing(sqlite3.connect(path)) as target,
        ):
            source.backup(target)
        return path


class SharedStoredPlace(StoredPlace):
    """The local directory, in the cache, of a sweep in an object store that several machines run.

    The store has neither the database nor a lease of the sweep: a machine copies the logs of the trials that it has,
    and the results once all trials have ended.
    """

    shared = True

    def __init__(self, url: str, signals: Callable[[], int]) -> None:
        super().__init__(url, signals)
        self._logs: set[str] = set()  # of the trials that this machine has had
        self._has_all = False

    def __enter__(self) -> Place:
        """Begins to copy.

        Raises:
          UsageError: if the store has a sweep of one machine, or does not answer.
        """
        with contextlib.suppress(FileNotFoundError):
            self._store.look_up(FILE)
            raise SweepError(
                f"{self.shown} has the {FILE} of a sweep on one machine; leave out --storage to continue that, or use "
                "another --dir"
            )
        self._begun = 1
        self._threads = [threading.Thread(target=self._watched, args=(self._work,), daemon=True)]
        self._threads[0].start()
        return self

    def mark(self, make: bool = False) -> str:
        """Returns the URL, which is equal on all machines."""
        return self.shown

    def take(self, folder: str) -> int:
        """Fetches the log and the reports of a run that may continue; returns the step of its newest checkpoint."""
        name = self._name(folder)
        self._fetcher.fetch(f"{name}.log")
        self._logs.add(f"{name}.log")
        there = {f"{name}/{file}": found for file, found in self._store.below(name).listed().items()}
        runs = fetch_runs(self._store, there, self.directory, checkpoints=False)
        return max(steps_of(runs.get(name, ())), default=0)

    def has_runs(self) -> bool:
        """Returns whether the store has runs of an earlier sweep, when the study of a new one is made."""
        return any(map(_OF_A_TRIAL.match, self._store.listed()))

    def has(self, noted: int) -> bool:
        """Returns True: the database of the sweep is elsewhere."""
        return True

    def gather(self) -> None:
        """Fetches the metrics of all runs."""
        of_trials = {name: file for name, file in self._store.listed().items() if _OF_A_TRIAL.match(name)}
        fetch_runs(self._store, of_trials, self.directory, checkpoints=False)
        self._has_all = True
        self.note()

    def _names(self) -> Iterator[str]:
        yield from _RESULTS if self._has_all else ()
        yield from list(self._logs)

    def _check_lease(self, patience: float, surely: bool = False) -> None:
        """Does nothing: the database says which machine has a trial."""

    def _release(self, patience: float) -> None:
        """Does nothing, as there is no lease."""
