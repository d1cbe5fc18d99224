"""The copy of a run directory in an object store.

The run works in a local directory. A thread copies what is new: the files of a committed checkpoint, then what the run
has reported until then, then the checkpoint's marker, so that everything that a marker stands for is there. A start on
another machine fetches the newest checkpoint that is intact, and what it needs of the rest.
"""

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from absl import logging

from looplib import files, folders
from looplib.checkpoint import commits, lock
from looplib.checkpoint.mirror import Mirror
from looplib.errors import LockedError, StoreError, UsageError
from looplib.extras.buckets import lease as leases
from looplib.extras.buckets import stores
from looplib.extras.buckets.lease import Lease
from looplib.extras.buckets.stores import Store
from looplib.masks import masked_text

_TICK = 0.5  # seconds between two looks at the local directory
_EVERY = float(os.environ.get("LOOPLIB_UPLOAD_SECONDS", 30))  # from one copy of a file that grows to the next
_BYTES_A_SECOND = 1 << 20  # a larger file that grows waits longer
_LAST = 600.0  # seconds that the end of a run waits for the store
_CHECKPOINTS, _MARKER = "checkpoints", ".commit"
_REPORTS = ("metrics.jsonl", "media.jsonl", "metrics.voided.jsonl", "media.voided.jsonl", "run.json", "run_eval.json",
            "config.yaml", "code.diff")  # fmt: skip
_LOCK = "lock"
_INCOMING, _OUTGOING, _NOTE, _STATUS = "incoming", "outgoing", "mirror.json", "status.json"


@dataclasses.dataclass
class Standing:
    """How far the copy of a run is.

    Attributes:
      url: the run directory in the store.
      step: the step of the newest checkpoint there; -1 for none.
      behind: checkpoints that are not there yet.
      complete: when the copy was last complete, in seconds since the epoch.
      requests: requests of this start to the store.
      error: why the copy is behind; "" while it is not.
    """

    url: str
    step: int = -1
    behind: int = 0
    complete: float = 0.0
    requests: int = 0
    error: str = ""


@dataclasses.dataclass
class _Note:
    """What is noted beside the local run directory.

    Attributes:
      url: the run directory in the store.
      token: of the lease under which this directory was copied last.
      known: dict from name to the bytes and the time of change, in ns, of the local file that the store has.
    """

    url: str
    token: str
    known: dict[str, list[int]]


