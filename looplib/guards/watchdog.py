"""The watchdog: a run that makes no progress says where it hangs, and ends."""

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from looplib.base import console
from looplib.cluster import peers
from looplib.cluster.preemption import RunningTime, debugger_holds_a_thread, innermost_frames
from looplib.errors import EXIT_STALLED

_UNANSWERED = 20.0  # seconds without a step of the training, after which those that it may wait for are asked
_OFTEN = 20  # times the longest time that was seen between two signs of progress in a phase
# The minimum timeout of each phase, in seconds.
_GENEROUS = {"train": 900.0, "evaluate": 900.0, "save": 1800.0}
_GENEROUS_ELSE = 3600.0


class Phases(Protocol):
    """The part of a `Clock` that the watchdog reads."""

    @property
    def current(self) -> tuple[str, int]:
        """The phase, and how many phases were entered before it."""


class Watchdog:
    """Ends the process when neither the phase nor the steps change for too long.

    The limit is learned: 20 times the longest pause seen in that phase of this run, and at least 15 minutes in training
    and evaluation, 30 in a save, an hour in tracing and all other phases. Time while a debugger or a console holds a
    thread, or while the process is suspended, does not count.

    Args:
      clock: the run's `Clock`, for the phase.
      steps: returns the steps done in training and in evaluation, and anything else that changes with progress; called
        from another thread.
      checkpoint: returns the newest checkpoint's path, or None.
      limit: seconds without progress in any phase, instead of what is learned; 0 disables the watchdog.
      lost: returns which data worker the training waits for in vain, as a sentence; "" if there is none.
    """

    def __init__(
        self, clock: Phases, steps: Callable[[], Sequence[Any]], checkpoint: Callable[[], str | None],
        limit: float | None = None, lost: Callable[[], str] = str,
    ) -> None:  # fmt: skip
        self._lost = lost
        self._clock, self._steps, self._checkpoint, self._limit = clock, steps, checkpoint, limit
        self._longest: dict[str, float] = {}
        self._depth = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # which ends at its first look after the `with` block

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches while a `with` block runs."""
        if self._limit == 0 or self._depth:
            yield
            return
        with self._lock:
            self._depth += 1
            if self._thread is None or not self._thread.is_alive():  # as in a fork of the process
                self._thread = threading.Thread(target=self._watch, name="looplib-watchdog", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            self._depth -= 1

    def allowed(self, phase: str) -> float:
        """Returns how many seconds without progress a phase is allowed now."""
        learned = max(_GENEROUS.get(phase, _GENEROUS_ELSE), _OFTEN * self._longest.get(phase, 0.0))
        return learned if self._limit is None else self._limit

    def _watch(self) -> None:
        interval = min(1.0, (self._limit or 4.0) / 4)
        seen, paused, ran = None, 0.0, RunningTime(interval)
        while True:
            time.sleep(interval)
            with self._lock:
                if not self._depth:
                    self._thread = None
                    return
            phase, entered = self._clock.current
            progress = phase, entered, self._steps()
            paused += ran.since_last()
            if progress != seen:
                if seen is not None:
                    self._longest[seen[0]] = max(self._longest.get(seen[0], 0.0), paused)
                seen, paused = progress, 0.0
            elif debugger_holds_a_thread():
                paused = 0.0
            elif paused > self.allowed(phase):
                self._end(phase, progress[-1], paused)
            elif phase == "train" and paused > _UNANSWERED and (lost := self._lost()):
                self._end(phase, progress[-1], paused, f"{lost}; ")

    def _end(self, phase: str, steps: Sequence[Any], seconds: float, lost: str = "") -> None:
        console.last_line("\n".join(["looplib: stack traces of all threads:", *_stacks()]))
        kept = self._checkpoint()
        advice = f"run the same command to resume from {kept}" if kept else "no checkpoint was saved"
        sentence = (
            f"no progress for {seconds:.0f} s in the phase {phase!r} after {steps[0]} steps; {lost}see the stack "
            f"traces above; {advice} (--stall_limit sets the limit)"
        )
        console.last_line(f"looplib: error: {sentence}")
        peers.current.announce_exit(EXIT_STALLED, sentence)
        os._exit(EXIT_STALLED)


def _stacks() -> Iterator[str]:
    """Yields lines with the Python frames of every thread, the innermost first.

    Not by `faulthandler`, which holds Python's lock while it writes, possibly to a pipe without a reader.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in innermost_frames().items():
        yield f"Thread {names.get(ident, ident)} (most recent call first):"
        for each, line in traceback.walk_stack(frame):
            yield f'  File "{each.f_code.co_filename}", line {line} in {each.f_code.co_name}'
