"""A binary that trains on TFRecord files, read in several ways, for `check resume` and `check replicas`."""

import dataclasses
import glob

import keras
import numpy as np
import tensorflow as tf

import looplib
from looplib import launch

FEATURES = {
    "image/encoded": tf.io.FixedLenFeature([], tf.string),
    "image/class/label": tf.io.FixedLenFeature([], tf.int64),
}


@dataclasses.dataclass
class Config:
    """The settings.

    Attributes:
      files: pattern of TFRecord files of `tf.train.Example`s with image/encoded (PNG) and image/class/label.
      data: images; mixture, of which each file is a source; packed, the bytes of the images as text; or pipeline, an
        ordinary one of tf.data.
      block: neighbouring records that are read at once; 0 for the default.
    """

    files: str = ""
    data: str = "images"
    block: int = 0


def augment(element):
    """Decodes an image, flips and shifts it at random."""
    encoded, seed = element
    image = tf.ensure_shape(tf.io.decode_png(encoded, channels=1), [8, 8, 1])
    image = tf.image.stateless_random_flip_left_right(tf.cast(image, tf.float32) / 255, seed)
    return tf.roll(image, tf.random.stateless_uniform([2], seed, -1, 2, tf.int32), [0, 1])


def parse(records, *others):
    """Parses and augments a batch of records, with a seed for each as the last of the others."""
    examples = tf.io.parse_example(records, FEATURES)
    encoded = examples["image/encoded"]
    images = tf.map_fn(augment, (encoded, others[-1]), fn_output_signature=tf.TensorSpec([8, 8, 1]))
    return images, examples["image/class/label"]


class Recorded(looplib.GradientTrainer):
    """Classifies images that are read from files."""

    def __init__(self, config):
        self._config = config
        model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
        super().__init__(model, keras.optimizers.SGD(0.05, momentum=0.9))
        self._source = looplib.open_records(config.files)
        self._examples = {"mixture": self._mixture, "packed": self._packed}.get(config.data, lambda: None)()

    def _mixture(self):
        names = sorted(glob.glob(self._config.files))
        weights = (0.5, 0.2, 0.3)
        return looplib.Mixture(
            dict(zip(names, names)), dict(zip(names, weights)), {25: dict(zip(names, weights[::-1]))}
        )

    def _packed(self):
        lengths = looplib.measure(self._source, lambda records: tf.strings.length(records))
        return looplib.Packed(lengths, 64)

    def dataset(self, context):
        """Reads in the way that was asked for."""
        if self._config.data == "pipeline":
            return self._pipeline(context)
        if self._config.data == "packed":
            return context.indices(self._examples).map(self._tokens, tf.data.AUTOTUNE)
        block = self._config.block or None
        records = context.records(self._examples or self._source, block=block, seeds=True)
        return records.map(parse, tf.data.AUTOTUNE)

    def _tokens(self, rows):
        def read(ids):
            records = tf.numpy_function(lambda ids: np.array(self._source.__getitems__(ids), object), [ids], tf.string)
            return tf.strings.unicode_decode(tf.ensure_shape(records, [None]), "ISO-8859-1")

        features = tf.cast(rows.read(read), tf.float32) / 255 * tf.cast(rows.segments, tf.float32)
        return tf.reshape(features, [-1, 8, 8, 1]), rows.documents[:, 0] % 10

    def _pipeline(self, context):
        files = tf.data.Dataset.list_files(self._config.files, shuffle=False)
        records = files.interleave(tf.data.TFRecordDataset, 3, num_parallel_calls=2, deterministic=True)
        records = records.shard(context.num_pipelines, context.pipeline_index).shuffle(200, seed=context.seed).repeat()
        numbered = records.enumerate().map(lambda number, record: (record, tf.stack([number, 7])))
        batches = numbered.batch(context.per_replica_batch_size, drop_remainder=True)
        return batches.map(parse, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)

    def loss_fn(self, inputs):
        """Returns the cross entropy."""
        images, labels = inputs
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, self.model(images, training=True))


def build(config):
    """Builds the trainer; there is no evaluator."""
    return Recorded(config), None


if __name__ == "__main__":
    launch.run(build, Config())
