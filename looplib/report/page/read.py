"""What a run directory says about its run, read with bounds: the directory may come from somebody else."""

import dataclasses
import os
import shlex
from collections.abc import Iterator
from typing import Any

from looplib.base import files
from looplib.base.messages import gist
from looplib.errors import UsageError
from looplib.masks import masked
from looplib.report.page import curves, marks
from looplib.report.page.run import Change, Mark, Run, SavedCheckpoint, ShownStart, ShownWarning, Variable
from looplib.report.page.samples import FILE, read_samples
from looplib.run import commits, phases, program, run_json, values
from looplib.run.goodput import goodput, restored_step
from looplib.run.records import Record, each_record
from looplib.run.run_status import ENDED_EARLY, read_status
from looplib.run.slow_workers import stragglers_of

_MOST_RECORD_BYTES = 1 << 29  # of metrics.jsonl; a million steps with ten metrics have 300 MB
_MOST_DIFF = 100_000  # characters
_MOST_WARNINGS = 100  # of a start
_MOST_TRACEBACK = 20_000  # characters


def read_run(directory: str, name: str) -> Run:
    """Reads a run directory.

    Args:
      directory: the directory.
      name: what the page calls it.
    """
    notes: list[str] = []
    report = masked(values.mapping(run_json.read_report(run_json.path_of(directory, trains=True))))
    if not report:
        notes.append("There is no run.json that can be read, so settings, times and versions are not known.")
    found = curves.of_records(_records(directory, "metrics.jsonl", notes))
    undone = curves.of_records(_records(directory, "metrics.voided.jsonl", notes), undone=True)
    listed = [one for one in values.items(report.get("starts")) if isinstance(one, dict)]
    status, step = values.text(report.get("status"), 40), values.whole(report.get("step"))
    starts = [_start(one) for one in listed]
    final = values.whole(report.get("final_step")) if status == "done" else None
    seen = read_status(directory)
    if seen.state != "unknown":
        status, step, final = seen.state, seen.step, seen.final
        if seen.detail.startswith(ENDED_EARLY):
            notes.append(f"{ENDED_EARLY[0].upper()}{ENDED_EARLY[1:]}, which is not among the starts below.")
        if status == "killed" and starts:  # it could not write so itself
            starts[-1] = dataclasses.replace(starts[-1], status=status, step=step)
    flags, config = values.flat(report.get("flags")), values.flat(report.get("config"), "config.")
    settings = {key: values.shown(value) for key, value in {**flags, **config}.items()}
    metric, mode = marks.best_metric(flags.get("keep_best"), found)
    saved = marks.with_best(_checkpoints(directory, notes), metric, mode)
    seconds = values.durations(report.get("seconds"))
    wall = seconds.pop("wall", sum(seconds.values()))
    model, speed = values.mapping(report.get("model")), values.mapping(report.get("speed"))
    changed = report.get("not_default")
    marked = [*marks.of_starts(starts), *marks.of_phases(values.mapping(report.get("flags")).get("phases"))]
    marked += [*marks.of_curves(found), *marks.of_checkpoints(saved, metric)]
    return Run(
        name=values.text(name, 200),
        directory=values.text(directory, 1000),
        status=status,
        step=step,
        final_step=final,
        started=values.text(report.get("started"), 40),
        error=values.text(report.get("error")),
        verdict=values.text(report.get("verdict"), 500),
        strategy=values.text(report.get("strategy"), 200),
        rollbacks=values.whole(report.get("rollbacks")) or 0,
        seconds=seconds,
        wall=wall,
        best_metric=metric,
        best_mode=mode,
        starts=starts,
        marks=marked,
        curves=[*found, *undone],
        checkpoints=saved,
        model=[_variable(one) for one in values.items(model.get("variables")) if isinstance(one, dict)],
        totals=values.numbers(model),
        speed=values.numbers(speed),
        dtype=values.text(speed.get("dtype"), 40),
        traceback=values.text(report.get("traceback"), _MOST_TRACEBACK),
        spans=phases.spans(listed),
        life=_life(listed),
        stragglers=stragglers_of(listed[-1]) if listed else [],
        settings=settings,
        changed=_changes(changed) if isinstance(changed, dict) else None,
        versions={key: values.text(item, 100) for key, item in values.mapping(report.get("versions")).items()},
        program=_program(report),
        diff=_text(directory, program.DIFF)[:_MOST_DIFF],
        samples=read_samples(directory, _records(directory, FILE, notes)),
        copy=seen.copy,
        notes=notes,
    )


def not_shown(directory: str, name: str, error: Exception) -> Run:
    """Returns a run of which nothing is shown but a sentence that says why."""
    note = f"This directory cannot be shown: {gist(error)}."
    return Run(values.text(name, 200), values.text(directory, 1000), notes=[values.text(note, 500)])


