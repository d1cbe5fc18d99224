"""Trains the models of TensorFlow Recommenders by hand, and by looplib on one and two replicas; prints the differences.

`python tests/programs/tfrs_models.py NAME,REDUCTION,REPLICAS ...`, with TF_USE_LEGACY_KERAS=1: one line of JSON, for
each the largest difference of a weight from that of the loop by hand, or the sentence of a refusal. With flags, it
trains the towers as they say.
"""

import json
import sys

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs
import tf_keras as keras
from recommenders import BATCH, CLICKS, DIM, EXAMPLES, ITEM, ITEMS, RANDOM, USER, USERS

import looplib

STEPS = 12
RATING = RANDOM.normal(size=(EXAMPLES, 1)).astype("float32")
DATA = {"user": USER, "item": ITEM, "rating": RATING, "click": CLICKS}


def tower(rows, seed):
    return keras.layers.Embedding(rows, DIM, embeddings_initializer=keras.initializers.RandomNormal(seed=seed))


def dense(units, seed):
    return keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed=seed))


class Recommender(tfrs.Model):
    """Two towers, and the tasks of which the loss is the sum, as in the package's tutorials."""

    def __init__(self, retrieval=None, rating=None, click=None, cross=False):
        super().__init__()
        self.users, self.items = tower(USERS, 1), tower(ITEMS, 2)
        self.retrieval, self.rating, self.click = retrieval, rating, click
        initializer = keras.initializers.GlorotUniform(seed=8)
        self.cross = tfrs.layers.dcn.Cross(projection_dim=3, kernel_initializer=initializer) if cross else None
        self.deep = dense(8, 3)
        self.scores = dense(1, 4)

    def compute_loss(self, features, training=False):
        users, items = self.users(features["user"]), self.items(features["item"])
        if self.retrieval:
            return tf.reduce_mean(self.retrieval(users, items, compute_metrics=False))
        both = tf.concat([users, items], axis=1)
        scores = self.scores(self.deep(self.cross(both) if self.cross else both))
        loss = tf.reduce_mean(self.rating(labels=features["rating"], predictions=scores))  # of "none"; else as it is
        if self.click:
            loss += tf.reduce_mean(self.click(labels=features["click"], predictions=tf.sigmoid(scores)))
        return loss


def build(name, reduction):
    """Builds a model; with the reduction of the tutorials ("sum_over_batch_size"; "sum" for a retrieval), or "none"."""
    squared = keras.losses.MeanSquaredError(reduction=reduction)
    if name == "retrieval":
        kind = "none" if reduction == "none" else "sum"
        loss = keras.losses.CategoricalCrossentropy(from_logits=True, reduction=kind)
        return Recommender(retrieval=tfrs.tasks.Retrieval(loss=loss))
    rating = tfrs.tasks.Ranking(loss=squared, metrics=[keras.metrics.RootMeanSquaredError()])
    click = tfrs.tasks.Ranking(loss=keras.losses.BinaryCrossentropy(reduction=reduction))
    return Recommender(rating=rating, click=click if name == "multi_task" else None, cross=name == "dcn")


class GatheredTowers(looplib.GradientTrainer):
    """Two tables whose negatives are the items of the global batch; each replica's own come first, as the task expects."""

    def __init__(self):
        normal = keras.initializers.RandomNormal
        self.users = looplib.ShardedEmbedding(USERS, DIM, shards=2, initializer=normal(seed=1), family="tf_keras")
        self.items = looplib.ShardedEmbedding(ITEMS, DIM, shards=2, initializer=normal(seed=2), family="tf_keras")
        loss = keras.losses.CategoricalCrossentropy(from_logits=True, reduction=keras.losses.Reduction.NONE)
        self.task = tfrs.tasks.Retrieval(loss=loss, remove_accidental_hits=True)
        user, item = (keras.Input((), dtype=tf.int64) for _ in range(2))
        super().__init__(keras.Model([user, item], [self.users(user), self.items(item)]), keras.optimizers.Adagrad(0.3))

    def dataset(self, context):
        return context.indices(EXAMPLES, shuffle=False).map(
            lambda i: (tf.gather(DATA["user"], i), tf.gather(DATA["item"], i))
        )

    def loss_fn(self, inputs):
        users, items = self.model(list(inputs), training=True)
        first = -looplib.global_positions(inputs[1])[0]
        items = tf.roll(looplib.all_gather(items), first, axis=0)
        ids = tf.roll(looplib.all_gather(inputs[1]), first, axis=0)
        return self.task(users, items, candidate_ids=ids, compute_metrics=False)


def batches():
    return tf.data.Dataset.from_tensor_slices(DATA).batch(BATCH)


def weights(model):
    return [tf.convert_to_tensor(weight).numpy() for weight in model.trainable_variables]


def by_hand(model, loss_of, optimizer):
    for batch in batches().repeat().take(STEPS):
        with tf.GradientTape() as tape:
            loss = loss_of(batch)
        variables = [one for one in model.trainable_variables]
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients([pair for pair in zip(gradients, variables) if pair[0] is not None])
    return weights(model)


def softmax_by_hand(model):
    """The loss of `GatheredTowers`, written without the package: the same item is no negative."""

    def loss_of(batch):
        users, items = model([batch["user"], batch["item"]])
        logits = tf.matmul(users, items, transpose_b=True)
        same = (batch["item"][:, None] == batch["item"]) & ~tf.eye(BATCH, dtype=tf.bool)
        logits = tf.where(same, -1e9, logits)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(BATCH), logits))

    return loss_of


def compared(name, reduction, strategy):
    """Returns the largest difference from a loop by hand, or the sentence of a refusal."""
    with strategy.scope():
        if name == "gathered":
            trainer = GatheredTowers()
            model = trainer.model
        else:
            model = build(name, reduction)
            model.compile(keras.optimizers.Adagrad(0.1))
    try:
        with strategy.scope():
            trainer = trainer if name == "gathered" else looplib.KerasTrainer(model, batches(), shuffle=False)
        config = looplib.RunConfig(global_batch_size=BATCH)
        looplib.Controller(config, trainer=trainer, strategy=strategy).train(steps=STEPS)
    except looplib.UsageError as error:
        return str(error)
    if name == "gathered":
        reference = GatheredTowers().model
        loss, optimizer = softmax_by_hand(reference), keras.optimizers.Adagrad(0.3)
    else:
        reference = build(name, "sum_over_batch_size")
        loss, optimizer = lambda batch: reference.compute_loss(batch, training=True), keras.optimizers.Adagrad(0.1)
    expected = by_hand(reference, loss, optimizer)
    return max(float(np.abs(one - other).max()) for one, other in zip(weights(model), expected, strict=True))


if __name__ == "__main__":
    if sys.argv[1].startswith("--"):
        looplib.launch.run(lambda config: (GatheredTowers(), None), global_batch_size=BATCH, steps_per_loop=10)
        sys.exit()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    found, two = {}, tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    for case in sys.argv[1:]:
        name, reduction, replicas = case.split(",")
        found[case] = compared(name, reduction, two if replicas == "2" else tf.distribute.get_strategy())
    print(json.dumps(found))
