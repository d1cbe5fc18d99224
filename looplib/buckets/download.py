"""Fetches a run from an object store: checkpoints that are whole and intact, and what the run has reported."""

import contextlib
import os
import re
import time
from collections.abc import Mapping

from absl import logging

from looplib.base import files, folders
from looplib.buckets import lease as leases
from looplib.buckets.lease import FOLDERS, LEASES, Lease, LeaseHolder
from looplib.buckets.note import CHECKPOINTS, INCOMING, MARKER, LocalCopy, marker_of, steps_of
from looplib.buckets.upload import FOLDER, IDS, merge, newest, of_jobs
from looplib.errors import FileError, StoreError, UsageError
from looplib.run import commits
from looplib.run.directory import LOCK, REPORTS
from looplib.run.lock import LockNote
from looplib.stores.stores import PATIENCE, Store, StoredFile

# Files that no later start adds to, or that come otherwise; all others have to be here before a run writes them.
_NOT_ADDED_TO = (f"{CHECKPOINTS}/", f"{leases.FOLDER}/", f"{LEASES}/", f"{FOLDER}/", *FOLDERS, "train/", "eval/",
                 "events.out.tfevents.", "media/", "wandb/", "report.html")  # fmt: skip
_PAUSES = (0.2, 0.5, 1.0, 2.0)  # seconds before it is believed that an object which a start needs is not there


