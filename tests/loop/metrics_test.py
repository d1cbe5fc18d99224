"""Reductions are exact over steps, replicas and uneven batches, and say how they reduce or fail."""

import importlib
import itertools

import flat_config
import numpy as np
import pytest
import tensorflow as tf
from conftest import make_strategy, more
from hypothesis import given, settings
from hypothesis import strategies as st

import looplib
from looplib.errors import EmptyDataError, EndlessDataError, MetricError
from looplib.loop import step as loop_step
from looplib.loop.coordinator import RemoteReducer
from looplib.loop.reducer import Reducer
from looplib.task.record import RunningTotals

VALUES = np.random.RandomState(1).randn(2000)


class Values(looplib.Evaluator):
    """Evaluates the first n of VALUES; `outputs` makes what step_fn returns from a batch of ids and values."""

    def __init__(self, n, outputs, dataset=None):
        self.n, self.outputs, self.make = n, outputs, dataset

    def dataset(self, context):
        if self.make is not None:
            return self.make(context)
        return context.indices(self.n).map(lambda i: (i, tf.gather(VALUES, i)))

    def step_fn(self, inputs):
        return self.outputs(*inputs)


def evaluate(strategy, evaluator, global_batch_size=16, steps=-1, **settings):
    controller = flat_config.controller(
        evaluator=evaluator, strategy=strategy, global_batch_size=global_batch_size, writers=[], **settings
    )
    return controller.evaluate(steps)["eval"]


