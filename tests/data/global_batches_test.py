"""Data sets of global batches: divided among the replicas exactly, smaller ones too, and resumed."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy, more

import looplib
from looplib.errors import DatasetError


def rows(ids):
    return ids, tf.gather(toy.X, ids), tf.gather(toy.Y, ids)


class Global(toy.Regression):
    """The regression on batches of the global size, whose last one of each epoch is smaller."""

    batches = "global"

    def __init__(self, size=8, **others):
        super().__init__(**others)
        self.size = size

    def dataset(self, context):
        assert context.per_replica_batch_size == context.global_batch_size and context.num_pipelines == 1
        return tf.data.Dataset.range(37).shuffle(37, seed=context.seed).batch(self.size).repeat().map(rows)

    def step_fn(self, inputs):
        ids, *_ = inputs
        outputs = super().step_fn(inputs)
        del outputs["ids"]
        chosen = tf.reduce_sum(tf.one_hot(ids, 37, dtype=tf.int64), axis=0)
        return {**outputs, "chosen": looplib.total(chosen), "count": looplib.total(tf.size(ids))}

    def loop_end(self, metrics):
        self.order.append(np.flatnonzero(metrics.pop("chosen")))
        return metrics


class GlobalEvaluator(toy.RegressionEvaluator):
    batches = "global"

    def dataset(self, context):
        return tf.data.Dataset.range(self.num_examples).batch(context.global_batch_size).map(lambda i: rows(i)[1:])


def trained(strategy, size, steps, seed=0, **settings):
    strategy = make_strategy(strategy)
    with strategy.scope():
        trainer = Global(size)
        evaluator = GlobalEvaluator(trainer.model)
    reports = []
    settings = {"global_batch_size": size, "seed": seed, "actions": [reports.append], **settings}
    with toy.controller(strategy, trainer, evaluator, **settings) as controller:
        controller.train(steps)
        return trainer, [event.metrics for event in reports], controller.evaluate()["eval"]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("strategy", ["default", "mirrored_x2", *more(["mirrored_x4", "one_device"])])
@pytest.mark.parametrize("size", [12, *more([8, 16])])  # 37 examples: the last batch has 1 (or 5, or 5)
def test_each_global_batch_is_trained_on_exactly(strategy, size):
    trainer, reports, evaluated = trained(strategy, size, 9)
    assert [metrics["count"] for metrics in reports] == [len(ids) for ids in trainer.order]
    epoch = -(-37 // size)
    assert sorted(np.concatenate(trainer.order[:epoch])) == list(range(37))
    losses, weights = toy.numpy_losses_and_weights(trainer.order, "sgd")
    np.testing.assert_allclose([metrics["loss"] for metrics in reports], losses, rtol=1e-5)
    for ours, expected in zip(trainer.weights(), weights):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
    correct = trainer.model.predict(toy.X[trainer.order[-1]], verbose=0)
    assert correct.shape[0] == reports[-1]["count"]
    assert evaluated["examples"] == 37
    assert evaluated["accuracy"] == pytest.approx(toy.numpy_accuracy(weights))


@pytest.mark.slow
def test_a_keras_metric_counts_only_real_examples():
    one, two = (
        [metrics["keras_accuracy"] for metrics in trained(name, 12, 4)[1]] for name in ("default", "mirrored_x2")
    )
    np.testing.assert_allclose(one, two)


@pytest.fixture(scope="module")
def whole():
    return trained("mirrored_x2", 12, 9)[0]


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 3, 4, 5, 8])  # an epoch has 4 steps
@pytest.mark.parametrize("distribute", ["auto", "tf"])
def test_a_resumed_run_continues_with_the_next_global_batch(distribute, first, whole, tmp_path):
    settings = dict(model_dir=tmp_path, checkpoints=looplib.CheckpointPolicy(every_steps=5), distribute=distribute)
    trained("mirrored_x2", 12, first, **settings)
    resumed, _, _ = trained("mirrored_x2", 12, 9, **settings)
    for ours, expected in zip(resumed.order, whole.order[first:], strict=True):
        np.testing.assert_array_equal(ours, expected)
    for ours, expected in zip(resumed.weights(), whole.weights()):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.slow
def test_finite_data_is_trained_on_to_the_last_example():
    strategy = make_strategy("mirrored_x4")
    with strategy.scope():
        trainer = Global()
    trainer.dataset = lambda context: tf.data.Dataset.range(33).batch(8).map(rows)
    with toy.controller(strategy, trainer) as controller:
        assert controller.train(-1)["count"] == 1
        assert controller.global_step == 5


class Pair(tf.experimental.BatchableExtensionType):
    ids: tf.Tensor
    more: tf.Tensor
    name: str = "a field that is no tensor"


KINDS = {
    "extension": lambda ids: {"pair": Pair(ids, tf.stack([ids, -ids], axis=1)), "scalar": tf.constant(3)},
    "dict": lambda ids: {"ids": ids, "scalar": tf.constant(3)},
    "ragged": lambda ids: (ids, tf.RaggedTensor.from_row_lengths(tf.repeat(ids, ids % 3), ids % 3)),
    "sparse": lambda ids: (ids, tf.sparse.from_dense(tf.one_hot(ids, 40, dtype=tf.int64))),
    "strings": lambda ids: (tf.strings.as_string(ids), ids),
}


class Collected(looplib.Evaluator):
    batches = "global"

    def __init__(self, kind):
        self.kind, self.found = kind, []

    def dataset(self, context):
        return tf.data.Dataset.range(24).batch(8, drop_remainder=True).map(KINDS[self.kind])

    def step_fn(self, inputs):
        def dense(leaf):
            if isinstance(leaf, Pair):
                return leaf.ids, leaf.more
            if isinstance(leaf, tf.RaggedTensor):
                return leaf.to_tensor(default_value=-1, shape=[None, 2])
            return tf.sparse.to_dense(leaf) if isinstance(leaf, tf.SparseTensor) else leaf

        return {"all": looplib.each(tf.nest.map_structure(dense, inputs))}

    def collect(self, outputs):
        self.found += [output["all"] for output in outputs]


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_every_structure_are_divided_in_order(kind):
    evaluator = Collected(kind)
    with toy.controller(make_strategy("mirrored_x2"), None, evaluator) as controller:
        controller.evaluate()
    assert len(evaluator.found) == 6
    expected = KINDS[kind](tf.range(24, dtype=tf.int64))
    if kind == "extension":
        expected = {**expected, "pair": (expected["pair"].ids, expected["pair"].more)}
    for number, part in enumerate(evaluator.found):
        for found, whole in zip(tf.nest.flatten(part), tf.nest.flatten(expected)):
            if isinstance(whole, tf.RaggedTensor):
                whole = whole.to_tensor(default_value=-1, shape=[None, 2])
            elif isinstance(whole, tf.SparseTensor):
                whole = tf.sparse.to_dense(whole)
            rows_of_part = whole[4 * number : 4 * number + 4] if whole.shape.rank else whole
            np.testing.assert_array_equal(found, rows_of_part)


def test_whole_epochs_hold_each_example_once_and_start_anywhere():
    context = dict(
        global_batch_size=10, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=3, training=True,
        global_batches=True,
    )  # fmt: skip
    make = lambda start: looplib.InputContext(**context, start_step=start)
    ids = [batch.numpy() for batch in make(0).indices(37, whole_epochs=True).take(12)]
    assert [len(batch) for batch in ids] == [10, 10, 10, 7] * 3
    epochs = [np.concatenate(ids[i : i + 4]) for i in (0, 4, 8)]
    assert all(sorted(epoch) == list(range(37)) for epoch in epochs) and not np.array_equal(*epochs[:2])
    for ours, expected in zip(make(5).indices(37, whole_epochs=True), ids[5:]):
        np.testing.assert_array_equal(ours, expected)
    in_order = [batch.numpy() for batch in make(3).indices(37, shuffle=False, whole_epochs=True).take(2)]
    assert in_order[0].tolist() == list(range(30, 37)) and in_order[1].tolist() == list(range(10))
    with pytest.raises(DatasetError, match="="):
        looplib.InputContext(**{**context, "global_batches": False}, start_step=0).indices(37, whole_epochs=True)


def refused(trainer, strategy="default", size=8):
    with pytest.raises(looplib.UsageError) as error:
        with toy.controller(make_strategy(strategy), trainer, global_batch_size=size) as controller:
            controller.train(4)
    return str(error.value)


@pytest.mark.slow
def test_what_cannot_be_divided_is_refused_in_a_sentence():
    trainer = Global()
    trainer.batches = "local"
    assert "expected one of per_replica, global" in refused(trainer)
    trainer = Global()
    trainer.dataset = lambda context: tf.data.Dataset.range(37).batch(4, drop_remainder=True).repeat().map(rows)
    assert "batches of 4 examples" in refused(trainer)
    with make_strategy("mirrored_x2").scope():
        assert "does not divide over 2 replicas" in refused(Global(), "mirrored_x2", 9)
        trainer = Global(size=4)  # not the size that the controller was given, which only the batches show
    assert "smaller batches" in refused(trainer, "mirrored_x2")
    trainer = Global()
    trainer.batches = "per_replica"
    trainer.dataset = lambda context: tf.data.Dataset.range(37).batch(16).repeat().map(rows)
    assert "larger batches" in refused(trainer)  # unsaid, global batches stay refused


def zipped(context, full=True):
    """Batches of 12 unlabelled and 4 labelled examples; the last one, if it is not to be full, has fewer."""
    free, known = tf.data.Dataset.range(36 if full else 30), tf.data.Dataset.range(100, 112 if full else 110)
    return tf.data.Dataset.zip((free.batch(12), known.batch(4).map(lambda ids: {"ids": ids})))


def evaluated(dataset, strategy="mirrored_x2", uneven=True):
    evaluator = Collected("dict")
    evaluator.dataset, evaluator.uneven_parts = dataset, uneven
    with toy.controller(make_strategy(strategy), None, evaluator) as controller:
        metrics = controller.evaluate()["eval"]
    return metrics["examples"], [
        [np.asarray(leaf).tolist() for leaf in tf.nest.flatten(part)] for part in evaluator.found
    ]


@pytest.mark.parametrize("full", [True, False])
def test_each_part_of_a_batch_is_divided_by_its_own_rows_if_asked_for(full):
    examples, found = evaluated(lambda context: zipped(context, full))
    free, known = (np.arange(36), np.arange(100, 112)) if full else (np.arange(30), np.arange(100, 110))
    expected = []
    for of_free, of_known in zip(np.split(free, [12, 24]), np.split(known, [4, 8])):
        expected += zip(np.array_split(of_free, 2), np.array_split(of_known, 2))
    assert found == [[part.tolist() for part in pair] for pair in expected]
    assert examples == len(free)  # the first part tells their number


def graphs(context):
    """Batches of four graphs each, as nodes, edges and graphs, whose numbers of nodes and edges vary."""
    sizes = tf.data.Dataset.from_tensor_slices([[9, 14], [8, 16], [8, 8]])
    return sizes.map(lambda size: (tf.zeros([size[0], 3]), tf.zeros([size[1], 2], tf.int32), tf.zeros([4, 1])))


@pytest.mark.parametrize("make", [zipped, graphs, lambda context: graphs(context).skip(1)])
def test_parts_with_different_numbers_of_rows_are_refused_on_replicas(make):
    with pytest.raises(looplib.UsageError, match="uneven_parts"):
        evaluated(make, uneven=False)
    few = lambda context: tf.data.Dataset.range(4).batch(2).map(lambda ids: (tf.range(4), ids[:1]))
    with pytest.raises(looplib.UsageError, match="2 rows or more"):
        evaluated(few)  # one replica would have none


def test_elements_of_other_classes_than_tensorflow_takes_are_refused():
    attr = pytest.importorskip("attr")
    both = attr.make_class("Both", ["x", "y"])
    data = lambda context: tf.data.Dataset.from_tensor_slices({"both": both(np.arange(8), np.arange(8))}).batch(8)
    for strategy in ("default", "mirrored_x2"):
        with pytest.raises(looplib.UsageError, match="Collected.dataset has elements of the class Both"):
            evaluated(data, strategy)


def test_values_are_collected_of_the_examples_of_uneven_batches_only():
    evaluator = Collected("strings")
    evaluator.dataset = lambda context: tf.data.Dataset.range(25).batch(8).map(KINDS["strings"])
    with toy.controller(make_strategy("mirrored_x2"), None, evaluator) as controller:
        controller.evaluate()
    assert len(evaluator.found) == 7  # the last batch has one example, and so nothing for the second replica
    found = [
        np.concatenate(parts) for parts in zip(*(map(np.array, tf.nest.flatten(part)) for part in evaluator.found))
    ]
    expected = tf.nest.flatten(KINDS["strings"](tf.range(25, dtype=tf.int64)))
    assert [part.tolist() for part in found] == [part.numpy().tolist() for part in expected]


@pytest.mark.slow
def test_batch_normalization_stays_finite_on_a_replica_without_examples():
    class Normalized(Global):
        def __init__(self):
            super().__init__(12)
            self.model = keras.Sequential(
                [keras.Input((5,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(3)]
            )

    strategy = make_strategy("mirrored_x2")
    with strategy.scope():
        trainer = Normalized()
    with toy.controller(strategy, trainer, global_batch_size=12) as controller:
        assert np.isfinite(controller.train(8)["loss"])
    assert all(np.isfinite(weight).all() for weight in trainer.weights())


class Small(looplib.GradientTrainer):
    """A linear model on global batches of 6 of 24 examples, whose size is said to vary."""

    batches, batch_size_varies = "global", True

    def __init__(self, **settings):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        super().__init__(model, keras.optimizers.SGD(0.1), **settings)

    def dataset(self, context):
        return tf.data.Dataset.from_tensors((self.x, self.y)).repeat()

    def loss_fn(self, inputs):
        x, y = inputs
        return tf.reduce_sum((self.model(x) - y) ** 2, axis=1)

    x = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, *more([3])])
@pytest.mark.parametrize("strategy", ["default", "mirrored_x2"])
def test_the_gradient_of_a_smaller_global_batch_is_of_its_mean_where_sizes_vary(strategy, parts):
    strategy = make_strategy(strategy)
    with strategy.scope():
        trainer = Small(micro_batches=parts)
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=24, steps_per_loop=1), trainer=trainer, strategy=strategy, writers=[]
    ) as controller:
        controller.train(2)
    kernel = np.zeros((3, 1))
    for _ in range(2):
        kernel -= 0.1 * 2 * Small.x.T @ (Small.x @ kernel - Small.y) / 6
    np.testing.assert_allclose(trainer.model.get_weights()[0], kernel, rtol=1e-5)
