"""Predicts letters in text of three packages: `python -m examples.mixture --model_dir=/tmp/mixture`."""

import keras
import tensorflow as tf

import looplib
from trainers.small_data import read_documents

SHARES = {"python": 0.5, "numpy": 0.3, "sklearn": 0.2}
NAMES, TEXTS = zip(*((name, " ".join(lines)) for name in SHARES for lines in read_documents(name, 600)))


class Writer(looplib.GradientTrainer):
    def __init__(self):
        layers = [keras.Input((67, 128)), keras.layers.Conv1D(128, 4, activation="relu"), keras.layers.Dense(128)]
        super().__init__(keras.Sequential(layers), keras.optimizers.Adam(0.003))

    def dataset(self, context):  # (letters, segments): int [b, 68]
        letters = tf.minimum(tf.strings.unicode_decode(TEXTS, "UTF-8"), 127)
        chosen = {n: [i for i, of in enumerate(NAMES) if of == n and (i % 8 > 0) == context.training] for n in SHARES}
        rows = {name: looplib.Packed(letters.row_lengths(), 68, overlap=4, chosen=ids) for name, ids in chosen.items()}
        return context.indices(looplib.Mixture(rows, SHARES)).map(lambda rows, _: (rows.fill(letters), rows.segments))

    def loss_fn(self, inputs):  # each letter by the four before it, in the same segment
        letters, segments = inputs
        logits = self.model(tf.one_hot(letters[:, :-1], 128))
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(letters[:, 4:], logits)
        return looplib.mean(losses, tf.cast((segments[:, 4:] > 0) & (segments[:, 4:] == segments[:, :-4]), tf.float32))


class Reader(looplib.Evaluator):
    dataset = Writer.dataset

    def step_fn(self, inputs):
        return {"nats": Writer.loss_fn(self, inputs)}


if __name__ == "__main__":
    looplib.launch.run(lambda _: (trainer := Writer(), Reader(trainer.model)), train_steps=500, eval_interval=100)
