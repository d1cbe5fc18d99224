"""How batches reach the replicas step by step, and how a position in the data is saved and restored."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from looplib.cluster.collectives import Workers
from looplib.data.batches import Epoch
from looplib.data.input_context import InputContext


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
    """What is known of the batches of a task before one is read."""

    who: str  # the class name of the user's trainer or evaluator, for messages
    infinite: bool = False  # whether they are known never to end
    unknown: bool = True  # whether their number is not known
    may_be_empty: bool = False  # whether a replica may get a batch without examples, in the last step of an evaluation
    sure: int = 0  # number of steps, from the first on, that certainly have a batch of full size for each replica
    batch_size: int = 0  # examples of a batch of full size
    sized: bool = True  # whether batches need no check of their size: it is static, or it may vary
    in_turn: bool = False  # whether the row numbers of a batch follow one another, and the rows are on CPUs
    epoch: Epoch | None = None  # how many examples are an epoch; None where that is not known
    examples: int | None = None  # how many examples there are; None where that is not known
    # of the files of a training, see `dataset_requests.Reader`
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
        return self._iter()

    def _iter(self) -> Any:
        return iter(self._renewed())

    def _renewed(self) -> Any:
        if self._iterated and self.renew:
            self.dataset = self.renew()  # a second iterator of one data set would shuffle as in a next epoch
        self._iterated = True
        return self.dataset

    def end(self, iterator: Any, wait: bool = False) -> None:
        """Releases an iterator that is no longer read; with `wait`, returns only once its threads have ended."""

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

    def position(self, iterator: Any) -> bytes | None:
        """Returns the position after the last batch read, for `iterate`; None where that cannot be saved."""
        return None

    def left_out(self, read: int) -> str:
        """Describes the batches that are not used because the workers' shares differ; waits for the other workers.

        `read` batches came from this worker's share, skipped ones included. Returns a clause, equal on all workers,
        once the data has ended; "" if no batch is left out, or it is not known.
        """
        return ""

    def _note(self, sentence: str) -> None:
        logging.info("%s.dataset %s", self.properties.who, sentence)
