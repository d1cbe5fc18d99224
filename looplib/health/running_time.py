"""Time in which the process ran, without the time in which it was suspended."""

import time


class RunningTime:
    """Seconds in which this process ran: without those in which it, or its machine, was suspended (SIGSTOP, Ctrl-Z).

    Args:
      interval: seconds after which the next look is meant to come. A longer gap than its double was a suspension.
    """

    def __init__(self, interval: float):
        self._interval = interval
        self._looked = time.monotonic()

    def since_last(self) -> float:
        """Returns the seconds since the last call, or since this was made."""
        before, self._looked = self._looked, time.monotonic()
        return min(self._looked - before, 2 * self._interval)
