"""When `python -m looplib launch` starts workers again, and how many of them. Imports no TensorFlow."""

import contextlib
import dataclasses
import os

from looplib.base import files
from looplib.processes import tasks

BATCH_FILE = "LOOPLIB_LAUNCH_BATCH"  # of the environment: where the program writes the size of its global batch
REPORTED = ".reported"  # after that name: a file that is there once the program has trained and reported
_HOUR = 3600.0
_SHORT = 60.0  # seconds; a start that has lasted shorter than this doubles the next pause
_MOST_DOUBLINGS = 6


def read_batch(path: str) -> int | None:
    """Returns the size of the global batch that a program has written; None if there is none.

    Args:
      path: the file.
    """
    with contextlib.suppress(OSError, ValueError):
        size = int(files.read_text(path, most=20))
        return size if size > 0 else None
    return None


def may_be_ended(path: str) -> bool:
    """Returns whether a program has steps to save; True also for one that has written nothing about itself.

    Args:
      path: the file with the size of its global batch.
    """
    return os.path.exists(path + REPORTED) or not os.path.exists(path)


@dataclasses.dataclass
class RestartBudget:
    """The restarts of the last hour.

    Attributes:
      backoff: seconds before a restart; twice as long for each that follows a start of less than a minute.
    """

    backoff: float
    _times: list[float] = dataclasses.field(default_factory=list)
    _short: int = 0  # starts in succession that were short

    def pause(self, most: int, lived: float, now: float) -> float | None:
        """Counts a restart and returns the seconds to wait before it; None if no restart is left.

        Args:
          most: how many there may be in an hour.
          lived: seconds that the start before it has lasted.
          now: `time.monotonic()`.
        """
        self._times = [time for time in self._times if time > now - _HOUR]
        if len(self._times) >= most:
            return None
        self._times.append(now)
        self._short = self._short + 1 if lived < _SHORT else 0
        return tasks.pause(self.backoff, max(0, self._short - 1))

    @property
    def used(self) -> int:
        """The restarts within an hour before the newest one, with that one."""
        return len(self._times)


@dataclasses.dataclass
class WorkerNumbers:
    """How many workers a start has: those that are left, if they can share the global batch, and later all again.

    A worker that died leaves its place empty for some time, and is tried again after that. Each worker that dies within
    an hour of another one doubles the time.

    Attributes:
      least: the smallest number of workers.
      most: the number of workers if no place is empty.
      rest: seconds for which a place stays empty.
      global_batch_size: the examples that the workers divide among them; None while it is not known.
    """

    least: int
    most: int
    rest: float
    global_batch_size: int | None = None
    _losses: list[float] = dataclasses.field(default_factory=list)
    _back: list[float] = dataclasses.field(default_factory=list)  # when each empty place is tried again, sorted

    @property
    def possible(self) -> list[int]:
        """The numbers of workers that can share the global batch."""
        numbers = range(self.least, self.most + 1)
        return [n for n in numbers if self.global_batch_size is None or self.global_batch_size % n == 0]

    def lose(self, count: int, now: float) -> None:
        """Notes that some workers have died.

        Args:
          count: how many, at once.
          now: `time.monotonic()`.
        """
        self._losses = [time for time in self._losses if time > now - _HOUR]
        rest = self.rest * 2 ** min(len(self._losses), _MOST_DOUBLINGS)
        self._losses.append(now)
        self._back = sorted([*(time for time in self._back if time > now), *[now + rest] * count])

    def choose(self, now: float) -> int | None:
        """Returns how many workers to start: the largest possible number for which there are places.

        If there are places for none, it is the smallest possible number, on places that are empty still.

        Args:
          now: `time.monotonic()`.

        Returns:
          The number; None if no number of workers can share the global batch.
        """
        places = self.most - sum(time > now for time in self._back)
        return max((n for n in self.possible if n <= places), default=min(self.possible, default=None))

    def grows_at(self, count: int) -> float | None:
        """Returns when there are places for more workers, by `time.monotonic()`; None for never.

        Args:
          count: how many there are.
        """
        return next((time for time in self._back if (self.choose(time) or 0) > count), None)