class Sums:
    """A `Reducer` on a strategy, with a step of each kind of metric that is traced once for batches of any sizes."""

    def __init__(self, strategy):
        self.strategy, self.reducer = strategy, Reducer(strategy, "step_fn", count_examples=True)

        def on_replica(values, weights, ends):
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            own = slice(ends[number], ends[number + 1])
            return loop_step.on_replica(self.step_fn, self.reducer, True, (values[own], weights[own]))

        kinds = (tf.TensorSpec([None], tf.float64), tf.TensorSpec([None], tf.float64), tf.TensorSpec([None], tf.int32))
        self.step = tf.function(lambda *inputs: strategy.run(on_replica, inputs), kinds, autograph=False)

    def step_fn(self, inputs):
        v, w = inputs
        return {
            "value": v,
            "rows": tf.stack([v, 2 * v], 1),
            "weighted": looplib.mean(tf.where(w > 0, v, np.nan), weight=w),  # of weight 0, so ignored
            "broadcast": looplib.mean(tf.stack([v, 3 * v], 1), weight=w[:, None]),
            "sum": looplib.total(tf.reduce_sum(v)),
            "counts": looplib.total(tf.stack([tf.size(v), tf.reduce_sum(tf.cast(v, tf.int32))])),
            "last": looplib.last(v[0]),
            "positive": v > 0,
            # As many alike are summed together.
            **{f"mean_of_mean_{k}": looplib.mean(tf.reduce_mean(v) + k, weight=tf.size(v)) for k in range(5)},
        }

    def loop(self, steps):
        """Adds steps, of which each has lists of (value, weight) for four replicas, that fewer replicas share."""
        for step in steps:
            values, weights = np.array([*itertools.chain(*step)], np.float64).T
            number = self.strategy.num_replicas_in_sync
            ends = np.cumsum([0, *map(len, step)])[:: 4 // number]
            contribution = self.step(values, weights, ends.astype(np.int32))
            if not self.reducer.created:
                self.reducer.create()
            self.reducer.add(contribution)


@pytest.fixture(scope="module")
def sums():
    return [Sums(make_strategy(name)) for name in ("default", "mirrored_x2", "mirrored_x4")]


EXAMPLES = st.lists(
    st.tuples(st.integers(-999, 999).map(lambda n: n / 64), st.sampled_from([0, 0, 1, 0.5, 3])), max_size=4
)
LOOP = st.lists(st.tuples(EXAMPLES.filter(bool), EXAMPLES, EXAMPLES, EXAMPLES), min_size=1, max_size=4)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(loops=st.lists(LOOP, min_size=1, max_size=2), data=st.data())
def test_metrics_are_those_of_all_examples_however_they_come_in_steps_replicas_loops_and_restarts(sums, loops, data):
    for steps in loops:
        first, second = (data.draw(st.sampled_from(range(3))) for _ in range(2))
        cut = data.draw(st.integers(0, len(steps) - 1))
        sums[first].loop(steps[:cut])
        state = sums[first].reducer.state()
        sums[first].reducer.clear()
        sums[second].reducer.load(state)  # of a checkpoint, on as many replicas or not
        sums[second].loop(steps[cut:])
        found = sums[second].reducer.packer.unpack(*sums[second].reducer.read())
        values, weights = np.array([example for step in steps for part in step for example in part]).T
        mean = (values * weights).sum() / weights.sum() if weights.any() else np.nan
        assert found.pop("counts").tolist() == [len(values), sum(map(int, values))]
        assert found == pytest.approx({
            "value": values.mean(), "rows": 1.5 * values.mean(), "weighted": mean, "broadcast": 2 * mean,
            "sum": values.sum(), "last": steps[-1][0][0][0], "positive": (values > 0).mean(), "examples": len(values),
            **{f"mean_of_mean_{k}": values.mean() + k for k in range(5)},
        }, rel=1e-12, abs=1e-12, nan_ok=True)  # fmt: skip


def test_a_last_value_is_of_the_last_step_in_which_the_first_replica_had_examples(sums):
    of_two, empty = sums[1], []
    of_two.reducer.clear()
    last = lambda: of_two.reducer.packer.unpack(*of_two.reducer.read())["last"]
    of_two.loop([[[(1.0, 1)], empty, [(2.0, 1)], empty], [[(3.0, 1)], empty, empty, empty]])
    of_two.loop([[empty, empty, [(4.0, 1)], empty]])
    assert last() == 3
    of_two.loop([[empty, empty, [(5.0, 1)], empty]])
    assert np.isnan(last())


@pytest.mark.slow
@pytest.mark.parametrize("batch, n", [(1, 3), (4, 13), *more([(4, 12), (5, 41)])])
def test_an_ordinary_pipeline_loses_no_batch(strategy, batch, n):
    size = batch * strategy.num_replicas_in_sync
    for drop in (False, True):
        data = lambda context: tf.data.Dataset.range(n).batch(context.per_replica_batch_size, drop_remainder=drop)
        found = evaluate(strategy, Values(n, lambda i: {"id": i}, lambda c: data(c).map(lambda i: (i,))), size)
        kept = n // batch * batch if drop else n
        assert (found["examples"], found["id"]) == (kept, pytest.approx(np.arange(kept).mean()))


# Pairs of each strategy and family; the rest of their product with --all.
STRATEGIES, FAMILIES = ("default", "one_device", "mirrored_x2", "mirrored_x4"), ("keras", "tf_keras")
FEW = [("default", "keras"), ("mirrored_x2", "tf_keras")]
EACH = [*FEW, *more(each for each in itertools.product(STRATEGIES, FAMILIES) if each not in FEW)]


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("name, family", EACH)
def test_keras_metrics_of_both_families_reduce_exactly(name, family):
    strategy, keras = make_strategy(name), pytest.importorskip(family)
    with strategy.scope():
        metrics = {"mean": keras.metrics.Mean(), "auc": keras.metrics.AUC(), "mse": keras.metrics.MeanSquaredError()}
    labels = (np.arange(2000) % 2).astype(np.float32)
    scores = (1 / (1 + np.exp(-VALUES))).astype(np.float32)

    def outputs(i, v):
        metrics["mean"].update_state(v)
        y, p = tf.gather(labels, i), tf.gather(scores, i)
        metrics["auc"].update_state(y, p)
        metrics["mse"].update_state(y[:, None], p[:, None])
        return dict(metrics)

    evaluator = Values(65, outputs)
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=16), evaluator=evaluator, strategy=strategy, writers=[]
    )
    alone = keras.metrics.AUC()
    alone.update_state(labels[:65], scores[:65])
    for _ in range(2):  # reset between evaluations
        found = controller.evaluate()["eval"]
        assert found["mean"] == pytest.approx(VALUES[:65].mean(), rel=1e-5)
        assert found["mse"] == pytest.approx(((labels - scores)[:65] ** 2).mean(), rel=1e-5)
        assert found["auc"] == pytest.approx(float(alone.result()), rel=1e-5)
        assert found["examples"] == 65


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_metrics_that_make_their_sums_in_their_first_update_are_those_of_all_examples_on_replicas(family):
    keras, strategy = pytest.importorskip(family), make_strategy("mirrored_x2")
    scores = np.random.default_rng(0).random((101, 3)).astype(np.float32)
    labels = (scores + np.random.default_rng(1).random((101, 3)) > 1).astype(np.float32)
    with strategy.scope():
        metrics = {
            "f1": keras.metrics.F1Score("macro", 0.5), "r2": keras.metrics.R2Score(),
            "auc": keras.metrics.AUC(multi_label=True), "error": keras.metrics.MeanSquaredError(),
        }  # fmt: skip

    def outputs(ids, values):
        for metric in metrics.values():
            metric.update_state(tf.gather(labels, ids), tf.gather(scores, ids))
        return dict(metrics)

    right = np.sum(labels * (scores > 0.5), axis=0)
    error, spread = np.sum((labels - scores) ** 2, axis=0), np.sum((labels - labels.mean(axis=0)) ** 2, axis=0)
    alone = keras.metrics.AUC(multi_label=True)
    alone.update_state(labels, scores)
    expected = {
        "f1": np.mean(2 * right / (labels.sum(axis=0) + np.sum(scores > 0.5, axis=0))),
        "r2": np.mean(1 - error / spread), "auc": float(alone.result()), "error": error.sum() / scores.size,
        "examples": 101,
    }  # fmt: skip
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=16), evaluator=Values(101, outputs), strategy=strategy, writers=[]
    )
    for _ in range(2):  # reset between evaluations
        assert controller.evaluate()["eval"] == pytest.approx(expected, rel=1e-5)


