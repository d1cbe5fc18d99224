"""Tables of embeddings in parts (`ShardedEmbedding`), each as one value, so that rows are taken by their ids."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import numpy as np
import tensorflow as tf

from looplib.compat.row_updates import changes_owners, shape_of
from looplib.task.sharded_embedding import ShardedEmbedding
from looplib.weights.names import PART, LiveVariables, NamedVariable, SavedVariables, groups, whole_name
from looplib.weights.sources import StoredTensor

_T = TypeVar("_T", NamedVariable, StoredTensor)


def _tables(values: Iterable[_T], name: Callable[[_T], str]) -> dict[str, list[_T]]:
    """Returns the parts of each table among some values, in the order of their rows, by the name of the table."""
    named = [(name(value), value) for value in values]
    numbered = [(whole_name(one), int(found[1]), value) for one, value in named if (found := PART.search(one))]
    tables = {}
    for whole, alike in groups(numbered, lambda part: part[0]).items():
        numbers, parts = zip(*sorted((part[1:] for part in alike), key=lambda part: part[0]))
        shapes = [part.shape for part in parts]
        sizes = [shape[0] or 0 for shape in shapes if len(shape) == 2 and shape[1:] == shapes[0][1:]]
        in_order = numbers == tuple(range(len(sizes))) and len(sizes) == len(parts)
        if in_order and {*sizes[:-1]} <= {sizes[0]} and sizes[-1] <= sizes[0]:  # only the last may be smaller
            tables[whole] = list(parts)
    return {whole: parts for whole, parts in tables.items() if all(one != whole for one, _ in named)}


def join_live(live: LiveVariables) -> None:
    """Puts each table here in place of its parts, with an open number of rows, and its slots too."""
    layers = _layers(live)
    known = {id(leaf) for leaf in live.leaves}
    tables = [[leaf for one in layer.tables if (leaf := live.leaf_of(one)) and id(leaf) in known] for layer in layers]
    live.leaves = _joined(live.leaves, filter(None, tables), is_open=True)


def _layers(live: LiveVariables) -> list[ShardedEmbedding]:
    """Returns the layers whose row i is that of id i."""
    layers = (part for part in live.parts if isinstance(part, ShardedEmbedding))
    return [layer for layer in layers if not changes_owners(layer.tables[0])]


def join_saved(saved: SavedVariables) -> None:
    """Puts each table of a checkpoint in place of its parts, and its slots too."""
    if any(PART.search(leaf.name) for leaf in saved.live.leaves if not leaf.parts):
        return  # variables here that are of no ShardedEmbedding have such names

    def name(leaf: NamedVariable) -> str:  # with its place, as several tables may have one name
        place = whole_name(leaf.path) if PART.search(leaf.path) else min(leaf.paths, default="")
        return f"{place}//{leaf.name}"

    leaves = list(saved.leaves.values())
    leaves = _joined(leaves, _tables((leaf for leaf in leaves if not leaf.origin), name).values())
    saved.leaves = {(leaf.parts or [leaf])[0].node: leaf for leaf in leaves}


def join_named(saved: Mapping[str, NamedVariable]) -> dict[str, NamedVariable]:
    """Returns the values of a file by name, with each table in place of its parts."""
    leaves = _joined(list(saved.values()), _tables(saved.values(), lambda leaf: leaf.name).values())
    return {leaf.name: leaf for leaf in leaves}


def join_listed(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns tensors by name, with each table in place of its parts."""
    found = dict(tensors)
    for whole, parts in _tables(tensors.values(), lambda tensor: tensor.name).items():
        rows = sum(part.shape[0] for part in parts)
        found[whole] = dataclasses.replace(parts[0], name=whole, shape=(rows, *parts[0].shape[1:]), parts=len(parts))
        found = {name: one for name, one in found.items() if one not in parts}
    return dict(sorted(found.items()))


