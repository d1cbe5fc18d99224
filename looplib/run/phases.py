"""Where the time went between the reports of a run, and how much memory it had, step by step."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from looplib.run import values

_MOST = 400  # spans of a page
_MOST_PHASES = 12


@dataclasses.dataclass(frozen=True)
class TimeSpan:
    """The time between two points of a start.

    Attributes:
      step: at its end.
      seconds: dict from phase to seconds.
      host_bytes: memory of the process at its end, or None.
      device_bytes: memory in use on the fullest GPU or TPU, or None.
    """

    step: int
    seconds: dict[str, float]
    host_bytes: int | None
    device_bytes: int | None

    def then(self, other: "TimeSpan") -> "TimeSpan":
        """Returns this span and the one after it as one."""
        names = self.seconds.keys() | other.seconds.keys()
        seconds = {name: self.seconds.get(name, 0.0) + other.seconds.get(name, 0.0) for name in names}
        return dataclasses.replace(other, seconds=seconds)


def spans(starts: list[dict[str, Any]]) -> list[TimeSpan]:
    """Returns the spans of all starts by ascending step, without those that a restart or a rollback took back.

    Args:
      starts: the `starts` of a `run.json`.
    """
    found: list[TimeSpan] = []
    for start in starts:
        for span in _of_start(start):
            while found and found[-1].step >= span.step:
                found.pop()
            found.append(span)
    while len(found) > _MOST:
        pairs = zip(found[::2], found[1::2])
        found = [*(one.then(other) for one, other in pairs), *(found[-1:] if len(found) % 2 else [])]
    return found


def _of_start(start: dict[str, Any]) -> Iterator[TimeSpan]:
    before: dict[str, float] = {}
    for point in values.items(start.get("points")):
        point = values.mapping(point)
        step, seconds = values.whole(point.get("step")), values.durations(point.get("seconds"))
        if step is None:
            continue
        passed = {name: max(0.0, total - before.get(name, 0.0)) for name, total in list(seconds.items())[:_MOST_PHASES]}
        yield TimeSpan(step, passed, values.whole(point.get("host_bytes")), values.whole(point.get("device_bytes")))
        before = seconds
