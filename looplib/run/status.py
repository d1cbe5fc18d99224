"""How a run is doing, from its lock, `run.json` and the end of `metrics.jsonl` alone; the lock is never taken."""

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Sequence

from looplib.base import files
from looplib.base.decoding import SHOWN, decode, parse_json
from looplib.base.numbers import headline
from looplib.masks import masked_text
from looplib.run import lock
from looplib.run.directory import RunDir
from looplib.run.goodput import goodput
from looplib.run.records import Record
from looplib.run.report import RunReport, StartEntry

ENDED_EARLY = "a later start ended before it trained"
_STATUS, _MOST_BYTES = "status.json", 1 << 16
_LATE = 120.0  # seconds without a complete copy that are mentioned although no checkpoint waits
_OF_NO_STEP = ("wall", "start", "compile", "restore", "suspended", "waiting")  # of the seconds of a start
_SILENT_SECONDS, _SILENT_REPORTS = 60.0, 20.0  # without news after which a run is called silent: the longer of the two


@dataclasses.dataclass
class Standing:
    """How far the copy of a run is.

    Attributes:
      url: the run directory in the store, without secrets.
      step: the step of the newest checkpoint there; -1 for none.
      behind: checkpoints that are not there yet.
      complete: when the copy was last complete, in seconds since the epoch.
      requests: requests of this start to the store.
      error: why the copy is behind; "" while it is not.
    """

    url: str
    step: int = -1
    behind: int = 0
    complete: float = 0.0
    requests: int = 0
    error: str = ""

    @property
    def is_behind(self) -> bool:
        """Whether checkpoints wait to be copied, or the store has not answered for long."""
        return self.behind > 0 or bool(self.error and time.time() - self.complete > _LATE)

    @property
    def text(self) -> str:
        """A clause such as "2 checkpoints are not in s3://bucket/run yet, which has step 40"."""
        has = f"has step {self.step:,}" if self.step >= 0 else "has no checkpoint"
        if not self.is_behind:
            return f"{self.url} {has}"
        number = "1 checkpoint is" if self.behind == 1 else f"{self.behind:,} checkpoints are"
        late = f"{number} not in {self.url} yet" if self.behind else f"{self.url} is not up to date"
        return f"{late}, which {has}" + (f": {self.error}" if self.error else "")

    def write(self, place: str) -> None:
        """Writes it into the folder beside the local directory, if that is possible."""
        with contextlib.suppress(OSError):
            content = json.dumps(dataclasses.asdict(self))
            files.write_whole(os.path.join(place, _STATUS), content, durable=False)


def standing_of(directory: str) -> Standing | None:
    """Returns how far the copy of a run is that trains or has trained on this machine; None for a run without one."""
    path = os.path.join(f"{directory.rstrip(os.sep)}.mirror", _STATUS)
    with contextlib.suppress(OSError, ValueError):
        return decode(Standing, parse_json(files.read_text(path, _MOST_BYTES)), strict=True)
    return None


@dataclasses.dataclass(frozen=True)
class RunStatus:
    """How a run is doing.

    Attributes:
      state: "running", "starting", "silent", "killed", "done", "preempted", "pruned", "failed" or "unknown".
      detail: more about the state, such as the error of a failure or a worker that is slow; "" for nothing.
      step: the last known step, or None.
      final: the step of an earlier checkpoint that was restored after the training, or None.
      end: the step that it trains to, or None.
      rate: steps per second of training, or None.
      pace: seconds per step of the newest start with its evaluations, saves and actions; None before they are noted.
      age: seconds since it last wrote a record or its report; if there is none, since it started.
      metrics: dict from name, or evaluator/name, to the last value.
      goodput: share of the time since the first start that became kept steps; None for a run of one start.
      copy: how far its copy in an object store is; None for a run without one, or one of another machine.
    """

    state: str
    detail: str
    step: int | None
    final: int | None
    end: int | None
    rate: float | None
    pace: float | None
    age: float
    metrics: dict[str, float]
    goodput: float | None
    copy: Standing | None

    @property
    def left(self) -> float | None:
        """The seconds that are left; None where they are not known, or it does not run."""
        pace = self.pace or (1 / self.rate if self.rate else None)
        if self.state not in ("running", "silent") or self.step is None or not self.end or not pace:
            return None
        return max(0, self.end - self.step) * pace


