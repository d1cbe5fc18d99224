"""Alerts about a run, and the condition on a metric that asks for one."""

import dataclasses
import math
import operator
import re
import socket
import time
from typing import Any

from looplib.errors import FlagError

KINDS = {
    "failed": "the run has ended with an error, such as a guard's",
    "rollback": "a guard has led the run back to a checkpoint",
    "preempted": "a signal or --max_time has ended the run, and it is saved",
    "killed": "the process is gone without a word, as after SIGKILL",
    "silent": "the run is alive and reports nothing, or its machine has vanished",
    "recovered": "the run reports again",
    "not_finite": "a metric is NaN or infinite for the first time",
    "worse": "a metric meets a condition of --alert_when",
    "done": "the run has reached its end",
}
"""What alerts are about, by `Alert.kind`."""

_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_CONDITION = re.compile(r"\s*([^\s/<>=]{1,200})/([^\s<>=]{1,200})\s*(<=|>=|<|>)\s*(\S{1,40})\s*")


@dataclasses.dataclass(frozen=True)
class Alert:
    """What is sent.

    Attributes:
      kind: a name in `KINDS`.
      run: the run directory.
      step: the global step; None where it is not known.
      sentence: what has happened.
      host: the machine that tells it.
      time: seconds since the epoch.
    """

    kind: str
    run: str
    step: int | None
    sentence: str
    host: str = dataclasses.field(default_factory=socket.gethostname)
    time: float = dataclasses.field(default_factory=time.time)

    @property
    def title(self) -> str:
        """One line that says which run it is about, and what has happened to it."""
        return f"{self.run}: {self.kind}" + ("" if self.step is None else f" at step {self.step:,}")

    def as_json(self) -> dict[str, Any]:
        """Returns the fields, and `text`, which chat programs show."""
        return {**dataclasses.asdict(self), "text": f"{self.title}: {self.sentence}"}


@dataclasses.dataclass(frozen=True)
class Condition:
    """A condition on a metric, such as `eval/loss>2.5`.

    Attributes:
      split: "train", or an evaluator's name.
      metric: the name of the metric.
      comparison: "<", "<=", ">" or ">=".
      bound: a finite number.
    """

    split: str
    metric: str
    comparison: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Returns the condition that a text describes.

        Raises:
          UsageError: for a text of another form.
        """
        found = _CONDITION.fullmatch(text)
        try:
            bound = float(found[4]) if found else math.nan
        except ValueError:
            bound = math.nan
        if not found or not math.isfinite(bound):
            raise FlagError(f"--alert_when is {text!r:.300}; expected a metric and its bound, such as eval/loss>2.5")
        return cls(found[1], found[2], found[3], bound)

    def __str__(self) -> str:
        return f"{self.split}/{self.metric}{self.comparison}{self.bound:g}"

    def holds(self, value: float) -> bool:
        """Returns whether a value meets the condition; NaN does not."""
        return _COMPARE[self.comparison](value, self.bound)
