"""The copy of a run directory in an object store.

The run works in a local directory. A thread copies what is new into the store, see `copying`; a start on another
machine fetches what it needs, see `fetching`.
"""

import atexit
import concurrent.futures
import contextlib
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping

from absl import logging

from looplib.base import files, folders
from looplib.base.messages import gist
from looplib.buckets import lease as leases
from looplib.buckets.download import Fetcher
from looplib.buckets.lease import HeldFolders, Lease, LeaseHolder
from looplib.buckets.note import CHECKPOINTS, LocalCopy, steps_of
from looplib.buckets.upload import EVERY, FOLDER, Copier, Outputs, of_jobs
from looplib.buckets.upload import newest as newest_job
from looplib.cluster.preemption import notice
from looplib.errors import FileError, LockedError, RunDirectoryError, StoreError
from looplib.masks import masked_text
from looplib.run import lock
from looplib.run.mirror import Mirror
from looplib.run.status import Standing
from looplib.stores import stores
from looplib.stores.shards import files_of, kind_of
from looplib.stores.stores import PATIENCE, Store, StoredFile

_TICK, _LONGEST_TICK = 0.5, 15.0  # seconds between two looks at the local directory; the longer while the store fails
_REFRESH = min(10.0, EVERY)  # seconds between two looks at the store, for a process that waits for news
_LAST = 600.0  # seconds that the end of a run waits for the store, and a worker for a checkpoint of the chief's
_SLOWEST = 300  # seconds that a file may take
_SHARE = 3.0  # seconds that a save waits for a store that does not answer, for the positions of other workers
_AFTER_A_SIGNAL = 60.0  # seconds that the end of a run waits for a store that does not answer
_PASSING = (StoreError, FileError, OSError)  # what the store says, or this machine lacks; tried again


