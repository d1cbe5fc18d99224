"""`results.json`: what a sweep has found, written by `python -m looplib sweep` and read by the report page."""

import dataclasses
from typing import Annotated

RESULTS = "results.json"  # in the directory of a sweep


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """The result of one trial.

    Attributes:
      name: of the trial and of its folder.
      value: what trials are compared by; None without a result.
    """

    name: Annotated[str, 200]
    value: float | None = None


@dataclasses.dataclass(frozen=True)
class SweepResults:
    """The results of a sweep.

    Attributes:
      compared: what trials are compared by, such as "best eval/accuracy".
      goal: "max" or "min".
      trials: all trials, the best first.
      importances: dict from the name of a setting to its share of what settings have changed, the largest first.
      note: why there are no importances; "" if there are some.
    """

    compared: Annotated[str, 500]
    goal: Annotated[str, 3]
    trials: list[TrialResult]
    importances: dict[str, float]
    note: Annotated[str, 500] = ""
