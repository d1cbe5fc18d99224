"""What Keras callbacks remember in their attributes, for checkpoints."""

import collections
import json
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import numpy as np
from absl import logging

from looplib.errors import UsageError
from looplib.task.plain import as_json

_SETTINGS = ("min_delta",)  # of which Keras 3 changes the sign, once it knows which values are better


class Memory:
    """The attributes of one callback: None, numbers, strings, and lists and dicts of them.

    An attribute of another kind, such as a set or an array, is not kept. If it changes in the training, a warning says
    so: if the attribute is set anew, or gets another length.

    Args:
      callback: the callback.
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._warned: set[str] = set()
        self.begin()

    def begin(self) -> None:
        """Takes the attributes as those that a training begins with."""
        self._first, self._others = self._kept(), self._not_kept()

    def changed(self) -> dict[str, Any]:
        """Returns the attributes that have changed since the training began."""
        self._warn()
        kept = self._kept().items()
        return {name: json.loads(text) for name, text in kept if self._first.get(name) != text}

    def load(self, changed: Mapping[str, Any]) -> None:
        """Sets the attributes to those that the training began with, and some to what `changed` returned."""
        for name in changed:
            if callable(getattr(type(self._callback), name, None)):
                raise UsageError(
                    f"the checkpoint has a value for {type(self._callback).__name__}.{name:.100}, which is a method; "
                    "name another checkpoint"
                )
        first = {name: json.loads(text) for name, text in self._first.items()}
        vars(self._callback).update({**first, **changed})

    def _kept(self) -> dict[str, str]:
        """Returns the attributes that are kept, as JSON."""
        return {
            name: json.dumps(value, default=as_json)
            for name, value in vars(self._callback).items()
            if name not in _SETTINGS and _is_plain(value)
        }

    def _not_kept(self) -> dict[str, tuple[int, int]]:
        """Returns the identities and lengths of the other attributes, apart from functions."""
        return {
            name: (id(value), len(value) if isinstance(value, Sized) else 0)
            for name, value in vars(self._callback).items()
            if not _is_plain(value) and not callable(value)
        }

    def _warn(self) -> None:
        now = self._not_kept()
        for name in sorted(now.keys() - self._warned):
            if now[name] != self._others.get(name):
                self._warned.add(name)
                logging.warning(
                    "the attribute %s of the callback %s has changed and is a %s, which is not kept in checkpoints: a "
                    "resumed run has the value that it begins with; use numbers, strings, and lists and dicts of them, "
                    "or a looplib.Action with state and load",
                    name, type(self._callback).__name__, type(vars(self._callback)[name]).__name__,
                )  # fmt: skip


def memories(callbacks: Sequence[Any]) -> dict[str, Memory]:
    """Returns the memory of each callback by its class and what it monitors; with a number, where these are equal."""
    found: dict[str, Memory] = {}
    seen: collections.Counter[str] = collections.Counter()
    for callback in callbacks:
        monitored = vars(callback).get("monitor")
        name = type(callback).__name__ + (f"({monitored})" if isinstance(monitored, str) else "")
        seen[name] += 1
        found[f"{name} {seen[name]}" if seen[name] > 1 else name] = Memory(callback)
    return found


def load_memories(ours: Mapping[str, Memory], saved: Any) -> None:
    """Gives each callback what it remembered; logs what no callback has.

    Args:
      ours: as of `memories`.
      saved: dict from the same names to what `Memory.changed` returned; a list of these from older versions.

    Raises:
      UsageError: if it cannot be told which of several equal callbacks a memory belongs to, or `saved` is no such dict.
    """
    saved = dict(zip(ours, saved)) if isinstance(saved, list) else saved
    if not isinstance(saved, dict) or not all(isinstance(changed, dict) for changed in saved.values()):
        raise UsageError(f"the checkpoint has {saved!r:.100} for Keras callbacks, expected a dict of their attributes")
    remembered = {name for name, changed in saved.items() if changed}
    for name in ours.keys() ^ saved.keys():
        kind, _, number = name.rpartition(" ")
        if number.isdecimal() and remembered & {kind, name}:
            raise UsageError(
                f"the checkpoint has another number of callbacks {kind} than this program, so that it is not known "
                "which of them remembers what; use as many as before, or give each a class of its own"
            )
    if gone := sorted(remembered - ours.keys()):
        logging.warning("the checkpoint has the memory of callbacks that this start does not have: %s", ", ".join(gone))
    for name, memory in ours.items():
        memory.load(saved.get(name, {}))


def _is_plain(value: Any) -> bool:
    """Returns whether JSON gives a value back as it was."""
    if type(value) in (list, dict):
        items = value.values() if type(value) is dict else value
        return all(map(_is_plain, items)) and (type(value) is list or all(type(key) is str for key in value))
    return value is None or isinstance(value, (bool, int, float, str, np.number, np.bool_))
