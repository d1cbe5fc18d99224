"""The copy of a run in an object store: the files of a checkpoint, what the run has reported until then, its marker.

What the run has deleted is deleted there too. What is only not here any more stays there.
"""

import contextlib
import functools
import os
import re
import secrets
import time
from collections.abc import Hashable, Iterable, Iterator

from looplib.base import files, folders
from looplib.buckets import lease
from looplib.buckets.lease import HeldFolders, Lease, is_index
from looplib.buckets.note import CHECKPOINTS, MARKER, OUTGOING, LocalCopy, marker_of, steps_of
from looplib.errors import RunDirectoryError
from looplib.run import commits, lock
from looplib.run.directory import EVAL_JSON, METRICS, PAGE, RECORDS, REPORTS
from looplib.run.records import Record, RecordLog, RecordWriter, aside_of
from looplib.stores.stores import Store

EVERY = 30.0  # seconds from one copy of what the run reports to the next
_RECORDS = METRICS  # to which the run adds lines, and whose last ones it may remove
_BYTES_A_SECOND = 1 << 20  # a larger file that grows waits longer


class Copier:
    """Copies a local run directory into a store, one pass at a time.

    Args:
      store: where the run is.
      copy: the `LocalCopy`.
      lease: of this writer, which is asked before anything is written.
      folders_held: the folders of predictions and exports that it holds.
    """

    def __init__(self, store: Store, copy: LocalCopy, lease: Lease, folders_held: HeldFolders) -> None:
        self._store, self._copy, self._lease, self._held = store, copy, lease, folders_held
        self._sent_at: dict[str, float] = {}
        self._next_reports = 0.0

    def copy(self, everything: bool, patience: float) -> None:
        """Copies new checkpoints, the newest first, now and then what else has changed, and deletes what the run has.

        Args:
          everything: whether files that were copied a short time ago are copied again.
          patience: seconds to wait for the store at each request.

        Raises:
          LockedError: if another writer has taken the run.
          RunDirectoryError: if the local directory was moved or removed.
          StoreError: if the store does not answer.
        """
        self._copy.check()
        for step in self.missing():
            self._copy_checkpoint(step, patience)
        if everything or time.monotonic() > self._next_reports:
            self._copy_reports(everything, patience)
            self._delete(patience)
            self._next_reports = time.monotonic() + EVERY

    def missing(self) -> list[int]:
        """Returns the steps of the checkpoints that the store does not have as they are here, the newest first."""
        return [step for step in self._copy.steps() if self._copy.has_changed(marker_of(step))]

    def _copy_checkpoint(self, step: int, patience: float) -> None:
        marker, deletions = marker_of(step), self._copy.deletions.count
        with self._linked(os.path.join(self._copy.checkpoints, f"ckpt-{step}")) as linked:
            if not linked:  # the run has deleted it
                return
            new = [name for name in linked if name != marker and self._copy.has_changed(name, linked[name])]
            if new and marker in self._copy.note.known:  # saved again after a rollback
                self._store.delete([marker], patience, functools.partial(self._check, patience))
                del self._copy.note.known[marker]
            for name in new:
                self._send(name, linked[name], patience, deletions)
            self._copy_reports(True, patience)
            self._check(patience, surely=True)
            self._send(marker, linked[marker], patience, deletions)
        self._lease.steps = sorted({*self._lease.steps, step})
        self._lease.write(patience)
        self._copy.write_note()

    @contextlib.contextmanager
    def _linked(self, path: str) -> Iterator[dict[str, str]]:
        """Yields paths of a checkpoint's files, by name, which stay while the run deletes it; none if it is gone."""
        outgoing = self._copy.folder(OUTGOING)
        for name in os.listdir(outgoing):  # of a start that was killed
            folders.remove(outgoing, name)
        linked: dict[str, str] = {}
        try:
            with contextlib.suppress(FileNotFoundError):
                for name in (*commits.read_marker(path).files, os.path.basename(path) + MARKER):
                    folders.link(self._copy.checkpoints, name, outgoing)
                    linked[f"{CHECKPOINTS}/{name}"] = os.path.join(outgoing, name)
            complete = any(name.endswith(MARKER) for name in linked)  # the last
            yield linked if complete else {}
        finally:
            for place in linked.values():
                folders.remove(outgoing, os.path.basename(place))

    def _copy_reports(self, everything: bool, patience: float) -> None:
        names = list(self._changed(everything))
        if self._held.take_for(names):  # all of such a folder is to be copied
            names = list(self._changed(True))
        for name in sorted(names, key=is_index):
            if self._held.may_send(name, patience):
                self._send(name, self._copy.path(name), patience, self._copy.deletions.count)
        self._held.sent(patience)

    def _changed(self, everything: bool) -> Iterator[str]:
        """Yields the names of files outside of the checkpoints that are to be copied now; large ones less often."""
        for name in self._copy.changed():
            wait = os.path.getsize(self._copy.path(name)) / _BYTES_A_SECOND
            if everything or time.monotonic() - self._sent_at.get(name, 0.0) > wait:
                yield name

    def _delete(self, patience: float) -> None:
        """Deletes what the run has deleted."""
        known, deletions = self._copy.note.known, self._copy.deletions
        kept, count = self._last_resort(), deletions.count
        gone = [name for name in known if deletions.has(name) and not os.path.lexists(self._copy.path(name))]
        gone = [name for name in gone if not name.startswith(kept)]
        if not gone:
            deletions.forget(known, count)
            return
        self._check(patience, surely=True)
        markers = {name for name in gone if name.endswith(MARKER)}
        self._lease.steps = [step for step in self._lease.steps if marker_of(step) not in markers]
        for name in sorted(gone, key=lambda name: name not in markers):  # no marker without its files
            self._store.delete([name], patience, functools.partial(self._check, patience))
            del known[name]
        self._copy.write_note()
        deletions.forget(known, count)

    def _check_beginning(self, path: str) -> None:
        """Raises `RunDirectoryError` if records have lost their first ones, as where somebody removes the directory."""
        first, before = next((record.step for record in RecordLog(path)), None), self._copy.note.first
        lost = None not in (first, before) and first > before
        if lost and all(record.step != before for record in RecordLog(aside_of(path))):  # no resume has taken it out
            raise RunDirectoryError(
                f"{path} begins with step {first:,}, and with step {before:,} in the store, so that somebody has "
                "removed or changed it; the store keeps what it has: remove the local run directory, and run the same "
                "command again, which continues from the store"
            )
        self._copy.note.first = before if first is None else first

    def _check(self, patience: float, surely: bool = False) -> None:
        """Raises an error if nothing may be written or deleted any more, see `LocalCopy.check` and `Lease.check`."""
        self._copy.check()
        self._lease.check(patience, surely)

    def _last_resort(self) -> tuple[str, ...]:
        """Returns how the names of a checkpoint begin that the store needs, although the run has deleted it.

        That is the newest one there, until the run's newest is there too.
        """
        here = self._copy.steps()
        there = steps_of(self._copy.note.known)
        if not there or (here and here[0] not in self.missing()):
            return ()
        return (f"{CHECKPOINTS}/ckpt-{there[0]}.",)

    def _send(self, name: str, path: str, patience: float, deletions: int) -> None:
        """Copies a file as it is now, after so many deletions; one that was removed meanwhile is left out."""
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(path)
            if name == _RECORDS:
                self._check_beginning(path)
            self._store.put(path, name, patience, functools.partial(self._check, patience))
            self._copy.remember(name, found, deletions)
            self._sent_at[name] = time.monotonic()


