"""BackgroundWriter: another writer in a thread of its own, whose failures and delays do not reach the training."""

import functools
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping

from absl import logging

from looplib.base.messages import gist
from looplib.report.writers.contract import Setting, Writer
from looplib.report.writers.shown import Shown

_SYNC_SECONDS, _SYNC_SHARE = 2.0, 0.02  # that `sync` may wait: the shorter of the two, a share of the time between them


class BackgroundWriter(Writer):
    """Passes everything on to another writer, in one thread and in order.

    If the other one raises, or lets too many calls wait, a warning says so, and it is not called again. The thread
    starts with the first call.

    Args:
      writer: the other writer.
      most_waiting: number of calls that may wait for it.
      patience: seconds that `close` waits for it.
    """

    def __init__(self, writer: Writer, most_waiting: int = 10_000, patience: float = 30.0) -> None:
        self._writer, self._name, self._patience = writer, type(writer).__name__, patience
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(most_waiting)
        self._thread: threading.Thread | None = None
        self._given_up = False
        self._synced = time.monotonic()

    def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """See `Writer`."""
        self._call(functools.partial(self._writer.write, step, split, dict(metrics)))

    def show(self, step: int, split: str, shown: Mapping[str, Shown]) -> None:
        """See `Writer`."""
        self._call(functools.partial(self._writer.show, step, split, dict(shown)))

    def settings(self, settings: Mapping[str, Setting]) -> None:
        """See `Writer`."""
        self._call(functools.partial(self._writer.settings, dict(settings)))

    def resume(self, step: int, reported: dict[str, int]) -> None:
        """See `Writer`."""
        self._call(functools.partial(self._writer.resume, step, dict(reported)))

    def sync(self) -> None:
        """Waits a moment for the calls so far, so that a checkpoint is rarely newer than what was written.

        A tracker that hangs makes a run slower by 2% at most.
        """
        done, before, self._synced = threading.Event(), self._synced, time.monotonic()
        if self._thread is not None:
            self._call(done.set)
            done.wait(0 if self._given_up else min(_SYNC_SECONDS, _SYNC_SHARE * (self._synced - before)))

    def close(self) -> None:
        """Lets the other writer close, and waits for it, at most for the time of `patience`."""
        thread, self._thread = self._thread, None
        if thread is None or self._given_up:
            return
        self._put(self._writer.close)
        self._put(None)
        thread.join(self._patience)
        if thread.is_alive():
            self._give_up(f"did not end within {self._patience:g} s")

    def _call(self, call: Callable[[], None]) -> None:
        if self._thread is None:
            # A daemon, because a process must be able to end while it hangs.
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._put(call)

    def _put(self, call: Callable[[], None] | None) -> None:
        try:
            if not self._given_up:
                self._calls.put_nowait(call)
        except queue.Full:
            self._give_up(f"does not keep up: {self._calls.maxsize} records are waiting")

    def _work(self) -> None:
        while not self._given_up and (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:  # a library may call sys.exit
                self._give_up(gist(error) if isinstance(error, Exception) else repr(error))

    def _give_up(self, reason: str) -> None:
        if not self._given_up:
            self._given_up = True
            reason = re.sub(r"://[^/@\s]*@", "://", reason)  # a password in an address
            logging.warning("%s is left out from here on, and the training continues: %s", self._name, reason)
