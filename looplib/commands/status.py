"""`python -m looplib status DIR...`: every run below some folders, and how each of them is doing.

It only reads: the lock, `run.json` and the end of `metrics.jsonl` of each run, and never takes the lock.
"""

import dataclasses
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
from looplib.run.run_status import RunStatus, read_status

_MOST_FOLDERS, _MOST_ENTRIES, _MOST_SECONDS, _DEEPEST = 10_000, 100_000, 60.0, 12
_OF_A_RUN = ("run.json", "metrics.jsonl")
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
_HEADINGS = ("run", "state", "step", "steps/s", "left", "news", "")


@dataclasses.dataclass
class _Limits:
    """What may still be looked at for one table."""

    folders: int = _MOST_FOLDERS
    entries: int = _MOST_ENTRIES
    end: float = dataclasses.field(default_factory=lambda: time.monotonic() + _MOST_SECONDS)

    @property
    def reached(self) -> bool:
        """Whether folders are left out from here on."""
        return self.folders <= 0 or self.entries <= 0 or time.monotonic() > self.end


def status(directories: Sequence[str], watch: bool = False, interval: float = 2.0) -> int:
    """Prints a table of all runs below some folders.

    Args:
      directories: the folders; each may be the directory of a run or of a sweep.
      watch: whether to print it again and again, until Ctrl-C; a terminal is redrawn.
      interval: seconds between two tables.

    Returns:
      The exit code: `EXIT_DONE`, or `EXIT_DIFFERENT` if there is no run.

    Raises:
      UsageError: if a folder does not exist, or the interval is not a time.
    """
    if not 0 < interval <= _LONGEST_INTERVAL:
        raise CommandError(
            f"--interval is {interval:g}; expected seconds above 0 and up to {_LONGEST_INTERVAL:,} (a day)"
        )
    for directory in directories:
        if not files.is_remote(directory) and not os.path.isdir(directory):
            raise RunDirectoryError(f"{directory} is not a directory on this machine; name folders that hold runs")
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


def run_folders(directories: Sequence[str]) -> list[str]:
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
        is_run = _is_file(os.path.join(folder, "run.json"))
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
    if any(_is_file(os.path.join(folder, name)) for name in _OF_A_RUN):
        return True
    return lock.holder(folder) is not None  # it has just started, or ended before it wrote a report


def _is_file(path: str) -> bool:
    return os.path.isfile(path) and not os.path.islink(path)


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
