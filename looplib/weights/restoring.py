"""Restores: strictly, with a sentence that names all differences between a checkpoint and the objects here.

What a program computes with that no variable holds, such as vocabularies, is noted with a checkpoint, and compared.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.base import files
from looplib.base.console import printable
from looplib.base.messages import gist, join_names
from looplib.cluster.collectives import Workers
from looplib.compat import keras as _keras
from looplib.compat import tensorflow as _tf
from looplib.errors import CheckpointError, MismatchError, NoCheckpointError, UsageError
from looplib.run import commits
from looplib.task.record import Contents, RunRecord
from looplib.task.state import SlotOptimizer
from looplib.weights.names import LiveVariables, NamedVariable, NameNormalizer, SavedVariables, groups
from looplib.weights.tables import differing_tables

_TABLES = (tf.lookup.StaticHashTable, tf.lookup.StaticVocabularyTable)  # of others, checkpoints hold the entries
_TABLES_DIFFER = "tables that differ"
_SHOWN, _LONGEST = 20, 50  # entries, and characters of each
_MOST_STEPS = 2**53  # beyond any run, and small enough for the arithmetic of positions in int64


def restore(
    checkpoint: tf.train.Checkpoint,
    objects: Mapping[str, Any],
    path: str,
    strict: bool,
    options: tf.train.CheckpointOptions,
    values: str | None = None,
) -> None:
    """Restores the state.

    Args:
      checkpoint: the `tf.train.Checkpoint` of the objects.
      objects: dict from name to trackable object.
      path: a checkpoint's path, `.../ckpt-<step>`.
      strict: whether the checkpoint may not hold more either, such as an optimizer, which an evaluation does not have.
      options: for TensorFlow.
      values: the path of other files with the values to take; None for those of the checkpoint.

    Raises:
      UsageError: if the checkpoint is not one of this model; it lists what differs. The variables may then be
        partly restored.
    """
    try:
        if _compared(checkpoint, objects, path, shapes=False).get("other names"):
            raise MismatchError(_mismatch(checkpoint, objects, path, strict))
        status = checkpoint.restore(values or path, options)
        if strict:
            status.assert_consumed()
        else:
            status.assert_existing_objects_matched().expect_partial()
    except UsageError:
        raise
    except (ValueError, AssertionError) as error:
        raise MismatchError(_mismatch(checkpoint, objects, path, strict, error)) from error
    except (tf.errors.OpError, IndexError) as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be read ({gist(error)}); specify an older, intact one, or move it away"
        ) from error


def _compared(
    checkpoint: tf.train.Checkpoint, objects: Mapping[str, Any], path: str, shapes: bool
) -> dict[str, list[str]]:
    """Returns the differences between a checkpoint and the objects here, by titles; {} if the names are not known.

    Raises `UsageError` if what no variable holds is not what the checkpoint was made with. Without `shapes` it looks
    only for other names at the same places, which are named if nothing else differs.
    """
    reader = tf.train.load_checkpoint(path)
    record = RunRecord.in_checkpoint(reader, path)
    check_contents(objects, record, path)
    if (graph := _tf.object_graph(reader)) is None:
        return {}
    saved = SavedVariables(reader, graph, record.names, objects)
    moved = {"other names": sorted(misplaced(saved, objects_of(graph, checkpoint)))}
    found = differences(saved) if shapes else {}
    found |= {_TABLES_DIFFER: differing_tables(saved)} if any(found.values()) else {}
    return {why: names for why, names in found.items() if names} or moved


def _mismatch(
    checkpoint: tf.train.Checkpoint,
    objects: Mapping[str, Any],
    path: str,
    strict: bool,
    error: Exception | None = None,
) -> str:
    """Returns the sentence that lists all differences; TensorFlow's error names only the first one."""
    found = _compared(checkpoint, objects, path, shapes=True)
    if tables := found.pop(_TABLES_DIFFER, []):
        return (
            f"the checkpoint {path} has other tables of embeddings: {join_names(tables, most=4)}; build them as they "
            "are there, or ask for a partial restore (Start(partial=True), --partial_restore), which takes rows and "
            "slots by their ids, or start a new run in a separate model_dir (Start(warm_start=PATH), --warm_start), "
            f"which takes the rows alone ({describe_differences(found)})"
        )
    if not strict:
        found.pop("only there", None)
    return (
        f"the checkpoint {path} was made by another model or optimizer; use a separate model_dir, or "
        "build the model that the checkpoint was made with, or ask for a partial restore "
        f"(Start(partial=True), --partial_restore) ({describe_differences(found) or gist(error)})"
    )


