"""What the charts mark: restarts, rollbacks, warnings, phases, skipped steps and the best checkpoint."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from looplib.report.page.curves import Curve
from looplib.report.page.run import Mark, SavedCheckpoint, ShownStart
from looplib.run import values
from looplib.run.metric_names import best_first

_MOST, _MOST_PHASES = 200, 50  # marks of skipped steps, and of phases
# Words of a metric's name, for a guess at which of two values is better. Being wrong costs nothing here: the page only
# shows what it takes for the best. Whatever chooses by a metric asks the user (`looplib.run.metric_names.mode_of`).
_LESS = set("loss losses error err mae mse rmse mape perplexity ppl nll wer cer fid".split())
_MORE = set("accuracy acc auc precision recall f1 bleu rouge map ap iou miou dice psnr ssim r2".split())


def guessed_mode(metric: str) -> str | None:
    """Returns "max" or "min", guessed from words in a metric's name such as "eval/accuracy"; None if none tells."""
    words = set(re.split(r"[^a-z0-9]+", metric.partition("/")[2].lower()))
    less, more = bool(words & _LESS), bool(words & _MORE)
    return None if less == more else "min" if less else "max"


def best_metric(kept: Any, found: Sequence[Curve]) -> tuple[str, str]:
    """Returns the metric that decides which checkpoint is the best, and its mode; "" if no name decides it.

    Args:
      kept: the setting --keep_best, which comes first.
      found: the curves; an evaluation's comes next.
    """
    mode, _, wanted = values.text(kept, 200).rpartition(":")
    metrics = [f"{curve.split}/{curve.name}" for curve in found if curve.split != "train"]
    metrics.sort(key=lambda metric: "loss" in metric)  # an accuracy says more than a loss
    if "/" in wanted and mode in ("max", "min"):
        return wanted, mode
    candidates = [wanted] if not mode else []
    guesses = ((metric, guessed_mode(metric)) for metric in [*candidates, *metrics])
    return next(((metric, guess) for metric, guess in guesses if guess), ("", ""))


def with_best(saved: list[SavedCheckpoint], metric: str, mode: str) -> list[SavedCheckpoint]:
    """Returns the checkpoints with a mark on the best by a metric, among equal ones on the newest.

    Args:
      saved: the checkpoints, oldest first.
      metric: such as "eval/accuracy".
      mode: "max" or "min".
    """
    intact = [one for one in reversed(saved) if not one.trouble]
    best = best_first(intact, lambda one: one.scores.get(metric), mode)[:1]
    return [dataclasses.replace(one, best=one in best) for one in saved]


def of_starts(starts: Sequence[ShownStart]) -> Iterator[Mark]:
    """Yields the restarts of a run, its rollbacks, and its warnings."""
    trained = [start for start in starts if start.trained]
    for before, start in zip(trained, trained[1:]):
        text = f"restarted after a start that was {before.status or 'ended'}"
        yield Mark("restart", start.restored_step or 0, ", with ".join(filter(None, [text, start.note])))
    for start in starts:
        yield from start.rollbacks
        yield from (Mark("warning", one.step, f"{one.kind}: {one.text}") for one in start.warnings)


def of_phases(phases: Any) -> Iterator[Mark]:
    """Yields the steps at which phases end that another follows.

    Args:
      phases: the setting `phases` of a `run.json`.
    """
    found = [values.mapping(one) for one in values.items(phases)[:_MOST_PHASES]]
    for number, (before, now) in enumerate(zip(found, found[1:]), 2):
        if (step := values.whole(before.get("until"))) is None:
            continue
        train = now.get("train")
        patterns = [values.text(one, 100) for one in ([train] if isinstance(train, str) else values.items(train))]
        rate = values.numbers(now).get("learning_rate")
        text = f"phase {number}: trains {', '.join(filter(None, patterns)) or 'all'}"
        yield Mark("phase", step, text + (f" at the rate {rate:g}" if rate is not None else ""))


def of_curves(found: Sequence[Curve]) -> Iterator[Mark]:
    """Yields the steps that were skipped because a value was not finite."""
    for curve in found:
        if curve.split == "train" and curve.name == "skipped_steps":
            skipped = [(step, value) for step, value in zip(curve.steps, curve.values) if value > 0]
            yield from (
                Mark("skipped", step, f"{n:g} skipped steps up to step {step:,}") for step, n in skipped[:_MOST]
            )


def of_checkpoints(saved: Sequence[SavedCheckpoint], metric: str) -> Iterator[Mark]:
    """Yields the best of the kept checkpoints by a metric."""
    yield from (
        Mark("best", one.step, f"best checkpoint kept: {metric} {one.scores[metric]:.4g}") for one in saved if one.best
    )
