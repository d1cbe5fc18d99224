"""Reads a loader of Grain on several workers; the checkpoint has a hash of the order of all examples."""

import grain
import numpy as np
import tensorflow as tf
from absl import flags

import looplib

_ALIKE = flags.DEFINE_boolean("alike", False, "Gives each worker all examples.")
_GLOBAL = flags.DEFINE_boolean("global", False, "Reads global batches, of which each worker takes its part.")
EXAMPLES = 64


def _dataset(context: looplib.InputContext) -> tf.data.Dataset:
    def make(index: int, count: int) -> grain.IterDataset:
        data = grain.MapDataset.range(EXAMPLES).seed(1)
        data = data.shuffle().repeat() if context.training else data
        data = data if _ALIKE.value else data[index::count]
        read = data.map(lambda i: {"id": np.int64(i)}).to_iter_dataset()
        return read.batch(context.loader_batch_size, drop_remainder=context.training)

    return context.loader(make)


class Hashed(looplib.Trainer):
    def __init__(self):
        self.batches = "global" if _GLOBAL.value else "per_replica"
        self.hash = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

    def dataset(self, context):
        return _dataset(context)

    def step_fn(self, inputs):
        ids, replica = inputs["id"], tf.distribute.get_replica_context()
        own = tf.reduce_sum(ids * tf.range(1, tf.size(ids, out_type=tf.int64) + 1))
        own *= tf.cast(replica.replica_id_in_sync_group, tf.int64) * 7 + 1
        own = tf.reduce_sum(ids * ids) if _GLOBAL.value else own
        self.hash.assign(self.hash * 31 + replica.all_reduce(tf.distribute.ReduceOp.SUM, own))
        return {"loss": tf.cast(ids, tf.float32)}


class Counted(looplib.Evaluator):
    def dataset(self, context):
        return _dataset(context)

    def step_fn(self, inputs):
        return {"mean": tf.cast(inputs["id"], tf.float32)}


if __name__ == "__main__":
    looplib.launch.run(lambda config: (Hashed(), Counted()), global_batch_size=8, steps_per_loop=4)