def own_metric(family, kind):
    """A metric of a class of one's own: of a sum, and of what is none."""
    keras = importlib.import_module(family)
    start = {"minimum": "ones"}.get(kind, "zeros")
    change = {
        "sum": lambda kept, values: kept + tf.reduce_sum(values),
        "maximum": lambda kept, values: tf.maximum(kept, tf.reduce_max(values)),
        "minimum": lambda kept, values: tf.minimum(kept, tf.reduce_min(values)),
        "moving average": lambda kept, values: 0.9 * kept + 0.1 * tf.reduce_mean(values),
    }[kind.removeprefix("large sum and ")]
    sums = [1e5] * kind.startswith("large")  # in the same variable

    class Own(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="own")
            self.kept = self.add_weight(shape=(1 + len(sums),), name="kept", initializer=start)

        def update_state(self, values, sample_weight=None):
            kept = tf.convert_to_tensor(self.kept)
            own = change(kept[-1:], tf.cast(values, tf.float32))
            self.kept.assign(tf.concat([kept[:-1] + sums, own], axis=0))

        def result(self):
            return tf.convert_to_tensor(self.kept)[-1]

        def reset_state(self):
            self.kept.assign((tf.ones if start == "ones" else tf.zeros)([1 + len(sums)]))

    return Own()


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize(
    "kind", ["sum", "maximum", "minimum", "moving average", "large sum and sum", "large sum and maximum"]
)
@pytest.mark.parametrize("family", ["keras", "tf_keras"])
def test_a_metric_that_replicas_cannot_sum_is_refused_when_the_controller_is_built(family, kind):
    strategy = make_strategy("mirrored_x2")
    with strategy.scope():
        metric = own_metric(family, kind)

    def outputs(ids, values):
        metric.update_state(values)
        return {"own": metric}

    evaluator = Values(50, outputs)
    evaluator.own = metric
    if kind.endswith("sum"):
        assert evaluate(strategy, evaluator)["own"] == pytest.approx(VALUES[:50].sum(), rel=1e-5)
        return
    with pytest.raises(MetricError, match="'own'"):
        evaluate(strategy, evaluator)
    evaluator.own = metric = own_metric(family, kind)  # one replica has no sum to make
    assert np.isfinite(evaluate(make_strategy("default"), evaluator)["own"])


