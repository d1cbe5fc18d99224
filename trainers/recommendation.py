"""Learns which items users like, with two towers: `python -m trainers.recommendation --model_dir=/tmp/recommendation`.

The data set is made: users have tastes, items are of kinds, and a user likes items that fit. Each tower is a
`looplib.ShardedEmbedding`, and the product of a user's and an item's vector is a score. The model learns to find the
item of an example among those of the global batch. With `--strategy=parameter_server`, the servers hold the tables.

Paper: Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations", 2019.
"""

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import looplib
from looplib import UsageError, launch

_BEST = 10  # the items that the recall is of, and that an export recommends
_TRAITS, _STRICTNESS = 8, 1.5  # numbers that a taste or a kind consists of, and how much they count beside chance


@dataclasses.dataclass
class Config:
    """The settings of this experiment, each a flag `--config.<field>=<value>`.

    Attributes:
      users: number of users.
      items: number of items.
      likes: number of items that each user likes.
      held_out: how many of them are kept for the evaluation.
      negatives: how many of the other items each of these is compared with.
      data_seed: of the tastes, the kinds and the likes.
      dim: size of the vectors.
      shards: parts of each table, at least the number of parameter servers.
      learning_rate: of Adagrad.
    """

    users: int = 2000
    items: int = 1000
    likes: int = 20
    held_out: int = 4
    negatives: int = 50
    data_seed: int = 0
    dim: int = 16
    shards: int = 4
    learning_rate: float = 0.1


@dataclasses.dataclass(frozen=True)
class Likes:
    """What users like: int64 arrays.

    Attributes:
      train: `[n, 2]`, pairs of a user and an item.
      test: `[m, 2]`, other pairs.
      negatives: `[users, negatives]`, items that a user does not like.
    """

    train: np.ndarray
    test: np.ndarray
    negatives: np.ndarray


def make_likes(config: Config) -> Likes:
    """Makes the data set, which depends on the settings alone: tastes, kinds, and chance for each user."""
    random = np.random.default_rng(config.data_seed)
    tastes, kinds = (random.normal(size=(count, _TRAITS)) for count in (config.users, config.items))
    liked, others = [], []
    for taste in tastes:
        order = np.argsort(-_STRICTNESS * (kinds @ taste) - random.gumbel(size=config.items))
        liked.append(random.permutation(order[: config.likes]))
        others.append(random.permutation(order[config.likes :])[: config.negatives])
    users = np.broadcast_to(np.arange(config.users)[:, None], (config.users, config.likes))
    pairs = np.stack([users, np.stack(liked)], axis=2)
    test, train = pairs[:, : config.held_out], pairs[:, config.held_out :]
    return Likes(train.reshape(-1, 2), test.reshape(-1, 2), np.stack(others))


