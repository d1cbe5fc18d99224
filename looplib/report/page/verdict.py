"""Remarks about a run: simple rules on the measured numbers, each with the numbers that it is about.

A conclusion needs evidence: a trend 8 reports, a verdict on a metric 5 evaluations, of which it has levelled off if the
first half made 90% of the gain, and a fall of the rate a run of a minute. `Clock.summary` has the rules for times.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from looplib.report.page.content import Run
from looplib.report.page.curves import Curve, best_place

_FEWEST, _FEWEST_SCORES = 8, 5  # points that a curve needs for a trend, and a metric of evaluations for a verdict
_LEVELLED = 0.9  # of the gain of a metric, made in the first half of its evaluations
_SHORT = 60.0  # seconds, of a run whose rate says little
_MUCH = 0.05  # restarts are mentioned from this part of the time on
_WORSE = 0.05  # how much worse an evaluation ends than its best, as a part of its range
_HARDLY = 0.1  # how much it had improved before that, as a part of what it has lost since
_LONG = 600.0  # seconds; a shorter run always takes much of its time to start

_OVERFITS = "Use the best checkpoint (--keep_best, --checkpoint=best), train less long, or regularize more."
_NOT_LEARNED = (
    "Check that each label belongs to its example (a shuffle of one without the other), and that the data of the "
    "evaluation is prepared as that of the training; else evaluate earlier, or regularize more."
)


@dataclasses.dataclass(frozen=True)
class Remark:
    """A sentence about a run.

    Attributes:
      kind: "bad", "note" or "good".
      text: what was measured.
      advice: what to try; "" for nothing.
    """

    kind: str
    text: str
    advice: str = ""


def findings(run: Run, alone: bool = True) -> list[Remark]:
    """Returns what can be said about a run, the most important first.

    Args:
      run: the run.
      alone: whether the page has no other run. In a comparison, which is about metrics and settings, each run would say
        the same about its time.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # of values whose sums or differences are infinite
        found = [*_of_the_end(run), *_of_warnings(run), *_of_values(run), *_of_learning(run)]
        found += [*_of_the_rate(run), *_of_time(run)] if alone else []
    found.sort(key=lambda one: ("bad", "note", "good").index(one.kind))
    return [*found, *_of_the_limit(run)] if alone and _is_short(run) else found


def _of_the_end(run: Run) -> Iterator[Remark]:
    at = "" if run.step is None else f" at step {run.step:,}"
    if run.status == "failed":
        yield Remark("bad", f"The run failed{at}.")  # the error, which is above, says what to do
    elif run.status == "preempted":
        yield Remark("note", f"The run was stopped{at} and has saved its state.", "Run the same command to continue.")
    elif run.status == "killed":
        again = "continue" if run.checkpoints else "begin again: nothing was saved yet"
        yield Remark("bad", f"The run was killed{at} or later.", f"Run the same command to {again}.")
    elif run.status in ("starting", "running", "silent"):
        text = f"The run had not ended when this page was written; its last report is of step {run.step or 0:,}."
        silent = "It has reported nothing for long; python -m looplib status names its process."
        yield Remark("note", text, silent if run.status == "silent" else "")
    if run.final_step is not None and run.step is not None:
        text = f"The run trained to step {run.step:,} and went back to the checkpoint of step {run.final_step:,}"
        yield Remark("note", f"{text}, which evaluations, predictions and exports take.")
    if run.report.newest.outcome:
        yield Remark("note", _sentence(run.report.newest.outcome))
    killed = sum(start.status == "killed" for start in run.starts)
    if killed and len(run.starts) > 1:
        were = "was" if killed == 1 else "were"
        yield Remark("note", f"{killed} of {_count(len(run.starts), 'start')} {were} killed.")
    if run.copy is not None and run.copy.error:  # else it comes a moment after this page
        text = f"When this page was written, {run.copy.text}."
        ended = run.status not in ("starting", "running", "silent")
        yield Remark("bad", text, "Run the same command on this machine, which copies the rest." if ended else "")


