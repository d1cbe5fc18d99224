"""Plans of records: all, filtered, packed, and in buckets of length."""

import bisect
import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from looplib.base.messages import whole_number
from looplib.data.order import Locate, OrderKey, Plan
from looplib.data.records.blocks import permutation_key, shuffled
from looplib.data.records.sources import Source, opened
from looplib.errors import OrderError


class RecordPlan(Plan):
    """A plan whose ids may be numbers of records, for `InputContext.records`.

    Attributes:
      source: the records that its ids are numbers of; None where ids are all there is.
      kept: the ids, of each source, that may come in place of damaged records; None for all.
    """

    source: Source | None = None
    kept: Sequence[np.ndarray | None] = (None,)

    def to_read(self, found: Any) -> tuple[tf.Tensor, ...]:
        """Divides located examples into the numbers of their records, int64 `[b]`, and what else is known of them.

        Raises:
          UsageError: if an example is not one record.
        """
        return (found,)


class All(RecordPlan):
    """All records of a source, or ids from 0 to a size, epoch after epoch.

    Args:
      size: the number of ids.
      source: see `RecordPlan`.
    """

    def __init__(self, size: int, source: Source | None) -> None:
        self.size, self.source = size, source

    def endless(self, key: OrderKey) -> Locate:
        """See `Plan`; each epoch is a keyed permutation."""
        return shuffled_epochs(self.size, key)

    def once(self) -> Locate:
        """See `Plan`."""
        return lambda positions: positions


class Kept(RecordPlan):
    """The examples that a filter keeps, epoch after epoch, each a keyed permutation.

    The filter has decided before the run, so each position holds an example, and a run resumes from its position.

        context.indices(looplib.Kept(lengths < 512)).map(lambda ids: tf.gather(x, ids))

    Args:
      chosen: bool `[n]`, whether each of n examples is kept; or int `[size]`, the ids of those that are.
      source: records, or the names of their files, for `context.records(looplib.Kept(chosen, source))`; None for ids.

    Attributes:
      ids: of the examples that are kept, int64 `[size]`.

    Raises:
      UsageError: if nothing is kept, or ids are not those of records.
    """

    def __init__(self, chosen: np.ndarray, source: Source | str | None = None) -> None:
        self.source = opened_for(source, len(chosen) if np.asarray(chosen).dtype == bool else None)
        self.ids = chosen_ids(chosen, None if self.source is None else len(self.source))
        self.size, self.kept = len(self.ids), (self.ids,)

    def endless(self, key: OrderKey) -> Locate:
        """See `Plan`; examples are int64 ids `[b]`."""
        ids, places = tf.constant(self.ids), shuffled_epochs(self.size, key)
        return lambda positions: tf.gather(ids, places(positions))

    def once(self) -> Locate:
        """See `Plan`."""
        ids = tf.constant(self.ids)
        return lambda positions: tf.gather(ids, positions)