def test_a_sum_that_is_not_finite_is_no_other_kind_of_metric(caplog):
    with make_strategy("mirrored_x2").scope():
        metric = own_metric("keras", "sum")

    def outputs(ids, values):
        metric.update_state(tf.where(ids == 3, tf.constant(np.inf, tf.float64), values))
        return {"own": metric}

    assert evaluate(make_strategy("mirrored_x2"), Values(50, outputs))["own"] == np.inf
    assert "'own' (Values.step_fn) is not finite after one batch" in caplog.text


@pytest.mark.parametrize("kind", ["sum", "moving average"])
@pytest.mark.parametrize("values", [
    lambda ids: tf.maximum(ids, 16) * (1 + 0.02 * tf.random.normal([], dtype=ids.dtype)),
    lambda ids: tf.where(ids >= 16, ids, 0),
], ids=["by random numbers", "in the first batch"])  # fmt: skip
def test_a_metric_that_replicas_cannot_sum_is_refused_also_where_that_is_hidden(values, kind):
    strategy = make_strategy("mirrored_x2")
    with strategy.scope():
        metric = own_metric("keras", kind)

    def outputs(ids, _):
        metric.update_state(values(tf.cast(ids, tf.float32)))
        return {"own": metric}

    evaluator = Values(50, outputs)
    evaluator.own = metric
    if kind == "sum":
        assert evaluate(strategy, evaluator)["own"] == pytest.approx(np.arange(16, 50).sum(), rel=0.4)
        return
    with pytest.raises(MetricError, match="'own'"):
        evaluate(strategy, evaluator)


@pytest.mark.parametrize("values, said", [
    (lambda values: 0 * values, "does not change in the first 8 batches"),
    (lambda values: tf.random.normal([], dtype=values.dtype), "depends on random numbers more than"),
])  # fmt: skip
def test_a_metric_of_which_nothing_is_known_is_named(values, said, caplog):
    with make_strategy("mirrored_x2").scope():
        metric = own_metric("keras", "sum")

    def outputs(ids, given):
        metric.update_state(values(given))
        return {"own": metric}

    evaluate(make_strategy("mirrored_x2"), Values(200, outputs))
    assert f"'own' (Values.step_fn) {said}" in caplog.text


class Summing(looplib.Trainer):
    """Trains a weight, and returns a sum of a metric class of one's own."""

    def __init__(self, own):
        self.weight = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)
        self.own = own_metric("keras", "sum") if own else None

    def dataset(self, context):
        return context.indices(len(VALUES)).map(lambda ids: tf.gather(VALUES, ids))

    def step_fn(self, values):
        self.weight.assign_add(tf.cast(tf.reduce_mean(values), tf.float32))
        if self.own is not None:
            self.own.update_state(values)
        return {"value": values, **({"own": self.own} if self.own else {})}


@pytest.mark.slow
def test_a_training_is_the_one_without_the_check_of_its_metric():
    strategy, weights = make_strategy("mirrored_x2"), []
    for own in (False, True):
        with strategy.scope():
            trainer = Summing(own)
        controller = looplib.Controller(
            looplib.RunConfig(global_batch_size=8), trainer=trainer, strategy=strategy, writers=[]
        )
        metrics = controller.train(3)
        weights.append(trainer.weight.numpy())
    assert weights[0] == weights[1] and metrics["own"] == pytest.approx(24 * metrics["value"])


def live_metric(keras):
    """Returns a metric whose results are its variables themselves, as Keras's own documentation writes them."""

    class Sums(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="sums")
            self.values, self.count = (self.add_weight(name=name, initializer="zeros") for name in ("values", "count"))

        def update_state(self, values):
            self.values.assign_add(tf.reduce_sum(tf.cast(values, tf.float32)))
            self.count.assign_add(tf.cast(tf.size(values), tf.float32))

        def result(self):
            return {"values": self.values, "count": self.count}

    class One(Sums):
        def result(self):
            return self.values

    return Sums(), One()


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("loop", ["eager", "graph"])
@pytest.mark.parametrize("name, family", EACH)
def test_a_keras_metric_may_return_its_own_variables(name, family, loop):
    strategy, keras = make_strategy(name), pytest.importorskip(family)
    with strategy.scope():
        several, one = live_metric(keras)

    def outputs(i, v):
        several.update_state(v)
        one.update_state(i)
        return {"several": several, "one": one}

    with looplib.Controller(
        looplib.RunConfig(global_batch_size=16, loop=loop), evaluator=Values(65, outputs), strategy=strategy, writers=[]
    ) as controller:
        for _ in range(2):  # reset between evaluations
            found = controller.evaluate()["eval"]
            assert found["several_values"] == pytest.approx(VALUES[:65].sum(), rel=1e-5)
            assert (found["several_count"], found["one"], found["examples"]) == (65, np.arange(65).sum(), 65)


