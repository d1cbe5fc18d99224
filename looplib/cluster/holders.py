"""The replicas that hold the parts of a table, where replicas train in step.

They have a copy of each other variable. A part of a table is one variable, on the device of one replica, which the
strategy does not know. All replicas of a process read and write it there. Workers, which cannot, exchange ids and rows
by collectives; a worker has no rows of the parts that others hold.
"""

from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

from looplib.cluster.collectives import Workers
from looplib.compat import tensorflow as _tf
from looplib.compat.patches import may_join
from looplib.compat.row_updates import held

T = TypeVar("T")


class Holders:
    """Spreads parts over the replicas of a strategy: part n belongs to replica n modulo their number.

    Without replicas in step, the strategy decides where a part is: on parameter servers, say.

    Args:
      strategy: `tf.distribute.Strategy`.
      spread: whether replicas in step hold parts; else the strategy decides there too, and each has all parts.

    Attributes:
      exchanges: whether a worker lacks the rows of some parts, so that a step has to call `exchanged`.
    """

    def __init__(self, strategy: tf.distribute.Strategy, spread: bool) -> None:
        in_step = isinstance(strategy, (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy))
        self._devices = _tf.worker_devices(strategy) if in_step and spread else ()
        self._workers = Workers(strategy)
        self.exchanges = self._workers.count > 1 and spread

    @property
    def in_step(self) -> bool:
        """Returns whether parts belong to replicas that train in step."""
        return bool(self._devices)

    def is_here(self, part: int) -> bool:
        """Returns whether this process holds a part."""
        return not self.exchanges or part // len(self._devices) % self._workers.count == self._workers.index

    def make(self, part: int, make: Callable[[], T], shape: tuple[int, ...]) -> T:
        """Returns the variable of a part that a function makes, on the device that holds it; see `held`."""
        if not self._devices:
            return make()
        return held(self._devices[part % len(self._devices)], make, shape)

    @tf.autograph.experimental.do_not_convert
    def exchanged(
        self, ids: tf.Tensor, is_here: Callable[[tf.Tensor], tf.Tensor], rows: Callable[[tf.Tensor], tf.Tensor]
    ) -> tf.Tensor:
        """Looks up rows that all workers hold together; in replica context, on all replicas at the same point.

        The gradient of a part, for the ids of all replicas, is on one replica of the worker that holds it. It is empty
        on the others.

        Args:
          ids: int64 `[n]`, of this replica.
          is_here: returns for ids `[m]` whether this worker holds their rows, bool `[m]`.
          rows: looks up the rows `[k, dim]` of ids `[k]` that this worker holds.

        Returns:
          The rows, `[n, dim]`.
        """
        may_join()  # refuses micro-batches; each other step has to
        context = tf.distribute.get_replica_context()
        replica = context.replica_id_in_sync_group
        everyones, sizes = context.merge_call(joined, args=(ids, tf.size(ids)[tf.newaxis]))
        first = tf.equal(replica % len(self._devices), 0)  # one replica of a worker looks up for all
        places = tf.where(first & is_here(everyones))[:, 0]

        @tf.custom_gradient
        def sent(found: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                (of_all,) = tf.distribute.get_replica_context().merge_call(joined, args=(upstream,))
                return tf.gather(of_all, places)

            every, at = context.merge_call(joined, args=(found, places))
            start = tf.reduce_sum(sizes[:replica])
            shape = tf.cast(tf.stack([tf.size(everyones), found.shape[1]]), at.dtype)
            return tf.scatter_nd(at[:, tf.newaxis], every, shape)[start : start + tf.size(ids)], gradient

        return sent(rows(tf.gather(everyones, places)))


@tf.autograph.experimental.do_not_convert
def joined(strategy: tf.distribute.Strategy, *parts: object) -> list[tf.Tensor]:
    """Concatenates each value over the replicas of all workers; across replicas."""
    return Workers(strategy).join([tf.concat(strategy.experimental_local_results(part), axis=0) for part in parts])
