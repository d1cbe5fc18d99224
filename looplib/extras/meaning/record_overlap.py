"""Whether two sources of records share records: by their files, and by the content of some."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.extras.records.indexed import Numbered
from looplib.extras.records.reading import RecordReads
from looplib.extras.records.sources import Chain, Source, Subset, items
from looplib.files import is_remote

_PIECE = 100  # records that are read at once
Place = tuple[str, int]  # a file, or what else has records; and the number of a record in it


class ReadRecords:
    """The records that a call of `context.records` may give.

    Args:
      reads: how they are read.
    """

    def __init__(self, reads: RecordReads) -> None:
        self._places = _SourcePlaces(reads.source)
        self._source = reads.source
        kept, parts = list(reads.kept), reads.source.sources if isinstance(reads.source, Chain) else [reads.source]
        if len(kept) != len(parts):
            kept = [None] * len(parts)
        firsts = np.cumsum([0, *map(len, parts)])
        self.numbers: np.ndarray | None = None  # of those that a filter keeps; None for all
        if any(one is not None for one in kept):
            own = [np.arange(len(part)) if ids is None else ids for part, ids in zip(parts, kept)]
            self.numbers = np.sort(np.concatenate([first + ids for first, ids in zip(firsts, own)]))

    def __len__(self) -> int:
        return len(self._source) if self.numbers is None else len(self.numbers)

    def spread(self, most: int) -> list[int]:
        """Returns the numbers of at most so many records, which are spread over all evenly."""
        chosen = np.unique(np.linspace(0, len(self) - 1, min(most, len(self))).astype(np.int64))
        return (chosen if self.numbers is None else self.numbers[chosen]).tolist()

    def place(self, number: int) -> Place:
        """Returns where a record is."""
        return self._places.of(number)

    def has(self, place: Place) -> bool:
        """Returns whether the record at a place is among these."""
        number = self._places.number(place)
        if number is None or self.numbers is None:
            return number is not None
        found = np.searchsorted(self.numbers, number)
        return bool(found < len(self.numbers) and self.numbers[found] == number)

    @property
    def may_be_read(self) -> bool:
        """Returns whether reading some costs little and leaves no trace: looplib reads local files."""
        return _are_local_files(self._source)

    def hashes(self, numbers: Sequence[int]) -> Iterator[list[bytes]]:
        """Yields hashes of the content of records, of some at a time."""
        for start in range(0, len(numbers), _PIECE):
            yield [_hash(record) for record in items(self._source, numbers[start : start + _PIECE])]


class _SourcePlaces:
    """Where the records of a source are."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._inner: list[_SourcePlaces] = []
        if isinstance(source, Chain):
            self._inner = [_SourcePlaces(part) for part in source.sources]
        elif isinstance(source, Subset):
            self._inner, self._order = [_SourcePlaces(source.source)], np.argsort(source.ids, kind="stable")
        elif isinstance(source, Numbered):
            self._spans = [(_file(path), start, stop) for path, start, stop in source.spans()]
            self._firsts = np.cumsum([0, *(stop - start for _, start, stop in self._spans)])
            self._by_file = {
                path: (first, start, stop) for first, (path, start, stop) in zip(self._firsts, self._spans)
            }

    def of(self, number: int) -> Place:
        """Returns the place of a record."""
        source = self._source
        if isinstance(source, Chain):
            part = int(np.searchsorted(source.firsts, number, side="right")) - 1
            return self._inner[part].of(number - source.firsts[part])
        if isinstance(source, Subset):
            return self._inner[0].of(int(source.ids[number]))
        if isinstance(source, Numbered):
            index = int(np.searchsorted(self._firsts, number, side="right")) - 1
            path, start, _ = self._spans[index]
            return path, start + number - int(self._firsts[index])
        return f"the {type(source).__name__} {id(source)}", number

    def number(self, place: Place) -> int | None:
        """Returns the number of the record at a place; None if it is not among these."""
        source, (name, row) = self._source, place
        if isinstance(source, Chain):
            found = ((first, part.number(place)) for first, part in zip(source.firsts, self._inner))
            return next((first + number for first, number in found if number is not None), None)
        if isinstance(source, Subset):
            inner = self._inner[0].number(place)
            if inner is None:
                return None
            at = int(np.searchsorted(source.ids, inner, sorter=self._order))
            here = int(self._order[at]) if at < len(self._order) else None
            return here if here is not None and source.ids[here] == inner else None
        if isinstance(source, Numbered):
            first, start, stop = self._by_file.get(name, (0, 0, 0))
            return int(first) + row - start if start <= row < stop else None
        return row if name == f"the {type(source).__name__} {id(source)}" and row < len(source) else None


def _file(path: str) -> str:
    return path if is_remote(path) else os.path.realpath(path)


def _are_local_files(source: Source) -> bool:
    if isinstance(source, Chain):
        return all(map(_are_local_files, source.sources))
    if isinstance(source, Subset):
        return _are_local_files(source.source)
    return isinstance(source, Numbered) and not source.files.is_stored


def _hash(record: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=8)
    for leaf in tf.nest.flatten(record):
        if isinstance(leaf, bytes):
            digest.update(leaf)
        else:
            array = np.asarray(leaf)
            digest.update(repr(array.tolist()).encode() if array.dtype.kind in "OU" else array.tobytes())
    return digest.digest()
