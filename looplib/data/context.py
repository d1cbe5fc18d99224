"""InputContext: what a `dataset` function asks of looplib, and what it has asked, for whatever builds its pipeline."""

import copy
import dataclasses
import functools
import math
import threading
import zlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from looplib.base.messages import whole_number
from looplib.data.order import (
    CHUNK_IDS,
    Batches,
    BatchSizePeriod,
    Epoch,
    Ids,
    Locate,
    OrderKey,
    Plan,
    Positions,
    as_plan,
    derived_seed,
    seeds_at,
)
from looplib.errors import BatchSizeError, DatasetError, EmptyDataError, OrderError

if TYPE_CHECKING:
    from looplib.data.loader import LoaderReader
    from looplib.data.records.follow import Follow, FollowedFiles
    from looplib.data.records.reader import RecordReader  # which imports this


_MOST_BATCHES = 2**62
_PROBED = 256  # examples whose order a checksum is of


@dataclasses.dataclass
class BadRecords:
    """The damaged records that a run may leave out, counted over its data sets, workers and restarts.

    Raises:
      UsageError: if `most` is not a whole number of at least 0.
    """

    most: int = 0  # how many there may be
    # the folder where the processes of the run note them; None counts only in this process
    folder: str | None = None
    names: set[str] = dataclasses.field(default_factory=set, init=False)  # of those that are known to this process
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, init=False)  # held while they are counted

    def __post_init__(self) -> None:
        self.most = whole_number("bad_records", self.most, least=0)


@dataclasses.dataclass(kw_only=True)
class DatasetCall:
    """A call of `indices`, `records` or `resident`: what it makes."""

    positions: tf.data.Dataset  # chunks of the positions in the run of its batches, int64 `[k, b]`
    steps: int | tf.Tensor | None  # how many batches it makes of an evaluation; None for a training
    batches: tf.data.Dataset | None = None  # the data set that it returned
    ids: tf.data.Dataset | None = None  # the ids of each batch, int64 `[b]`, if each example has one; else None
    sequential: bool = False  # whether the ids of each batch follow one another
    # Finds what is read at positions in the run, int64 `[1, p]`; None where that is not known.
    order: Callable[[tf.Tensor], Any] | None = None
    # Makes the ids in ops that XLA compiles: a function from the number of batches of this pipeline before (int64
    # scalar tensor) and how many to make, to int64 `[batches, b]`; None for other data.
    draw: Callable[[tf.Tensor, int], tf.Tensor] | None = None


@dataclasses.dataclass
class DatasetRequests:
    """The requests of a `dataset` function to its context."""

    part: bool = False  # whether it asked which part of the data is this pipeline's
    start: bool = False  # whether it asked after how many batches it starts
    positioned: bool = False  # whether the position of each batch in the run is known
    unnamed: int = 0  # how many calls had no name
    named: dict[str, int] = dataclasses.field(default_factory=dict)  # the examples of the calls with a name
    arrays: Any = None  # the argument of `resident`, or None
    examples: int | None = None  # the most examples of all calls; None without a call
    epoch: Epoch | None = None  # how many examples come in an epoch; None where that is not known
    reader: "RecordReader | None" = None  # what reads records, once `records` was called
    loader: "LoaderReader | None" = None  # what reads a loader, once `loader` was called
    calls: list[DatasetCall] = dataclasses.field(default_factory=list)  # in their order

    def order(self) -> list[int]:
        """Returns checksums of the order of the first examples of a run, up to each of them; [] if it is not known."""
        orders = [call.order for call in self.calls if call.order is not None]
        with tf.init_scope():
            positions = tf.range(_PROBED, dtype=tf.int64)[tf.newaxis]
            parts = [np.asarray(part)[0] for order in orders for part in tf.nest.flatten(order(positions))]
        checksums = [zlib.crc32(str(self.epoch).encode())]
        for example in zip(*parts):
            checksums.append(zlib.crc32(b"".join(part.tobytes() for part in example), checksums[-1]))
        return checksums[1:]

    @property
    def last(self) -> DatasetCall | None:
        """The last call."""
        return self.calls[-1] if self.calls else None


