"""The metrics that a loop of Orbit's kind returns."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from looplib.errors import MetricError
from looplib.loop.reducer import Accumulator, State
from looplib.task.plain import as_array, as_number, is_number
from looplib.task.record import RunningTotals


class OrbitResults(Accumulator):
    """The metrics of the last call, in place of the sums of a `Reducer`.

    Attributes:
      bad: names of the losses in them that are not finite.
    """

    def __init__(self) -> None:
        self.bad: list[str] = []
        self._metrics: dict[str, np.ndarray] = {}
        self._steps = 0

    def take(self, metrics: dict[str, np.ndarray], steps: int) -> None:
        """Replaces the metrics by the results of a call of some steps."""
        self._metrics, self._steps = metrics, self._steps + steps

    def metrics(self) -> dict[str, np.ndarray]:
        """Returns the metrics and forgets them."""
        metrics = self._metrics
        self.clear()
        return metrics

    def clear(self) -> None:
        """See `Accumulator`."""
        self._metrics, self._steps = {}, 0

    def first_bad(self) -> tuple[int, list[str]]:
        """See `Accumulator`; the step is the last one of the call."""
        return self._steps, self.bad

    def state(self) -> State:
        """Returns the metrics that are not yet read."""
        return {
            name: as_number(name, value)
            for name, value in self._metrics.items()
            if value.ndim == 0 and is_number(value)
        }

    def load(self, state: State) -> None:
        """See `Accumulator`."""
        state = {} if isinstance(state, RunningTotals) else state
        numbers = {name: np.asarray(value) for name, value in state.items()}
        self._metrics = {name: value for name, value in numbers.items() if value.ndim == 0 and is_number(value)}
        self._steps = 0


def flat(who: str, results: Any, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, numpy array) of what may be dicts in a dict; their names are joined by "/"."""
    if not isinstance(results, dict):
        raise MetricError(f"{who} returned a {type(results).__name__}; expected a dict from metric name to number")
    for name, value in results.items():
        name = f"{prefix}{name}" if isinstance(name, str) else name
        if isinstance(value, dict):
            yield from flat(who, value, f"{name}/")
        else:
            yield name, as_array(value)


def is_bad_loss(name: str, value: np.ndarray) -> bool:
    """Returns whether a metric is a loss by its name, and not finite."""
    return "loss" in str(name).lower() and is_number(value) and not np.isfinite(value.astype(np.float64)).all()
