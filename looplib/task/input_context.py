"""The input context: what a `dataset` function learns about its pipeline, batch sizes, and the keyed permutation."""

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from looplib.errors import UsageError, whole_number
from looplib.task import index_shuffle

# Rounds of the keyed permutation's cipher. With the op's default of 4, the orders of neighbouring epochs correlate by
# up to 0.9 (60,000 examples), with 8 by 0.07 (a million); with 12 by no more than independent orders do.
_ROUNDS = 12
_BLOCK, _BLOCK_IDS = 32, 8192  # batches, and ids, that are drawn at once


class InputContext:
    """The input pipeline of one `dataset(context)`.

    Attributes:
      global_batch_size: examples of one step over all replicas.
      per_replica_batch_size: examples of one step on one replica: the size of the batches to make.
      num_replicas: replicas that step together, over all workers.
      pipeline_index: the index of this input pipeline; each worker has one.
      num_pipelines: the number of input pipelines.
      replicas_per_pipeline: replicas that this pipeline feeds; its batches go to them in turn.
      seed: the run's seed, for shuffles and augmentation.
      training: False for an evaluation.
      start_step: global batches that were consumed before this pipeline starts; 0 in a new run.
      arrays: the argument of `resident`, or None.
      examples: how many examples `indices` was asked for; None if it was not.
      draw: makes the ids that `indices` was asked for last, in ops that XLA compiles: a function from the number of
        batches of this pipeline before (int64 scalar tensor) and how many to make, to int64 `[batches, b]`; None for
        other data.
      steps_per_epoch: steps in which the data comes once, for `epochs` and reports; `indices` sets it, and a `dataset`
        that repeats other data may. None where it is not known.
      of_global_batches: whether the task makes global batches, see `Trainer.batches`.
      numbers: for workers that read by themselves (parameter servers), a data set of int64 scalars: the positions, in
        the order of the run or of the evaluation, of the batches that `indices` makes; else None. `dataset` is called
        in a `tf.function` then, and `pipeline_index` may be an int64 tensor.
    """

    def __init__(
        self,
        *,
        global_batch_size: int,
        num_replicas: int,
        pipeline_index: int | tf.Tensor,
        num_pipelines: int,
        seed: int,
        training: bool,
        start_step: int,
        of_global_batches: bool = False,
        numbers: tf.data.Dataset | None = None,
    ) -> None:
        self.global_batch_size = whole_number("global_batch_size", global_batch_size)
        self.per_replica_batch_size = per_replica_batch_size(global_batch_size, num_replicas)
        self.num_replicas = num_replicas
        self._pipeline_index = pipeline_index
        self.num_pipelines = num_pipelines
        self.replicas_per_pipeline = max(1, num_replicas // num_pipelines)
        self.seed = seed
        self.training = training
        self._start_step = start_step
        self.of_global_batches = of_global_batches
        self.numbers = numbers
        self.batches: int | tf.Tensor | None = None  # that `indices` makes of an evaluation
        self.positioned = False
        self.asked_for_its_part = self.asked_for_its_start = False
        self.arrays: Any = None
        self.examples: int | None = None
        self.ids: tf.data.Dataset | None = None  # what `indices` returned last
        self.draw: Callable[[tf.Tensor, int], tf.Tensor] | None = None
        self.steps_per_epoch: float | None = None

    @property
    def pipeline_index(self) -> int | tf.Tensor:
        """The index of this pipeline; a `dataset` that reads it is taken to shard its data itself."""
        self.asked_for_its_part = True
        return self._pipeline_index

    @property
    def start_step(self) -> int:
        """The global batches consumed before; a `dataset` that reads it may start there itself."""
        self.asked_for_its_start = True
        return self._start_step

    def indices(
        self, num_examples: int, seeds: bool = False, *, shuffle: bool = True, whole_epochs: bool = False
    ) -> tf.data.Dataset:
        """Makes batches of example ids, in an order that the run's seed alone decides.

        For training, epoch after epoch without end, each a keyed permutation of all ids (the op behind
        `tf.random.experimental.index_shuffle`): entering it at any position costs O(1), no shuffle buffer is held, and
        the global order is the same for any number of replicas and workers. Batches are always full, and one may
        hold the end of an epoch and the start of the next. For evaluation, every id once, in order, the last batch
        smaller.

        With `seeds`, each example comes with a seed for random augmentation by `tf.random.stateless_*`. It depends only
        on the run's seed and the example's position in the run, so that a resumed run, or one on other devices, has the
        same seeds. In training an example gets another seed each epoch, in evaluation always the same one.

            def augment(ids, seeds):
                flip = lambda one: tf.image.stateless_random_flip_left_right(one[0], seed=one[1])
                images = tf.map_fn(flip, (tf.gather(x, ids), seeds), fn_output_signature=tf.float32)
                return images, tf.gather(y, ids)

            return context.indices(len(x), seeds=True).map(augment, tf.data.AUTOTUNE)

        Args:
          num_examples: how many examples there are; ids are 0 to num_examples - 1.
          seeds: whether to give seeds too.
          shuffle: whether each epoch of a training has an order of its own; else all have the order of the ids.
          whole_epochs: whether each epoch of a training ends with a batch of its own, which may be smaller, as in
            Keras `fit`; only in a task of global batches (`Trainer.batches`).

        Returns:
          A `tf.data.Dataset` of int64 ids `[b]`, or of (ids, seeds) with int32 seeds `[b, 2]`; b is
          per_replica_batch_size, or in the last batch of an evaluation less.

        Raises:
          UsageError: if there is no example, or for whole epochs in a task of batches per replica.
        """
        num_examples = whole_number("num_examples of context.indices", num_examples, least=0)
        if num_examples == 0:
            raise UsageError(
                f"the {'training' if self.training else 'evaluation'} data set is empty: context.indices was asked for "
                "0 examples; check where the data is read from"
            )
        if whole_epochs and not self.of_global_batches:
            raise UsageError(
                "context.indices was asked for whole epochs, and the smaller batch at their end may not reach all "
                'replicas; set batches = "global" in the trainer, whose batches looplib divides among the replicas'
            )
        self.positioned, self.examples = True, num_examples
        self.ids = self._ids(num_examples, seeds, shuffle, whole_epochs)
        return self.ids

    def _ids(self, num_examples: int, seeds: bool, shuffle: bool, whole_epochs: bool) -> tf.data.Dataset:
        if not self.training:
            return self._in_order(num_examples, seeds)
        steps = num_examples / self.global_batch_size
        self.steps_per_epoch = math.ceil(steps) if whole_epochs else steps
        if whole_epochs and not steps.is_integer():
            return self._in_epochs(num_examples, seeds, shuffle)
        return self._endless(num_examples, seeds, shuffle)

    def resident(self, arrays: Any, *, shuffle: bool = True, whole_epochs: bool = False) -> tf.data.Dataset:
        """Makes batches of rows of arrays that stay on the device, in the order of `indices`.

        Only the ids travel; the rows are gathered in the step, where XLA makes the gather part of its program. For data
        that fits in the memory of each device. Return the data set as it is: augmentation and the like belong into
        `step_fn`.

            def dataset(self, context):
                return context.resident((self.x, self.y))  # step_fn gets (x, y), each [b, ...]

        Args:
          arrays: array or tensor `[n, ...]`, or a structure of these with one n.
          shuffle: see `indices`.
          whole_epochs: see `indices`.

        Returns:
          A `tf.data.Dataset` of int64 ids `[b]`, in place of which `step_fn` is given the rows.

        Raises:
          UsageError: if the arrays have no rows, or not the same number.
        """
        lengths = [array.shape[0] if len(array.shape) else None for array in tf.nest.flatten(arrays)]
        if len(set(lengths)) != 1 or None in lengths:
            raise UsageError(
                f"context.resident was given arrays of {', '.join(map(str, lengths)) or 'no'} rows; expected the same "
                "number in each, that of the examples"
            )
        self.arrays = arrays
        return self.indices(lengths[0], shuffle=shuffle, whole_epochs=whole_epochs)

    def _endless(self, num_examples: int, with_seeds: bool, shuffle: bool) -> tf.data.Dataset:
        size = self.per_replica_batch_size
        block = max(1, min(_BLOCK, _BLOCK_IDS // size))

        def positions_of(first: tf.Tensor, block: int) -> tf.Tensor:
            batches = self._global_batch_index(first + tf.range(block, dtype=tf.int64))
            return tf.reshape(batches[:, None] * size + tf.range(size, dtype=tf.int64), [-1])

        @tf.autograph.experimental.do_not_convert
        def draw(first: tf.Tensor, block: int) -> tf.Tensor:
            positions = positions_of(first, block)
            found = positions % num_examples
            if shuffle:
                key = self.seed, positions // num_examples
                found = index_shuffle.index_shuffle(found, key, num_examples - 1, _ROUNDS)
            return tf.reshape(found, [block, size])

        @tf.autograph.experimental.do_not_convert
        def ids(first: tf.Tensor, block: int = block) -> Any:  # a block of batches at once, at half the cost
            positions = positions_of(first, block)
            found = tf.reshape(self._id_at(positions, num_examples, shuffle), [block, size])
            return (found, tf.reshape(self._seeds(positions), [block, size, 2])) if with_seeds else found

        self.draw = None if with_seeds else draw
        if self.numbers is not None:
            return self.numbers.map(lambda number: tf.nest.map_structure(lambda part: part[0], ids(number, block=1)))
        first = self.start_step * self.replicas_per_pipeline
        blocks = tf.data.Dataset.counter(first, block)
        return blocks.map(ids, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).unbatch()

    def _in_epochs(self, num_examples: int, with_seeds: bool, shuffle: bool) -> tf.data.Dataset:
        size, steps = self.global_batch_size, self.steps_per_epoch

        @tf.autograph.experimental.do_not_convert
        def ids(step: tf.Tensor) -> Any:
            epoch, first = step // steps * num_examples, step % steps * size
            positions = epoch + tf.range(first, tf.minimum(first + size, num_examples))
            found = self._id_at(positions, num_examples, shuffle)
            return (found, self._seeds(positions)) if with_seeds else found

        numbers = tf.data.Dataset.counter(self.start_step) if self.numbers is None else self.numbers
        return numbers.map(ids, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    def _id_at(self, positions: tf.Tensor, num_examples: int, shuffle: bool) -> tf.Tensor:
        """Returns the ids at positions in the training, int64 `[b]`, epoch after epoch."""
        epoch, position = positions // num_examples, positions % num_examples
        if not shuffle:
            return position
        seeds = tf.stack([tf.fill(tf.shape(epoch), tf.constant(self.seed, tf.int64)), epoch, 0 * epoch], axis=1)
        return tf.raw_ops.RandomIndexShuffle(
            index=position, seed=seeds, max_index=tf.constant(num_examples - 1, tf.int64), rounds=_ROUNDS
        )

    def _in_order(self, num_examples: int, with_seeds: bool) -> tf.data.Dataset:
        batch = self.per_replica_batch_size
        batches = -(-num_examples // batch)
        rounds, rest = divmod(batches, self.num_replicas)
        own = rounds * self.replicas_per_pipeline
        own += min(max(rest - self.pipeline_index * self.replicas_per_pipeline, 0), self.replicas_per_pipeline)

        @tf.autograph.experimental.do_not_convert
        def ids(element: tf.Tensor) -> Any:
            start = self._global_batch_index(element) * batch
            positions = tf.range(start, tf.minimum(start + batch, num_examples))
            return (positions, self._seeds(positions)) if with_seeds else positions

        self.batches = own
        first = self.start_step * self.replicas_per_pipeline  # 0 unless predictions are resumed
        return (tf.data.Dataset.range(first, own) if self.numbers is None else self.numbers).map(ids)

    def _seeds(self, positions: tf.Tensor) -> tf.Tensor:
        """Returns seeds int32 `[b, 2]` for int64 positions in the run `[b]`, no two alike."""
        key = _mix(tf.constant((2 * self.seed + self.training) % 2**64, tf.uint64))
        return tf.bitcast(_mix(tf.bitcast(positions, tf.uint64) + key), tf.int32)

    def _global_batch_index(self, element: tf.Tensor) -> tf.Tensor:
        """Returns the position of this pipeline's batch among the batches of all replicas, in step order."""
        step, replica = element // self.replicas_per_pipeline, element % self.replicas_per_pipeline
        return step * self.num_replicas + self.pipeline_index * self.replicas_per_pipeline + replica


def _mix(words: tf.Tensor) -> tf.Tensor:
    """Scatters uint64 words one to one: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = tf.bitwise.bitwise_xor(words, tf.bitwise.right_shift(words, tf.constant(shift, tf.uint64)))
        words *= tf.constant(factor, tf.uint64)
    return tf.bitwise.bitwise_xor(words, tf.bitwise.right_shift(words, tf.constant(31, tf.uint64)))


def per_replica_batch_size(global_batch_size: int, num_replicas: int) -> int:
    """Divides the global batch.

    Args:
      global_batch_size: examples of a step over all replicas.
      num_replicas: how many replicas there are.

    Returns:
      The examples of a step on one replica.

    Raises:
      UsageError: if it does not divide, naming the nearest sizes that do.
    """
    global_batch_size = whole_number("global_batch_size", global_batch_size)
    if global_batch_size % num_replicas:
        below = global_batch_size // num_replicas * num_replicas
        nearest = " or ".join(str(size) for size in (below, below + num_replicas) if size)
        raise UsageError(
            f"global_batch_size {global_batch_size} does not divide over {num_replicas} replicas; use {nearest}"
        )
    return global_batch_size // num_replicas
