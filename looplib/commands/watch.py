"""The command `watch`. Importing this file is cheap."""

import argparse
import os
from typing import Any

from looplib.base.plugins import Command
from looplib.commands.options import arguments, path

URLS = "LOOPLIB_ALERT"
"""The environment variable with addresses, one a line: a command line can be read by all users of a machine."""


def add(tools: Any) -> None:
    """Adds the parser of `watch`."""
    text = "tell of failures, kills, stalls and ends of the runs below some folders"
    parser = tools.add_parser(
        "watch",
        help=text,
        description=f"{text[0].upper()}{text[1:]}. It only reads, also from another machine that sees the folders.",
    )
    parser.add_argument("directories", nargs="+", type=path, metavar="DIR", help="run directories, or folders of some")
    parser.add_argument(
        "--alert", dest="urls", action="append", default=[], metavar="URL",
        help=f"where to send alerts, may be given several times; also the lines of {URLS}",
    )  # fmt: skip
    parser.add_argument(
        "--alert_when",
        dest="conditions",
        action="append",
        default=[],
        metavar="CONDITION",
        help="such as eval/loss>2.5",
    )
    parser.add_argument("--every", type=float, default=10.0, help="seconds between looks (default %(default)s)")
    parser.add_argument("--until_end", action="store_true", help="end once all runs have ended")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(tool=Command(_watch, own_signals=True))


def _watch(options: argparse.Namespace) -> int:
    from looplib.commands.watching import watch

    given = arguments(options)
    given["urls"] = [*given["urls"], *filter(None, os.environ.get(URLS, "").splitlines())]
    return watch(**given)
