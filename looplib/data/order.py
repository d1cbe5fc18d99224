"""Which example stands where: global batches and their sizes, epochs, plans, and the permutation."""

import abc
import dataclasses
import hashlib
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.base.messages import whole_number
from looplib.errors import BatchSizeError, OrderError

CHUNK_IDS = 8192  # that are drawn at once, at most
_CHUNK = 32  # batches of them

_MOST_BATCHES, _MOST_EXAMPLES = 2**53, 2**31  # of a run, and of a global batch
_MOST_POSITIONS = 2**62  # which fit into int64


@dataclasses.dataclass(frozen=True)
class BatchSizePeriod:
    """Global batches of one size, up to the start of a run that continued with another one.

    Raises:
      ValueError: for numbers that no run has.
    """

    step: int  # the global step at that start
    batch: int  # the global batches that the run had consumed, those that rollbacks left out included
    size: int  # examples of each

    def __post_init__(self) -> None:
        if not (0 <= self.step < _MOST_BATCHES and 0 <= self.batch < _MOST_BATCHES and 0 < self.size < _MOST_EXAMPLES):
            raise ValueError(f"no run has {self}")


@dataclasses.dataclass(frozen=True)
class Epoch:
    """How many examples an epoch has.

    Attributes:
      examples: of an epoch.
      whole: whether its last batch may be smaller; otherwise examples of the next epoch fill it.
    """

    examples: int | Fraction
    whole: bool = False

    def steps(self, size: int) -> float:
        """Returns the steps of an epoch with global batches of `size` examples."""
        return -(-self.examples // size) if self.whole or self.examples % size == 0 else float(self.examples / size)

    def after(self, examples: int, batches: int, size: int) -> int:
        """Returns how many examples have come once further batches of one size follow the first `examples`."""
        if not self.whole:
            return examples + batches * size
        first = self.batches(examples, self._next(examples), size)
        if batches < first:
            return examples + batches * size
        epochs, rest = divmod(batches - first, -(-self.examples // size))
        return self._next(examples) + epochs * self.examples + rest * size

    def batches(self, examples: int, target: int | Fraction, size: int) -> int:
        """Returns how many batches of one size it takes to get from `examples` to at least `target` examples."""
        end = self._next(examples)
        if not self.whole or target <= end:
            return -(-(target - examples) // size)
        epochs, rest = divmod(target - end, self.examples)
        return self.batches(examples, end, size) + epochs * -(-self.examples // size) - (-rest // size)

    def _next(self, examples: int) -> int:
        """Returns the number of examples at the end of the epoch in which the next example is."""
        return (examples // self.examples + 1) * self.examples


_WITHOUT_END = Epoch(1)


@dataclasses.dataclass(frozen=True)
class Batches:
    """The sizes of a run's global batches."""

    size: int  # examples of each from now on
    earlier: tuple[BatchSizePeriod, ...] = ()  # batches of other sizes, in their order

    def resized(self, size: int, step: int, batch: int) -> "Batches":
        """Returns the batches of a run that continues with another size from a step on, after `batch` batches."""
        if size == self.size:
            return self
        now = BatchSizePeriod(step, batch, self.size)
        before = self.earlier[-1] if self.earlier else BatchSizePeriod(0, 0, size)
        if (now.step, now.batch) != (before.step, before.batch):
            return Batches(size, (*self.earlier, now))
        earlier = self.earlier[:-1] if before.size == size else self.earlier  # no step had the size between
        return Batches(size, earlier)

    def back_to(self, step: int) -> "Batches":
        """Returns the batch sizes of a run that goes back to an earlier step and skips the data in between."""
        earlier = (dataclasses.replace(span, step=min(span.step, step)) for span in self.earlier)
        return Batches(self.size, tuple(earlier))

    def is_possible(self, step: int, batch: int) -> bool:
        """Returns whether a run can have consumed `batch` global batches at a step; for values from a file."""
        places = [(0, 0), *((span.step, span.batch) for span in self.earlier), (step, batch)]
        in_order = all(a <= c and b <= d for (a, b), (c, d) in zip(places, places[1:]))
        return 0 < self.size < _MOST_EXAMPLES and in_order and self.before(batch) < _MOST_POSITIONS

    @property
    def first(self) -> int:
        """The number of the first batch of the present size."""
        return self.earlier[-1].batch if self.earlier else 0

    @property
    def original(self) -> int:
        """The size that the run began with."""
        return self.earlier[0].size if self.earlier else self.size

    def full(self, epoch: Epoch) -> bool:
        """Returns whether all batches of the present size are full."""
        return not epoch.whole or (epoch.examples % self.size == 0 == self.before(self.first, epoch) % self.size)

    def whole(self, batch: int) -> int:
        """Returns the number of batches of the present size that hold all examples before a global batch.

        Raises:
          UsageError: if no whole number of them does.
        """
        examples = self.before(batch)
        if examples % self.size:
            raise BatchSizeError(
                f"the run has read {examples} examples, in batches of {self}, and no number of batches of {self.size} "
                "has as many, which data that resumes by skipping batches needs; continue with a batch size that "
                "divides them, make the data with context.indices or context.records, or start a new run from the "
                "weights (--warm_start)"
            )
        return examples // self.size

    def before(self, batch: int, epoch: Epoch = _WITHOUT_END) -> int:
        """Returns how many examples come before the global batch of a number."""
        return self._examples(batch, [span.batch for span in self.earlier], epoch)

    def trained(self, step: int, epoch: Epoch = _WITHOUT_END) -> int:
        """Returns the number of examples trained on up to a step, without those that rollbacks left out."""
        return self._examples(step, [span.step for span in self.earlier], epoch)

    def step_of(self, examples: int | Fraction, epoch: Epoch) -> int:
        """Returns the first step after which a number of examples has been trained on."""
        found = at = 0
        for span in self.earlier:
            steps = epoch.batches(found, examples, span.size)
            if at + steps <= span.step:
                return at + max(0, steps)
            found, at = epoch.after(found, span.step - at, span.size), span.step
        return at + max(0, epoch.batches(found, examples, self.size))

    def _examples(self, number: int, ends: list[int], epoch: Epoch) -> int:
        found = at = 0
        for end, size in zip([*ends, number], [*(span.size for span in self.earlier), self.size]):
            end = min(end, number)
            found, at = epoch.after(found, end - at, size), end
        return found

    def __str__(self) -> str:
        """Returns the sizes in words, such as "8, then 16"."""
        return ", then ".join(str(size) for size in [*(span.size for span in self.earlier), self.size])


@dataclasses.dataclass(frozen=True)
class Positions:
    """Makes the positions of the batches of one input pipeline; positions count the examples of all replicas."""

    sizes: Batches  # of the global batches
    start_step: int  # global batches that come before
    num_replicas: int  # replicas that step together, over all workers
    pipeline_index: int | tf.Tensor  # see `InputContext`
    num_pipelines: int  # the number of input pipelines
    numbers: tf.data.Dataset | None  # the numbers of the batches to make, see `InputContext`; None for all
    only: np.ndarray | None = None  # positions int64 `[n]` to make batches of one of, in place of all others

    @property
    def replicas_per_pipeline(self) -> int:
        """The replicas that this pipeline feeds."""
        return max(1, self.num_replicas // self.num_pipelines)

    @property
    def _batch(self) -> int:
        return self.sizes.size // self.num_replicas

    def training_batches(self, epoch: Epoch, most: int) -> tf.data.Dataset:
        """Makes the batches of a training, without end, in chunks int64 `[k, b]` of at most `most` batches.

        A batch that may be smaller is a chunk of its own.
        """
        if not self.sizes.full(epoch):
            return self._in_epochs(epoch)
        count = max(1, min(_CHUNK, CHUNK_IDS // self._batch, most))
        count = 1 if self.numbers is not None else count

        @tf.autograph.experimental.do_not_convert
        def positions(first: tf.Tensor) -> tf.Tensor:
            return self.batches(first, count, epoch)

        first = self.start_step * self.replicas_per_pipeline
        return (tf.data.Dataset.counter(first, count) if self.numbers is None else self.numbers).map(positions)

    def batches(self, first: tf.Tensor, count: int, epoch: Epoch) -> tf.Tensor:
        """Returns the positions of `count` full batches of this pipeline from a number on, int64 `[count, b]`."""
        batches = self._global_number(first + tf.range(count, dtype=tf.int64))
        begun = self.sizes.before(self.sizes.first, epoch) - self.sizes.first * self.sizes.size
        return batches[:, None] * self._batch + (begun + tf.range(self._batch, dtype=tf.int64))

    def _in_epochs(self, epoch: Epoch) -> tf.data.Dataset:
        num_examples, size, steps = epoch.examples, self.sizes.size, epoch.steps(self.sizes.size)
        epochs, done = divmod(self.sizes.before(self.sizes.first, epoch), num_examples)
        # As if the epoch where the present size begins had `steps` such batches, `missing` of them before.
        missing = steps + (done - num_examples) // size
        moved = tf.constant(done - missing * size, tf.int64)

        @tf.autograph.experimental.do_not_convert
        def positions(step: tf.Tensor) -> tf.Tensor:
            step += missing - self.sizes.first
            first = step % steps * size + tf.where(step < steps, moved, 0)
            start = (epochs + step // steps) * num_examples
            return (start + tf.range(first, tf.minimum(first + size, num_examples)))[None]

        return (tf.data.Dataset.counter(self.start_step) if self.numbers is None else self.numbers).map(positions)

    def evaluation_batches(self, num_examples: int) -> tuple[tf.data.Dataset, int | tf.Tensor]:
        """Makes the batches of all examples once, in their order; returns them and how many there are from step 0 on.

        The last one may be smaller. See `training_batches` for what is made.
        """
        batch = self._batch
        rounds, rest = divmod(-(-num_examples // batch), self.num_replicas)
        count = rounds * self.replicas_per_pipeline
        count += min(max(rest - self.pipeline_index * self.replicas_per_pipeline, 0), self.replicas_per_pipeline)

        @tf.autograph.experimental.do_not_convert
        def positions(element: tf.Tensor) -> tf.Tensor:
            start = self._global_number(element) * batch
            return tf.range(start, tf.minimum(start + batch, num_examples))[None]

        first = self.start_step * self.replicas_per_pipeline  # 0 unless predictions are resumed
        if self.numbers is None and self.num_pipelines == 1:
            # Without a function: to prepare one takes an iterator as long as ids for many steps.
            return tf.data.Dataset.range(first * batch, num_examples).batch(batch).batch(1, drop_remainder=True), count
        return (tf.data.Dataset.range(first, count) if self.numbers is None else self.numbers).map(positions), count

    def _global_number(self, element: tf.Tensor) -> tf.Tensor:
        """Returns the number of a batch of this pipeline among the batches of all replicas, in step order."""
        step, replica = element // self.replicas_per_pipeline, element % self.replicas_per_pipeline
        return step * self.num_replicas + self.pipeline_index * self.replicas_per_pipeline + replica


# From positions, int64 `[b]`, to the examples there: a structure of tensors `[b, ...]`.
Locate = Callable[[tf.Tensor], Any]
# Rounds of the keyed permutation's cipher. With the op's default of 4, the orders of neighbouring epochs correlate by
# up to 0.9 (60,000 examples), with 8 by 0.07 (a million); with 12 by no more than independent orders do.
_ROUNDS = 12
_CONSTANT, _BITS, _LEAST_WIDTH = 0xFFFFFFFC, 0x7369F885192C0EF5, 16  # of the cipher


@dataclasses.dataclass(frozen=True)
class OrderKey:
    """Everything that the order of a training depends on."""

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