def peek(path: str) -> tuple[int, RunRecord]:
    """Reads the global step and the run record of a checkpoint without touching the model.

    Raises:
      UsageError: if it is not a looplib checkpoint, or its run record cannot be read.
    """
    try:
        reader = tf.train.load_checkpoint(path)
        step = int(reader.get_tensor(_tf.variable_key("global_step")))
        if os.path.basename(path) != f"ckpt-{step}":
            raise ValueError(f"the step in it is {step}")
        text = reader.get_tensor(_tf.python_state_key("run_state"))
    except (ValueError, TypeError, IndexError, tf.errors.OpError) as error:
        kind = CheckpointError if tf.io.gfile.exists(f"{path}.index") else NoCheckpointError
        raise kind(
            f"{path} is not a checkpoint that looplib can read ({gist(error)}); name a checkpoint "
            "such as <model_dir>/checkpoints/ckpt-1000, or move this one away"
        ) from error
    record = RunRecord.from_json(text, path)
    if not 0 <= step + record.input_offset < _MOST_STEPS:
        raise CheckpointError(
            f"the position in the data of {path} is {step + record.input_offset} (step {step}, input_offset "
            f"{record.input_offset}), expected a position from 0 to 2**53; name another checkpoint"
        )
    if record.global_batch_size is not None and not record.saved_batches.is_possible(step, step + record.input_offset):
        raise CheckpointError(
            f"the run record in {path} has batches of {record.saved_batches} examples, of which no run comes to step "
            f"{step}; name another checkpoint"
        )
    return step, record


def read_position(path: str, workers: Workers) -> tuple[bytes, int]:
    """Returns the position that this worker has saved with a verified checkpoint, or that the first of others has.

    Returns:
      (position, or b"" where none was saved; the number of workers that saved positions in files of their own, or 0).
    """
    names, pattern = list(commits.read_marker(path).files), commits.positions_of(os.path.basename(path))
    counts = [int(match[2]) for match in map(pattern.fullmatch, names) if match]
    count = workers.count if workers.count in counts else max(counts, default=0)
    own = commits.position_path(path, workers.index if count == workers.count else 0, count)
    if os.path.basename(own) not in names:
        return b"", count
    with files.open_regular(own) as file:
        return file.read(), count


def objects_of(graph: Any, checkpoint: Any) -> dict[int, Any]:
    """Returns the live objects by the numbers of their nodes in a saved object graph."""
    view = tf.train.TrackableView(checkpoint)
    objects, todo = {0: checkpoint}, [0]
    while todo:
        number = todo.pop()
        live = view.children(objects[number])
        for child in graph.nodes[number].children:
            if child.node_id not in objects and child.local_name in live:
                objects[child.node_id] = live[child.local_name]
                todo.append(child.node_id)
    for number, node in enumerate(graph.nodes):  # the slots of an old optimizer are not its children
        for slot in node.slot_variables:
            owner, original = objects.get(number), objects.get(slot.original_variable_node_id)
            if isinstance(owner, SlotOptimizer) and original is not None and slot.slot_name in owner.get_slot_names():
                objects[slot.slot_variable_node_id] = owner.get_slot(original, slot.slot_name)
    return objects


