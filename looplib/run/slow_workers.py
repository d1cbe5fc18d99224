"""Straggler: a worker for which the others wait in each step, as `run.json`, messages and the page have it."""

import dataclasses
from typing import Any

from looplib.run import values

_MOST_WORKERS = 100_000


@dataclasses.dataclass(frozen=True)
class Straggler:
    """A worker for which the others wait.

    Attributes:
      worker: its index; 0 is the chief.
      step: the global step at which this was found.
      share: of the time of a step, for which the others wait for it; 0 from the step on at which it is slow no more.
      seconds: that it needs for a step by itself.
      others: that the others need, the median.
      cause: "data", if most of the difference is waiting for its data, or "step".
    """

    worker: int
    step: int
    share: float
    seconds: float
    others: float
    cause: str

    def __str__(self) -> str:
        why = "it waits for its data" if self.cause == "data" else "its steps take longer"
        return (
            f"worker {self.worker} is slower than the others, which wait for it {self.share:.0%} of the time: {why} "
            f"({1e3 * self.seconds:.3g} ms a step, the others {1e3 * self.others:.3g} ms)"
        )


def stragglers_of(start: Any) -> list[Straggler]:
    """Returns the workers that were slow at the end of a start in `run.json`, the slowest first.

    Args:
      start: one of the `starts`, whose values may be anything; what is no straggler is left out.
    """
    newest: dict[int, Straggler] = {}
    for each in map(values.mapping, values.items(values.mapping(start).get("stragglers"))):
        worker, step = values.whole(each.get("worker")), values.whole(each.get("step"))
        share, seconds, others = (values.number(each.get(name)) for name in ("share", "seconds", "others"))
        if worker is None or step is None or not 0 <= worker < _MOST_WORKERS or step < 0:
            continue
        if share is not None and 0 <= share <= 1 and seconds is not None and others is not None:
            newest[worker] = Straggler(worker, step, share, seconds, others, values.text(each.get("cause"), 10))
    return sorted((one for one in newest.values() if one.share), key=lambda one: -one.share)
