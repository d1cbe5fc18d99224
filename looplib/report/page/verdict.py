"""Remarks about a run: simple rules on the measured numbers, each with the numbers that it is about.

A conclusion needs evidence: a trend 8 reports, a verdict on a metric 5 evaluations, and a fall of the rate a run of a
minute. A difference counts if it is more than chance makes: `_noise` is what a curve shows of that, `_chance` what the
number of examples says. `Clock.summary` has the rules for times.
"""

import dataclasses
import re
from collections.abc import Iterator

import numpy as np

from looplib.report.page.content import Run
from looplib.report.page.curves import Curve, best_place
from looplib.run.metric_names import known_mode

_FEWEST, _FEWEST_SCORES = 8, 5  # points that a curve needs for a trend, and a metric of evaluations for a verdict
_LEAST_SCORES = 3  # evaluations that a metric needs to be mentioned
_LEVELLED = 0.9  # of the gain of a metric: made in the first half of its evaluations, and kept at the end
_NOISE = 4.84  # median distances of a value from the mean of its neighbours: 4 standard deviations of normal noise
_SLIGHT, _TINY = 0.01, 0.001  # what is no change: as a part of a value, and of what a metric has gained
_LEARNT = 0.05  # of the loss at the start, by which the best one is lower if anything was learnt
_SOME, _ENOUGH, _MANY = 20, 100, 1000  # examples, for a rate that stays 0, is that of a guess, or never changes at all
_SHORT = 60.0  # seconds, of a run whose rate says little
_MUCH = 0.05  # restarts are mentioned from this part of the time on
_LONG = 600.0  # seconds; a shorter run always takes much of its time to start

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
    constant = [(one, count) for one in run.curves if (count := _constant(run, one))]
    if constant and all(np.isfinite(one.values).all() for one in run.curves if not one.undone):
        texts = (f"{one.split}/{one.name} {one.finite[1][-1]:.4g} in the last {count:,}" for one, count in constant)
        advice = "The model may call every example one class: look at what it predicts, and weigh the rare class more."
        yield Remark("note", f"Unchanged over evaluations: {', '.join(texts)}.", advice)
    curve = run.curve(run.best_metric)
    if curve and curve not in [one for one, _ in constant] and len(curve.finite[0]) >= _LEAST_SCORES:
        yield _of_the_best(run, curve)
    loss = run.curve("train/loss")
    if loss and len(loss.finite[1]) >= _FEWEST:
        found = loss.finite[1]
        first, second = np.split(found, [len(found) // 2])
        medians = f"median {np.median(first):.4g} in the first half, {np.median(second):.4g} in the second"
        noise = _noise(found)
        if _rises(first, second, noise, max(_SLIGHT * abs(np.median(first)), _TINY * np.ptp(found))):
            yield Remark("note", f"Training loss rose: {medians}.", "Try a lower or decaying learning rate.")
        elif np.median(second) >= np.median(first) and not any(_rises(second, found[:n], noise) for n in (1, 3)):
            yield Remark("note", f"Training loss did not fall: {medians}.", "Try another learning rate.")


def _constant(run: Run, curve: Curve) -> int:
    """Returns in how many of its last evaluations a rate, such as a recall, was the same; 0 if that says nothing.

    It says something of a rate of 0, and of one of many examples that was never another one and is not perfect.
    """
    found, name = curve.finite[1], re.sub(r"_(score|\d+)$", "", curve.name)
    if curve.split == "train" or curve.undone or not found.size or known_mode(f"/{name}") != "max":
        return 0
    judged = run.curve(run.best_metric) if run.best_metric else None
    if judged is not None and judged is not curve and judged.finite[1].size and np.ptp(judged.finite[1]) == 0:
        return 0  # nothing changed at all
    count = len(found) if np.ptp(found) == 0 else int((found[::-1] != found[-1]).argmax())
    least, examples = (_LEAST_SCORES, _SOME) if found[-1] == 0 else (max(_FEWEST_SCORES, len(found)), _MANY)
    return count if count >= least and found[-1] < 1 and _examples(run, curve) >= examples else 0


def _of_the_best(run: Run, curve: Curve) -> Remark:
    """Says how the metric by which the run is judged ended, against its best value."""
    steps, found = curve.finite
    better = found if run.best_mode == "max" else -found
    best, few, late = best_place(found, run.best_mode), len(found) < _FEWEST_SCORES, max(3, len(found) // 5)
    noise, chance, slight = _noise(found), _chance(run, curve, best), _SLIGHT * abs(found[best])
    gained, lost, surely_lost = (better[best] - one for one in (better[0], better[-1], better[-late:].max()))
    text = f"{run.best_metric} was best at step {steps[best]:,} ({found[best]:.4g})"
    ended = f"{text}, and {found[-1]:.4g} at the end"
    if len(found) > 1 and np.ptp(found) == 0 and run.best_mode == "min" and found[0]:
        text = f"{run.best_metric} was {found[0]:.4g} in all of {len(found)} evaluations."
        return Remark(
            "note", text, "Check the learning rate, and that the optimizer trains the variables of the model."
        )
    if found[best] == 1 and (other := _lowest(run, curve, int(steps[best]))):
        advice = "The model may have called every example one class there; judge it by another metric."
        return Remark("note", f"{text}, where {other} was lowest, and {found[-1]:.4g} at the end.", advice)
    trained = run.curve(f"train/{curve.name}") if run.best_mode == "min" else None
    in_vain = trained is not None and not few and _is_guess(run, curve, found)
    if not few and surely_lost > max(noise, chance, slight, _TINY * gained):
        return _of_a_rise(run, ended, trained is not None and _falls(trained, int(steps[best])), in_vain)
    gains = best == len(found) - 1 and not few and _rises(better[-2 * late : -late], better[-late:], noise)
    if in_vain and not gains:
        return Remark("note", f"{ended}: hardly better than at its first evaluation ({found[0]:.4g}).")
    if best == len(found) - 1:
        diverges = _diverges(run.curve("train/loss")) or len(curve.steps) > len(found)
        advice = "It may gain by training longer." if gains and run.status == "done" and not diverges else ""
        return Remark("good", f"{text}, the last evaluation.", advice)
    kept, flat = lost <= (1 - _LEVELLED) * gained, surely_lost <= max(_noise(found[len(found) // 2 :]), slight)
    early = 0 < _LEVELLED * gained <= better[: len(better) // 2].max() - better[0]
    if flat and kept and early and not few:
        return Remark("good", f"{ended}: it has levelled off.")
    as_good = flat and (kept or lost <= min(max(chance, slight, 0.0 if few else noise), 10 * slight))
    return Remark("good" if as_good else "note", f"{ended}.")


def _of_a_rise(run: Run, ended: str, falls: bool, in_vain: bool) -> Remark:
    """Says why a metric is worse than it was, and what to do.

    Args:
      run: the run.
      ended: its best value and the last one, as a clause.
      falls: whether the training loss fell nevertheless.
      in_vain: whether nothing was ever learnt on the data of the evaluation.
    """
    if falls and in_vain:
        text = f"{ended}, little better than at its first evaluation, while training loss kept falling"
        return Remark("note", f"{text}: the model fits its training data alone.", _NOT_LEARNED)
    kept = [one.best for one in run.checkpoints]
    keep = "" if run.best_metric in kept else f"--keep_best={run.best_mode}:{run.best_metric}, "
    advice = f"Use the best checkpoint ({keep}--checkpoint=best), "
    advice += "train less long, or regularize more." if falls else "or lower the learning rate."
    text = f"{ended}. Training loss kept falling: it overfits." if falls else f"{ended}: it got worse."
    return Remark("note", text, advice if run.final_step is None else "")


def _is_guess(run: Run, curve: Curve, losses: np.ndarray) -> bool:
    """Returns whether nothing was learnt on the data of an evaluation: surely not, and never before it.

    A first evaluation may come after a model has learnt, so the accuracy has to say it too: with one prediction for all
    examples, it is about the probability of an example that follows from the loss. If the model was too sure of itself
    already, it is no better than that of the first training steps, and at most that of a coin.
    """
    found = [one for one in run.curves if one.split == curve.split and "acc" in one.name and not one.undone]
    rates = [np.median(one.finite[1]) - _chance(run, one, 0) for one in found if one.finite[1].size]
    hardly = losses.min() >= (1 - _LEARNT) * losses[0] and _examples(run, curve) >= _ENOUGH
    trained = [run.curve(f"train/{one.name}") for one in found]
    began = [one.finite[1][0] for one in trained if one is not None and one.finite[1].size]
    bound = max(np.exp(-losses.min()), min([0.5, *began]) if began else 0.0)
    return bool(hardly and rates and max(rates) <= bound)


def _lowest(run: Run, curve: Curve, step: int) -> str:
    """Returns which of precision and recall was at its lowest when the other one was perfect; "" for none."""
    kind = {"recall": "precision", "precision": "recall"}.get(curve.name)
    if (other := run.curve(f"{curve.split}/{kind}")) is None:
        return ""
    steps, found = other.finite
    then = found[steps == step]
    return f"{other.split}/{other.name}" if then.size and then[0] == found.min() < found.max() else ""


def _diverges(loss: Curve | None) -> bool:
    """Returns whether a loss was higher in the second half of its values, or not finite in one of them."""
    if loss is None:
        return False
    found, half = loss.finite[1], len(loss.finite[1]) // 2
    return len(found) < len(loss.steps) or bool(half and np.median(found[half:]) > np.median(found[:half]))


def _noise(found: np.ndarray) -> float:
    """Returns by how much one value of a curve may differ from others by chance, as neighbours do; inf if unknown."""
    apart = np.abs(found[1:-1] - (found[:-2] + found[2:]) / 2)
    return _NOISE * float(np.median(apart)) if apart.size else np.inf


def _chance(run: Run, curve: Curve, best: int) -> float:
    """Returns by how much the best and the last value differ by chance: two standard errors; 0 where not known.

    The values of examples are taken to be 0 or 1 for rates. Those of a loss change, as it rises, by about the loss.
    """
    values, ends = curve.finite[1], curve.finite[1][[best, -1]]
    rate = np.clip(ends.mean(), 0, 1)
    is_loss = run.best_mode == "min" and ("loss" in curve.name or values.max() > 1)
    if values.min() < 0 or (values.max() > 1 and not is_loss):
        return 0.0
    deviation = ends.max() if is_loss else np.sqrt(rate * (1 - rate))
    return float(2 * deviation / np.sqrt(_examples(run, curve)))


def _examples(run: Run, curve: Curve) -> float:
    """Returns the number of examples of an evaluation; inf if it is not known."""
    counted = run.curve(f"{curve.split}/examples")
    examples = counted.finite[1][-1:] if counted else np.array([])
    return float(examples[0]) if examples.size and examples[0] >= 1 else np.inf


def _rises(before: np.ndarray, after: np.ndarray, noise: float, least: float = 0.0) -> bool:
    """Returns whether the median rises, by more than values with a noise do by chance, and more than `least`."""
    count = min(len(before), len(after))
    return bool(count and np.median(after) - np.median(before) > max(1.5 * noise / np.sqrt(count), least))


def _falls(curve: Curve, step: int) -> bool:
    """Returns whether the median of a curve is lower after a step than before it, by more than chance."""
    steps, found = curve.finite
    before, after = np.split(found, [max(1, int((steps <= step).sum()))])
    return bool(after.size) and _rises(after, before[-len(after) :], _noise(found))


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
