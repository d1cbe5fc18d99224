"""Plans of records: those that a filter keeps, and what all plans share."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.data.order import Locate, OrderKey, Plan
from looplib.data.records.order import permutation_key, shuffled
from looplib.data.records.sources import Source, opened
from looplib.errors import OrderError


class RecordPlan(Plan):
    """A plan whose ids may be numbers of records, for `InputContext.records`.

    Attributes:
      source: the records that its ids are numbers of; None where ids are all there is.
      kept: the ids, of each source, that may come in place of damaged records; None for all.
    """

    source: Source | None = None
    kept: Sequence[np.ndarray | None] = (None,)

    def to_read(self, found: Any) -> tuple[tf.Tensor, ...]:
        """Divides located examples into the numbers of their records, int64 `[b]`, and what else is known of them.

        Raises:
          UsageError: if an example is not one record.
        """
        return (found,)


class All(RecordPlan):
    """All records of a source, or ids from 0 to a size, epoch after epoch.

    Args:
      size: the number of ids.
      source: see `RecordPlan`.
    """

    def __init__(self, size: int, source: Source | None) -> None:
        self.size, self.source = size, source

    def endless(self, key: OrderKey) -> Locate:
        """See `Plan`; each epoch is a keyed permutation."""
        return shuffled_epochs(self.size, key)

    def once(self) -> Locate:
        """See `Plan`."""
        return lambda positions: positions


class Kept(RecordPlan):
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
        self.source = opened_for(source, len(chosen) if np.asarray(chosen).dtype == bool else None)
        self.ids = chosen_ids(chosen, None if self.source is None else len(self.source))
        self.size, self.kept = len(self.ids), (self.ids,)

    def endless(self, key: OrderKey) -> Locate:
        """See `Plan`; examples are int64 ids `[b]`."""
        ids, places = tf.constant(self.ids), shuffled_epochs(self.size, key)
        return lambda positions: tf.gather(ids, places(positions))

    def once(self) -> Locate:
        """See `Plan`."""
        ids = tf.constant(self.ids)
        return lambda positions: tf.gather(ids, positions)


def shuffled_epochs(size: int, key: OrderKey) -> Locate:
    """Returns the function from positions in a training to places below `size`, each epoch a keyed permutation.

    It is not the one of `Ids`, whose op is slow for small sizes, and takes no empty tensor.
    """

    def locate(positions: tf.Tensor) -> tf.Tensor:
        sizes = tf.fill(tf.shape(positions), tf.constant(size, tf.int64))
        return shuffled(positions % size, sizes, permutation_key(key.seed, positions // size, 0))

    return locate


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
        raise OrderError(
            f"the examples to keep are {chosen.dtype} {list(chosen.shape)}, {ids.size} ids; expected bool [n], with "
            "one example to keep at least, or the ids of these, whole numbers from 0"
        )
    most = ids.max() if chosen.dtype != bool else len(chosen) - 1
    if count is not None and most >= count:
        raise OrderError(f"the examples to keep go up to id {most}, and there are {count}; expected smaller ids")
    return ids.astype(np.int64)


def opened_for(source: Source | str | None, examples: int | None) -> Source | None:
    """Opens the records of a plan, and checks that there is one for each example that the plan knows of.

    Raises:
      UsageError: if there are more, or fewer.
    """
    if source is None:
        return None
    source = opened(source)
    if examples is not None and len(source) != examples:
        raise OrderError(
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
        raise OrderError(
            f"{name} are {array.dtype} {list(array.shape)}{least}; expected whole numbers of at least 0, one for each "
            "example"
        )
    return array.astype(np.int64)
