"""The lease of a run in an object store: one writer at a time, where no operating system holds a lock.

A lease is an object `.lease/<number>`, which a writer creates with the store's conditional write, so that one of two
that try gets it. The highest number is the one that holds. A writer renews its own; whoever finds one that was not
renewed for `SECONDS` while it looked, or whose process is gone, creates the next. The writer asks whether there is a
higher one, or its own is another's, before each commit and each deletion, and before anything else is written unless it
has renewed its own just before; it ends if that is so.
"""

import dataclasses
import functools
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable

from absl import logging

from looplib.base import folders
from looplib.base.decoding import decode, parse_json
from looplib.buckets.note import EARLIER, LocalCopy
from looplib.errors import FileError, LockedError, StoreError
from looplib.masks import masked_text
from looplib.run import lock
from looplib.run.lock import LockKind
from looplib.stores.stores import PATIENCE, Store

SECONDS = 60.0  # alike on all machines
FOLDER = ".lease"
_KEPT = 20  # older leases, which an old listing may show as the newest, and that are counted up from


@dataclasses.dataclass(frozen=True)
class LeaseHolder:
    """The writer of a lease, as it says; "" and the like in one that is damaged.

    Attributes:
      token: what tells it from any other.
      steps: the steps of the checkpoints that it has uploaded.
      jobs: the newest evaluation job whose records it has.
      since: the newest evaluation job of an earlier run at this place.
      pid: its process.
      host: the name of its machine.
      released: whether it has ended.
      boot: what tells the start of its machine, and its container, from others.
      renewed: how often it has written the lease.
    """

    token: str = ""
    steps: list[int] = dataclasses.field(default_factory=list)
    jobs: str = ""
    since: str = ""
    pid: int | None = None
    host: str = ""
    released: bool = False
    boot: str = ""
    renewed: int = 0

    @property
    def is_gone(self) -> bool:
        """Whether it was a process of this machine, and has ended."""
        if self.host != socket.gethostname() or not self.boot == _boot() != "" or self.pid is None:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (PermissionError, OverflowError):
            pass
        return False


