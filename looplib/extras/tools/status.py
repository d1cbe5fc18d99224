"""`python -m looplib status DIR...`: every run below some folders, and how each of them is doing.

It only reads: the lock, `run.json` and the end of `metrics.jsonl` of each run, and never takes the lock.
"""

import dataclasses
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from looplib.checkpoint import lock
from looplib.console import printable
from looplib.errors import EXIT_DIFFERENT, EXIT_DONE, UsageError
from looplib.extras.page import values
from looplib.report import run_file
from looplib.report.formats import format_number, format_seconds
from looplib.report.progress import headline
from looplib.report.records import Record, read_newest

_MOST_FOLDERS, _MOST_ENTRIES, _DEEPEST = 10_000, 100_000, 12
_OF_A_RUN = ("run.json", "metrics.jsonl")
_INSIDE = ("checkpoints", "train", "eval", "predictions", "export", "plugins")  # of a run, without runs in them
_SILENT_SECONDS, _SILENT_REPORTS = 60.0, 20.0  # without news after which a run is called silent: the longer of the two
_LONGEST_NAME = 48
_HEADINGS = ("run", "state", "step", "steps/s", "left", "news", "")


@dataclasses.dataclass(frozen=True)
class RunStatus:
    """How a run is doing.

    Attributes:
      state: "running", "starting", "silent", "killed", "done", "preempted", "failed" or "unknown".
      detail: more about the state, such as the error of a failure; "" for nothing.
      step: the last known step, or None.
      end: the step that it trains to, or None.
      rate: steps per second, or None.
      age: seconds since it last wrote a record or its report; if there is none, since it started.
      metrics: dict from name, or evaluator/name, to the last value.
    """

    state: str
    detail: str
    step: int | None
    end: int | None
    rate: float | None
    age: float
    metrics: dict[str, float]

    @property
    def left(self) -> float | None:
        """The seconds of training that are left; None where they are not known, or it does not run."""
        if self.state not in ("running", "silent") or self.step is None or not self.end or not self.rate:
            return None
        return max(0, self.end - self.step) / self.rate


def status(directories: Sequence[str], watch: bool = False, interval: float = 2.0) -> int:
    """Prints a table of all runs below some folders.

    Args:
      directories: the folders; each may itself be a run directory, or that of a sweep.
      watch: whether to print it again and again, until Ctrl-C; a terminal is redrawn.
      interval: seconds between two tables.

    Returns:
      The exit code: `EXIT_DONE`, or `EXIT_DIFFERENT` if there is no run.

    Raises:
      UsageError: if a folder does not exist.
    """
    for directory in directories:
        if not os.path.isdir(directory):
            raise UsageError(f"{directory} is not a directory on this machine; name folders that hold runs")
    try:
        while True:
            rows, cut = _rows(directories)
            lines = _table(rows) if rows else [f"there is no run in {' or '.join(map(printable, directories))}"]
            lines += [f"not all folders were looked at: there are more than {_MOST_FOLDERS:,}"] * cut
            redraw = watch and sys.stdout.isatty()
            if redraw:
                lines = [f"{time.strftime('%H:%M:%S')}, every {interval:g} s; Ctrl-C ends", *lines]
                lines = lines[: shutil.get_terminal_size().lines - 1]
            print(("\x1b[H\x1b[J" if redraw else "") + "\n".join(lines), flush=True)
            if not watch:
                return EXIT_DONE if rows else EXIT_DIFFERENT
            time.sleep(interval)
    except KeyboardInterrupt:
        if not watch:
            raise
        return EXIT_DONE
    except BrokenPipeError:  # such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE


def _rows(directories: Sequence[str]) -> tuple[list[tuple[str, RunStatus]], bool]:
    """Returns (name, status) of each run, sorted by folder and name, and whether some folders were left out."""
    rows, visited = [], 0
    for directory in directories:
        top = os.path.realpath(directory)
        found = []
        for folder in _folders(top, _MOST_FOLDERS - visited):
            visited += 1
            if _is_run(folder):
                found.append((_name(directory, top, folder, len(directories) > 1), read_status(folder)))
        rows += sorted(found, key=lambda row: row[0])
    return rows, visited >= _MOST_FOLDERS


def _name(directory: str, top: str, folder: str, several: bool) -> str:
    name = os.path.relpath(folder, top)
    if name == ".":
        name = directory if several else os.path.basename(top)
    elif several:
        name = os.path.join(directory, name)
    return name if len(name) <= _LONGEST_NAME else f"...{name[3 - _LONGEST_NAME :]}"


def _folders(top: str, most: int) -> Iterator[str]:
    """Yields a folder and those below it, without following links, and without those that only parts of a run have."""
    waiting, entries = [(top, 0)], 0
    while waiting and most > 0:
        folder, depth = waiting.pop()
        most -= 1
        yield folder
        is_run = _is_file(os.path.join(folder, "run.json"))
        try:
            with os.scandir(folder) as found:
                for entry in found:
                    entries += 1
                    if entries > _MOST_ENTRIES:
                        break
                    is_part = is_run and entry.name in _INSIDE
                    if depth < _DEEPEST and not is_part and entry.is_dir(follow_symlinks=False):
                        waiting.append((entry.path, depth + 1))
        except OSError:  # not readable, or gone meanwhile
            continue


