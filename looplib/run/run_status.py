"""How a run is doing, from its lock, `run.json` and the end of `metrics.jsonl` alone; the lock is never taken."""

import dataclasses
import math
import os
import time
from collections.abc import Sequence
from typing import Any

from looplib.base.numbers import headline
from looplib.masks import masked_text
from looplib.run import lock, run_json, values
from looplib.run.goodput import goodput
from looplib.run.newest import read_newest
from looplib.run.notice import notices_of
from looplib.run.records import Record
from looplib.run.slow_workers import stragglers_of
from looplib.run.standing import Standing, standing_of

ENDED_EARLY = "a later start ended before it trained"
_OF_NO_STEP = ("wall", "start", "compile", "restore", "suspended")  # of the seconds of a start
_SILENT_SECONDS, _SILENT_REPORTS = 60.0, 20.0  # without news after which a run is called silent: the longer of the two


@dataclasses.dataclass(frozen=True)
class RunStatus:
    """How a run is doing.

    Attributes:
      state: "running", "starting", "silent", "killed", "done", "preempted", "failed" or "unknown".
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


def last_written(folder: str) -> float:
    """Returns when a run has written a record or its report; if there is none, when it started; 0 if not known."""
    changed = [_changed(os.path.join(folder, name)) for name in ("metrics.jsonl", "run.json")]
    return max(changed) or _changed(os.path.join(folder, "lock"))


def read_status(folder: str, report: run_json.Report | None = None, age: float | None = None) -> RunStatus:
    """Returns how the run of a directory is doing.

    Args:
      folder: the run directory, whose contents may be anything.
      report: its `run.json`, where that has been read; default None reads it.
      age: see `RunStatus`; default None takes it from the clock, which may have been set since.
    """
    report = run_json.read_report(run_json.path_of(folder, trains=True)) if report is None else report
    records = read_newest(os.path.join(folder, "metrics.jsonl"))
    train = next((record for record in reversed(records) if record["split"] == "train"), None)
    rate = values.number(train.get("steps_per_second")) if train else None
    age = max(0.0, time.time() - last_written(folder)) if age is None else age
    state, detail = _state(report, lock.holder(folder), age, _interval(records, rate))
    step = values.whole(report.get("step"))
    if train and state in ("running", "silent", "killed"):  # the report is written at the start and at the end
        step = values.whole(train["step"])
    end = values.whole(report.get("end", report.get("flags", {}).get("train_steps")))
    final = values.whole(report.get("final_step")) if state == "done" else None
    if final is not None:
        detail = "; ".join(filter(None, [detail, f"back at step {final:,}"]))
        records = []  # of what came after it; the report has its metrics
    starts: list[Any] = [*report.get("starts", [])]
    pace = _pace(starts[-1]) if starts else None
    if starts:
        slow = map(str, stragglers_of(starts[-1])) if state in ("running", "silent") else ()
        detail = "; ".join(filter(None, [detail, values.text(starts[-1].get("note"), 200), *slow]))
    life = goodput(starts) if len(starts) > 1 else None
    share = life.share if life else None
    shown, copy = _metrics(records, report), standing_of(folder)
    return RunStatus(state, masked_text(detail), step, final, end, rate, pace, age, shown, share, copy)


def _pace(start: Any) -> float | None:
    """Returns the seconds per step since the first report, before which there are costs that do not come again."""
    first, last = values.mapping((values.items(start.get("points")) or [{}])[0]), values.mapping(start)
    steps = (values.whole(last.get("step")) or 0) - (values.whole(first.get("step")) or 0)
    began, now = (
        sum(spent for name, spent in values.durations(each.get("seconds")).items() if name not in _OF_NO_STEP)
        for each in (first, last)
    )
    return (now - began) / steps if first and steps > 0 and now > began else None


def _state(report: run_json.Report, holder: lock.LockHolder | None, age: float, interval: float) -> tuple[str, str]:
    """Returns the state, and more about it."""
    said = report.get("status")
    is_later = holder and _process_of(report) not in (None, holder.pid)  # than the newest start that trained
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
    if said in ("done", "preempted", "failed", "restarted"):
        told = map(str, notices_of(report["starts"][-1]) if report.get("starts") else ())
        return said, "; ".join([*later, *told, *filter(None, [values.text(report.get("error"))])])
    if holder and holder.holds is False and not report:
        return "failed", "it ended before it trained"
    return "unknown", "" if report else "no run.json that can be read"


def _process_of(report: run_json.Report) -> int | None:
    """Returns the process id of the newest start that the report has."""
    try:
        return report["starts"][-1]["process"]["pid"]
    except (KeyError, IndexError):
        return None


def _interval(records: Sequence[Record], rate: float | None) -> float:
    """Returns the seconds of training between two reports; 0 where they are not known."""
    steps = [step for r in records if r["split"] == "train" and (step := values.whole(r["step"])) is not None][-2:]
    return (steps[1] - steps[0]) / rate if len(steps) == 2 and rate and steps[1] > steps[0] else 0.0


def _metrics(records: Sequence[Record], report: run_json.Report) -> dict[str, float]:
    """Returns the last loss and one more metric of the training, and of each evaluator; in the report if not found."""
    newest: dict[str, dict[str, Any]] = {**report.get("metrics", {}), **{one["split"]: one for one in records}}
    shown = {}
    for split, found in sorted(newest.items(), key=lambda item: item[0] != "train"):
        named = {name: value for name, value in found.items() if name not in ("step", "split")}
        numbers = {name: math.nan if value is None else values.number(value) for name, value in named.items()}
        numbers = {name: value for name, value in numbers.items() if value is not None}
        prefix = "" if split == "train" else f"{split}/"
        shown.update({f"{prefix}{name}": value for name, value in headline(numbers).items()})
    return shown


def _changed(path: str) -> float:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0
