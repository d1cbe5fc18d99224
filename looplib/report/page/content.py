"""The content of the page of a run, read with bounds from its directory, which may come from somebody else."""

import base64
import collections
import contextlib
import dataclasses
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from looplib.base import files, folders
from looplib.base.decoding import SHOWN, decode, number, text, whole
from looplib.base.messages import gist
from looplib.errors import UsageError
from looplib.report.page import curves
from looplib.report.page.curves import Curve
from looplib.run import choice, commits
from looplib.run.directory import DIFF, MEDIA, RunDir
from looplib.run.goodput import TimeSpan, goodput, spans
from looplib.run.metric_names import known_mode
from looplib.run.policy import KeepBest
from looplib.run.records import MOST_BYTES, Record, RecordLog
from looplib.run.report import (
    MeasuredSpeed,
    Model,
    Program,
    Rollback,
    RunReport,
    RunWarning,
    StartEntry,
    Straggler,
    Variable,
    flattened,
    shown,
)
from looplib.run.status import ENDED_EARLY, Standing, read_status

_FOLDER = "media"
_MOST_NAMES = 40  # of each kind
_MOST_STEPS = 6  # of each name, the newest
_MOST_IMAGES = 16  # of one record
_MOST_IMAGE_BYTES = 1 << 19
_MOST_BYTES = 2 << 20  # of all images together
_MOST_BINS = 512
_PNG = b"\x89PNG\r\n\x1a\n"


@dataclasses.dataclass(frozen=True)
class Sample:
    """One of these, as a trainer wrote it at a step: images, as data URLs; texts; or a histogram."""

    name: str
    step: int
    images: list[str]
    texts: list[str]
    edges: list[float]
    counts: list[float]


@dataclasses.dataclass(frozen=True)
class Samples:
    """The samples by kind; grouped by name, oldest first. `left_out` counts images that are not shown."""

    images: list[Sample]
    texts: list[Sample]
    histograms: list[Sample]
    left_out: int


@dataclasses.dataclass(frozen=True)
class _Shown:
    """A line of `media.jsonl`, without its step and split."""

    kind: str = ""
    name: Annotated[str, 200] = ""
    files: list[str] = dataclasses.field(default_factory=list)
    texts: list[str] = dataclasses.field(default_factory=list)
    edges: list[float] = dataclasses.field(default_factory=list)
    counts: list[float] = dataclasses.field(default_factory=list)


def read_samples(directory: str, records: Iterable[Record]) -> Samples:
    """Returns the samples of a run; what is not a sample is left out.

    Args:
      directory: the run directory, which has the images.
      records: the records of its `media.jsonl`.
    """
    newest: dict[tuple[str, str], collections.deque[tuple[int, _Shown]]] = {}
    for record in records:
        noted = decode(_Shown, record.values, SHOWN, strict=False)
        if noted.kind in ("image", "text", "histogram") and record.shown_step is not None:
            key = noted.kind, f"{text(record.split, 200)}/{noted.name}"
            if key in newest or sum(known == noted.kind for known, _ in newest) < _MOST_NAMES:
                newest.setdefault(key, collections.deque(maxlen=_MOST_STEPS)).append((record.step, noted))
    left = _ImageBudget(_MOST_BYTES, 0)
    found: dict[str, list[Sample]] = {"image": [], "text": [], "histogram": []}
    for (kind, name), kept in newest.items():
        samples = [_sample(directory, name, step, noted, left) for step, noted in reversed(kept)]
        found[kind] += [one for one in reversed(samples) if one.images or one.texts or one.counts]
    return Samples(found["image"], found["text"], found["histogram"], left.out)


@dataclasses.dataclass
class _ImageBudget:
    """The bytes left for images, and how many images had no room."""

    bytes: int
    out: int


def _sample(directory: str, name: str, step: int, noted: "_Shown", left: _ImageBudget) -> Sample:
    images = [_image(directory, file, left) for file in noted.files[:_MOST_IMAGES]] if noted.kind == "image" else []
    texts = noted.texts[:_MOST_IMAGES] if noted.kind == "text" else []
    counts = noted.counts[:_MOST_BINS] if noted.kind == "histogram" else []
    edges = noted.edges[: len(counts) + 1]
    if len(edges) != len(counts) + 1:
        edges, counts = [], []
    return Sample(name, step, list(filter(None, images)), texts, edges if counts else [], counts)


def _image(directory: str, name: Any, left: _ImageBudget) -> str:
    """Returns a PNG file in the folder of a run's media as a data URL; "" if it cannot be shown."""
    folder = os.path.join(directory, _FOLDER)
    try:
        folders.check_folder(folder)
        with files.open_regular(folders.inside(folder, name)) as file:
            content = file.read(_MOST_IMAGE_BYTES + 1)
    except (ValueError, OSError):
        return ""
    if not content.startswith(_PNG):
        return ""
    if len(content) > min(_MOST_IMAGE_BYTES, left.bytes):
        left.out += 1
        return ""
    left.bytes -= len(content)
    return "data:image/png;base64," + base64.b64encode(content).decode()


