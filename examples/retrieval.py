"""Finds the lower half of an image by its upper half: `python -m examples.retrieval --model_dir=/tmp/retrieval`."""

import keras
import tensorflow as tf

import looplib
from trainers.image_data import digits_arrays

TRAIN, TEST = (images.reshape(-1, 2, 32) for images, _ in digits_arrays())


class TwoTowers(looplib.GradientTrainer):
    def __init__(self):
        inputs = [keras.Input((32,)), keras.Input((32,))]
        hidden = [keras.layers.Dense(32)(keras.layers.Dense(128, "relu")(half)) for half in inputs]
        outputs = [keras.layers.UnitNormalization()(half) for half in hidden]
        super().__init__(keras.Model(inputs, outputs), keras.optimizers.Adam(0.003))

    def dataset(self, context):
        return context.resident(TRAIN)

    def loss_fn(self, images):
        queries, items = self.model(tf.unstack(images, axis=1), training=True)
        scores = 10 * tf.matmul(queries, looplib.all_gather(items), transpose_b=True)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(looplib.global_positions(queries), scores)


class Recall(looplib.Evaluator):
    def dataset(self, context):
        return context.indices(len(TEST))

    def step_fn(self, ids):
        queries, items = self.model(tf.unstack(TEST, axis=1), training=False)
        scores = tf.matmul(tf.gather(queries, ids), items, transpose_b=True)
        return {"recall_at_10": tf.math.in_top_k(ids, scores, 10)}


if __name__ == "__main__":
    looplib.launch.run(lambda _: (trainer := TwoTowers(), Recall(trainer.model)), train_steps=500, eval_interval=100)
