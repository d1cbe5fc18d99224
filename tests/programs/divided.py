"""Trainers that are right, or wrong in how they divide a batch: `python -m divided --config.kind=adam`."""

import dataclasses

import keras
import numpy as np
import tensorflow as tf

import looplib
from looplib import launch

_random = np.random.default_rng(0)
PICTURES = _random.normal(size=(256, 8, 8, 1)).astype(np.float32)
LABELS = (PICTURES[:, :4].sum((1, 2, 3)) > PICTURES[:, 4:].sum((1, 2, 3))).astype(np.int64)
RIGHT = ("sgd", "momentum", "adam", "cnn", "deep", "wild")  # wild: its rounding grows to percents
WRONG = ("mean", "batch_norm", "dropout", "clip", "sum", "wild_sum")


@dataclasses.dataclass
class Config:
    kind: str = "sgd"


def layers(kind):
    if kind == "cnn":
        return [
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.Flatten(),
        ]
    hidden = [keras.layers.Flatten(), keras.layers.Dense(32, "relu")]
    hidden += [keras.layers.Dense(32, "relu") for _ in range(4 if kind in ("deep", "wild", "wild_sum") else 0)]
    hidden += [keras.layers.BatchNormalization()] if kind == "batch_norm" else []
    return hidden


class Divided(looplib.Trainer):
    def __init__(self, kind):
        self.kind = kind
        self.model = keras.Sequential([keras.Input((8, 8, 1)), *layers(kind), keras.layers.Dense(2)])
        adam = kind in ("adam", "cnn", "deep", "wild", "wild_sum")
        momentum = 0.9 if kind == "momentum" else 0.0
        self.optimizer = (
            keras.optimizers.Adam(0.05 if kind.startswith("wild") else 3e-3)
            if adam
            else keras.optimizers.SGD(0.1, momentum=momentum)
        )

    def dataset(self, context):
        return context.indices(len(LABELS)).map(lambda i: (tf.gather(PICTURES, i), tf.gather(LABELS, i)))

    def step_fn(self, inputs):
        pictures, labels = inputs
        if self.kind == "dropout":  # from a seed of each replica
            pictures *= tf.cast(tf.random.stateless_uniform(tf.shape(pictures), self.step_seed()) > 0.1, tf.float32)
        with tf.GradientTape() as tape:
            logits = self.model(pictures, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = self.global_mean(losses)
            if self.kind == "mean":
                loss = tf.reduce_mean(losses)
            if self.kind.endswith("sum"):  # regularization once for each replica
                loss += 1e-3 * tf.add_n([tf.nn.l2_loss(v) for v in self.model.trainable_variables])
        variables = self.model.trainable_variables
        gradients = tape.gradient(loss, variables)
        if self.kind == "clip":
            gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply_gradients(zip(gradients, variables))
        return {"loss": losses, "accuracy": tf.equal(tf.argmax(logits, 1), labels)}


if __name__ == "__main__":
    launch.run(
        lambda config: (Divided(config.kind), None), Config(), mode="train", global_batch_size=32, train_steps=20
    )
