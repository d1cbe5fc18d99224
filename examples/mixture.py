"""Predicts letters in text of three packages: `python -m examples.mixture --model_dir=/tmp/mixture`."""

import keras
import numpy as np
import tensorflow as tf

import looplib
from trainers.small_data import read_documents

SHARES = {"python": 0.5, "numpy": 0.3, "sklearn": 0.2}
TEXTS = [(name, " ".join(lines)) for name in SHARES for lines in read_documents(name, 600)]
NAMES, TEST = np.array([name for name, _ in TEXTS]), np.arange(len(TEXTS)) % 8 == 0


class Writer(looplib.GradientTrainer):
    def __init__(self):
        layers = [keras.layers.Conv1D(128, 4, activation="relu"), keras.layers.Dense(128)]
        super().__init__(keras.Sequential([keras.Input((67, 128)), *layers]), keras.optimizers.Adam(0.003))

    def dataset(self, context):  # (letters, segments): int [b, 68]
        letters = tf.minimum(tf.strings.unicode_decode([text for _, text in TEXTS], "UTF-8"), 127)
        chosen = {name: (NAMES == name) & (TEST != context.training) for name in SHARES}
        rows = {name: looplib.Packed(letters.row_lengths(), 68, overlap=4, chosen=chosen[name]) for name in SHARES}
        mixed = context.indices(looplib.Mixture(rows, SHARES))
        return mixed.map(lambda rows, sources: (rows.fill(letters), rows.segments))

    def loss_fn(self, inputs):  # each letter by the four before it, in the same segment
        letters, segments = inputs
        logits = self.model(tf.one_hot(letters[:, :-1], 128))
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(letters[:, 4:], logits)
        return looplib.mean(losses, tf.cast((segments[:, 4:] > 0) & (segments[:, 4:] == segments[:, :-4]), tf.float32))


class Reader(looplib.Evaluator):
    dataset, step_fn = Writer.dataset, lambda self, rows: {"nats": Writer.loss_fn(self, rows)}


if __name__ == "__main__":
    looplib.launch.run(lambda _: (trainer := Writer(), Reader(trainer.model)), train_steps=500, eval_interval=100)
