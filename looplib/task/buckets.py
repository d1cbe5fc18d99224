"""Buckets: batches of examples of similar length."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from looplib.errors import UsageError, whole_number
from looplib.records.order import key_of, shuffled
from looplib.records.sources import Source
from looplib.task.plans import Locate, Plan, Run, of_examples, whole_numbers


class Buckets(Plan):
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

    of_batches = True

    def __init__(self, lengths: np.ndarray, boundaries: Sequence[int], source: Source | str | None = None) -> None:
        lengths = whole_numbers("the lengths of looplib.Buckets", lengths)
        self.source = of_examples(source, len(lengths))
        edges = [whole_number("a boundary of looplib.Buckets", edge) for edge in boundaries]
        if edges != sorted(set(edges)) or not edges or edges[-1] < lengths.max():
            raise UsageError(
                f"the boundaries of looplib.Buckets are {edges} and the longest length is {lengths.max()}; expected "
                "ascending boundaries up to this length at least"
            )
        self.size = len(lengths)
        self._ids = np.argsort(lengths, kind="stable")
        counts = np.bincount(np.searchsorted(edges, lengths), minlength=len(edges))
        self._counts, self._edges = counts[counts > 0], np.array(edges, np.int64)[counts > 0]

    def endless(self, run: Run) -> Locate:
        """See `Plan`."""
        size, buckets = run.batches.size, len(self._counts)
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
            turns, ends = shuffled(turns, number, key_of(run.seed, epochs, 0)), tf.cumsum(own, axis=1)
            bucket = tf.reduce_sum(tf.cast(ends <= turns[:, None], tf.int64), axis=1)
            came = turns + tf.gather(before - ends + own, bucket, batch_dims=1)  # batches of this bucket, ever
            bucket = tf.gather(bucket, index)
            came = tf.gather(came, index) * size + positions % size
            count = tf.gather(counts, bucket)  # each bucket has epochs of its own size
            found = shuffled(came % count, count, key_of(run.seed, came // count, bucket + 1))
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