class Lease:
    """The lease of a run, held from building it to `release`.

    Args:
      store: where the run is.
      kind: what the lease is of.
      folder: of its objects.

    Attributes:
      token: what tells this writer from any other.
      before: what the lease of the writer before said; None for none.
      steps: the steps of the checkpoints in the store, which the next writer finds here if its listing is old.
      jobs: the newest evaluation job whose records the run has.
      since: the newest evaluation job of an earlier run at this place.

    Raises:
      LockedError: if another writer has it.
    """

    def __init__(self, store: Store, kind: LockKind = LockKind(), folder: str = FOLDER) -> None:
        self.token, self._store, self._kind, self._folder = secrets.token_hex(8), store, kind, folder
        self.before: LeaseHolder | None = None
        self._renewed = 0
        number, self.steps = highest_of(store.listed(folder), folder), []
        while True:
            while newer := self._holder(number + 1):  # an old listing; a single object is always the newest
                number, self.before = number + 1, newer
            if number:
                self.before = self._wait_for_end_of(number)
            known = self.before or LeaseHolder()
            self.steps, self.jobs, self.since = known.steps, known.jobs, known.since
            try:
                store.create(self._name(number + 1), self._content(False))
            except FileExistsError:
                holder = self._holder(number + 1)
                if not holder or holder.token != self.token:  # else an answer was lost, and not the write
                    continue
            self._number, self._sure_until = number + 1, _now() + SECONDS / 2
            if number and self._holder(number) != self.before:  # it was renewed after the last look, so its writer is
                self.withdraw(PATIENCE)  # alive, and may not have seen this one
                continue
            store.delete([self._name(number - _KEPT)] if number > _KEPT else [])
            return

    def _wait_for_end_of(self, number: int) -> LeaseHolder | None:
        """Waits until a lease is not renewed any more; returns what it says."""
        first, end, noted = self._holder(number), _now() + SECONDS, False
        while True:
            holder = self._holder(number) or first  # it was there, and nobody deletes it for a moment
            first = first or holder
            if holder and (holder.released or holder.is_gone):
                return holder
            if holder != first:
                raise LockedError(
                    f"the {self._kind.what} {masked_text(self._store.url)} is in use by process "
                    f"{holder.pid} on {holder.host}; wait until it ends or stop it, or {self._kind.other}"
                )
            if _now() > end:
                return holder
            if not noted:
                url = masked_text(self._store.url)
                logging.warning("%s may be in use; waiting %g s for a sign of life", url, SECONDS)
                noted = True
            time.sleep(SECONDS / 10)

    def _holder(self, number: int, patience: float = PATIENCE) -> LeaseHolder | None:
        return read_with_age(self._store, number, patience, self._folder)[0]

    def _content(self, released: bool) -> bytes:
        self._renewed += 1  # counted, and no time: the clocks of two machines differ
        own = os.getpid(), socket.gethostname(), released, _boot(), self._renewed
        return json.dumps(vars(LeaseHolder(self.token, self.steps, self.jobs, self.since, *own))).encode()

    def _name(self, number: int) -> str:
        return _name(self._folder, number)

    def renew(self, patience: float) -> None:
        """Shows that the writer is alive; raises `LockedError` if that came too late."""
        begun = _now()
        self._check_own(patience)
        self.write(patience)
        self._check_next(patience)
        self._sure_until = begun + SECONDS / 2

    def keep(self, ending: threading.Event) -> LockedError | None:
        """Renews the lease until the end, also while a large file is copied; returns the error if it was lost."""
        while not ending.wait(SECONDS / 3):
            try:
                self.renew(SECONDS / 3)
            except LockedError as error:
                return error
            except (StoreError, FileError, OSError):  # of the store, or of this machine
                continue
        return None

    def write(self, patience: float) -> None:
        """Writes what the next writer should know, `steps` above all."""
        self._store.write(self._name(self._number), self._content(False), patience)

    def check(self, patience: float, surely: bool = False) -> None:
        """Raises `LockedError` if another writer has taken the run; without `surely`, if it can have done so."""
        if not surely and _now() < self._sure_until:
            return
        self._check_own(patience)
        self._check_next(patience)

    def _check_next(self, patience: float) -> None:
        if self._holder(self._number + 1, patience):
            raise self._taken(f"this one did not renew its lease for {SECONDS:g} s")

    def _check_own(self, patience: float) -> None:
        """Raises `LockedError` if the lease is of a writer that has found none, as after somebody has removed all."""
        holder = self._holder(self._number, patience)
        if holder and holder.token not in ("", self.token):
            raise self._taken("the lease of this one was removed")

    def _taken(self, reason: str) -> LockedError:
        return LockedError(
            f"another process has taken the {self._kind.what} {masked_text(self._store.url)}, because {reason}; "
            "nothing more is written there; stop the other run, or let it continue"
        )

    def withdraw(self, patience: float) -> None:
        """Leaves the store as it was before, for a start that has written nothing."""
        self._store.delete([self._name(self._number)], patience)

    def release(self, patience: float) -> None:
        """Lets another writer take the run at once."""
        self._store.write(self._name(self._number), self._content(True), patience)


def _now() -> float:
    """Returns seconds by a clock that nobody sets, and which counts while the machine sleeps, where there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def highest_of(names: Iterable[str], folder: str = FOLDER) -> int:
    """Returns the number of the newest lease among the names of a run's objects; 0 for none."""
    numbers = [name.removeprefix(f"{folder}/") for name in names if name.startswith(f"{folder}/")]
    return max((int(number) for number in numbers if number.isascii() and number.isdecimal()), default=0)


def _name(folder: str, number: int) -> str:
    return f"{folder}/{number:08d}"


def read_with_age(
    store: Store, number: int, patience: float = PATIENCE, folder: str = FOLDER
) -> tuple[LeaseHolder | None, float | None]:
    """Returns what a lease says, None for none, and its age in seconds, see `Store.read_with_age`."""
    try:
        content, age = store.read_with_age(_name(folder, number), patience)
    except FileNotFoundError:
        return None, None
    try:
        found = decode(LeaseHolder, parse_json(content), strict=False)
    except ValueError:
        return LeaseHolder(), age  # damaged, so nobody's
    return dataclasses.replace(found, steps=[step for step in found.steps if step >= 0]), age


def _boot() -> str:
    """Returns what tells this start of this machine, and this container of it, from others; "" if not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


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
            check = functools.partial(self._leases[folder].check, patience)
            check(surely=True)
            self._store.delete(self._replaced[folder] - self._copy.note.known.keys(), patience, check)
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