def _of_warnings(run: Run) -> Iterator[Remark]:
    for one in (one for start in run.starts for one in start.warnings):
        yield Remark("bad", f"Found at step {one.step:,}: {one.text}.", _sentence(one.advice))


def _of_values(run: Run) -> Iterator[Remark]:
    if run.report.rollbacks:
        steps = ", ".join(f"{mark.step:,}" for mark in run.marks if mark.kind == "rollback")
        where = f" (at step {steps})" if steps else ""
        text = f"The run went back to an earlier checkpoint {_times(run.report.rollbacks)}{where}."
        yield Remark("note", text, "If it happens again, lower the learning rate, clip gradients or check the data.")
    skipped = run.curve("train/skipped_steps")
    count = int(np.clip(skipped.finite[1].sum(), 0, 2**53)) if skipped else 0
    if count:
        text = f"{_count(count, 'step')} had values that were not finite and changed nothing."
        yield Remark("note", text, "Lower the learning rate, clip gradients, or check the data of these steps.")
    for curve in run.curves:
        bad = len(curve.steps) - len(curve.finite[0])
        if bad and not curve.undone:
            first = next(step for step, value in zip(curve.steps, curve.values) if not np.isfinite(value))
            text = f"{curve.split} {curve.name} was not finite {_times(bad)}, first at step {first:,}."
            guards = (run.settings.get(name) for name in ("non_finite", "guards.non_finite"))  # of a binary, or not
            unguarded = curve.split == "train" and "off" in guards
            yield Remark("bad", text, "Use --non_finite=halt to stop at such a step." if unguarded else "")


def _of_learning(run: Run) -> Iterator[Remark]:
    curve = run.curve(run.best_metric)
    if curve is not None and len(curve.finite[0]) >= 3:
        yield _of_the_best(run, curve)
    loss = run.curve("train/loss")
    if loss and len(loss.finite[1]) >= _FEWEST:
        found = loss.finite[1]
        half = len(found) // 2
        if np.median(found[half:]) >= np.median(found[:half]):
            text = "Training loss did not fall in the second half of the run"
            text += f" (median {np.median(found[:half]):.4g}, then {np.median(found[half:]):.4g})."
            yield Remark("note", text, "Try a lower or decaying learning rate.")


