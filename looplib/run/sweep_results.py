"""`results.json`: what a sweep has found, written by `python -m looplib sweep` and read by the report page."""

import dataclasses
import os
from typing import Annotated

# In the directory of a sweep: its results; its trials; and the mark of one that several processes run.
RESULTS, TRIALS, SHARED = "results.json", "sweep.db", "sweep.shared"


def is_sweep(directory: str) -> bool:
    """Returns whether a directory is a sweep's."""
    return any(os.path.lexists(os.path.join(directory, name)) for name in (TRIALS, SHARED))


def is_trial(directory: str | None) -> bool:
    """Returns whether a run directory is one that a sweep has made, perhaps one of several seeds."""
    return bool(directory) and any(is_sweep(os.path.join(directory, above)) for above in ("..", "../.."))


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
