"""`python -m looplib report DIR...`: the page of a run, or of several side by side."""

import argparse
import datetime
import itertools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from looplib.base import files
from looplib.base.console import printable
from looplib.base.messages import with_cure
from looplib.base.plugins import Command
from looplib.commands.options import path, reports
from looplib.errors import EXIT_DONE, FileError, RunDirectoryError
from looplib.run.directory import METRICS, PAGE, RUN_JSON, RunDir
from looplib.run.sweep_results import RESULTS, SweepResults, is_sweep

if TYPE_CHECKING:
    from looplib.report.page.content import Run

MOST_RUNS = 200  # of a page
_DEEPEST = 2  # folders below a directory that are searched for runs: a sweep has trial-0001/seed-0
_OF_A_SWEEP = re.compile(r"(trial|seed)-\d+")  # the folders that a sweep makes, unlike those of a rerun beside them


def add(tools: Any) -> None:
    """Adds the parser of `report`."""
    parser = tools.add_parser(
        "report",
        help="write a page about a run, or one that compares several",
        description="Writes an HTML file about a run, or one that compares several, from what is in the run "
        "directories. The file is complete in itself and needs no network.",
    )
    parser.add_argument(
        "directories",
        nargs="+",
        type=reports,
        metavar="DIR",
        help="a run directory, or one that holds some, such as a sweep's",
    )
    parser.add_argument(
        "--output", type=path, help="the file (default: report.html in DIR; of several, in the current directory)"
    )
    parser.set_defaults(tool=Command(_report, needs_tensorflow=lambda options: False))


def _report(options: argparse.Namespace) -> int:
    return report(options.directories, options.output)


def report(directories: Sequence[str], output: str | None = None) -> int:
    """Writes the page of run directories, and prints where it is.

    Args:
      directories: run directories, or directories that hold some.
      output: the file; default `report.html` in the directory, or if there are several, in the current one.

    Returns:
      The exit code.

    Raises:
      UsageError: if a directory holds no run, or the file cannot be written.
    """
    found = runs_in(directories)
    shown = found[:MOST_RUNS]
    place = output or (os.path.join(directories[0], PAGE) if len(directories) == 1 else PAGE)
    text = page_of(shown, directories)
    try:
        is_file = files.write_named(place, text) if output else not files.write_whole(place, text)
    except OSError as error:
        raise FileError(f"{place} cannot be written: {with_cure(error, 'name another file with --output')}") from error
    left = f"; the first {len(shown):,} of {len(found):,} are shown" if len(found) > len(shown) else ""
    line = printable(f"{place}: {len(shown)} {'run' if len(shown) == 1 else 'runs'}{left}")
    print(line, file=sys.stdout if is_file else sys.stderr)  # which a page in standard output would not bear
    return EXIT_DONE


def runs_in(directories: Sequence[str]) -> list[str]:
    """Returns the run directories that some directories are or hold; `UsageError` if one holds none."""
    return list(dict.fromkeys(run for directory in directories for run in _runs_in(os.path.normpath(directory))))


def page_of(shown: Sequence[str], directories: Sequence[str], written: datetime.datetime | None = None) -> str:
    """Returns the page of run directories that were found in some directories; for `written` see `html.page`."""
    from looplib.report.page.html import page  # here, as it imports numpy, which `--help` does without

    runs = [_read(directory, name) for directory, name in zip(shown, _names(shown))]
    title = runs[0].name if len(runs) == 1 else os.path.basename(os.path.abspath(directories[0]))
    sweep = RunDir(directories[0]).decoded(RESULTS, SweepResults) if len(directories) == 1 else None
    return page(runs, title if len(directories) == 1 else "Comparison", written, sweep)


def _read(directory: str, name: str) -> "Run":
    from looplib.report.page.content import not_shown, read_run

    try:
        os.scandir(directory).close()
        return read_run(directory, name)
    except Exception as error:  # one run takes no page from the others
        return not_shown(directory, name, error)


def _runs_in(directory: str) -> list[str]:
    """Returns the run directories that a directory is or holds, in the order of their names.

    Raises:
      UsageError: if there is none.
    """
    if not os.path.isdir(directory):
        raise RunDirectoryError(f"{directory} is not a directory; name a run directory, as --model_dir does")
    found = list(itertools.islice(_search(directory, 0), 10 * MOST_RUNS))
    if not found:
        raise RunDirectoryError(
            f"{directory} holds no run: neither it nor a folder in it has a run.json or metrics.jsonl; name a run "
            "directory, as --model_dir does, or the directory of a sweep"
        )
    return found


def _search(directory: str, depth: int, of_a_sweep: bool = False) -> Iterator[str]:
    """Yields the run directories in a directory; for a sweep, the trials alone. One that cannot be read may be one."""
    try:
        names = set(os.listdir(directory))
    except FileNotFoundError:  # gone meanwhile
        return
    except OSError:
        if not depth:
            raise
        names = {RUN_JSON}
    if {RUN_JSON, METRICS} & names:
        yield directory
        return
    of_a_sweep = of_a_sweep or is_sweep(directory)
    for name in sorted(names) if depth < _DEEPEST else ():
        inner = os.path.join(directory, name)
        belongs = not of_a_sweep or _OF_A_SWEEP.fullmatch(name)
        if belongs and os.path.isdir(inner) and not os.path.islink(inner):
            yield from _search(inner, depth + 1, of_a_sweep)


def _names(directories: Sequence[str]) -> list[str]:
    """Returns what sets each directory apart from the others: its path below the folder that holds all of them."""
    if len(directories) == 1:
        return [os.path.basename(os.path.abspath(directories[0]))]
    paths = list(map(os.path.abspath, directories))
    common = os.path.commonpath(paths)
    return [os.path.relpath(path, common) for path in paths]
