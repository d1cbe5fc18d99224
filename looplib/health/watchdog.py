"""The watchdog: a run that makes no progress says where it hangs, and ends."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from looplib import console
from looplib.cluster import peers
from looplib.errors import EXIT_STALLED
from looplib.health import debuggers
from looplib.health.running_time import RunningTime

_OFTEN = 20  # times the longest time that was seen between two signs of progress in a phase
# The least that is granted in a phase, in seconds, before the run's own times say more.
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
    and evaluation, 30 in a save, an hour in tracing and all other phases. Time in which a debugger or a console holds a
    thread, or in which the process is suspended, does not count.

    Args:
      clock: the run's `Clock`, for the phase.
      steps: function without arguments that returns the steps done in training and in evaluation, and anything else
        that changes with progress; called from another thread.
      checkpoint: function without arguments that returns the newest checkpoint's path, or None.
      limit: seconds without progress in any phase, instead of what is learned; None adapts to the run, 0
        disables the watchdog.
    """

    def __init__(
        self, clock: Phases, steps: Callable[[], Sequence[Any]], checkpoint: Callable[[], str | None],
        limit: float | None = None,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._steps = steps
        self._checkpoint = checkpoint
        self._limit = limit
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
        """Returns the seconds without progress that are granted in a phase now."""
        if self._limit is not None:
            return self._limit
        return max(_GENEROUS.get(phase, _GENEROUS_ELSE), _OFTEN * self._longest.get(phase, 0.0))

    def _is_needed(self) -> bool:
        with self._lock:
            if not self._depth:
                self._thread = None
            return self._depth > 0

    def _watch(self) -> None:
        interval = min(1.0, (self._limit or 4.0) / 4)
        seen, paused, ran = None, 0.0, RunningTime(interval)
        while True:
            time.sleep(interval)
            if not self._is_needed():
                return
            phase, entered = self._clock.current
            progress = phase, entered, self._steps()
            paused += ran.since_last()
            if progress != seen:
                if seen is not None:
                    self._longest[seen[0]] = max(self._longest.get(seen[0], 0.0), paused)
                seen, paused = progress, 0.0
            elif debuggers.hold_a_thread():
                paused = 0.0
            elif paused > self.allowed(phase):
                self._end(phase, progress[-1], paused)

    def _end(self, phase: str, steps: Sequence[Any], seconds: float) -> None:
        console.last_line("\n".join(["looplib: stack traces of all threads:", *_stacks()]))
        kept = self._checkpoint()
        advice = f"run the same command to resume from {kept}" if kept else "no checkpoint was saved"
        sentence = (
            f"no progress for {seconds:.0f} s in the phase {phase!r} after {steps[0]} steps; see the stack traces "
            f"above; {advice} (--stall_limit sets the limit)"
        )
        console.last_line(f"looplib: error: {sentence}")
        peers.current.last_words(EXIT_STALLED, sentence)
        os._exit(EXIT_STALLED)


def _stacks() -> list[str]:
    """Lines with the Python frames of every thread, the innermost first.

    Not by `faulthandler`, which holds Python's lock while it writes, possibly to a pipe without a reader.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        lines.append(f"Thread {names.get(ident, ident)} (most recent call first):")
        while frame is not None:
            code = frame.f_code
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
            frame = frame.f_back
    return lines