def _text(directory: str, name: str) -> str:
    try:
        return files.read_text(os.path.join(directory, name))
    except (ValueError, OSError):
        return ""


def _records(directory: str, name: str, notes: list[str]) -> Iterator[Record]:
    """Yields the records of a file of JSON lines, as far as it can be read."""
    path = os.path.join(directory, name)
    try:
        if os.path.exists(path) and os.path.getsize(path) > _MOST_RECORD_BYTES:
            notes.append(f"{name} has more than {_MOST_RECORD_BYTES:,} bytes and is not shown.")
            return
        yield from each_record(path)
    except OSError as error:
        notes.append(f"{name} cannot be read ({gist(error)}).")


def _life(starts: list[dict[str, Any]]) -> dict[str, float]:
    found = goodput(starts) if len(starts) > 1 or any(values.items(one.get("rollbacks")) for one in starts) else None
    return {name: seconds for name, seconds in found.seconds.items() if seconds} if found else {}


def _start(report: dict[str, Any]) -> ShownStart:
    status, step = values.text(report.get("status"), 40), values.whole(report.get("step"))
    points = [values.whole(one.get("step")) for one in values.items(report.get("points")) if isinstance(one, dict)]
    begun = restored_step(report)
    idle = status == "done" and begun is not None and step == begun
    return ShownStart(
        started=values.text(report.get("started"), 40),
        status=status,
        step=step,
        restored_step=begun,
        trained=not idle or any(point is not None and point > begun for point in points),
        command=_command(report),
        commit=_program(report).get("commit", "")[:12],
        seconds=values.durations(report.get("seconds")),
        verdict=values.text(report.get("verdict"), 500),
        error=values.text(report.get("error")),
        note=values.text(report.get("note"), 200),
        changed=_changes(report.get("changed")),
        rollbacks=[_rollback(one) for one in values.items(report.get("rollbacks")) if isinstance(one, dict)],
        warnings=[_warning(values.mapping(one)) for one in values.items(report.get("warnings"))[:_MOST_WARNINGS]],
    )


def _rollback(report: dict[str, Any]) -> Mark:
    step, to = values.whole(report.get("step")) or 0, values.whole(report.get("to")) or 0
    return Mark(
        "rollback", step, f"rolled back from step {step:,} to step {to:,}: {values.text(report.get('reason'), 300)}"
    )


def _warning(report: dict[str, Any]) -> ShownWarning:
    return ShownWarning(
        kind=values.text(report.get("kind"), 100),
        step=values.whole(report.get("step")) or 0,
        text=values.text(report.get("text"), 1000),
        advice=values.text(report.get("advice"), 500),
    )


def _changes(found: Any) -> list[Change]:
    pairs = ((name, values.items(pair)) for name, pair in values.mapping(found).items())
    return [Change(name, values.shown(pair[0]), values.shown(pair[1])) for name, pair in pairs if len(pair) == 2]


def _program(report: dict[str, Any]) -> dict[str, str]:
    found = values.mapping(report.get("program"))
    kept = {name: values.text(found.get(name), 1000) for name in ("directory", "repository", "commit", "changes")}
    return {"command": _command(report), **{name: text for name, text in kept.items() if text}}


def _command(report: dict[str, Any]) -> str:
    arguments = [one for one in values.items(report.get("command")) if isinstance(one, str)]
    start = values.items(values.mapping(report.get("program")).get("arguments"))
    module = [one for one in start if isinstance(one, str)] if start[:1] == ["-m"] else arguments[:1]
    return values.text(shlex.join(["python", *module, *arguments[1:]])) if arguments else ""


def _checkpoints(directory: str, notes: list[str]) -> list[SavedCheckpoint]:
    """Returns the checkpoints, oldest first."""
    try:
        found = commits.listing(os.path.join(directory, "checkpoints"))
    except (UsageError, OSError) as error:
        notes.append(f"The checkpoints cannot be listed: {gist(error)}.")
        return []
    saved = []
    for one in sorted(found, key=lambda one: one.step):
        if values.whole(one.step) is not None:
            done = one.commit
            scores = values.numbers(done.scores) if done else {}
            when, size = (values.number(done.time), values.whole(done.bytes)) if done else (None, None)
            saved.append(SavedCheckpoint(one.step, when, size, scores, False, values.text(one.reason, 300)))
    return saved


def _variable(row: dict[str, Any]) -> Variable:
    shape = " × ".join(f"{size}" for size in map(values.whole, values.items(row.get("shape"))) if size is not None)
    count = values.whole(row.get("parameters"))
    return Variable(values.text(row.get("name"), 300), shape, count, row.get("trainable") is True)
