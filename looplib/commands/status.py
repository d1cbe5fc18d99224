"""`python -m looplib status DIR...`: every run below some folders, and how each of them is doing.

It only reads: the lock, `run.json` and the end of `metrics.jsonl` of each run, and never takes the lock.
"""

import dataclasses
import itertools
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence

from looplib.base import files
from looplib.base.console import printable
from looplib.base.numbers import format_number, format_seconds, format_share
from looplib.commands import options
from looplib.errors import EXIT_DIFFERENT, EXIT_DONE, CommandError, RunDirectoryError
from looplib.run import lock
from looplib.run.directory import RunDir
from looplib.run.status import RunStatus, read_status

_MOST_FOLDERS, _MOST_ENTRIES, _MOST_SECONDS, _DEEPEST = 10_000, 100_000, 60.0, 12
_INSIDE = (
    "checkpoints",
    "train",
    "eval",
    "evaluations",
    "predictions",
    "export",
    "plugins",
)  # of a run, without runs in them
_LONGEST_NAME, _LONGEST_INTERVAL = 48, 86_400
_LAST_SECONDS = 60.0  # for what still waits to be sent at the end
_PAUSE = 0.5
_HEADINGS = ("run", "state", "step", "steps/s", "left", "news", "")


@dataclasses.dataclass
class _Limits:
    """The rest that may be looked at for one table."""

    folders: int = _MOST_FOLDERS
    entries: int = _MOST_ENTRIES
    end: float = dataclasses.field(default_factory=lambda: time.monotonic() + _MOST_SECONDS)

    @property
    def reached(self) -> bool:
        """Whether folders are left out from here on."""
        return self.folders <= 0 or self.entries <= 0 or time.monotonic() > self.end


def status(
    directories: Sequence[str],
    watch: bool = False,
    interval: float = 2.0,
    urls: Sequence[str] = (),
    conditions: Sequence[str] = (),
    until_end: bool = False,
    process: int | None = None,
) -> int:
    """Prints a table of all runs below some folders, or tells what happens to them.

    Args:
      directories: the folders; each may be the directory of a run or of a sweep.
      watch: whether to print it again and again, until Ctrl-C; a terminal is redrawn. With any of the further
        arguments, what happens to the runs is printed in place of the table; see `alerts.RunObserver`.
      interval: seconds between two tables or looks.
      urls: addresses that alerts are sent to; see `alerts.Sender`.
      conditions: see `alerts.Condition`.
      until_end: whether to return once all runs have ended, and there is one.
      process: the id of the process that trains in the only directory, or None; see `alerts.RunObserver`.

    Returns:
      The exit code: `EXIT_DONE`, or `EXIT_DIFFERENT` if there is no run.

    Raises:
      UsageError: if a folder does not exist, or for another value that cannot be used.
    """
    if not 0 < interval <= _LONGEST_INTERVAL:
        raise CommandError(
            f"--interval is {interval:g}; expected seconds above 0 and up to {_LONGEST_INTERVAL:,} (a day)"
        )
    tells = bool(urls or conditions or until_end)
    if tells and not watch:
        raise CommandError("--alert, --alert_when and --until_end tell what happens to runs; add --watch")
    for directory in directories:
        if not (files.is_remote(directory) and not tells) and not os.path.isdir(directory):
            raise RunDirectoryError(f"{directory} is not a directory on this machine; name folders that hold runs")
    if tells:
        return _tell(directories, interval, urls, conditions, until_end, process)
    try:
        while True:
            rows, cut = _rows([options.without_checkpoints(directory) for directory in directories])
            lines = _table(rows) if rows else [f"there is no run in {' or '.join(map(printable, directories))}"]
            lines += [
                f"not all folders were looked at: they are more than {_MOST_FOLDERS:,}, have more than "
                f"{_MOST_ENTRIES:,} entries, or take longer than {_MOST_SECONDS:g} s; name fewer of them"
            ] * cut
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


