"""Numbers for people: values, sizes, shares and times, in words and short."""

import dataclasses
import datetime
import re
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a training.

    Attributes:
      step: the global step.
      end: the step to train to; None if it is not known.
      evaluating: whether the evaluation of this step is under way.
      rate: steps per second of training, of about the last minute; None before the first loop.
      left: seconds until the end, including evaluations and saves; None if it is not known.
      to_evaluation: seconds until the next evaluation; None without any.
      waiting: share of the training time spent waiting for input since the last measurement.
    """

    step: int
    end: int | None = None
    evaluating: bool = False
    rate: float | None = None
    left: float | None = None
    to_evaluation: float | None = None
    waiting: float | None = None


def format_share(share: float) -> str:
    """Formats a share of a whole for a person, such as `12%`, or `<1%` for less than that but not nothing."""
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"


def format_seconds(seconds: float) -> str:
    """Formats a duration for a person, such as `19 s`, `12 min`, `5.2 h` or `3.1 days`."""
    for unit, limit in (("s", 120), ("min", 120), ("h", 48)):
        if seconds < limit:
            return f"{seconds:.1f} h" if unit == "h" else f"{seconds:.0f} {unit}"
        seconds /= 60 if unit != "h" else 24
    return f"{seconds:.1f} days"


_NOT_SHOWN = re.compile("per_second$|share_of_peak$|^epoch$|^examples|learning_rate")
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_FIRST, _LAST = -62_135_596_800, 253_402_300_799  # seconds of the years 1 to 9999, which `datetime` has
_LARGEST_WHOLE = 1e15  # that is written with all its digits


def headline(metrics: Mapping[str, float]) -> dict[str, float]:
    """Selects the loss and one more metric, for a line without room for all of them."""
    names = [name for name in metrics if not _NOT_SHOWN.search(name)]
    losses = sorted((name for name in names if "loss" in name.lower()), key=lambda name: name != "loss")
    others = [name for name in names if name not in losses]
    return {name: metrics[name] for name in losses[:1] + others[:1]}


def format_number(value: float) -> str:
    """Formats a number for a person: whole numbers up to 15 digits as they are, others with four significant digits.

    Args:
      value: int or float.

    Returns:
      str, such as `1797`, `0.9833`, `1.2e-05`.
    """
    if (isinstance(value, int) or abs(value) >= 1000) and abs(value) < _LARGEST_WHOLE:
        return f"{value:.0f}"
    return f"{value:.4g}"


def format_size(count: float) -> str:
    """Formats a number of bytes for a person, such as `512 B`, `1.83 MB` or `2.4 TB`; a kB has 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def forecast(now: Progress) -> str:
    """Describes what comes next, such as `19 s left, evaluation in 2 s, input 8%`; "" where nothing is known."""
    texts = []
    if now.left is not None and now.step != now.end:
        texts.append(f"{format_seconds(now.left)} left")
    if now.evaluating:
        texts.append("evaluating")
    elif now.to_evaluation is not None and now.step != now.end:
        texts.append(f"evaluation in {format_seconds(now.to_evaluation)}")
    if now.waiting is not None:
        texts.append(f"input {format_share(now.waiting)}")
    return ", ".join(texts)


def utc(seconds: float) -> datetime.datetime:
    """Returns the time that is so many seconds after 1970, or the nearest one that `datetime` has."""
    return _EPOCH + datetime.timedelta(seconds=min(max(seconds, _FIRST), _LAST))


def iso_time(seconds: float) -> str:
    """Returns a time in ISO 8601, from the seconds since 1970."""
    return utc(seconds).isoformat(timespec="seconds")