def misplaced(saved: SavedVariables, objects: Mapping[int, Any]) -> list[str]:
    """Lists the places that hold another variable now than in the checkpoint: "la/kernel there, lb/kernel here"."""
    live = saved.live
    normal = NameNormalizer(live)
    here = {number: leaf for number in saved.leaves if (leaf := live.leaf_of(objects.get(number)))}
    names = {normal(leaf.name) for leaf in live.leaves}
    found = []
    for number, leaf in here.items():
        there = saved.leaves[number]
        if there.origin and leaf.origin:
            other = here.get(there.origin.node) is not leaf.origin or there.kind != leaf.kind
        elif there.origin or leaf.origin:
            other = False  # names of TensorFlow's that do not say it
        else:
            one = normal(there.name)
            other = one != normal(leaf.name) and (one in names or all(count for count, _ in leaf.paths.values()))
        if other:
            found.append(f"{there.name} there, {leaf.name} here")
    return found


def differences(saved: SavedVariables) -> dict[str, list[str]]:
    """Returns the differences between a checkpoint and the objects here: dict from a title to names of variables.

    These are the names of layers, and not their places in lists, under the attribute of the trainer.
    """
    normal = NameNormalizer(saved.live)

    def key(leaf: NamedVariable) -> tuple[str, str]:
        if leaf.origin:
            return leaf.kind, key(leaf.origin)[1]
        root, (numbers, path) = min(leaf.paths.items(), key=lambda way: way[1])
        return "", f"{root}/{normal(leaf.name) if numbers else path}".rstrip("/")

    def shown(leaf: NamedVariable) -> str:
        kind, name = key(leaf)
        return f"{kind} of {name}" if kind else name

    def only(side: dict[Any, list[NamedVariable]], other: dict[Any, list[NamedVariable]]) -> list[str]:
        return [shown(leaf) for name, leaves in sorted(side.items()) for leaf in leaves[len(other.get(name, ())) :]]

    there, here = (groups(leaves, key) for leaves in (saved.leaves.values(), saved.live.leaves))
    pairs = [pair for name in sorted(there.keys() & here.keys()) for pair in zip(there[name], here[name])]
    return {
        "only here": only(here, there),
        "only there": only(there, here) + sorted(saved.attributes - saved.live.objects.keys()),
        "other shapes": [
            f"{shown(other)} {list(one.shape)} there, {list(other.shape)} here"
            for one, other in pairs if one.shape != other.shape
        ],
    }  # fmt: skip


def describe_differences(differences: Mapping[str, Iterable[str]]) -> str:
    """Describes the differences between a checkpoint and objects as a phrase: titles with names; "" for none."""
    return "; ".join(f"{why}: {printable(join_names([*them], most=4))}" for why, them in differences.items() if them)


def contents_of(objects: Mapping[str, Any]) -> dict[str, Contents]:
    """Returns the contents of the tables that do not change, and of layers that have learned from data.

    They have names that other starts give them too. Where several have one name, it says which one of how many.
    """
    found: dict[str, list[Contents]] = {}
    normal = None
    for name, entries in _found_in(objects):
        normal = normal or NameNormalizer(LiveVariables(objects))
        found.setdefault(normal(name), []).append(_contents(entries))
    return {
        name if len(alike) == 1 else f"{name} {number} of {len(alike)}": one
        for name, alike in found.items()
        for number, one in enumerate(alike, 1)
    }


def check_contents(objects: Mapping[str, Any], record: RunRecord, path: str) -> None:
    """Raises `UsageError` if a table or layer has other contents than the one of its name in a checkpoint."""
    if not record.contents:
        return
    for name, ours in contents_of(objects).items():
        theirs = record.contents.get(name, ours)
        if theirs.digest != ours.digest:
            raise MismatchError(
                f"{name} {_difference(ours, theirs)} in {path}, so that the weights there do not fit it; load or "
                "adapt what that run was trained with, or give it another name if it is meant to differ"
            )


def _found_in(objects: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yields (name, entries) of each table and adapted layer below every attribute."""
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
    """Returns the keys of a table in the order of their values; if the values are no numbers, with the values."""
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