def _tell(
    directories: Sequence[str],
    interval: float,
    urls: Sequence[str],
    conditions: Sequence[str],
    until_end: bool,
    process: int | None,
) -> int:
    """Prints what happens to the runs below some folders, and sends it to addresses; see `status`."""
    from looplib.report.alerts import Condition, RunObserver, Sender  # here, as the table does without them

    senders, parsed = [Sender(url, _say) for url in urls], [Condition.parse(text) for text in conditions]
    observers: dict[str, RunObserver] = {}
    try:
        while True:
            for folder in directories if process is not None else _run_folders(directories):
                if folder not in observers:
                    observers[folder] = RunObserver(folder, parsed, process)
            for alert in itertools.chain.from_iterable(observer.look() for observer in observers.values()):
                _say(f"{alert.title}: {alert.sentence}")
                for sender in senders:
                    sender.add(alert)
            if until_end and observers and all(observer.has_ended for observer in observers.values()):
                break
            time.sleep(interval)
    except KeyboardInterrupt:
        pass
    end = time.monotonic() + _LAST_SECONDS
    while not all(sender.is_done for sender in senders) and time.monotonic() < end:
        time.sleep(_PAUSE)
    return EXIT_DONE


def _say(sentence: str) -> None:
    print(printable(f"{time.strftime('%F %T')} {sentence}"), flush=True)


def _run_folders(directories: Sequence[str]) -> list[str]:
    """Returns the run directories below some local folders, as many as are found within a minute."""
    limits = _Limits()
    return [folder for top in directories for folder in _folders(os.path.realpath(top), limits) if _is_run(folder)]


def _rows(directories: Sequence[str]) -> tuple[list[tuple[str, RunStatus]], bool]:
    """Returns (name, status) of each run, sorted by folder and name, and whether some folders were left out."""
    rows, limits = [], _Limits()
    for directory in directories:
        top = os.path.realpath(directory)
        found = []
        for folder in _folders(top, limits):
            if _is_run(folder):
                found.append((_name(directory, top, folder, len(directories) > 1), read_status(folder)))
        rows += sorted(found, key=lambda row: row[0])
    return rows, limits.reached


def _name(directory: str, top: str, folder: str, several: bool) -> str:
    name = os.path.relpath(folder, top)
    if name == ".":
        name = directory if several else os.path.basename(top)
    elif several:
        name = os.path.join(directory, name)
    return name if len(name) <= _LONGEST_NAME else f"...{name[3 - _LONGEST_NAME :]}"


def _folders(top: str, limits: _Limits) -> Iterator[str]:
    """Yields a folder and those below it, without following links, and without those that only parts of a run have."""
    waiting = [(top, 0)]
    while waiting and not limits.reached:
        folder, depth = waiting.pop()
        limits.folders -= 1
        yield folder
        is_run = RunDir(folder).has_reported
        try:
            with os.scandir(folder) as found:
                for entry in found:
                    limits.entries -= 1
                    if limits.entries <= 0:
                        break
                    is_part = is_run and entry.name in _INSIDE
                    if depth < _DEEPEST and not is_part and entry.is_dir(follow_symlinks=False):
                        waiting.append((entry.path, depth + 1))
        except OSError:  # not readable, or gone meanwhile
            continue


def _is_run(folder: str) -> bool:
    # One without a report has just started, or ended before it wrote one.
    return RunDir(folder).has_reported or lock.holder(folder) is not None


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
    finite = {key: format_number(value) if math.isfinite(value) else "not finite" for key, value in run.metrics.items()}
    metrics = ", ".join(map(" ".join, finite.items()))
    life = "" if run.goodput is None else f"goodput {format_share(run.goodput)}"
    cells = (
        name,
        run.state,
        ("" if run.step is None else f"{run.step:,}") + (f"/{run.end:,}" if run.end else ""),
        "" if run.rate is None else format_number(run.rate),
        "" if run.left is None else format_seconds(run.left),
        f"{format_seconds(run.age)} ago",
        "; ".join(filter(None, (run.detail, run.copy.text if run.copy and run.copy.is_behind else "", metrics, life))),
    )
    return tuple(printable(cell) for cell in cells)
