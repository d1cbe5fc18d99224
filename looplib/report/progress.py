"""Where a training stands and how fast it goes, for a person who watches it."""

import dataclasses
import re
from collections.abc import Mapping

from looplib.report.clock import Clock
from looplib.report.formats import format_seconds, format_share

_HALF_LIFE = 30.0  # seconds of training after which a measurement counts half
_NOT_SHOWN = re.compile("per_second$|share_of_peak$|^epoch$|^examples|learning_rate")


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a training stands.

    Attributes:
      step: the global step.
      end: the step to train to; None where the end is not known.
      evaluating: whether the evaluation of this step is under way.
      rate: steps per second of training, of about the last minute; None before the first loop.
      left: seconds until the end, with the evaluations and saves on the way; None where it is not known.
      to_evaluation: seconds until the next evaluation; None without any.
      waiting: share of the training's time that was spent waiting for input, since the measurement before.
    """

    step: int
    end: int | None = None
    evaluating: bool = False
    rate: float | None = None
    left: float | None = None
    to_evaluation: float | None = None
    waiting: float | None = None

    def forecast(self) -> str:
        """Describes what comes next, such as `19 s left, evaluation in 2 s, input 8%`; "" where nothing is known."""
        texts = []
        if self.left is not None and self.step != self.end:
            texts.append(f"{format_seconds(self.left)} left")
        if self.evaluating:
            texts.append("evaluating")
        elif self.to_evaluation is not None and self.step != self.end:
            texts.append(f"evaluation in {format_seconds(self.to_evaluation)}")
        if self.waiting is not None:
            texts.append(f"input {format_share(self.waiting)}")
        return ", ".join(texts)


class Pace:
    """Measures how fast a training goes since this process started or resumed it.

    Args:
      clock: has the time of the run by phase.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._overhead_start = self._outside()
        self._ran = 0  # steps in all, those before a rollback too
        self._steps = self._seconds = 0.0  # of which older ones count less
        self._waiting = 0.0
        self._mark = (0, 0.0, 0.0)

    def measure_from(self, step: int) -> None:
        """Starts to measure at a step: where the training starts, resumes, or continues after a rollback."""
        self._mark = step, self._clock.of("train"), self._clock.of("input")

    def at(self, step: int, end: int | None, evaluation: int | None, evaluating: bool = False) -> Progress:
        """Returns the progress.

        Args:
          step: the global step.
          end: the step to train to, or None.
          evaluation: the step of the next evaluation, or None.
          evaluating: whether the evaluation of this step comes now.
        """
        before, train, waited = self._mark
        self.measure_from(step)
        waited = self._mark[2] - waited
        passed = self._mark[1] - train + waited
        keep = 0.5 ** (max(0.0, passed) / _HALF_LIFE)
        self._ran += step - before
        self._steps = keep * self._steps + step - before
        self._seconds = keep * self._seconds + passed
        if passed > 0:
            self._waiting = min(1.0, max(0.0, waited / passed))
        if not self._steps or self._seconds <= 0:
            return Progress(step, end, evaluating)
        rate = self._steps / self._seconds
        overhead = max(0.0, self._outside() - self._overhead_start) / self._ran
        return Progress(
            step,
            end,
            evaluating,
            rate=rate,
            left=None if end is None or end < step else (end - step) * (1 / rate + overhead),
            to_evaluation=None if evaluation is None else (evaluation - step) / rate,
            waiting=self._waiting,
        )

    def _outside(self) -> float:
        """Returns the seconds so far of what recurs in a training besides its steps: evaluations, saves, reports."""
        return sum(self._clock.of(name) for name in ("evaluate", "save", "report"))


def headline(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the loss and one more metric, for a line that has no room for all of them."""
    names = [name for name in metrics if not _NOT_SHOWN.search(name)]
    losses = sorted((name for name in names if "loss" in name.lower()), key=lambda name: name != "loss")
    others = [name for name in names if name not in losses]
    return {name: metrics[name] for name in losses[:1] + others[:1]}
