"""The order of records by blocks of neighbours, and the keyed permutation that it and the plans are made of."""

import dataclasses
from typing import NamedTuple

import tensorflow as tf

from looplib.data.order import mix

# Places of the data that a batch mixes, at most, if it is read by blocks. It must not depend on the number of replicas.
MOST_LANES = 64
# What a key is for: the order of an epoch's blocks, and of the records of the piece that starts at a place.
_BLOCKS, _PIECES = 0, 1
_HALF_ROUNDS = 8  # of the network that shuffles blocks and pieces


class RecordSelection(NamedTuple):
    """The records at some positions, and the ranges to read at once for them; all int64, of the positions' shape.

    Attributes:
      ids: the records.
      starts: the first record of the piece of neighbouring records that each is in.
      stops: the record after the last one of that piece.
    """

    ids: tf.Tensor
    starts: tf.Tensor
    stops: tf.Tensor


@dataclasses.dataclass(frozen=True)
class BlockOrder:
    """A shuffled order that reads neighbouring records at once.

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

    def picks(self, positions: tf.Tensor) -> RecordSelection:
        """Returns the records at positions of a run, int64 from 0."""
        number = positions // self.num_examples
        size, block = (tf.fill(tf.shape(number), tf.constant(n, tf.int64)) for n in (self.num_examples, self.block))
        return block_picks(positions, Stretch(number, number * size, size, block), self.seed, self.batch_size)


class Stretch(NamedTuple):
    """The epoch, or the file that is read once, that each of some positions is in; all int64, of their shape.

    Attributes:
      number: the number of the epoch or the file.
      start: its first position in the run.
      size: its positions, and so its records.
      block: records of one of its blocks.
    """

    number: tf.Tensor
    start: tf.Tensor
    size: tf.Tensor
    block: tf.Tensor


def lanes_of(batch_size: int) -> int:
    """Returns the number of lanes of a global batch: its largest divisor up to a limit."""
    return next(lanes for lanes in range(MOST_LANES, 0, -1) if batch_size % lanes == 0)


def block_picks(positions: tf.Tensor, stretch: Stretch, seed: int, batch_size: int) -> RecordSelection:
    """Returns records in the order of a `BlockOrder`, numbered within their stretch.

    Args:
      positions: positions of a run, int64 from 0, of any shape.
      stretch: what each is in.
      seed: the key of the order.
      batch_size: examples of a global batch.
    """
    run = batch_size // lanes_of(batch_size)
    epoch, begin, n, length = stretch
    slot = positions % batch_size
    low = slot // run * run  # the first slot of the lane
    high = low + run

    def before(position: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns how many positions before `position` have slots before the lane, and before its end."""
        batches, rest = position // batch_size, position % batch_size
        return tuple(batches * end + tf.minimum(rest, end) for end in (low, high))

    (low_at_start, high_at_start), (low_at_end, high_at_end) = before(begin), before(begin + n)
    # In the sequence of blocks: where the lane starts and stops, and the position's own place.
    start, stop = low_at_end - low_at_start, high_at_end - high_at_start
    place = start + positions // batch_size * run + (slot - low) - (high_at_start - low_at_start)

    number = place // length
    piece_start = tf.maximum(number * length, start)
    piece_stop = tf.minimum(tf.minimum((number + 1) * length, stop), n)
    # Blocks are permuted, except a short last one, and records in their piece: both at once, because the ops of a
    # permutation are most of what a first batch costs.
    whole = n // length
    blocks = tf.maximum(whole, 1)
    block, offset = tf.unstack(
        shuffled(
            tf.stack([tf.minimum(number, blocks - 1), place - piece_start]),
            tf.stack([blocks, piece_stop - piece_start]),
            permutation_key(seed, epoch, tf.stack([0 * epoch + _BLOCKS, _PIECES + piece_start])),
        )
    )
    first = tf.where(number < whole, block, number) * length + piece_start % length
    return RecordSelection(first + offset, first, first + piece_stop - piece_start)


def permutation_key(seed: int, epoch: tf.Tensor, use: tf.Tensor | int) -> tf.Tensor:
    """Returns keys uint64 of permutations of epochs, int64; `use`, int64, says what for, of each epoch or several."""
    first = mix(tf.fill(tf.shape(epoch), tf.constant(seed % 2**64, tf.uint64)))
    return mix(mix(first + tf.bitcast(epoch, tf.uint64)) + tf.bitcast(0 * epoch + use, tf.uint64))


@tf.autograph.experimental.do_not_convert
def shuffled(index: tf.Tensor, size: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Returns where keyed permutations take indices: a Feistel network over a rectangle of about `size` places.

    `tf.random.experimental.index_shuffle` takes 2**16 / size times as long for small sizes. An index that comes out
    beyond the size goes through the network again, until it is within.

    Args:
      index: int64, from 0 to size - 1.
      size: int64, of the shape of `index`.
      key: uint64, of the same shape.
    """
    width = tf.cast(tf.math.ceil(tf.sqrt(tf.cast(size, tf.float64))), tf.int64)
    height = -(-size // width)
    numbers = tf.constant(list(range(_HALF_ROUNDS)), tf.uint64, [_HALF_ROUNDS] + [1] * key.shape.rank)
    keys = tf.unstack(mix(key + numbers))

    def through(index: tf.Tensor) -> tf.Tensor:
        row, column = index // width, index % width
        for number in range(0, _HALF_ROUNDS, 2):
            row = (row + _hash(column, keys[number])) % height
            column = (column + _hash(row, keys[number + 1])) % width
        return row * width + column

    # The network stands once in the graph, because its ops are most of what a first batch costs.
    return tf.while_loop(
        lambda index, is_first: is_first | tf.reduce_any(index >= size),
        lambda index, is_first: (tf.where(is_first | (index >= size), through(index), index), tf.constant(False)),
        [index, tf.constant(True)],
    )[0]


def _hash(value: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Returns numbers int64 from 0 to 2**31 - 1 for values int64 and keys uint64."""
    word = (tf.bitcast(value, tf.uint64) + key) * tf.constant(0xBF58476D1CE4E5B9, tf.uint64)
    word = tf.bitwise.bitwise_xor(word, tf.bitwise.right_shift(word, tf.constant(32, tf.uint64)))
    word *= tf.constant(0x94D049BB133111EB, tf.uint64)
    return tf.bitcast(tf.bitwise.right_shift(word, tf.constant(33, tf.uint64)), tf.int64)