def _joined(
    leaves: Iterable[NamedVariable], tables: Iterable[list[NamedVariable]], is_open: bool = False
) -> list[NamedVariable]:
    whole: dict[int, NamedVariable] = {}

    def join(parts: list[NamedVariable]) -> NamedVariable:
        first = parts[0]
        rows = None if is_open else sum(part.shape[0] or 0 for part in parts)
        paths = {root: (count, whole_name(path)) for root, (count, path) in first.paths.items()}
        joined = NamedVariable(
            whole_name(first.name), (rows, *first.shape[1:]), first.floating, paths, first.variable, first.key,
            owned=first.owned, kind=first.kind, node=first.node, parts=parts,
        )  # fmt: skip
        whole.update((id(part), joined) for part in parts)
        return joined

    for parts in tables:
        join(parts)
    slots = [leaf for leaf in leaves if id(leaf.origin) in whole]
    for alike in groups(slots, lambda leaf: (id(whole[id(leaf.origin)]), leaf.kind, *sorted(leaf.paths))).values():
        origin = whole[id(alike[0].origin)]
        of_part = {id(leaf.origin): leaf for leaf in alike}
        if len(of_part) == len(alike) == len(origin.parts):
            join([of_part[id(part)] for part in origin.parts]).origin = origin
    return list({id(one): one for leaf in leaves for one in [whole.get(id(leaf), leaf)]}.values())


def whole_value(leaf: NamedVariable, read: Callable[[str], np.ndarray]) -> np.ndarray:
    """Returns all of a saved value."""
    found = [read(part.key) for part in leaf.parts or [leaf]]
    return np.concatenate(found) if len(found) > 1 else found[0]


def row_values(
    here: NamedVariable, there: NamedVariable, read: Callable[[str], np.ndarray]
) -> Iterator[tuple[tf.Variable, np.ndarray]]:
    """Yields the parts of a table here with their new values, one at a time; rows that are only here keep theirs.

    Args:
      here: the table.
      there: the saved one, in any number of parts, or a value `[rows, dim]`.
      read: returns the saved value of a key. It is asked for each part in the order of the rows.
    """
    for part, start, stop in _with_rows(here):
        if not part.variable.shape[0]:
            continue  # another worker has it
        pieces = [
            read(saved.key)[max(start - first, 0) : stop - first]
            for saved, first, last in _with_rows(there)
            if first < stop and start < last
        ]
        count = sum(map(len, pieces))
        if count and count < stop - start:
            pieces.append(part.variable.numpy()[count:])
        if count:
            yield part.variable, np.concatenate(pieces) if len(pieces) > 1 else pieces[0]


def _with_rows(leaf: NamedVariable) -> Iterator[tuple[NamedVariable, int, int]]:
    """Yields each part with the id of its first row, and of the first one after it."""
    start = 0
    for part in leaf.parts or [leaf]:
        yield part, start, (start := start + _rows_of(part))


def _rows_of(part: NamedVariable) -> int:
    """Returns the number of rows of a part, also of one that another worker has."""
    return part.shape[0] or 0 if part.variable is None else shape_of(part.variable)[0]


def count_rows(leaf: NamedVariable) -> int:
    """Returns how many rows a table has."""
    return sum(_rows_of(part) for part in leaf.parts or [leaf])


def differing_tables(saved: SavedVariables) -> list[str]:
    """Returns phrases about the tables that a checkpoint has in other parts or with other rows; joins all tables."""
    live = saved.live
    layers = {id(live.leaf_of(part.tables[0])): part for part in _layers(live)}
    join_live(live)
    join_saved(saved)
    there = {leaf.path: leaf for leaf in saved.leaves.values() if leaf.parts and not leaf.origin}
    found = []
    for here in live.leaves:
        layer, other = layers.get(id(here.parts[0])) if here.parts else None, there.get(here.path)
        if layer and other:
            pairs = {"shards": (len(other.parts), len(here.parts)), "rows": (other.shape[0], layer.rows)}
            differ = [f"{name}={one} there and {two} here" for name, (one, two) in pairs.items() if one != two]
            found += [f"{layer.name} has {', '.join(differ)}"] * bool(differ)
    return found
