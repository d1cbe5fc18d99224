"""Which of several workers that train in step is slow.

All of them take the same time for a step, because each waits for the slowest. What tells them apart is the time that
each one needs for itself.
"""

import dataclasses
from collections.abc import Sequence

from looplib.run.slow_workers import Straggler

_SHARE = 0.2  # of the time of a step for which a worker holds the others up; less is noise


@dataclasses.dataclass(frozen=True)
class WorkerTimes:
    """What one worker spent on some steps, in seconds.

    Attributes:
      total: from the first to the last, with all waiting.
      own: computing, without the sums over workers, for which it waits for the others.
      data: waiting for its data.
    """

    total: float
    own: float
    data: float

    @property
    def needed(self) -> float:
        """What the steps would take if it were alone."""
        return self.own + self.data


def find_stragglers(times: Sequence[WorkerTimes], steps: int, step: int) -> list[Straggler]:
    """Returns the workers that hold the others up by a fifth of the time of a step or more.

    Args:
      times: of each worker, for the same steps.
      steps: how many these are.
      step: the last one.
    """
    total = max(one.total for one in times)
    usual = sorted(times, key=lambda one: one.needed)[(len(times) - 1) // 2]  # of two workers, the faster one
    found = []
    for worker, one in enumerate(times):
        more = one.needed - usual.needed
        if total > 0 and more >= _SHARE * total:
            cause = "data" if one.data - usual.data >= more / 2 else "step"
            seconds, others = round(one.needed / steps, 7), round(usual.needed / steps, 7)
            found.append(Straggler(worker, step, round(min(1.0, more / total), 4), seconds, others, cause))
    return found
