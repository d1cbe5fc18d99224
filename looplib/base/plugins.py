"""Plug-ins: objects that looplib's extras, and other packages, register by entry points.

Groups are `looplib.commands`, `.flags`, `.writers`, `.backends` and `.parts`. The core asks for one by group and name.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any

from looplib.base.messages import parse_error
from looplib.errors import PluginError, UsageError


@functools.cache
def _all() -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points()  # takes about 20 ms, for one group or all


def names(group: str) -> list[str]:
    """Returns the names of the plug-ins of a group, such as "looplib.commands", sorted."""
    return sorted(_all().select(group=group).names)


def load(group: str, name: str) -> Any:
    """Returns the object of a plug-in, imported now.

    Raises:
      UsageError: if no installed package registers it, if two do, or if it cannot be imported.
    """
    try:
        return _registered(group, name).load()
    except UsageError:
        raise
    except Exception as error:
        raise failure(group, name, error) from error


def find(group: str, name: str) -> Any | None:
    """Returns the object of a plug-in, imported now, or None if it is not installed."""
    if name not in names(group):
        return None
    try:
        return load(group, name)
    except PluginError as error:
        cause, module = error.__cause__, _registered(group, name).module
        if isinstance(cause, ModuleNotFoundError) and cause.name and f"{module}.".startswith(f"{cause.name}."):
            return None  # the plug-in itself is missing, and not a package that it needs
        raise


def failure(group: str, name: str, error: Exception) -> PluginError:
    """Returns the error for a plug-in that is registered, but broken; it names the package that registers it."""
    entry = _registered(group, name)
    package = entry.dist.name
    return PluginError(
        f"the plug-in {name!r} in {group} is registered by the package {package}, but {entry.value} cannot be used "
        f"({parse_error(error)}); install {package} again, with the packages that it needs"
    )


def _registered(group: str, name: str) -> importlib.metadata.EntryPoint:
    found = list(_all().select(group=group, name=name))
    if not found:
        raise PluginError(
            f"there is no plug-in {name!r} in {group}; installed are: {', '.join(names(group)) or 'none'}; install the "
            "package that has it, or install looplib again"
        )
    if len(found) > 1:
        packages = " and ".join(sorted(entry.dist.name for entry in found))
        raise PluginError(f"the plug-in {name!r} in {group} is registered by {packages}; uninstall all but one of them")
    return found[0]


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
