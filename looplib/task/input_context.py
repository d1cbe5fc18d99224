"""The input context: what a `dataset` function learns about its pipeline, batch sizes, and the keyed permutation."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.errors import UsageError, whole_number
from looplib.records import reading, sources
from looplib.records.damage import LeftOut, tolerant
from looplib.records.order import BlockOrder, Order, Picks, RecordOrder, seeds_at
from looplib.task.plans import Ids, Kept, Plan, Run, beside, plan_of

_CHUNK, _CHUNK_IDS, _CHUNK_BYTES = 32, 8192, 1 << 22  # batches, ids and bytes of records that are drawn at once
_ALONE = 256  # records of a batch that is read by itself: taking chunks apart would cost more
_BLOCK_BYTES = 1 << 18  # of neighbouring records that are read at once
_LEAST_BLOCKS = 16  # of a lane, so that an epoch mixes the data well
_PARALLEL = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": True}


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
      bad_records: the damaged records that `records` has left out, and how many it may; None for none.
      sources: what `records` was given, opened.
      reads: how these are read.
      positions: what `indices` or `records` made its batches of last: chunks of positions in the run, int64 `[k, b]`.
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
        bad_records: LeftOut | None = None,
        only: np.ndarray | None = None,
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
        self.bad_records = bad_records
        self._only = only
        self.batches: int | tf.Tensor | None = None  # that `indices` makes of an evaluation
        self.positioned = self.by_python = False
        self.asked_for_its_part = self.asked_for_its_start = False
        self.arrays: Any = None
        self.examples: int | None = None
        self.ids: tf.data.Dataset | None = None  # what `indices` returned last, if an example has one
        self.in_turn = False  # whether those of each batch follow one another
        self.draw: Callable[[tf.Tensor, int], tf.Tensor] | None = None
        self.steps_per_epoch: float | None = None
        self.sources: list[sources.Source] = []
        self.reads: list[reading.Reads] = []
        self.positions: tf.data.Dataset | None = None
        self.made: list[tf.data.Dataset] = []  # what `indices`, `records` and `resident` returned

    def again(self, start_step: int = 0, only: np.ndarray | None = None) -> "InputContext":
        """Returns a new context of the same pipeline.

        Args:
          start_step: global batches that were consumed before.
          only: positions in the run, int64 `[n]`, of examples to make batches of one of; None makes all batches.
        """
        return InputContext(
            global_batch_size=self.global_batch_size,
            num_replicas=self.num_replicas,
            pipeline_index=self._pipeline_index,
            num_pipelines=self.num_pipelines,
            seed=self.seed,
            training=self.training,
            start_step=start_step,
            of_global_batches=self.of_global_batches,
            bad_records=self.bad_records,
            only=only,
        )

    @property
    def tolerates(self) -> bool:
        """Whether some damaged records are left out."""
        return self.bad_records is not None and self.bad_records.most > 0

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
        self, num_examples: int | Plan, seeds: bool = False, *, shuffle: bool = True, whole_epochs: bool = False
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
          num_examples: how many examples there are; ids are 0 to num_examples - 1. Or a plan, `Kept`, `Mixture`,
            `Packed` or `Buckets`, whose examples stand for the ids in what is returned.
          seeds: whether to give seeds too.
          shuffle: whether each epoch of a training has an order of its own; else all have the order of the ids.
          whole_epochs: whether each epoch of a training ends with a batch of its own, which may be smaller, as in
            Keras `fit`; only in a task of global batches (`Trainer.batches`).

        Returns:
          A `tf.data.Dataset` of int64 ids `[b]`, or of (ids, seeds) with int32 seeds `[b, 2]`; b is
          per_replica_batch_size, or in the last batch of an evaluation less.

        Raises:
          UsageError: if there is no example, or for whole epochs in a task of batches per replica or of a plan that has
            none.
        """
        plan = plan_of(num_examples, "indices", shuffle, whole_epochs)
        found = plan.located(Run(self.seed, self.global_batch_size) if self.training else None)

        @tf.autograph.experimental.do_not_convert
        def examples(positions: tf.Tensor) -> Any:  # a chunk of batches at once, at half the cost
            return beside(found(positions), self._seeds(positions)) if seeds else found(positions)

        most = max(1, _CHUNK_IDS // (self.per_replica_batch_size * plan.width))
        chunks = self._positions(plan, whole_epochs, "indices", most)
        self.in_turn = isinstance(plan, Ids) and not (self.training or seeds)  # then the positions are the ids
        batches = (chunks if self.in_turn else chunks.map(examples, **_PARALLEL)).unbatch()
        self.ids = batches if plan.width == 1 else None
        ends = whole_epochs and plan.size % self.global_batch_size
        drawn = isinstance(plan, Ids) and self.training and not seeds and not ends
        self.draw = functools.partial(self._draw, RecordOrder(plan.size, self.seed, shuffle)) if drawn else None
        self.made.append(batches)
        return batches

    @tf.autograph.experimental.do_not_convert
    def _draw(self, order: RecordOrder, first: tf.Tensor, count: int) -> tf.Tensor:
        positions = tf.reshape(self._batches_from(first, count), [-1])
        return tf.reshape(order.ids_in_xla(positions), [count, self.per_replica_batch_size])

    def records(
        self,
        source: Any,
        *,
        block: int | None = None,
        shuffle: bool = True,
        seeds: bool = False,
        whole_epochs: bool = False,
    ) -> tf.data.Dataset:
        """Makes batches of records of files, or of another source, read by number in the order of `indices`.

        All that `indices` promises holds: the order depends on the run's seed alone, entering it at any position costs
        O(1), each worker reads only its own records, and an evaluation has each record once, in order.

            def dataset(self, context):
                features = {"x": tf.io.FixedLenFeature([784], tf.float32), "y": tf.io.FixedLenFeature([], tf.int64)}
                parse = lambda records: tf.io.parse_example(records, features)
                return context.records("/data/train-*.tfrecord").map(parse, tf.data.AUTOTUNE)

        Args:
          source: files, as a path, a pattern or a list of these, whose names say their format; or what
            `looplib.open_records` returns; or any object with `__len__` and `__getitem__`, such as a data source of
            array_record, grain or TFDS; or a plan of records: `Mixture`, `Kept` or `Buckets`.
          block: neighbouring records that are read at once in a training. 1 shuffles all records, and reads each by
            itself; more suits disks: a batch takes its records from up to 64 blocks of the data, which come in a
            shuffled order, in each of which the records are shuffled. The default is about a quarter of a megabyte, or
            less so that there are many blocks. Of a plan, whose default is 1, only `Kept` takes more.
          shuffle: see `indices`.
          seeds: see `indices`.
          whole_epochs: see `indices`.

        Returns:
          A `tf.data.Dataset` of records: strings `[b]`, or a structure of arrays `[b, ...]` if the source has those; or
          of (records, seeds) with int32 seeds `[b, 2]`.

        Raises:
          UsageError: if no file matches, a file is damaged, or there is no record.
        """
        if isinstance(source, Kept) and source.source is not None and block not in (None, 1):
            source = sources.Subset(source.source, source.ids)
        if isinstance(source, Plan):
            kind = f"looplib.{type(source).__name__}"
            if source.source is None:
                raise UsageError(f"context.records was given {kind} without records; give it their source")
            if block not in (None, 1):
                raise UsageError(
                    f"context.records was given {kind} and block={block}, and reads each record of such a plan by "
                    "itself; leave out block, which looplib.Kept and records without a plan can have"
                )
            return self._planned(plan_of(source, "records", shuffle, whole_epochs), seeds, whole_epochs)
        source = sources.opened(source)
        if self.training and shuffle:
            block = self._block(source) if block is None else whole_number("block of context.records", block)
        order = RecordOrder(len(source), self.seed, shuffle and self.training)
        if self.training and shuffle and block > 1:
            order = BlockOrder(len(source), self.seed, block, self.global_batch_size)
        return self.read(source, order, seeds=seeds, whole_epochs=whole_epochs)

    def _planned(self, plan: Plan, seeds: bool, whole_epochs: bool) -> tf.data.Dataset:
        found = plan.located(Run(self.seed, self.global_batch_size) if self.training else None)

        @tf.autograph.experimental.do_not_convert
        def picks(positions: tf.Tensor) -> Any:
            ids, *known = plan.to_read(found(positions))
            return Picks(ids, ids, ids + 1), *known, *([self._seeds(positions)] if seeds else [])

        return self._read(plan, picks, whole_epochs, reading.Reads(plan.source, False, isinstance(plan, Kept)))

    def read(
        self, source: sources.Source, order: Order, *, seeds: bool = False, whole_epochs: bool = False
    ) -> tf.data.Dataset:
        """Makes batches of the records that an order picks; see `records`, which chooses the order.

        Args:
          source: the records.
          order: which record is at each position.
          seeds: see `indices`.
          whole_epochs: see `indices`.
        """

        @tf.autograph.experimental.do_not_convert
        def picks(positions: tf.Tensor) -> Any:
            found = order.picks(tf.reshape(positions, [-1]))
            found = [tf.ensure_shape(tf.reshape(part, tf.shape(positions)), positions.shape) for part in found]
            return (Picks(*found), self._seeds(positions)) if seeds else (Picks(*found),)

        by_pieces = not isinstance(order, RecordOrder)
        reads = reading.Reads(source, by_pieces, by_pieces or order.shuffle)
        return self._read(Ids(len(source), source=source), picks, whole_epochs, reads)

    def _read(
        self, plan: Plan, picks: Callable[[tf.Tensor], Any], whole_epochs: bool, reads: reading.Reads
    ) -> tf.data.Dataset:
        source = plan.source
        self.sources.append(source)
        self.reads.append(reads)
        batch = self.per_replica_batch_size
        most = int(_CHUNK_BYTES / (batch * sources.mean_bytes(source))) if batch < _ALONE else 1
        source = tolerant(source, self.bad_records, replace=self.training) if self.tolerates else source
        picked = self._positions(plan, whole_epochs, "records", most).map(picks, **_PARALLEL)
        self.ids = picked.map(_ids).unbatch()
        if isinstance(plan.source, sources.Subset):
            self.ids = self.ids.map(functools.partial(tf.gather, tf.constant(plan.source.ids)))
        self.by_python = True
        read = reading.read(source, picked, reads, may_lack=self.tolerates and not self.training)
        self.made.append(batches := _batches(read))
        return batches

    def _block(self, source: sources.Source) -> int:
        if isinstance(source, sources.Blocked):
            return source.block
        lanes = BlockOrder(len(source), self.seed, 1, self.global_batch_size).lanes
        return max(1, min(int(_BLOCK_BYTES / sources.mean_bytes(source)), len(source) // (_LEAST_BLOCKS * lanes)))

    def _positions(self, plan: Plan, whole_epochs: bool, asked: str, most: int) -> tf.data.Dataset:
        """Makes the positions of this pipeline's batches in the run, or in the evaluation.

        Args:
          plan: what stands there.
          whole_epochs: see `indices`.
          asked: the method that was called, for messages.
          most: batches of a chunk, at most.

        Returns:
          Chunks of batches, int64 `[k, b]`; a batch that may be smaller is a chunk of its own.
        """
        num_examples = plan.size
        if num_examples == 0:
            raise UsageError(
                f"the {'training' if self.training else 'evaluation'} data set is empty: context.{asked} was asked for "
                "0 examples; check where the data is read from"
            )
        if whole_epochs and not self.of_global_batches:
            raise UsageError(
                f"context.{asked} was asked for whole epochs, and the smaller batch at their end may not reach all "
                'replicas; set batches = "global" in the trainer, whose batches looplib divides among the replicas'
            )
        self.positioned, self.examples = True, num_examples
        self.positions = self._chunks(plan, whole_epochs, most)
        if self._only is not None:
            return tf.data.Dataset.from_tensor_slices(self._only[:, None, None])
        return self.positions

    def _chunks(self, plan: Plan, whole_epochs: bool, most: int) -> tf.data.Dataset:
        num_examples = plan.size
        if not self.training:
            return self._in_order(num_examples)
        steps = num_examples / self.global_batch_size
        if plan.comes_in_epochs:
            self.steps_per_epoch = math.ceil(steps) if whole_epochs else steps
        if whole_epochs and not steps.is_integer():
            return self._in_epochs(num_examples)
        return self._endless(most)

    def resident(self, arrays: Any, *, shuffle: bool = True, whole_epochs: bool = False) -> tf.data.Dataset:
        """Makes batches of rows of arrays that stay on the device, in the order of `indices`.

        Only the ids travel; the rows are gathered in the step, where XLA makes the gather part of its program. A
        training on CPUs with `loop="xla"` or `"auto"` gathers small rows ahead of it. For data that fits in the memory
        of each device. Return the data set as it is: augmentation and the like belong into `step_fn`.

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

    def _endless(self, most: int) -> tf.data.Dataset:
        count = max(1, min(_CHUNK, _CHUNK_IDS // self.per_replica_batch_size, most))
        count = 1 if self.numbers is not None else count

        @tf.autograph.experimental.do_not_convert
        def positions(first: tf.Tensor) -> tf.Tensor:
            return self._batches_from(first, count)

        first = self._start_step * self.replicas_per_pipeline
        return (tf.data.Dataset.counter(first, count) if self.numbers is None else self.numbers).map(positions)

    def _batches_from(self, first: tf.Tensor, count: int) -> tf.Tensor:
        """Returns the positions of `count` batches of this pipeline from a number on, int64 `[count, b]`."""
        size = self.per_replica_batch_size
        batches = self._global_batch_index(first + tf.range(count, dtype=tf.int64))
        return batches[:, None] * size + tf.range(size, dtype=tf.int64)

    def _in_epochs(self, num_examples: int) -> tf.data.Dataset:
        size, steps = self.global_batch_size, self.steps_per_epoch

        @tf.autograph.experimental.do_not_convert
        def positions(step: tf.Tensor) -> tf.Tensor:
            epoch, first = step // steps * num_examples, step % steps * size
            return (epoch + tf.range(first, tf.minimum(first + size, num_examples)))[None]

        return (tf.data.Dataset.counter(self._start_step) if self.numbers is None else self.numbers).map(positions)

    def _in_order(self, num_examples: int) -> tf.data.Dataset:
        batch = self.per_replica_batch_size
        batches = -(-num_examples // batch)
        rounds, rest = divmod(batches, self.num_replicas)
        own = rounds * self.replicas_per_pipeline
        own += min(max(rest - self.pipeline_index * self.replicas_per_pipeline, 0), self.replicas_per_pipeline)

        @tf.autograph.experimental.do_not_convert
        def positions(element: tf.Tensor) -> tf.Tensor:
            start = self._global_batch_index(element) * batch
            return tf.range(start, tf.minimum(start + batch, num_examples))[None]

        self.batches = own
        first = self._start_step * self.replicas_per_pipeline  # 0 unless predictions are resumed
        if self.numbers is None and self.num_pipelines == 1:
            # Without a function: to prepare one takes an iterator as long as ids for many steps.
            return tf.data.Dataset.range(first * batch, num_examples).batch(batch).batch(1, drop_remainder=True)
        return (tf.data.Dataset.range(first, own) if self.numbers is None else self.numbers).map(positions)

    def _seeds(self, positions: tf.Tensor) -> tf.Tensor:
        """Returns seeds int32 `[k, b, 2]` of positions `[k, b]`."""
        found = tf.reshape(
            seeds_at(tf.reshape(positions, [-1]), self.seed, self.training), [*tf.unstack(tf.shape(positions)), 2]
        )
        return tf.ensure_shape(found, [*positions.shape, 2])

    def _global_batch_index(self, element: tf.Tensor) -> tf.Tensor:
        """Returns the position of this pipeline's batch among the batches of all replicas, in step order."""
        step, replica = element // self.replicas_per_pipeline, element % self.replicas_per_pipeline
        return step * self.num_replicas + self.pipeline_index * self.replicas_per_pipeline + replica


@tf.autograph.experimental.do_not_convert
def _ids(picks: Picks, *_: Any) -> tf.Tensor:
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
