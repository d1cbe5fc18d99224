"""`Phase`: what a user says about a part of a training."""

import dataclasses
import math
import numbers
from collections.abc import Sequence

from looplib.base.messages import whole_number
from looplib.errors import SettingError


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a training of a `GradientTrainer`, with its own trained variables and learning rate.

    In a phase, the other variables have no update, no decay and no part in clipping; their optimizer slots and averages
    stay as they are. Batch normalization in a layer that is not trained keeps its statistics, and computes with them.

    Args:
      until: the global step that ends the phase; None, for the last phase, has no end.
      train: regular expressions, one or several, that are searched in the names of variables; "" matches all.
      learning_rate: the rate of the optimizers that train in the phase, from its first step on; None does not change
        it.

    Raises:
      UsageError: for bad input.
    """

    until: int | None = None
    train: Sequence[str] | str = ""
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        if self.until is not None:
            whole_number("Phase.until", self.until)
        patterns = [self.train] if isinstance(self.train, str) else self.train
        strings = isinstance(patterns, Sequence) and all(isinstance(one, str) for one in patterns)
        if not strings or not patterns:
            raise SettingError(f"Phase.train is {self.train!r:.200}; expected one or several regular expressions")
        rate = self.learning_rate
        is_number = isinstance(rate, numbers.Real) and not isinstance(rate, bool)
        if rate is not None and not (is_number and math.isfinite(rate) and rate >= 0):
            raise SettingError(
                f"Phase.learning_rate is {rate!r:.200}; expected a finite number, 0 or more; a schedule goes to "
                "the optimizer, and counts its updates over all phases"
            )
