"""Guards against values that are not finite, and against a loss that jumps.

What is watched in a step, on the device: the metrics whose name has "loss" in it, and every gradient that goes through
a Keras optimizer. What is watched between steps, before anything is committed: every floating-point variable of the
state.
"""

import dataclasses
import math
import statistics
import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from looplib.errors import UsageError, whole_number

POLICIES = ("halt", "skip", "rollback", "off")
_step = threading.local()


@dataclasses.dataclass(frozen=True)
class Guards:
    """What happens when a value is not finite, a loss jumps, or nothing moves.

    Attributes:
      non_finite: for a loss, gradient or weight that is NaN or infinite (or a gradient whose square overflows float32):
        "halt" ends the run with an error; "skip" undoes the step, on every replica alike, and goes on with the next
        batch, at the price of a copy of the state each step, until ten or more steps of one report are all skipped;
        "rollback" goes back to the newest checkpoint and on from there with the data after the bad step; "off" looks
        only before a save, which it then leaves out.
      spike_score: the robust z-score of a reported loss from which it counts as a jump (6, say); 0 looks at none. The
        score is 0.6745 (loss - median) / MAD over the last `spike_window` reports (Iglewicz and Hoaglin, 1993).
      spike_window: how many reports the score is over; none is scored before there are half as many.
      loss_limit: a reported loss above this leads to `on_spike` too; default infinity, which is none.
      loss_limit_from: the first step whose report `loss_limit` holds for; default 0.
      on_spike: "halt" or "rollback", for a jump or a loss above the limit.
      rollbacks: how many rollbacks a run may do, over all its restarts.
      stall_limit: seconds without progress after which the watchdog ends the process; None learns them from the run's
        own times, 0 watches nothing.
    """

    non_finite: str = "halt"
    spike_score: float = 0.0
    spike_window: int = 50
    loss_limit: float = math.inf
    loss_limit_from: int = 0
    on_spike: str = "rollback"
    rollbacks: int = 3
    stall_limit: float | None = None

    def __post_init__(self):
        if self.non_finite not in POLICIES:
            raise UsageError(f"non_finite is {self.non_finite!r}; expected one of {', '.join(POLICIES)}")
        if self.on_spike not in ("halt", "rollback"):
            raise UsageError(f"on_spike is {self.on_spike!r}; expected halt or rollback")
        if math.isnan(self.loss_limit):
            raise UsageError("loss_limit is NaN; expected a number, or infinity for none")
        for name, least in (("spike_window", 4), ("loss_limit_from", 0), ("rollbacks", 0)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least=least))
        for name, least in (("spike_score", 0), ("stall_limit", 0)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise UsageError(f"{name} is {value!r}; expected at least {least}")

    @property
    def may_roll_back(self):
        """Whether something leads to a rollback, so that there must be a checkpoint from the start."""
        looks = self.spike_score > 0 or self.loss_limit < math.inf
        return self.non_finite == "rollback" or (looks and self.on_spike == "rollback")


class Trouble(Exception):
    """A guard has found something; the controller decides what to do.

    Attributes:
      what: a sentence without its full stop, that names the step.
      policy: "halt" or "rollback".
      good_before: the last step whose state was still good.
      resume_after: the data up to this step is left out after a rollback.
    """

    def __init__(self, what, policy, good_before, resume_after):
        super().__init__(what)
        self.what = what
        self.policy = policy
        self.good_before = good_before
        self.resume_after = resume_after


def note(gradients: Sequence[Any], variables: Sequence[Any] | None) -> None:
    """Notes the gradients that an optimizer is given for `watched`, if the step is run by it.

    Args:
      gradients: tensors, `tf.IndexedSlices` or None.
      variables: theirs, of Keras or TensorFlow; None if they are not known.
    """
    noted = getattr(_step, "gradients", None)
    if noted is not None:
        for number, (gradient, variable) in enumerate(zip(gradients, variables or [None] * len(gradients))):
            name = getattr(variable, "path", None) or getattr(variable, "name", f"variable {number}")
            noted.append((f"the gradient of {name}", gradient))


def watched(step_fn, inputs):
    """Runs a step and finds what to watch in it; in replica context.

    Returns:
      `(outputs, norms)`: what `step_fn` returned, and a list of (name, float32 scalar: half the squared norm) of the
      gradients that can be seen from outside of the step, not being inside of a condition or a function.
    """
    _step.gradients = []
    try:
        outputs = step_fn(inputs)
        noted = _step.gradients
    finally:
        _step.gradients = None
    return outputs, _norms(noted)


@tf.autograph.experimental.do_not_convert
def _norms(noted):
    norms = []
    for name, gradient in noted:
        gradient = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        if gradient is None or not gradient.dtype.is_floating:
            continue
        if not tf.executing_eagerly() and gradient.graph is not tf.compat.v1.get_default_graph():
            continue
        norms.append((name, tf.nn.l2_loss(tf.cast(gradient, tf.float32) if gradient.dtype.size < 4 else gradient)))
    return norms


class StateCheck:
    """Finds variables with values that are not finite.

    Args:
      variables: list of (name, `tf.Variable`). Those that are not floating-point are left out, and those that are not
        finite now, being meant so.
    """

    def __init__(self, variables):
        variables = [(name, variable) for name, variable in variables if variable.dtype.is_floating]
        self._names = [name for name, _ in variables]
        self._variables = [variable for _, variable in variables]
        # Now without a trace, which starting to train need not wait for.
        self._meant_so = {name for name, ok in zip(self._names, self._look()) if not ok}
        self._finite = tf.function(self._look, autograph=False)

    def _look(self):
        return [tf.reduce_all(tf.math.is_finite(variable)) for variable in self._variables]

    def bad(self):
        """Returns the names of the variables that are not finite now."""
        finite = zip(self._names, self._finite())
        return [name for name, ok in finite if not ok and name not in self._meant_so]


def spike(history, loss, guards):
    """Scores a loss against the ones before it.

    Args:
      history: list of the last reported losses, at most `guards.spike_window`.
      loss: float, the new one.
      guards: `Guards`.

    Returns:
      The robust z-score if it makes a jump, else None.
    """
    if not guards.spike_score or len(history) < guards.spike_window / 2 or not math.isfinite(loss):
        return None
    median = statistics.median(history)
    deviation = statistics.median(abs(value - median) for value in history)
    score = 0.6745 * (loss - median) / max(deviation, 1e-12 + 1e-6 * abs(median))
    return score if score > guards.spike_score else None


def look_for_a_jump(losses, step, loss, guards, steps_per_loop):
    """Raises `Trouble` if the loss of a report jumps, or is above the limit; keeps the last losses.

    Args:
      losses: the losses reported before, of the run's record.
      step: the global step of the report.
      loss: float, the reported loss; None if there is none.
      guards: `Guards`.
      steps_per_loop: the steps that a report is over.
    """
    if loss is None:
        return
    where = f"the loss reported at step {step}, {loss:.4g}, is"
    trouble = dict(policy=guards.on_spike, good_before=step - steps_per_loop, resume_after=step)
    if loss > guards.loss_limit and step >= guards.loss_limit_from:
        raise Trouble(f"{where} above the limit of {guards.loss_limit:.4g}", **trouble)
    if not guards.spike_score:
        return
    score = spike(losses, loss, guards)
    if score is not None:
        what = f"{where} {score:.1f} robust standard deviations above the last {len(losses)}"
        raise Trouble(what, **trouble)
    losses.append(loss)
    del losses[: -guards.spike_window]


def look_for_nothing_but_skips(step, metrics, steps):
    """Raises `Trouble` if every one of at least ten steps was skipped, as none that follows will be better.

    Args:
      step: the global step of the report.
      metrics: dict of the training metrics, of which `skipped_steps` is looked at.
      steps: how many steps the report is over.
    """
    if steps >= 10 and metrics.get("skipped_steps", 0) >= steps:
        raise Trouble(
            f"all {steps} steps up to step {step} were not finite and were skipped", "halt", step - steps, step
        )


def listing(names, most=3):
    """Joins names for a sentence; the first few and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
