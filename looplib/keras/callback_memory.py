"""What Keras callbacks remember in their attributes, for checkpoints."""

import json
import os
from collections.abc import Collection, Mapping, Sequence, Sized
from typing import Any

import numpy as np
from absl import logging

from looplib.errors import CallbackError
from looplib.keras import callback_kinds
from looplib.task.actions import warn_of_unused_memories
from looplib.task.plain import as_json

_SETTINGS = ("min_delta",)  # Keras 3 changes their sign, once it knows which values are better


class Memory:
    """The attributes of one callback: None, numbers, strings, and lists and dicts of them.

    An attribute of another kind, such as a set or an array, is not kept. If it changes in the training, a warning says
    so: if the attribute is set again, or gets another length.

    Args:
      callback: the callback.
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._others_keep = _SETTINGS + (("best_weights",) if callback_kinds.restores_best(callback) else ())
        self._warned: set[str] = set()
        self.begin()

    def begin(self) -> None:
        """Takes the attributes as those that a training begins with."""
        self._first, self._others = self._kept(), self._not_kept()

    @property
    def names(self) -> set[str]:
        """The names of the attributes that are kept."""
        return set(self._kept())

    def changed(self) -> dict[str, Any]:
        """Returns the attributes that have changed since the training began."""
        self._warn()
        kept = self._kept().items()
        return {name: json.loads(text) for name, text in kept if self._first.get(name) != text}

    def check(self, changed: Mapping[str, Any]) -> None:
        """Raises `UsageError` if `load` cannot set what `changed` is said to have returned."""
        for name in changed:
            if callable(getattr(type(self._callback), name, None)):
                raise CallbackError(
                    f"the checkpoint has a value for {type(self._callback).__name__}.{name:.100}, which is a method; "
                    "name another checkpoint"
                )

    def load(self, changed: Mapping[str, Any]) -> None:
        """Sets the attributes to those that the training began with, and some to what `changed` returned."""
        held = vars(self._callback)
        first = {name: json.loads(text) for name, text in self._first.items() if not callable(held.get(name))}
        held.update({**first, **changed})

    def _kept(self) -> dict[str, str]:
        """Returns the attributes that are kept, as JSON."""
        return {
            name: json.dumps(value, default=as_json)
            for name, value in vars(self._callback).items()
            if name not in self._others_keep and _is_plain(value)
        }

    def _not_kept(self) -> dict[str, tuple[int, int]]:
        """Returns the identities and lengths of the other attributes, apart from functions."""
        return {
            name: (id(value), len(value) if isinstance(value, Sized) else 0)
            for name, value in vars(self._callback).items()
            if name not in self._others_keep and not _is_plain(value) and not callable(value)
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


class Memories:
    """What the callbacks of a trainer remember, each by its class, `monitor`, `mode` and `name`.

    Args:
      callbacks: the callbacks.
      common: the names of attributes that every callback has.

    Attributes:
      named: the callbacks with their names.

    Raises:
      UsageError: if two that remember something have one name.
    """

    def __init__(self, callbacks: Sequence[Any], common: Collection[str]) -> None:
        self._common = frozenset(common)
        self.named = [(_name(callback), callback) for callback in callbacks]
        self._named = [(name, Memory(callback)) for name, callback in self.named]
        self._refuse_equal_names()

    def begin(self) -> None:
        """Takes the attributes as those that a training begins with."""
        for _, memory in self._named:
            memory.begin()
        self._refuse_equal_names()

    def changed(self) -> dict[str, dict[str, Any]]:
        """Returns the attributes that have changed since the training began, by name."""
        self._refuse_equal_names()
        return {name: memory.changed() for name, memory in self._named}

    def check(self, saved: Any) -> None:
        """Logs what no callback has of a memory to be loaded.

        Args:
          saved: what `changed` returned.

        Raises:
          UsageError: if it is something else.
        """
        if not isinstance(saved, dict) or not all(isinstance(changed, dict) for changed in saved.values()):
            raise CallbackError(
                f"the checkpoint has {saved!r:.100} for Keras callbacks, expected a dict of their attributes; name "
                "another checkpoint"
            )
        for name, memory in self._named:
            memory.check(saved.get(name, {}))
        ours = {name for name, _ in self._named}
        new = [name for name, memory in self._named if memory.names - self._common and name not in saved]
        warn_of_unused_memories("callbacks", new, [name for name in saved if saved[name] and name not in ours])

    def load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Gives each callback what it remembered, as `changed` returned it."""
        for name, memory in self._named:
            memory.load(saved.get(name, {}))

    def _refuse_equal_names(self) -> None:
        names = [name for name, _ in self._named]
        for name, memory in self._named:
            if names.count(name) > 1 and memory.names - self._common:
                raise CallbackError(
                    f"two callbacks are {name}, and a checkpoint could not tell which of them a memory belongs to; "
                    "give each an attribute `name` of its own"
                )


def _name(callback: Any) -> str:
    """Returns what a callback is, watches and writes."""
    held = vars(callback)
    file = os.path.basename(callback.filepath) if callback_kinds.writes_models(callback) else None
    better = getattr(held.get("monitor_op"), "__name__", None)  # in place of a mode in tf_keras
    known = (held.get("monitor"), held.get("mode", better), file, held.get("name"))
    return f"{type(callback).__name__}({', '.join(one for one in known if isinstance(one, str))})"


def _is_plain(value: Any) -> bool:
    """Returns whether JSON gives a value back as it was."""
    try:
        if type(value) in (list, dict):
            items = value.values() if type(value) is dict else value
            return all(map(_is_plain, items)) and (type(value) is list or all(type(key) is str for key in value))
    except RecursionError:  # it holds itself
        return False
    return value is None or isinstance(value, (bool, int, float, str, np.integer, np.floating, np.bool_))
