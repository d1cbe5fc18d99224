"""Batches as one stream for all replicas: by tf.distribute, or from a plain iterator on the host."""

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.cluster.collectives import Workers
from looplib.compat import tensorflow as _tf
from looplib.data import causes, iterator_state, rows
from looplib.data.context import InputContext
from looplib.data.iterator_state import SavedPosition
from looplib.data.loader import LoaderReader
from looplib.data.order import Epoch
from looplib.errors import DatasetError


def counted_from_0(iterator: Any) -> Any:
    """Returns an iterator; in a graph, as a new Python object.

    TensorFlow refuses to read one object more than 32 times in a graph, which it takes for an unintended Python loop. A
    chunk of steps on several replicas is such a loop, and intended.
    """
    if tf.executing_eagerly():
        return iterator
    parts = tf.nest.flatten(iterator, expand_composites=True)
    return tf.nest.pack_sequence_as(iterator, parts, expand_composites=True)


@dataclasses.dataclass(frozen=True)
class ShareLengths:
    """The lengths of the workers' shares, from the beginning of the data.

    Every step needs a batch for each replica, so the share that ends first decides.
    """

    batches: Sequence[int]  # of each worker; negative where it never ends or is not known, as tf.data says it
    replicas: int  # of each worker, which get its batches in turn

    @property
    def steps(self) -> int | None:
        """The steps that the data lasts for; None if that is not known, or it never ends."""
        if tf.data.UNKNOWN_CARDINALITY in self.batches:
            return None
        return min((count // self.replicas for count in self.batches if count >= 0), default=None)

    def left_out(self) -> str:
        """Describes what a training to the end leaves out, as a clause; "" if that is nothing, or not known."""
        if self.steps is None:
            return ""
        used = self.steps * self.replicas
        if len(self.batches) == 1:
            (count,) = self.batches
            rest = count - used
            return f"{count} batches for {self.replicas} replicas, of which the last {rest} are left out" * bool(rest)
        over = {index: count - used for index, count in enumerate(self.batches) if count > used or count < 0}
        rest = " and ".join(f"{'all further' if n < 0 else n} of worker {index}" for index, n in over.items())
        shares = ", ".join("no end" if count < 0 else str(count) for count in self.batches)
        return f"shares of {shares} batches, in the order of the workers, and {rest} are left out" * bool(over)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchProperties:
    """Facts about the batches of a task before one is read."""

    who: str  # the class name of the user's trainer or evaluator, for messages
    infinite: bool = False  # whether they are known never to end
    unknown: bool = True  # whether their number is not known
    served: bool = False  # whether data workers make them
    may_be_empty: bool = False  # whether a replica may get a batch without examples, in the last step of an evaluation
    sure: int = 0  # number of steps, from the first on, that certainly have a batch of full size for each replica
    batch_size: int = 0  # examples of a batch of full size
    sized: bool = True  # whether batches need no check of their size: it is static, or it may vary
    sequential: bool = False  # whether the row numbers of a batch follow one another, and the rows are on CPUs
    epoch: Epoch | None = None  # how many examples are an epoch; None where that is not known
    examples: int | None = None  # how many examples there are; None where that is not known
    order: Sequence[int] = ()  # of a training, see `DatasetRequests.order`
    # of the files of a training, see `RecordReader.fingerprint`
    fingerprint: dict[str, str] = dataclasses.field(default_factory=dict)
    lengths: ShareLengths | None = None  # of the workers' shares of a training; None where each reads by itself


@dataclasses.dataclass(kw_only=True)
class Stream:
    """The batches of a task, step by step. This base class reads them by tf.distribute's own iterators."""

    strategy: tf.distribute.Strategy  # the strategy of the replicas
    # the data set, as `strategy.distribute_datasets_from_function` returned it
    dataset: tf.data.Dataset | tf.distribute.DistributedDataset
    # makes `dataset` again, for training; None if it may be iterated again, as an evaluation does
    renew: Callable[[], tf.data.Dataset | tf.distribute.DistributedDataset] | None
    properties: BatchProperties  # what is known of the batches
    # returns the `InputContext` of the pipeline that was built last; None for one that looplib has not built
    context: Callable[[], InputContext | None]
    start_step: int = 0  # global batches that were consumed before
    positioned: bool = False  # whether the pipeline starts at `start_step` by itself
    skipped: int = 0  # batches that each pipeline otherwise leaves out to start there
    # structure of arrays `[n, ...]` that the batches number the rows of; None if they are the data itself
    arrays: Any = None
    block: int = 1  # steps whose batches are read at once, see `BlockStream`; 1 for a stream that reads step by step
    passed: int = dataclasses.field(default=0, init=False)  # of the `skipped` batches, those that were read so far
    _iterated: bool = dataclasses.field(default=False, init=False)

    @property
    def skipped_steps(self) -> int:
        """The steps whose batches are left out."""
        return self.skipped // max(1, self.strategy.num_replicas_in_sync // Workers(self.strategy).count)

    @property
    def ahead(self) -> bool:
        """Whether a loop should call `next_as_optional` before the step that comes before it, which hides a copy."""
        return False

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of what `next` returns."""
        return self.dataset.element_spec

    @property
    def replica_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of one replica's part of that."""
        return self.element_spec

    @property
    def full_spec(self) -> Any:
        """The `replica_spec` of batches of full size, where their size is not in the spec."""

        def full(spec: tf.TypeSpec) -> tf.TypeSpec:
            if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
                return spec
            sizes = spec.shape.as_list()
            return tf.TensorSpec([sizes[0] or self.properties.batch_size, *sizes[1:]] if sizes else [], spec.dtype)

        return tf.nest.map_structure(full, self.replica_spec)

    def iterate(self, position: bytes | None = None) -> Any:
        """Returns an iterator for the other methods, from a saved `position` on, or else from `start_step`."""
        if self.start_step:
            how = "from its position" if self.positioned else f"by skipping {self.skipped} batches"
            self._note(f"resumes after step {self.start_step} {how}")
        iterator = self._iter()
        self._begin_loader(position)
        return iterator

    @property
    def loader(self) -> LoaderReader | None:
        """The reader of `context.loader`, if its batches have positions."""
        context = self.context()
        return context.requests.loader if context is not None and self.positioned else None

    def _begin_loader(self, position: bytes | None) -> None:
        if self.loader is not None:
            self.loader.begin_at(position)

    def _iter(self) -> Any:
        return iter(self._renewed())

    def _renewed(self) -> Any:
        if self._iterated and self.renew:
            self.dataset = self.renew()  # a second iterator of one data set would shuffle as in a next epoch
        self._iterated = True
        return self.dataset

    def end(self, iterator: Any, wait: bool = False) -> None:
        """Releases an iterator that is no longer read; with `wait`, returns only once its threads have ended."""
        if self.loader is not None:
            self.loader.close()

    def copy_seconds(self) -> float:
        """Measures a copy of a batch to the device of its replica; 0 where none is made, or it is not known."""
        return 0.0

    def next(self, iterator: Any) -> Any:
        """Returns the next step's batches of all replicas, for `strategy.run`; in a `tf.function` or not."""
        return next(counted_from_0(iterator))

    def next_steps(self, iterator: Any, steps: int) -> Any:
        """Returns the batches of steps on one replica, tensors `[steps, ...]`; in a `tf.function` or not.

        Only a stream that reads in blocks does; where the data ends, `steps` is at most `block`.
        """
        raise NotImplementedError

    def share(self, stream: "Stream") -> None:
        """Takes the state of another stream of the task, so that a loop traced for it can read this one's iterators."""

    @tf.autograph.experimental.do_not_convert
    def next_as_optional(self, iterator: Any) -> Any:
        """Returns the next step's batches, if there are any, for `has_value` and `get_value`."""
        return iterator.get_next_as_optional()

    @tf.autograph.experimental.do_not_convert
    def has_value(self, optional: Any) -> tf.Tensor:
        """Returns whether there is a next step, a boolean tensor."""
        return optional.has_value()

    @tf.autograph.experimental.do_not_convert
    def get_value(self, optional: Any) -> Any:
        """Returns the batches of all replicas, for `strategy.run`."""
        return optional.get_value()

    def position(self, iterator: Any, batches: int) -> bytes | None:
        """Returns the position after the last batch read, for `iterate`; None where that cannot be saved.

        `batches` is the number of global batches that were consumed since the start of the run.
        """
        return self.loader.save(batches) if self.loader is not None else None

    def left_out(self, read: int) -> str:
        """Describes the batches that are not used because the workers' shares differ; waits for the other workers.

        `read` batches came from this worker's share, skipped ones included. Returns a clause, equal on all workers,
        once the data has ended; "" if no batch is left out, or it is not known.
        """
        return ""

    def _note(self, sentence: str) -> None:
        logging.info("%s.dataset %s", self.properties.who, sentence)


_PIECE_SECONDS = 0.5  # of reading batches that are skipped
_SHORT = 1.0  # seconds of an evaluation, after which the next one's pipeline is not tuned


@dataclasses.dataclass(kw_only=True)
class HostStream(Stream):
    """A `Stream` over one plain tf.data iterator per process.

    `dataset` is the pipeline itself, without any skip. Against tf.distribute's iterator, small steps on CPUs are up to
    1.8 times as fast (`python -m benchmarks.distribute`), an iterator is made in a millisecond, and its state can be
    saved.

    Attributes:
      devices: the device of each replica of this process, for copies of batches; () copies nothing.
    """

    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._workers = Workers(self.strategy)
        self._local_replicas = self.strategy.num_replicas_in_sync // self._workers.count
        renew = self.renew if not self.positioned else None
        self._saved = SavedPosition(renew, self._local_replicas, lambda text: self._note(text))
        self._spec = self._had_batch = None
        self._started, self._is_short = 0.0, False
        self._nothing: tuple[tf.data.Dataset, tf.Tensor] | None = None  # a pipeline, and one like it without elements
        if self.properties.may_be_empty and self._workers.count > 1:
            self._empty()  # what cannot be made is refused before the first step
        if self.renew and not self.properties.infinite and self._workers.count > 1:
            # in the step that was looked for last
            self._had_batch = _tf.outside(lambda: tf.Variable(False, trainable=False))

    @property
    def element_spec(self) -> Any:
        """See `Stream`."""
        if self._spec is None:

            def read(iterator: Iterator) -> None:
                batches = self.get_value(self.next_as_optional(iterator))
                self._spec = tf.nest.map_structure(tf.type_spec_from_value, batches)

            tf.function(read, autograph=False).get_concrete_function(tf.data.IteratorSpec(self.dataset.element_spec))
        return self._spec

    @property
    def replica_spec(self) -> Any:
        """See `Stream`."""
        return self.dataset.element_spec

    def iterate(self, position: bytes | None = None) -> tf.data.Iterator:
        """See `Stream`."""
        self._started = start = time.perf_counter()
        iterator = iter(self._untuned) if self._is_short else self._iter()
        self._begin_loader(position)
        if self._saved.begin(iterator, *self._kind()) and position is not None:
            if self._is_restored(iterator, position):
                how = f"{len(position)} bytes, {1000 * (time.perf_counter() - start):.0f} ms"
                self._note(f"resumes after step {self.start_step} from its saved state ({how})")
                return iterator
            iterator = self._iter()
        if self.skipped:
            self.passed = 0
            self._warn_of_what_skipping_cannot_repeat()
            self._skip(iterator)
            seconds = time.perf_counter() - start
            self._note(f"resumes after step {self.start_step} by skipping {self.skipped} batches ({seconds:.1f} s)")
        elif self.start_step:
            self._note(f"resumes after step {self.start_step} from its position")
        return iterator

    def _read_from(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the data set that the iterator reads, made from a pipeline."""
        return dataset

    def _kind(self) -> tuple:
        return self.dataset.element_spec, self.properties.batch_size, int(self.dataset.cardinality())

    @functools.cached_property
    def _untuned(self) -> tf.data.Dataset:
        """The pipeline of an evaluation too short to be tuned, which spares a tenth of its time."""
        options = tf.data.Options()
        options.autotune.enabled = False
        # A pipeline that is tuned prefetches by itself. Its parallel calls start at one for each core in any case.
        return self.dataset.prefetch(2).with_options(options)

    def end(self, iterator: tf.data.Iterator, wait: bool = False) -> None:
        """See `Stream`; returns at once without `wait`.

        The end of an iterator that tunes itself may take up to 60 s: TensorFlow 2.20 wakes its tuning thread before it
        notes that the thread has to end. A thread of looplib's waits for that in an op, because the end of a Python
        object would block Python. An iterator without tuning needs no such thread, whose start would take longer.
        """
        super().end(iterator, wait)
        untuned, self._is_short = self._is_short, self.renew is None and time.perf_counter() - self._started < _SHORT
        if self._nothing is None or self._nothing[0] is not self.dataset:  # making it copies arrays in the pipeline
            read = self._read_from(self.dataset)
            if self.properties.served:  # TensorFlow would ask the data workers, of which one may be lost
                read = tf.data.Dataset.from_generator(tuple, output_signature=read.element_spec)
            self._nothing = self.dataset, tf.data.experimental.to_variant(read.take(0))
        nothing = self._nothing[1]

        def replace() -> None:
            with tf.device("/cpu:0"):
                tf.raw_ops.MakeIterator(dataset=nothing, iterator=iterator_state.handle(iterator))

        if untuned or wait:
            replace()
        else:
            threading.Thread(target=replace, name="looplib-data-end", daemon=True).start()

    def _skip(self, iterator: tf.data.Iterator) -> None:
        self._read_on(iterator, self.skipped)

    def _read_on(self, iterator: tf.data.Iterator, count: int) -> None:
        """Reads and drops batches; `Dataset.skip` would become part of the pipeline whose state is saved."""

        @tf.function
        def skip(iterator: tf.data.Iterator, count: tf.Tensor) -> None:
            for _ in tf.range(count):
                next(iterator)

        piece = 1
        try:
            while count:  # in pieces, for the watchdog to see that something moves
                piece, start = min(piece, count), time.perf_counter()
                skip(iterator, tf.constant(piece, tf.int64))
                count -= piece
                self.passed += piece
                piece *= 2 if time.perf_counter() - start < _PIECE_SECONDS else 1
        except tf.errors.OutOfRangeError:
            pass  # the data ends before; so does the training

    @property
    def ahead(self) -> bool:
        """See `Stream`. No fetch is left over at the end of a call, so that the iterator's state is the position."""
        return bool(self.devices) and (self.properties.infinite or self._all_dense)

    @functools.cached_property
    def _all_dense(self) -> bool:
        return all(map(_is_dense, tf.nest.flatten(self.dataset.element_spec)))

    def _zeros(self, examples: int) -> Any:
        """Makes a batch of dense tensors with a number of examples, where their size is not in the spec."""
        return tf.nest.map_structure(
            lambda spec: _zeros(spec, spec.shape[0] or examples if spec.shape.rank else 0), self.dataset.element_spec
        )

    def copy_seconds(self) -> float:
        """See `Stream`."""
        if not self.devices or not self._all_dense:
            return 0.0
        batches = [self._zeros(self.properties.batch_size) for _ in self.devices]
        started = time.perf_counter()
        for leaf in tf.nest.flatten(self._placed(batches)):
            tf.reshape(leaf, [-1])[:1].numpy()  # waits for the copy
        return (time.perf_counter() - started) / len(self.devices)

    def next(self, iterator: tf.data.Iterator) -> Any:
        """See `Stream`."""
        iterator = counted_from_0(iterator)
        return self._to_replicas(self._placed([next(iterator) for _ in range(self._local_replicas)]))

    @tf.autograph.experimental.do_not_convert
    def next_as_optional(self, iterator: tf.data.Iterator) -> tuple[tuple, tf.Tensor]:
        """See `Stream`; returns (a batch for each replica, or an optional of it, whether there is one)."""
        if not self.ahead:
            return self._next_as_optional(iterator)
        if self.properties.infinite:
            return self._placed([next(iterator) for _ in range(self._local_replicas)]), tf.constant(True)
        optionals, more = self._next_as_optional(iterator)
        batches = tf.cond(more, lambda: self._values(optionals), lambda: tuple(self._zeros(0) for _ in optionals))
        return self._placed(batches), more

    def _next_as_optional(self, iterator: tf.data.Iterator) -> tuple[tuple[tf.experimental.Optional, ...], tf.Tensor]:
        optionals = tuple(iterator.get_next_as_optional() for _ in range(self._local_replicas))
        # A replica that trains on no example has a batch normalization of NaN, which the other replicas would share.
        needed = optionals[:1] if self.properties.may_be_empty else optionals
        more = functools.reduce(tf.logical_and, [optional.has_value() for optional in needed])
        if self.properties.may_be_empty:
            more = self._workers.any(more)
        else:
            if self._had_batch is not None:
                self._had_batch.assign(more)
            if not self.properties.infinite:  # else nobody waits here for the slowest, whose wait for data is its own
                more = tf.logical_not(self._workers.any(tf.logical_not(more)))
        return optionals, more

    @tf.autograph.experimental.do_not_convert
    def has_value(self, optional: Any) -> tf.Tensor:
        """See `Stream`."""
        return optional[1]

    @tf.autograph.experimental.do_not_convert
    def get_value(self, optional: Any) -> Any:
        """See `Stream`."""
        return self._to_replicas(optional[0] if self.ahead else self._placed(self._values(optional[0])))

    def _values(self, optionals: tuple[tf.experimental.Optional, ...]) -> tuple:
        """Returns the batches of a step that has data on at least one replica."""
        first, *others = optionals
        if not self.properties.may_be_empty:
            return tuple(part.get_value() for part in optionals)
        # Another worker may have data where this one has none; within a process, the first replica gets a batch first.
        empty = self._empty if self._workers.count > 1 else None
        first = tf.cond(first.has_value(), first.get_value, empty) if empty else first.get_value()
        empty = empty or (lambda: rows.map_parts(lambda part: rows.between(part, 0, 0), first))
        return (first, *(tf.cond(part.has_value(), part.get_value, empty) for part in others))

    def left_out(self, read: int) -> str:
        """See `Stream`."""
        if self._had_batch is None:
            return ""
        count = int(self.dataset.cardinality())
        left = (max(1, count - read) if count >= 0 else -1) if self._had_batch.numpy() else 0
        shares = list(enumerate(self._workers.gather(np.int64(left))))
        others = [f"{'an unknown number' if left < 0 else left} of worker {index}" for index, left in shares if left]
        ended = " and ".join(f"worker {index}" for index, left in shares if not left)
        return f"the share of {ended} has ended, and batches of others are left out: {', '.join(others)}" * bool(others)

    def _empty(self) -> Any:
        """Makes a batch without examples."""
        return tf.nest.map_structure(lambda spec: _no_rows(self.properties.who, spec), self.dataset.element_spec)

    def _placed(self, batches: Sequence) -> tuple:
        """Copies each replica's batch to its device."""

        def copy(batch: Any, device: str) -> Any:
            with tf.device(device):
                return tf.nest.map_structure(tf.identity, batch, expand_composites=True)

        return tuple(map(copy, batches, self.devices)) if self.devices else tuple(batches)

    def _to_replicas(self, batches: Sequence) -> Any:
        batches = iter(batches)
        return self.strategy.experimental_distribute_values_from_function(lambda _: next(batches))

    def position(self, iterator: tf.data.Iterator, batches: int) -> bytes | None:
        """See `Stream`."""
        return self._saved.save(iterator, self.dataset) or super().position(iterator, batches)

    def _is_restored(self, iterator: tf.data.Iterator, position: bytes) -> bool:
        """Brings a new iterator to a position; returns whether it is one of this pipeline, and warns if it is not."""
        if why := self._saved.restore(iterator, position):
            logging.warning(
                "%s.dataset is not the pipeline whose state was saved (%s); the batches up to step %d are read "
                "again and skipped",
                self.properties.who,
                why,
                self.start_step,
            )
        return not why

    def _warn_of_what_skipping_cannot_repeat(self) -> None:
        """Warns if batches that are read again may differ, by TensorFlow's names of what keeps state."""
        if condition := causes.condition(self._saved.obstacle, by_skipping=True):
            logging.warning(
                "%s.dataset has no position that can be saved (%s), so the data already used is read again and "
                "skipped; this is exact only if %s",
                self.properties.who,
                self._saved.obstacle,
                condition,
            )


def _is_dense(spec: tf.TypeSpec) -> bool:
    return isinstance(spec, tf.TensorSpec) and spec.shape.rank is not None


def _zeros(spec: tf.TensorSpec, rows: int) -> tf.Tensor:
    """Makes a tensor of a spec of known rank with some rows; other dimensions that are not known have size 0."""
    return tf.zeros([rows, *(size or 0 for size in spec.shape[1:])] if spec.shape.rank else [], spec.dtype)


def _no_rows(who: str, spec: tf.TypeSpec) -> tf.Tensor | tf.SparseTensor:
    """Makes a tensor of a spec `[b, ...]` with no row."""
    if isinstance(spec, tf.SparseTensorSpec):
        shape = [size or 0 for size in spec.shape.as_list()]
        values = tf.zeros([0], spec.dtype)
        return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), values, [0, *shape[1:]])
    if _is_dense(spec):
        return _zeros(spec, 0)
    raise DatasetError(
        f"{who}.dataset has elements {spec}; several workers can evaluate dense tensors of known rank and sparse ones, "
        "because a worker whose share has ended continues with empty batches"
    )