class StoreMirror(Mirror):
    """The local directory of a run in an object store.

    Args:
      store: the run directory in the store.
      directory: the local run directory; what is noted about the copy is beside it, in `<directory>.mirror`.

    Attributes:
      directory: the local run directory.
      standing: the `Standing`.

    Raises:
      UsageError: if the directory holds something else.
    """

    def __init__(self, store: Store, directory: str) -> None:
        self.directory, self.url, self._store = directory, masked_text(store.url), store
        self._copy = LocalCopy(store.url, directory)
        self.standing = Standing(self.url, complete=time.time())
        self._fetcher = Fetcher(store, self._copy)
        self._copier: Copier | None = None
        self._lease: Lease | None = None
        self._outputs: Outputs | None = None
        self._held = HeldFolders(store, self._copy)
        self._ending, self._released = threading.Event(), threading.Event()
        self._worker = self._renewer = threading.Thread()
        self._later: list[int] = []  # steps of checkpoints that are to be fetched
        self._lost: LockedError | RunDirectoryError | None = None  # nothing is written from then on
        self._failed: StoreError | None = None  # an error that nobody expected
        self._told = False
        self._refreshed = float("-inf")
        self._patience, self._share_patience = _LAST, _SHARE  # of the end, and of `share`

    def begin(self, trains: bool) -> None:
        """Fetches what a start needs; for a training, takes the run, and begins to copy.

        Raises:
          UsageError: if another process trains there, or the store does not answer.
        """
        if not trains:
            listed = self._look()
            newest = leases.read_with_age(self._store, leases.highest_of(listed))[0] or LeaseHolder()
            known = [newest.jobs, newest.since, newest_job(of_jobs(listed))]
            self._outputs = Outputs(self._store, self._copy, self._held, known)
            return
        self._lease = Lease(Store(self._store.url))
        try:
            with self._copy.alone():
                self._fetch_a_start()
        except BaseException:
            with contextlib.suppress(StoreError, FileError):
                self._lease.withdraw(0.0)
            raise
        self._copy.hold()
        self._copier = Copier(self._store, self._copy, self._lease, self._held)
        self._worker, self._renewer = (
            threading.Thread(target=self._watched, args=(work,), daemon=True) for work in (self._work, self._renew)
        )
        for thread in (self._worker, self._renewer):
            thread.start()

    def _fetch_a_start(self) -> None:
        """Has the local directory be what the training continues from."""
        token, before, listed = self._copy.note.token, self._lease.before, self._store.listed()
        here, there = self._copy.steps(), steps_of(listed)
        if token and not before and here and not there:
            raise StoreError(
                f"there is no run in {self.url}, although the copy in {self.directory} has its steps up to "
                f"{here[0]}; if it is another store, correct the address; if the run was deleted there, remove the copy"
            )
        lease_is_lost = before is None or not before.token
        is_ours = here[:1] >= there[:1] if lease_is_lost else token == before.token
        # Older checkpoints come while the run trains: what it keeps and which is the best depends on all of them.
        if token and is_ours and self._copy.is_whole():
            self._later = self._fetcher.catch_up(self._lease, listed)
        else:
            self._later = self._fetcher.start_over(self._lease, listed, bool(before))
        self._copy.note.token = self._lease.token
        self._copy.write_note()

    def refresh(self) -> None:
        """Fetches what is new, for a process that does not train, and copies what it has written; now and then."""
        if time.monotonic() - self._refreshed >= _REFRESH:
            try:
                self._copy_outputs(PATIENCE)
                self._look()
            except (StoreError, FileError) as error:
                logging.warning("%s is looked at again later: %s", self.url, _reason(error))
            self._refreshed = time.monotonic()

    def _look(self) -> dict[str, StoredFile]:
        self.update(listed := self._store.listed())
        self._refreshed = time.monotonic()
        if self._outputs is not None:
            self._outputs.note_fetched()
        return listed

    def _copy_outputs(self, patience: float) -> None:
        if self._outputs is not None:
            self._outputs.copy(patience)

    def update(self, listed: dict[str, StoredFile], checkpoints: bool = True) -> None:
        """Fetches what is new in the store, unless this machine has what is newer.

        That is so where a run of this machine trains in the directory, or was the last to train.

        Args:
          listed: what the store has, by name.
          checkpoints: whether the checkpoints are wanted too.
        """
        versions = {name: file.version for name, file in listed.items()}
        if not checkpoints and self._fetcher.is_current(versions):
            return
        newest, age = leases.read_with_age(self._store, leases.highest_of(listed))
        newest = newest or LeaseHolder()
        with self._copy.alone():
            holder, token = lock.holder(self.directory), self._copy.note.token
            if not (holder and holder.holds) and not (token and token == newest.token):
                if not (token and newest.token):
                    self._fetcher.refresh(versions, newest, checkpoints, age)
                    return
                with self._copy.replaced() as before:  # what a run has left here that another one has continued
                    self._fetcher.refresh(versions, newest, checkpoints, age)
                self._copy.settle(before, listed.__contains__)

    def check(self, saved: bool = False) -> None:
        """See `Mirror.check`; the errors are `LockedError`, `RunDirectoryError` and `StoreError`."""
        self._copy.check()
        if self._lost:
            self._told = True
            raise self._lost
        if saved and self._failed:
            raise self._failed

    def share(self, path: str) -> None:
        """Copies a file of a checkpoint that a worker other than the chief has written.

        Raises:
          OSError: if the store does not take it.
        """
        try:
            self._store.put(path, f"{CHECKPOINTS}/{os.path.basename(path)}", self._share_patience)
            self._share_patience = _SHARE
        except (StoreError, FileError) as error:
            self._share_patience = 0.0  # training waits here, and the store may be down for long
            raise OSError(str(error)) from error

    def take(self, path: str) -> bool:
        """Fetches a file that another worker has shared, unless it is here, as on one machine."""
        if os.path.exists(path):
            return True
        name = os.path.basename(path)
        try:
            found, reason = self._fetcher.fetch(f"{CHECKPOINTS}/{name}", patience=_SHARE), "it is not in the store"
        except _PASSING as error:
            found, reason = False, str(error)
        if not found:
            logging.warning("%s is left out of its checkpoint: %s", name, reason)
        return found

    def wait_for(self, checkpoint: tuple[int, int]) -> None:
        """Fetches a checkpoint of the chief's, which copies it meanwhile, unless it is here; for another worker."""
        end = time.monotonic() + _LAST
        while self._copy.id_of(checkpoint[0]) != checkpoint and time.monotonic() < end:
            url = self.url
            logging.log_first_n(logging.INFO, "waiting until %s has the checkpoint of step %d", 1, url, checkpoint[0])
            with contextlib.suppress(StoreError, FileError):
                self._look()
            time.sleep(_TICK)

    def take_folder(self, name: str, as_it_is: bool) -> str:
        """See `Mirror.take_folder` and `HeldFolders.take`."""
        if self._copier is None:
            self._held.take(name, self._fetcher.fetch if as_it_is else None)
        return f"{self.url}/{name}"

    def fetch_older(self) -> None:
        """See `Mirror.fetch_older`; a run that has been asked to end does not wait."""
        while self._later and self._worker.is_alive() and not (self._lost or self.standing.error or notice.requested):
            time.sleep(_TICK / 5)

    def end(self) -> None:
        """Copies the rest, and lets others take the run; called again, what was written since.

        A signal does not cut it short, but a store that is down is not waited for as long then.

        Raises:
          StoreError: if the store did not take all of it in time; the local directory has it.
        """
        with notice.deferred(lambda: True):
            end = time.monotonic() + self._patience
            while True:
                try:
                    return self._end(min(self._patience, _AFTER_A_SIGNAL))
                except StoreError:
                    if notice.requested or time.monotonic() > end:
                        self._patience = 0.0  # that was long enough
                        self._released.set()  # a process that continues does not keep the run from others
                        raise

    def _end(self, patience: float) -> None:
        if self._copier is None:
            self._copy_outputs(patience)
            self._held.release(patience)
            return
        self._ending.set()
        self._worker.join()
        if self._lost:
            self._released.set()
            if not self._told:
                self.check()
            return
        try:
            self._lease.check(patience, surely=True)
            self._copier.copy(everything=True, patience=patience)
            self._released.set()
            self._renewer.join()
            self._held.release(patience)
            self._lease.release(patience)
            logging.log_first_n(logging.INFO, "all of the run is in %s", 1, self.url)
            self.standing.error, self.standing.complete = "", time.time()
        except (LockedError, RunDirectoryError) as error:
            self._lost, self._told = error, True
            self._released.set()
            raise
        except _PASSING as error:
            self.standing.error = str(error)
            raise StoreError(
                f"{error}; what is missing in {self.url} is in {self.directory}, and the same command copies it"
            ) from error
        finally:
            self._copy.write_note()
            self._show()

    def _watched(self, work: Callable[[], None]) -> None:
        """Does the work of a thread; an error that nobody expected ends the run, after its next save."""
        try:
            work()
        except Exception as error:
            logging.exception("the copy in %s has ended", self.url)
            self._failed = StoreError(
                f"the copy in {self.url} has ended by an error ({type(error).__name__}: "
                f"{gist(error)}); what is missing there is in {self.directory}, and the same command "
                "copies it"
            )

    def _renew(self) -> None:
        """Renews the lease until the end."""
        self._lost = self._lease.keep(self._released) or self._lost

    def _work(self) -> None:
        """Copies until the end."""
        tick = _TICK
        while not self._ending.wait(tick) and not self._lost:
            try:
                self._copier.copy(everything=False, patience=leases.SECONDS / 4)
                self.standing.error, self.standing.complete = "", time.time()
                if self._later:
                    self._fetcher.fetch_checkpoint(self._later[0])
                    self._later.pop(0)
                tick = 0.0 if self._later else _TICK
            except (LockedError, RunDirectoryError) as error:
                self._lost = error
                logging.error("%s", error)
            except _PASSING as error:
                self.standing.error, tick = _reason(error), min(max(_TICK, 2 * tick), _LONGEST_TICK)
            self._show()

    def _show(self) -> None:
        """Writes how far the copy is, for `status` and the page."""
        self.standing.behind = len(self._copier.missing())
        self.standing.step = max(steps_of(self._copy.note.known), default=-1)
        self.standing.requests = self._store.requests
        self.standing.write(self._copy.place)


