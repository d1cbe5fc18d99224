"""The workers that train in step: which of them this process is, and the values that they gather and agree on.

Under MultiWorkerMirroredStrategy each process runs the whole program, and a collective op waits until all processes
reach it. So all of them have to make every decision about the next op (to stop, to save, to roll back) alike.
"""

import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from looplib.compat import tensorflow as _tf

_BLOCK = 1 << 16  # numbers that one sum takes


# An op that fails because another worker is missing raises one of these, up to 10 s before the news that the other
# worker is frozen.
PEER_ERRORS = (
    tf.errors.UnavailableError, tf.errors.DeadlineExceededError, tf.errors.AbortedError, tf.errors.InternalError,
    tf.errors.CancelledError,
)  # fmt: skip


class Workers:
    """The workers of a strategy: one, unless it is a MultiWorkerMirroredStrategy.

    All workers have to call each method that waits for the others at the same point of the program.

    Args:
      strategy: `tf.distribute.Strategy`.

    Attributes:
      count: how many there are.
      index: which one this process is; 0 is the chief.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        self.count, self.index = 1, 0
        if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            resolver = strategy.cluster_resolver
            jobs = resolver.cluster_spec().as_dict()
            self.count = max(1, sum(len(jobs.get(job, ())) for job in ("chief", "worker")))
            self.index = (resolver.task_id or 0) + (resolver.task_type == "worker" and "chief" in jobs)

    @property
    def is_chief(self) -> bool:
        """Returns whether this process writes on behalf of all workers."""
        return self.index == 0

    def gather(self, value: float | np.ndarray) -> np.ndarray:
        """Waits for the others; returns the values of all, numbers or arrays of one shape, as `[count, ...]`."""
        value = np.asarray(value)
        if self.count == 1:
            return value[None]
        content = value.tobytes()
        room = max(64, 1 << (len(content) - 1).bit_length())  # few sizes, because the sum is traced once for each
        words = np.frombuffer(content.ljust(room, b"\0"), np.int32)  # what every collective takes
        rows = np.zeros([self.count, len(words)], np.int32)
        rows[self.index] = words
        summed = _summing(self._strategy)(tf.constant(rows)).numpy()
        values = [np.frombuffer(row.tobytes()[: len(content)], value.dtype) for row in summed]
        return np.stack(values).reshape(self.count, *value.shape)

    def gather_tensors(self, rows: list[Sequence[tf.Tensor]]) -> list[Sequence[tf.Tensor]]:
        """Waits for the others, and returns the rows of all workers, worker 0's first.

        Rows are sequences of eager tensors, with equal dtypes in each row and any shapes; as many on each worker.
        """
        if self.count == 1:
            return rows
        content = tf.io.serialize_tensor([[tf.io.serialize_tensor(leaf) for leaf in row] for row in rows]).numpy()
        lengths = self.gather(np.int64(len(content)))
        words = np.frombuffer(content.ljust(lengths.max(), b"\0"), np.uint8)
        dtypes, found = [leaf.dtype for leaf in rows[0]], []
        for part, length in zip(self.gather(words), lengths):
            for row in tf.unstack(tf.io.parse_tensor(part.tobytes()[:length], tf.string)):
                found.append([tf.io.parse_tensor(leaf, dtype) for leaf, dtype in zip(row, dtypes)])
        return found

    def agree(self, number: int) -> int:
        """Waits for the others, and returns the chief's whole number."""
        return int(self.gather(np.int64(number))[0])

    def any_of(self, flag: bool) -> bool:
        """Waits for the others, and returns whether a Python boolean is true on any worker."""
        return bool(self.gather(np.int64(flag)).any())

    @tf.autograph.experimental.do_not_convert
    def any(self, flag: tf.Tensor) -> tf.Tensor:
        """Waits for the others, also in a `tf.function`; returns whether a boolean scalar is true on any worker."""
        return _sum(self._strategy, tf.cast(flag, tf.float32)) > 0 if self.count > 1 else flag

    @tf.autograph.experimental.do_not_convert
    def join(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Waits for the others, also in a `tf.function`; returns the rows of all workers, worker 0's first.

        A collective op of TensorFlow has one shape for the whole run. Here the numbers of rows may differ between
        workers and from call to call, so the values are sent in blocks of one size.

        Args:
          values: numbers `[rows, ...]`, with equal dtypes and further dimensions on each worker; as many on each.
        """
        if self.count == 1:
            return list(values)
        words = [_words(value) for value in values]
        sizes = self._of_all(tf.stack([tf.size(part) for part in words]))
        blocks = -(-tf.reduce_max(tf.reduce_sum(sizes, axis=1)) // _BLOCK)
        content = tf.concat(words, axis=0)
        content = tf.reshape(tf.pad(content, [[0, blocks * _BLOCK - tf.size(content)]]), [-1, _BLOCK])
        _, gathered = tf.while_loop(
            lambda number, _: number < blocks,
            lambda number, done: (number + 1, done.write(number, self._of_all(content[number]))),
            (0, tf.TensorArray(tf.int32, size=blocks, element_shape=[self.count, _BLOCK])),
            parallel_iterations=1,
        )
        rows = tf.reshape(tf.transpose(gathered.stack(), [1, 0, 2]), [self.count, -1])
        parts = [tf.split(rows[i, : tf.reduce_sum(sizes[i])], sizes[i], num=len(words)) for i in range(self.count)]
        return [
            tf.concat([_from_words(part, value) for part in of_workers], axis=0)
            for value, of_workers in zip(values, zip(*parts))
        ]

    def _of_all(self, numbers: tf.Tensor) -> tf.Tensor:
        """Returns the int32 numbers `[n]` of all workers as `[count, n]`; n is known and the same on each."""
        mine = tf.one_hot(self.index, self.count, dtype=tf.int32)
        return _sum(self._strategy, mine[:, None] * numbers)

    @tf.autograph.experimental.do_not_convert
    def mean(self, value: tf.Tensor) -> tf.Tensor:
        """Waits for the others, also in a `tf.function`; returns the mean over workers of a float64 scalar tensor."""
        return _sum(self._strategy, value) / self.count if self.count > 1 else value


def _words(value: tf.Tensor) -> tf.Tensor:
    """Returns the bits of numbers as int32 `[n]`, which every collective takes; small types take those of float32."""
    return tf.reshape(tf.bitcast(tf.cast(value, tf.float32) if value.dtype.size < 4 else value, tf.int32), [-1])


def _from_words(words: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Returns the rows that `_words` has made int32 of, with the dtype and the further dimensions of a tensor."""
    width = like.dtype.size // 4
    words = tf.reshape(words, [-1, width]) if width > 1 else words
    numbers = tf.cast(tf.bitcast(words, like.dtype if width else tf.float32), like.dtype)
    rows = tf.reshape(numbers, tf.concat([[-1], tf.shape(like)[1:]], axis=0))
    return tf.ensure_shape(rows, [None, *like.shape[1:]])


def _sum(strategy: tf.distribute.Strategy, value: tf.Tensor) -> tf.Tensor:
    """Sums a tensor over workers."""

    def local() -> tf.Tensor:  # a worker with several replicas counts once
        first = tf.distribute.get_replica_context().replica_id_in_sync_group % local_replicas == 0
        return tf.where(first, value, tf.zeros_like(value))

    local_replicas = len(_tf.worker_devices(strategy))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(local), axis=None)


@functools.cache
def _summing(strategy: tf.distribute.Strategy) -> tf.types.experimental.PolymorphicFunction:
    """Makes `_sum` of a strategy a function that is traced once for each shape."""
    return tf.function(lambda value: _sum(strategy, value), autograph=False)