def _is_run(folder: str) -> bool:
    if any(_is_file(os.path.join(folder, name)) for name in _OF_A_RUN):
        return True
    holder = lock.holder(folder)
    return bool(holder and holder.holds)  # it has just started


def _is_file(path: str) -> bool:
    return os.path.isfile(path) and not os.path.islink(path)


def read_status(folder: str) -> RunStatus:
    """Returns how the run of a directory is doing.

    Args:
      folder: the run directory, whose contents may be anything.
    """
    report = run_file.read(run_file.path_of(folder, trains=True))
    records = read_newest(os.path.join(folder, "metrics.jsonl"))
    train = next((record for record in reversed(records) if record["split"] == "train"), None)
    rate = values.number(train.get("steps_per_second")) if train else None
    changed = [_changed(os.path.join(folder, name)) for name in ("metrics.jsonl", "run.json")]
    age = max(0.0, time.time() - (max(changed) or _changed(os.path.join(folder, "lock"))))
    state, detail = _state(report, lock.holder(folder), age, _interval(records, rate))
    step = values.whole(report.get("step"))
    if train and state in ("running", "silent", "killed"):  # the report is written at the start and at the end
        step = values.whole(train["step"])
    flags = report.get("flags") if isinstance(report.get("flags"), dict) else {}
    end = values.whole(report.get("end", flags.get("train_steps")))
    metrics = _metrics(records, report)
    return RunStatus(state, detail, step, end, rate, age, metrics)


def _state(report: dict[str, Any], holder: lock.Holder | None, age: float, interval: float) -> tuple[str, str]:
    """Returns the state, and more about it."""
    said = report.get("status")
    silent = age > max(_SILENT_SECONDS, _SILENT_REPORTS * interval)
    if holder and holder.holds is None and said == "running":
        if silent:
            return "silent", f"killed, or stalled: it ran on {holder.host}, which cannot be asked from here"
        return "running", f"on {holder.host}"
    if holder and holder.holds:
        if said == "running":
            return ("silent", f"process {holder.pid} is alive, and reports nothing") if silent else ("running", "")
        if _process_of(report) != holder.pid:
            return "starting", f"after a start that ended {said}" if report else ""
    if said == "running":
        return "killed", ""
    if said in ("done", "preempted", "failed", "restarted"):
        error = report.get("error")
        return said, error if isinstance(error, str) else ""
    return "unknown", "" if report else "no run.json that can be read"


def _process_of(report: dict[str, Any]) -> Any:
    """Returns the process id of the newest start that the report has."""
    try:
        return report["starts"][-1]["process"]["pid"]
    except (KeyError, TypeError, IndexError):
        return None


def _interval(records: Sequence[Record], rate: float | None) -> float:
    """Returns the seconds of training between two reports; 0 where they are not known."""
    steps = [step for r in records if r["split"] == "train" and (step := values.whole(r["step"])) is not None][-2:]
    return (steps[1] - steps[0]) / rate if len(steps) == 2 and rate and steps[1] > steps[0] else 0.0


def _metrics(records: Sequence[Record], report: dict[str, Any]) -> dict[str, float]:
    """Returns the last loss and one more metric of the training, and of each evaluator; in the report if not found."""
    newest: dict[str, dict[str, Any]] = {}
    if isinstance(report.get("metrics"), dict):
        newest.update({split: found for split, found in report["metrics"].items() if isinstance(found, dict)})
    newest.update({record["split"]: record for record in records})
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


def _table(rows: Sequence[tuple[str, RunStatus]]) -> list[str]:
    """Returns the lines of a table, cut to the width of a terminal."""
    table = [_HEADINGS, *(_cells(name, run) for name, run in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(_HEADINGS))]
    right = [heading in ("step", "steps/s", "left", "news") for heading in _HEADINGS]
    lines = [
        "  ".join(cell.rjust(width) if end else cell.ljust(width) for cell, width, end in zip(row, widths, right))
        for row in table
    ]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    lines = [line.rstrip() for line in lines]
    return [line if width is None or len(line) <= width else f"{line[: width - 1]}…" for line in lines]


def _cells(name: str, run: RunStatus) -> tuple[str, ...]:
    metrics = ", ".join(f"{key} {format_number(value)}" for key, value in run.metrics.items())
    cells = (
        name,
        run.state,
        ("" if run.step is None else f"{run.step:,}") + (f"/{run.end:,}" if run.end else ""),
        "" if run.rate is None else format_number(run.rate),
        "" if run.left is None else format_seconds(run.left),
        f"{format_seconds(run.age)} ago",
        "; ".join(filter(None, (run.detail, metrics))),
    )
    return tuple(printable(cell) for cell in cells)
