"""Which checkpoint of a run is meant: by a word, or by its step."""

import os
import re

from absl import logging

from looplib.errors import CheckpointError, NoCheckpointError, SettingError
from looplib.run import commits
from looplib.run.commits import Commit
from looplib.run.directory import RunDir
from looplib.run.policy import KeepBest
from looplib.run.report import RunReport

FINAL, LATEST, BEST = "final", "latest", "best"
_WORDS = (FINAL, LATEST, BEST)
_STEP = re.compile(r"\d{1,15}")


def check(which: str | int, what: str) -> str | int:
    """Returns a valid word, or a step as an int; raises `UsageError`, which names the setting `what`, for others."""
    if which in _WORDS:
        return which
    if isinstance(which, bool) or not _STEP.fullmatch(f"{which}"):
        raise SettingError(f"{what} is {which!r}; expected {', '.join(_WORDS)}, or a step such as 1000")
    return int(which)


def divided(path: str) -> tuple[str, str]:
    """Splits "<run directory>@<word or step>"; the word is "final" if there is none."""
    directory, at, which = path.rpartition("@")
    if at and (which in _WORDS or _STEP.fullmatch(which)) and not os.path.exists(path):
        return directory, which
    return path, FINAL


def choose(folder: str, which: str | int, rule: KeepBest | None = None) -> Commit | None:
    """Finds a checkpoint, and verifies it.

    Args:
      folder: the folder of the checkpoints.
      which: "latest", the newest intact one; "final", the one that the training ended with, which is the newest unless
        an action has restored another one; "best"; or a step.
      rule: decides which one is the best; None takes the rule that the training has kept it by.

    Returns:
      The `Commit`, or None if there is no checkpoint at all.

    Raises:
      UsageError: if the checkpoint does not exist, is not known, or is damaged.
    """
    which = check(which, "checkpoint")
    kept = commits.committed(folder)
    if which == FINAL:
        found = final(folder)
        if found:
            newest = kept[0].step
            logging.info("the run ended with step %d; its newest checkpoint (latest) is of step %d", found.step, newest)
        which = found.step if found else LATEST
    if which == LATEST or not kept:
        return commits.newest_intact(folder, tidy=False)
    found = best(folder, rule) if which == BEST else next((done for done in kept if done.step == which), None)
    if not found:
        steps = ", ".join(f"{done.step}" for done in reversed(kept))
        lack = "that has a score of the metric that decides" if which == BEST else f"of step {which}"
        raise NoCheckpointError(
            f"there is no checkpoint {lack} in {folder}; expected one of the steps {steps}, or latest"
        )
    if reason := commits.verify(found):
        raise CheckpointError(f"the checkpoint {found.path} is damaged ({reason}); take another one, such as latest")
    return found


def final(folder: str) -> Commit | None:
    """Returns the checkpoint that a training ended with, if it is not the newest."""
    report = _report(folder)
    step = report.final_step if report and report.status == "done" else None
    return next((done for done in commits.committed(folder) if done.step == step), None)


def best(folder: str, rule: KeepBest | None = None) -> Commit | None:
    """Returns the best checkpoint, or None if none has a score.

    Args:
      folder: the folder of the checkpoints.
      rule: decides which one; None takes the rule that the training has kept it by.

    Raises:
      UsageError: if there is no rule.
    """
    rule = rule or rule_of(_report(folder))
    if rule is None:
        raise NoCheckpointError(
            f"which checkpoint in {folder} is the best is not known, because no metric decides it; name one, with "
            "--keep_best=eval/accuracy, or CheckpointPolicy(keep=(looplib.KeepLast(), "
            'looplib.KeepBest("eval/accuracy")))'
        )
    return next(iter(rule.select(commits.committed(folder))), None)


def rule_of(report: RunReport | None) -> KeepBest | None:
    """Returns the rule that says which checkpoint of a run is the best: the training's own, or else its sweep's.

    Raises:
      UsageError: if the report has something else in its place.
    """
    rule = report and (report.flags.get("keep_best") or report.objective)
    return KeepBest.parse(rule) if isinstance(rule, str) and rule else None


def _report(folder: str) -> RunReport | None:
    """Returns `run.json` of the training whose checkpoints are in a folder; None if there is none."""
    directory, name = os.path.split(os.path.normpath(folder) if "://" not in folder else folder)
    return RunDir(directory).report() if name == "checkpoints" else None
