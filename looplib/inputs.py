"""Input: batch math, the keyed permutation, distribution over pipelines and replicas, and the position in the data."""

import dataclasses

import tensorflow as tf
from absl import logging

from looplib.errors import UsageError

# Rounds of the keyed permutation's cipher. With the op's default of 4, the orders of neighbouring epochs correlate by
# up to 0.9 (60,000 examples), with 8 by 0.07 (a million); with 12 by no more than independent orders do.
_ROUNDS = 12


class InputContext:
    """What `dataset(context)` needs to know about its input pipeline.

    Attributes:
      global_batch_size: examples of one step over all replicas.
      per_replica_batch_size: examples of one step on one replica: the size of the batches to make.
      num_replicas: replicas that step together, over all workers.
      pipeline_index: which input pipeline this is; there is one a worker.
      num_pipelines: how many there are.
      replicas_per_pipeline: replicas that this pipeline feeds; its batches go to them in turn.
      seed: the run's seed, for shuffles and augmentation.
      training: False for an evaluation.
      start_step: global batches that were consumed before this pipeline starts; 0 in a new run.
    """

    def __init__(self, *, global_batch_size, num_replicas, pipeline_index, num_pipelines, seed, training, start_step):
        self.global_batch_size = global_batch_size
        self.per_replica_batch_size = per_replica_batch_size(global_batch_size, num_replicas)
        self.num_replicas = num_replicas
        self.pipeline_index = pipeline_index
        self.num_pipelines = num_pipelines
        self.replicas_per_pipeline = num_replicas // num_pipelines
        self.seed = seed
        self.training = training
        self.start_step = start_step
        self.positioned = False

    def indices(self, num_examples):
        """Batches of example ids: the order of a run, decided by its seed alone.

        For training, epoch after epoch without end, each a keyed permutation of all ids (the op behind
        `tf.random.experimental.index_shuffle`): entering it at any position costs O(1), no shuffle buffer is held, and
        the global order is the same for any number of replicas and workers. Batches are always full and run across the
        end of an epoch. For evaluation, every id once, in order, the last batch smaller.

        Args:
          num_examples: how many examples there are; ids are 0 to num_examples - 1.

        Returns:
          A `tf.data.Dataset` of int64 `[per_replica_batch_size]` (training) or `[at most that]` (evaluation).

        Raises:
          UsageError: if there is no example.
        """
        if num_examples < 1:
            raise UsageError(
                f"the {'training' if self.training else 'evaluation'} data set is empty: context.indices was asked for "
                f"{num_examples} examples; check where the data is read from"
            )
        self.positioned = True
        return self._shuffled(num_examples) if self.training else self._in_order(num_examples)

    def _shuffled(self, num_examples):
        batch = self.per_replica_batch_size

        def ids(element):
            positions = self._global_batch_index(element) * batch + tf.range(batch, dtype=tf.int64)
            epoch, position = positions // num_examples, positions % num_examples
            seeds = tf.stack([tf.fill([batch], tf.constant(self.seed, tf.int64)), epoch, tf.zeros_like(epoch)], axis=1)
            return tf.raw_ops.RandomIndexShuffle(
                index=position, seed=seeds, max_index=tf.constant(num_examples - 1, tf.int64), rounds=_ROUNDS
            )

        first = self.start_step * self.replicas_per_pipeline
        return tf.data.Dataset.counter(first).map(ids, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    def _in_order(self, num_examples):
        batch = self.per_replica_batch_size
        batches = -(-num_examples // batch)
        rounds, rest = divmod(batches, self.num_replicas)
        own = rounds * self.replicas_per_pipeline
        own += min(max(rest - self.pipeline_index * self.replicas_per_pipeline, 0), self.replicas_per_pipeline)

        def ids(element):
            start = self._global_batch_index(element) * batch
            return tf.range(start, tf.minimum(start + batch, num_examples))

        return tf.data.Dataset.range(own).map(ids)

    def _global_batch_index(self, element):
        """The place of this pipeline's batch among the per-replica batches of all replicas, in step order."""
        step, replica = element // self.replicas_per_pipeline, element % self.replicas_per_pipeline
        return step * self.num_replicas + self.pipeline_index * self.replicas_per_pipeline + replica


def per_replica_batch_size(global_batch_size, num_replicas):
    """Divides the global batch.

    Args:
      global_batch_size: examples of a step over all replicas.
      num_replicas: how many replicas there are.

    Returns:
      int, examples of a step on one replica.

    Raises:
      UsageError: if it does not divide, naming the nearest sizes that do.
    """
    if isinstance(global_batch_size, bool) or not isinstance(global_batch_size, int) or global_batch_size < 1:
        raise UsageError(f"global_batch_size is {global_batch_size!r}; expected a positive whole number of examples")
    if global_batch_size % num_replicas:
        below = global_batch_size // num_replicas * num_replicas
        nearest = " or ".join(str(size) for size in (below, below + num_replicas) if size)
        raise UsageError(
            f"global_batch_size {global_batch_size} does not divide over {num_replicas} replicas; use {nearest}"
        )
    return global_batch_size // num_replicas


@dataclasses.dataclass(frozen=True)
class Stream:
    """A distributed data set.

    Attributes:
      dataset: what `strategy.distribute_datasets_from_function` returned; iterate it as often as needed.
      infinite: whether it is known never to end.
      unknown: whether it is not known how long it is.
      may_be_empty: whether a replica may get a batch without examples, in the last step of an evaluation.
    """

    dataset: tf.data.Dataset | tf.distribute.DistributedDataset
    infinite: bool
    unknown: bool
    may_be_empty: bool


def distribute(strategy, task, *, global_batch_size, seed, training, start_step=0):
    """Builds `task.dataset` for every input pipeline of a strategy.

    Args:
      strategy: `tf.distribute.Strategy`.
      task: a `Trainer` or `Evaluator`.
      global_batch_size: examples of a step over all replicas.
      seed: the run's seed.
      training: whether this is training data.
      start_step: global batches that the run has consumed.

    Returns:
      A `Stream`.

    Raises:
      UsageError: for a batch that does not divide, something that is not a data set, or an empty data set.
    """
    who, replicas = type(task).__name__, strategy.num_replicas_in_sync
    per_replica_batch_size(global_batch_size, replicas)
    cardinalities, skips = [], []

    def dataset_fn(tf_context):
        context = InputContext(
            global_batch_size=global_batch_size,
            num_replicas=replicas,
            pipeline_index=tf_context.input_pipeline_id,
            num_pipelines=tf_context.num_input_pipelines,
            seed=seed,
            training=training,
            start_step=start_step,
        )
        dataset = task.dataset(context)
        if not isinstance(dataset, tf.data.Dataset):
            raise UsageError(
                f"{who}.dataset returned a {type(dataset).__name__}; expected a tf.data.Dataset of batches"
            )
        if training:
            _check_batch_size(who, dataset, context.per_replica_batch_size)
        skip = 0 if context.positioned else start_step * context.replicas_per_pipeline
        if skip:
            dataset = dataset.skip(skip)
        cardinality = dataset.cardinality().numpy()
        cardinalities.append(cardinality)
        skips.append(skip)
        if cardinality != tf.data.INFINITE_CARDINALITY and replicas > 1:
            dataset = _forget_batch_size(dataset)
            if training:
                dataset = _drop_incomplete_steps(dataset, context.replicas_per_pipeline)
                cardinalities[-1] = cardinality // context.replicas_per_pipeline if cardinality > 0 else cardinality
        return dataset

    dataset = strategy.distribute_datasets_from_function(dataset_fn)
    if start_step == 0 and not any(cardinalities):
        raise UsageError(
            f"the {'training' if training else 'evaluation'} data set is empty: {who}.dataset has no batch, or not "
            f"one for each of {replicas} replicas; check where the data is read from, and that drop_remainder does not "
            "drop the only batch"
        )
    if any(skips):
        logging.info("%s.dataset: skipping %d batches to come to step %d", who, sum(skips), start_step)
    infinite = all(cardinality == tf.data.INFINITE_CARDINALITY for cardinality in cardinalities)
    return Stream(
        dataset,
        infinite=infinite,
        unknown=tf.data.UNKNOWN_CARDINALITY in cardinalities,
        may_be_empty=not training and not infinite and replicas > 1,
    )


def _check_batch_size(who, dataset, expected):
    """Refuses batches of another size, such as the global one, as every mean and gradient would be scaled wrongly."""
    shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec) if isinstance(spec, tf.TensorSpec)]
    sizes = {shape[0] for shape in shapes if shape.rank and shape[0] is not None}
    if sizes and expected not in sizes:
        raise UsageError(
            f"{who}.dataset makes batches of {' or '.join(map(str, sorted(sizes)))} examples; expected "
            f"context.per_replica_batch_size, which is {expected}"
        )


def _drop_incomplete_steps(dataset, replicas):
    """Leaves out the last batches if they do not reach all replicas of a pipeline.

    A replica that trains on no example has a batch normalization of NaN, which the other replicas would share.
    """

    def zip_again(*windows):
        windows = windows if isinstance(dataset.element_spec, tuple) else windows[0]
        return tf.data.Dataset.zip(windows) if tf.nest.is_nested(windows) else windows

    return dataset.window(replicas, drop_remainder=True).flat_map(zip_again)


def _forget_batch_size(dataset):
    """Makes the first dimension of every tensor unknown.

    tf.distribute hands out the last, uneven batches of data that ends only where it sees that sizes may differ; with a
    static batch size it drops what does not fill all replicas.
    """

    def forget(tensor):
        if not isinstance(tensor, tf.Tensor) or not tensor.shape.rank:
            return tensor
        return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=[None, *tensor.shape[1:]])

    def forget_all(*element):  # tf.data unpacks tuples, and only those
        element = element if isinstance(dataset.element_spec, tuple) else element[0]
        return tf.nest.map_structure(forget, element)

    return dataset.map(forget_all)
