"""ReplicaAgreement: looks from time to time whether all replicas have the same variables, bit by bit."""

from typing import Any

from absl import logging

from looplib.actions.compared import compared_variables, why_not_comparable
from looplib.actions.comparison import ReplicaComparison
from looplib.base.messages import whole_number
from looplib.errors import ActionError, CorruptionError
from looplib.guards.guards import Diverged
from looplib.loop.base import StepAddition
from looplib.task.actions import Action, Event

DEFAULT_EVERY = 1000
_CURE = (
    "test the device and the memory of that replica, or leave it out, and run the same command again, which continues "
    "from the newest checkpoint with the same data. If the step updates these variables from the data of each replica "
    "on purpose, leave out the comparison (--check_replicas=0)"
)


class Corrupted(Diverged):
    """A device has changed numbers. The data is not at fault, so that a rollback repeats it.

    Args:
      controller: the `Controller`, whose guards decide between a halt and a rollback.
      what: a sentence without its full stop, that names the step.
      good_before: the last step whose state is known to be good.
      step: the step at which it was found.
    """

    repeats, kind = True, CorruptionError

    def __init__(self, controller: Any, what: str, good_before: int, step: int) -> None:
        super().__init__(what, "rollback" if controller.guards.may_roll_back else "halt", good_before, step)
        self.cure = f"{_CURE}; --non_finite=rollback goes back automatically, and repeats the data"


class ReplicaAgreement(Action, StepAddition):
    """Compares the copies of the variables of all replicas and workers, which a step updates alike.

    A copy that differs has been changed by a device or its memory. It is compared at reports, before each save, and at
    the end, by integer checksums that each replica computes. Any single changed bit is found. If a copy differs, the
    checkpoints since the last comparison are set aside, and the run ends with a `CorruptionError`, which names the
    variable, the replica and the worker; or, if the `Guards` allow rollbacks, goes back and repeats the same data.

    Nothing is compared on one replica, and with parameter servers. docs/integrity.md lists what is not compared.

    Args:
      every: steps between two comparisons, which come with the next report. At least `steps_per_loop`, which is the
        default if it is above 1,000; else the default is 1,000.

    Attributes:
      passed: how many comparisons have found no difference, and the step of the last one.

    Raises:
      UsageError: for bad input; when a training starts, for fewer steps than `steps_per_loop`.

    Example:
        ```python
        looplib.Controller(..., actions=[looplib.ReplicaAgreement(every=500)])
        ```
    """

    def __init__(self, every: int | None = None) -> None:
        self._asked = None if every is None else whole_number("every of ReplicaAgreement", every)
        self.passed: dict[str, int | None] = {"checks": 0, "last_step": None}
        self._controller: Any = None
        self._comparison: ReplicaComparison | None = None
        self._every = DEFAULT_EVERY
        self._reported = self._agreed = 0  # the steps of the last report, and of the last comparison without difference
        self._compared: tuple[int, int] | None = None  # the step of the last comparison, and the rollbacks until then

    def on_start(self, controller: Any) -> None:
        """Finds the variables to compare, and compares them once."""
        per_loop = controller.steps_per_loop
        if self._asked is not None and self._asked < per_loop:
            raise ActionError(
                f"the replicas are to be compared every {self._asked} steps, and a report comes every {per_loop}; "
                "expected at least as many steps, or a lower steps_per_loop (--check_replicas, --steps_per_loop)"
            )
        self._every = self._asked or max(DEFAULT_EVERY, per_loop)
        self._controller, self._comparison, self._compared = controller, None, None
        self._reported = self._agreed = controller.global_step
        if controller.report.computation.num_replicas == 1:
            return
        with controller.clock.phase("compile"):
            loop = controller.loops["train"]
            found = compared_variables(loop)
            if found.strategy is None:
                return
            if why := why_not_comparable(loop, found.strategy):
                logging.info("the replicas are not compared: %s; with --deterministic, they are", why)
                return
            self._comparison = ReplicaComparison(found, controller.gather)
            self.passed = {"checks": 0, "last_step": None}  # run.json is written with its newest values
            controller.report.note("replica_checks", every=self._every, passed=self.passed)
            self._compare_outside(controller)

    def __call__(self, event: Event) -> None:
        """Compares, if it is time."""
        if event.split != "train":
            return
        before, self._reported = self._reported, event.step
        went_back = event.step <= before
        if event.ending or went_back or event.step // self._every > before // self._every:
            self._compare(event.step)

    def check_state(self) -> None:
        """See `StepAddition`; compares what is saved."""
        if self._comparison is not None:
            self._compare(self._controller.global_step)

    def on_end(self, controller: Any) -> None:
        """Compares the last state, if no save did."""
        self._compare_outside(controller)

    def _compare_outside(self, controller: Any) -> None:
        """Compares before or after the steps of a training, where the controller cannot go back."""
        try:
            self._compare(controller.global_step)
        except Corrupted as fault:
            raise fault.kind(f"{fault.what}; {fault.cure}") from None

    def _compare(self, step: int) -> None:
        """Raises `Corrupted` if copies differ; workers wait for each other."""
        if self._comparison is None or self._compared == (step, self._controller.rollbacks):
            return
        if found := self._comparison.differences():
            since = f", and agreed at step {self._agreed}" if self._agreed < step else ""
            what = f"the replicas differ at step {step}{since}: {found}"
            raise Corrupted(self._controller, what, min(self._agreed, step - 1), step)
        self._compared, self._agreed = (step, self._controller.rollbacks), step
        self.passed |= {"checks": self.passed["checks"] + 1, "last_step": step}
