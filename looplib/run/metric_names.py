"""Names of metrics: which ones looplib adds to reports, which of two values is better, and what is a score at all."""

import math
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, TypeVar

from looplib.errors import MetricError

Mode = Literal["max", "min"]  # which of two values of a metric is better
Item = TypeVar("Item")
CHECKSUM = "examples_checksum"
BATCH_SIZES = ("batch_sizes/larger", "batch_sizes/full", "batch_sizes/more", "batch_sizes/count")
_OWN = frozenset({"epoch", "examples", "skipped_steps", "steps_per_second", CHECKSUM, *BATCH_SIZES})
# Names whose mode is known, and no parts of other names: many a metric has "loss" in its name, and is better if higher.
_LOWER_IS_BETTER = frozenset(
    "loss error mae mse rmse mape perplexity nll wer cer fid mean_absolute_error mean_squared_error "
    "root_mean_squared_error mean_absolute_percentage_error".split()
)
_HIGHER_IS_BETTER = frozenset(
    "accuracy acc auc precision recall f1 bleu iou dice psnr ssim binary_accuracy categorical_accuracy "
    "sparse_categorical_accuracy top_k_categorical_accuracy sparse_top_k_categorical_accuracy".split()
)


def check(who: str, names: Collection[str], rates: Collection[str] = ()) -> None:
    """Raises `UsageError` if `who` returned a metric with a name of looplib's own metrics or of `Adapter.rates`."""
    for found, others, of in (
        (names, _OWN, "looplib adds to reports"),
        (rates, _OWN, "looplib adds to reports"),
        (names, rates, "its rates have too"),
    ):
        if both := sorted(set(found) & set(others)):
            raise MetricError(f"{who} returned a metric named {both[0]!r}, which {of}; give yours another name")


def check_finished(who: str, before: Mapping[str, Any], after: Mapping[str, Any], rates: Collection[str] = ()) -> None:
    """Raises `UsageError` if a `loop_end` added a metric with a name that `check` refuses, or changed looplib's."""
    kept = {name for name in _OWN & before.keys() & after.keys() if after[name] == before[name]}
    check(f"{who}.loop_end", after.keys() - kept, rates)


def refuse_in(step_fn: Callable[[Any], Any], who: str, rates: Callable[[], Collection[str]]) -> Callable[[Any], Any]:
    """Wraps a user's step, so that its metrics are checked when it is traced; `rates` returns names."""
    right = set()  # groups of names; an eager loop calls the step many times

    def checked(inputs: Any) -> Any:
        outputs = step_fn(inputs)
        names = frozenset(name for name in outputs if isinstance(name, str)) if isinstance(outputs, Mapping) else ()
        if names not in right:
            check(who, names, rates())
            right.add(names)
        return outputs

    return checked


def gain(value: Any, best: Any, mode: str) -> float:
    """Returns by how much a value of a metric is better than the best one so far.

    Only finite numbers are scores. Each is better by infinity than what is none, such as None or NaN.

    Args:
      value: the value.
      best: the best one so far; None for none.
      mode: "max" or "min", which of two values is better.

    Returns:
      a negative number for a worse value, and minus infinity for one that is no score.
    """
    if not _is_score(value):
        return -math.inf
    if not _is_score(best):
        return math.inf
    return value - best if mode == "max" else best - value


def _is_score(value: Any) -> bool:
    """Returns whether a value can be compared: only a finite number can."""
    return isinstance(value, numbers.Real) and math.isfinite(value)


def best_first(items: Iterable[Item], score: Callable[[Item], Any], mode: str) -> list[Item]:
    """Returns the items that have a score, see `gain`, the best first, and equal ones in their order.

    Args:
      items: any objects.
      score: from an item to its value of a metric, None for none.
      mode: "max" or "min", which of two values is better.
    """
    gains = [(gain(score(item), 0, mode), item) for item in items]
    return [item for found, item in sorted(gains, key=lambda one: -one[0]) if found > -math.inf]


def mode_of(who: str, metric: str, mode: str | None) -> str:
    """Returns "max" or "min", which of two values of a metric such as "eval/accuracy" is better.

    Without a mode, the metric needs a well-known name, which is all that follows the last "/", in either case. Raises
    `UsageError`, with the class `who` that was given the metric, for any other name and for a metric of another form.
    """
    if mode not in ("max", "min", None) or not isinstance(metric, str) or "/" not in metric:
        raise MetricError(
            f"{who} got the metric {metric!r} and the mode {mode!r}; expected <evaluator>/<metric>, "
            'such as "eval/accuracy", and "max" or "min"'
        )
    if found := mode or known_mode(metric):
        return found
    raise MetricError(
        f"{who} got the metric {metric!r} without a mode, and the name does not imply whether "
        'higher or lower is better; give "max" or "min" as the mode'
    )


def known_mode(metric: str) -> str:
    """Returns "max" or "min" for a metric with a well-known name, such as "eval/accuracy"; "" for any other."""
    name = metric.rpartition("/")[2].lower()
    return "min" if name in _LOWER_IS_BETTER else "max" if name in _HIGHER_IS_BETTER else ""
