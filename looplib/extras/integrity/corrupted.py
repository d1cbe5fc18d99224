"""What is raised where a device has changed numbers: the controller halts or goes back, and repeats the data."""

from typing import Any

from looplib.errors import CorruptionError
from looplib.health.guards import Diverged


class Corrupted(Diverged):
    """A device has changed numbers. The data is not at fault, so that a rollback repeats it.

    Args:
      controller: the `Controller`, whose guards decide between a halt and a rollback.
      what: a sentence without its full stop, that names the step.
      cure: what to do, without a full stop.
      good_before: the last step whose state is known to be good.
      step: the step at which it was found.
    """

    repeats, kind = True, CorruptionError

    def __init__(self, controller: Any, what: str, cure: str, good_before: int, step: int) -> None:
        super().__init__(what, "rollback" if controller.guards.may_roll_back else "halt", good_before, step)
        self.cure = f"{cure}; --non_finite=rollback goes back automatically, and repeats the data"
