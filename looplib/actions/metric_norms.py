"""What reported norms of gradients show: that one explodes against its own history."""

import collections
import math
import statistics
from collections.abc import Collection, Mapping

from looplib.actions.finding import LearningFinding, is_new
from looplib.actions.weights import EXPLODING

_METRIC = "gradient_norm"  # and "gradient_norm/<variable>", as `GradientTrainer(report=...)` reports them
_HISTORY, _FEWEST = 20, 10  # norms of a metric: kept, and needed for a verdict
_RATIO, _LEAST = 100.0, 1.0  # norms of gradients differ from step to step, and far more than those of weights
_IN_A_ROW = 3  # reports; a single spike is no explosion


class MetricNorms:
    """Follows the norms of gradients that a training reports.

    A norm explodes if it is a hundred times the median of its last reports, three times in a row.
    """

    def __init__(self) -> None:
        self._norms: dict[str, collections.deque[float]] = {}
        self._high: dict[str, list[int]] = {}  # the steps of the reports in a row that were too high

    def check(self, step: int, metrics: Mapping[str, float], known: Collection[str]) -> list[LearningFinding]:
        """Looks at a report.

        Args:
          step: the global step.
          metrics: of the training.
          known: the keys of earlier findings.
        """
        found = []
        for name, norm in metrics.items():
            if (name != _METRIC and not name.startswith(f"{_METRIC}/")) or not math.isfinite(norm):
                continue
            history = self._norms.setdefault(name, collections.deque(maxlen=_HISTORY))
            usual = statistics.median(history) if len(history) >= _FEWEST else math.inf
            if norm <= max(_RATIO * usual, _LEAST):
                history.append(norm)
                self._high.pop(name, None)
                continue
            steps = self._high.setdefault(name, [])
            steps.append(step)
            if len(steps) == _IN_A_ROW and is_new(EXPLODING, name, known):
                found.append(_finding(name, norm, usual, len(history), steps[0]))
        return found


def _finding(name: str, norm: float, usual: float, count: int, since: int) -> LearningFinding:
    times = f"{norm / usual:.3g} times" if usual else "above"
    return LearningFinding(
        EXPLODING,
        (name,),
        since,
        f"{name} is {norm:.4g}, {times} the median of its last {count} usual reports ({usual:.4g}), in each of the "
        f"last {_IN_A_ROW} reports since step {since:,}",
        "lower the learning rate, or clip gradients (clip_global_norm)",
    )