def _reason(error: Exception) -> str:
    """Returns why the store did not answer, without the advice for a run that has ended."""
    return str(error).removesuffix(stores.ADVICE)


def open_mirror(url: str, local_dir: str | None = None) -> StoreMirror:
    """Returns the `StoreMirror` of a run in an object store.

    Args:
      url: the run directory in the store.
      local_dir: the local directory; default one named after the URL in the cache, see `stores.cache`.
    """
    store = Store(url, seconds=_SLOWEST)
    if store.url.startswith(("http://", "https://")):
        raise StoreError(f"a run cannot be at {url}, which is only read; name a bucket, such as s3://bucket/run")
    local = files.resolve(local_dir, "--local_dir") if local_dir else stores.cache("runs", store.url)
    return StoreMirror(store, local)


_OF_A_RUN = re.compile(r"(?:(.*)/)?(?:run\.json|metrics\.jsonl|\.lease/\d+)")
_INSIDE_A_RUN = re.compile(r"(.*?)((?:/checkpoints(?:/ckpt-\d+)?)?(?:@[^/@]*)?)")
_WEIGHTS = re.compile(  # files of weights in a folder, checkpoints and a SavedModel; what is below the latter is a part
    r"(?:checkpoints/)?(?:checkpoint|[^/]+\.(?:index|commit|data-\d+-of-\d+))|(?:saved_model|fingerprint)\.pb"
    r"|[^/]+\.(?:safetensors|h5|keras|safetensors\.index\.json|weights\.json)|(?P<part>(?:variables|assets)/.*)"
)
_TOGETHER = 16  # runs that are asked for at the same time
_NO_RUN = (IsADirectoryError, NotADirectoryError, FileExistsError, RunDirectoryError)  # names that no run directory has
_DEEPEST = 3  # folders between a URL and the runs below it