@pytest.mark.parametrize("kind", [Reducer, RemoteReducer])
def test_what_a_reducer_reads_of_keras_metrics_is_from_before_the_reset(kind):
    """The one of parameter servers keeps its totals, and the metrics' variables, on the coordinator."""
    several, one = live_metric(importlib.import_module("keras"))

    def step_fn(values):
        several.update_state(values)
        one.update_state(2 * values)
        return {"several": several, "one": one}

    reducer = kind(make_strategy("default"), "step_fn", count_examples=True)
    contribution = loop_step.on_replica(step_fn, reducer, False, tf.constant([1.0, 2.0, 4.0]))
    reducer.create()
    reducer.add(contribution)
    expected = {"examples": 3, "several_values": 7.0, "several_count": 3.0, "one": 14.0}
    assert reducer.packer.unpack(*reducer.read()) == expected
    assert float(one.values.numpy()) == 0


def test_a_metric_that_is_new_leaves_the_sums_of_others_in_a_checkpoint_alone():
    reducer = Reducer(make_strategy("default"), "step_fn", count_examples=False)
    values = tf.constant([1.0, 2.0])
    contribution = reducer.packed({"new": values, "old": values}, values)
    reducer.create()
    for names, old in ((["old"], (7.0 + 3.0) / (2 + 2)), (["gone", "old"], 1.5)):
        reducer.clear()
        reducer.load(RunningTotals(names, [[7.0, 2.0] * len(names)]))
        reducer.add(contribution)
        assert reducer.packer.unpack(*reducer.read()) == {"new": 1.5, "old": old}


class _Scores(looplib.Trainer):
    """Reports one metric of its data, and trains nothing."""

    def __init__(self, make, untraceable=False):
        self.score, self.untraceable = make(), untraceable

    def dataset(self, context):
        return context.indices(32).map(lambda i: tf.cast(tf.gather(VALUES, tf.stack([i, i + 32], 1)), tf.float32))

    def step_fn(self, inputs):
        if self.untraceable:
            inputs.numpy()
        self.score.update_state(tf.cast(inputs > 0, tf.float32), inputs)
        return {"loss": tf.reduce_sum(inputs, axis=1), "score": self.score}


@pytest.mark.parametrize("loop", ["eager", *more(["graph"])])
@pytest.mark.parametrize("name", ["F1Score", "R2Score"])
def test_a_metric_that_makes_its_sums_late_has_those_of_a_report_after_a_resume(name, loop, tmp_path):
    metrics = importlib.import_module("keras").metrics
    make = (lambda: metrics.F1Score("macro", 0.5)) if name == "F1Score" else metrics.R2Score
    values = VALUES[:64].reshape(2, 32).T.astype("float32")
    expected = make()
    expected.update_state((values > 0).astype("float32"), values)
    for start in (0, 2):
        with flat_config.controller(
            trainer=_Scores(make), model_dir=tmp_path, global_batch_size=8, steps_per_loop=4, loop=loop, writers=[],
            checkpoints=looplib.CheckpointPolicy(every_steps=2),
        ) as controller:  # fmt: skip
            assert controller.global_step == start
            np.testing.assert_allclose(controller.train(4)["score"], float(expected.result()), rtol=1e-5)
        for path in tmp_path.glob("checkpoints/ckpt-4*"):
            path.unlink()


def test_sums_that_no_checkpoint_of_an_eager_loop_holds_are_named(caplog):
    make = importlib.import_module("keras").metrics.R2Score
    with flat_config.controller(
        trainer=_Scores(make, True), global_batch_size=8, loop="eager", writers=[]
    ) as controller:
        assert "no checkpoint holds what r2_score of _Scores adds up" in caplog.text
        assert np.isfinite(controller.train(4)["score"])


