"""Orders of records: which record stands at each position of a run, in closed form."""

import dataclasses
from typing import NamedTuple, Protocol

import tensorflow as tf

# Rounds of the keyed permutation's cipher. With the op's default of 4, the orders of neighbouring epochs correlate by
# up to 0.9 (60,000 examples), with 8 by 0.07 (a million); with 12 by no more than independent orders do.
_ROUNDS = 12
# Places of the data that a batch mixes, at most, if it is read by blocks. It must not depend on the number of replicas.
_MOST_LANES = 64
# What a key is for: the order of an epoch's records, of its blocks, and of the records of a piece.
_RECORDS, _BLOCKS, _PIECES = 0, 1, 2


class Picks(NamedTuple):
    """The records at some positions, and what is worth reading at once to get them.

    Attributes:
      ids: int64 `[p]`, the records.
      starts: int64 `[p]`, the first record of the piece of neighbouring records that each is in.
      stops: int64 `[p]`, the record after the last one of that piece.
    """

    ids: tf.Tensor
    starts: tf.Tensor
    stops: tf.Tensor


class Order(Protocol):
    """An order of the records of a source, epoch after epoch without end."""

    def picks(self, positions: tf.Tensor) -> Picks:
        """Returns the records at positions of a run, int64 `[p]` from 0."""


@dataclasses.dataclass(frozen=True)
class RecordOrder:
    """An order in which each record stands by itself.

    Attributes:
      num_examples: the number of records.
      seed: the key.
      shuffle: whether each epoch is a keyed permutation of its own; else all have the order of the ids.
    """

    num_examples: int
    seed: int
    shuffle: bool = True

    def ids(self, positions: tf.Tensor) -> tf.Tensor:
        """Returns the ids at positions of a run, both int64 `[p]`."""
        epoch, position = positions // self.num_examples, positions % self.num_examples
        return _permuted(position, self.num_examples, self.seed, epoch, _RECORDS) if self.shuffle else position

    def picks(self, positions: tf.Tensor) -> Picks:
        """See `Order`."""
        ids = self.ids(positions)
        return Picks(ids, ids, ids + 1)


@dataclasses.dataclass(frozen=True)
class BlockOrder:
    """A shuffled order in which neighbouring records are read at once.

    The slots of a global batch are divided into lanes of neighbouring slots. In each epoch the blocks of the data come
    in a keyed order, each lane takes a range of their records as long as its number of positions, and the records of
    each piece, which is the part of a block in one lane, are permuted by another key. So each record comes once an
    epoch, a batch mixes as many places of the data as it has lanes, and replicas, which have slots of their own, read
    different pieces.

    Attributes:
      num_examples: the number of records.
      seed: the key.
      block: records of a block.
      batch_size: examples of a global batch.
    """

    num_examples: int
    seed: int
    block: int
    batch_size: int

    @property
    def lanes(self) -> int:
        """The number of lanes: the largest divisor of the batch size up to a limit."""
        return next(lanes for lanes in range(_MOST_LANES, 0, -1) if self.batch_size % lanes == 0)

    def picks(self, positions: tf.Tensor) -> Picks:
        """See `Order`."""
        n, run = self.num_examples, self.batch_size // self.lanes
        epoch = positions // n
        lane = positions % self.batch_size // run
        first = epoch * n
        start = self._before(first + n, lane * run) - self._before(first, lane * run)
        stop = self._before(first + n, (lane + 1) * run) - self._before(first, (lane + 1) * run)
        within = lambda end: self._before(end, (lane + 1) * run) - self._before(end, lane * run)
        place = start + within(positions) - within(first)  # in the epoch's sequence of blocks

        number = place // self.block
        piece_start = tf.maximum(number * self.block, start)
        piece_stop = tf.minimum(tf.minimum((number + 1) * self.block, stop), n)
        size = piece_stop - piece_start
        offset = _permuted(place - piece_start, size, self.seed, epoch, _PIECES + piece_start)
        first_id = self._block_at(epoch, number) * self.block + piece_start - number * self.block
        return Picks(first_id + offset, first_id, first_id + size)

    def _before(self, position: tf.Tensor, slot: tf.Tensor) -> tf.Tensor:
        """Returns how many positions before `position` have a slot before `slot`."""
        return position // self.batch_size * slot + tf.minimum(position % self.batch_size, slot)

    def _block_at(self, epoch: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        """Returns the blocks at numbers in the order of epochs, int64 `[p]`; the short last one stays the last."""
        whole = self.num_examples // self.block
        if whole < 2:
            return number
        most = whole + 1
        keys, at = tf.unique(epoch * most + number)  # few, and a permutation is expensive
        permuted = _permuted(tf.minimum(keys % most, whole - 1), whole, self.seed, keys // most, _BLOCKS)
        return tf.gather(tf.where(keys % most == whole, tf.cast(whole, tf.int64), permuted), at)


def _permuted(index: tf.Tensor, size: tf.Tensor | int, seed: int, epoch: tf.Tensor, use: tf.Tensor | int) -> tf.Tensor:
    """Returns where keyed permutations take indices; the op behind `tf.random.experimental.index_shuffle`.

    Args:
      index: int64 `[p]`, from 0 to size - 1.
      size: of the permutations: a number, or int64 `[p]`.
      seed: the run's seed.
      epoch: int64 `[p]`.
      use: what the permutation is for, or int64 `[p]`.
    """
    seeds = tf.stack([tf.fill(tf.shape(epoch), tf.constant(seed, tf.int64)), epoch, 0 * epoch + use], axis=1)
    return tf.raw_ops.RandomIndexShuffle(
        index=index, seed=seeds, max_index=tf.cast(size, tf.int64) - 1, rounds=_ROUNDS
    )


def seeds_at(positions: tf.Tensor, seed: int, training: bool) -> tf.Tensor:
    """Returns seeds int32 `[p, 2]` for int64 positions in the run `[p]`, no two alike."""
    key = _mix(tf.constant((2 * seed + training) % 2**64, tf.uint64))
    return tf.bitcast(_mix(tf.bitcast(positions, tf.uint64) + key), tf.int32)


def _mix(words: tf.Tensor) -> tf.Tensor:
    """Scatters uint64 words one to one: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = tf.bitwise.bitwise_xor(words, tf.bitwise.right_shift(words, tf.constant(shift, tf.uint64)))
        words *= tf.constant(factor, tf.uint64)
    return tf.bitwise.bitwise_xor(words, tf.bitwise.right_shift(words, tf.constant(31, tf.uint64)))