FOLDER = "evaluations"
IDS = ("mlflow.id", "wandb.id")  # of tracked runs, which a job adds to
_OF_THE_TRAINING = (*(name for name in REPORTS if name != EVAL_JSON), *IDS, PAGE, "train/", "csv/", "alerts.log")
_MOST_JOBS = 10_000


def of_jobs(names: Iterable[str]) -> list[str]:
    """Returns which of the names of a run's files are of records of evaluation jobs, the oldest first."""
    found = []
    for name in names:
        parts = name.split("/")
        if len(parts) == 3 and parts[0] == FOLDER and parts[2] in RECORDS:
            found.append(name)
    return sorted(found)[-_MOST_JOBS:]


def newest(names: Iterable[str]) -> str:
    """Returns the newest job among the names of files, which are those that `of_jobs` returns; "" for none."""
    return max((name.split("/")[1] for name in names), default="")


def merge(copy: LocalCopy, names: Iterable[str], since: str, known_jobs: str) -> list[str]:
    """Adds the records of evaluation jobs to those that are in the run directory.

    Those of jobs that began after the records there were written replace records of their keys; others fill gaps.

    Args:
      copy: the local run directory.
      names: what `of_jobs` has found there.
      since: the newest job of an earlier run at this place, whose records are not of this run; "" for none.
      known_jobs: the newest job whose records a training has had.

    Returns:
      The names of the files that have more records now.
    """
    changed = []
    for file in RECORDS:
        path = copy.path(file)
        known = {_key(record): record for record in RecordLog(path)}
        more: dict[Hashable, Record] = {}
        for name in (name for name in names if name.endswith(f"/{file}") and newest([name]) > since):
            found = {_key(record): record for record in RecordLog(copy.path(name))}
            replaces = newest([name]) > known_jobs
            more.update({key: record for key, record in found.items() if replaces or key not in known})
        if new := [record for key, record in more.items() if known.get(key) != record]:
            to = RecordWriter(path, _key)
            for record in new:
                to.write(record)
            changed.append(file)
    return changed