def fetched(url: str, checkpoints: bool = True, unchecked: bool = False) -> str:
    """Fetches a run, a folder of runs, a checkpoint of a run, a model or a file; returns the local path.

    Args:
      url: such as "s3://bucket/run", "s3://bucket/run@best", "s3://bucket/sweep" or "s3://bucket/weights.h5".
      checkpoints: whether the checkpoints of runs are wanted too.
      unchecked: whether all files are fetched again, and as they are, also those of damaged checkpoints.

    Raises:
      StoreError: if there is nothing, neither runs nor weights, or the store cannot be used.
    """
    place, inside = _INSIDE_A_RUN.fullmatch(url.rstrip("/")).groups()
    store = Store(place)
    place, there = store.url, store.listed()
    runs = _runs_among(there)
    if "" in runs and not unchecked:
        local = stores.cache("runs", place)
        StoreMirror(store, local).update(there, checkpoints)
        return local + inside
    wanted = there if "" in runs else _weights_among(there) if checkpoints else {}
    if there and not wanted and (unchecked or not runs):  # somebody's data, which may be large
        what = "is neither a run nor weights" if checkpoints else f"holds no run, up to {_DEEPEST} folders deep"
        raise StoreError(f"{url} {what}; name a run directory, as --model_dir does")
    local = stores.cache("copies", place)
    if unchecked:
        local = tempfile.mkdtemp(prefix="unchecked-", dir=folders.make_folder(stores.cache_directory()))
        atexit.register(folders.remove, *os.path.split(local))
    if runs and not unchecked:
        _fetch_runs(store, there, local, checkpoints)
        return local
    if not there:  # an object, and no folder
        *_, name = place.split("/")
        path = os.path.join(folders.make_folder(local), name)
        try:
            Store(place[: -len(name) - 1]).fetch(name, path)
        except FileNotFoundError:
            raise StoreError(f"there is nothing at {url}; check the bucket and the path") from None
        if kind := kind_of(name):
            _fetch_shards(place[: -len(name) - 1], path, kind)
        return path
    for name in wanted:
        *below, last = name.split("/")
        try:
            store.fetch(name, os.path.join(folders.make_folder(local, *below), last))
        except FileNotFoundError:  # a run that trains deletes checkpoints
            if not unchecked:
                raise StoreError(f"{url}/{name} was deleted just now; run the command again") from None
    return local + inside


def _weights_among(names: Mapping[str, StoredFile]) -> dict[str, StoredFile]:
    """Returns those of the objects in a folder that a model may be loaded from; {} if there is nothing but parts."""
    found = {name: match for name in names if (match := _WEIGHTS.fullmatch(name))}
    return {name: names[name] for name in found} if any(match["part"] is None for match in found.values()) else {}


def _runs_among(names: Mapping[str, StoredFile]) -> set[str]:
    """Returns the folders of names that are run directories; "" for what all of them are in."""
    found = {match[1] or "" for match in map(_OF_A_RUN.fullmatch, names) if match}
    return {run for run in found if run.count("/") < _DEEPEST and FOLDER not in run.split("/")}


def _fetch_runs(store: Store, there: Mapping[str, StoredFile], local: str, checkpoints: bool) -> None:
    """Fetches the runs below a folder into folders below a local one; warns of one that no directory can hold.

    Args:
      store: the folder.
      there: what it has, by name.
      local: the local one.
      checkpoints: whether those are wanted too.
    """
    objects: dict[str, dict[str, StoredFile]] = {run: {} for run in sorted(_runs_among(there))}
    for name, file in there.items():
        parts = name.split("/")
        for depth in range(1, min(_DEEPEST + 1, len(parts))):
            if (run := "/".join(parts[:depth])) in objects:
                objects[run]["/".join(parts[depth:])] = file

    def update(run: str) -> None:
        try:
            StoreMirror(store.below(run), os.path.join(local, *run.split("/"))).update(objects[run], checkpoints)
        except _NO_RUN as error:
            logging.warning("%s/%s is left out: %s", store.url, run, gist(error))

    with concurrent.futures.ThreadPoolExecutor(_TOGETHER) as pool:
        list(pool.map(update, objects))


def _fetch_shards(folder: str, index: str, kind: str) -> None:
    """Fetches the files that an index of weights names, beside it."""
    store = Store(folder)
    for name in files_of(index, kind):
        try:
            store.fetch(name, folders.inside(os.path.dirname(index), name))
        except FileNotFoundError:
            raise StoreError(
                f"there is nothing at {folder}/{name}, which the index beside it names; copy all its files"
            ) from None
