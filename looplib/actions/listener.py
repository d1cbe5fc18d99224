"""NoticeListener: an action that ends a training, saved, when a notice comes."""

import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import logging

from looplib.actions.sources import Announcement, AwsNotices, GcpNotices, NoticeSource
from looplib.base.console import printable
from looplib.base.messages import gist
from looplib.errors import Preempted
from looplib.guards.preemption import notice as preemption
from looplib.report.run_report import RunReport
from looplib.run.notice import Notice, iso_time, notices_of
from looplib.task.actions import Action

SLURM = "slurm"
_POLLED = {kind.name: kind for kind in (GcpNotices, AwsNotices)}
SOURCES = (*_POLLED, SLURM)
_OF_SLURM = ("SIGUSR1", "SIGUSR2", "SIGTERM")  # which --signal may name; SIGTERM comes at the end of the time too
_ROOM = 1 << 13  # bytes of what a worker tells the others


class NoticeListener(Action):
    """Ends a training as a signal does, when a source says that the machine or the job goes soon.

    A thread asks each metadata server, so that no step waits for it. Signals of Slurm are those of `health.preemption`.

    Args:
      names: of `SOURCES`.

    Raises:
      UsageError: if an environment variable has no address.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._sources: list[NoticeSource] = [_POLLED[name]() for name in dict.fromkeys(names) if name in _POLLED]
        self._has_slurm = SLURM in names
        self._host = socket.gethostname()
        self._found: dict[tuple[str, str], Notice] = {}  # by source and kind, of this training
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._report: RunReport | None = None

    def on_start(self, controller: Any) -> None:
        """Listens from here on."""
        self._found, self._ended, self._report = {}, threading.Event(), controller.report
        if self._has_slurm and "SLURM_JOB_ID" not in os.environ:
            logging.warning("--notices=slurm: this process is not part of a job of Slurm (no SLURM_JOB_ID)")
        preemption.describe = self._describe
        for source in self._sources:
            name = f"looplib-notices-{source.name}"
            # A daemon, because a process must be able to end while an answer hangs.
            threading.Thread(target=self._watch, args=(source, self._ended), name=name, daemon=True).start()

    def on_end(self, controller: Any) -> None:
        """Listens no longer."""
        with self._lock:
            self._ended.set()
        preemption.describe = str

    def on_exception(self, error: BaseException, controller: Any) -> None:
        """Listens no longer; the chief writes the notices of the other workers into `run.json` too."""
        self.on_end(controller)
        if not isinstance(error, Preempted) or error.alone:
            return
        own = [dataclasses.asdict(told) for told in self._found.values()]
        text = json.dumps({"notices": own}).encode()
        rows = controller.gather(np.frombuffer(text.ljust(_ROOM)[:_ROOM], np.uint8))  # all workers come here
        others = [told for row in rows[1:] for told in _read(row.tobytes())] if controller.is_chief else []
        for told in others:
            logging.warning("a worker on %s got %s", told.host, told)
            self._report.note("notices", **dataclasses.asdict(told))
        if others:
            controller.report.write("preempted")

    def _watch(self, source: NoticeSource, ended: threading.Event) -> None:
        """Looks again and again, in a thread."""
        warned, logged = False, set[str]()
        while not ended.is_set():
            try:
                for announced in source.look():
                    if announced.ends:
                        self._end(source.name, announced, ended)
                    elif announced.kind not in logged:
                        logged.add(announced.kind)
                        logging.warning("%s announces: %s; the run continues", source.name, announced.kind)
            except Exception as error:  # of any server, or of this machine; a thread that ends hears of nothing
                if not warned and not ended.is_set():
                    text = "--notices=%s: %s gives no answer that is understood, and is asked again: %s"
                    logging.warning(text, source.name, source.server, printable(gist(error)))
                warned = True
            ended.wait(source.seconds)

    def _end(self, source: str, announced: Announcement, ended: threading.Event) -> None:
        with self._lock:
            if not ended.is_set():
                told = self._told(source, announced.kind, announced.deadline)
                preemption.request(str(told))  # each time, as one from before the training is forgotten as it begins

    def _told(self, source: str, kind: str, deadline: str | None) -> Notice:
        """Returns the notice of a kind, which is noted when it comes first."""
        told = Notice(source, kind, self._host, iso_time(time.time()), deadline)
        if (first := self._found.setdefault((source, kind), told)) is told:
            self._report.note("notices", **dataclasses.asdict(told))
        return first

    def _describe(self, name: str) -> str:
        """Returns what messages say of a signal; called in any thread, at any time."""
        if self._has_slurm and name in _OF_SLURM:
            return str(self._told(SLURM, name, _end_of_the_job()))
        first = next(iter(list(self._found.values())), None)
        return f"{name}, after {first}" if first else name


def _end_of_the_job() -> str | None:
    """Returns when the time of a job of Slurm is over, in ISO 8601; None if Slurm has not said it."""
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    return iso_time(int(text)) if text.isdecimal() and len(text) <= 11 else None


def _read(text: bytes) -> list[Notice]:
    """Returns the notices that a worker has told; none if they were cut."""
    try:
        return notices_of(json.loads(text))
    except ValueError:
        return []
