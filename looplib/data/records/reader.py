"""`InputContext.records`: the order of the records, the pieces that are read, damage, fingerprints, and the batches."""

import bisect
import functools
import hashlib
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base import files, folders
from looplib.base.messages import join_names, whole_number, with_cure
from looplib.data import rows
from looplib.data.context import BadRecords, InputContext
from looplib.data.order import Ids, Plan, as_plan, seeds_at
from looplib.data.records.blocks import BlockOrder, RecordSelection, lanes_of
from looplib.data.records.files import Files, in_threads
from looplib.data.records.index import BadRecordError, Numbered, ReadTogether
from looplib.data.records.plans import Kept, RecordPlan
from looplib.data.records.reading import Call, RecordReads, read_records
from looplib.data.records.sources import Blocked, Chain, Source, Subset, items, mean_bytes, named, opened
from looplib.errors import OrderError, RecordsError, UsageError

_NOTE = re.compile(r"(.+-\d+(?:-[0-9a-f]{12})?)\.txt")  # after what `BadRecordError.name` says


def leave_out(bad: BadRecords, error: BadRecordError) -> None:
    """Counts a damaged record, unless it was counted before.

    Each is a small file in the folder that the processes of the run share, named after the record, so that none counts
    twice and no process waits for another.

    Raises:
      UsageError: if there are more now than may be. The record is not counted then, so that a restart that allows
        more continues from those that were left out.
    """
    with bad.lock:
        is_new = error.name not in bad.names
        if is_new:
            bad.names |= _noted(bad)
        if (count := len(bad.names | {error.name})) > bad.most:
            raise _too_many(bad, error, count)
        bad.names.add(error.name)
        if is_new and bad.folder is not None:
            _share(bad, bad.folder, error)
    if is_new:
        logging.warning("left out a damaged record, %d of at most %d: %s", count, bad.most, error.what)


def _too_many(bad: BadRecords, error: BadRecordError, count: int) -> UsageError:
    left = " (bad_records in the run directory lists those left out)" if bad.folder else ""
    return RecordsError(
        f"{count} records are damaged, and --bad_records allows {bad.most} in a run{left}: {error.what}; restore "
        f"the file from a copy, or run again with --bad_records=skip:{count} or more, and delete nothing"
    )


def _noted(bad: BadRecords) -> set[str]:
    """Returns the names of the records that all processes of the run have left out."""
    try:
        found = tf.io.gfile.listdir(bad.folder) if bad.folder and tf.io.gfile.isdir(bad.folder) else []
    except (OSError, tf.errors.OpError):  # what is noted next says so
        found = []
    return {match[1] for name in found if (match := _NOTE.fullmatch(name))}


def _share(bad: BadRecords, folder: str, error: BadRecordError) -> None:
    note = f"{error.name}.txt"
    try:
        folders.make_folder(*os.path.split(folder))
        files.write_whole(folders.inside(folder, note), f"{error}\n")
        bad.names |= _noted(bad)
        count = len(bad.names)
        if count > bad.most:  # another process noted one at the same time
            folders.remove(folder, note)
    except (OSError, tf.errors.OpError) as problem:
        bad.folder = None
        logging.warning(
            "damaged records cannot be noted in %s, so this process counts its own alone: %s",
            folder,
            with_cure(problem),
        )
        return
    if count > bad.most:
        bad.names.discard(error.name)
        raise _too_many(bad, error, count)


def tolerant(source: Source, bad: BadRecords, replace: bool, kept: Sequence[np.ndarray | None]) -> Source:
    """Returns a source without its damaged records; for the arguments see `SkipsDamaged`, `kept` is of each source.

    Of several sources, each has its own records in place of damaged ones.
    """
    if isinstance(source, Chain):
        parts = [SkipsDamaged(part, bad, replace, own) for part, own in zip(source.sources, kept)]
        return Chain(parts, source.names)
    return SkipsDamaged(source, bad, replace, kept[0])


def given(source: Source, number: int) -> int:
    """Returns the number of the record that comes for a number of what `tolerant` has returned."""
    if isinstance(source, Chain):
        part = bisect.bisect_right(source.firsts, number) - 1
        return source.firsts[part] + given(source.sources[part], number - source.firsts[part])
    return source.given(number)[0]


