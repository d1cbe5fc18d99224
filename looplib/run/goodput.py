"""The use of the time of a run: since its first start, and between its reports."""

import dataclasses
import datetime
from collections.abc import Iterator, Sequence

from looplib.run.report import GoodputShare, Point, Rollback, StartEntry

_STARTING = ("start", "compile", "restore")
_NAMED = ("evaluate", "save", "suspended", "waiting")
_TRAINING = ("train", "input")
_MOST_SPANS = 400  # spans of a page
_MOST_PHASES = 12


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Seconds since the first start of a run, by what they were spent on.

    Goodput is the share of the time in which steps were trained that the run has kept. That of ml-goodput-measurement
    also has the time in which they waited for their data.

    Attributes:
      seconds: dict from cause to seconds. "train": steps that are kept; "input": waiting for their data; "repeated":
        steps, and waiting for their data, that a kill or a rollback took back; "start": starting, compiling and
        restoring; "evaluate"; "save"; "suspended"; "waiting": for files that are followed; "other"; and "off": between
        two starts.
    """

    seconds: dict[str, float]

    @property
    def wall(self) -> float:
        """The sum."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """The share of the time that became kept steps."""
        return self.seconds["train"] / self.wall if self.wall else 0.0


@dataclasses.dataclass
class _Part:
    """Steps that were trained in succession: after step `first`, up to `last`, with their seconds."""

    first: int
    last: int
    train: float
    input: float

    def cut(self, step: int) -> float:
        """Takes out the steps after a step; returns their seconds."""
        if step >= self.last:
            return 0.0
        kept = max(0, step - self.first) / (self.last - self.first)
        lost = (1 - kept) * (self.train + self.input)
        self.last, self.train, self.input = max(step, self.first), kept * self.train, kept * self.input
        return lost


def goodput(starts: Sequence[StartEntry]) -> Goodput | None:
    """Returns the goodput of a run; None if its starts do not say when they were.

    A start that was killed counts as far as its last entry, which is a minute old at most; the rest is "off". Of a run
    with more starts than `run.json` keeps, those that it has not are left out.

    Args:
      starts: the `starts` of a `run.json`.
    """
    seconds = dict.fromkeys(("train", "input", "repeated", "start", *_NAMED, "other", "off"), 0.0)
    parts: list[_Part] = []
    ended: float | None = None
    for start in starts:
        spent, began = dict(start.seconds), _time(start.started)
        wall = spent.pop("wall", sum(spent.values()))
        if began is None:
            return None
        if ended is not None:
            seconds["off"] += max(0.0, began - ended)
        ended = began + wall
        for name, value in spent.items():
            if name not in _TRAINING:
                seconds["start" if name in _STARTING else name if name in _NAMED else "other"] += value
        seconds["repeated"] += _cut(parts, start.restored_step or 0)
        trained = sum(spent.get(name, 0.0) for name in _TRAINING)
        for part in _parts(start, spent):
            trained -= part.train + part.input
            seconds["repeated"] += _cut(parts, part.first)
            parts.append(part)
        seconds["repeated"] += max(0.0, trained)  # of steps after which no other was noted
    seconds["train"] = sum(part.train for part in parts)
    seconds["input"] = sum(part.input for part in parts)
    found = Goodput({name: round(value, 3) for name, value in seconds.items()})
    return found if found.wall else None


def as_report(starts: Sequence[StartEntry]) -> GoodputShare | None:
    """Returns the `goodput` of `run.json`; None if it is not known, or nothing was trained."""
    found = goodput(starts)
    return GoodputShare(round(found.share, 4), found.seconds) if found and found.share else None


def _cut(parts: list[_Part], step: int) -> float:
    """Takes the steps after a step out of parts, which ascend; returns their seconds."""
    lost = 0.0
    while parts and parts[-1].last > step:
        lost += parts[-1].cut(step)
        if parts[-1].last == parts[-1].first:
            parts.pop()
    return lost


def _parts(start: StartEntry, spent: dict[str, float]) -> Iterator[_Part]:
    """Yields what a start has trained between its points, its rollbacks and its end.

    The seconds between two points are divided by steps.
    """
    step, train, waited = start.restored_step or 0, 0.0, 0.0
    for seconds, end, to in _moments(start, spent):
        more = max(0.0, seconds.get("train", 0.0) - train), max(0.0, seconds.get("input", 0.0) - waited)
        train, waited = train + more[0], waited + more[1]
        if end > step:
            yield _Part(step, end, *more)
        step = to


def _moments(start: StartEntry, spent: dict[str, float]) -> list[tuple[dict[str, float], int, int]]:
    """Returns the moments of a start whose seconds are known, in order.

    Returns:
      List of (seconds so far, the step that was reached, the step that training continued from).
    """
    noted: Sequence[Point | Rollback] = [*start.points, *start.rollbacks]
    places = ((one, one.to if isinstance(one, Rollback) else one.step) for one in noted)
    found = [
        (one.seconds, one.step, to) for one, to in places if one.seconds and one.step is not None and to is not None
    ]
    found.sort(key=lambda moment: sum(moment[0].get(name, 0.0) for name in _TRAINING))
    return [*found, *([(spent, start.step, start.step)] if start.step is not None else [])]


def _time(text: str) -> float | None:
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


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


def spans(starts: Sequence[StartEntry]) -> list[TimeSpan]:
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
    while len(found) > _MOST_SPANS:
        pairs = zip(found[::2], found[1::2])
        found = [*(one.then(other) for one, other in pairs), *(found[-1:] if len(found) % 2 else [])]
    return found


def _of_start(start: StartEntry) -> Iterator[TimeSpan]:
    before: dict[str, float] = {}
    for point in start.points:
        if point.step is None:
            continue
        seconds = list(point.seconds.items())[:_MOST_PHASES]
        passed = {name: max(0.0, total - before.get(name, 0.0)) for name, total in seconds}
        yield TimeSpan(point.step, passed, point.host_bytes, point.device_bytes)
        before = point.seconds
