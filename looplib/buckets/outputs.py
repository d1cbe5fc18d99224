"""What processes that do not train write into a run in an object store: evaluations, predictions and exports.

The records of a training and of each evaluation job are objects of their own, because a store cannot append. Whoever
fetches the run adds the records of `evaluations/<job>/` to its local files.
"""

import json
import os
import re
import secrets
from collections.abc import Hashable, Iterable

from looplib.base import files, folders
from looplib.buckets import held
from looplib.buckets.held import HeldFolders
from looplib.buckets.note import LocalCopy
from looplib.run import lock
from looplib.run.records import Record, RecordFile, each_record
from looplib.stores.stores import Store

_RECORDS = ("metrics.jsonl", "media.jsonl")
FOLDER = "evaluations"
IDS = ("mlflow.id", "wandb.id")  # of tracked runs, which a job adds to
_OF_THE_TRAINING = (*_RECORDS, *IDS, "metrics.voided.jsonl", "media.voided.jsonl", "run.json", "config.yaml",
                    "code.diff", "report.html", "train/", "csv/", "alerts.log")  # fmt: skip
_MOST_JOBS = 10_000


def of_jobs(names: Iterable[str]) -> list[str]:
    """Returns which of the names of a run's files are of records of evaluation jobs, the oldest first."""
    found = []
    for name in names:
        parts = name.split("/")
        if len(parts) == 3 and parts[0] == FOLDER and parts[2] in _RECORDS:
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
    for file in _RECORDS:
        path = copy.path(file)
        known = {_key(record): record for record in each_record(path)}
        more: dict[Hashable, Record] = {}
        for name in (name for name in names if name.endswith(f"/{file}") and newest([name]) > since):
            found = {_key(record): record for record in each_record(copy.path(name))}
            replaces = newest([name]) > known_jobs
            more.update({key: record for key, record in found.items() if replaces or key not in known})
        if new := [record for key, record in more.items() if known.get(key) != record]:
            to = RecordFile(path, _key)
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
        self._own: dict[str, list[Record]] = {name: [] for name in _RECORDS}
        self._seen: dict[str, set[str]] = {}
        self.note_fetched()

    def note_fetched(self) -> None:
        """Notes which records are not this process's own; called whenever the store has been looked at."""
        for name in _RECORDS:
            self._seen[name] = {_text(record) for record in each_record(self._copy.path(name))}

    def copy(self, patience: float) -> None:
        """Copies what is new, unless a training of this machine works in the directory, which copies most of it too.

        Raises:
          LockedError: if another process has taken a folder.
          StoreError: if the store does not answer.
        """
        holder = lock.holder(self._copy.directory)
        trains = holder is not None and bool(holder.holds)
        for file in () if trains else _RECORDS:
            self._gather(file)
        sent = False
        for name in sorted(self._copy.changed(), key=held.is_index):
            of_training = not name.startswith(held.FOLDERS) if trains else name.startswith(_OF_THE_TRAINING)
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
        new = [record for record in each_record(self._copy.path(file)) if _text(record) not in self._seen[file]]
        if new:
            self._own[file] += new
            self._seen[file].update(map(_text, new))
            text = "".join(f"{_text(record)}\n" for record in self._own[file])
            files.write_whole(os.path.join(folders.make_folder(self._copy.directory, FOLDER, self._job), file), text)


def _key(record: Record) -> Hashable:
    return record["step"], record["split"], str(record.get("name"))


def _text(record: Record) -> str:
    return json.dumps(record)
