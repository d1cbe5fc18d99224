"""Options of the tools."""

import argparse
from collections.abc import Callable
from typing import Any

from looplib.base import files
from looplib.buckets.local import local_path
from looplib.errors import UsageError


def arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what the parser of a tool has added to its options, by name."""
    return {name: value for name, value in vars(options).items() if name not in ("tool", "command")}


def path(text: str) -> str:
    """Returns a path of the command line, or raises `argparse.ArgumentTypeError`; the type of an option."""
    return _known(text, lambda: files.resolve(text, "the path"))


def place(text: str) -> str:
    """Returns what `path` does, or a URL as it is; the type of an option."""
    return text if files.is_remote(text) else path(text)


def run(text: str) -> str:
    """Returns the directory of a run, or of several, or a local copy of what is at a URL; the type of an option."""
    return _known(text, lambda: local_path(text, "the path"))


def reports(text: str) -> str:
    """Returns what `run` does, without the checkpoints of what is at a URL; the type of an option."""
    return _known(text, lambda: without_checkpoints(text))


def without_checkpoints(text: str) -> str:
    """Returns a path, or a local copy of the runs at a URL without their checkpoints."""
    if not files.is_remote(text):
        return files.resolve(text, "the path")
    from looplib.buckets.mirror import fetched  # here, as it imports packages that take time

    return fetched(text, checkpoints=False)


def _known(text: str, find: Callable[[], str]) -> str:
    try:
        found = find()
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    # Names in tables are those that the user gives.
    return found if text.startswith("~") or files.is_remote(text) else text
