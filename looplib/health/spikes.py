"""Guards against jumps of the reported loss, and against a loss above a limit."""

import math
import statistics
from collections.abc import Sequence

from looplib.health.guards import Diverged, Guards


def spike_score(history: Sequence[float], loss: float, guards: Guards) -> float | None:
    """Scores a loss against the ones before it.

    Args:
      history: the last reported losses, at most `guards.spike_window`.
      loss: the new one.
      guards: `Guards`.

    Returns:
      The robust z-score if it makes a jump, else None.
    """
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
      guards: `Guards`.
      steps_per_loop: the steps that a report is over.
    """
    if loss is None:
        return
    where, good_before = f"the loss reported at step {step}, {loss:.4g}, is", step - steps_per_loop
    if loss > guards.loss_limit and step >= guards.loss_limit_from:
        raise Diverged(f"{where} above the limit of {guards.loss_limit:.4g}", guards.on_spike, good_before, step)
    if not guards.spike_score:
        return
    score = spike_score(losses, loss, guards)
    if score is not None:
        what = f"{where} {score:.1f} robust standard deviations above the median of the last {len(losses)} reports"
        raise Diverged(what, guards.on_spike, good_before, step)
    losses.append(loss)
    del losses[: -guards.spike_window]
