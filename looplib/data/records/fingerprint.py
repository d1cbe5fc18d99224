"""Fingerprints of data: they tell a resumed run whether its files have changed."""

import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base.messages import join_names
from looplib.data.records.files import THREADS, Files
from looplib.data.records.indexed import Numbered
from looplib.data.records.sources import Chain, Source, Subset, items

_PIECES, _PIECE_BYTES = 4, 1 << 10  # of a file, spread over it evenly, its ends included
_MOST = 1024  # names of a fingerprint; of more files, several share one
_DIGEST_BYTES = 8


def fingerprint(sources: Sequence[Source]) -> dict[str, str]:
    """Returns checksums of a part of the data, by file, in the order of the data.

    Sizes and some kilobytes of each file decide, neither times nor folders, so that a copy of the files has the same
    one. A change elsewhere in a file, which leaves its size, is not noticed. Other sources are one name each, and some
    of their records are read, twice; a source that does not give the same both times is left out.
    """
    whole = [source.source if isinstance(source, Subset) else source for source in sources]
    parts = [part for source in whole for part in (source.sources if isinstance(source, Chain) else [source])]
    of_each = [_of_files(part.files) if isinstance(part, Numbered) else _any_digests(part) for part in parts]
    found = list(itertools.chain(*of_each))
    folder = os.path.commonprefix([name for name, _ in found if "/" in name]).rpartition("/")[0]
    named: dict[str, str] = {}
    for group in np.array_split(np.arange(len(found)), min(len(found), _MOST)) if found else []:
        names = [found[number][0].removeprefix(f"{folder}/") for number in group]
        digests = [found[number][1] for number in group]
        name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        twice = sum(other == name or other.startswith(f"{name} (") for other in named)
        named[f"{name} ({twice + 1})" if twice else name] = digests[0] if len(names) == 1 else _hash(*digests)
    return named


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Describes how the data differs from what a fingerprint was taken of, in clauses; none if the two are equal."""
    lost = [name for name in before if name not in now]
    new = [name for name in now if name not in before]
    other = [name for name in now if before.get(name, now[name]) != now[name]]
    found = [
        f"{join_names(names)} {what if len(names) == 1 else what.replace('is ', 'are ').replace('has ', 'have ')}"
        for names, what in ((lost, "is missing"), (new, "is new"), (other, "has another content"))
        if names
    ]
    return found or ["its files come in another order"] * (list(before) != list(now))


def _of_files(files: Files) -> list[tuple[str, str]]:
    def digest(index: int) -> str:
        size = files.sizes[index]
        starts = {part * max(0, size - _PIECE_BYTES) // (_PIECES - 1) for part in range(_PIECES)}
        return _hash(size, files.read_at([(index, at, min(at + _PIECE_BYTES, size)) for at in sorted(starts)]))

    with ThreadPoolExecutor(THREADS) as pool:
        return list(zip(files.paths, pool.map(digest, range(len(files.paths)))))


def _any_digests(source: Source) -> list[tuple[str, str]]:
    numbers = sorted({part * (len(source) - 1) // (_PIECES - 1) for part in range(_PIECES)})
    name = type(source).__name__
    first, again = ([_content_or_error(source, number) for number in numbers] for _ in range(2))
    if first != again:
        logging.warning(
            "%s gives other values where a record is read again, so that a run that resumes does not notice whether "
            "the data has changed; draw random numbers in the dataset function, after context.records", name,
        )  # fmt: skip
        return []
    return [(name, _hash(len(source), *first))]


def _content_or_error(source: Source, number: int) -> Any:
    """Returns what a record has; of a bad one, the type of its error, which the run reports if it reads it."""
    try:
        (record,) = items(source, [number])
        return _content(record)
    except Exception as error:
        return type(error).__name__


def _content(record: Any) -> list[Any]:
    arrays = [np.asarray(leaf) for leaf in tf.nest.flatten(record, expand_composites=True)]
    return [array.tolist() if array.dtype.kind in "OSU" else (array.shape, array.tobytes()) for array in arrays]


def _hash(*values: Any) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=_DIGEST_BYTES).hexdigest()
