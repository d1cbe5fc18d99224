"""A small binary with faults that a TPU would not run: `python -m unfit --config.faults=unique,shape`."""

import dataclasses

import tensorflow as tf
import toy

from looplib import launch


@dataclasses.dataclass
class Config:
    faults: str = ""  # some of unique, strings, shape, crash, with commas


class Unfit(toy.Regression):
    def __init__(self, faults):
        super().__init__()
        self.faults = faults

    def dataset(self, context):
        data = context.indices(toy.NUM_EXAMPLES, repeat=True)
        return data.map(lambda i: (i, tf.gather(toy.X, i), tf.gather(toy.Y, i)))

    def step_fn(self, inputs):
        outputs = super().step_fn(inputs)
        ids = inputs[0]
        if "unique" in self.faults:
            classes, _ = tf.unique(inputs[2])
            outputs["classes"] = tf.cast(tf.fill([tf.size(ids)], tf.size(classes)), tf.float32)
        if "strings" in self.faults:
            texts = tf.strings.as_string(ids)
            outputs["length"] = tf.strings.length(texts)
        if "shape" in self.faults:
            even = tf.boolean_mask(ids, ids % 2 == 0)
            outputs["even"] = tf.fill([tf.size(ids)], tf.reduce_sum(even))
        return outputs


def build(config):
    if "crash" in config.faults:
        raise RuntimeError("the printer is on fire")
    return Unfit(config.faults), None


if __name__ == "__main__":
    launch.run(build, Config(), mode="train", global_batch_size=256)
