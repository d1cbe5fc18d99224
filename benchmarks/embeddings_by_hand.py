"""The step of `benchmarks.embeddings` with a ShardedVariable, without looplib; run by it with TF_CONFIG."""

import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")

import numpy as np
import tensorflow as tf
from absl import app, flags

_ROWS = flags.DEFINE_integer("rows", 10_000, "Size of the table.")
_PARTS = flags.DEFINE_integer("parts", 2, "Parts of the table.")
_STEPS = flags.DEFINE_integer("steps", 300, "Steps that are measured.")
_DIM, _BATCH, _IDS, _EXAMPLES, _CALL = 32, 256, 8, 25_600, 20


def _serve(resolver: tf.distribute.cluster_resolver.TFConfigClusterResolver) -> None:
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
    )
    server.join()


def main(argv: list[str]) -> None:
    """Prints the steps a second of Adagrad, with as many steps in a call to a worker as looplib has."""
    del argv
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type != "chief":
        _serve(resolver)
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
        min_shard_bytes=65_536, max_shards=_PARTS.value
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    random = np.random.default_rng(0)
    ids = random.integers(0, _ROWS.value, (_EXAMPLES, _IDS))
    targets = random.normal(size=(_EXAMPLES, 1)).astype("float32")
    with strategy.scope():
        table = tf.Variable(tf.random.uniform((_ROWS.value, _DIM), -0.05, 0.05))
        sums = tf.Variable(tf.fill((_ROWS.value, _DIM), 0.1))
        kernel, bias = tf.Variable(tf.random.normal([_DIM, 1])), tf.Variable(tf.zeros([1]))
        dense = [(one, tf.Variable(tf.fill(one.shape, 0.1))) for one in (kernel, bias)]
    parts = list(zip(table.variables, sums.variables))

    def dataset() -> tf.data.Dataset:
        numbers = tf.data.Dataset.range(_EXAMPLES).repeat().shuffle(_EXAMPLES).batch(_BATCH, drop_remainder=True)
        return numbers.map(lambda i: (tf.gather(ids, i), tf.gather(targets, i))).prefetch(2)

    def step(inputs: tuple[tf.Tensor, tf.Tensor]) -> None:
        batch, wanted = inputs
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(table, tf.reshape(batch, [-1]))
            means = tf.reduce_mean(tf.reshape(rows, [_BATCH, _IDS, _DIM]), axis=1)
            loss = tf.reduce_mean(tf.square(means @ kernel + bias - wanted))
        *gradients, of_kernel, of_bias = tape.gradient(loss, [*table.variables, kernel, bias])
        for (part, slot), gradient in zip(parts, gradients):
            with tf.device(part.device):
                found, places = tf.unique(gradient.indices)
                summed = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(found))
                slot.scatter_add(tf.IndexedSlices(tf.square(summed), found))
                part.scatter_sub(tf.IndexedSlices(0.1 * summed / tf.sqrt(slot.sparse_read(found) + 1e-7), found))
        for (one, slot), gradient in zip(dense, (of_kernel, of_bias)):
            with tf.device(one.device):
                one.assign_sub(0.1 * gradient / tf.sqrt(slot.assign_add(tf.square(gradient)) + 1e-7))

    @tf.function
    def steps(iterator: tf.data.Iterator) -> None:
        for _ in tf.range(_CALL):
            strategy.run(step, args=(next(iterator),))

    iterator = iter(coordinator.create_per_worker_dataset(tf.function(dataset)))
    for count in (2, _STEPS.value // _CALL):
        start = time.perf_counter()
        for _ in range(count):
            coordinator.schedule(steps, args=(iterator,))
        coordinator.join()
    print(f"rate {count * _CALL / (time.perf_counter() - start):.2f}", flush=True)


if __name__ == "__main__":
    app.run(main)
