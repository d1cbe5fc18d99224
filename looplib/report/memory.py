"""The memory of a run: of this process, and of its devices where TensorFlow counts it."""

import dataclasses
import os

import tensorflow as tf

_MOST_POINTS = 200


@dataclasses.dataclass(frozen=True)
class MemoryPoint:
    """The memory at a report.

    Attributes:
      step: the global step.
      host_bytes: resident memory of this process; None where the system does not say.
      device_bytes: memory in use on the fullest GPU or TPU; None without one.
    """

    step: int
    host_bytes: int | None
    device_bytes: int | None


class MemoryLog:
    """Notes the memory at each report, and keeps some 200 points that spread over the run.

    Attributes:
      points: the points so far, in the order in which they were noted.
    """

    def __init__(self) -> None:
        self.points: list[MemoryPoint] = []
        self._every = 1  # of so many reports one is noted
        self._reports = 0

    def note(self, step: int) -> None:
        """Notes the memory at a step."""
        self._reports += 1
        if self._reports % self._every:
            return
        self.points.append(MemoryPoint(step, _host_bytes(), _device_bytes()))
        if len(self.points) >= _MOST_POINTS:
            self.points, self._every = self.points[1::2], 2 * self._every


def _host_bytes() -> int | None:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def _device_bytes() -> int | None:
    names = [device.name for kind in ("GPU", "TPU") for device in tf.config.list_logical_devices(kind)]
    try:
        return max((tf.config.experimental.get_memory_info(name)["current"] for name in names), default=None)
    except (ValueError, tf.errors.OpError):  # a device whose memory is not counted
        return None
