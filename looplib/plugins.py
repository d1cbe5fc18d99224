"""Plug-ins: what other packages, and looplib's own extras, register by entry points.

Groups are `looplib.commands`, `looplib.writers`, `looplib.backends` and `looplib.parts`. The core names no plug-in;
it asks for one by its group and name.
"""

import functools
import importlib.metadata
from typing import Any

from looplib.errors import UsageError


@functools.cache
def _registered(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    return {one.name: one for one in importlib.metadata.entry_points(group=group)}


def names(group: str) -> list[str]:
    """Returns the names of the plug-ins of a group, sorted.

    Args:
      group: such as "looplib.commands".
    """
    return sorted(_registered(group))


def load(group: str, name: str) -> Any:
    """Returns the object of a plug-in, imported now.

    Args:
      group: such as "looplib.commands".
      name: the plug-in's name in the group.

    Raises:
      UsageError: if no installed package registers it, or what it needs is missing.
    """
    found = _registered(group).get(name)
    if found is None:
        others = ", ".join(names(group)) or "none"
        raise UsageError(
            f"there is no plug-in {name!r} in {group}; installed are: {others}; install the package that has it, or "
            "install looplib again"
        )
    return found.load()
