"""A binary whose checkpoints hold state of every kind: empty, scalar, string, bool, small types, ragged, and tables."""

import dataclasses

import keras
import numpy as np
import tensorflow as tf

import looplib
from looplib import launch

WORDS = np.array([["a"], ["b"], ["c"], ["b"]] * 10)
Y = np.arange(40, dtype=np.float32)[:, None] / 40


@dataclasses.dataclass
class Config:
    rate: float = 0.01


class Everything(looplib.GradientTrainer):
    def __init__(self, config):
        lookup = keras.layers.StringLookup(output_mode="one_hot")
        lookup.adapt(WORDS)  # its table of counts is empty
        inputs = keras.Input((1,), dtype="string")
        model = keras.Model(inputs, keras.layers.Dense(1)(lookup(inputs)))
        super().__init__(model, keras.optimizers.Adam(config.rate))
        kept = lambda value, kind: tf.Variable(tf.constant(value, kind), trainable=False)
        self.empty = kept(np.zeros([0, 3]), tf.float32)
        self.empty_text = kept(np.zeros([0], object), tf.string)
        self.scalar, self.flag = kept(0.5, tf.float64), kept(True, tf.bool)
        self.flags, self.nothing = kept([True, False], tf.bool), kept(np.zeros([2, 0]), tf.bool)
        self.small, self.small_one = kept([1, -2], tf.int8), kept(3, tf.int8)
        self.low, self.low_one = kept([0.5, -1.0], tf.bfloat16), kept(0.5, tf.bfloat16)
        self.half, self.large = kept([0.5], tf.float16), kept(2**63, tf.uint64)
        self.text, self.texts = kept("first", tf.string), kept(["a", "longer\0"], tf.string)
        self.values = kept([1.0, 2.0, 3.0], tf.float32)  # of rows of other lengths
        self.splits = kept([0, 2, 2, 3], tf.int64)
        self.seen = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 0)
        self.generator = tf.random.Generator.from_seed(1)

    def dataset(self, context):
        def more(ids):
            ragged = tf.RaggedTensor.from_row_lengths(tf.repeat(ids, ids % 3), ids % 3)
            return tf.gather(WORDS, ids), tf.gather(Y, ids), ragged, tf.cast(ids, tf.bfloat16), tf.zeros([0, 2])

        return context.indices(40).map(more)

    def loss_fn(self, inputs):
        words, y, ragged, low, _ = inputs
        self.seen.insert(words[:, 0], self.seen.lookup(words[:, 0]) + 1)
        self.low.assign_add([0.5, 1.0])
        self.low_one.assign(low[0])
        self.flag.assign(tf.logical_not(self.flag))
        self.flags.assign([self.flag, True])
        self.small.assign_add([1, 1])
        self.small_one.assign(-self.small_one)
        self.text.assign(tf.strings.join(["step ", tf.strings.as_string(self.global_step)]))
        self.texts.assign([self.text, words[0, 0]])
        rows = tf.RaggedTensor.from_row_splits(self.values, self.splits)
        self.values.assign((rows + 1.0).flat_values)
        self.scalar.assign_add(self.generator.uniform([], dtype=tf.float64))
        losses = tf.square(self.model(words, training=True) - y)[:, 0]
        metrics = {
            "flag": looplib.last(self.flag),
            "low": looplib.last(self.low),
            "counted": looplib.last(tf.ensure_shape(self.seen.lookup(tf.constant("b")), [])),
            "ragged": looplib.total(tf.reduce_sum(ragged.flat_values)),
            "none": looplib.last(tf.zeros([0])),
        }
        return losses, metrics

    def loop_end(self, metrics):
        low, none = metrics.pop("low"), metrics.pop("none")
        return {**metrics, "low": low[0], "no_values": none.size, "low_flag": low[0] > 1}


class Loss(looplib.Evaluator):
    def __init__(self, trainer):
        self.model, self.seen = trainer.model, trainer.seen

    def dataset(self, context):
        return context.indices(40).map(lambda ids: (tf.gather(WORDS, ids), tf.gather(Y, ids)))

    def step_fn(self, inputs):
        return {"loss": tf.square(self.model(inputs[0], training=False) - inputs[1])[:, 0]}


def build(config):
    trainer = Everything(config)
    return trainer, Loss(trainer)


if __name__ == "__main__":
    launch.run(
        build, Config(), train_steps=12, eval_interval=6, checkpoint_interval=3, steps_per_loop=2, global_batch_size=8
    )