class Outputs:
    """Copies what a process that does not train has written. Nobody else writes these objects, or it holds a lease.

    Args:
      store: where the run is.
      copy: its local directory, as fetched.
      held: the folders that it holds.
      known: the newest jobs that are known.
    """

    def __init__(self, store: Store, copy: LocalCopy, held: HeldFolders, known: Iterable[str]) -> None:
        self._store, self._copy, self._held = store, copy, held
        # A number that counts up, and no time: the clocks of two machines differ.
        number = max((int(found[0]) for job in known if (found := re.match(r"\d{11}(?=-)", job))), default=0) + 1
        self._job = f"{number:011}-{secrets.token_hex(4)}"
        self._own: dict[str, list[Record]] = {name: [] for name in RECORDS}
        self._seen: dict[str, set[str]] = {}
        self.note_fetched()

    def note_fetched(self) -> None:
        """Notes which records are not this process's own; called whenever the store has been looked at."""
        for name in RECORDS:
            self._seen[name] = {record.line for record in RecordLog(self._copy.path(name))}

    def copy(self, patience: float) -> None:
        """Copies what is new, unless a training of this machine works in the directory, which copies most of it too.

        Raises:
          LockedError: if another process has taken a folder.
          StoreError: if the store does not answer.
        """
        holder = lock.holder(self._copy.directory)
        trains = holder is not None and bool(holder.holds)
        for file in () if trains else RECORDS:
            self._gather(file)
        sent = False
        for name in sorted(self._copy.changed(), key=lease.is_index):
            of_training = not name.startswith(lease.FOLDERS) if trains else name.startswith(_OF_THE_TRAINING)
            if of_training or not self._held.may_send(name, patience):
                continue
            found = os.stat(self._copy.path(name))
            self._store.put(self._copy.path(name), name, patience, lambda name=name: self._held.check(name, patience))
            self._copy.remember(name, found)
            sent = True
        self._held.sent(patience)
        if sent and not trains:
            self._copy.write_note()
        for error in self._held.lost.values():
            raise error

    def _gather(self, file: str) -> None:
        """Writes the records of this process into a file of its own."""
        new = [record for record in RecordLog(self._copy.path(file)) if record.line not in self._seen[file]]
        if new:
            self._own[file] += new
            self._seen[file].update(record.line for record in new)
            text = "".join(record.line for record in self._own[file])
            files.write_whole(os.path.join(folders.make_folder(self._copy.directory, FOLDER, self._job), file), text)


def _key(record: Record) -> Hashable:
    return (*record.key, str(record.values.get("name")))
