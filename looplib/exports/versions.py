"""Versions of an exported model, `<base>/<integer>/`, in a local folder or an object store; servers take the newest."""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from looplib.base import files, folders
from looplib.base.decoding import SHOWN, decode, parse_json
from looplib.base.messages import gist
from looplib.cluster.preemption import notice
from looplib.errors import ExportError, StoreError
from looplib.exports.new_folder import alone, make_all_durable, new_folder
from looplib.run.report import strict_json
from looplib.stores.stores import Store

REJECTED_FOLDER = "rejected/"  # of versions that no server is to load
VERSION = re.compile(r"[1-9]\d{0,15}|rejected")  # how the names of files of versions begin
_OWNER, _NOTE, _RECORD, _MODEL = ".looplib-run", ".looplib-versions", "looplib.json", "saved_model.pb"
_LONG = 3600.0  # seconds that a process may take to write a version to a store
_NEW = "version"  # the beginning of the names of temporary folders


@dataclasses.dataclass(frozen=True)
class VersionNote:
    """The newest version that was ever begun, and when, in seconds since the epoch."""

    newest: int = 0
    time: float = 0.0


@dataclasses.dataclass(frozen=True)
class VersionRecord:
    """What `looplib.json` in a version says: its step, the metrics of its gate, and why it was kept or moved aside."""

    step: int = 0
    metrics: dict[str, float | None] = dataclasses.field(default_factory=dict)
    reason: str = ""


class Versions:
    """Versions in a local folder, where each appears, and goes, by a rename. Several processes may change them."""

    def __init__(self, base: str) -> None:
        self.base = base

    def claim(self, who: str, controller: Any, is_own: re.Pattern[str], name: str = "") -> None:
        """Refuses exports of another run, or action, whose names begin with a folder that a pattern matches.

        Notes whose folder it is: of a run, and its action of a name.
        """
        run = controller.report.standing().url or (controller.model_dir and os.path.realpath(controller.model_dir))
        owner = hashlib.sha256((run + name).encode()).hexdigest() if run else f"no run directory{name}"
        try:
            found: str | None = self._read(_OWNER)
        except StoreError:
            raise  # a store that is down has no run's exports
        except FileNotFoundError:
            found = None if any(is_own.fullmatch(name.partition("/")[0]) for name in self._names()) else owner
        except (OSError, ValueError):
            found = None
        if found != owner:
            raise ExportError(
                f"{self.base} has exports of another run or action, or of this one before it was moved, which {who} "
                f"would replace and remove; give it another directory, or write {owner!r} into "
                f"{self.base}/{_OWNER} if they are its own"
            )
        self._write(_OWNER, owner)
        folders.remove_unfinished(self.base)

    def whole(self, within: str = "") -> list[int]:
        """Returns the complete versions, the oldest first."""
        return self._numbers(within, f"/{re.escape(_MODEL)}")

    def _numbers(self, within: str, file: str = "(/.*)?") -> list[int]:
        pattern = re.compile(rf"{within}([1-9]\d{{0,15}}){file}")
        return sorted({int(found[1]) for name in self._names() if (found := pattern.fullmatch(name))})

    def note(self) -> VersionNote:
        """Returns the note; what is lost of it is taken from the versions that are there."""
        found, there = self._decoded(VersionNote, _NOTE), [*self._numbers(""), *self._numbers(REJECTED_FOLDER)]
        return dataclasses.replace(found, newest=max([found.newest, *there]))

    def _decoded(self, kind: Any, name: str) -> Any:
        """Returns a dataclass that a file holds; its defaults for what the file lacks."""
        try:
            return decode(kind, parse_json(self._read(name)), SHOWN, strict=False)
        except StoreError:
            raise
        except (OSError, ValueError):
            return kind()

    def add(self, folder: str, record: VersionRecord, keep: int | None = None) -> int:
        """Adds a version, which is larger than each before, and returns it; one with a reason is kept aside.

        Args:
          folder: a SavedModel.
          record: what to say of it.
          keep: how many to keep there, the newest; what killed processes have left there is removed too. None removes
            nothing.
        """
        within, number = REJECTED_FOLDER if record.reason else "", 0
        while not number:
            wanted = self.note().newest + 1
            self._write(_NOTE, json.dumps(strict_json(VersionNote(wanted, time.time()))))
            with contextlib.suppress(FileExistsError):  # another process has the number
                self._put(folder, f"{within}{wanted}", record, f"{wanted}", f"{REJECTED_FOLDER}{wanted}")
                number = wanted
        try:
            whole = self.whole(within)
            for old in [one for one in self._numbers(within) if keep and one not in whole[-keep:]]:
                if old in whole or self._is_left(f"{within}{old}"):
                    self.remove(f"{within}{old}")
        except (OSError, StoreError) as error:
            logging.warning("old versions in %s are removed later: %s", self.base, gist(error))
        return number

    def go_back(self, version: int) -> int:
        """Publishes a version again, as the next one, which is returned, and moves those between aside.

        A version that was rejected, or moved aside, is published too; none is moved aside then.

        Raises:
          ExportError: if there is no such version, or it cannot be loaded.
        """
        there, aside = self.whole(), self.whole(REJECTED_FOLDER)
        if version not in (*there, *aside):
            known = ", ".join([*map(str, there), *(f"{REJECTED_FOLDER}{one}" for one in aside)])
            raise ExportError(f"{self.base} has no version {version}; it has {known or 'none'}")
        name = str(version) if version in there else f"{REJECTED_FOLDER}{version}"
        with self.fetched(name) as folder:
            try:
                tf.saved_model.load(folder)
            except (ValueError, OSError, tf.errors.OpError) as error:
                raise ExportError(
                    f"version {version} of {self.base} cannot be loaded ({gist(error)}); publish another one"
                ) from error
            record = dataclasses.replace(self._decoded(VersionRecord, f"{name}/{_RECORD}"), reason="")
            added = self.add(folder, record)
        for later in [one for one in there if version in there and one > version]:
            record = self._decoded(VersionRecord, f"{later}/{_RECORD}")
            record = dataclasses.replace(record, reason=f"version {version} was published again, as {added}")
            with self.fetched(str(later)) as folder, contextlib.suppress(FileExistsError):
                self._put(folder, f"{REJECTED_FOLDER}{later}", record, f"{REJECTED_FOLDER}{later}")
            self.remove(str(later))
        return added

    def remove(self, name: str) -> None:
        """Removes a folder, which is no version any more at once."""
        path = os.path.join(self.base, name)
        folders.delete(os.path.join(path, ""))
        with new_folder(os.path.join(self.base, _NEW)) as aside:
            folders.move(*os.path.split(path), aside)

    def fetched(self, name: str) -> contextlib.AbstractContextManager[str]:
        """Returns a context manager with a local path of a version."""
        return contextlib.nullcontext(os.path.join(self.base, name))

    def _names(self) -> list[str]:
        paths = (os.path.join(place, name) for place, *names in os.walk(self.base) for name in sum(names, []))
        return [os.path.relpath(path, self.base) for path in paths]

    def _read(self, name: str) -> str:
        return files.read_text(os.path.join(self.base, name))

    def _write(self, name: str, text: str) -> None:
        files.write_whole(os.path.join(folders.make_folder(self.base), name), text)

    def _is_left(self, name: str) -> bool:
        """Returns whether no process can still be writing a version that is not complete."""
        return True

    def _put(self, folder: str, name: str, record: VersionRecord, *free: str) -> None:
        """Copies a folder, so that it appears as a whole; raises `FileExistsError` if one of some names is taken."""
        *parents, last = name.split("/")
        with new_folder(os.path.join(self.base, _NEW)) as new:
            shutil.copytree(folder, new, symlinks=True, dirs_exist_ok=True)
            files.write_whole(os.path.join(new, _RECORD), json.dumps(strict_json(record)))
            make_all_durable(new)
            place = folders.make_folder(self.base, *parents)
            with alone(self.base):
                if taken := [one for one in free if os.path.lexists(os.path.join(self.base, one))]:
                    raise FileExistsError(f"another process has written version {taken[0]}")
                folders.move(*os.path.split(new), place, last)
            files.make_durable(place)


