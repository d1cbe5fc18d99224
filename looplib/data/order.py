"""The order of examples: which one stands at each position of a run, as functions that can be entered at any position.

Positions count the examples of all replicas, in step order, from the start of the run. An order depends on the position
and the run's seed alone, so it is the same on any number of replicas and workers, and resumes from one integer.
"""

import abc
import dataclasses
import hashlib
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from looplib.base.messages import whole_number
from looplib.data.batches import Batches
from looplib.errors import OrderError

# From positions, int64 `[b]`, to the examples there: a structure of tensors `[b, ...]`.
Locate = Callable[[tf.Tensor], Any]
# Rounds of the keyed permutation's cipher. With the op's default of 4, the orders of neighbouring epochs correlate by
# up to 0.9 (60,000 examples), with 8 by 0.07 (a million); with 12 by no more than independent orders do.
_ROUNDS = 12
_CONSTANT, _BITS, _LEAST_WIDTH = 0xFFFFFFFC, 0x7369F885192C0EF5, 16  # of the cipher


@dataclasses.dataclass(frozen=True)
class OrderKey:
    """What the order of a training depends on."""

    seed: int  # the run's seed, or one derived from it
    batches: Batches  # the sizes of the global batches

    def part(self, number: int) -> "OrderKey":
        """Returns the key of one of the run's parts, such as a source of a mixture."""
        return dataclasses.replace(self, seed=derived_seed(self.seed, number))


