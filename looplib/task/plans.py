"""Plans: which example stands at each position of a run, as functions that can be entered at any position.

Positions count the examples of all replicas, in step order, from the start of the run. What a plan says depends on the
position and the run's seed alone, so it is the same on any number of replicas and workers, and resumes from one
integer.
"""

import abc
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.errors import UsageError, whole_number
from looplib.records.order import RecordOrder, key_of, shuffled
from looplib.records.sources import Source, opened
from looplib.task.batches import Batches

# From positions, int64 `[b]`, to the examples there: a structure of tensors `[b, ...]`.
Locate = Callable[[tf.Tensor], Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """What the order of a training depends on.

    Attributes:
      seed: the run's seed, or one derived from it.
      batches: the global batches.
    """

    seed: int
    batches: Batches

    def part(self, number: int) -> "Run":
        """Returns the same run with the seed of one of its parts, such as a source of a mixture."""
        return dataclasses.replace(self, seed=derived_seed(self.seed, number))


def derived_seed(seed: int, use: int | str) -> int:
    """Returns a seed of int64 that is derived from another one for a use."""
    digest = hashlib.blake2b(f"{seed}/{use}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class Plan(abc.ABC):
    """Which examples a training and an evaluation have, and in which order; for `InputContext.indices` and `records`.

    Attributes:
      size: the number of examples, each of which an evaluation has once.
      comes_in_epochs: whether a training has each example once in `size` positions, give or take a batch.
      of_batches: whether the examples of a global batch are chosen together.
      width: numbers that describe one example; blocks of wide ones are smaller.
      source: the records that its ids are numbers of, for `InputContext.records`; None where ids are all there is.
      kept: the ids, of each source, that may come in place of damaged records; None for all.
    """

    size: int
    source: Source | None = None
    kept: Sequence[np.ndarray | None] = (None,)
    comes_in_epochs = True
    of_batches = False
    width = 1

    @abc.abstractmethod
    def endless(self, run: Run) -> Locate:
        """Returns the function from positions in a training, from 0 without end, to examples."""

    @abc.abstractmethod
    def once(self) -> Locate:
        """Returns the function from positions in an evaluation, 0 to `size` - 1, to examples."""

    def located(self, run: Run | None) -> Locate:
        """Returns the function from chunks of positions, int64 `[k, b]`, to examples `[k, b, ...]`.

        Args:
          run: the training; None for an evaluation.
        """
        locate = self.once() if run is None else self.endless(run)

        def chunk(positions: tf.Tensor) -> Any:
            def back(part: tf.Tensor) -> tf.Tensor:
                inner = part.shape[1:]
                part = tf.reshape(part, tf.concat([tf.shape(positions), inner], axis=0))
                return tf.ensure_shape(part, positions.shape + inner)

            return tf.nest.map_structure(back, locate(tf.reshape(positions, [-1])))

        return chunk

    def to_read(self, found: Any) -> tuple[tf.Tensor, ...]:
        """Divides located examples into the numbers of their records, int64 `[b]`, and what else is known of them.

        Raises:
          UsageError: if an example is not one record.
        """
        return (found,)


class Ids(Plan):
    """All ids from 0 to `size` - 1, epoch after epoch, each a keyed permutation.

    Args:
      size: the number of ids.
      shuffle: whether each epoch of a training has an order of its own; else all have the order of the ids.
      source: see `Plan`.
    """

    def __init__(self, size: int, shuffle: bool = True, source: Source | None = None) -> None:
        self.size, self._shuffle, self.source = size, shuffle, source

    def endless(self, run: Run) -> Locate:
        """See `Plan`; examples are int64 ids `[b]`."""
        return RecordOrder(self.size, run.seed, self._shuffle).ids

    def once(self) -> Locate:
        """See `Plan`."""
        return lambda positions: positions


class Kept(Plan):
    """The examples that a filter keeps, epoch after epoch, each a keyed permutation.

    The filter has decided before the run, so each position holds an example, and a run resumes from its position.

        context.indices(looplib.Kept(lengths < 512)).map(lambda ids: tf.gather(x, ids))

    Args:
      chosen: bool `[n]`, whether each of n examples is kept; or int `[size]`, the ids of those that are.
      source: records, or the names of their files, for `context.records(looplib.Kept(chosen, source))`; None for ids.

    Attributes:
      ids: of the examples that are kept, int64 `[size]`.

    Raises:
      UsageError: if nothing is kept, or ids are not those of records.
    """

    def __init__(self, chosen: np.ndarray, source: Source | str | None = None) -> None:
        self.source = of_examples(source, len(chosen) if np.asarray(chosen).dtype == bool else None)
        self.ids = chosen_ids(chosen, None if self.source is None else len(self.source))
        self.size, self.kept = len(self.ids), (self.ids,)

    def endless(self, run: Run) -> Locate:
        """See `Plan`; examples are int64 ids `[b]`."""
        ids, places = tf.constant(self.ids), epochs_of(self.size, run)
        return lambda positions: tf.gather(ids, places(positions))

    def once(self) -> Locate:
        """See `Plan`."""
        ids = tf.constant(self.ids)
        return lambda positions: tf.gather(ids, positions)


def epochs_of(size: int, run: Run) -> Locate:
    """Returns the function from positions in a training to places below `size`, each epoch a keyed permutation.

    It is not the one of `Ids`, whose op is slow for small sizes, and takes no empty tensor.
    """

    def locate(positions: tf.Tensor) -> tf.Tensor:
        sizes = tf.fill(tf.shape(positions), tf.constant(size, tf.int64))
        return shuffled(positions % size, sizes, key_of(run.seed, positions // size, 0))

    return locate


def plan_of(examples: int | Plan, asked: str, shuffle: bool, whole_epochs: bool) -> Plan:
    """Returns the plan of all ids, or the one that is given; for the arguments see `InputContext.indices`.

    Raises:
      UsageError: for no number, or what the plan cannot do.
    """
    if not isinstance(examples, Plan):
        return Ids(whole_number(f"num_examples of context.{asked}", examples, least=0), shuffle)
    kind = f"looplib.{type(examples).__name__}"
    if not shuffle:
        raise UsageError(f"context.{asked} was given {kind} and shuffle=False; leave out shuffle=False")
    if whole_epochs and (examples.of_batches or not examples.comes_in_epochs):
        raise UsageError(
            f"context.{asked} was asked for whole epochs of {kind}, whose epochs do not end with a batch; leave out "
            "whole_epochs"
        )
    return examples


def beside(found: Any, seeds: tf.Tensor) -> tuple:
    """Returns an example with its seeds, as elements of one tuple."""
    return *(found if type(found) is tuple else (found,)), seeds


def chosen_ids(chosen: Any, count: int | None = None) -> np.ndarray:
    """Returns the ids of chosen examples, int64 `[size]`; for the arguments see `Kept`.

    Args:
      chosen: bool `[n]`, or ids.
      count: how many examples there are; None where that is not known.

    Raises:
      UsageError: for anything else, no example, or one that is not there.
    """
    chosen = np.asarray(chosen)
    ids = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
    if chosen.ndim != 1 or ids.dtype.kind not in "iu" or not ids.size or ids.min() < 0:
        raise UsageError(
            f"the examples to keep are {chosen.dtype} {list(chosen.shape)}, {ids.size} ids; expected bool [n], with "
            "one example to keep at least, or the ids of these, whole numbers from 0"
        )
    most = ids.max() if chosen.dtype != bool else len(chosen) - 1
    if count is not None and most >= count:
        raise UsageError(f"the examples to keep go up to id {most}, and there are {count}; expected smaller ids")
    return ids.astype(np.int64)


def of_examples(source: Source | str | None, examples: int | None) -> Source | None:
    """Opens the records of a plan, and checks that there is one for each example that the plan knows of.

    Raises:
      UsageError: if there are more, or fewer.
    """
    if source is None:
        return None
    source = opened(source)
    if examples is not None and len(source) != examples:
        raise UsageError(
            f"a plan was given numbers of {examples} examples and a source of {len(source)} records; expected one "
            "number for each record"
        )
    return source


def whole_numbers(name: str, values: Any) -> np.ndarray:
    """Checks lengths and returns them as int64 `[n]`.

    Args:
      name: what they are, for the message.
      values: whole numbers of at least 0, `[n]`.

    Raises:
      UsageError: for anything else, and for none.
    """
    array = np.asarray(values)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu" or array.min() < 0:
        least = f", the smallest {array.min()}" if array.size and array.dtype.kind in "iuf" else ""
        raise UsageError(
            f"{name} are {array.dtype} {list(array.shape)}{least}; expected whole numbers of at least 0, one for each "
            "example"
        )
    return array.astype(np.int64)
