"""Options of the tools."""

import argparse
from typing import Any

from looplib import files
from looplib.errors import UsageError


def arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what the parser of a tool has added to its options, by name."""
    return {name: value for name, value in vars(options).items() if name not in ("tool", "command")}


def path(text: str) -> str:
    """Returns a path of the command line, or raises `argparse.ArgumentTypeError`; the type of an option."""
    try:
        found = files.resolve(text, "the path")
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return found if text.startswith(("~", "file://")) else text  # names in tables are those that the user gives