class TwoTowers(looplib.GradientTrainer):
    """Trains the vectors of users and items by a softmax over the items of the global batch.

    Args:
      model: Keras model from (ids of users `[b]`, ids of items `[n]`) to float32 vectors (`[b, dim]`, `[n, dim]`).
      optimizer: Keras optimizer that updates single rows, see `looplib.ShardedEmbedding`.
      likes: the data set.
      items: number of items.

    Attributes:
      users: the table of users, which a checkpoint names by this attribute.
      items: the table of items.
    """

    def __init__(self, model: keras.Model, optimizer: keras.Optimizer, likes: Likes, items: int) -> None:
        super().__init__(model, optimizer)
        self.users, self.items = model.get_layer("users"), model.get_layer("items")
        self._pairs = likes.train
        counts = np.bincount(likes.train[:, 1], minlength=items)
        self._log_share = np.log(np.maximum(counts, 1) / len(likes.train)).astype(np.float32)

    def dataset(self, context: looplib.InputContext) -> tf.data.Dataset:
        """Makes batches of (users, items), int64 `[b]` each."""
        pairs = tf.constant(self._pairs)
        return context.indices(len(self._pairs)).map(lambda i: tuple(tf.unstack(tf.gather(pairs, i), axis=1)))

    def loss_fn(self, inputs: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Returns the cross entropy of each example, and whether its item has the best score of the global batch."""
        users, items = inputs
        wanting, offered = self.model([users, items], training=True)
        own, all_items = looplib.global_positions(items), looplib.all_gather(items)
        logits = tf.matmul(wanting, looplib.all_gather(offered), transpose_b=True)
        logits -= tf.gather(self._log_share, all_items)  # items that are often in a batch are often a negative
        copies = (items[:, None] == all_items) & ~tf.one_hot(own, tf.size(all_items), on_value=True, off_value=False)
        logits = tf.where(copies, -1e9, logits)  # the same item is no negative
        found = tf.equal(tf.argmax(logits, axis=1, output_type=tf.int32), own)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(own, logits), {"found": found}


class Ranking(looplib.Evaluator):
    """Ranks each held-out item of a user among all items, and among some that the user does not like.

    Args:
      model: the trainer's model.
      likes: the data set.
      items: number of items.
    """

    def __init__(self, model: keras.Model, likes: Likes, items: int) -> None:
        super().__init__(model)
        self._likes, self._items = likes, items

    def dataset(self, context: looplib.InputContext) -> tf.data.Dataset:
        """Makes batches of (users `[b]`, items `[b]`, negatives `[b, negatives]`)."""
        pairs, negatives = tf.constant(self._likes.test), tf.constant(self._likes.negatives)

        def rows(ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            users, items = tf.unstack(tf.gather(pairs, ids), axis=1)
            return users, items, tf.gather(negatives, users)

        return context.indices(len(self._likes.test)).map(rows)

    def scores(self, users: tf.Tensor) -> tf.Tensor:
        """Returns the scores of all items for users `[b]`: float32 `[b, items]`."""
        wanting, offered = self.model([users, tf.range(self._items, dtype=tf.int64)], training=False)
        return tf.matmul(wanting, offered, transpose_b=True)

    def step_fn(self, inputs: tuple[tf.Tensor, tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns the share of negatives with a lower score, and whether the item is one of the ten best.

        Of equal scores, half count as lower in the AUC, and none in the recall.
        """
        users, items, negatives = inputs
        scores = self.scores(users)
        own, others = (tf.gather(scores, ids, batch_dims=1) for ids in (items[:, None], negatives))
        below, equal = (tf.cast(found, tf.float32) for found in (others < own, others == own))
        worse = tf.reduce_sum(tf.cast(scores < own, tf.int32), axis=1)
        return {"auc": tf.reduce_mean(below + equal / 2, axis=1), "recall_at_10": worse >= self._items - _BEST}

    def export(self) -> looplib.Exported:
        """See `looplib.Evaluator.export`; for each user, the ten best items and their scores."""

        def serve(users: tf.Tensor) -> dict[str, Any]:
            best = tf.math.top_k(self.scores(users), _BEST)
            return {"items": best.indices, "scores": best.values}

        return looplib.Exported(serve, tf.TensorSpec([None], tf.int64, name="users"), self.model)


def make_model(config: Config) -> keras.Model:
    """Makes a model from (ids of users, ids of items) to their vectors, a tower for each."""
    ids = {name: keras.Input((), dtype="int64", name=name) for name in ("user", "item")}
    towers = {
        name: looplib.ShardedEmbedding(
            rows, config.dim, initializer=keras.initializers.RandomNormal(stddev=0.1), shards=config.shards, name=name
        )
        for name, rows in (("users", config.users), ("items", config.items))
    }
    return keras.Model(list(ids.values()), [tower(each) for tower, each in zip(towers.values(), ids.values())])


def build(config: Config) -> tuple[TwoTowers, Ranking]:
    """Builds the experiment, under the strategy's scope.

    Raises:
      looplib.UsageError: for a setting out of its range.
    """
    for name in ("users", "held_out", "negatives", "dim", "shards", "learning_rate"):
        if not getattr(config, name) > 0:
            raise UsageError(f"--config.{name} is {getattr(config, name)}; expected a positive number")
    if config.held_out >= config.likes:
        raise UsageError(f"--config.held_out is {config.held_out}; expected fewer than --config.likes, {config.likes}")
    least = max(config.likes + config.negatives, _BEST + 1)
    if config.items < least:
        raise UsageError(
            f"--config.items is {config.items}; expected at least {least}: more than {_BEST}, and the sum of "
            "--config.likes and --config.negatives"
        )
    likes, model = make_likes(config), make_model(config)
    # Gradients of a mean over a batch are small beside Adagrad's usual start, 0.1, and would not move the vectors.
    optimizer = keras.optimizers.Adagrad(config.learning_rate, initial_accumulator_value=1e-8)
    return TwoTowers(model, optimizer, likes, config.items), Ranking(model, likes, config.items)


if __name__ == "__main__":
    launch.run(build, Config(), train_steps=600, eval_interval=100, global_batch_size=256)
