"""What `InputContext.records` does: the order of the records, the pieces that are read, and the batches."""

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.base.messages import whole_number
from looplib.data.input_context import InputContext
from looplib.data.order import Ids, Plan, as_plan, seeds_at
from looplib.data.records.damage import given, tolerant
from looplib.data.records.fingerprint import fingerprint
from looplib.data.records.indexed import Numbered
from looplib.data.records.order import BlockOrder, RecordSelection
from looplib.data.records.plans import Kept, RecordPlan
from looplib.data.records.reading import RecordReads, read_records
from looplib.data.records.sources import Blocked, Source, Subset, mean_bytes, named, opened
from looplib.errors import OrderError

_CHUNK_BYTES = 1 << 22  # of records that are drawn at once
_ALONE = 256  # records of a batch that is read by itself: taking chunks apart would cost more
_BLOCK_BYTES, _STORED_BYTES = 1 << 18, 1 << 20  # of neighbouring records that are read at once: of files, of a store
_LEAST_BLOCKS = 16  # of a lane, so that an epoch mixes the data well


class RecordReader:
    """Reads the records of one `InputContext`; see `looplib.data.dataset_requests.Reader`.

    Args:
      context: the context.

    Attributes:
      reads: how, of each call.
    """

    def __init__(self, context: InputContext) -> None:
        self._context = context
        self._tolerated: Source | None = None  # what the last call reads where damaged records are left out
        self.reads: list[RecordReads] = []

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
                picked, known = RecordSelection(ids, ids, ids + 1), tuple(known)
            else:
                parts = order.picks(tf.reshape(positions, [-1]))
                picked = RecordSelection(
                    *(tf.ensure_shape(tf.reshape(part, tf.shape(positions)), positions.shape) for part in parts)
                )
                known = ()
            return picked, *known, *([seeds_at(positions, seed, context.training)] if seeds else [])

        reads = RecordReads(source, order is not None, may_be_by_pieces)
        self.reads.append(reads)
        batch = context.per_replica_batch_size
        most = int(_CHUNK_BYTES / (batch * mean_bytes(source))) if batch < _ALONE else 1
        tolerates = context.bad_records.most > 0
        if tolerates:
            self._tolerated = tolerant(source, context.bad_records, context.training, kept)
        positions, call = context.positions_of(plan, "records", whole_epochs, repeat, most)
        picked = positions.map(picks, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        call.ids = picked.map(_ids).unbatch()
        if isinstance(source, Subset):
            call.ids = call.ids.map(functools.partial(tf.gather, tf.constant(source.ids)))
        chunks = read_records(
            self._tolerated if tolerates else source, picked, reads, may_lack=tolerates and not context.training
        )
        call.batches = _batches(chunks)
        return call.batches

    def _blocks(self, source: Source, seed: int, block: int | None) -> BlockOrder | None:
        """Returns the order by blocks of neighbouring records; None if each is read by itself."""
        ordered = functools.partial(BlockOrder, len(source), seed, batch_size=self._context.places.sizes.original)
        if block is not None:
            block = whole_number("block of context.records", block)
        elif isinstance(source, Blocked):
            block = source.block
        else:
            lanes = ordered(block=1).lanes
            most = _STORED_BYTES if isinstance(source, Numbered) and source.files.is_stored else _BLOCK_BYTES
            block = max(1, min(int(most / mean_bytes(source)), len(source) // (_LEAST_BLOCKS * lanes)))
        return ordered(block=block) if block > 1 else None

    def fingerprint(self) -> dict[str, str]:
        """See `looplib.data.dataset_requests.Reader`."""
        return fingerprint([reads.source for reads in self.reads])

    def name_of(self, number: int) -> str:
        """See `looplib.data.dataset_requests.Reader`."""
        source = self.reads[0].source
        if isinstance(source, Subset):
            number = int(np.flatnonzero(source.ids == number)[0])
        return named(source, number if self._tolerated is None else given(self._tolerated, number))


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


def _batches(chunks: tf.data.Dataset) -> tf.data.Dataset:
    """Takes chunks `[k, b, ...]` apart into batches `[b, ...]`."""
    if tf.nest.flatten(chunks.element_spec)[0].shape[0] != 1:
        # Else tf.data adds a buffer of its own, which grows up to 512 batches.
        return chunks.unbatch().prefetch(2)

    @tf.autograph.experimental.do_not_convert
    def first(*chunk: Any) -> Any:
        chunk = chunk if type(chunks.element_spec) is tuple else chunk[0]  # tf.data unpacks tuples, and only those
        return tf.nest.map_structure(lambda leaf: tf.squeeze(leaf, 0), chunk)

    return chunks.map(first)