class Fetcher:
    """Copies from a store into a local run directory.

    Args:
      store: where the run is.
      copy: the `LocalCopy`.
    """

    def __init__(self, store: Store, copy: LocalCopy) -> None:
        self._store, self._copy = store, copy

    def catch_up(self, lease: Lease, listed: Mapping[str, StoredFile]) -> list[int]:
        """Fetches what evaluation jobs have reported; has what is not in the store as it should be copied again.

        For a run that this directory has, and nobody has written since. Arguments and result are those of `start_over`.
        """
        known = self._copy.note.known
        for name in listed.keys() - known.keys():  # a start that was killed may not have noted what it copied last
            is_here = name.startswith(f"{CHECKPOINTS}/") and os.path.lexists(self._copy.path(name))
            if is_here or self._copy.deletions.has(name):  # to be copied again, or deleted
                known[name] = [listed[name].bytes, 0]
        gone = [name for name in known if not os.path.exists(self._copy.path(name))]
        for name in (name for name in gone if not self._copy.deletions.has(name)):  # else it is deleted there, too
            del known[name]
            if not name.startswith(f"{CHECKPOINTS}/"):
                self.fetch(name)
        for name in [name for name, (size, _) in known.items() if name not in listed or listed[name].bytes != size]:
            for lost in (name, re.sub(r"(/ckpt-\d+)\..*", rf"\1{MARKER}", name)):  # which asks for all files of it
                known.pop(lost, None)
        self._merge(lease, [name for name in of_jobs(listed) if name not in known])
        there = {*lease.steps, *steps_of(listed)}  # which may have what a store has not deleted, although it said so
        return sorted(there - set(steps_of(known)) - set(self._copy.steps()), reverse=True)

    def _merge(self, lease: Lease, jobs: list[str]) -> None:
        """Fetches the records of evaluation jobs, and adds them to those of the run."""
        for name in jobs:
            self.fetch(name, _PAUSES)
        merge(self._copy, jobs, lease.since, lease.jobs)
        lease.jobs = max(lease.jobs, newest(jobs))

    def start_over(self, lease: Lease, listed: Mapping[str, StoredFile], has_run: bool) -> list[int]:
        """Fetches the newest intact checkpoint, the reports, and other files that the run may add to.

        They are in place of what an earlier start has left here.

        Args:
          lease: of this start. It knows of checkpoints that the store has although its listing may be old.
          listed: what the store has, by name.
          has_run: whether there may be more than the listing has, for the same reason.

        Returns:
          The steps of older checkpoints, which may be fetched later.
        """
        had = self._copy.steps()
        with self._copy.replaced() as before:
            self._empty()
            found = steps_of({*listed, *map(marker_of, lease.steps)})
            lacks_all = bool(found)
            while found and not self.fetch_checkpoint(found.pop(0), _PAUSES):
                pass
            if had and lacks_all and not self._copy.steps():
                raise StoreError(
                    f"no checkpoint in {self._store.url} is intact; {self._copy.directory} has step "
                    f"{had[0]} of an earlier start: copy its checkpoints there, or remove this directory"
                )
            added_to = [name for name in listed if name not in REPORTS and not name.startswith(_NOT_ADDED_TO)]
            for name in (*(name for name in REPORTS if has_run or name in listed), *added_to):
                self.fetch(name, _PAUSES if name in listed else ())
            jobs = of_jobs(listed)
            if not self._copy.steps():  # the run begins, so that they are of an earlier one
                lease.since = max(lease.since, newest(jobs))
            self._merge(lease, jobs)
        self._copy.settle(before, lambda name: lacks_all or name in listed)
        return found

    def is_current(self, listed: Mapping[str, str]) -> bool:
        """Returns whether a listing has nothing new but checkpoints since the last `refresh`."""
        known = self._copy.note.versions
        wanted = [name for name in listed if name in REPORTS or name.startswith(f"{leases.FOLDER}/")]
        wanted += of_jobs(listed)
        return not self._copy.note.token and all(listed[name] and known.get(name) == listed[name] for name in wanted)

    def refresh(self, listed: Mapping[str, str], writer: LeaseHolder, checkpoints: bool, age: float | None) -> None:
        """Fetches what is new in the store.

        Args:
          listed: dict from the names in the store to their versions.
          writer: what the newest lease says, as of checkpoints that an old listing does not have.
          checkpoints: whether those are wanted too.
          age: seconds since that lease was renewed, by the clock of the store; None if not known.
        """
        versions, before = self._copy.note.versions, dict(self._copy.note.versions)
        there = steps_of({*listed, *map(marker_of, writer.steps)}) if checkpoints else []
        for step in (
            set(steps_of(self._copy.note.known)) - set(there) if there else ()
        ):  # of a run that began again from step 0, say
            self._forget_checkpoint(step)
        for step in there:
            version = listed.get(marker_of(step))
            if version and versions.get(marker_of(step)) != version:  # saved again since, perhaps by another run
                self._forget_checkpoint(step)
            if self.fetch_checkpoint(step) and version:
                versions[marker_of(step)] = version
        jobs = of_jobs(listed)
        for name in (*REPORTS, *IDS, *jobs):
            version = listed.get(name)
            if version is not None and not (version and versions.get(name) == version):
                self.fetch(name)
                versions[name] = version
        for name in merge(self._copy, jobs, writer.since, writer.jobs):
            self._copy.remember(name)
        is_news = any(versions.get(name) != listed[name] for name in listed if name.startswith(f"{leases.FOLDER}/"))
        self._note_writer(writer, 0.0 if age is None and is_news else age)
        versions.update({name: version for name, version in listed.items() if name.startswith(f"{leases.FOLDER}/")})
        if versions != before or not self._copy.note.token:
            self._copy.write_note()

    def _note_writer(self, writer: LeaseHolder, age: float | None) -> None:
        """Notes who writes in the store, and since when there is no news, where a reader of this copy looks for it.

        Args:
          writer: what the newest lease says.
          age: seconds without news; None for as long as this machine has seen none.
        """
        if age is None or not writer.host or writer.pid is None:
            return
        files.write_whole(self._copy.path(LOCK), LockNote(writer.pid, f"{writer.host}, in the store").text)
        for name in (*REPORTS, LOCK):
            with contextlib.suppress(OSError):
                os.utime(self._copy.path(name), times=(time.time() - age,) * 2)
                if name in self._copy.note.known:
                    self._copy.remember(name)

    def fetch_checkpoint(self, step: int, pauses: tuple[float, ...] = ()) -> bool:
        """Fetches a checkpoint that is complete and undamaged in the store; returns whether it is here.

        Args:
          step: its step.
          pauses: seconds before each further attempt at an object that is not there.
        """
        if self._copy.has(step):
            return True
        incoming, name = self._copy.folder(INCOMING), f"ckpt-{step}"
        path = os.path.join(incoming, name)
        try:
            self._fetch(f"{CHECKPOINTS}/{name}{MARKER}", path + MARKER, pauses)
            done = commits.read_marker(path)
            for file in done.files:
                self._fetch(f"{CHECKPOINTS}/{file}", os.path.join(incoming, file), pauses)
            damage = commits.verify(done)
        except FileNotFoundError:  # deleted meanwhile, or its upload or deletion was cut short
            damage = "it is not complete"
        except (ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
            if isinstance(error, (FileError, StoreError)):  # which prove no damage
                raise
            damage = str(error)
        if damage:
            logging.warning("the checkpoint of step %d in %s is left out: %s", step, self._store.url, damage)
            self._empty()
            return False
        to = folders.make_folder(self._copy.directory, CHECKPOINTS)
        if os.path.exists(os.path.join(to, name + commits.UNFINISHED)):  # the run is writing it again
            return False
        for file in (*done.files, name + MARKER):
            folders.move(incoming, file, to)
            self._copy.remember(f"{CHECKPOINTS}/{file}")
        return True

    def _forget_checkpoint(self, step: int) -> None:
        """Removes the local files of a checkpoint, its marker first."""
        of_it = [name for name in self._copy.note.known if name.startswith(f"{CHECKPOINTS}/ckpt-{step}.")]
        for name in sorted(of_it, key=lambda name: name != marker_of(step)):
            folders.remove(self._copy.checkpoints, name.removeprefix(f"{CHECKPOINTS}/"))
            del self._copy.note.known[name]

    def fetch(self, name: str, pauses: tuple[float, ...] = (), patience: float = PATIENCE) -> bool:
        """Fetches a file of the run directory, in place of the one that is here; returns whether there is one."""
        *place, last = name.split("/")
        incoming = self._copy.folder(INCOMING)
        try:
            self._fetch(name, os.path.join(incoming, last), pauses, patience)
        except FileNotFoundError:
            return False
        folders.move(incoming, last, folders.make_folder(self._copy.directory, *place))
        self._copy.remember(name)
        return True

    def _fetch(self, name: str, path: str, pauses: tuple[float, ...], patience: float = PATIENCE) -> None:
        for pause in pauses:
            try:
                return self._store.fetch(name, path, patience)
            except FileNotFoundError:
                time.sleep(pause)
        self._store.fetch(name, path, patience)

    def _empty(self) -> None:
        """Removes what an attempt has left in the folder of what comes in."""
        incoming = self._copy.folder(INCOMING)
        for name in os.listdir(incoming):
            folders.remove(incoming, name)