@dataclasses.dataclass(frozen=True)
class Change:
    """A setting with two values, as texts: of the start before and of this one, or the default and the run's own."""

    name: str
    before: str
    now: str


@dataclasses.dataclass(frozen=True)
class ShownStart:
    """One start of the run; see `RunReport` for its fields. `trained` is False if there was nothing left to train."""

    started: str
    status: str
    step: int | None
    restored_step: int | None
    trained: bool
    command: str
    commit: str
    seconds: dict[str, float]
    verdict: str
    error: str
    note: str
    changed: list[Change]
    rollbacks: list["Mark"]
    warnings: list[RunWarning]


@dataclasses.dataclass(frozen=True)
class Mark:
    """An event of a step: a "restart", "rollback", "warning", "phase", "skipped" steps, the "best" checkpoint."""

    kind: str
    step: int
    text: str


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint, when it was saved (seconds since the epoch), and why it cannot be used, if so.

    `best` is the metric by which it is the best; "" if it is not, or no metric decides.
    """

    step: int
    time: float | None
    bytes: int | None
    scores: dict[str, float]
    best: str
    trouble: str


@dataclasses.dataclass(frozen=True)
class ShownVariable:
    """A row of the model's table."""

    name: str
    shape: str
    parameters: int | None
    trainable: bool


@dataclasses.dataclass(frozen=True)
class Run:
    """A run directory, as the page shows it.

    Attributes:
      name: of the directory, below the one that the page is for.
      report: its `run.json`, as far as it can be read.
      status: see `RunStatus.state`; what `run.json` says of a remote run; "" if that is not known.
      step: the last known step, or None.
      final_step: the step of an earlier checkpoint that was restored after the training, or None.
      seconds: dict from phase to seconds, over all starts, without the sum.
      wall: the sum.
      best_metric: the metric by which the run is judged, such as "eval/accuracy"; "" for none.
      best_mode: "max" or "min", which of its values is better.
      settings: dict from the name of each setting to its text.
      changed: the settings that differ from their defaults, with these; None where the defaults are not known.
      totals: counts of the model, such as "parameters".
      speed: the numbers of a `Speed`, and `dtype` its type.
      spans: where the time went, step by step.
      life: seconds since the first start by cause, see `goodput.Goodput`; {} for a run of one start without rollbacks.
      stragglers: the workers that were slower than the others at the end of the newest start, the slowest first.
      copy: how far the copy in an object store is; None without one.
      notes: what could not be read, in sentences.
    """

    name: str
    directory: str
    report: RunReport = dataclasses.field(default_factory=RunReport)
    status: str = "unknown"
    step: int | None = None
    final_step: int | None = None
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    wall: float = 0.0
    best_metric: str = ""
    best_mode: str = ""
    starts: list[ShownStart] = dataclasses.field(default_factory=list)
    marks: list[Mark] = dataclasses.field(default_factory=list)
    curves: list[Curve] = dataclasses.field(default_factory=list)
    checkpoints: list[SavedCheckpoint] = dataclasses.field(default_factory=list)
    model: list[ShownVariable] = dataclasses.field(default_factory=list)
    totals: dict[str, float] = dataclasses.field(default_factory=dict)
    speed: dict[str, float] = dataclasses.field(default_factory=dict)
    dtype: str = ""
    spans: list[TimeSpan] = dataclasses.field(default_factory=list)
    life: dict[str, float] = dataclasses.field(default_factory=dict)
    stragglers: list[Straggler] = dataclasses.field(default_factory=list)
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    changed: list[Change] | None = None
    program: dict[str, str] = dataclasses.field(default_factory=dict)
    diff: str = ""
    samples: Samples = Samples([], [], [], 0)
    copy: Standing | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    def curve(self, metric: str) -> Curve | None:
        """Returns the curve of "<split>/<name>", or None."""
        return next((one for one in self.curves if f"{one.split}/{one.name}" == metric and not one.undone), None)

    def mode(self, curve: Curve) -> str:
        """Returns "max" or "min", which of two values of a curve is better; "" where that is not known."""
        metric = f"{curve.split}/{curve.name}"
        return self.best_mode if metric == self.best_metric else known_mode(metric)


_MOST_SKIPPED, _MOST_PHASES = 200, 50  # marks


