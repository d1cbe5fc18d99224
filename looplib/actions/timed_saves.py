"""TimedSaves: saves by time, or by what saves cost."""

import collections
import dataclasses
import datetime
import statistics
import time
from collections.abc import Callable
from typing import Any

from looplib.base.messages import duration
from looplib.errors import ActionError, MissingPartError
from looplib.task.actions import Action, Event

_STOPS = 9  # of which the median counts, as one may have met a hiccup of the machine
_LEAST_SECONDS = 1.0  # between two saves by a budget, whose cost is small


@dataclasses.dataclass(frozen=True)
class Timed:
    """When saves by time come.

    Attributes:
      every: seconds between two saves; None without.
      budget: share of the time that saves may stop the training; None without.
    """

    every: float | None = None
    budget: float | None = None

    def seconds(self, stop: float, save: float) -> float | None:
        """Returns the seconds between two saves that take as long; None for no saves by time.

        Args:
          stop: seconds that a save stops the training.
          save: seconds until it is committed.
        """
        return self.every if self.budget is None else max(stop / self.budget, save, _LEAST_SECONDS)


class TimedSaves(Action):
    """Saves after a time, or as often as a share of the time allows; beside the saves by steps of `CheckpointPolicy`.

    A save comes with a report, so that it is at a multiple of `steps_per_loop`. Where several workers train, the chief
    decides for all. A save for another reason counts too: the time to the next one starts with it.

    Args:
      every: seconds, a `datetime.timedelta` or text such as "10m" between two saves; None for a budget.
      budget: share of the time that the training may be stopped by saves, such as 0.01; None for a time. The first
        report saves, to measure how long it takes. The time to the next save is then the median stop divided by the
        budget, and not shorter than a save takes until it is committed.
      now: returns the time in seconds.

    Raises:
      UsageError: for bad input; when a training starts, without a run directory.

    Example:
        ```python
        looplib.Controller(..., model_dir="/tmp/run", actions=[looplib.TimedSaves(every="10m")])
        ```
    """

    def __init__(
        self,
        every: float | str | datetime.timedelta | None = None,
        budget: float | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if (every is None) == (budget is None):
            raise ActionError("TimedSaves needs one of every, a time such as '10m', and budget, a share such as 0.01")
        if budget is not None and not (isinstance(budget, (int, float)) and 0 < budget < 1):
            raise ActionError(f"the budget of TimedSaves is {budget!r:.100}; expected a share such as 0.01, for 1%")
        self.timed, self._now = Timed(duration("every of TimedSaves", every), budget), now
        self._last = now()  # when the training began, or was saved last
        self._stops: collections.deque[float] = collections.deque(maxlen=_STOPS)  # seconds
        self._longest = 0.0
        self._committing: dict[str, float] = {}  # when a save of this action began, by path

    @property
    def interval(self) -> float:
        """Seconds between two saves; 0 while their cost is not known."""
        if self.timed.budget is not None and not self._stops:
            return 0.0
        return self.timed.seconds(statistics.median(self._stops) if self._stops else 0.0, self._longest)

    def on_start(self, controller: Any) -> None:
        """Refuses a run without a directory; the time counts from here."""
        if not controller.model_dir:
            raise MissingPartError("TimedSaves needs a run directory to save to; give Controller(model_dir=...)")
        self._last = self._now()

    def on_save(self, path: str, controller: Any) -> None:
        """Notes that a checkpoint is committed, and how long that took."""
        now = self._now()
        if (began := self._committing.pop(path, None)) is not None:
            self._longest = max(self._longest, now - began)
        else:
            self._last = now

    def __call__(self, event: Event) -> None:
        """Saves, if it is time."""
        if event.split != "train" or event.ending or event.evaluation_due:  # which save anyway
            return
        controller = event.controller
        if not controller.gather(self._now() - self._last >= self.interval)[0]:  # the chief's
            return
        before, self._last = controller.clock.of("save"), self._now()
        path = controller.save_checkpoint(wait=False)
        if controller.is_chief:  # whose on_save alone is called
            self._committing[path] = self._last
        self._stops.append(controller.clock.of("save") - before)
