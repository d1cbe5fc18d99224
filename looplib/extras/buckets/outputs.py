"""What processes that do not train write into a run in an object store: evaluations, predictions and exports.

The records of a training and of each evaluation job are objects of their own, because a store cannot append. Whoever
fetches the run adds the records of `evaluations/<job>/` to its local files.
"""

import json
import os
import secrets
import time
from collections.abc import Hashable, Iterable

from looplib import files, folders
from looplib.checkpoint import lock
from looplib.extras.buckets.note import LocalCopy
from looplib.extras.buckets.stores import Store
from looplib.report.records import Record, RecordFile, each_record

_RECORDS = ("metrics.jsonl", "media.jsonl")
FOLDER = "evaluations"
_OF_THE_TRAINING = (*_RECORDS, "metrics.voided.jsonl", "media.voided.jsonl", "run.json", "config.yaml", "code.diff",
                    "report.html", "train/")  # fmt: skip
_REPLACED = ("predictions/", "export/")
_MOST_JOBS = 10_000


def of_jobs(names: Iterable[str]) -> list[str]:
    """Returns which of the names of a run's files are of records of evaluation jobs, the oldest first."""
    found = []
    for name in names:
        parts = name.split("/")
        if len(parts) == 3 and parts[0] == FOLDER and parts[2] in _RECORDS:
            found.append(name)
    return sorted(found)[-_MOST_JOBS:]


def merge(copy: LocalCopy, names: Iterable[str]) -> list[str]:
    """Adds the records of evaluation jobs to those that are in the run directory, where their keys are free.

    Args:
      copy: the local run directory.
      names: what `of_jobs` has found there.

    Returns:
      The names of the files that have more records now.
    """
    changed = []
    for file in _RECORDS:
        path = copy.path(file)
        known = {_key(record) for record in each_record(path)}
        more: dict[Hashable, Record] = {}
        for name in (name for name in names if name.endswith(f"/{file}")):
            more.update({_key(record): record for record in each_record(copy.path(name))})
        missing = [record for key, record in more.items() if key not in known]
        if missing:
            to = RecordFile(path, _key)
            for record in missing:
                to.write(record)
            changed.append(file)
    return changed


class Outputs:
    """Copies what a process that does not train has written, without a lease: nobody else writes these objects.

    Args:
      store: where the run is.
      copy: its local directory, as fetched.
    """

    def __init__(self, store: Store, copy: LocalCopy) -> None:
        self._store, self._copy = store, copy
        self._job = f"{int(time.time()):011}-{secrets.token_hex(4)}"
        self._own: dict[str, list[Record]] = {name: [] for name in _RECORDS}
        self._seen: dict[str, set[str]] = {}
        self.note_fetched()

    def note_fetched(self) -> None:
        """Notes which records are not this process's own; called whenever the store has been looked at."""
        for name in _RECORDS:
            self._seen[name] = {_text(record) for record in each_record(self._copy.path(name))}

    def copy(self, patience: float) -> None:
        """Copies what is new, unless a training of this machine works in the directory, which copies it too.

        Raises:
          StoreError: if the store does not answer.
        """
        holder = lock.holder(self._copy.directory)
        if holder and holder.holds:
            return
        for file in _RECORDS:
            self._gather(file)
        sent = False
        for name in list(self._copy.changed()):
            if not name.startswith(_OF_THE_TRAINING):
                found = os.stat(self._copy.path(name))
                self._store.put(self._copy.path(name), name, patience)
                self._copy.remember(name, found)
                sent = True
        if self.delete_what_is_gone(patience) or sent:
            self._copy.write_note()

    def delete_what_is_gone(self, patience: float) -> bool:
        """Deletes from the store what was here of predictions and exports, and was removed or replaced; whether any."""
        known = self._copy.note.known
        gone = [name for name in known if name.startswith(_REPLACED) and not os.path.lexists(self._copy.path(name))]
        self._store.delete(gone, patience)
        for name in gone:
            del known[name]
        return bool(gone)

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
