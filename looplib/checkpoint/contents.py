"""What a program computes with that no variable holds, such as vocabularies: noted with a checkpoint, and compared."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.checkpoint.names import Live, Normal
from looplib.compat import keras as _keras
from looplib.errors import UsageError
from looplib.task.record import Contents, RunRecord

_TABLES = (tf.lookup.StaticHashTable, tf.lookup.StaticVocabularyTable)  # of others, checkpoints hold the entries
_SHOWN, _LONGEST = 20, 50  # entries, and characters of each


def contents_of(objects: Mapping[str, Any]) -> dict[str, Contents]:
    """Returns the contents of the tables that do not change, and of layers that have learned from data.

    Args:
      objects: dict from attribute name to trackable object.

    Returns:
      dict from a name that other starts give it too. Where several have one name, it says which one of how many.
    """
    found: dict[str, list[Contents]] = {}
    normal = None
    for name, entries in _found_in(objects):
        normal = normal or Normal(Live(objects))
        found.setdefault(normal(name), []).append(_contents(entries))
    return {
        name if len(alike) == 1 else f"{name} {number} of {len(alike)}": one
        for name, alike in found.items()
        for number, one in enumerate(alike, 1)
    }


def check(objects: Mapping[str, Any], record: RunRecord, path: str) -> None:
    """Checks that the contents here are those of a checkpoint, as far as both have the names.

    Args:
      objects: dict from attribute name to trackable object.
      record: the run record of the checkpoint.
      path: its path, for the message.

    Raises:
      UsageError: if not.
    """
    if not record.contents:
        return
    for name, ours in contents_of(objects).items():
        theirs = record.contents.get(name, ours)
        if theirs.digest != ours.digest:
            raise UsageError(
                f"{name} {_difference(ours, theirs)} in {path}, so that the weights there do not fit it; load or "
                "adapt what that run was trained with, or give it another name if it is meant to differ"
            )


def _found_in(objects: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yields (name, entries) of each, below every attribute."""
    whole = tf.train.Checkpoint(**objects)
    for root, value in tf.train.TrackableView(whole).children(whole).items():  # with wrappers of lists and dicts
        seen: set[int] = set()
        todo = [(root, value), *((f"{root}/{layer.name}", layer) for layer in reversed(_keras.sublayers([value])))]
        while todo:
            name, part = todo.pop()
            if id(part) in seen:
                continue
            seen.add(id(part))
            if isinstance(part, _TABLES):
                yield name, _entries(part)
                continue
            of_layer = _keras.is_layer(part)
            if of_layer and (constants := _keras.given_constants(part)):
                yield name, constants
            for key, child in tf.train.TrackableView(part).children(part).items():
                # A layer has its own name, except for the one that does the lookup for a `TextVectorization`.
                if not _keras.is_layer(child) or (of_layer and _keras.adapts(part)):
                    todo.append((name if of_layer else f"{name}/{key}", child))


def _entries(table: Any) -> list[Any]:
    """Returns the keys of a table in the order of their values; with the values, where these are no numbers."""
    if not int(table.size()):
        return []  # of a layer that has not learned yet, it has no initial value
    exported = tf.raw_ops.LookupTableExportV2(
        table_handle=table.resource_handle, Tkeys=table.key_dtype, Tvalues=table.value_dtype
    )
    keys, values = (part.numpy() for part in exported)
    if values.dtype.kind not in "iu":
        keys, values = values, keys
    order = np.argsort(values, kind="stable")
    keys, values = keys[order], values[order]
    ordered = values.dtype.kind in "iu" and bool(np.all(np.diff(values) == 1))
    return keys.tolist() if ordered else list(zip(keys.tolist(), values.tolist()))


def _contents(entries: list[Any]) -> Contents:
    digest = hashlib.sha256(repr(entries).encode()).hexdigest()
    return Contents(len(entries), digest, [_text(entry) for entry in entries[:_SHOWN]])


def _text(entry: Any) -> str:
    return (entry.decode(errors="replace") if isinstance(entry, bytes) else str(entry))[:_LONGEST]


def _difference(ours: Contents, theirs: Contents) -> str:
    for number, (one, other) in enumerate(zip(ours.begins, theirs.begins)):
        if one != other:
            return f"has {one!r} as entry {number}, and has {other!r:.60} there"
    if ours.size != theirs.size:
        return f"has {ours.size} entries, and has {theirs.size}"
    return f"has other entries after the first {len(ours.begins)} than it has"
