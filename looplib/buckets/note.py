"""The local directory of a run in an object store, and the notes beside it: what the store has, and should lose."""

import contextlib
import dataclasses
import hashlib
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator

from absl import logging

from looplib.base import files, folders
from looplib.base.decoding import decode, parse_json
from looplib.base.messages import gist
from looplib.errors import RunDirectoryError, StoreError
from looplib.masks import masked_text
from looplib.run import commits
from looplib.run.directory import LOCK  # of a run; that of its predictions begins with "_"

CHECKPOINTS, MARKER = "checkpoints", ".commit"
INCOMING, OUTGOING, EARLIER, KEPT = "incoming", "outgoing", "earlier", "kept"  # folders beside the run directory
_BUSY = "busy"  # the file that processes lock
_NOTE, _MOST_BYTES = "mirror.json", 1 << 28
_MOST_DELETIONS = 1 << 20  # bytes; of more, none is believed
_DELETIONS, _MOVE = "deletions.json", "move.json"


@dataclasses.dataclass
class Note:
    """The note beside a local run directory.

    Attributes:
      url: the run directory in the store, without secrets.
      key: a digest of the whole URL, which tells it from others; "" in notes of older versions.
      token: of the lease under which this directory was copied last; "" for a copy that is only read.
      known: dict from name to the bytes and the time of change, in ns, of the local file that the store has.
      versions: dict from name to the version of the object that was fetched.
      first: the step of the first record of `metrics.jsonl` in the store; None if there is none.
    """

    url: str
    key: str = ""
    token: str = ""
    known: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    first: int | None = None


@dataclasses.dataclass
class Move:
    """A move of what is in a local directory into `EARLIER`, which a start that is killed leaves to the next one.

    Attributes:
      note: the `Note` of what is moved.
      done: whether all of it was moved, so that what is in the directory comes from the store.
    """

    note: Note
    done: bool


class Deletions:
    """Files that the run has deleted by a decision of its own, see `folders.delete`, until the store has lost them too.

    A file that is not here any more is not among them: somebody else may have removed it.

    Args:
      place: the folder with the list.
    """

    def __init__(self, place: str) -> None:
        self._path, self._lock = os.path.join(place, _DELETIONS), threading.Lock()
        self._noted: dict[str, int] = {}  # by how the names begin: the number of the deletion
        self._sent: dict[str, int] = {}  # by name: the number of deletions when it was copied last
        self.count = 0  # of the deletions of this process
        with contextlib.suppress(OSError, ValueError):
            noted = decode(list[str], parse_json(files.read_text(self._path, _MOST_DELETIONS)), strict=True)
            self._noted, self.count = dict.fromkeys(filter(_can_be_noted, noted), 1), 1

    def note(self, start: str) -> None:
        """Notes that the run is about to delete the files whose names begin in a way."""
        with self._lock:
            self.count += 1
            self._noted[start] = self.count
            self._write()

    def copied(self, name: str, count: int | None = None) -> None:
        """Notes that a file was here when it was copied, after so many deletions."""
        self._sent[name] = self.count if count is None else count

    def has(self, name: str) -> bool:
        """Returns whether the run has deleted a file since it was copied."""
        with self._lock:
            return any(name.startswith(start) and self._sent.get(name, 0) < n for start, n in self._noted.items())

    def forget(self, known: Iterable[str], count: int) -> None:
        """Drops the first so many deletions, except those of which the store still has files."""
        with self._lock:
            before, known = len(self._noted), list(known)
            for start in [start for start, number in self._noted.items() if number <= count]:
                if not any(name.startswith(start) for name in known):
                    del self._noted[start]
            if len(self._noted) != before:
                self._write()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the next start fetches again what the store has not lost
            files.write_whole(self._path, json.dumps(list(self._noted)), durable=False)


