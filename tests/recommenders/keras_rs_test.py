"""Layers, losses and metrics of KerasRS with `ShardedEmbedding`: as a loop by hand, on one and on two replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from recommenders import BATCH, CLICKS, DIM, EXAMPLES, ITEM, ITEMS, RANDOM, USER, USERS, losses_on_servers

import looplib
from looplib.errors import LossError

rs = pytest.importorskip("keras_rs")

STEPS, LIST = 10, 5
LISTS = RANDOM.integers(0, ITEMS, (EXAMPLES, LIST))
RELEVANCE = RANDOM.integers(0, 4, (EXAMPLES, LIST)).astype("float32")
SHARE = (np.bincount(ITEM, minlength=ITEMS) / EXAMPLES).astype("float32")
BOTH = pytest.mark.parametrize("strategy", ["one_device", "mirrored_x2"], indirect=True)


def tables(kind):
    """Returns the tables of users and items, of equal initial rows."""
    first, second = (keras.initializers.RandomNormal(seed=seed) for seed in (1, 2))
    sharded = [
        looplib.ShardedEmbedding(rows, DIM, shards=3, initializer=one)
        for rows, one in ((USERS, first), (ITEMS, second))
    ]
    if kind == "sharded":
        return sharded
    plain = [keras.layers.Embedding(rows, DIM) for rows in (USERS, ITEMS)]
    for layer, table in zip(plain, sharded):
        layer.build(None)
        layer.embeddings.assign(np.concatenate([np.asarray(part.value) for part in table.tables]))
    return plain


def dense(units, seed):
    return keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed=seed))


def towers(kind):
    user, item = (keras.Input((), dtype="int64") for _ in range(2))
    users, items = tables(kind)
    return keras.Model([user, item], [users(user), items(item)])


def ranking(kind):
    """DCN and DLRM: crosses of features, and dot products of them."""
    user, item = (keras.Input((), dtype="int64") for _ in range(2))
    users, items = (table(ids) for table, ids in zip(tables(kind), (user, item)))
    normal = keras.initializers.GlorotUniform
    both = keras.layers.Concatenate()([users, items])
    crossed = rs.layers.FeatureCross(projection_dim=3, kernel_initializer=normal(seed=5), pre_activation="relu")(both)
    dots = rs.layers.DotInteraction()([users, items])
    return keras.Model([user, item], dense(1, 6)(keras.layers.Concatenate()([crossed, dots])))


def lists(kind):
    user, items = keras.Input((), dtype="int64"), keras.Input((LIST,), dtype="int64")
    of_users, of_items = tables(kind)
    return keras.Model([user, items], keras.layers.Dot(axes=(1, 2))([of_users(user), of_items(items)]))


def retrieval_losses(users, items, ids, own, offered):
    """Returns the loss of each user, of the hardest of the items that are offered."""
    labels = tf.one_hot(own, tf.shape(offered)[0])
    logits = tf.matmul(users, items, transpose_b=True)
    logits = rs.layers.SamplingProbabilityCorrection()(
        logits, tf.broadcast_to(tf.gather(SHARE, offered), tf.shape(logits))
    )
    logits = rs.layers.RemoveAccidentalHits()(logits, labels, offered)
    logits, labels = rs.layers.HardNegativeMining(6)(logits, labels)
    return tf.nn.softmax_cross_entropy_with_logits(labels, logits)


class Towers(looplib.GradientTrainer):
    data = (USER, ITEM)

    def __init__(self, make=towers):
        super().__init__(make("sharded"), keras.optimizers.SGD(0.5))

    def dataset(self, context):
        return context.indices(EXAMPLES, shuffle=False).map(lambda i: tuple(tf.gather(one, i) for one in self.data))

    def loss_fn(self, inputs):
        users, items = self.model(list(inputs), training=True)
        own, offered = looplib.global_positions(inputs[1]), looplib.all_gather(inputs[1])
        return retrieval_losses(users, looplib.all_gather(items), inputs[1], own, offered)


class Clicks(Towers):
    data = (USER, ITEM, CLICKS)

    def loss_fn(self, inputs):
        logits = self.model(list(inputs[:2]), training=True)
        return tf.nn.sigmoid_cross_entropy_with_logits(inputs[2], logits)[:, 0]


class Lists(Towers):
    """Ranks lists, of which each is an example."""

    data = (USER, LISTS, RELEVANCE)
    loss = rs.losses.ListMLELoss(reduction="none")

    def loss_fn(self, inputs):
        return tf.reshape(self.loss(inputs[2], self.model(list(inputs[:2]), training=True)), [-1])


def by_hand(model, data, loss_of, steps=STEPS):
    for step in range(steps):
        start = step * BATCH % EXAMPLES
        batch = [tf.constant(one[start : start + BATCH]) for one in data]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_of(model, *batch))
        variables = [one.value for one in model.trainable_variables]
        for variable, gradient in zip(variables, tape.gradient(loss, variables)):
            variable.assign_sub(0.5 * tf.convert_to_tensor(gradient))
    return model


def plain_retrieval(model, users, items):
    return retrieval_losses(*model([users, items]), items, tf.range(BATCH), items)


def plain_clicks(model, users, items, clicks):
    return tf.nn.sigmoid_cross_entropy_with_logits(clicks, model([users, items]))[:, 0]


def plain_lists(model, users, items, relevance):
    return Lists.loss(relevance, model([users, items]))


CASES = {
    "retrieval": (Towers, towers, plain_retrieval),
    "ranking": (Clicks, ranking, plain_clicks),
    "lists": (Lists, lists, plain_lists),
}


@BOTH
@pytest.mark.parametrize("case", CASES)
def test_layers_and_losses_train_as_by_hand(case, strategy):
    kind, make, plain = CASES[case]
    with strategy.scope():
        trainer = kind(make)
    looplib.Controller(looplib.RunConfig(global_batch_size=BATCH), trainer=trainer, strategy=strategy).train(
        steps=STEPS
    )
    expected = by_hand(make("plain"), kind.data, plain)
    for outputs in (trainer.model, make("sharded")), (expected, make("sharded")):
        assert not np.allclose(*(tf.nest.flatten(model([USER, kind.data[1]]))[0] for model in outputs), atol=1e-3)
    for found, other in zip(*(tf.nest.flatten(model([USER, kind.data[1]])) for model in (trainer.model, expected))):
        np.testing.assert_allclose(found, other, rtol=1e-4, atol=1e-6)


def ranks():
    return [
        rs.metrics.NDCG(k=3, shuffle_ties=False, name="ndcg"),
        rs.metrics.MeanReciprocalRank(shuffle_ties=False, name="rank"),
    ]


@BOTH
def test_metrics_of_ranking_are_those_of_keras_or_a_warning_says_so(strategy, caplog):
    """Each metric of KerasRS weighs a list by the other lists of its batch, and so differs for parts of it."""
    with strategy.scope():
        model = lists("sharded")
        model.compile(keras.optimizers.SGD(0.5), rs.losses.PairwiseHingeLoss(), metrics=ranks())
        data = ([USER[:77], LISTS[:77]], RELEVANCE[:77])
        trainer = looplib.KerasTrainer(model, [USER, LISTS], RELEVANCE, validation_data=data, shuffle=False)
    config = looplib.RunConfig(global_batch_size=BATCH)
    controller = looplib.Controller(config, trainer=trainer, evaluator=trainer.evaluator(), strategy=strategy)
    controller.train(steps=4)
    found = controller.evaluate()["eval"]
    if strategy.num_replicas_in_sync == 2:
        assert "metrics of the parts of a batch are not the values for the batch of ndcg" in caplog.text
        return
    expected = model.evaluate(*data, batch_size=BATCH, return_dict=True, verbose=0)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert "metrics of the parts" not in caplog.text


@BOTH
def test_a_distributed_embedding_of_keras_rs_trains_as_by_hand(strategy):
    def build():
        keras.utils.set_random_seed(3)
        table = rs.layers.TableConfig("items", ITEMS, DIM, initializer=keras.initializers.RandomNormal(seed=2),
                                      optimizer="sgd", placement="default_device")  # fmt: skip
        feature = rs.layers.FeatureConfig("items", table, (BATCH, LIST), (BATCH, DIM))
        ids = keras.Input((LIST,), dtype="int32")
        return keras.Model(
            ids, dense(1, 4)(rs.layers.DistributedEmbedding({"items": feature})({"items": ids})["items"])
        )

    with strategy.scope():
        model = build()
        model.compile(keras.optimizers.SGD(0.5), "mse")
        trainer = looplib.KerasTrainer(model, LISTS.astype("int32"), CLICKS, shuffle=False)
    looplib.Controller(looplib.RunConfig(global_batch_size=BATCH), trainer=trainer, strategy=strategy).train(
        steps=STEPS
    )
    plain = by_hand(build(), (LISTS.astype("int32"), CLICKS), lambda model, ids, clicks: (model(ids) - clicks) ** 2)
    for found, expected in zip(model.trainable_variables, plain.trainable_variables):
        np.testing.assert_allclose(tf.convert_to_tensor(found), tf.convert_to_tensor(expected), rtol=1e-4, atol=1e-6)


def test_brute_force_retrieval_finds_the_items_of_a_trained_table_in_an_export(tmp_path):
    trainer = Towers()
    looplib.Controller(looplib.RunConfig(global_batch_size=BATCH), trainer=trainer).train(steps=STEPS)
    items = np.asarray(trainer.model([USER[:1].repeat(ITEMS), np.arange(ITEMS)])[1])
    user = keras.Input((), dtype="int64")
    vectors = next(layer for layer in trainer.model.layers if getattr(layer, "rows", 0) == USERS)(user)
    found = rs.layers.BruteForceRetrieval(candidate_embeddings=items, k=3, return_scores=False)(vectors)
    served = keras.Model(user, found)
    served.export(str(tmp_path / "served"))
    ids = tf.constant(USER[:40])
    loaded = tf.saved_model.load(str(tmp_path / "served"))
    users = np.asarray(trainer.model([USER[:40], ITEM[:40]])[0])
    np.testing.assert_array_equal(loaded.serve(ids), np.argsort(-(users @ items.T), axis=1)[:, :3])


def test_a_mean_of_the_batch_is_refused():
    class Wrong(Clicks):
        def loss_fn(self, inputs):
            return tf.reduce_mean(super().loss_fn(inputs))

    with pytest.raises(LossError, match="expected one loss per example"):
        looplib.Controller(looplib.RunConfig(global_batch_size=BATCH), trainer=Wrong(ranking)).train(steps=1)


@pytest.mark.slow
def test_a_ranking_trains_on_parameter_servers(tmp_path):
    losses = losses_on_servers(__file__, tmp_path)
    assert losses[-1] < losses[0] - 0.005


if __name__ == "__main__":
    looplib.launch.run(lambda config: (Clicks(ranking), None), global_batch_size=BATCH, steps_per_loop=10)
