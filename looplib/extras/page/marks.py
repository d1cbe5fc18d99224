"""What the charts mark: restarts, rollbacks, skipped steps and the best checkpoint."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from looplib.errors import UsageError
from looplib.extras.page import values
from looplib.extras.page.curves import Curve
from looplib.extras.page.run import Mark, SavedCheckpoint, ShownStart
from looplib.task.metric_names import mode_of

_MOST = 200  # marks of skipped steps


def best_metric(kept: Any, found: Sequence[Curve]) -> tuple[str, str]:
    """Returns the metric that decides which checkpoint is the best, and its mode; "" if no name decides it.

    Args:
      kept: the setting --keep_best, which comes first.
      found: the curves, of which an evaluation's comes next.
    """
    mode, _, wanted = values.text(kept, 200).rpartition(":")
    metrics = [f"{curve.split}/{curve.name}" for curve in found if curve.split != "train"]
    metrics.sort(key=lambda metric: "loss" in metric)  # an accuracy says more than a loss
    candidates = [(wanted, mode or None)] if wanted else []
    for metric, mode in [*candidates, *((metric, None) for metric in metrics)]:
        try:
            return metric, mode_of("the page", metric, mode)
        except UsageError:
            continue
    return "", ""


def with_best(saved: list[SavedCheckpoint], metric: str, mode: str) -> list[SavedCheckpoint]:
    """Returns the checkpoints, of which the best by a metric says so; of equal ones the newest.

    Args:
      saved: the checkpoints, oldest first.
      metric: such as "eval/accuracy".
      mode: "max" or "min".
    """
    scored = [one for one in saved if metric in one.scores and not one.trouble]
    if not scored:
        return saved
    best = (max if mode == "max" else min)(reversed(scored), key=lambda one: one.scores[metric])
    return [dataclasses.replace(one, best=one is best) for one in saved]


def of_starts(starts: Sequence[ShownStart]) -> Iterator[Mark]:
    """Yields the restarts of a run, and its rollbacks."""
    trained = [start for start in starts if start.trained]
    for before, start in zip(trained, trained[1:]):
        text = f"restarted after a start that was {before.status or 'ended'}"
        yield Mark("restart", start.restored_step or 0, text)
    for start in starts:
        yield from start.rollbacks


def of_curves(found: Sequence[Curve]) -> Iterator[Mark]:
    """Yields the steps that were skipped because a value was not finite."""
    for curve in found:
        if curve.split == "train" and curve.name == "skipped_steps":
            skipped = [(step, value) for step, value in zip(curve.steps, curve.values) if value > 0]
            yield from (
                Mark("skipped", step, f"{n:g} skipped steps up to step {step:,}") for step, n in skipped[:_MOST]
            )


def of_checkpoints(saved: Sequence[SavedCheckpoint], metric: str) -> Iterator[Mark]:
    """Yields the best checkpoint by a metric."""
    yield from (
        Mark("best", one.step, f"best checkpoint: {metric} {one.scores[metric]:.4g}") for one in saved if one.best
    )
