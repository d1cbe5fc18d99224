"""The lock of a directory that is written: one process, and one controller of it, at a time may write there."""

import contextlib
import dataclasses
import fcntl
import json
import os
import socket
import stat
import sys
import time
import weakref
from collections.abc import Callable
from typing import TextIO

from absl import logging

from looplib.base import files
from looplib.base.decoding import decode, parse_json
from looplib.base.messages import with_cure
from looplib.errors import LockedError, RunDirectoryError
from looplib.masks import masked

_held: weakref.WeakValueDictionary[str, "RunLock"] = weakref.WeakValueDictionary()


@dataclasses.dataclass(frozen=True)
class LockKind:
    """The purpose of a lock.

    Attributes:
      what: what is locked, for messages.
      other: how a user has another one, as a clause.
      name: of the file that is locked.
    """

    what: str = "run directory"
    other: str = "use a separate model_dir"
    name: str = "lock"


@dataclasses.dataclass
class LockNote:
    """The content of the file of a lock: the process that took it last."""

    pid: int
    host: str
    since: str = ""
    command: list[str] = dataclasses.field(default_factory=list)

    @property
    def text(self) -> str:
        """The content of the file."""
        return json.dumps(vars(self))


def _decoded(text: str | bytes) -> LockNote:
    return decode(LockNote, parse_json(text), strict=False)


class RunLock:
    """Holds a directory for this process, until `release` or the process ends, however it ends.

    The operating system holds the lock (flock on a file), so that one left by a killed process does not block. A
    forked child does not hold the lock.

    Args:
      directory: the directory, which must exist.
      give_up: called when another controller of this process wants the directory; it closes the holder, or raises
        `UsageError` if the holder is training.
      kind: what the directory is.

    Raises:
      UsageError: if another process has it, saying which, or it cannot be written.
    """

    def __init__(self, directory: str, give_up: Callable[[], None], kind: LockKind = LockKind()) -> None:
        self._file: TextIO | None = None
        self.give_up = give_up
        self._directory = directory
        self._kind = kind
        self._key = os.path.realpath(directory)
        self._path = os.path.join(directory, kind.name)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(self._path, flags, 0o666)
        except OSError as error:
            raise RunDirectoryError(f"the {kind.what} cannot be locked: {with_cure(error, kind.other)}") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise RunDirectoryError(f"the {kind.what} cannot be locked: {self._path} is not a file; move it away")
        self._file = os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self._holder()
            self._file.close()
            raise LockedError(
                f"the {kind.what} {directory} is in use by {holder}; wait until it ends or stop it, or {kind.other}"
            ) from None
        except OSError as error:
            logging.warning("%s cannot be locked (%s); make sure that no other run writes to it", directory, error)
            return
        note = LockNote(os.getpid(), socket.gethostname(), time.ctime(), masked(sys.argv))
        with contextlib.suppress(OSError):  # a full disk; only the name of the holder is lost
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, note.text.encode(), 0)

    def check(self) -> None:
        """Raises `UsageError` if the directory or its lock file was moved, removed or replaced."""
        if self._file is None or self._file.closed or files.is_at(self._file.fileno(), self._path):
            return
        if not os.path.isdir(self._directory):
            raise RunDirectoryError(
                f"the {self._kind.what} {self._directory} was moved or removed during the run, so nothing more is "
                "written; restore it and run the same command again"
            )
        raise LockedError(
            f"the lock file {self._path} was removed or replaced, so another run may write there and this one ends; "
            f"stop the other run, or run the same command and {self._kind.other}"
        )

    def _holder(self) -> str:
        """Returns who has the lock. A process that has just taken it may not have written its name yet."""
        for _ in range(20):
            self._file.seek(0)
            if text := self._file.read(1 << 16):
                break
            time.sleep(0.05)
        return _describe(text)

    def release(self) -> None:
        """Lets others write to the directory."""
        if _held.get(self._key) is self:
            del _held[self._key]
        if self._file is not None:
            self._file.close()

    def __del__(self) -> None:
        self.release()


def _let_go_in_a_child() -> None:
    for lock in list(_held.values()):
        lock.release()


os.register_at_fork(after_in_child=_let_go_in_a_child)


def acquire(directory: str, give_up: Callable[[], None], kind: LockKind = LockKind()) -> RunLock:
    """Returns the `RunLock` of a directory, which is held until its `release`, or while it is referenced.

    A controller of this process that holds the lock is closed first: in a notebook, a cell that builds a controller may
    run twice. See `RunLock` for arguments and errors; a holder that is training refuses with a `UsageError`.
    """
    key = os.path.realpath(directory)
    if (holder := _held.get(key)) is not None:
        holder.give_up()
        holder.release()
    lock = _held[key] = RunLock(directory, give_up, kind)
    return lock


@dataclasses.dataclass(frozen=True)
class LockHolder:
    """The process that took the lock of a run directory last.

    Attributes:
      pid: its number on its machine.
      host: the name of its machine.
      holds: whether it still holds the lock; None if that cannot be seen from this machine.
    """

    pid: int
    host: str
    holds: bool | None


def holder(directory: str) -> LockHolder | None:
    """Returns who took the lock of a run directory last, without touching it; None if nobody is known."""
    try:
        with files.open_regular(os.path.join(directory, "lock")) as file:
            note, found = _decoded(file.read(1 << 16)), os.fstat(file.fileno())
    except (OSError, ValueError):
        return None
    here = note.host == socket.gethostname()
    return LockHolder(note.pid, note.host, _is_locked(found, note.pid) if here else None)


def _is_locked(file: os.stat_result, pid: int) -> bool:
    """Returns whether a process of this machine holds the lock on a file."""
    try:
        with open("/proc/locks") as locks:
            lines = [line.split() for line in locks]
    except OSError:  # not Linux
        try:
            os.kill(pid, 0)
        except (OSError, OverflowError) as error:
            return isinstance(error, PermissionError)
        return pid > 0
    inode, device = f":{file.st_ino}", f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}"
    held = [line for line in lines if len(line) > 5 and line[1] == "FLOCK" and line[5].endswith(inode)]
    # Some file systems show another device there; then the process has to be the one that the lock names.
    return any(line[5] == device + inode or line[4] == str(pid) for line in held)


def _describe(text: str) -> str:
    try:
        note = _decoded(text)
        return f"process {note.pid} on {note.host}, since {note.since} ({' '.join(note.command)[:200]})"
    except ValueError:
        return "another process"
