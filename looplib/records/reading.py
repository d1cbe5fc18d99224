"""Data sets of records: what an order picks, read ahead by threads, in the order of the run."""

import collections
import concurrent.futures
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.errors import UsageError
from looplib.records.files import THREADS
from looplib.records.order import Picks
from looplib.records.sources import Source, items

_AHEAD = 4  # chunks of batches whose pieces are read before they are used


def read(
    source: Source, picks: tf.data.Dataset, *, by_pieces: bool, lanes: int = 64, may_lack: bool = False
) -> tf.data.Dataset:
    """Reads the records that an order picks.

    Args:
      source: the records.
      picks: chunks of batches: (`Picks` of int64 `[k, b]`, and anything else, which is passed on).
      by_pieces: whether neighbouring records are read at once, as the picks say; else each by itself.
      lanes: how many pieces a batch takes records from, at most.
      may_lack: whether the source has None in place of damaged records, which are left out of batches; k is 1 then.

    Returns:
      A data set of (records, and anything else): strings `[k, b]`, or a structure of arrays `[k, b, ...]`; of records
      alone if there is nothing else.
    """
    element = _Element(source)
    pieces = _Pieces(source, lanes) if by_pieces else None

    def announce(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        pieces.announce(starts.ravel(), stops.ravel())
        return starts

    def fetch(ids: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Any:
        if pieces is None:
            found = items(source, ids.ravel())
        else:
            found = pieces.fetch(ids.ravel(), starts.ravel(), stops.ravel())
        if not may_lack:
            return element.pack(found, ids.shape)
        there = np.asarray([record is not None for record in found])
        found = [record for record in found if record is not None]
        return [*element.pack(found, (1, len(found))), there]

    @tf.autograph.experimental.do_not_convert
    def announced(picks: Picks, *others: Any) -> tuple[Any, ...]:
        starts = tf.numpy_function(announce, [picks.starts, picks.stops], tf.int64)
        return picks._replace(starts=tf.ensure_shape(starts, picks.starts.shape)), *others

    @tf.autograph.experimental.do_not_convert
    def fetched(picks: Picks, *others: Any) -> Any:
        leaves = tf.numpy_function(fetch, list(picks), element.dtypes + [tf.bool] * may_lack)
        if may_lack:
            there = tf.ensure_shape(leaves.pop(), [None])
            others = tf.nest.map_structure(lambda other: tf.boolean_mask(other, there, axis=1), others)
        records = element.unpack(leaves, [1, None] if may_lack else picks.ids.shape)
        return (records, *others) if others else records

    if pieces is None:
        return picks.map(fetched, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return picks.map(announced).prefetch(_AHEAD).map(fetched).prefetch(1)


class _Pieces:
    """The pieces of a source that are in use, read by threads before they are needed.

    Whatever is asked for is found: a piece that is not there is read. A piece is dropped once each of its records was
    given, or when many newer ones are there.
    """

    def __init__(self, source: Source, lanes: int) -> None:
        self._source = source
        self._lanes = self._most = lanes
        self._found: collections.OrderedDict[tuple[int, int], concurrent.futures.Future] = collections.OrderedDict()
        self._given: collections.Counter[tuple[int, int]] = collections.Counter()
        self._lock = threading.Lock()
        self._pool = concurrent.futures.ThreadPoolExecutor(THREADS, "looplib-records")

    def announce(self, starts: np.ndarray, stops: np.ndarray) -> None:
        """Starts to read the pieces that are not there."""
        pieces = set(zip(starts.tolist(), stops.tolist()))
        self._most = max(self._most, self._lanes + (_AHEAD + 2) * len(pieces))
        for piece in sorted(pieces):
            self._get(piece)

    def _get(self, piece: tuple[int, int]) -> concurrent.futures.Future:
        with self._lock:
            if piece not in self._found:
                self._found[piece] = self._pool.submit(items, self._source, range(*piece))
                while len(self._found) > self._most:
                    self._given.pop(self._found.popitem(last=False)[0], None)
            self._found.move_to_end(piece)
            return self._found[piece]

    def fetch(self, ids: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[Any]:
        """Returns records by number."""
        pieces = list(zip(starts.tolist(), stops.tolist()))
        counts = collections.Counter(pieces)
        read = {piece: self._get(piece).result() for piece in counts}
        with self._lock:
            self._given.update(counts)
            for piece in counts:
                if self._given[piece] >= piece[1] - piece[0]:
                    del self._given[piece]
                    self._found.pop(piece, None)
        return [read[piece][at] for piece, at in zip(pieces, (ids - starts).tolist())]


class _Element:
    """How records become tensors."""

    def __init__(self, source: Source) -> None:
        self._like = next(record for number in range(len(source)) if (record := items(source, [number])[0]) is not None)
        leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(self._like)]
        self.dtypes = [tf.string if leaf.dtype.kind in "SUO" else tf.as_dtype(leaf.dtype) for leaf in leaves]
        self._shapes = [list(leaf.shape) for leaf in leaves]

    def pack(self, records: list[Any], shape: tuple[int, ...]) -> list[np.ndarray]:
        """Returns the leaves of records, each with the leading shape of the picks."""
        plain = isinstance(self._like, bytes)
        columns = [records] if plain else zip(*map(tf.nest.flatten, records))
        return [self._column(*leaf, shape) for leaf in zip(columns, self.dtypes, self._shapes)]

    def _column(self, values: Sequence[Any], dtype: tf.DType, inner: list[int], shape: tuple[int, ...]) -> np.ndarray:
        if dtype == tf.string and not inner:
            column = np.empty(len(values), object)
            column[:] = values
            return column.reshape(shape)
        try:
            return np.stack(values).astype(dtype.as_numpy_dtype, copy=False).reshape(*shape, *inner)
        except ValueError as error:
            raise UsageError(
                "the records have arrays of different shapes, such as "
                f"{sorted({np.shape(value) for value in values})[:2]}, which make no batch; use a source of serialized "
                "records, and parse them in dataset.map"
            ) from error

    def unpack(self, leaves: list[tf.Tensor], shape: Any) -> Any:
        """Returns the structure of records with the static shapes that are known."""
        leaves = [tf.ensure_shape(leaf, [*shape, *inner]) for leaf, inner in zip(leaves, self._shapes)]
        return tf.nest.pack_sequence_as(self._like, leaves)
