"""What a run notes at its reports: its memory, and where the time went up to there."""

import dataclasses
import functools
import os

import tensorflow as tf

from looplib.report.clock import Clock

_MOST_POINTS = 100


@dataclasses.dataclass(frozen=True)
class Point:
    """What is noted at a report.

    Attributes:
      step: the global step.
      host_bytes: resident memory of this process; None where the system does not say.
      device_bytes: memory in use on the fullest GPU or TPU; None without one.
      seconds: dict from phase to seconds, of this start up to here.
    """

    step: int
    host_bytes: int | None
    device_bytes: int | None
    seconds: dict[str, float]


class Points:
    """Keeps 50 to 100 points that spread over the reports of a start, however many these are.

    Args:
      clock: has the seconds.

    Attributes:
      points: the points so far, in the order in which they were noted.
    """

    def __init__(self, clock: Clock) -> None:
        self.points: list[Point] = []
        self._clock = clock
        self._every = 1  # of so many reports one is noted
        self._reports = 0

    def note(self, step: int) -> None:
        """Notes a point at a step."""
        self._reports += 1
        if self._reports % self._every:
            return
        seconds = {name: value for name, value in self._clock.seconds().items() if name != "wall"}
        self.points.append(Point(step, _host_bytes(), _device_bytes(), seconds))
        if len(self.points) >= _MOST_POINTS:
            self.points, self._every = self.points[1::2], 2 * self._every


def _host_bytes() -> int | None:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def _device_bytes() -> int | None:
    try:
        return max((tf.config.experimental.get_memory_info(name)["current"] for name in _devices()), default=None)
    except (ValueError, tf.errors.OpError):  # a device whose memory is not counted
        return None


@functools.cache
def _devices() -> list[str]:
    return [device.name for kind in ("GPU", "TPU") for device in tf.config.list_logical_devices(kind)]
