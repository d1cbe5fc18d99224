"""Plug-ins: objects that looplib's extras, and other packages, register by entry points.

Groups are `looplib.commands`, `looplib.writers`, `looplib.backends` and `looplib.parts`. The core names no plug-in; it
asks for one by its group and name.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any

from looplib.errors import PluginError


@functools.cache
def _all() -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points()  # takes about 20 ms, for one group or all


def _registered(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    return {one.name: one for one in _all().select(group=group)}


def names(group: str) -> list[str]:
    """Returns the names of the plug-ins of a group, such as "looplib.commands", sorted."""
    return sorted(_registered(group))


def load(group: str, name: str) -> Any:
    """Returns the object of a plug-in, imported now.

    Raises:
      UsageError: if no installed package registers it.
    """
    if (found := find(group, name)) is None:
        others = ", ".join(names(group)) or "none"
        raise PluginError(
            f"there is no plug-in {name!r} in {group}; installed are: {others}; install the package that has it, or "
            "install looplib again"
        )
    return found


def find(group: str, name: str) -> Any | None:
    """Returns the object of a plug-in, imported now, or None if it is not installed."""
    found = _registered(group).get(name)
    try:
        return found.load() if found else None
    except ModuleNotFoundError as error:
        if error.name and f"{found.module}.".startswith(f"{error.name}."):  # not a missing dependency
            return None
        raise


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of `python -m looplib`; its parser stores it as `tool`.

    Attributes:
      run: function of the parsed options; returns the exit code.
      check: function of the options; raises `UsageError` for errors that can be found before the import of TensorFlow,
        which takes seconds.
      needs_tensorflow: function of the options, whether TensorFlow is imported before the tool runs.
      own_signals: whether the tool starts quickly, and handles signals itself.
      has_verdict: whether exit code 0 is a verdict about runs; then a closed pipe must not end with 0.
    """

    run: Callable[[argparse.Namespace], int]
    check: Callable[[argparse.Namespace], object] = lambda options: None
    needs_tensorflow: Callable[[argparse.Namespace], bool] = lambda options: True
    own_signals: bool = False
    has_verdict: bool = False
