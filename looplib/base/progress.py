"""The progress of a training, and shares and durations formatted for people."""

import dataclasses


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
