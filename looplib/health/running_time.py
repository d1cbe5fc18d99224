"""The time that the process ran, without the time that it was suspended."""

import time


class RunningTime:
    """The seconds that this process ran, without those that it or its machine was suspended (SIGSTOP, Ctrl-Z).

    Args:
      interval: the planned seconds between two calls. More than twice as many were a suspension.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._seen = time.monotonic(), 0.0  # the last look, and the seconds suspended by then; replaced as one

    def since_last(self) -> float:
        """Returns the seconds since the last call, or since this was made."""
        (before, suspended), now = self._seen, time.monotonic()
        ran = min(now - before, 2 * self._interval)
        self._seen = now, suspended + now - before - ran
        return ran

    @property
    def suspended(self) -> float:
        """The seconds in which the process was suspended so far; may be read by another thread."""
        looked, suspended = self._seen
        return suspended + max(0.0, time.monotonic() - looked - 2 * self._interval)
