"""Records read: by a data set, ahead of the run and in its order; or once all, for numbers that plans need."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import io
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base import files
from looplib.base.messages import join_names, with_cure
from looplib.data.arrays import type_of, without_lists
from looplib.data.records.blocks import MOST_LANES, RecordSelection
from looplib.data.records.files import THREADS, new_pool
from looplib.data.records.index import Numbered
from looplib.data.records.sources import Chain, ReadsMany, Source, Subset, items, mean_bytes, opened
from looplib.errors import RecordsError

# Records, and their bytes, whose pieces are read before they are used.
_AHEAD, _AHEAD_BYTES = 4096, 1 << 25
_BATCH = 256  # records that the function is given at once
_HEAD = 1 << 12  # bytes in front of the numbers in a file, at most
_SAMPLE = 256  # records whose kept values are computed again, to compare
_Piece = tuple[int, int]  # its first record, and the one after its last


@dataclasses.dataclass
class RecordReads:
    """How the records of a data set are read; tf.data itself shows only a map. `str` names the reader.

    Attributes:
      source: the records.
      by_pieces: whether neighbouring records are read at once.
      may_be_by_pieces: whether they could be.
      calls: of its stages: that reads ahead, if there is one, and that hands out.
      records: how many were read.
    """

    source: Source
    by_pieces: bool
    may_be_by_pieces: bool
    calls: list[int] = dataclasses.field(default_factory=lambda: [0, 0])
    records: int = 0

    @property
    def at_once(self) -> int:
        """How many pieces, or records, are read at once."""
        return THREADS if self.by_pieces else 1

    def __str__(self) -> str:
        own = self._slow
        if own is None:
            return "the files of context.records"
        return f"{type(own).__name__}.{'__getitems__' if isinstance(own, ReadsMany) else '__getitem__'}"

    @property
    def advice(self) -> str:
        """Advice for the case that reading takes the time."""
        own, advice = self._slow, ""
        if self.may_be_by_pieces and not self.by_pieces:
            advice = f"give context.records block=16 or more: {THREADS} blocks are read at once; or "
        if own is None:
            return advice + "move the files nearer"
        if isinstance(own, ReadsMany):
            return advice + f"let {self} read in more threads if it waits; if it computes, write its records to files"
        return advice + (
            f"give {type(own).__name__} a method __getitems__(numbers), which reads several records at once, in "
            "threads if it waits; if it computes, write its records to files"
        )

    @property
    def _slow(self) -> Source | None:
        """The source of the user's or of a library's; None if all are files that looplib reads."""
        whole = self.source.source if isinstance(self.source, Subset) else self.source
        parts = whole.sources if isinstance(whole, Chain) else [whole]
        return next((part for part in parts if not isinstance(part, Numbered)), None)


class RecordSupply:
    """Hands records to the pipelines of this process, which call its methods.

    Args:
      source: the records.
      reads: says whether neighbouring records are read at once; counts the calls.
      may_lack: see `read_records`.
      like: see `read_records`.

    Attributes:
      element: how records become tensors.
      types: of what `fetch` returns.
    """

    def __init__(
        self, source: Source, reads: RecordReads, *, may_lack: bool = False, like: Source | None = None
    ) -> None:
        self._source, self._reads, self._may_lack = source, reads, may_lack
        self.element = _Element(source if like is None else like)
        self.types = self.element.dtypes + [tf.bool] * may_lack
        self._pieces = _Pieces(source) if reads.by_pieces else None

    def announce(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Starts to read pieces int64 `[k, b]`; returns `starts`."""
        self._pieces.announce(starts.ravel(), stops.ravel())
        self._reads.calls[0] += 1
        return starts

    def fetch(self, ids: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[np.ndarray]:
        """Returns the leaves of the records of a `RecordSelection`, and which ids have one if some may lack."""
        if self._pieces is None:
            found = items(self._source, ids.ravel())
        else:
            found = self._pieces.fetch(ids.ravel(), starts.ravel(), stops.ravel())
        self._reads.calls[1] += 1
        self._reads.records += len(found)
        if not self._may_lack:
            return self.element.pack(found, ids.shape)
        there = np.asarray([record is not None for record in found])
        found = [record for record in found if record is not None]
        return [*self.element.pack(found, (1, len(found))), there]


# Calls a method of a `RecordSupply` in a graph, with tensors, for results of some types.
Call = Callable[[Callable[..., Any], list[tf.Tensor], Any], Any]


def read_records(
    source: Source,
    picks: tf.data.Dataset,
    reads: RecordReads,
    *,
    may_lack: bool = False,
    like: Source | None = None,
    call: Call | None = None,
) -> tf.data.Dataset:
    """Reads the records that an order picks.

    Args:
      source: the records.
      picks: chunks of batches: (`RecordSelection` of int64 `[k, b]`, and anything else, which is passed on).
      reads: says whether neighbouring records are read at once, as the picks say; counts the calls.
      may_lack: whether the source has None in place of damaged records, which are left out of batches; k is 1 then.
      like: a source whose records have the structure of all; None for `source` itself.
      call: calls the `RecordSupply` of another process; None for this one.

    Returns:
      A data set of (records, and anything else): strings `[k, b]`, or a structure of arrays `[k, b, ...]`; of records
      alone if there is nothing else.
    """
    supply = RecordSupply(source, reads, may_lack=may_lack, like=like)

    def call_here(method: Callable[..., Any], inputs: list[tf.Tensor], types: Any) -> Any:
        return tf.numpy_function(functools.partial(method, supply), inputs, types)

    call = call or call_here

    @tf.autograph.experimental.do_not_convert
    def announced(picks: RecordSelection, *others: Any) -> tuple[Any, ...]:
        starts = call(RecordSupply.announce, [picks.starts, picks.stops], tf.int64)
        return RecordSelection(picks.ids, tf.ensure_shape(starts, picks.starts.shape), picks.stops), *others

    @tf.autograph.experimental.do_not_convert
    def fetched(picks: RecordSelection, *others: Any) -> Any:
        leaves = call(RecordSupply.fetch, list(picks), supply.types)
        if may_lack:
            there = tf.ensure_shape(leaves.pop(), [None])
            others = tf.nest.map_structure(lambda other: tf.boolean_mask(other, there, axis=1), others)
        records = supply.element.unpack(leaves, [1, None] if may_lack else picks.ids.shape)
        return (records, *others) if others else records

    # One thread at a time runs Python. Where many wait for the disk, they are the source's.
    if not reads.by_pieces:
        return picks.map(fetched).prefetch(2)
    chunk = picks.element_spec[0].ids.shape.num_elements() or _AHEAD // 4
    ahead = int(min(_AHEAD, _AHEAD_BYTES / mean_bytes(source)) // chunk)
    return picks.map(announced).prefetch(max(2, ahead)).map(fetched).prefetch(1)


def measure(source: Source | str, function: Callable[[Any], tf.Tensor], *, cache: str | None = None) -> np.ndarray:
    """Computes a number for each record of a source, in one parallel pass.

    Plans need such numbers before a run starts, so that each position of the run holds an example.

        lengths = looplib.measure(records, lambda record: tf.strings.length(record), cache="/data/lengths.npy")
        context.records(looplib.Kept(lengths < 512, records))

    What is kept in `cache` is used again if it has as many numbers as there are records, and if the function still
    gives the same for 256 records spread over the source. Otherwise all are computed again, with a warning. A change
    of the function that makes a difference for few records may be missed: give each version a file of its own.

    Args:
      source: records as `looplib.open_records` returns them, or the names of their files.
      function: from a batch of records, as `context.records` gives them, to a number or bool for each, `[b]`; of
        TensorFlow ops.
      cache: the file to keep the numbers in, as `numpy.save` writes it; None keeps nothing.

    Returns:
      `[n]`, in the order of the records.

    Raises:
      UsageError: if there is no record, or the function gives something else than one number for each.
    """
    source = opened(source)
    if not len(source):
        raise RecordsError("looplib.measure was given a source without records; check where the data is read from")
    kept = _load(cache, _HEAD + len(source) * np.dtype(complex).itemsize) if cache else None
    if kept is not None:
        sample = np.unique(np.linspace(0, len(source) - 1, _SAMPLE).astype(np.int64))
        if kept.shape == (len(source),):
            numbers, before = _computed(source, function, sample), kept[sample]
            if np.all((numbers == before) | ((numbers != numbers) & (before != before))):  # or both are NaN
                return kept
        logging.warning("the numbers in %s are of other records, or of another function; computing them again", cache)
    found = _computed(source, function, np.arange(len(source)))
    if cache:
        content = io.BytesIO()
        np.save(content, found, allow_pickle=False)
        try:
            files.write_whole(cache, content.getvalue(), durable=False)
        except (OSError, tf.errors.OpError) as error:
            logging.warning("the numbers of records cannot be kept in %s: %s", cache, with_cure(error))
    return found


def _load(path: str, most: int) -> np.ndarray | None:
    with contextlib.suppress(Exception), files.open_regular(path) as file:  # numpy's of a damaged head have many types
        return np.lib.format.read_array(io.BytesIO(file.read(most)), allow_pickle=False)
    return None


def _computed(source: Source, function: Callable[[Any], tf.Tensor], numbers: np.ndarray) -> np.ndarray:
    picks = (
        tf.data.Dataset.from_tensor_slices(numbers)
        .batch(_BATCH)
        .map(lambda ids: (RecordSelection(ids[None], ids[None], ids[None] + 1),))
    )
    batches = read_records(source, picks, RecordReads(source, by_pieces=False, may_be_by_pieces=False)).unbatch()
    measured = batches.map(function, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).prefetch(tf.data.AUTOTUNE)
    spec = measured.element_spec
    found = [] if tf.nest.is_nested(spec) else list(measured.as_numpy_iterator())
    if not found or any(part.ndim != 1 for part in found) or sum(map(len, found)) != len(numbers):
        raise RecordsError(
            f"the function of looplib.measure gives {spec} for a batch; expected one number for each record, [b]"
        )
    return np.concatenate(found)


class _Pieces:
    """The pieces of a source that are in use, read by threads before they are needed.

    Whatever is asked for is found: a piece that is not there is read. A piece is dropped once each of its records was
    given. Those that a run entered in the middle never come to that, and are dropped when there are many newer ones.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._found: dict[_Piece, concurrent.futures.Future] = {}  # the one that was used last comes last
        self._waiting: collections.Counter[_Piece] = collections.Counter()  # chunks that were announced, of each piece
        self._given: collections.Counter[_Piece] = collections.Counter()  # records, of each piece
        self._lock = threading.Lock()
        self._pool = new_pool()

    def announce(self, starts: np.ndarray, stops: np.ndarray) -> None:
        """Starts to read the pieces that are not there."""
        pieces = set(zip(starts.tolist(), stops.tolist()))
        with self._lock:
            self._waiting.update(pieces)
            for piece in pieces:
                self._get(piece)

    def _get(self, piece: _Piece) -> concurrent.futures.Future:
        found = self._found.pop(piece, None) or self._pool.submit(items, self._source, range(*piece))
        self._found[piece] = found
        return found

    def fetch(self, ids: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[Any]:
        """Returns records by number."""
        pieces = list(zip(starts.tolist(), stops.tolist()))
        counts = collections.Counter(pieces)
        with self._lock:
            futures = {piece: self._get(piece) for piece in counts}
        read = {piece: future.result() for piece, future in futures.items()}
        with self._lock:
            for piece, count in counts.items():
                self._waiting[piece] -= 1
                self._given[piece] += count
                if self._given[piece] >= piece[1] - piece[0]:
                    self._drop(piece)
            unused = [piece for piece in self._found if self._waiting[piece] <= 0]
            for piece in unused[:-MOST_LANES]:
                self._drop(piece)
        return [read[piece][at] for piece, at in zip(pieces, (ids - starts).tolist())]

    def _drop(self, piece: _Piece) -> None:
        for of_pieces in (self._found, self._given, self._waiting):
            of_pieces.pop(piece, None)


class _Element:
    """How records become tensors.

    Raises:
      UsageError: if no record is good, or two sources of a chain have records of different structures.
    """

    def __init__(self, source: Source) -> None:
        parts = source.sources if isinstance(source, Chain) else [source]
        firsts = [_first_of(part) for part in parts if len(part)] or [_first_of(source)]
        self._like = without_lists(firsts[0])
        structures = [structure_of(record) for record in firsts]
        other = next((number for number, found in enumerate(structures) if found != structures[0]), None)
        if other is not None:
            names = [name for name, part in zip(source.names, parts) if len(part)]
            raise RecordsError(
                f"the sources {names[0]!r} and {names[other]!r} of a mixture have records of different structures: "
                f"{structures[0]} and {structures[other]}; a batch holds records of both, so expected one structure, "
                "with equal types and shapes; convert or pad the records of one, or give serialized records of both "
                "and parse them in dataset.map"
            )
        leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(self._like)]
        self.dtypes = [type_of(leaf) for leaf in leaves]
        self._shapes = [list(leaf.shape) for leaf in leaves]

    def pack(self, records: list[Any], shape: tuple[int, ...]) -> list[np.ndarray]:
        """Returns the leaves of records, each with the leading shape of the picks."""
        columns = zip(*map(self._leaves, records)) if tf.nest.is_nested(self._like) else [records]
        return [self._column(*leaf, shape) for leaf in zip(columns, self.dtypes, self._shapes)]

    def _leaves(self, record: Any) -> list[Any]:
        try:
            return list(_parts(record, self._like))
        except (KeyError, TypeError, ValueError) as error:
            raise RecordsError(
                f"a record is {structure_of(record)}, and the first one {structure_of(self._like)}, which make no "
                "batch; give records of one structure, or serialized ones, and parse them in dataset.map"
            ) from error

    def _column(self, values: Sequence[Any], dtype: tf.DType, inner: list[int], shape: tuple[int, ...]) -> np.ndarray:
        if dtype == tf.string and not inner:
            column = np.empty(len(values), object)
            column[:] = values
            return column.reshape(shape)
        try:
            return np.stack(values).astype(dtype.as_numpy_dtype, "K", "same_kind", copy=False).reshape(*shape, *inner)
        except (TypeError, ValueError) as error:
            kinds = sorted({_text(np.asarray(value)) for value in values})
            raise RecordsError(
                f"the records have arrays of different shapes or types, such as {join_names(kinds, 2)}, which make no "
                "batch; use a source of serialized records, and parse them in dataset.map"
            ) from error

    def unpack(self, leaves: list[tf.Tensor], shape: Any) -> Any:
        """Returns the structure of records with the static shapes that are known."""
        leaves = [tf.ensure_shape(leaf, [*shape, *inner]) for leaf, inner in zip(leaves, self._shapes)]
        return tf.nest.pack_sequence_as(self._like, leaves)


def _parts(record: Any, like: Any) -> Iterator[Any]:
    """Yields the parts of a record in the order of `tf.nest.flatten(like)`; raises `KeyError` and others without one.

    A dict may have further fields, such as a column that newer files have.
    """
    if isinstance(like, Mapping):
        for name in sorted(like):
            yield from _parts(record[name], like[name])
    elif isinstance(like, tuple):
        for part, like_part in zip(record, like, strict=True):
            yield from _parts(part, like_part)
    else:
        yield record


def _first_of(source: Source) -> Any:
    """Returns the first good record of a source."""
    found = (items(source, [number])[0] for number in range(len(source)))
    record = next((record for record in found if record is not None), None)
    if record is None:
        raise RecordsError(f"each of {len(source)} records is damaged; restore the files from a copy")
    return record


def _text(leaf: np.ndarray) -> str:
    nothing = leaf.dtype == object and not leaf.ndim and leaf[()] is None
    return "None" if nothing else f"{type_of(leaf).name} {list(leaf.shape)}"


def structure_of(record: Any) -> str:
    """Describes the structure of a record or its spec, with types and shapes: {x: float32 [2, 3], y: int64 []}, say."""
    if isinstance(record, Mapping):
        return "{" + ", ".join(f"{key}: {structure_of(record[key])}" for key in sorted(record)) + "}"
    if isinstance(record, (list, tuple)):
        return "(" + ", ".join(map(structure_of, record)) + ")"
    if isinstance(record, tf.TypeSpec):
        return f"{record.dtype.name} {record.shape}"
    return _text(np.asarray(record))