class StoreMirror(Mirror):
    """The local directory of a run in an object store.

    Args:
      url: the run directory in the store.
      directory: the local run directory; what is noted about the copy is beside it, in `<directory>.mirror`.

    Attributes:
      directory: the local run directory.
      standing: the `Standing`.

    Raises:
      UsageError: if the place holds something else, or the store cannot be used.
    """

    def __init__(self, url: str, directory: str) -> None:
        self.standing = Standing(url, complete=time.time())
        self.directory, self._checkpoints = directory, os.path.join(directory, _CHECKPOINTS)
        self._place = folders.make_folder(f"{directory}.mirror")
        self._note = self._read_note()
        self._ending = threading.Event()
        self._store = Store(url)
        self._lease: Lease | None = None
        self._threads: list[threading.Thread] = []
        self._later: list[int] = []  # steps of checkpoints that are to be fetched
        self._lost: LockedError | None = None
        self._sent_at: dict[str, float] = {}
        self._versions: dict[str, str] = {}  # of the objects that were fetched by this process
        folders.make_folder(directory)

    def _read_note(self) -> _Note:
        url = self.standing.url
        path = os.path.join(self._place, _NOTE)
        if not os.path.exists(path) and not (os.path.isdir(self.directory) and os.listdir(self.directory)):
            return _Note(url, "", {})
        with contextlib.suppress(OSError, ValueError):
            note = files.typed(files.parse_json(files.read_text(path, 1 << 28)), _Note)
            if note.url == url:
                return note
        raise StoreError(
            f"{self.directory} holds something else than a copy of {masked_text(url)}; give another --local_dir"
        )

    def _write_note(self) -> None:
        files.write_whole(os.path.join(self._place, _NOTE), json.dumps(dataclasses.asdict(self._note)))

    # From the store.

    def begin(self, trains: bool) -> None:
        """Fetches what a start needs; for a training, takes the run, and begins to copy.

        Raises:
          UsageError: if another process trains there, or the store does not answer.
        """
        if not trains:
            self.refresh()
            return
        self._lease = Lease(self._store)
        self._note = self._read_note()  # an earlier controller of this process may have gone on until now
        if not self._note.token or self._note.token != self._lease.before.get("token"):
            self._start_from_the_store()
        self._note.token = self._lease.token
        self._write_note()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._work, self._renew)]
        for thread in self._threads:
            thread.start()

    def refresh(self, checkpoints: bool = True) -> None:
        """Fetches what is new in the store, for a process that does not train.

        A directory in which a run of this machine trains, or was the last to train, is newer than the store.
        """
        holder = lock.holder(self.directory)
        newest = leases.read(self._store, leases.highest(self._store))
        if (holder and holder.holds) or self._note.token == newest.get("token", "nobody"):
            return
        there = self._listed(leases.steps_of(newest))
        for step in _steps(there) if checkpoints else ():
            self._fetch_checkpoint(step)
        for name in _REPORTS:
            if name in there and self._versions.get(name) != there[name]:
                self._fetch(name)
                self._versions[name] = there[name]
        self._note_writer(newest)

    def _note_writer(self, newest: dict[str, Any]) -> None:
        """Notes who writes in the store, and since when there is no news, where a reader of this copy looks for it."""
        host, pid, renewed = newest.get("host"), newest.get("pid"), newest.get("renewed")
        if not isinstance(host, str) or type(pid) is not int or not isinstance(renewed, float):
            return
        files.write_whole(
            os.path.join(self.directory, _LOCK), json.dumps({"pid": pid, "host": f"{host}, in the store"})
        )
        for name in _REPORTS:
            with contextlib.suppress(FileNotFoundError):
                os.utime(os.path.join(self.directory, name), (renewed, renewed))

    def _start_from_the_store(self) -> None:
        """Fetches the newest intact checkpoint and the reports, in place of what an earlier start has left here."""
        for name in set(os.listdir(self.directory)) - {_LOCK}:  # which this process holds
            folders.remove(self.directory, name)
        self._note.known.clear()
        there = self._listed(self._lease.steps)
        steps = _steps(there)
        while steps and not self._fetch_checkpoint(steps.pop(0)):
            pass
        self._later = steps  # while the run trains; what it keeps and which is the best depends on all of them
        for name in _REPORTS:
            if name in there:
                self._fetch(name)

    def _listed(self, steps: list[int]) -> dict[str, str]:
        """Returns the names in the store, with versions, and the markers that an old listing may lack."""
        markers = dict.fromkeys((f"{_CHECKPOINTS}/ckpt-{step}{_MARKER}" for step in steps), "")
        return {**markers, **{name: file.version for name, file in self._store.listed().items()}}

    def _fetch_checkpoint(self, step: int) -> bool:
        """Fetches a checkpoint that is complete and undamaged in the store; returns whether it is here."""
        name = f"ckpt-{step}"
        if os.path.exists(os.path.join(self._checkpoints, name + _MARKER)):
            return True
        incoming = folders.make_folder(self._place, _INCOMING)
        path = os.path.join(incoming, name)
        try:
            self._store.fetch(f"{_CHECKPOINTS}/{name}{_MARKER}", path + _MARKER)
            done = commits.read_marker(path)
            for file in done.files:
                self._store.fetch(f"{_CHECKPOINTS}/{file}", os.path.join(incoming, file))
        except FileNotFoundError:  # deleted meanwhile, or its upload or deletion was cut short
            return False
        except (ValueError, KeyError, TypeError, UsageError) as error:
            logging.warning("the checkpoint of step %d in %s is left out: %s", step, self.standing.url, error)
            return False
        if damage := commits.verify(done):
            logging.warning("the checkpoint of step %d in %s is left out: %s", step, self.standing.url, damage)
            return False
        to = folders.make_folder(self.directory, _CHECKPOINTS)
        for file in (*done.files, name + _MARKER):
            folders.move(incoming, file, to)
            self._is_known(f"{_CHECKPOINTS}/{file}")
        return True

    def _fetch(self, name: str) -> None:
        """Fetches a file of the run directory, in place of the one that is here."""
        *place, last = name.split("/")
        incoming = folders.make_folder(self._place, _INCOMING)
        with contextlib.suppress(FileNotFoundError):
            self._store.fetch(name, os.path.join(incoming, last))
            folders.move(incoming, last, folders.make_folder(self.directory, *place))
            self._is_known(name)

    def _is_known(self, name: str) -> None:
        found = os.stat(os.path.join(self.directory, name))
        self._note.known[name] = [found.st_size, found.st_mtime_ns]

    # To the store.

    def check(self) -> None:
        """Raises `LockedError` if another process has taken the run."""
        if self._lost:
            raise self._lost

    def share(self, path: str) -> None:
        """Copies a file of a checkpoint that a worker other than the chief has written.

        Raises:
          OSError: if the store does not take it.
        """
        try:
            self._store.put(path, f"{_CHECKPOINTS}/{os.path.basename(path)}")
        except StoreError as error:
            raise OSError(str(error)) from error

    def take(self, path: str) -> None:
        """Fetches a file that another worker has shared, unless it is here, as on one machine."""
        if not os.path.exists(path):
            incoming, name = folders.make_folder(self._place, _INCOMING), os.path.basename(path)
            with contextlib.suppress(StoreError, OSError):  # the chief then says that it does not see it
                self._store.fetch(f"{_CHECKPOINTS}/{name}", os.path.join(incoming, name))
                folders.move(incoming, name, self._checkpoints)

    def end(self) -> None:
        """Copies the rest, and lets others take the run; called again, what was written since.

        Raises:
          StoreError: if the store did not take all of it in time; the local directory has it.
        """
        if self._lease is None or self._lost:
            return
        self._ending.set()
        for thread in self._threads:
            thread.join()
        try:
            self._lease.check(_LAST)
            self._copy(self._lease, everything=True, patience=_LAST)
            self._lease.release(_LAST)
            self.standing.error, self.standing.complete = "", time.time()
        except (StoreError, OSError) as error:
            self.standing.error = str(error)
            raise StoreError(
                f"{error}; what is missing in {masked_text(self.standing.url)} is in {self.directory}, and the same "
                "command copies it"
            ) from error
        finally:
            self._write_note()
            self._show()

    def _renew(self) -> None:
        """Renews the lease until the end, also while a large file is copied."""
        while not self._ending.wait(leases.SECONDS / 4):
            with contextlib.suppress(StoreError):
                self._lease.renew(leases.SECONDS / 4)

    def _work(self) -> None:
        """Copies until the end."""
        while not self._ending.wait(_TICK):
            try:
                if self._later and not os.path.exists(self._marker(step := self._later.pop(0))):
                    self._fetch_checkpoint(step)
                self._copy(self._lease, everything=False, patience=leases.SECONDS / 4)
                self.standing.error, self.standing.complete = "", time.time()
            except LockedError as error:
                self._lost = error
                return
            except (StoreError, OSError) as error:
                self.standing.error = str(error)
            self._show()

    def _marker(self, step: int) -> str:
        return os.path.join(self._checkpoints, f"ckpt-{step}{_MARKER}")

    def _copy(self, lease: Lease, everything: bool, patience: float) -> None:
        """Copies new checkpoints, and what has changed; then deletes what the run has deleted."""
        for step, path in self._uncopied():
            marker = f"{_CHECKPOINTS}/ckpt-{step}{_MARKER}"
            with self._held(path) as held:
                if held is None:
                    continue
                new = [name for name in held if name != marker and self._has_changed(name, held[name])]
                if self._note.known.keys() & {*new, marker} > {marker}:  # saved again after a rollback
                    self._store.delete([marker], patience)
                for name in new:
                    self._send(name, held[name], patience)
                for name in list(self._changed(True)):
                    self._send(name, os.path.join(self.directory, name), patience)
                lease.check(patience)
                self._send(marker, held[marker], patience)
            lease.steps = sorted({*lease.steps, step})
            lease.renew(patience)
            self._write_note()
        for name in list(self._changed(everything)):
            self._send(name, os.path.join(self.directory, name), patience)
        gone = [name for name in self._note.known if not os.path.lexists(os.path.join(self.directory, name))]
        if gone:
            lease.check(patience)
            markers = [name for name in gone if name.endswith(_MARKER)]  # first: no marker without its files
            lease.steps = [step for step in lease.steps if f"{_CHECKPOINTS}/ckpt-{step}{_MARKER}" not in markers]
            for name in sorted(gone, key=lambda name: name not in markers):
                self._store.delete([name], patience)
                del self._note.known[name]
            self._write_note()

    def _uncopied(self) -> Iterator[tuple[int, str]]:
        """Yields the step and the path of each checkpoint whose marker is not in the store as it is here."""
        for done in commits.committed(self._checkpoints) if os.path.isdir(self._checkpoints) else ():
            if self._has_changed(f"{_CHECKPOINTS}/ckpt-{done.step}{_MARKER}"):
                yield done.step, done.path

    @contextlib.contextmanager
    def _held(self, path: str) -> Iterator[dict[str, str] | None]:
        """Yields paths of a checkpoint's files, by name, which stay while the run deletes it; None if it is gone."""
        outgoing = folders.make_folder(self._place, _OUTGOING)
        held: dict[str, str] = {}
        try:
            done = commits.read_marker(path)
            for name in (*done.files, os.path.basename(path) + _MARKER):
                held[f"{_CHECKPOINTS}/{name}"] = os.path.join(outgoing, name)
                folders.remove(outgoing, name)  # of a start that was killed
                folders.link(os.path.dirname(path), name, outgoing)
            complete = True
        except FileNotFoundError:
            complete = False
        try:
            yield held if complete else None
        finally:
            for place in held.values():
                folders.remove(outgoing, os.path.basename(place))

    def _changed(self, everything: bool) -> Iterator[str]:
        """Yields the names of files outside of the checkpoints that are to be copied now."""
        for place, _, names in os.walk(self.directory):
            below = os.path.relpath(place, self.directory)
            if below.split(os.sep)[0] == _CHECKPOINTS:
                continue
            for file in names:
                name = file if below == "." else f"{below}/{file}"
                if file == _LOCK or files.is_new_name(file) or not self._has_changed(name):
                    continue
                size = os.path.getsize(os.path.join(place, file))
                wait = max(_EVERY, size / _BYTES_A_SECOND)
                if everything or time.monotonic() - self._sent_at.get(name, 0.0) > wait:
                    yield name

    def _has_changed(self, name: str, path: str | None = None) -> bool:
        try:
            found = os.lstat(path or os.path.join(self.directory, name))
        except FileNotFoundError:
            return False
        return self._note.known.get(name) != [found.st_size, found.st_mtime_ns]

    def _send(self, name: str, path: str, patience: float) -> None:
        """Copies a file as it is now; one that the run has removed meanwhile is left out."""
        with contextlib.suppress(FileNotFoundError):
            before = os.stat(path)
            self._store.put(path, name, patience)
            self._note.known[name] = [before.st_size, before.st_mtime_ns]
            self._sent_at[name] = time.monotonic()

    def _show(self) -> None:
        """Writes how far the copy is, for `status` and the page."""
        steps = [step for step, _ in self._uncopied()]
        known = _steps(self._note.known)
        self.standing.behind, self.standing.step = len(steps), max(known, default=-1)
        self.standing.requests = self._store.requests
        with contextlib.suppress(OSError):
            files.write_whole(
                os.path.join(self._place, _STATUS), json.dumps(dataclasses.asdict(self.standing)), durable=False
            )


def _steps(names: Iterable[str]) -> list[int]:
    """Returns the steps of the checkpoints whose markers are among names, the newest first."""
    start, found = f"{_CHECKPOINTS}/ckpt-", []
    for name in names:
        step = name.removeprefix(start).removesuffix(_MARKER)
        if name == f"{start}{step}{_MARKER}" and step.isdecimal() and len(step) < 19:
            found.append(int(step))
    return sorted(found, reverse=True)


def open_mirror(url: str, local_dir: str | None = None) -> StoreMirror:
    """Returns the `StoreMirror` of a run in an object store.

    Args:
      url: the run directory in the store.
      local_dir: the local directory; default one named after the URL in the cache, see `stores.cache`.
    """
    return StoreMirror(url, files.resolve(local_dir, "--local_dir") if local_dir else stores.cache("runs", url))