def _of_the_best(run: Run, curve: Curve) -> Remark:
    """Says how the metric by which the run is judged ended, against its best value."""
    steps, found = curve.finite
    rises = run.best_mode == "max"
    best = best_place(found, run.best_mode)
    better = found if rises else -found
    lost, gained, span = better[best] - better[-1], better[best] - better[0], np.ptp(found)
    text = f"{run.best_metric} was best at step {steps[best]:,} ({found[best]:.4g})"
    noise = _noise(run, curve, (found[best] + found[-1]) / 2) if rises else 0.0
    ended = f"{text}, and {found[-1]:.4g} at the end"
    few = len(found) < _FEWEST_SCORES
    if lost > max(_WORSE * span, noise) and not few:
        falls = _falls(run.curve(f"train/{curve.name}"), int(steps[best]))
        if gained <= _HARDLY * lost:
            again = " while training loss kept falling: it fits its training data alone" if falls else ""
            text = f"{run.best_metric} hardly improved after its first evaluation ({found[0]:.4g} at step "
            return Remark("note", f"{text}{steps[0]:,}), and was {found[-1]:.4g} at the end{again}.", _NOT_LEARNED)
        overfits = " Training loss kept falling: it overfits." if falls and "loss" in curve.name else ""
        return Remark("note", f"{ended}.{overfits}", _OVERFITS if run.final_step is None else "")
    if best == len(found) - 1:
        diverges = _diverges(run.curve("train/loss")) or len(curve.steps) > len(found)
        advice = "" if run.status != "done" or few or diverges else "It may gain by training longer."
        return Remark("good", f"{text}, the last evaluation.", advice)
    levelled = 0 < _LEVELLED * gained <= better[: len(better) // 2].max() - better[0] and not few
    return Remark("good", f"{ended}: it has levelled off." if levelled else f"{ended}.")


def _diverges(loss: Curve | None) -> bool:
    """Returns whether a loss was higher in the second half of its values, or not finite in one of them."""
    if loss is None:
        return False
    found, half = loss.finite[1], len(loss.finite[1]) // 2
    return len(found) < len(loss.steps) or bool(half and np.median(found[half:]) > np.median(found[:half]))


def _noise(run: Run, curve: Curve, rate: float) -> float:
    """Returns by how much a rate such as an accuracy differs by chance: two standard errors; 0 for other metrics."""
    counted = run.curve(f"{curve.split}/examples")
    examples = counted.finite[1][-1:] if counted else np.array([])
    values = curve.finite[1]
    if not examples.size or examples[0] < 1 or values.min() < 0 or values.max() > 1:
        return 0.0
    return 2 * float(np.sqrt(rate * (1 - rate) / examples[0]))


def _falls(curve: Curve | None, step: int) -> bool:
    """Returns whether the median of a curve is lower after a step than before it."""
    if curve is None:
        return False
    steps, found = curve.finite
    before, after = found[steps <= step], found[steps > step]
    return bool(before.size and after.size and np.median(after) < np.median(before[-len(after) :]))


def _is_short(run: Run) -> bool:
    """Returns whether starting took most of the time of a run that was short."""
    return run.wall < _LONG and _limit(run).startswith("start-bound")


def _limit(run: Run) -> str:
    trained = [start for start in run.starts if start.trained]
    return trained[-1].verdict if trained else run.report.verdict


def _of_the_limit(run: Run) -> Iterator[Remark]:
    """Says what limits the speed of the last start that trained."""
    said = _limit(run)
    if run.status != "done" and said.startswith("start-bound"):  # as any run is that has not come far
        said = ""
    what, _, advice = said.partition("; ")
    if what:
        last = " (last start)" if sum(start.trained for start in run.starts) > 1 else ""
        kind = "good" if what.startswith("compute-bound") else "note"
        yield Remark(kind, f"{_sentence(what)[:-1]}{last}.", _sentence(advice))


def _of_time(run: Run) -> Iterator[Remark]:
    if not _is_short(run):
        yield from _of_the_limit(run)
    trained = [start for start in run.starts if start.trained]
    if len(trained) > 1 and run.wall:
        again = trained[1:]
        seconds = sum(start.seconds.get(name, 0.0) for start in again for name in ("start", "compile", "restore"))
        text = f"{_count(len(again), 'restart')} took {seconds:.0f} s to import, build, compile and restore"
        if seconds >= _MUCH * run.wall:
            yield Remark("note", f"{text}, {seconds / run.wall:.0%} of the time.")
    for one in run.stragglers:
        waits = one.cause == "data"
        advice = "Look at the disk and the network that its data comes from." if waits else ""
        advice = advice or "Look at what else its machine does, and whether its processor or device is slower."
        yield Remark("note", f"{one}."[0].upper() + f"{one}."[1:], advice)


def _of_the_rate(run: Run) -> Iterator[Remark]:
    curve = run.curve("train/steps_per_second")
    if curve is None or len(curve.finite[1]) < _FEWEST or run.wall < _SHORT:
        return
    steps, found = curve.finite
    quarter = len(found) // 4
    first, last = np.median(found[:-quarter]), np.median(found[-quarter:])
    if last < 0.8 * first:
        text = f"The rate fell from {first:.4g} to {last:.4g} steps a second, from step {steps[-quarter]:,} on."
        yield Remark("note", text, "Look at what else the machine did, at the input, and at the memory.")


def _sentence(clause: str) -> str:
    return f"{clause[:1].upper()}{clause[1:]}." if clause else ""


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")
