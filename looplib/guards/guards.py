"""Guards: the policy of a run for bad values, jumps of the loss and stalls, and the checks of each report."""

import dataclasses
import functools
import math
import statistics
from collections.abc import Mapping, Sequence

from looplib.base.messages import whole_number
from looplib.config import settings
from looplib.config.settings import setting
from looplib.errors import DivergenceError, SettingError

_WHOLE = functools.partial(whole_number, least=0)


def _not_negative(name: str, value: float | None) -> float | None:
    if value is not None and not value >= 0:
        raise SettingError(f"{name} is {value!r}; expected at least 0")
    return value


@dataclasses.dataclass(frozen=True)
class Guards:
    """The policy for values that are not finite, for jumps of the loss, and for stalls.

    Attributes:
      non_finite: for a loss, gradient or weight that is NaN or infinite (or a gradient whose square overflows float32):
        "halt" ends the run with an error; "skip" undoes the step on all replicas and continues with the next batch,
        which costs a copy of the state in each step, until ten or more steps of one report are all skipped; "rollback"
        returns to the newest checkpoint and continues with the data after the bad step; "off" checks the state before
        each save only, and leaves a bad save out.
      spike_score: the robust z-score from which a reported loss counts as a jump, such as 6; 0 scores no loss. The
        score is 0.6745 (loss - median) / MAD over the last `spike_window` reports (Iglewicz and Hoaglin, 1993).
      spike_window: how many reports the score is over; no loss is scored before there are half as many.
      loss_limit: a reported loss above this limit leads to `on_spike` too; default None, or infinity, for no limit.
      loss_limit_from: the first step to whose report `loss_limit` applies; default 0.
      on_spike: "halt" or "rollback", for a jump or a loss above the limit.
      rollbacks: how many rollbacks a run may do, over all its restarts.
      stall_limit: seconds without progress after which the watchdog ends the process; None learns the limit from the
        run's own times, 0 turns the watchdog off.
    """

    non_finite: str = setting(
        "halt", "Response to a non-finite loss, gradient or weight.", choices=("halt", "skip", "rollback", "off")
    )
    spike_score: float = setting(
        0.0, "Robust z-score of the loss that triggers on_spike; 0 disables it.", check=_not_negative
    )
    spike_window: int = 50
    loss_limit: float | None = setting(None, "Reported loss above which on_spike is triggered; none disables it.")
    loss_limit_from: int = setting(0, "First step to which loss_limit applies.", check=_WHOLE)
    on_spike: str = setting("rollback", "Response to a spike or loss above loss_limit.", choices=("halt", "rollback"))
    rollbacks: int = setting(3, "Maximum number of rollbacks in a run.", check=_WHOLE)
    stall_limit: float | None = setting(
        None, "Seconds without progress that end the run; 0: never; none: adaptive.", check=_not_negative
    )

    def __post_init__(self) -> None:
        settings.check(self)
        object.__setattr__(self, "loss_limit", math.inf if self.loss_limit is None else self.loss_limit)
        if math.isnan(self.loss_limit):
            raise SettingError("loss_limit is NaN; expected a number, or infinity for none")
        object.__setattr__(self, "spike_window", whole_number("spike_window", self.spike_window, least=4))

    @property
    def may_roll_back(self) -> bool:
        """Returns whether a guard may lead to a rollback, which needs a checkpoint from the start on."""
        looks = self.spike_score > 0 or self.loss_limit < math.inf
        return self.non_finite == "rollback" or (looks and self.on_spike == "rollback")


class Diverged(Exception):
    """A guard has found something; the controller decides what to do.

    Attributes:
      what: a sentence without its full stop, that names the step.
      policy: "halt" or "rollback".
      flag: the flag that sets the policy.
      good_before: the last step whose state was good.
      resume_after: a rollback leaves out the data up to this step.
      repeats: whether the data is not at fault, so that a rollback repeats it; checkpoints after `good_before` are then
        set aside with the policy "halt" too.
      cure: what to do, for the error of a halt; "" for what helps against bad data.
      kind: the class of the error.
    """

    repeats, cure, kind = False, "", DivergenceError

    def __init__(self, what: str, policy: str, good_before: int, resume_after: int, flag: str = "--non_finite") -> None:
        super().__init__(what)
        self.what, self.policy, self.flag = what, policy, flag
        self.good_before, self.resume_after = good_before, resume_after


def spike_score(history: Sequence[float], loss: float, guards: Guards) -> float | None:
    """Returns the robust z-score of a loss against the last reported ones if it is a jump, else None."""
    if not guards.spike_score or len(history) < guards.spike_window / 2 or not math.isfinite(loss):
        return None
    median = statistics.median(history)
    if loss <= median:
        return None
    deviation = statistics.median(abs(value - median) for value in history)
    score = 0.6745 * (loss - median) / max(deviation, 1e-12 + 1e-6 * abs(median))
    return score if score > guards.spike_score else None


def check_loss(losses: list[float], step: int, loss: float | None, guards: Guards, steps_per_loop: int) -> None:
    """Raises `Diverged` if the loss of a report jumps or is above the limit; adds it to the last losses.

    Args:
      losses: the losses reported before, of the run record; the oldest ones are dropped.
      step: the global step of the report.
      loss: the reported loss; None if there is none.
      guards: the policy.
      steps_per_loop: the steps that a report is over.
    """
    if loss is None:
        return
    where, good_before = f"the loss reported at step {step}, {loss:.4g}, is", step - steps_per_loop
    if guards.loss_limit < math.inf and not loss <= guards.loss_limit and step >= guards.loss_limit_from:
        raise Diverged(
            f"{where} not within the limit of {guards.loss_limit:.4g}", guards.on_spike, good_before, step, "--on_spike"
        )
    if not guards.spike_score:
        return
    if (score := spike_score(losses, loss, guards)) is not None:
        what = f"{where} {score:.1f} robust standard deviations above the median of the last {len(losses)} reports"
        raise Diverged(what, guards.on_spike, good_before, step, "--on_spike")
    if math.isfinite(loss):
        losses.append(loss)
    del losses[: -guards.spike_window]


def check_skipped(step: int, metrics: Mapping[str, float], steps: int) -> None:
    """Raises `Diverged` if every one of at least ten steps of a report was skipped: no later one will be better."""
    if steps >= 10 and metrics.get("skipped_steps", 0) >= steps:
        raise Diverged(
            f"all {steps} steps up to step {step} had non-finite values and were skipped", "halt", step - steps, step
        )
