"""Positions: which examples of a run, or of an evaluation, each batch of an input pipeline has, by their places."""

import dataclasses

import tensorflow as tf

from looplib.data.batches import Batches, Epoch

CHUNK_IDS = 8192  # that are drawn at once, at most
_CHUNK = 32  # batches of them


@dataclasses.dataclass(frozen=True)
class Positions:
    """Makes the positions of the batches of one input pipeline; positions count the examples of all replicas.

    Attributes:
      sizes: of the global batches.
      start_step: global batches that come before.
      num_replicas: replicas that step together, over all workers.
      pipeline_index: see `InputContext`.
      num_pipelines: the number of input pipelines.
      replicas_per_pipeline: replicas that this pipeline feeds.
      numbers: the numbers of the batches to make, see `InputContext`; None for all.
    """

    sizes: Batches
    start_step: int
    num_replicas: int
    pipeline_index: int | tf.Tensor
    num_pipelines: int
    replicas_per_pipeline: int
    numbers: tf.data.Dataset | None

    @property
    def _batch(self) -> int:
        return self.sizes.size // self.num_replicas

    def of_a_training(self, epoch: Epoch, most: int) -> tf.data.Dataset:
        """Makes the batches of a training, without end.

        Args:
          epoch: of the examples.
          most: batches of a chunk, at most.

        Returns:
          Chunks of batches, int64 `[k, b]`; a batch that may be smaller is a chunk of its own.
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
        batches = self._of_all_replicas(first + tf.range(count, dtype=tf.int64))
        begun = self.sizes.before(self.sizes.first, epoch) - self.sizes.first * self.sizes.size
        return batches[:, None] * self._batch + (begun + tf.range(self._batch, dtype=tf.int64))

    def _in_epochs(self, epoch: Epoch) -> tf.data.Dataset:
        num_examples, size, steps = epoch.examples, self.sizes.size, epoch.steps(self.sizes.size)
        epochs, done = divmod(self.sizes.before(self.sizes.first, epoch), num_examples)
        # As if the epoch in which the present size begins had `steps` batches of it, of which `missing` came before.
        missing = steps + (done - num_examples) // size
        moved = tf.constant(done - missing * size, tf.int64)

        @tf.autograph.experimental.do_not_convert
        def positions(step: tf.Tensor) -> tf.Tensor:
            step += missing - self.sizes.first
            first = step % steps * size + tf.where(step < steps, moved, 0)
            start = (epochs + step // steps) * num_examples
            return (start + tf.range(first, tf.minimum(first + size, num_examples)))[None]

        return (tf.data.Dataset.counter(self.start_step) if self.numbers is None else self.numbers).map(positions)

    def of_an_evaluation(self, num_examples: int) -> tuple[tf.data.Dataset, int | tf.Tensor]:
        """Makes the batches of all examples once, in their order; returns them and how many there are from step 0 on.

        The last one may be smaller. See `of_a_training` for what is made.
        """
        batch = self._batch
        rounds, rest = divmod(-(-num_examples // batch), self.num_replicas)
        own = rounds * self.replicas_per_pipeline
        own += min(max(rest - self.pipeline_index * self.replicas_per_pipeline, 0), self.replicas_per_pipeline)

        @tf.autograph.experimental.do_not_convert
        def positions(element: tf.Tensor) -> tf.Tensor:
            start = self._of_all_replicas(element) * batch
            return tf.range(start, tf.minimum(start + batch, num_examples))[None]

        first = self.start_step * self.replicas_per_pipeline  # 0 unless predictions are resumed
        if self.numbers is None and self.num_pipelines == 1:
            # Without a function: to prepare one takes an iterator as long as ids for many steps.
            return tf.data.Dataset.range(first * batch, num_examples).batch(batch).batch(1, drop_remainder=True), own
        return (tf.data.Dataset.range(first, own) if self.numbers is None else self.numbers).map(positions), own

    def _of_all_replicas(self, element: tf.Tensor) -> tf.Tensor:
        """Returns the number of a batch of this pipeline among the batches of all replicas, in step order."""
        step, replica = element // self.replicas_per_pipeline, element % self.replicas_per_pipeline
        return step * self.num_replicas + self.pipeline_index * self.replicas_per_pipeline + replica
