"""The command `audit`. Importing this file is cheap."""

import argparse
from typing import Any

from looplib.base.plugins import Command
from looplib.commands.options import path
from looplib.errors import CommandError


def add(tools: Any) -> None:
    """Adds the parser of `audit`."""
    parser = tools.add_parser(
        "audit",
        help="train random intervals of a run again, and compare them bit by bit, to find silent corruption",
        description="Trains intervals between two checkpoints of a run again, by its own command from a copy of the "
        "first, and compares the tensors of the second and the reports between them. Those that no audit has tried "
        "before come first. The verdicts are added to audit.jsonl in the run directory; nothing else there changes, "
        "and the run may train meanwhile.",
        epilog="exit codes: 0 equal; 1 different; 2 nothing could be audited",
    )
    parser.add_argument("directory", type=path, help="the run directory")
    parser.add_argument("--intervals", type=int, default=1, help="number of intervals (default %(default)s)")
    parser.add_argument("--all", dest="every", action="store_true", help="every interval that there is")
    parser.add_argument("--seed", type=int, help="seed of the random choice (default: a new one each time)")
    parser.set_defaults(tool=Command(_audit, _check, has_verdict=True))


def _check(options: argparse.Namespace) -> None:
    from looplib.commands import recorded_run

    if options.intervals < 1:
        raise CommandError(f"--intervals is {options.intervals}; expected at least 1")
    run = recorded_run.Recorded(options.directory)
    recorded_run.start_of(run.report, run.directory)  # refuses here what has no command


def _audit(options: argparse.Namespace) -> int:
    from looplib.commands.audit import audit

    return audit(options.directory, options.intervals, options.every, options.seed)
