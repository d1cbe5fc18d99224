"""The schedule of a training: the steps where the inner loop returns to the controller, and what is due there."""

import dataclasses
import math
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Boundary:
    """A step at which something is due."""

    step: int  # the global step
    report: bool  # whether the training metrics since the last report are due
    save: bool  # whether a checkpoint is due
    # whether an evaluation is due. False at the end, where the controller evaluates after the final save.
    evaluate: bool
    end: bool  # whether the training ends here

    @property
    def shows(self) -> bool:
        """Returns whether the media of this step are shown: with a report, and at the end."""
        return self.report or self.end


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Reports, saves and evaluations at exact multiples of their intervals, counted from step 0 of the run."""

    report_every: int  # steps between reports
    save_every: int  # steps between checkpoints
    evaluate_every: int | None = None  # steps between evaluations; None for a training without any
    end: int | None = None  # the step to train to; None trains to the end of the data
    stops: tuple[int, ...] = ()  # further steps where the inner loop returns

    def boundaries(self, step: int) -> Iterator[Boundary]:
        """Yields the boundaries after a step, in order: each multiple of an interval, each stop, and the end."""
        intervals = [every for every in (self.report_every, self.save_every, self.evaluate_every) if every]
        while self.end is None or step < self.end:
            later = [stop for stop in self.stops if stop > step]
            step = min(*(step - step % every + every for every in intervals), *later, math.inf)
            step = step if self.end is None else min(step, self.end)
            yield Boundary(
                step,
                report=step % self.report_every == 0,
                save=step % self.save_every == 0,
                evaluate=self.evaluates_at(step),
                end=step == self.end,
            )

    def evaluates_at(self, step: int) -> bool:
        """Returns whether an evaluation is due at a step on the way to the end."""
        return bool(self.evaluate_every and step and step % self.evaluate_every == 0 and step != self.end)

    def next_evaluation(self, step: int) -> int | None:
        """Returns the step of the next evaluation after a step; None without any, or once the end is reached."""
        if not self.evaluate_every or step == self.end:
            return None
        after = step - step % self.evaluate_every + self.evaluate_every
        return after if self.end is None else min(after, self.end)

    def horizon(self, boundary: Boundary) -> int:
        """Returns the last step that the training is known to reach, unless something stops it: the end, if known."""
        return boundary.step if self.end is None else self.end