@pytest.mark.slow(spread=1)
def test_last_is_the_value_of_the_last_step(strategy):
    found = evaluate(
        strategy, Values(64, lambda i, v: {"first_id": looplib.last(i[0]), "n": looplib.total(tf.size(i))})
    )
    assert found["first_id"] == 48 and found["n"] == 64


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("name", ["default", "mirrored_x2"])
def test_an_array_reaches_loop_end_as_numpy(name):
    class Confusion(Values):
        def loop_end(self, metrics):
            histogram = metrics["histogram"]  # in whose place there is a number then
            return {**metrics, "histogram": histogram.max(), "bins": histogram.size}

    def outputs(i, v):
        counts = tf.math.bincount(tf.cast(i % 5, tf.int32), minlength=5, maxlength=5)
        return {"histogram": looplib.total(tf.ensure_shape(counts, [5]))}

    found = evaluate(make_strategy(name), Confusion(23, outputs))
    counts = np.bincount(np.arange(23) % 5)
    assert (found["histogram"], found["bins"], found["examples"]) == (counts.max(), 5, 23)


@pytest.mark.slow
def test_many_metrics_of_one_kind_reduce_as_each_alone_would():
    many, n = range(5), 48

    def outputs(i, v):
        last = tf.cast(tf.reduce_max(i), tf.float32)
        return {
            "alone": v > 0,
            **{f"value_{k}": tf.cast(v * 3**k, tf.float32) for k in many},
            **{f"weighted_{k}": looplib.mean(v, weight=tf.cast(i % (k + 2), tf.float64)) for k in many},
            **{f"of_means_{k}": looplib.mean(tf.reduce_mean(v + k), weight=tf.size(v)) for k in many},
            **{f"total_{k}": looplib.total(tf.reduce_sum(i + k)) for k in many},
            **{f"last_{k}": looplib.last(last + k) for k in many},
        }

    def dataset(context):
        data = tf.data.Dataset.range(n).map(lambda i: (i, tf.gather(VALUES, i)))
        return data.batch(context.per_replica_batch_size, drop_remainder=True)

    found = evaluate(make_strategy("mirrored_x2"), Values(n, outputs, dataset), global_batch_size=16)
    values, ids = VALUES[:n], np.arange(n)
    assert list(found) == sorted(found)
    assert found["examples"] == n and found["alone"] == (values > 0).mean()
    for k in many:
        rounded = (values * 3**k).astype(np.float32).astype(np.float64)
        assert found[f"value_{k}"] == pytest.approx(rounded.mean(), rel=1e-12)
        weights = ids % (k + 2)
        assert found[f"weighted_{k}"] == pytest.approx((values * weights).sum() / weights.sum(), rel=1e-12)
        assert found[f"of_means_{k}"] == pytest.approx((values + k).mean(), rel=1e-12)
        assert found[f"total_{k}"] == (ids + k).sum() and isinstance(found[f"total_{k}"], int)
        assert found[f"last_{k}"] == n - 9 + k  # of the first replica, whose last batch is the last but one


def test_metrics_stay_apart_where_a_smaller_batch_has_the_shape_of_another_metric():
    """In an eager evaluation, whose shapes are known: 12 examples are batches of 8 and 4."""

    def outputs(i, v):
        ones = tf.ones([4], tf.float64)
        return {
            name: each for k in range(3) for name, each in ((f"{k}_v", v + k), (f"{k}_fixed", looplib.mean(ones * k)))
        }

    found = evaluate(None, Values(12, outputs), global_batch_size=8, loop="eager")
    for k in range(3):
        assert found[f"{k}_v"] == pytest.approx(VALUES[:12].mean() + k) and found[f"{k}_fixed"] == k