def best_metric(rule: KeepBest | None, found: Sequence[Curve]) -> tuple[str, str]:
    """Returns the metric by which a run is judged, and its mode; "" if there is none.

    Args:
      rule: that of its sweep, or else of the run, see `choice.rule_of`. It comes first.
      found: the curves; next comes the loss of an evaluation, and then its only metric with a well-known name. Of
        several others, none is the run's: a recall of 1 may be that of a model that finds one class everywhere.
    """
    if rule:
        return rule.metric, rule.mode
    metrics = [f"{curve.split}/{curve.name}" for curve in found if curve.split != "train"]
    known = [metric for metric in metrics if known_mode(metric)]
    losses = [metric for metric in known if metric.endswith("/loss")]
    chosen = losses[0] if losses else known[0] if len(known) == 1 else ""
    return chosen, known_mode(chosen)


def of_starts(starts: Sequence[ShownStart]) -> Iterator[Mark]:
    """Yields the restarts of a run, its rollbacks, and its warnings."""
    trained = [start for start in starts if start.trained]
    for before, start in zip(trained, trained[1:]):
        text = f"restarted after a start that was {before.status or 'ended'}"
        yield Mark("restart", start.restored_step or 0, ", with ".join(filter(None, [text, start.note])))
    for start in starts:
        yield from start.rollbacks
        yield from (Mark("warning", one.step, f"{one.kind}: {one.text}") for one in start.warnings)


@dataclasses.dataclass(frozen=True)
class _Phase:
    """One of the setting `phases`."""

    until: int | None = None
    train: Annotated[str, 100] | list[Annotated[str, 100]] | None = None
    learning_rate: float | None = None


def of_phases(phases: Any) -> Iterator[Mark]:
    """Yields the steps at which phases end that another follows.

    Args:
      phases: the setting `phases` of a `run.json`.
    """
    found = decode(list[_Phase], phases, SHOWN, strict=False)[:_MOST_PHASES] if isinstance(phases, list) else []
    for place, (before, now) in enumerate(zip(found, found[1:]), 2):
        if before.until is None:
            continue
        patterns = [now.train] if isinstance(now.train, str) else now.train or []
        words = f"phase {place}: trains {', '.join(filter(None, patterns)) or 'all'}"
        rate = "" if now.learning_rate is None else f" at the rate {now.learning_rate:g}"
        yield Mark("phase", before.until, words + rate)


def of_curves(found: Sequence[Curve]) -> Iterator[Mark]:
    """Yields the steps that were skipped because a value was not finite."""
    for curve in found:
        if curve.split == "train" and curve.name == "skipped_steps":
            skipped = [(step, value) for step, value in zip(curve.steps, curve.values) if value > 0]
            yield from (
                Mark("skipped", step, f"{n:g} skipped steps up to step {step:,}") for step, n in skipped[:_MOST_SKIPPED]
            )


def of_checkpoints(saved: Sequence[SavedCheckpoint]) -> Iterator[Mark]:
    """Yields the best of the kept checkpoints."""
    for one in saved:
        if one.best:
            yield Mark("best", one.step, f"best checkpoint kept: {one.best} {one.scores[one.best]:.4g}")


_MOST_DIFF = 100_000  # characters
_MOST_WARNINGS = 100  # of a start


def read_run(directory: str, name: str) -> Run:
    """Reads a run directory.

    Args:
      directory: the directory.
      name: what the page calls it.
    """
    notes: list[str] = []
    run = RunDir(directory)
    report = run.report(SHOWN, mask=True)
    if not report:
        notes.append("There is no run.json that can be read, so settings, times and versions are not known.")
    report = report or RunReport()
    found = curves.of_records(_each(run.records(), notes))
    undone = curves.of_records(_each(run.records(voided=True), notes), undone=True)
    status, step = report.status, report.step
    starts = [_start(one) for one in report.starts]
    final = report.final_step if status == "done" else None
    seen = read_status(directory)
    if seen.state != "unknown":
        status, step, final = seen.state, seen.step, seen.final
        if seen.detail.startswith(ENDED_EARLY):
            notes.append(f"{ENDED_EARLY[0].upper()}{ENDED_EARLY[1:]}, which is not among the starts below.")
        if status == "killed" and starts:  # it could not write so itself
            starts[-1] = dataclasses.replace(starts[-1], status=status, step=step)
    flags, config = flattened(report.flags, "", SHOWN), flattened(report.config, "config.", SHOWN)
    settings = {key: shown(value) for key, value in {**flags, **config}.items()}
    rule = judged = None
    with contextlib.suppress(UsageError):  # of a text that somebody else has written
        rule = judged = choice.rule_of(report)
        judged = KeepBest.parse(report.objective) if report.objective else rule
    metric, mode = best_metric(judged, found)
    saved = _checkpoints(directory, rule, notes)
    seconds = dict(report.seconds)
    wall = seconds.pop("wall", sum(seconds.values()))
    model, speed = report.model or Model(), report.speed or MeasuredSpeed()
    marked = [*of_starts(starts), *of_phases(report.flags.get("phases"))]
    marked += [*of_curves(found), *of_checkpoints(saved)]
    return Run(
        name=text(name, 200),
        directory=text(report.url or directory, 1000),
        report=report,
        status=status,
        step=step,
        final_step=final,
        seconds=seconds,
        wall=wall,
        best_metric=metric,
        best_mode=mode,
        starts=starts,
        marks=marked,
        curves=[*found, *undone],
        checkpoints=saved,
        model=[_variable(one) for one in model.variables],
        totals=_numbers(model),
        speed=_numbers(speed),
        dtype=speed.dtype,
        spans=spans(report.starts),
        life=_life(report.starts),
        stragglers=report.newest.slow_workers,
        settings=settings,
        changed=None if report.not_default is None else _changes(report.not_default),
        program=_program(report),
        diff=run.text(DIFF)[:_MOST_DIFF],
        samples=read_samples(directory, _each(run.records(MEDIA), notes)),
        copy=seen.copy,
        notes=notes,
    )