class _StoredVersions(Versions):
    """Versions in an object store, whose `saved_model.pb` is written last, and deleted first."""

    def __init__(self, base: str) -> None:
        super().__init__(base)
        self._store = Store(base, lambda: bool(notice.requested))  # a run that is to end does not wait

    def remove(self, name: str) -> None:
        below = self._store.below(name)
        below.delete(sorted(below.listed(), key=_MODEL.__ne__))

    @contextlib.contextmanager
    def fetched(self, name: str) -> Iterator[str]:
        below = self._store.below(name)
        with tempfile.TemporaryDirectory(prefix="looplib-version-") as place:
            for part in below.listed():
                *parents, last = part.split("/")
                below.fetch(part, os.path.join(folders.make_folder(place, *parents), last))
            yield place

    def _names(self) -> list[str]:
        return list(self._store.listed())

    def _read(self, name: str) -> str:
        return self._store.read_with_age(name)[0].decode()

    def _write(self, name: str, text: str) -> None:
        self._store.write(name, text.encode())

    def _is_left(self, name: str) -> bool:
        try:
            return time.time() - self._store.changed(f"{name}/{_RECORD}") > _LONG
        except FileNotFoundError:  # it is being removed
            return True

    def _put(self, folder: str, name: str, record: VersionRecord, *free: str) -> None:
        self._store.create(f"{name}/{_RECORD}", json.dumps(strict_json(record)).encode())  # takes the name
        for other in set(free) - {name}:
            if self._store.below(other).listed():
                self.remove(name)
                raise FileExistsError(f"another process has written version {other}")
        for part in sorted(Versions(folder)._names(), key=_MODEL.__eq__):
            if part != _RECORD and os.path.isfile(os.path.join(folder, part)):
                self._store.put(os.path.join(folder, part), f"{name}/{part}")


def versions_in(base: str | os.PathLike[str]) -> Versions:
    """Returns the versions in a local folder or at a URL."""
    if files.is_remote(base):
        return _StoredVersions(os.fspath(base))
    return Versions(files.resolve(base, "the base of exports"))