@dataclasses.dataclass
class PipelineMemory:
    """The parts of the data of a training that outlive its pipelines, which are built again at each new position."""

    followed: "FollowedFiles | None" = None  # the files of `records(follow=...)`, once it was called


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
      start_step: global batches that were consumed before this pipeline starts; 0 in a new run. Of a run whose batch
        size has changed, as many batches of the present size as have the examples of those.
      steps_per_epoch: steps of one pass over the data, for `epochs` and reports. `indices` sets it; after several
        calls the longest pass counts, so that every example of all calls has come. A `dataset` may set it,
        such as one that repeats other data. None where it is not known.
      global_batches: whether the task makes global batches, see `Trainer.batches`.
      batch_size_varies: whether its batches may have any size, see `Trainer.batch_size_varies`.
      bad_records: the damaged records that `records` may leave out.
      positions: makes the positions of the batches. For workers that read by themselves (parameter servers) its
        `numbers` are a data set of int64 scalars: the positions of the batches to make, in their order; `dataset` is
        called in a `tf.function` then, and `pipeline_index` may be an int64 tensor.
      requests: what `dataset` has asked.
      share: `(number, count)`: which of `count` data workers the pipeline is for. It makes each `count`-th batch of
        examples by number, and to other data it is one of `count` times as many pipelines.
      remote: whether the pipeline runs in other processes, which read by themselves (parameter servers).
      memory: what outlives the pipeline.
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
        global_batches: bool = False,
        batch_size_varies: bool = False,
        numbers: tf.data.Dataset | None = None,
        bad_records: BadRecords | None = None,
        only: np.ndarray | None = None,
        earlier: Sequence[BatchSizePeriod] = (),
        share: tuple[int, int] = (0, 1),
        remote: bool = False,
        memory: PipelineMemory | None = None,
    ) -> None:
        self.global_batch_size = whole_number("global_batch_size", global_batch_size)
        self.per_replica_batch_size = per_replica_batch_size(global_batch_size, num_replicas)
        self.share, (number, count) = share, share
        self.num_replicas, self.num_pipelines = num_replicas, num_pipelines * count
        self.seed, self.training, self.global_batches = seed, training, global_batches
        self.batch_size_varies = batch_size_varies
        self.bad_records, self.remote = bad_records or BadRecords(), remote
        self.memory = memory or PipelineMemory()
        sizes = Batches(self.global_batch_size, tuple(earlier))
        positions = Positions(sizes, start_step, num_replicas, pipeline_index, num_pipelines, numbers, only)
        self.replicas_per_pipeline = positions.replicas_per_pipeline
        if count > 1:
            first = start_step * self.replicas_per_pipeline + number
            positions = dataclasses.replace(positions, numbers=tf.data.Dataset.range(first, _MOST_BATCHES, count))
        self.positions = positions
        self.requests = DatasetRequests()

    def again(self, start_step: int = 0, only: np.ndarray | None = None) -> "InputContext":
        """Returns a new context of the same pipeline; `only`, int64 `[n]`, are positions, each a batch of its own."""
        context = copy.copy(self)
        context.positions = dataclasses.replace(self.positions, start_step=start_step, numbers=None, only=only)
        context.requests = DatasetRequests()
        return context

    @property
    def pipeline_index(self) -> int | tf.Tensor:
        """The index of this pipeline. Reading it states that `dataset` gives each pipeline its own part of the data.

        On several workers, a `dataset` that neither reads it nor calls `indices`, `records` or `resident` is refused.
        Whether the parts differ is not checked: without a `shard` or the like, all workers train on the same examples.
        """
        self.requests.part = True
        number, count = self.share
        return self.positions.pipeline_index * count + number

    @property
    def start_step(self) -> int:
        """Global batches consumed before, for data other than `indices` or `records` that skips to its start itself.

        A pipeline without these is made with 0 and then brought to its position, so a wrong use of it loses nothing.
        """
        self.requests.start = True
        return self.positions.sizes.whole(self.positions.start_step)

    @property
    def steps_per_epoch(self) -> float | None:
        """The steps of one pass over the data; None if not known."""
        return self.requests.epoch.steps(self.global_batch_size) if self.requests.epoch else None

    @steps_per_epoch.setter
    def steps_per_epoch(self, steps: float | None) -> None:
        if steps is not None and not (math.isfinite(steps) and steps > 0):
            raise DatasetError(f"context.steps_per_epoch is {steps}; expected a positive number or None")
        self.requests.epoch = None if steps is None else Epoch(Fraction(float(steps)) * self.global_batch_size)

    def indices(
        self,
        num_examples: int | Plan,
        seeds: bool = False,
        *,
        shuffle: bool = True,
        whole_epochs: bool = False,
        name: str | None = None,
        repeat: bool = False,
    ) -> tf.data.Dataset:
        """Makes batches of example ids, in an order that the run's seed decides.

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

        Each call in one `dataset` has an order and seeds of its own, so that data sets of several calls can be zipped.
        Calls with one `name` share them, such as those for inputs and targets that are kept apart.

        A run that continues with another batch size begins at the next example.

        Args:
          num_examples: how many examples there are; ids are 0 to num_examples - 1. Or a plan, `Kept`, `Mixture`,
            `Packed` or `Buckets`, whose examples stand for the ids in what is returned.
          seeds: whether to give seeds too.
          shuffle: whether each epoch of a training has an order of its own; else all have the order of the ids.
          whole_epochs: whether each epoch of a training ends with a batch of its own, which may be smaller, as in
            Keras `fit`; only in a task of global batches (`Trainer.batches`).
          name: names the order. Without one, the first call has the order of the run's seed, and each further one an
            order by its number among the calls without a name.
          repeat: whether a training with fewer examples than a global batch repeats examples within a batch; else
            this is refused.

        Returns:
          A `tf.data.Dataset` of int64 ids `[b]`, or of (ids, seeds) with int32 seeds `[b, 2]`; b is
          per_replica_batch_size, or in the last batch of an evaluation less.

        Raises:
          UsageError: if there is no example, or fewer than a global batch of a training; or for whole epochs in a task
            of batches per replica or of a plan that has none.
        """
        plan = as_plan(num_examples, "indices", shuffle, whole_epochs)
        seed = self.order_seed(plan, name)
        found = self.located(plan, seed)

        @tf.autograph.experimental.do_not_convert
        def examples(positions: tf.Tensor) -> Any:  # a chunk of batches at once, at half the cost
            given = found(positions)
            if not seeds:
                return given
            return *(given if type(given) is tuple else (given,)), seeds_at(positions, seed, self.training)

        most = max(1, CHUNK_IDS // (self.per_replica_batch_size * plan.width))
        chunks, call = self.positions_of(plan, "indices", whole_epochs, repeat, most)
        ordered = isinstance(plan, Ids) and not seeds
        call.sequential = ordered and not self.training  # then the positions are the ids
        call.batches = (chunks if call.sequential else chunks.map(examples, **_PARALLEL)).unbatch()
        call.ids = call.batches if plan.width == 1 else None
        call.order = found
        epoch = Epoch(plan.size, whole_epochs)
        if ordered and self.training and self.positions.sizes.full(epoch):
            call.draw = functools.partial(_draw, plan, seed, self.positions, epoch)
        return call.batches

    def order_seed(self, plan: Plan, name: str | None) -> int:
        """Returns the seed of the order of the next call; for the name see `indices`."""
        if name is None:
            number = self.requests.unnamed = self.requests.unnamed + 1
            return self.seed if number == 1 else derived_seed(self.seed, f"call {number}")
        if not isinstance(name, str) or not name:
            raise OrderError(f"the name of an order of examples is {name!r}; expected a text")
        others = self.requests.named.setdefault(name, plan.size)
        if others != plan.size:
            raise OrderError(
                f"two calls for {others} and for {plan.size} examples have the name {name!r}, by which they would "
                "share an order; give them different names, or as many examples"
            )
        return derived_seed(self.seed, f"name {name}")

    def located(self, plan: Plan, seed: int) -> Locate:
        """Returns `Plan.located` for this training, in the order of a seed, or for this evaluation."""
        return plan.located(OrderKey(seed, self.positions.sizes) if self.training else None)

    def records(
        self,
        source: Any,
        *,
        block: int | None = None,
        shuffle: bool = True,
        seeds: bool = False,
        whole_epochs: bool = False,
        name: str | None = None,
        repeat: bool = False,
        follow: "bool | Follow" = False,
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
            shuffled order; each is shuffled too. The default is about a quarter of a megabyte, or
            less so that there are many blocks. Of a plan, whose default is 1, only `Kept` takes more.
          shuffle: see `indices`.
          seeds: see `indices`.
          whole_epochs: see `indices`.
          name: see `indices`.
          repeat: see `indices`.
          follow: whether a training takes files that match a pattern as they appear, each once, in the order of their
            names; with a `looplib.Follow` for its settings. The data has no end then (`train(steps=-1)` trains until
            it is stopped), and the run waits while there is no whole batch. `shuffle` is within each file.

        Returns:
          A `tf.data.Dataset` of records: strings `[b]`, or a structure of arrays `[b, ...]` if the source has those; or
          of (records, seeds) with int32 seeds `[b, 2]`.

        Raises:
          UsageError: if no file matches, a file is damaged, or there is no record, or fewer than a global batch of a
            training.
        """
        if self.requests.reader is None:
            from looplib.data.records.reader import RecordReader  # here, as it imports this, and few data sets need it

            self.requests.reader = RecordReader(self)
        if follow:
            if whole_epochs or repeat:
                raise OrderError("files that are followed have no epochs; leave out whole_epochs and repeat")
            from looplib.data.records.follow import batches  # here, as few data sets need it

            return batches(
                self.requests.reader, self, source, follow, block=block, shuffle=shuffle, seeds=seeds, name=name
            )
        return self.requests.reader.batches(
            source, block=block, shuffle=shuffle, seeds=seeds, whole_epochs=whole_epochs, name=name, repeat=repeat
        )

    def loader(self, make: Callable[[int, int], Any], *, mismatch: str = "skip") -> tf.data.Dataset:
        """Makes the batches of a loader that has an order of its own, and continues it at a resume.

        A loader is an iterable of batches: of Grain, Hugging Face, PyTorch, WebDataset, or your own. Its passes follow
        one another in a training, and an evaluation has one. One with a state (`state_dict` and `load_state_dict`, or
        `get_state` and `set_state` of its iterator) is resumed by the state that it had up to four batches before
        the next one; one without is begun at the pass, and read up to there. If it, or its `sampler`, has `set_epoch`,
        that gets the number of each pass, from 0 on.

            def dataset(self, context):
                size = context.loader_batch_size

                def make(index, count):
                    data = grain.MapDataset.source(self.examples).seed(context.seed).shuffle().repeat()
                    return data[index::count].to_iter_dataset().batch(size, drop_remainder=True)

                return context.loader(make)

        A checkpoint holds a checksum of the last batches, which have to come again at a resume.

        Args:
          make: a function from the index of a part of the data and the number of parts, one for each worker, to a
            loader of `loader_batch_size` examples a batch, the last one of an evaluation less. It is called again at
            a resume, and for each evaluation. Batches are structures of arrays or PyTorch tensors `[b, ...]`, or of
            lists of numbers or texts, of one type each.
          mismatch: what a resume does if the loader gives other batches from its state than before. "skip" reads the
            pass from its start, and is an error if that gives other ones too; "refuse" is an error at once; "warn"
            reads the pass from its start, and trains on what comes, such as for random augmentation.

        Returns:
          A `tf.data.Dataset` of batches `[per_replica_batch_size, ...]`, or of global ones (see `Trainer.batches`).

        Raises:
          UsageError: for what is no loader of batches, or has none, or under parameter servers.
        """
        from looplib.data.loader import read  # here, as few data sets need it

        return read(self, make, mismatch)

    @property
    def loader_batch_size(self) -> int:
        """The examples of a batch of a `loader`: those of a step that this pipeline feeds."""
        return self.global_batch_size // self.num_pipelines

    def positions_of(
        self, plan: Plan, method: str, whole_epochs: bool, repeat: bool, most: int
    ) -> tuple[tf.data.Dataset, DatasetCall]:
        """Makes the positions of this pipeline's batches of a plan, for a `method` with these arguments.

        Returns chunks of at most `most` batches, int64 `[k, b]`, and the call, for the method to complete. A batch that
        may be smaller is a chunk of its own.
        """
        self._check(plan, f"context.{method}", whole_epochs, repeat)
        requests, epoch, steps = self.requests, Epoch(plan.size, whole_epochs), None
        requests.positioned = requests.part = True
        requests.examples = max(requests.examples or 0, plan.size)
        if self.training:
            positions = self.positions.training_batches(epoch, most)
            if plan.comes_in_epochs and (requests.epoch is None or requests.epoch.examples < plan.size):
                requests.epoch = epoch
        else:
            positions, steps = self.positions.evaluation_batches(plan.size)
        call = DatasetCall(positions=positions, steps=steps)  # not in the next line: AutoGraph takes no walrus
        requests.calls.append(call)
        if self.positions.only is not None:
            positions = tf.data.Dataset.from_tensor_slices(self.positions.only[:, None, None])
        return positions, call

    def _check(self, plan: Plan, method: str, whole_epochs: bool, repeat: bool) -> None:
        """Raises `UsageError` if no batches can be made of the examples."""
        size = self.global_batch_size
        if plan.size == 0:
            raise EmptyDataError(
                f"the {'training' if self.training else 'evaluation'} data set is empty: {method} was asked for "
                "0 examples; check where the data is read from"
            )
        if whole_epochs and not self.global_batches:
            raise DatasetError(
                f"{method} was asked for whole epochs, and the smaller batch at their end may not reach all "
                'replicas; set batches = "global" in the trainer, whose batches looplib divides among the replicas'
            )
        if self.training and plan.size < size and not (whole_epochs or repeat):
            raise BatchSizeError(
                f"{method} was asked for {plan.size} examples, and a global batch has {size}, so that each batch would "
                f"have examples several times; use a global batch size of up to {plan.size} (--global_batch_size), or "
                "pass repeat=True if that is intended"
            )
        if plan.chosen_by_batch:
            self.refuse_earlier_sizes(
                f"{method} was given looplib.{type(plan).__name__}, which chooses the examples of a global batch "
                "together, so that its order depends on the batch size"
            )

    def refuse_earlier_sizes(self, why: str) -> None:
        """Raises `UsageError` if a training had batches of another size before; `why` is a clause."""
        sizes = self.positions.sizes
        if self.training and sizes.earlier:
            raise BatchSizeError(
                f"{why}, and this run had batches of {sizes}; continue with {sizes.original}, or start a new run from "
                "the weights (--warm_start)"
            )

    def resident(
        self,
        arrays: Any,
        *,
        shuffle: bool = True,
        whole_epochs: bool = False,
        name: str | None = None,
        repeat: bool = False,
    ) -> tf.data.Dataset:
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
          name: see `indices`.
          repeat: see `indices`.

        Returns:
          A `tf.data.Dataset` of int64 ids `[b]`; `step_fn` is given the rows instead.

        Raises:
          UsageError: if the arrays have no rows, or not the same number, or if `indices` refuses that number.
        """
        lengths = [array.shape[0] if len(array.shape) else None for array in tf.nest.flatten(arrays)]
        if len(set(lengths)) != 1 or None in lengths:
            raise DatasetError(
                f"context.resident was given arrays of {', '.join(map(str, lengths)) or 'no'} rows; expected the same "
                "number in each, that of the examples"
            )
        self.requests.arrays = arrays
        return self.indices(lengths[0], shuffle=shuffle, whole_epochs=whole_epochs, name=name, repeat=repeat)


@tf.autograph.experimental.do_not_convert
def _draw(ids: Ids, seed: int, places: Positions, epoch: Epoch, first: tf.Tensor, count: int) -> tf.Tensor:
    """Returns ids in ops that XLA compiles; see `DatasetCall.draw`."""
    positions = places.batches(first, count, epoch)
    return tf.reshape(ids.endless_in_xla(tf.reshape(positions, [-1]), seed), positions.shape)


def per_replica_batch_size(global_batch_size: int, num_replicas: int) -> int:
    """Returns the examples of a step on one replica; raises `UsageError` if the global batch does not divide."""
    global_batch_size = whole_number("global_batch_size", global_batch_size)
    if global_batch_size % num_replicas:
        below = global_batch_size // num_replicas * num_replicas
        nearest = " or ".join(str(size) for size in (below, below + num_replicas) if size)
        raise BatchSizeError(
            f"global_batch_size {global_batch_size} does not divide over {num_replicas} replicas; use {nearest}"
        )
    return global_batch_size // num_replicas
