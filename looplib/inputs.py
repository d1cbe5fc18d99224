"""Input: batch math, the keyed permutation, and a pipeline for each worker."""

import numpy as np
import tensorflow as tf

from looplib import feeds
from looplib.errors import UsageError
from looplib.workers import Workers

# Rounds of the keyed permutation's cipher. With the op's default of 4, the orders of neighbouring epochs correlate by
# up to 0.9 (60,000 examples), with 8 by 0.07 (a million); with 12 by no more than independent orders do.
_ROUNDS = 12
_BLOCK, _BLOCK_IDS = 32, 8192  # batches, and ids, that are drawn at once
_ENDLESS = 2**62


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
      arrays: what `resident` was given; else None.

    For workers that read by themselves (parameter servers), `dataset` is called in a `tf.function`, where
    `pipeline_index` may be an int64 tensor, and `numbers` is a data set of int64 scalars: the batches of `indices` that
    this pipeline is to make, by their places in the run's or the evaluation's order. Elsewhere it is None.
    """

    def __init__(
        self,
        *,
        global_batch_size,
        num_replicas,
        pipeline_index,
        num_pipelines,
        seed,
        training,
        start_step,
        numbers=None,
    ):
        self.global_batch_size = global_batch_size
        self.per_replica_batch_size = per_replica_batch_size(global_batch_size, num_replicas)
        self.num_replicas = num_replicas
        self._pipeline_index = pipeline_index
        self.num_pipelines = num_pipelines
        self.replicas_per_pipeline = max(1, num_replicas // num_pipelines)
        self.seed = seed
        self.training = training
        self._start_step = start_step
        self.numbers = numbers
        self.batches = None  # that `indices` makes of an evaluation
        self.positioned = False
        self.asked_for_its_part = self.asked_for_its_start = False
        self.arrays = None

    @property
    def pipeline_index(self):
        """See the attributes; who asks for it means to shard."""
        self.asked_for_its_part = True
        return self._pipeline_index

    @property
    def start_step(self):
        """See the attributes; who asks for it may mean to start there."""
        self.asked_for_its_start = True
        return self._start_step

    def indices(self, num_examples, seeds=False):
        """Batches of example ids: the order of a run, decided by its seed alone.

        For training, epoch after epoch without end, each a keyed permutation of all ids (the op behind
        `tf.random.experimental.index_shuffle`): entering it at any position costs O(1), no shuffle buffer is held, and
        the global order is the same for any number of replicas and workers. Batches are always full and run across the
        end of an epoch. For evaluation, every id once, in order, the last batch smaller.

        With `seeds`, each example comes with a seed for random augmentation by `tf.random.stateless_*`. It depends on
        the run's seed and the example's place in the run alone, so that a resumed run, or one on other devices, has the
        same: in training an example gets another each epoch, in evaluation always one.

            def augment(ids, seeds):
                flip = lambda one: tf.image.stateless_random_flip_left_right(one[0], seed=one[1])
                images = tf.map_fn(flip, (tf.gather(x, ids), seeds), fn_output_signature=tf.float32)
                return images, tf.gather(y, ids)

            return context.indices(len(x), seeds=True).map(augment, tf.data.AUTOTUNE)

        Args:
          num_examples: how many examples there are; ids are 0 to num_examples - 1.
          seeds: whether to give seeds too.

        Returns:
          A `tf.data.Dataset` of int64 ids `[b]`, or of (ids, seeds) with int32 seeds `[b, 2]`; b is
          per_replica_batch_size, or in the last batch of an evaluation less.

        Raises:
          UsageError: if there is no example.
        """
        if num_examples < 1:
            raise UsageError(
                f"the {'training' if self.training else 'evaluation'} data set is empty: context.indices was asked for "
                f"{num_examples} examples; check where the data is read from"
            )
        self.positioned = True
        return self._shuffled(num_examples, seeds) if self.training else self._in_order(num_examples, seeds)

    def resident(self, arrays):
        """Batches of rows of arrays that stay on the device, drawn as `indices` draws ids.

        Only the ids travel; the rows are gathered in the step, where XLA makes the gather part of its program. For data
        that fits in the memory of each device. Return the data set as it is: what is to be done with a batch, such as
        augmentation, belongs into `step_fn`.

            def dataset(self, context):
                return context.resident((self.x, self.y))  # step_fn gets (x, y), each [b, ...]

        Args:
          arrays: array or tensor `[n, ...]`, or a structure of these with one n.

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
        return self.indices(lengths[0])

    def _shuffled(self, num_examples, with_seeds):
        size = self.per_replica_batch_size
        block = max(1, min(_BLOCK, _BLOCK_IDS // size))

        @tf.autograph.experimental.do_not_convert
        def ids(first, block=block):  # of a block of batches at once, at half the cost of one by one
            batches = self._global_batch_index(first + tf.range(block, dtype=tf.int64))
            positions = tf.reshape(batches[:, None] * size + tf.range(size, dtype=tf.int64), [-1])
            epoch, position = positions // num_examples, positions % num_examples
            seeds = tf.stack([tf.fill([block * size], tf.constant(self.seed, tf.int64)), epoch, 0 * epoch], axis=1)
            shuffled = tf.raw_ops.RandomIndexShuffle(
                index=position, seed=seeds, max_index=tf.constant(num_examples - 1, tf.int64), rounds=_ROUNDS
            )
            shuffled = tf.reshape(shuffled, [block, size])
            return (shuffled, tf.reshape(self._seeds(positions), [block, size, 2])) if with_seeds else shuffled

        if self.numbers is not None:
            return self.numbers.map(lambda number: tf.nest.map_structure(lambda part: part[0], ids(number, block=1)))
        first = self.start_step * self.replicas_per_pipeline
        blocks = tf.data.Dataset.counter(first, block)
        return blocks.map(ids, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).unbatch()

    def _in_order(self, num_examples, with_seeds):
        batch = self.per_replica_batch_size
        batches = -(-num_examples // batch)
        rounds, rest = divmod(batches, self.num_replicas)
        own = rounds * self.replicas_per_pipeline
        own += min(max(rest - self.pipeline_index * self.replicas_per_pipeline, 0), self.replicas_per_pipeline)

        @tf.autograph.experimental.do_not_convert
        def ids(element):
            start = self._global_batch_index(element) * batch
            positions = tf.range(start, tf.minimum(start + batch, num_examples))
            return (positions, self._seeds(positions)) if with_seeds else positions

        self.batches = own
        return (tf.data.Dataset.range(own) if self.numbers is None else self.numbers).map(ids)

    def _seeds(self, positions):
        """Seeds int32 `[b, 2]` for int64 places in the run `[b]`, no two alike."""
        key = _mix(tf.constant((2 * self.seed + self.training) % 2**64, tf.uint64))
        return tf.bitcast(_mix(tf.bitcast(positions, tf.uint64) + key), tf.int32)

    def _global_batch_index(self, element):
        """The place of this pipeline's batch among the per-replica batches of all replicas, in step order."""
        step, replica = element // self.replicas_per_pipeline, element % self.replicas_per_pipeline
        return step * self.num_replicas + self.pipeline_index * self.replicas_per_pipeline + replica


def _mix(words):
    """Scatters uint64 words one to one: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = tf.bitwise.bitwise_xor(words, tf.bitwise.right_shift(words, tf.constant(shift, tf.uint64)))
        words *= tf.constant(factor, tf.uint64)
    return tf.bitwise.bitwise_xor(words, tf.bitwise.right_shift(words, tf.constant(31, tf.uint64)))


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
      A `feeds.Stream`.

    Raises:
      UsageError: for a batch that does not divide, something that is not a data set, or an empty data set.
    """
    who, replicas = type(task).__name__, strategy.num_replicas_in_sync
    batch_size = per_replica_batch_size(global_batch_size, replicas)
    workers, remote = Workers(strategy), isinstance(strategy, tf.distribute.ParameterServerStrategy)
    on_host = remote or feeds.runs_on_host(strategy)
    cardinalities, contexts, sure = [], [], []

    settings = dict(global_batch_size=global_batch_size, num_replicas=replicas, seed=seed, training=training)

    def build(tf_context, start_step):
        context = InputContext(
            pipeline_index=tf_context.input_pipeline_id,
            num_pipelines=tf_context.num_input_pipelines,
            start_step=start_step,
            **settings,
        )
        dataset = task.dataset(context)
        if not isinstance(dataset, tf.data.Dataset):
            raise UsageError(
                f"{who}.dataset returned a {type(dataset).__name__}; expected a tf.data.Dataset of batches"
            )
        if start_step and not context.positioned and context.asked_for_its_start:
            # The pipeline of a new run, which is then brought to its place. One that is the same anyway is not built
            # twice: the seeds that TensorFlow derives for its shuffles depend on how many there were before.
            return build(tf_context, 0)
        return context, dataset

    def dataset_fn(tf_context):
        context, dataset = build(tf_context, start_step)
        if workers.count > 1 and not context.asked_for_its_part:
            raise UsageError(
                f"{who}.dataset gives each of {workers.count} workers the same data, as it does not look at "
                "context.pipeline_index; use context.indices, or dataset.shard(context.num_pipelines, "
                "context.pipeline_index)"
            )
        if training and not task.batch_size_varies:
            _check_batch_size(who, dataset, batch_size)
        _check_resident(who, context, dataset)
        skip = 0 if context.positioned else start_step * context.replicas_per_pipeline
        if skip and not on_host:
            dataset = dataset.skip(skip)
        cardinality = dataset.cardinality().numpy()
        cardinalities.append(cardinality)
        contexts.append(context)
        # Behind tf.distribute's iterators sizes are not known.
        known = _ENDLESS if cardinality == tf.data.INFINITE_CARDINALITY else cardinality - 1 if on_host else 0
        sure.append(max(0, known // context.replicas_per_pipeline))
        if cardinality != tf.data.INFINITE_CARDINALITY and replicas > 1:
            if training and cardinality > 0:
                cardinalities[-1] = cardinality // context.replicas_per_pipeline
            if not on_host:
                dataset = _forget_batch_size(dataset)
                dataset = _drop_incomplete_steps(dataset, context.replicas_per_pipeline) if training else dataset
        return dataset

    def make_on_worker(pipeline_index=0, num_pipelines=1, numbers=None):
        pipeline = dict(pipeline_index=pipeline_index, num_pipelines=num_pipelines)
        return task.dataset(InputContext(start_step=0, numbers=numbers, **pipeline, **settings))

    def make():
        if on_host:
            return dataset_fn(tf.distribute.InputContext(workers.count, workers.index, replicas))
        return strategy.distribute_datasets_from_function(dataset_fn)

    dataset = make()
    if workers.count > 1:
        cardinalities = workers.gather(np.int64(cardinalities)).ravel().tolist()
    if start_step == 0 and not any(cardinalities):
        raise UsageError(
            f"the {'training' if training else 'evaluation'} data set is empty: {who}.dataset has no batch, or not "
            f"one for each of {replicas} replicas; check where the data is read from, and that drop_remainder does not "
            "drop the only batch"
        )
    infinite = all(cardinality == tf.data.INFINITE_CARDINALITY for cardinality in cardinalities)
    attributes = dict(
        strategy=strategy,
        dataset=dataset,
        renew=make if training else None,
        who=who,
        infinite=infinite,
        unknown=tf.data.UNKNOWN_CARDINALITY in cardinalities,
        may_be_empty=not training and not infinite and replicas > 1,
        start_step=start_step,
        positioned=contexts[0].positioned,
        skipped=0 if contexts[0].positioned else start_step * contexts[0].replicas_per_pipeline,
        arrays=contexts[0].arrays,
        sure=min(sure),
        batch_size=batch_size,
    )
    if remote:
        by_number = cardinalities == [tf.data.INFINITE_CARDINALITY if training else contexts[0].batches]
        return feeds.RemoteStream(make_on_worker, contexts[0].positioned and by_number, **attributes)
    return feeds.HostStream(**attributes) if on_host else feeds.Stream(**attributes)


def _check_batch_size(who, dataset, expected):
    """Refuses batches of another size, such as the global one, as every mean and gradient would be scaled wrongly."""
    shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec) if isinstance(spec, tf.TensorSpec)]
    sizes = {shape[0] for shape in shapes if shape.rank and shape[0] is not None}
    if sizes and expected not in sizes:
        raise UsageError(
            f"{who}.dataset makes batches of {' or '.join(map(str, sorted(sizes)))} examples; expected "
            f"context.per_replica_batch_size, which is {expected}"
        )


def _check_resident(who, context, dataset):
    spec = dataset.element_spec
    if context.arrays is not None and not (isinstance(spec, tf.TensorSpec) and spec.dtype == tf.int64):
        raise UsageError(
            f"{who}.dataset changed what context.resident returned to elements of {spec}; return it as it is, and do "
            "in step_fn what is to be done with a batch"
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