class SkipsDamaged(ReadTogether):
    """A source whose damaged records are left out.

    Which records these are depends on the files alone, so that a resumed run leaves out the same ones.

    Args:
      source: the records.
      bad: those of the run so far, and how many there may be.
      replace: whether the next good record, by number, comes in place of each, so that batches stay full; else None.
      kept: the numbers of the records that may come, as a filter keeps others out; None for all.

    Raises:
      UsageError: if none of those that are kept is good, or more are damaged than may be.
    """

    def __init__(self, source: Source, bad: BadRecords, replace: bool, kept: np.ndarray | None = None) -> None:
        self._source, self._bad, self._replace = source, bad, True
        self._kept = None if kept is None else np.unique(kept)
        if self._kept is not None:
            self.given(int(self._kept[0]))  # one of these has to be good
        self._replace = replace

    def __len__(self) -> int:
        return len(self._source)

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Returns records by number."""
        try:
            return items(self._source, numbers)
        except BadRecordError:
            return [self.given(int(number))[1] for number in numbers]

    def given(self, number: int) -> tuple[int, Any]:
        """Returns what comes for a number: a number, which is another one in place of a damaged record, and the record.

        Raises:
          UsageError: if more records are damaged than may be.
        """
        kept = range(len(self)) if self._kept is None else self._kept
        place = bisect.bisect_left(kept, number)
        for at in range(place, place + len(kept)):
            candidate = int(kept[at % len(kept)])
            try:
                return candidate, items(self._source, [candidate])[0]
            except BadRecordError as error:
                leave_out(self._bad, error)
                if not self._replace:
                    return number, None
        raise RecordsError(f"each of {len(kept)} records is damaged; restore the files from a copy")


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
    of_each = [file_digests(part.files) if isinstance(part, Numbered) else _any_digests(part) for part in parts]
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


def file_digests(files: Files) -> list[tuple[str, str]]:
    """Returns a checksum of the size and some kilobytes of each file, with its path."""

    def digest(index: int) -> str:
        size = files.sizes[index]
        starts = {part * max(0, size - _PIECE_BYTES) // (_PIECES - 1) for part in range(_PIECES)}
        return _hash(size, files.read_at([(index, at, min(at + _PIECE_BYTES, size)) for at in sorted(starts)]))

    return list(zip(files.paths, in_threads(digest, range(len(files.paths)))))


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


_CHUNK_BYTES = 1 << 22  # of records that are drawn at once
_ALONE = 256  # records of a batch that is read by itself: taking chunks apart would cost more
_BLOCK_BYTES, _STORED_BYTES = 1 << 18, 1 << 20  # of neighbouring records that are read at once: of files, of a store
_LEAST_BLOCKS = 16  # of a lane, so that an epoch mixes the data well


class RecordReader:
    """Reads the records of one `InputContext`.

    Args:
      context: the context.

    Attributes:
      reads: how, of each call.
    """

    def __init__(self, context: InputContext) -> None:
        self._context = context
        self._tolerated: Source | None = None  # what the last call reads where damaged records are left out
        self.reads: list[RecordReads] = []

    @tf.autograph.experimental.do_not_convert
    def batches(
        self,
        source: Any,
        *,
        block: int | None,
        shuffle: bool,
        seeds: bool,
        whole_epochs: bool,
        name: str | None,
        repeat: bool,
    ) -> tf.data.Dataset:
        """Makes the data set of a call; see `InputContext.records`."""
        context, kept = self._context, (None,)
        if isinstance(source, Kept) and source.source is not None and block not in (None, 1):
            source = Subset(source.source, source.ids)
        if isinstance(source, Plan):
            plan, order = _checked(source, block, shuffle, whole_epochs), None
            seed, source, kept, to_read = context.order_seed(plan, name), plan.source, plan.kept, plan.to_read
            may_be_by_pieces = isinstance(plan, Kept)
        else:
            source = opened(source)
            plan, to_read = Ids(len(source), shuffle), lambda ids: (ids,)
            seed = context.order_seed(plan, name)
            may_be_by_pieces = shuffle and context.training
            order = self._blocks(source, seed, block) if may_be_by_pieces else None
        found = context.located(plan, seed) if order is None else None

        @tf.autograph.experimental.do_not_convert
        def picks(positions: tf.Tensor) -> tuple[Any, ...]:
            if order is None:
                ids, *known = to_read(found(positions))
                picked = RecordSelection(ids, ids, ids + 1)
            else:
                picked, known = order.picks(positions), []
            return picked, *known, *([seeds_at(positions, seed, context.training)] if seeds else [])

        reads = RecordReads(source, order is not None, may_be_by_pieces)
        self.reads.append(reads)
        batch = context.per_replica_batch_size
        most = int(_CHUNK_BYTES / (batch * mean_bytes(source))) if batch < _ALONE else 1
        tolerates = context.bad_records.most > 0
        if tolerates:
            self._tolerated = tolerant(source, context.bad_records, context.training, kept)
        positions, call = context.positions_of(plan, "records", whole_epochs, repeat, most)
        call.order = lambda positions: picks(positions)[0]
        picked = positions.map(picks, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        call.ids = picked.map(_ids).unbatch()
        if isinstance(source, Subset):
            call.ids = call.ids.map(functools.partial(tf.gather, tf.constant(source.ids)))
        elsewhere: Call | None = None
        if context.remote:
            from looplib.data.records.on_workers import caller  # here, as it imports this

            elsewhere = caller(source, kept, reads, context.training, context.bad_records)
        chunks = read_records(
            self._tolerated if tolerates else source,
            picked,
            reads,
            may_lack=tolerates and not context.training,
            call=elsewhere,
        )
        call.batches = as_batches(chunks)
        return call.batches

    def _blocks(self, source: Source, seed: int, block: int | None) -> BlockOrder | None:
        """Returns the order by blocks of neighbouring records; None if each is read by itself."""
        size = self._context.positions.sizes.original
        if block is not None:
            block = whole_number("block of context.records", block)
        elif isinstance(source, Blocked):
            block = source.block
        else:
            stored = isinstance(source, Numbered) and source.files.is_stored
            block = default_block(len(source), mean_bytes(source), size, stored)
        return BlockOrder(len(source), seed, block, size) if block > 1 else None

    def fingerprint(self) -> dict[str, str]:
        """Returns checksums of a part of what is read, by the name of the file."""
        return fingerprint([reads.source for reads in self.reads])

    def name_of(self, number: int) -> str:
        """Returns the name, for errors, of the record with an id of the first call."""
        source = self.reads[0].source
        if isinstance(source, Subset):
            number = int(np.flatnonzero(source.ids == number)[0])
        return named(source, number if self._tolerated is None else given(self._tolerated, number))


def default_block(records: int, mean: float, batch_size: int, stored: bool, least: int = _LEAST_BLOCKS) -> int:
    """Returns how many neighbouring records to read at once.

    Args:
      records: how many there are.
      mean: their average size in bytes.
      batch_size: examples of a global batch.
      stored: whether they are in an object store.
      least: blocks of a lane, at least.
    """
    most = _STORED_BYTES if stored else _BLOCK_BYTES
    return max(1, min(int(most / mean), records // (least * lanes_of(batch_size))))


def _checked(plan: Plan, block: int | None, shuffle: bool, whole_epochs: bool) -> RecordPlan:
    kind = f"looplib.{type(plan).__name__}"
    if not isinstance(plan, RecordPlan) or plan.source is None:
        raise OrderError(f"context.records was given {kind} without records; give it their source")
    if block not in (None, 1):
        raise OrderError(
            f"context.records was given {kind} and block={block}, and reads each record of such a plan by itself; "
            "leave out block, which looplib.Kept and records without a plan can have"
        )
    return as_plan(plan, "records", shuffle, whole_epochs)


@tf.autograph.experimental.do_not_convert
def _ids(picks: RecordSelection, *_: Any) -> tf.Tensor:
    return picks.ids


def as_batches(chunks: tf.data.Dataset) -> tf.data.Dataset:
    """Takes chunks `[k, b, ...]` apart into batches `[b, ...]`."""
    if tf.nest.flatten(chunks.element_spec)[0].shape[0] != 1:
        # Else tf.data adds a buffer of its own, which grows up to 512 batches.
        return chunks.unbatch().prefetch(2)

    def first(chunk: Any) -> Any:
        return tf.nest.map_structure(lambda leaf: tf.squeeze(leaf, 0), chunk)

    return chunks.map(rows.of_whole(first, chunks.element_spec))
