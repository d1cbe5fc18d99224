"""The time that the process ran, without the time that it was suspended."""

import time


class RunningTime:
    """The seconds that this process ran, without those that it or its machine was suspended (SIGSTOP, Ctrl-Z).

    Args:
      interval: the planned seconds between two calls. More than twice as many were a suspension.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._looked = time.monotonic()

    def since_last(self) -> float:
        """Returns the seconds since the last call, or since this was made."""
        before, self._looked = self._looked, time.monotonic()
        return min(self._looked - before, 2 * self._interval)
