"""Folders of a run in a store that one process at a time writes, as a whole: predictions and exports.

A process holds a lease of each folder that it writes, so that the files of two machines are never in one.
"""

import os
import threading
from collections.abc import Callable, Iterable

from absl import logging

from looplib.base import folders
from looplib.buckets.lease import Lease
from looplib.buckets.note import EARLIER, LocalCopy
from looplib.errors import LockedError
from looplib.run import lock
from looplib.run.lock import LockKind
from looplib.stores.stores import Store

FOLDERS = ("predictions/", "export/")
_INDEXES = ("/_index.json", "/export.json")  # which are copied after what they list
LEASES = ".jobs"


class HeldFolders:
    """The folders that this process writes.

    Args:
      store: where the run is.
      copy: its local directory.

    Attributes:
      lost: errors of folders that another process has taken, by their names.
    """

    def __init__(self, store: Store, copy: LocalCopy) -> None:
        self._store, self._copy = store, copy
        self._leases: dict[str, Lease] = {}
        self._whole: dict[str, str] = {}  # indexes that are copied, by folder
        self._replaced: dict[str, set[str]] = {}  # what the store had before, by folder
        self._released = threading.Event()
        self.lost: dict[str, LockedError] = {}

    def take(self, name: str, fetch: Callable[[str], object] | None) -> None:
        """Keeps other processes from a folder until `release`, and has it here be as it is in the store.

        Args:
          name: of the folder in the run directory.
          fetch: copies a file of a name from the store; None for a folder that is replaced as a whole.

        Raises:
          LockedError: if another process has it.
        """
        if name not in self._leases:
            kind = LockKind(f"folder {name} of the run", "name another directory")
            lease = self._leases[name] = Lease(self._store, kind, f"{LEASES}/{name}")
            threading.Thread(target=lease.keep, args=(self._released,), daemon=True).start()
        there, known, versions = self._store.listed(name), self._copy.note.known, self._copy.note.versions
        index = next((f"{name}{ending}" for ending in _INDEXES if f"{name}{ending}" in there), "")
        version = there[index].version if index else ""
        is_ours = version == versions.get(name, "")  # else another machine has written it, or somebody removed it
        for each in [each for each in known if each.startswith(f"{name}/")]:
            if not is_ours or each not in there or there[each].bytes != known[each][0]:
                del known[each]  # to be copied again
        self._replaced[name] = set(there)
        if fetch is not None:
            if not is_ours and os.path.lexists(self._copy.path(name)):
                self._copy.keep(self._copy.folder(EARLIER))
                parent, last = os.path.split(self._copy.path(name))
                folders.move(parent, last, folders.make_folder(self._copy.folder(EARLIER), *name.split("/")[:-1]))
                self._copy.settle(self._copy.note, there.__contains__)
            for each in there if version else ():
                if not os.path.lexists(self._copy.path(each)):
                    fetch(each)
        versions[name] = version
        self._note()

    def take_for(self, names: Iterable[str]) -> bool:
        """Takes the folders of files that are to be copied, where nobody has them; returns whether it took one.

        For a training, which does not wait for the store when it predicts or exports.
        """
        taken = False
        for folder in {_folder_of(name) for name in names} - {None, *self._leases, *self.lost}:
            try:
                self.take(folder, None)
                taken = True
            except LockedError as error:
                logging.log_every_n_seconds(logging.ERROR, "%s is not copied: %s", 60, folder, error)
        return taken

    def check(self, name: str, patience: float) -> None:
        """Raises `LockedError` if another process has taken the folder of a file."""
        if (folder := _folder_of(name)) in self._leases:
            self._leases[folder].check(patience, surely=is_index(name))

    def may_send(self, name: str, patience: float) -> bool:
        """Returns whether this process may write a file into the store: of no such folder, or of one that it holds."""
        folder = _folder_of(name)
        if folder is None or folder in self.lost:
            return folder is None
        try:
            self.check(name, patience)
        except LockedError as error:
            self.lost[folder] = error
            logging.error("%s is not copied: %s", folder, error)
            return False
        if is_index(name):
            self._whole[folder] = name
        return folder in self._leases

    def sent(self, patience: float) -> None:
        """Ends a copy: deletes what the store had of a folder before, where this process has replaced the index."""
        for folder, index in self._whole.items():
            self._leases[folder].check(patience, surely=True)
            self._store.delete(self._replaced[folder] - self._copy.note.known.keys(), patience)
            self._replaced[folder].clear()
            self._copy.note.versions[folder] = self._store.look_up(index, patience).version
        if self._whole:
            self._whole.clear()
            self._note()

    def release(self, patience: float) -> None:
        """Lets other processes write the folders."""
        self._released.set()
        for name in [name for name in self._leases if name not in self.lost]:
            self._leases.pop(name).release(patience)

    def _note(self) -> None:
        holder = lock.holder(self._copy.directory)
        if not (holder and holder.holds):  # else a training of this machine has its own note
            self._copy.write_note()


def _folder_of(name: str) -> str | None:
    """Returns the folder that is written as a whole, of a file in it; None for any other file."""
    parts = name.split("/")
    return "/".join(parts[:2]) if name.startswith(FOLDERS) and len(parts) > 2 else None


def is_index(name: str) -> bool:
    """Returns whether a file lists others of its folder, and so is copied after them; a key to sort by."""
    return name.endswith(_INDEXES)