def not_shown(directory: str, name: str, error: Exception) -> Run:
    """Returns a run of which nothing is shown but a sentence that says why."""
    note = f"This directory cannot be shown: {gist(error)}."
    return Run(text(name, 200), text(directory, 1000), notes=[text(note, 500)])


def _each(records: RecordLog, notes: list[str]) -> Iterator[Record]:
    """Yields the records of a file, as far as it can be read."""
    name = os.path.basename(records.path)
    try:
        if records.is_too_large:
            notes.append(f"{name} has more than {MOST_BYTES:,} bytes and is not shown.")
            return
        yield from records
    except OSError as error:
        notes.append(f"{name} cannot be read ({gist(error)}).")


def _life(starts: Sequence[StartEntry]) -> dict[str, float]:
    found = goodput(starts) if len(starts) > 1 or any(one.rollbacks for one in starts) else None
    return {name: seconds for name, seconds in found.seconds.items() if seconds} if found else {}


def _start(start: StartEntry) -> ShownStart:
    begun = start.restored_step
    idle = start.status == "done" and begun is not None and start.step == begun
    return ShownStart(
        started=start.started,
        status=start.status,
        step=start.step,
        restored_step=begun,
        trained=not idle or any(point.step is not None and point.step > begun for point in start.points),
        command=_command(start),
        commit=_program(start).get("commit", "")[:12],
        seconds=start.seconds,
        verdict=start.verdict,
        error=start.error,
        note=start.note,
        changed=_changes(start.changed),
        rollbacks=[_rollback(one) for one in start.rollbacks],
        warnings=start.warnings[:_MOST_WARNINGS],
    )


def _rollback(noted: Rollback) -> Mark:
    step, to = noted.step or 0, noted.to or 0
    return Mark("rollback", step, f"rolled back from step {step:,} to step {to:,}: {noted.reason}")


def _changes(found: Mapping[str, tuple[Any, Any]]) -> list[Change]:
    return [Change(name, shown(before), shown(now)) for name, (before, now) in found.items()]


def _program(start: StartEntry | RunReport) -> dict[str, str]:
    kept = vars(start.program or Program())
    texts = {name: kept[name] for name in ("directory", "repository", "commit", "changes") if kept[name]}
    return {"command": _command(start), **texts}


def _command(start: StartEntry | RunReport) -> str:
    arguments = (start.program and start.program.arguments) or []
    module = arguments if arguments[:1] == ["-m"] else start.command[:1]
    return text(shlex.join(["python", *module, *start.command[1:]])) if start.command else ""


def _numbers(found: Model | MeasuredSpeed) -> dict[str, float]:
    return {name: value for name, value in vars(found).items() if type(value) in (int, float)}


def _checkpoints(directory: str, rule: KeepBest | None, notes: list[str]) -> list[SavedCheckpoint]:
    """Returns the checkpoints, oldest first, with the best by a rule."""
    try:
        found = commits.listing(os.path.join(directory, "checkpoints"))
    except (UsageError, OSError) as error:
        notes.append(f"The checkpoints cannot be listed: {gist(error)}.")
        return []
    saved, best = [], rule.select([one.commit for one in found if one.commit])[:1] if rule else []
    for one in sorted(found, key=lambda one: one.step):
        if whole(one.step) is not None:
            done = one.commit
            scores = {name: score for name, score in done.scores.items() if score is not None} if done else {}
            name = rule.metric if rule and done in best else ""
            when, size = (number(done.time), whole(done.bytes)) if done else (None, None)
            saved.append(SavedCheckpoint(one.step, when, size, scores, name, text(one.reason, 300)))
    return saved


def _variable(row: Variable) -> ShownVariable:
    return ShownVariable(row.name, " × ".join(map(str, row.shape)), row.parameters, row.trainable)
