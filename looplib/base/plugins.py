"""Plug-ins: objects that other packages register by entry points, beside looplib's own.

Groups are `looplib.commands`, `.flags` and `.writers`.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any

from looplib.base.messages import parse_error
from looplib.errors import PluginError, UsageError


@functools.cache
def _all() -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points()  # takes about 20 ms, for one group or all


def names(group: str) -> list[str]:
    """Returns the names of the plug-ins of a group, such as "looplib.commands", sorted."""
    return sorted(_all().select(group=group).names)


def load(group: str, name: str, own: Mapping[str, Any] = {}) -> Any:
    """Returns an object of looplib's own, or that of a plug-in, imported now.

    Args:
      group: of entry points.
      name: of the object.
      own: looplib's own, by name.

    Raises:
      UsageError: if no installed package registers it, if two do, or if it cannot be imported.
    """
    if name in own:
        return own[name]
    try:
        return _registered(group, name, own).load()
    except UsageError:
        raise
    except Exception as error:
        raise failure(group, name, error) from error


def failure(group: str, name: str, error: Exception) -> PluginError:
    """Returns the error for a plug-in that is registered, but broken; it names the package that registers it."""
    entry = _registered(group, name)
    package = entry.dist.name
    return PluginError(
        f"the plug-in {name!r} in {group} is registered by the package {package}, but {entry.value} cannot be used "
        f"({parse_error(error)}); install {package} again, with the packages that it needs"
    )


def _registered(group: str, name: str, own: Mapping[str, Any] = {}) -> importlib.metadata.EntryPoint:
    found = list(_all().select(group=group, name=name))
    if not found:
        known = ", ".join(sorted({*own, *names(group)})) or "none"
        raise PluginError(
            f"there is no plug-in {name!r} in {group}; installed are: {known}; install the package that has it"
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