@pytest.mark.slow(spread=1)
def test_evaluation_of_some_steps_of_endless_data(strategy):
    data = lambda context: tf.data.Dataset.range(10_000).repeat().batch(4).map(lambda i: (i,))
    evaluator = Values(0, lambda i: {"id": i}, data)
    size = 4 * strategy.num_replicas_in_sync
    with pytest.raises(EndlessDataError):
        evaluate(strategy, evaluator, size)
    found = evaluate(strategy, evaluator, size, steps=3)
    assert found["examples"] == 3 * size and found["id"] == pytest.approx(np.arange(3 * size).mean())


def test_ragged_features_beside_dense_labels_are_counted_by_row():
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0], [], [4.0]])
    data = lambda context: tf.data.Dataset.from_tensor_slices((ragged, [0.0, 1.0, 2.0, 3.0])).batch(2)
    found = evaluate(None, Values(4, lambda r, y: {"sum": looplib.total(tf.reduce_sum(r)), "y": y}, data), 2)
    assert found == {"examples": 4, "sum": 10.0, "y": 1.5}


def test_an_evaluation_set_found_empty_only_by_reading_is_refused_when_the_controller_is_built():
    data = lambda context: tf.data.Dataset.range(8).filter(lambda i: i < 0).batch(4).map(lambda i: (i,))
    with pytest.raises(EmptyDataError, match="'eval'"):
        looplib.Controller(
            looplib.RunConfig(global_batch_size=4), evaluator=Values(0, lambda i: {"i": i}, data), writers=[]
        )


@pytest.mark.slow
def test_several_evaluators_report_under_their_names():
    short, long = Values(3, lambda i, v: {"v": v}), Values(9, lambda i, v: {"v": v})
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=4), evaluator={"short": short, "long": long}, writers=[]
    )
    found = controller.evaluate()
    assert {name: metrics["examples"] for name, metrics in found.items()} == {"short": 3, "long": 9}


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("name, family", EACH)
def test_a_replica_without_examples_does_not_run_the_step(name, family):
    """A convolution fused with its activation fails on an empty batch, and a mean of nothing is NaN."""
    strategy, keras = make_strategy(name), pytest.importorskip(family)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.InputLayer((8, 8, 1)),
                keras.layers.Conv2D(4, 3, activation="relu"),
                keras.layers.Conv2D(4, 3, activation="relu"),
            ]
        )
        mean = keras.metrics.Mean()

    class Convolution(Values):
        def step_fn(self, inputs):
            ids, values = inputs
            images = tf.ones([tf.shape(ids)[0], 8, 8, 1]) * tf.cast(values, tf.float32)[:, None, None, None]
            mean.update_state(values)
            return {
                "features": model(images, training=False),
                "mean": mean,
                "least": looplib.total(tf.reduce_min(values)),
            }

    found = evaluate(strategy, Convolution(1, None), 8)
    image = np.full([1, 8, 8, 1], VALUES[0], np.float32)
    assert found["features"] == pytest.approx(np.array(model(image)).mean(), rel=1e-5)
    assert found["least"] == pytest.approx(VALUES[0]) and found["mean"] == pytest.approx(VALUES[0], rel=1e-6)


BAD_OUTPUTS = {
    "a scalar without a reduction": (
        lambda i, v: {"loss": tf.reduce_mean(v)},
        "'loss'.*without a reduction.*looplib.mean",
    ),
    "a mean of a scalar without a weight": (
        lambda i, v: {"loss": looplib.mean(tf.reduce_mean(v))},
        "scalar without a weight",
    ),
    "not a dict": (lambda i, v: v, "expected a dict"),
    "nothing": (lambda i, v: None, "returned a NoneType; expected a dict"),
    "a string": (lambda i, v: {"loss": tf.as_string(v)}, "expected real numbers"),
    "an object": (lambda i, v: {"loss": object()}, "expected a tensor"),
    "a vector that is not the batch": (lambda i, v: {"w": tf.zeros([10])}, "first dimension is not the batch"),
    "a total of unknown shape": (lambda i, v: {"v": looplib.total(v)}, "sum over the batch first"),
    "a name that is not a string": (lambda i, v: {3: v}, "metric named 3"),
    "a name that a record needs": (lambda i, v: {"step": v}, "metric named 'step'"),
}


