"""The curves of `metrics.jsonl`, thinned out so that a page of a million steps stays small."""

import array
import dataclasses
import math
from collections.abc import Iterable

import numpy as np

from looplib.base.decoding import text
from looplib.run.records import Record

_MOST_CURVES = 1000  # of a run
_FEWEST_POINTS = 40  # of a thinned curve


@dataclasses.dataclass(frozen=True)
class Extreme:
    """A value of a curve and its step."""

    step: int
    value: float


@dataclasses.dataclass
class Curve:
    """The values of one metric of one split, by step.

    Attributes:
      split: such as "train" or "eval".
      name: of the metric.
      undone: whether these are the records that a restart or a rollback has taken back.
      steps: the steps, ascending.
      values: the values; NaN where one was not finite.
    """

    split: str
    name: str
    undone: bool
    steps: "array.array[int]"
    values: "array.array[float]"

    def sorted(self) -> "Curve":
        """Returns the curve with ascending steps."""
        steps = np.asarray(self.steps)
        if (np.diff(steps) >= 0).all():
            return self
        order = np.argsort(steps, kind="stable")
        kept = array.array("q", steps[order].tolist()), array.array("d", np.asarray(self.values)[order].tolist())
        return dataclasses.replace(self, steps=kept[0], values=kept[1])

    @property
    def finite(self) -> tuple[np.ndarray, np.ndarray]:
        """The (steps, values) of the finite values."""
        steps, found = np.asarray(self.steps), np.asarray(self.values)
        kept = np.isfinite(found)
        return steps[kept], found[kept]


@dataclasses.dataclass(frozen=True)
class DrawnCurve:
    """A curve as the page has it.

    Attributes:
      split, name, undone: see `Curve`.
      steps: ascending.
      values: None where a value was not finite.
      points: how many values the whole curve has.
      bad_steps: the first steps whose value was not finite.
      bad: how many there are.
      last: the last finite value of the whole curve, or None.
      best: the best one, the first of equal ones; None if none is finite, or which of two is better is not known.
    """

    split: str
    name: str
    undone: bool
    steps: list[int]
    values: list[float | None]
    points: int
    bad_steps: list[int]
    bad: int
    last: Extreme | None
    best: Extreme | None


def best_place(values: np.ndarray, mode: str) -> int:
    """Returns the place of the best of finite values, the first of equal ones, as `metric_names.best_first` has it."""
    return int(values.argmax() if mode == "max" else values.argmin())


def of_records(records: Iterable[Record], undone: bool = False) -> list[Curve]:
    """Returns the curves of records, in the order of the metrics' first values.

    Args:
      records: the lines of a `metrics.jsonl`; values that are not numbers are left out.
      undone: what the curves say of themselves.
    """
    found: dict[tuple[str, str], Curve] = {}
    for record in records:
        step, split = record.shown_step, record.split
        if step is None:
            continue
        for name, value in record.numbers.items():
            curve = found.get((split, name))
            if curve is None:
                if len(found) == _MOST_CURVES:
                    continue
                names = text(split, 100), text(name, 200)
                curve = found[split, name] = Curve(*names, undone, array.array("q"), array.array("d"))
            curve.steps.append(step)
            curve.values.append(math.nan if value is None else value)
    return [curve.sorted() for curve in found.values()]


def draw(curve: Curve, most: int, mode: str = "") -> DrawnCurve:
    """Returns a curve for the page.

    Args:
      curve: the curve.
      most: points that it may have; at least 40 are kept. Of a longer one, the lowest and the highest value of each
        bucket of steps, so that no peak is lost.
      mode: "max" or "min", which of two values is better; "" where that is not known.
    """
    steps, found = np.asarray(curve.steps), np.asarray(curve.values)
    kept = _thinned(found, max(most, _FEWEST_POINTS))
    bad = np.flatnonzero(~np.isfinite(found))
    finite_steps, finite = curve.finite
    ends = [None, None]
    if finite.size:
        places = [-1, *([best_place(finite, mode)] if mode else [])]
        ends = [*(Extreme(int(finite_steps[at]), _short(finite[at])) for at in places), None][:2]
    return DrawnCurve(
        curve.split, curve.name, curve.undone, steps[kept].tolist(), [_short(value) for value in found[kept]],
        len(steps), steps[bad[:5]].tolist(), len(bad), *ends
    )  # fmt: skip


def _thinned(found: np.ndarray, most: int) -> np.ndarray:
    """Returns the indices of the values to draw."""
    count = len(found)
    if count <= most:
        return np.arange(count)
    edges = np.linspace(0, count, most // 2, dtype=np.int64)
    low, high = np.where(np.isnan(found), np.inf, found), np.where(np.isnan(found), -np.inf, found)
    kept = {0, count - 1}
    for start, end in zip(edges[:-1], edges[1:]):
        kept.update((start + int(low[start:end].argmin()), start + int(high[start:end].argmax())))
    return np.array(sorted(kept))


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
