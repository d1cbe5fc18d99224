"""A binary that trains on TFRecord images with random augmentation, for `check resume` and `check replicas`."""

import dataclasses

import keras
import tensorflow as tf

import looplib
from looplib import launch


@dataclasses.dataclass
class Config:
    """The settings.

    Attributes:
      files: pattern of TFRecord files of `tf.train.Example`s with image/encoded (PNG) and image/class/label.
      block: neighbouring records that are read at once; 0 for the default.
    """

    files: str = ""
    block: int = 0


class Augmented(looplib.GradientTrainer):
    """Classifies images that are flipped and shifted at random."""

    def __init__(self, config):
        self._config = config
        model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
        super().__init__(model, keras.optimizers.SGD(0.05, momentum=0.9))

    def dataset(self, context):
        """Reads, decodes and augments."""
        features = {
            "image/encoded": tf.io.FixedLenFeature([], tf.string),
            "image/class/label": tf.io.FixedLenFeature([], tf.int64),
        }

        def augment(element):
            encoded, seed = element
            image = tf.ensure_shape(tf.io.decode_png(encoded, channels=1), [8, 8, 1])
            image = tf.image.stateless_random_flip_left_right(tf.cast(image, tf.float32) / 255, seed)
            return tf.roll(image, tf.random.stateless_uniform([2], seed, -1, 2, tf.int32), [0, 1])

        def parse(records, seeds):
            examples = tf.io.parse_example(records, features)
            encoded = examples["image/encoded"]
            images = tf.map_fn(augment, (encoded, seeds), fn_output_signature=tf.TensorSpec([8, 8, 1]))
            return images, examples["image/class/label"]

        records = context.records(self._config.files, block=self._config.block or None, seeds=True)
        return records.map(parse, tf.data.AUTOTUNE)

    def loss_fn(self, inputs):
        """Returns the cross entropy."""
        images, labels = inputs
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, self.model(images, training=True))


def build(config):
    """Builds the trainer; there is no evaluator."""
    return Augmented(config), None


if __name__ == "__main__":
    launch.run(build, Config())