def derived_seed(seed: int, use: int | str) -> int:
    """Returns a seed of int64 that is derived from another one for a use."""
    digest = hashlib.blake2b(f"{seed}/{use}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class Plan(abc.ABC):
    """The examples of a training or an evaluation, and their order; for `InputContext.indices`."""

    size: int  # the number of examples; an evaluation has each once
    comes_in_epochs = True  # whether a training has each example once in `size` positions, give or take a batch
    chosen_by_batch = False  # whether the examples of a global batch are chosen together
    width = 1  # numbers that describe one example; blocks of wide ones are smaller

    @abc.abstractmethod
    def endless(self, key: OrderKey) -> Locate:
        """Returns the function from positions in a training, from 0 without end, to examples."""

    @abc.abstractmethod
    def once(self) -> Locate:
        """Returns the function from positions in an evaluation, 0 to `size` - 1, to examples."""

    def located(self, key: OrderKey | None) -> Locate:
        """Returns the function from chunks of positions, int64 `[k, b]`, to examples; key None for an evaluation."""
        locate = self.once() if key is None else self.endless(key)

        @tf.autograph.experimental.do_not_convert
        def chunk(positions: tf.Tensor) -> Any:
            def back(part: tf.Tensor) -> tf.Tensor:
                inner = part.shape[1:]
                part = tf.reshape(part, tf.concat([tf.shape(positions), inner], axis=0))
                return tf.ensure_shape(part, positions.shape + inner)

            return tf.nest.map_structure(back, locate(tf.reshape(positions, [-1])))

        return chunk


@dataclasses.dataclass
class Ids(Plan):
    """All ids from 0 to `size` - 1, epoch after epoch.

    Attributes:
      size: the number of ids.
      shuffle: whether each epoch of a training is a keyed permutation of its own; else all have the order of the ids.
    """

    size: int
    shuffle: bool = True

    def endless(self, key: OrderKey) -> Locate:
        """See `Plan`; examples are int64 ids `[b]`."""

        def ids(positions: tf.Tensor) -> tf.Tensor:
            epoch, position = positions // self.size, positions % self.size
            if not self.shuffle:
                return position
            seeds = tf.stack([tf.fill(tf.shape(epoch), tf.constant(key.seed, tf.int64)), epoch, 0 * epoch], axis=1)
            most = tf.constant(self.size - 1, tf.int64)
            return tf.raw_ops.RandomIndexShuffle(index=position, seed=seeds, max_index=most, rounds=_ROUNDS)

        return ids

    def once(self) -> Locate:
        """See `Plan`."""
        return lambda positions: positions

    def endless_in_xla(self, positions: tf.Tensor, seed: int) -> tf.Tensor:
        """Computes what the function of `endless` returns, by ops that XLA compiles; `seed` is the key's."""
        epoch, position = positions // self.size, positions % self.size
        return index_shuffle(position, (seed, epoch), self.size - 1, _ROUNDS) if self.shuffle else position


def as_plan(examples: int | Plan, asked: str, shuffle: bool, whole_epochs: bool) -> Plan:
    """Returns the plan of all ids, or the one that is given; for the arguments see `InputContext.indices`.

    Raises:
      UsageError: for no number, or what the plan cannot do.
    """
    if not isinstance(examples, Plan):
        return Ids(whole_number(f"num_examples of context.{asked}", examples, least=0), shuffle)
    kind = f"looplib.{type(examples).__name__}"
    if not shuffle:
        raise OrderError(f"context.{asked} was given {kind} and shuffle=False; leave out shuffle=False")
    if whole_epochs and (examples.chosen_by_batch or not examples.comes_in_epochs):
        raise OrderError(
            f"context.{asked} was asked for whole epochs of {kind}, whose epochs do not end with a batch; leave out "
            "whole_epochs"
        )
    return examples


def seeds_at(positions: tf.Tensor, seed: int, training: bool) -> tf.Tensor:
    """Returns seeds int32 `[k, b, 2]` for int64 positions in the run `[k, b]`, no two alike."""
    key = mix(tf.constant((2 * seed + training) % 2**64, tf.uint64))
    words = mix(tf.bitcast(tf.reshape(positions, [-1]), tf.uint64) + key)
    seeds = tf.reshape(tf.bitcast(words, tf.int32), [*tf.unstack(tf.shape(positions)), 2])
    return tf.ensure_shape(seeds, [*positions.shape, 2])


def mix(words: tf.Tensor) -> tf.Tensor:
    """Scatters uint64 words one to one: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = tf.bitwise.bitwise_xor(words, tf.bitwise.right_shift(words, tf.constant(shift, tf.uint64)))
        words *= tf.constant(factor, tf.uint64)
    return tf.bitwise.bitwise_xor(words, tf.bitwise.right_shift(words, tf.constant(31, tf.uint64)))


def index_shuffle(index: tf.Tensor, key: tuple[int, tf.Tensor], max_index: int, rounds: int) -> tf.Tensor:
    """Computes `tf.random.experimental.index_shuffle` by integer ops that XLA compiles to vector instructions.

    The permutation is a cipher of blocks of an even number of bits (Simon: Beaulieu and others, 2013), applied until
    the number is in the range.

    Args:
      index: int64 `[n]`, the numbers.
      key: the seed, and int64 `[n]`, the second part of each number's key; the third is 0.
      max_index: the largest number.
      rounds: of the cipher, an even number of at least 4.

    Returns:
      int64 `[n]`, equal to `tf.raw_ops.RandomIndexShuffle`.
    """
    if max_index == 0:
        return tf.zeros_like(index)
    width = math.ceil(math.log2(max_index))
    word = max(width + width % 2, _LEAST_WIDTH) // 2
    kinds = (tf.uint8, tf.uint16, tf.uint32, tf.uint64)
    kind, wide = next(pair for pair in zip(kinds, kinds[1:]) if word <= 8 * pair[0].size)
    mask = tf.constant(2**word - 1, kind)
    seed, other = key
    zero = tf.zeros_like(index, kind)
    keys = [zero + tf.constant(seed % 2**word, kind), tf.cast(other % 2**word, kind), zero]
    for i in range(3, rounds):
        bit = _BITS % 2**word >> i - 3 & 1
        before = keys[-1]
        turned = _turned(before, word - 3, word, mask) ^ _turned(before, word - 4, word, mask)
        keys.append(keys[-3] ^ turned ^ tf.constant(_CONSTANT % 2**word ^ bit, kind))

    def encrypt(left: tf.Tensor, right: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        for first, second in zip(keys[::2], keys[1::2]):
            left = left ^ _mixed(right, word, mask) ^ first
            right = right ^ _mixed(left, word, mask) ^ second
        return left, right

    def whole(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        return tf.bitwise.left_shift(tf.cast(left, wide), tf.constant(word, wide)) | tf.cast(right, wide)

    def outside(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        return whole(left, right) > tf.constant(min(max_index, wide.max), wide)

    def again(left: tf.Tensor, right: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        new, out = encrypt(left, right), outside(left, right)
        return tf.where(out, new[0], left), tf.where(out, new[1], right)

    half = tf.bitwise.right_shift(index, tf.constant(word, tf.int64)) % 2**word
    start = encrypt(tf.cast(half, kind), tf.cast(index % 2**word, kind))
    return tf.cast(whole(*tf.while_loop(lambda *now: tf.reduce_any(outside(*now)), again, start)), tf.int64)


def _turned(x: tf.Tensor, places: int, word: int, mask: tf.Tensor) -> tf.Tensor:
    """Rotates words of `word` bits to the left."""
    if places % word == 0:
        return x
    left = tf.bitwise.left_shift(x, tf.constant(places, x.dtype))
    return (left | tf.bitwise.right_shift(x, tf.constant(word - places, x.dtype))) & mask


def _mixed(x: tf.Tensor, word: int, mask: tf.Tensor) -> tf.Tensor:
    return _turned(x, 1, word, mask) & _turned(x, 8, word, mask) ^ _turned(x, 2, word, mask)
