"""A program that tunes an image model or a small transformer in two phases, and kills itself at some steps.

python tuned.py image|transformer DIR PRETRAINED STEPS [step to be killed at]
"""

import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

import looplib

HEAD_STEPS, STEPS, EXAMPLES, CLASSES = 12, 40, 64, 3
_random = np.random.RandomState(0)
IMAGES = _random.randn(EXAMPLES, 8, 8, 1).astype("float32")
TOKENS = _random.randint(1, 20, [EXAMPLES, 6])
LABELS = {"image": (IMAGES.mean((1, 2, 3)) > 0).astype("int64"), "transformer": (TOKENS[:, 0] > 9).astype("int64")}


def image_model(classes):
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)), layers.Conv2D(4, 3, name="backbone_conv"),
            layers.BatchNormalization(name="backbone_norm"), layers.ReLU(), layers.GlobalAveragePooling2D(),
            layers.Dropout(0.1), layers.Dense(classes, name=f"head_{classes}"),
        ]
    )  # fmt: skip


def transformer(classes):
    layers = keras.layers
    ids = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8, name="backbone_embedding")(ids)
    attended = layers.MultiHeadAttention(2, 4, dropout=0.1, name="backbone_attention")(x, x)
    x = layers.LayerNormalization(name="backbone_norm")(x + attended)
    x = layers.Dense(8, "gelu", name="backbone_dense")(x)
    return keras.Model(ids, layers.Dense(classes, name=f"head_{classes}")(layers.GlobalAveragePooling1D()(x)))


MODELS = {"image": image_model, "transformer": transformer}


class Tuned(looplib.GradientTrainer):
    def __init__(self, kind):
        keras.utils.set_random_seed(1)
        phases = [looplib.Phase(until=HEAD_STEPS, train="head"), looplib.Phase(learning_rate=1e-3)]
        super().__init__(MODELS[kind](2), keras.optimizers.Adam(1e-2), phases=phases, average_decay=0.9)
        self._x, self._y = IMAGES if kind == "image" else TOKENS, LABELS[kind]

    def dataset(self, context):
        return context.indices(EXAMPLES).map(lambda i: (tf.gather(self._x, i), tf.gather(self._y, i)))

    def loss_fn(self, inputs):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(inputs[1], self.model(inputs[0], training=True))


def main(kind, folder, pretrained, steps, killed_at=None):
    def kill(event):
        if killed_at is not None and event.step == int(killed_at):
            os.kill(os.getpid(), signal.SIGKILL)

    with looplib.Controller(
        looplib.RunConfig(global_batch_size=16, steps_per_loop=2),
        trainer=Tuned(kind),
        model_dir=folder,
        start=looplib.Start(warm_start=pretrained),
        checkpoints=looplib.CheckpointPolicy(every_steps=4),
        actions=[kill],
    ) as controller:
        controller.train(int(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