EAGER = ("a scalar without a reduction", "not a dict")


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "case, loop",
    [
        *((case, "graph") for case in BAD_OUTPUTS),
        *((case, "eager") for case in EAGER),
        *more((case, "eager") for case in BAD_OUTPUTS if case not in EAGER),
    ],
)
def test_a_wrong_return_value_is_a_sentence_at_the_first_step(case, loop):
    outputs, message = BAD_OUTPUTS[case]
    if loop == "eager" and case == "a total of unknown shape":
        pytest.skip("every shape is known in the eager loop; another batch size is the next test")
    with pytest.raises(MetricError, match=message):
        evaluate(None, Values(33, outputs), loop=loop)


def test_other_metrics_at_a_later_step_are_a_sentence():
    calls = []

    def outputs(i, v):
        calls.append(1)
        return {f"metric{len(calls)}": v}

    with pytest.raises(MetricError):
        evaluate(None, Values(33, outputs), loop="eager")


def test_a_metric_that_is_no_number_is_a_sentence():
    with pytest.raises(MetricError, match="loop_end"):
        evaluate(None, Values(8, lambda i, v: {"v": looplib.total(tf.ones([2, 2]))}))


class Named(looplib.Adapter, looplib.Trainer):
    """Returns metrics of some names, from its step or from `loop_end`."""

    def __init__(self, step=(), end=(), rates=()):
        self.step, self.end, self.rate_names = step, end, rates

    @property
    def rates(self):
        return dict.fromkeys(self.rate_names, 1.0)

    def dataset(self, context):
        return context.indices(32)

    def step_fn(self, ids):
        return {name: tf.ones_like(ids) for name in ("loss", *self.step)}

    def loop_end(self, metrics):
        return {**metrics, **dict.fromkeys(self.end, 5)}


def build(trainer, **settings):
    return flat_config.controller(trainer=trainer, global_batch_size=8, steps_per_loop=1, writers=[], **settings)


OWN = ["epoch", "examples", "steps_per_second", "skipped_steps", "examples_checksum", "batch_sizes/more"]


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("name", OWN)
def test_a_metric_with_the_name_of_one_of_looplib_s_is_refused_when_the_controller_is_built(name):
    said = f"returned a metric named '{name}', which looplib adds to reports; give yours another name"
    with pytest.raises(MetricError, match=f"Named.step_fn.*{said}"):
        build(Named([name]), loop="graph")
    evaluator = Values(8, lambda i, v: {"value": v, name: v})
    with pytest.raises(MetricError, match=f"Values.step_fn.*{said}"):
        looplib.Controller(looplib.RunConfig(global_batch_size=8, loop="graph"), evaluator=evaluator, writers=[])
    with pytest.raises(MetricError, match=f"Named.step_fn.*{said}"):
        build(Named([name])).train(1)  # in the eager loop, which traces no step before
    with pytest.raises(MetricError, match=f"Named.loop_end.*{said}"):
        build(Named(end=[name])).train(1)


@pytest.mark.slow
def test_a_loop_end_may_pass_on_the_examples_and_no_other_number_of_them():
    evaluator = Values(12, lambda i, v: {"value": v})
    assert evaluate(None, evaluator)["examples"] == 12
    evaluator.loop_end = lambda metrics: {**metrics, "examples": metrics["examples"] + 1}
    with pytest.raises(MetricError, match="Values.loop_end.*'examples'"):
        evaluate(None, evaluator)


def test_a_rate_has_a_name_of_its_own():
    with pytest.raises(MetricError, match="'tokens'"):
        build(Named(["tokens"], rates=["tokens"]), loop="graph")
    with pytest.raises(MetricError, match="'epoch'"):
        build(Named(rates=["epoch"]), loop="graph")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["keras", "tf_keras"])
def test_a_compiled_metric_with_such_a_name_is_refused_when_the_controller_is_built(family):
    keras = importlib.import_module(family)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[keras.metrics.MeanAbsoluteError(name="examples")])
    x = np.zeros([16, 1], "float32")
    trainer = looplib.KerasTrainer(model, x, x, validation_data=(x, x))
    for tasks in ({"trainer": trainer}, {"evaluator": trainer.evaluator()}):
        with pytest.raises(MetricError, match="'examples'"):
            flat_config.controller(**tasks, global_batch_size=8, writers=[], loop="graph")
