"""Outputs of an evaluation for the host, and the mode that it runs in."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy

import looplib
from looplib.errors import MetricError, StepError

VALUES = np.random.RandomState(1).randn(50)


@pytest.mark.slow
def test_an_evaluator_without_an_init_takes_the_model():
    class Error(looplib.Evaluator):
        def dataset(self, context):
            return context.indices(4).map(lambda i: tf.cast(i, tf.float32)[:, None])

        def step_fn(self, inputs):
            return {"output": self.model(inputs)[:, 0]}

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    with looplib.Controller(looplib.RunConfig(global_batch_size=2), evaluator=Error(model), writers=[]) as controller:
        assert controller.evaluate()["eval"]["output"] == 1.5


class Collected(looplib.Evaluator):
    """Collects ids, squares and words of its examples, an example twice where its id is even."""

    def __init__(self, n):
        self.n, self.calls, self.begun = n, [], 0

    def dataset(self, context):
        return context.indices(self.n).map(lambda i: (i, tf.gather(VALUES, i)))

    def step_fn(self, inputs):
        ids, values = inputs
        twice = tf.repeat(ids, 2 - ids % 2)
        words = tf.strings.as_string(ids)
        return {"value": values, "pair": looplib.each((twice, {"squares": values**2, "words": words}))}

    @contextlib.contextmanager
    def evaluating(self):
        self.calls, self.begun = [], self.begun + 1
        yield
        self.begun += 100

    def collect(self, outputs):
        self.calls.append([output["pair"] for output in outputs])

    def loop_end(self, metrics):
        assert self.begun < 100  # still inside
        return metrics


@pytest.mark.slow(spread=3)
@pytest.mark.slow(pairs=True)
@pytest.mark.parametrize("loop", ["graph", "auto", "eager"])
@pytest.mark.parametrize("n", [1, 16, 23])
def test_what_steps_return_as_each_reaches_the_host_in_order(strategy, n, loop):
    evaluator = Collected(n)
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=8, loop=loop), evaluator=evaluator, strategy=strategy, writers=[]
    )
    for _ in range(2):
        evaluator.begun = 0
        metrics = controller.evaluate()["eval"]
        assert evaluator.begun == 101
        assert metrics["examples"] == n and metrics["value"] == pytest.approx(VALUES[:n].mean())
        assert "pair" not in metrics
        assert len(evaluator.calls) == -(-n // 8)
        parts = [part for call in evaluator.calls for part in call]
        assert len(parts) == -(-n // (8 // strategy.num_replicas_in_sync))  # one a replica that had examples
        ids = np.repeat(np.arange(n), 2 - np.arange(n) % 2)
        np.testing.assert_array_equal(np.concatenate([ids.numpy() for ids, _ in parts]), ids)
        np.testing.assert_allclose(np.concatenate([rest["squares"] for _, rest in parts]), VALUES[:n] ** 2)
        words = [word for _, rest in parts for word in rest["words"].numpy()]
        assert words == [str(i).encode() for i in range(n)]


@pytest.mark.parametrize("loop", ["graph", "eager"])
def test_replicas_whose_first_batches_are_empty_add_nothing(loop):
    class Filtered(looplib.Evaluator):
        def dataset(self, context):
            return context.indices(37).map(lambda ids: tf.boolean_mask(ids, ids % 8 > 3))

        def step_fn(self, ids):
            return {"value": tf.gather(VALUES, ids)}

    kept = np.arange(37)[np.arange(37) % 8 > 3]
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=8, loop=loop),
        evaluator=Filtered(),
        strategy=make_strategy("mirrored_x2"),
        writers=[],
    ) as controller:
        metrics = controller.evaluate()["eval"]
    assert metrics["examples"] == len(kept) and metrics["value"] == pytest.approx(VALUES[kept].mean())


class Joined(looplib.Evaluator):
    """Whose step divides by a sum over the replicas, as losses of detection do by the number of boxes."""

    def __init__(self, n, keras):
        self.n, self.mean = n, keras.metrics.Mean()

    def dataset(self, context):
        return context.indices(self.n).map(lambda i: tf.gather(VALUES, i))

    def step_fn(self, values):
        everywhere = tf.distribute.get_replica_context().all_reduce("SUM", tf.reduce_sum(tf.abs(values)))
        self.mean.update_state(tf.reduce_mean(values), tf.size(values))  # NaN of no value
        weighted = looplib.mean(tf.reduce_mean(values), tf.size(values))
        return {"share": looplib.total(tf.reduce_sum(values) / everywhere), "keras": self.mean, "mean": weighted}


@pytest.mark.parametrize("n", [16, 13])
def test_a_step_that_joins_the_replicas_evaluates_each_example_once_also_where_a_replica_has_none(n, keras):
    strategy = make_strategy("mirrored_x4")
    with strategy.scope():
        evaluator = Joined(n, keras)
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=4), evaluator=evaluator, strategy=strategy, writers=[]
    ) as controller:
        metrics = controller.evaluate()["eval"]
    batches = [VALUES[at : min(at + 4, n)] for at in range(0, n, 4)]
    assert metrics["examples"] == n
    assert metrics["share"] == pytest.approx(sum(batch.sum() / np.abs(batch).sum() for batch in batches))
    assert metrics["mean"] == pytest.approx(VALUES[:n].mean())
    assert metrics["keras"] == pytest.approx(VALUES[:n].mean(), rel=1e-5)


def test_the_eager_loop_refuses_a_step_that_joins_the_replicas_where_one_has_no_example():
    strategy = make_strategy("mirrored_x2")
    with strategy.scope():
        evaluator = Joined(5, keras)
    config = looplib.RunConfig(global_batch_size=2, loop="eager")
    with looplib.Controller(config, evaluator=evaluator, strategy=strategy, writers=[]) as controller:
        with pytest.raises(StepError, match="loop=graph"):
            controller.evaluate()


def test_a_number_of_steps_is_kept_to():
    evaluator = Collected(50)
    controller = looplib.Controller(looplib.RunConfig(global_batch_size=8), evaluator=evaluator, writers=[])
    assert controller.evaluate(steps=2)["eval"]["examples"] == 16 and len(evaluator.calls) == 2


@pytest.mark.slow
def test_what_holds_during_an_evaluation_is_undone_before_its_report_and_after_an_error(tmp_path):
    class Swapped(toy.RegressionEvaluator):
        fails = False

        @contextlib.contextmanager
        def evaluating(self):
            kept = self.model.get_weights()
            self.model.set_weights([weight + 1 for weight in kept])
            try:
                yield
            finally:
                self.model.set_weights(kept)

        def loop_end(self, metrics):
            if self.fails:
                raise ArithmeticError("planted")
            return metrics

    strategy = make_strategy("default")
    trainer, _ = toy.build(strategy)
    evaluator = Swapped(trainer.model)
    seen = []
    controller = toy.controller(
        strategy, trainer, evaluator, actions=[lambda event: seen.append((event.split, trainer.weights()))]
    )
    controller.train_and_evaluate(2, 1)
    during = [weight + 1 for weight in trainer.weights()]
    assert controller.evaluate()["eval"]["accuracy"] == toy.numpy_accuracy(during)
    for (split, at_report), (_, before) in zip(seen[1:], seen):
        if split == "eval":
            for a, b in zip(at_report, before):
                np.testing.assert_array_equal(a, b)
    kept, evaluator.fails = trainer.weights(), True
    with pytest.raises(ArithmeticError):
        controller.evaluate()
    for a, b in zip(trainer.weights(), kept):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_an_evaluator_brings_actions_along():
    class Acting(looplib.Adapter, toy.RegressionEvaluator):
        @property
        def own_actions(self):
            return [lambda event: seen.append(("own", event.split, event.step))]

    strategy, seen = make_strategy("default"), []
    trainer, _ = toy.build(strategy)
    given = lambda event: seen.append(("given", event.split, event.step))
    controller = toy.controller(strategy, trainer, Acting(trainer.model), actions=[given])
    controller.train_and_evaluate(1, 1)
    expected = [(whose, split, 1) for split in ("train", "eval") for whose in ("own", "given")]
    assert seen == expected
    job = looplib.Controller(looplib.RunConfig(global_batch_size=8), evaluator=Acting(trainer.model), writers=[])
    job.evaluate()
    assert seen[len(expected) :] == [("own", "eval", 0)]


def test_only_an_evaluator_collects():
    class Collecting(toy.Regression):
        def step_fn(self, inputs):
            return {**super().step_fn(inputs), "x": looplib.each(inputs[1])}

    with pytest.raises(MetricError, match="'x'.*looplib.each"):
        toy.controller(make_strategy("default"), Collecting())


def test_an_evaluator_that_collects_nothing_says_what_is_missing():
    class Lacking(Collected):
        collect = looplib.Evaluator.collect

    controller = looplib.Controller(looplib.RunConfig(global_batch_size=8), evaluator=Lacking(8), writers=[])
    with pytest.raises(NotImplementedError, match="Lacking.step_fn returns looplib.each, and there is no collect"):
        controller.evaluate()


@pytest.mark.slow
def test_lists_of_metrics_of_an_evaluator_are_no_part_of_a_checkpoint(tmp_path):
    """A training without the evaluator, one with it, and an evaluation alone share a run directory."""

    class Listed(toy.RegressionEvaluator):
        def __init__(self, model):
            super().__init__(model)
            self.metrics = [toy.keras3.metrics.SparseCategoricalAccuracy(name="a"), toy.keras3.metrics.Mean(name="b")]

        def step_fn(self, inputs):
            x, y = inputs
            logits = self.model(x, training=False)
            self.metrics[0].update_state(y, logits)
            self.metrics[1].update_state(tf.cast(y, tf.float32))
            return {metric.name: metric for metric in self.metrics}

    strategy = make_strategy("default")
    for steps, trains, evaluates in ((2, True, False), (4, True, True), (6, True, False), (6, False, True)):
        trainer, _ = toy.build(strategy)
        evaluator = Listed(trainer.model) if evaluates else None
        with toy.controller(strategy, trainer if trains else None, evaluator, model_dir=tmp_path) as controller:
            if trains:
                controller.train(steps)
            assert controller.global_step == steps
            if evaluates:
                assert controller.evaluate()["eval"]["b"] == pytest.approx(toy.Y.mean())
