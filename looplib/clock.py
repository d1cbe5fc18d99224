"""Where the time went: seconds by phase, adding up to the wall time."""

import contextlib
import time


class Clock:
    """Adds up the seconds of phases that never overlap: time in an inner phase does not count for the outer one.

    Example:
        clock = Clock()
        with clock.phase("train"):
            with clock.phase("save"):
                ...
        clock.seconds()  # {"save": 0.2, "train": 1.3, "other": 0.01, "wall": 1.51}
    """

    def __init__(self, now=time.perf_counter):
        self._now = now
        self._started = self._mark = now()
        self._stack = ["other"]
        self._seconds = {"other": 0.0}
        self._entered = 0

    @contextlib.contextmanager
    def phase(self, name):
        """Counts the time of a `with` block for the phase `name`."""
        self._close_span()
        self._stack.append(name)
        self._entered += 1
        try:
            yield
        finally:
            self._close_span()
            self._stack.pop()
            self._entered += 1

    @property
    def current(self):
        """The phase of this moment, and how often it has changed: `(name, count)`; may be read by another thread."""
        return self._stack[-1], self._entered

    def seconds(self):
        """Returns a dict from phase to seconds; `other` is what no phase took, `wall` the sum of all."""
        self._close_span()
        wall = self._mark - self._started
        return {**{name: round(value, 3) for name, value in sorted(self._seconds.items())}, "wall": round(wall, 3)}

    def of(self, name):
        """Returns the seconds of one phase so far."""
        self._close_span()
        return self._seconds.get(name, 0.0)

    def _close_span(self):
        now = self._now()
        phase = self._stack[-1]
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._mark
        self._mark = now
