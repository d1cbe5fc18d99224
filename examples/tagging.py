"""Finds where words start in text without spaces: `python -m examples.tagging --model_dir=/tmp/tagging`."""

import keras
import tensorflow as tf

import looplib
from trainers.small_data import read_documents

# Python's documentation, LikeThis: the model sees the letters in lower case and finds the capital ones.
LINES = [line.title().replace(" ", "") for document in read_documents("python", 3000) for line in document]
TRAIN, TEST = LINES[:2500], LINES[2500:3000]


class Tagger(looplib.GradientTrainer):
    def __init__(self):
        layers = [keras.layers.Conv1D(64, 9, padding="same", activation="relu"), keras.layers.Dense(1)]
        super().__init__(keras.Sequential([keras.Input((None, 128)), *layers]), keras.optimizers.Adam(0.003))

    def dataset(self, context):  # ragged: int32 [b, length of each line]
        return context.indices(len(TRAIN)).map(lambda i: tf.strings.unicode_decode(tf.gather(TRAIN, i), "UTF-8"))

    def loss_fn(self, codes):
        padded, real = codes.to_tensor(-1), tf.sequence_mask(codes.row_lengths(), dtype=tf.float32)
        lower = tf.bitwise.bitwise_or(padded, 32)
        scores = self.model(tf.one_hot(lower, 128), training=True)[..., 0]
        losses = tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(padded != lower, tf.float32), scores)
        return looplib.mean(losses, real), {"accuracy": looplib.mean(tf.equal(scores > 0, padded != lower), real)}


class Accuracy(looplib.Evaluator):
    def dataset(self, context):
        return context.indices(len(TEST)).map(lambda i: tf.strings.unicode_decode(tf.gather(TEST, i), "UTF-8"))

    def step_fn(self, codes):
        return Tagger.loss_fn(self, codes)[1]  # which uses the model only


if __name__ == "__main__":
    looplib.launch.run(lambda _: (trainer := Tagger(), Accuracy(trainer.model)), train_steps=500, eval_interval=100)