def shuffled_epochs(size: int, key: OrderKey) -> Locate:
    """Returns the function from positions in a training to places below `size`, each epoch a keyed permutation.

    It is not the one of `Ids`, whose op is slow for small sizes, and takes no empty tensor.
    """

    def locate(positions: tf.Tensor) -> tf.Tensor:
        sizes = tf.fill(tf.shape(positions), tf.constant(size, tf.int64))
        return shuffled(positions % size, sizes, permutation_key(key.seed, positions // size, 0))

    return locate


def chosen_ids(chosen: Any, count: int | None = None) -> np.ndarray:
    """Returns the ids of chosen examples, int64 `[size]`; for the arguments see `Kept`.

    Args:
      chosen: bool `[n]`, or ids.
      count: how many examples there are; None where that is not known.

    Raises:
      UsageError: for anything else, no example, or one that is not there.
    """
    chosen = np.asarray(chosen)
    ids = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
    if chosen.ndim != 1 or ids.dtype.kind not in "iu" or not ids.size or ids.min() < 0:
        raise OrderError(
            f"the examples to keep are {chosen.dtype} {list(chosen.shape)}, {ids.size} ids; expected bool [n], with "
            "one example to keep at least, or the ids of these, whole numbers from 0"
        )
    most = ids.max() if chosen.dtype != bool else len(chosen) - 1
    if count is not None and most >= count:
        raise OrderError(f"the examples to keep go up to id {most}, and there are {count}; expected smaller ids")
    return ids.astype(np.int64)


def opened_for(source: Source | str | None, examples: int | None) -> Source | None:
    """Opens the records of a plan, and checks that there is one for each example that the plan knows of.

    Raises:
      UsageError: if there are more, or fewer.
    """
    if source is None:
        return None
    source = opened(source)
    if examples is not None and len(source) != examples:
        raise OrderError(
            f"a plan was given numbers of {examples} examples and a source of {len(source)} records; expected one "
            "number for each record"
        )
    return source


def whole_numbers(name: str, values: Any) -> np.ndarray:
    """Checks lengths and returns them as int64 `[n]`.

    Args:
      name: what they are, for the message.
      values: whole numbers of at least 0, `[n]`.

    Raises:
      UsageError: for anything else, and for none.
    """
    array = np.asarray(values)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu" or array.min() < 0:
        least = f", the smallest {array.min()}" if array.size and array.dtype.kind in "iuf" else ""
        raise OrderError(
            f"{name} are {array.dtype} {list(array.shape)}{least}; expected whole numbers of at least 0, one for each "
            "example"
        )
    return array.astype(np.int64)


_Kind = tuple[tuple[tuple[int, int], ...], int]  # (length, times) of the pieces of a row, the number of such rows


class PackedRows(NamedTuple):
    """Which token stands where in rows of packed documents.

    Attributes:
      documents: int64 `[b, row_length]`, the id of each token's document; 0 in padding.
      places: int64 `[b, row_length]`, the place of the token in its document; 0 in padding.
      segments: int32 `[b, row_length]`, which piece of the row the token belongs to, from 1; 0 in padding. Tokens
        should attend to those of their segment only.
      positions: int32 `[b, row_length]`, the place of the token in its piece; 0 in padding.
    """

    documents: tf.Tensor
    places: tf.Tensor
    segments: tf.Tensor
    positions: tf.Tensor

    def fill(self, tokens: tf.RaggedTensor, padding: int = 0) -> tf.Tensor:
        """Looks up the tokens.

        Args:
          tokens: the tokens of all documents, `[n, (length)]`.
          padding: what stands where there is none.

        Returns:
          `[b, row_length]`.
        """
        found = tf.gather(tokens.flat_values, tf.gather(tokens.row_starts(), self.documents) + self.places)
        return tf.where(self.segments > 0, found, tf.cast(padding, found.dtype))

    def read(self, read: Callable[[tf.Tensor], tf.RaggedTensor], padding: int = 0) -> tf.Tensor:
        """Looks up the tokens of documents that are read for it, each document once.

        Args:
          read: function from ids int64 `[d]` to the tokens of these documents, `[d, (length)]`.
          padding: what stands where there is none.

        Returns:
          `[b, row_length]`.
        """
        documents, index = tf.unique(tf.reshape(self.documents, [-1]), tf.int64)
        return self._replace(documents=tf.reshape(index, tf.shape(self.documents))).fill(read(documents), padding)


class Packed(RecordPlan):
    """Rows of a fixed number of tokens, packed with documents of different lengths.

    The lengths alone decide how many rows there are, and which lengths share one: longest first, each into the row with
    the least room that is enough (best-fit decreasing), on the histogram of the lengths (Krell et al., 2021, Efficient
    sequence packing without cross-contamination). Each epoch then gives the rows an order of its own, and each
    place for a length another document of this length, by keyed permutations. So each epoch has the same number of
    rows and each token once, and no plan of an epoch has to be made to start in its middle.

        order = looplib.Packed(texts.row_lengths(), 512)  # of a tf.RaggedTensor [n, (length)]
        context.indices(order).map(lambda rows: (rows.fill(texts), rows.segments, rows.positions))

    Documents longer than a row are cut into pieces of `row_length`. Empty ones are left out. Examples are `PackedRows`.

    Args:
      lengths: the number of tokens of each document, int `[n]`.
      row_length: tokens of a row.
      overlap: tokens that each piece of a longer document shares with the one before. 1 where each token is
        predicted from the one before it, so that the first of a piece is predicted too.
      chosen: which documents are packed, as in `Kept`; None for all.

    Attributes:
      tokens: of an epoch, overlaps included; the share of them in `size * row_length` is how full the rows are.

    Raises:
      UsageError: for lengths that are no whole numbers, no tokens at all, or an overlap that is as long as a row.
    """

    def __init__(
        self, lengths: np.ndarray, row_length: int, overlap: int = 0, chosen: np.ndarray | None = None
    ) -> None:
        lengths = whole_numbers("the lengths of looplib.Packed", lengths)
        ids = np.arange(len(lengths)) if chosen is None else chosen_ids(chosen, len(lengths))
        lengths = lengths[ids]
        self.width = whole_number("row_length of looplib.Packed", row_length)
        step = self.width - whole_number("overlap of looplib.Packed", overlap, least=0, most=self.width - 1)
        if not lengths.any():
            raise OrderError(f"looplib.Packed was given {len(lengths)} documents without a token; expected some")
        pieces = np.where(lengths > 0, 1 + np.maximum(0, -(-(lengths - self.width) // step)), 0)
        documents = np.repeat(np.arange(len(lengths)), pieces)
        starts = step * (np.arange(len(documents)) - np.repeat(np.cumsum(pieces) - pieces, pieces))
        lengths = np.minimum(lengths[documents] - starts, self.width)
        by_length = np.argsort(lengths, kind="stable")
        self._documents, self._starts = ids[documents[by_length]], starts[by_length]
        self._counts = np.bincount(lengths, minlength=self.width + 1)
        self._rows = _pack(self._counts)
        self.size, self.tokens = int(self._rows.counts.sum()), int(lengths.sum())

    def endless(self, key: OrderKey) -> Locate:
        """See `Plan`."""
        locate, rows = self._locate(key), shuffled_epochs(self.size, key)
        return lambda positions: locate(rows(positions), positions // self.size)

    def once(self) -> Locate:
        """See `Plan`."""
        locate = self._locate(None)
        return lambda positions: locate(positions, 0 * positions)

    def to_read(self, found: PackedRows) -> tuple[tf.Tensor, ...]:
        """See `Plan`."""
        raise OrderError(
            "context.records was given packed rows, which hold several records each; use context.indices(packed), and "
            "in its map rows.read with a function that reads records"
        )

    def _locate(self, key: OrderKey | None) -> Callable[[tf.Tensor, tf.Tensor], PackedRows]:
        """Returns the function from rows and epochs, int64 `[b]`, to the tokens of the rows; without a key in order."""
        rows = self._rows
        documents, starts = tf.constant(self._documents), tf.constant(self._starts)
        counts = tf.constant(self._counts)
        firsts, row_firsts = tf.cumsum(counts, exclusive=True), tf.constant(np.cumsum([0, *rows.counts[:-1]]))
        lengths, before, times, splits = map(tf.constant, (rows.lengths, rows.before, rows.times, rows.splits))

        def locate(numbers: tf.Tensor, epochs: tf.Tensor) -> PackedRows:
            kinds = tf.searchsorted(row_firsts, numbers, "right", tf.int64) - 1
            sizes = tf.gather(splits, kinds + 1) - tf.gather(splits, kinds)  # pieces of each row
            row = tf.repeat(tf.range(tf.size(numbers)), sizes)
            index = tf.range(tf.size(row, tf.int64)) - tf.gather(tf.cumsum(sizes, exclusive=True), row)
            slots = tf.gather(tf.gather(splits, kinds), row) + index
            length = tf.gather(lengths, slots)
            same = tf.gather(numbers - tf.gather(row_firsts, kinds), row)  # rows of this kind before it
            places = tf.gather(before, slots) + same * tf.gather(times, slots)
            if key is not None:
                places = shuffled(
                    places, tf.gather(counts, length), permutation_key(key.seed, tf.gather(epochs, row), length)
                )
            pieces = tf.gather(firsts, length) + places
            used = tf.math.segment_sum(length, row)
            offsets = tf.cumsum(length, exclusive=True) - tf.gather(tf.cumsum(used, exclusive=True), row)
            here = tf.repeat(tf.range(tf.size(row)), length)  # the piece of each token
            here = tf.RaggedTensor.from_row_lengths(here, used).to_tensor(-1, shape=[None, self.width])
            real, here = here >= 0, tf.maximum(here, 0)
            positions = tf.range(self.width, dtype=tf.int64) - tf.gather(offsets, here)
            tokens = PackedRows(
                tf.gather(tf.gather(documents, pieces), here),
                positions + tf.gather(tf.gather(starts, pieces), here),
                tf.cast(tf.gather(index, here), tf.int32) + 1,
                tf.cast(positions, tf.int32),
            )
            return tf.nest.map_structure(lambda part: tf.where(real, part, tf.zeros_like(part)), tokens)

        return locate


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows by kind: those of one kind hold the same lengths. All arrays are int64.

    Attributes:
      counts: the number of rows of each kind, `[k]`.
      splits: the slots of kind i are those from `splits[i]` to `splits[i + 1]`, `[k + 1]`.
      lengths: tokens of the piece in each slot, `[s]`.
      before: of each slot, the number of pieces of its length in rows of earlier kinds, and before it in its row.
      times: of each slot, the number of pieces of its length in its row.
    """

    counts: np.ndarray
    splits: np.ndarray
    lengths: np.ndarray
    before: np.ndarray
    times: np.ndarray


def _pack(counts: np.ndarray) -> _Rows:
    """Packs pieces into rows by best-fit decreasing; see `Packed`.

    Args:
      counts: the number of pieces of each length, int64 `[row_length + 1]`.
    """
    capacity = len(counts) - 1
    rows: dict[int, list[_Kind]] = collections.defaultdict(list)  # by the room that is left in them
    rooms: list[int] = []  # those of `rows` that are not 0 and have any, sorted
    for length in range(capacity, 0, -1):
        left = int(counts[length])
        while left:
            at = bisect.bisect_left(rooms, length)
            if at < len(rooms):
                room = rooms[at]
                pieces, number = rows[room].pop()
            else:
                room, pieces, number = capacity, (), left  # new rows, as many as are needed
            times = min(room // length, left)
            used = min(number, left // times)
            left -= used * times
            if pieces and used < number:
                rows[room].append((pieces, number - used))
            elif pieces and not rows[room]:
                rooms.pop(at)
            room -= times * length
            if room and not rows[room]:
                bisect.insort(rooms, room)
            rows[room].append(((*pieces, (length, times)), used))
    return _laid_out([kind for room in sorted(rows) for kind in rows[room]], capacity)


def _laid_out(kinds: list[_Kind], capacity: int) -> _Rows:
    earlier = np.zeros(capacity + 1, np.int64)  # pieces of each length in rows of the kinds so far
    sizes, slots = [], []
    for pieces, number in kinds:
        sizes.append(sum(times for _, times in pieces))
        slots += [(length, earlier[length] + i, times) for length, times in pieces for i in range(times)]
        for length, times in pieces:
            earlier[length] += number * times
    lengths, before, times = np.array(slots, np.int64).T
    counts = np.array([number for _, number in kinds], np.int64)
    return _Rows(counts, np.cumsum([0, *sizes]), lengths, before, times)


class Buckets(RecordPlan):
    """Global batches of examples of similar length, to be padded to the longest length of their bucket.

    All examples of a global batch are of one bucket, so replicas have equal work, and the order is the same on any
    number of them. Batches are full: what is left of a bucket at the end of an epoch, less than a batch, starts its
    next epoch. So after e epochs each example has come e times, except for less than a batch of each bucket. Buckets
    take turns in an order that is shuffled each epoch. An evaluation has each example once, from short to long.

        order = looplib.Buckets(texts.row_lengths(), [64, 128, 256])  # of a tf.RaggedTensor [n, (length)]
        context.indices(order).map(lambda ids, longest: tf.gather(texts, ids).to_tensor(shape=[-1, longest[0]]))

    Examples are pairs: the id, int64 `[b]`; and the length of the batch, int64 `[b]`, the same for all its examples.

    Args:
      lengths: of each example, int `[n]`.
      boundaries: the longest length of each bucket, ascending; the last is at least the longest of all.
      source: records, or the names of their files, for `context.records(looplib.Buckets(...))`; None for ids.

    Raises:
      UsageError: for lengths that are no whole numbers, or boundaries that do not ascend to the longest.
    """

    chosen_by_batch = True

    def __init__(self, lengths: np.ndarray, boundaries: Sequence[int], source: Source | str | None = None) -> None:
        lengths = whole_numbers("the lengths of looplib.Buckets", lengths)
        self.source = opened_for(source, len(lengths))
        edges = [whole_number("a boundary of looplib.Buckets", edge) for edge in boundaries]
        if edges != sorted(set(edges)) or not edges or edges[-1] < lengths.max():
            raise OrderError(
                f"the boundaries of looplib.Buckets are {edges} and the longest length is {lengths.max()}; expected "
                "ascending boundaries up to this length at least"
            )
        self.size = len(lengths)
        self._ids = np.argsort(lengths, kind="stable")
        counts = np.bincount(np.searchsorted(edges, lengths), minlength=len(edges))
        self._counts, self._edges = counts[counts > 0], np.array(edges, np.int64)[counts > 0]

    def endless(self, key: OrderKey) -> Locate:
        """See `Plan`."""
        size, buckets = key.batches.size, len(self._counts)
        counts, ids, edges = (tf.constant(array, tf.int64) for array in (self._counts, self._ids, self._edges))
        firsts = tf.cumsum(counts, exclusive=True)
        # Epoch e begins with batch sum(e * counts // size), which is up to `buckets` less than e * self.size / size.
        later = tf.range(1, 2 + buckets * size // self.size + 1, dtype=tf.int64)

        def begins(epochs: tf.Tensor) -> tf.Tensor:
            """Returns the number of batches of each bucket before an epoch, int64 `[..., buckets]`."""
            return epochs[..., None] * counts // size

        def locate(positions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            batches, index = tf.unique(positions // size, tf.int64)
            least = batches * size // self.size
            possible = tf.reduce_sum(begins(least[:, None] + later), axis=-1)
            epochs = least + tf.reduce_sum(tf.cast(possible <= batches[:, None], tf.int64), axis=1)
            before = begins(epochs)
            own = begins(epochs + 1) - before  # batches of each bucket in the epoch, [batches, buckets]
            turns, number = batches - tf.reduce_sum(before, axis=1), tf.reduce_sum(own, axis=1)
            turns, ends = shuffled(turns, number, permutation_key(key.seed, epochs, 0)), tf.cumsum(own, axis=1)
            bucket = tf.reduce_sum(tf.cast(ends <= turns[:, None], tf.int64), axis=1)
            came = turns + tf.gather(before - ends + own, bucket, batch_dims=1)  # batches of this bucket, ever
            bucket = tf.gather(bucket, index)
            came = tf.gather(came, index) * size + positions % size
            count = tf.gather(counts, bucket)  # each bucket has epochs of its own size
            found = shuffled(came % count, count, permutation_key(key.seed, came // count, bucket + 1))
            return tf.gather(ids, tf.gather(firsts, bucket) + found), tf.gather(edges, bucket)

        return locate

    def once(self) -> Locate:
        """See `Plan`."""
        ids, ends = tf.constant(self._ids), tf.constant(np.cumsum(self._counts))
        edges = tf.constant(self._edges)

        def locate(positions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            longest = tf.gather(edges, tf.searchsorted(ends, positions[-1:], "right"))
            return tf.gather(ids, positions), longest + tf.zeros_like(positions)

        return locate

    def to_read(self, found: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, ...]:
        """See `Plan`; the length of the batch is known besides."""
        return found