def read_status(folder: str, report: RunReport | None = None, age: float | None = None) -> RunStatus:
    """Returns how the run of a directory is doing.

    Args:
      folder: the run directory, whose contents may be anything.
      report: its `run.json`, where that has been read with the limits `SHOWN`; default None reads it.
      age: see `RunStatus`; default None takes it from the clock, which may have been set since.
    """
    run = RunDir(folder)
    report = run.report(SHOWN) if report is None else report
    records = run.records().tail()
    train = next((record for record in reversed(records) if record.split == "train"), None)
    rate = train.numbers.get("steps_per_second") if train else None
    age = max(0.0, time.time() - run.last_written()) if age is None else age
    state, detail = _state(report, lock.holder(folder), age, _interval(records, rate))
    report = report or RunReport()
    step = report.step
    if train and state in ("running", "silent", "killed"):  # the report is written at the start and at the end
        step = train.shown_step
    final = report.final_step if state == "done" else None
    if final is not None:
        detail = "; ".join(filter(None, [detail, f"back at step {final:,}"]))
        records = []  # of what came after it; the report has its metrics
    newest = report.newest
    slow = map(str, newest.slow_workers) if state in ("running", "silent") else ()
    detail = "; ".join(filter(None, [detail, newest.outcome, newest.note, *slow]))
    life = goodput(report.starts) if len(report.starts) > 1 else None
    share = life.share if life else None
    shown, copy = _metrics(records, report), standing_of(folder)
    pace = _pace(newest)
    return RunStatus(state, masked_text(detail), step, final, report.end, rate, pace, age, shown, share, copy)


def _pace(last: StartEntry) -> float | None:
    """Returns the seconds per step since the first report, before which there are costs that do not come again."""
    if not last.points:
        return None
    first = last.points[0]
    steps = (last.step or 0) - (first.step or 0)
    began, now = (
        sum(spent for name, spent in seconds.items() if name not in _OF_NO_STEP)
        for seconds in (first.seconds, last.seconds)
    )
    return (now - began) / steps if steps > 0 and now > began else None


def _state(report: RunReport | None, holder: lock.LockHolder | None, age: float, interval: float) -> tuple[str, str]:
    """Returns the state, and more about it."""
    said = report.status if report else ""
    pid = report.newest.process.pid if report else None
    is_later = holder and pid not in (None, holder.pid)  # than the newest start that trained
    silent = age > max(_SILENT_SECONDS, _SILENT_REPORTS * interval)
    if holder and holder.holds is None and said == "running":
        if silent:
            return "silent", f"killed, or stalled: it ran on {holder.host}, which cannot be asked from here"
        return "running", f"on {holder.host}"
    if holder and holder.holds:
        if is_later or not report:
            was = "was killed" if said == "running" else f"ended {said}"
            return "starting", f"after a start that {was}" if report else ""
        if said == "running":
            return ("silent", f"process {holder.pid} is alive, and reports nothing") if silent else ("running", "")
    later = [ENDED_EARLY] if is_later and holder.holds is False else []
    if said == "running":
        return "killed", "; ".join(later)
    if said in ("done", "preempted", "pruned", "failed", "restarted"):
        return said, "; ".join([*later, *map(str, report.newest.notices), *filter(None, [report.error])])
    if holder and holder.holds is False and not report:
        return "failed", "it ended before it trained"
    return "unknown", "" if report else "no run.json that can be read"


def _interval(records: Sequence[Record], rate: float | None) -> float:
    """Returns the seconds of training between two reports; 0 where they are not known."""
    steps = [one.step for one in records if one.split == "train" and one.shown_step is not None][-2:]
    return (steps[1] - steps[0]) / rate if len(steps) == 2 and rate and steps[1] > steps[0] else 0.0


def _metrics(records: Sequence[Record], report: RunReport) -> dict[str, float]:
    """Returns the last loss and one more metric of the training, and of each evaluator; in the report if not found."""
    newest = {**report.metrics, **{one.split: one.numbers for one in records}}
    shown = {}
    for split, found in sorted(newest.items(), key=lambda item: item[0] != "train"):
        numbers = {name: math.nan if value is None else value for name, value in found.items()}
        prefix = "" if split == "train" else f"{split}/"
        shown.update({f"{prefix}{name}": value for name, value in headline(numbers).items()})
    return shown