class LocalCopy:
    """A local run directory, and `<directory>.mirror` beside it.

    Args:
      url: the run directory in the store.
      directory: the local run directory.

    Attributes:
      directory: the local run directory.
      checkpoints: the folder of its checkpoints, which may not be there yet.
      place: what is beside it.
      note: the `Note`.
      deletions: the `Deletions`.

    Raises:
      StoreError: if the directory holds something else.
    """

    def __init__(self, url: str, directory: str) -> None:
        self.directory, self._url = directory, masked_text(url)
        self._key = hashlib.sha256(url.encode()).hexdigest()
        self.checkpoints = os.path.join(directory, CHECKPOINTS)
        self.place = f"{directory}.mirror"
        self.note = self.read_note()
        for folder in (self.place, directory):
            folders.make_folder(folder)
        if not os.path.exists(os.path.join(self.place, _NOTE)):  # before anything else is there
            self.write_note()
        self.deletions = Deletions(self.place)
        self._held: list[tuple[int, str]] = []

    def hold(self) -> None:
        """Has `check` tell this directory from any other of its name, and notes what the run deletes from now on."""
        for path in (self.directory, self.path(LOCK)):  # of one that is being removed, the lock may go first
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                weakref.finalize(self, os.close, descriptor)
                self._held.append((descriptor, path))
        for name in filter(os.path.lexists, map(self.path, self.note.known)):  # so that nobody is deleting it
            self.deletions.copied(os.path.relpath(name, self.directory))
        folders.note_deletions(self.directory, self.deletions.note)

    def check(self) -> None:
        """Raises `RunDirectoryError` if the directory, or the lock in it, was moved or removed since `hold`."""
        for path in (path for held, path in self._held if not files.is_at(held, os.path.realpath(path))):
            raise RunDirectoryError(
                f"{path} was moved or removed during the run; {self._url} keeps what it has, and nothing "
                "more is copied or deleted there: run the same command again, which continues from it"
            )

    def read_note(self) -> Note:
        """Returns the note as it is on the disk."""
        path = os.path.join(self.place, _NOTE)
        if not (os.path.isdir(self.directory) and set(os.listdir(self.directory)) - {LOCK}):  # new, or removed
            return Note(self._url, self._key)
        with contextlib.suppress(OSError, ValueError):
            return self._own(decode(Note, parse_json(files.read_text(path, _MOST_BYTES)), strict=True))
        raise StoreError(
            f"{self.directory} holds something else than a copy of {self._url}, or lacks what "
            f"is noted in {self.place}; give another --local_dir, or remove the directory if the store has all of it"
        )

    def _own(self, note: Note) -> Note:
        """Returns a note that was read; `ValueError` if it is of another run, or names what cannot be in a run."""
        is_own = note.key == self._key or (not note.key and note.url == self._url)
        if not is_own or not all(
            len(stat) == 2 and {"", ".", ".."}.isdisjoint(name.split("/")) for name, stat in note.known.items()
        ):
            raise ValueError(note.url)
        note.key = self._key
        return note

    def write_note(self) -> None:
        """Writes the note."""
        self._write(_NOTE, self.note)

    def _write(self, name: str, value: Note | Move) -> None:
        files.write_whole(os.path.join(self.place, name), json.dumps(dataclasses.asdict(value)))

    def path(self, name: str) -> str:
        """Returns the path of a file of the run."""
        return os.path.join(self.directory, name)

    def folder(self, name: str) -> str:
        """Returns a folder beside the run directory, such as `INCOMING`."""
        return folders.make_folder(self.place, name)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps other processes of this machine from fetching into the directory inside a `with` block."""
        with files.appending(os.path.join(self.place, _BUSY)):
            self.move_back()
            self.note = self.read_note()
            yield

    @contextlib.contextmanager
    def replaced(self) -> Iterator[Note]:
        """Moves what is here aside, to be fetched in the `with` block, or by an error, or the next start, moved back.

        Yields:
          The `Note` of what was moved, for `settle`.
        """
        before = self.note
        self.keep(self.folder(EARLIER))  # of an older version
        self._write(_MOVE, Move(before, False))
        for name in sorted(set(os.listdir(self.directory)) - {LOCK}):
            folders.move(self.directory, name, self.folder(EARLIER))
        self._write(_MOVE, Move(before, True))
        self.note = Note(self._url, self._key)
        self.deletions.forget((), self.deletions.count)
        self.write_note()
        try:
            yield before
        except BaseException:
            self.move_back()
            raise
        self.write_note()
        folders.remove(self.place, _MOVE)

    def move_back(self) -> None:
        """Undoes a move that was not finished; `StoreError` if it cannot tell what was moved."""
        path = os.path.join(self.place, _MOVE)
        try:
            move = decode(Move, parse_json(files.read_text(path, _MOST_BYTES)), strict=True)
            self._own(move.note)
        except FileNotFoundError:
            return
        except (ValueError, files.NotRegularError) as error:
            raise StoreError(
                f"{path} does not say which files of {self._url} were moved to {os.path.join(self.place, EARLIER)} "
                f"({gist(error)}); move {self.directory} and {self.place} away, and run the same command again, which "
                "continues from the store"
            ) from error
        for name in sorted(set(os.listdir(self.directory)) - {LOCK}) if move.done else ():
            folders.remove(self.directory, name)
        self._write(_MOVE, Move(move.note, False))
        _merge(self.folder(EARLIER), self.directory)
        self.note = move.note
        self.write_note()
        folders.remove(self.place, _MOVE)

    def settle(self, before: Note, is_stored: Callable[[str], bool]) -> None:
        """Removes what `replaced` has moved aside, except what the store never had as it is, or has lost.

        Args:
          before: what `replaced` has yielded.
          is_stored: returns whether the store has a file of a name, or had it until its run has deleted it.
        """
        kept = self.keep(self.folder(EARLIER))
        for place, _, names in os.walk(kept or "", topdown=False):
            for name in names:
                found = os.lstat(path := os.path.join(place, name))
                of_run = os.path.relpath(path, kept)
                is_copied = before.known.get(of_run) == [found.st_size, found.st_mtime_ns] and is_stored(of_run)
                if is_copied or name.lstrip("_") in (LOCK, "checkpoint") or files.is_new_name(name):
                    folders.remove(place, name)
            with contextlib.suppress(OSError):  # of what is kept
                os.rmdir(place)
        if kept and os.path.exists(kept):
            logging.warning("what %s never had of an earlier start on this machine is kept in %s", self._url, kept)

    def keep(self, folder: str) -> str | None:
        """Gives a folder that is not empty a name of its own; returns it."""
        if not os.listdir(folder):
            return None
        kept = files.free_name(os.path.join(self.place, KEPT))
        folders.move(*os.path.split(folder), *os.path.split(kept))
        return kept

    def has(self, step: int) -> bool:
        """Returns whether the checkpoint of a step is here."""
        return os.path.exists(self.path(marker_of(step)))

    def id_of(self, step: int) -> tuple[int, int] | None:
        """Returns the `Commit.id` of the checkpoint of a step; None if there is no intact one."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return commits.read_marker(os.path.join(self.checkpoints, f"ckpt-{step}")).id
        return None

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints that are here, the newest first."""
        names = os.listdir(self.checkpoints) if os.path.isdir(self.checkpoints) else []
        return steps_of(f"{CHECKPOINTS}/{name}" for name in names)

    def is_whole(self) -> bool:
        """Returns whether nobody has removed files of the run since the note was written."""
        steps = steps_of(self.note.known)
        wanted = [marker_of(steps[0])] if steps else self.note.known  # the run keeps the newest checkpoint
        return all(os.path.exists(self.path(name)) for name in wanted)

    def remember(self, name: str, found: os.stat_result | None = None, deletions: int | None = None) -> None:
        """Notes that the store has a file, as it is now, or was after so many deletions."""
        found = found or os.stat(self.path(name))
        self.note.known[name] = [found.st_size, found.st_mtime_ns]
        self.deletions.copied(name, deletions)

    def has_changed(self, name: str, path: str | None = None) -> bool:
        """Returns whether a file, or another name of it, is there and is not as the store has it."""
        try:
            found = os.lstat(path or self.path(name))
        except FileNotFoundError:
            return False
        return self.note.known.get(name) != [found.st_size, found.st_mtime_ns]

    def changed(self) -> Iterator[str]:
        """Yields the names of files outside of the checkpoints that are not as the store has them."""
        for place, below, names in os.walk(self.directory):
            below[:] = [folder for folder in below if not files.is_new_name(folder)]  # an export that is not in place
            if place == self.directory and CHECKPOINTS in below:
                below.remove(CHECKPOINTS)
            folder = os.path.relpath(place, self.directory)
            for file in names:
                name = file if folder == "." else f"{folder}/{file}"
                if file.lstrip("_") != LOCK and not files.is_new_name(file) and self.has_changed(name):
                    yield name


def _can_be_noted(start: str) -> bool:
    """Returns whether the names of what a run deletes may begin so: a file, a folder, or the files of a checkpoint.

    The beginning of another name, such as "" or "checkpoints/ckpt-", would mean files that the run has not deleted.
    """
    parts = start.removesuffix("/").split("/")
    return all(map(folders.is_name, parts)) and (start.endswith("/") or "." in parts[-1]) and start != f"{CHECKPOINTS}/"


def _merge(folder: str, to: str) -> None:
    """Moves what is in a folder into another one, folders of one name into each other, and replaces nothing."""
    for name in os.listdir(folder):
        source, place = os.path.join(folder, name), os.path.join(to, name)
        if not os.path.lexists(place):
            folders.move(folder, name, to)
        elif os.path.isdir(source) and os.path.isdir(place) and not os.path.islink(source) | os.path.islink(place):
            _merge(source, place)
            with contextlib.suppress(OSError):
                os.rmdir(source)


def marker_of(step: int) -> str:
    """Returns the name of a checkpoint's marker in the run directory."""
    return f"{CHECKPOINTS}/ckpt-{step}{MARKER}"


def steps_of(names: Iterable[str]) -> list[int]:
    """Returns the steps of the checkpoints whose markers are among names, the newest first."""
    start, found = f"{CHECKPOINTS}/ckpt-", []
    for name in names:
        step = name.removeprefix(start).removesuffix(MARKER)
        if step.isascii() and step.isdecimal() and len(step) < 19 and name == marker_of(int(step)):
            found.append(int(step))
    return sorted(found, reverse=True)
