"""Batch math, the keyed permutation and the distribution of data."""

import itertools
import re

import flat_config
import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy, more, repetitions
from hypothesis import given, settings
from hypothesis import strategies as st

import looplib
from looplib.data import context as data_context
from looplib.errors import BatchSizeError, DatasetError, EmptyDataError, OrderError


def context(**changes):
    settings = dict(
        global_batch_size=8, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=3, training=True, start_step=0
    )
    return looplib.InputContext(**{**settings, **changes})


def pairs(n, steps, workers=1, replicas=1, **changes):
    """(ids, seeds as one int64) of each example in order, put together from all pipelines and replicas."""
    parts = []
    for worker in range(workers):
        c = context(num_replicas=replicas, num_pipelines=workers, pipeline_index=worker, **changes)
        batches = c.indices(n, seeds=True, repeat=True).take(steps * replicas // workers).as_numpy_iterator()
        columns = [np.stack(part) for part in zip(*batches)]
        parts.append([part.reshape(steps, -1, *part.shape[2:]) for part in columns])
    ids, seeds = (np.concatenate(part, axis=1) for part in zip(*parts))
    assert seeds.dtype == np.int32 and seeds.shape == (*ids.shape, 2)
    return ids.ravel(), np.ascontiguousarray(seeds).view(np.int64).ravel()


SIZES = dict(n=st.integers(1, 40), own=st.integers(1, 4), workers=st.integers(1, 3), local=st.integers(1, 2))


@settings(max_examples=5, deadline=None, derandomize=True)
@given(**SIZES, start=st.integers(0, 12), seed=st.integers(-(2**63), 2**63 - 1))
def test_each_epoch_is_a_permutation_and_any_pipelines_enter_one_order_at_any_step(n, own, workers, local, start, seed):
    replicas, steps = workers * local, 4
    size = own * replicas
    ids, seeds = pairs(n, (start + steps) * size, seed=seed, global_batch_size=1)
    epochs = ids[: len(ids) // n * n].reshape(-1, n)
    assert (np.sort(epochs, axis=1) == np.arange(n)).all() and ids.max() < n
    assert len(set(seeds)) == len(seeds)
    found = pairs(n, steps, workers, replicas, seed=seed, start_step=start, global_batch_size=size)
    np.testing.assert_array_equal(found, (ids[start * size :], seeds[start * size :]))


@settings(max_examples=5, deadline=None, derandomize=True)
@given(**SIZES)
def test_an_evaluation_has_each_id_once_with_the_seed_of_its_position(n, own, workers, local):
    found = []
    for worker in range(workers):
        replicas = workers * local
        c = context(
            num_replicas=replicas,
            num_pipelines=workers,
            pipeline_index=worker,
            training=False,
            global_batch_size=own * replicas,
        )
        found += [
            pair
            for batch in c.indices(n, seeds=True).as_numpy_iterator()
            for pair in zip(batch[0], map(tuple, batch[1]))
        ]
    whole = next(iter(context(training=False, global_batch_size=n).indices(n, seeds=True).as_numpy_iterator()))
    assert whole[0].tolist() == list(range(n))
    assert dict(found) == dict(zip(whole[0], map(tuple, whole[1]))) and len(found) == n == len(
        {seed for _, seed in found}
    )


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = np.concatenate([pairs(13, 13 * 5, seed=seed)[0].reshape(-1, 13) for seed in (1, 2)])
    assert len({tuple(epoch) for epoch in orders}) == 80


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("n", [1, 10_000, *more([3, 257, 1797, 65_537, 1_281_167, 2**40])])
def test_ids_that_xla_draws_are_those_of_the_pipeline(n):
    c = context(seed=2**31 + 5, num_replicas=2, start_step=n // 3)
    expected = np.stack(list(c.indices(n, repeat=True).take(6).as_numpy_iterator()))
    drawn = tf.function(lambda first: c.requests.last.draw(first, 6), jit_compile=True, autograph=False)
    np.testing.assert_array_equal(drawn(tf.constant(2 * (n // 3), tf.int64)), expected)


def ids_of_calls(calls, steps=30, **changes):
    """The ids that several calls in one `dataset` give, each with its arguments: `[calls, steps * batch]`."""
    c = context(**changes)
    return [np.concatenate([*c.indices(n, **named).take(steps).as_numpy_iterator()]) for n, named in calls]


@pytest.mark.slow
def test_each_call_has_an_order_of_its_own_or_names_the_one_that_it_shares():
    n = 24
    alone, *_ = ids_of_calls([(n, {})])
    unnamed = ids_of_calls([(n, {})] * 3)
    named = ids_of_calls([(n, {"name": "x"}), (n, {}), (n, {"name": "y"}), (n, {"name": "x"}), (n, {})])
    np.testing.assert_array_equal(unnamed[0], alone)  # that of earlier versions
    np.testing.assert_array_equal([named[1], named[4], named[3]], [alone, unnamed[1], named[0]])
    orders = [*unnamed, named[0], named[2]]
    for order in orders:
        assert (np.sort(order.reshape(-1, n), axis=1) == np.arange(n)).all()
    for one, other in itertools.combinations(orders, 2):  # two independent orders agree at one in n places
        assert (one == other).mean() < 4 / n
    for workers, replicas in ((1, 4), (2, 4)):
        parts = []
        for worker in range(workers):
            c = context(num_replicas=replicas, num_pipelines=workers, pipeline_index=worker, start_step=10)
            data = [c.indices(n), c.indices(n)][1].take(20 * replicas // workers)
            parts.append(np.stack(list(data.as_numpy_iterator())).reshape(20, -1))
        np.testing.assert_array_equal(np.concatenate(parts, axis=1).ravel(), unnamed[1][80:])


@pytest.mark.slow
def test_seeds_and_what_xla_draws_are_those_of_the_call():
    c = context()
    (_, first), (_, second) = (next(iter(c.indices(24, seeds=True))) for _ in range(2))
    assert not np.isin(first, second).any()
    expected = np.stack(list(c.indices(24).take(6).as_numpy_iterator()))
    drawn = tf.function(lambda first: c.requests.last.draw(first, 6), jit_compile=True, autograph=False)
    np.testing.assert_array_equal(drawn(tf.constant(0, tf.int64)), expected)
    records = [b"%d" % i for i in range(480)]
    one, other, shared, again = (
        np.concatenate([*c.records(records, block=4, name=name).take(60).as_numpy_iterator()])
        for c in [context()] for name in (None, None, "rows", "rows")
    )  # fmt: skip
    assert (one == other).mean() < 0.05 and (shared == again).all()


def test_a_name_of_an_order_is_a_text_and_of_one_number_of_examples():
    c = context()
    c.indices(24, name="rows")
    with pytest.raises(OrderError, match="24.*25.*'rows'"):
        c.resident(np.zeros(25), name="rows")
    with pytest.raises(OrderError, match="3"):
        c.indices(24, name=3)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(48, 1000), (1000, 48)])
def test_an_epoch_of_several_calls_has_each_example_of_all(sizes, caplog):
    class Zipped(toy.Regression):
        def dataset(self, context):
            first, second = (context.indices(n) for n in sizes)
            context.steps_per_epoch = self.steps or context.steps_per_epoch
            both = tf.data.Dataset.zip(first, second)
            return both.map(lambda i, j: (i % 37, tf.gather(toy.X, i % 37), tf.gather(toy.Y, j % 37)))

    for steps, expected in ((None, 250), (6, 12)):
        trainer = Zipped()
        trainer.steps = steps
        with toy.controller(make_strategy("default"), trainer) as controller:
            assert controller.train(2, epochs=None)["epoch"] == round(2 / (steps or 125), 3)
            assert controller._loops.steps_of(None, 2) == expected
    said = [record.getMessage() for record in caplog.records]
    assert sum("Zipped.dataset asks context for examples 2 times without a name" in line for line in said) == 2


def test_an_epoch_that_is_no_number_of_steps_is_refused():
    for steps in (0, -2, float("nan")):
        with pytest.raises(DatasetError, match="context.steps_per_epoch"):
            context().steps_per_epoch = steps


@pytest.mark.slow
def test_fewer_examples_than_a_batch_are_refused_where_none_is_to_repeat():
    few = "asked for 7 examples, and a global batch has 8.*use a global batch size of up to 7.*or pass repeat=True"
    for ask in (
        lambda c, **more: c.indices(7, **more),
        lambda c, **more: c.resident(np.zeros(7), **more),
        lambda c, **more: c.records([b"x"] * 7, **more),
        lambda c, **more: c.indices(looplib.Kept(np.arange(9) < 7), **more),
        lambda c, **more: c.records(looplib.Kept(np.arange(9) < 7, [b"x"] * 9), **more),
    ):
        with pytest.raises(BatchSizeError, match=few):
            ask(context())
        assert next(iter(ask(context(), repeat=True))).shape == [8]
        assert next(iter(ask(context(training=False)))).shape == [7]
    assert next(iter(context(global_batches=True).indices(7, whole_epochs=True))).shape == [7]
    assert next(iter(context().indices(8))).shape == [8]
    with pytest.raises(BatchSizeError, match="37"):
        toy.controller(make_strategy("default"), toy.Regression(), global_batch_size=38)


@pytest.mark.slow
def test_a_permutation_of_imagenet_size_is_one():
    n = 1_281_167
    c = context(global_batch_size=n)
    ids = next(iter(c.indices(n))).numpy()
    assert (np.bincount(ids, minlength=n) == 1).all()
    # No trace of the old order: neighbours are as far apart as in a random permutation, a third of n on average.
    assert np.abs(np.diff(ids)).mean() == pytest.approx(n / 3, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1437, 60_000, *more([1_000_003])])
def test_the_orders_of_epochs_are_independent(n):
    epochs = [next(iter(context(global_batch_size=n, start_step=epoch).indices(n))).numpy() for epoch in range(6)]
    correlations = np.corrcoef(np.stack([np.arange(n), *epochs]))[np.triu_indices(7, 1)]
    # Independent permutations correlate by 1 / sqrt(n), root mean square.
    assert np.sqrt((correlations**2).mean() * n) < 1.6


@pytest.mark.slow
def test_seeds_of_training_differ_by_epoch_place_and_run():
    steps = 150
    ids, seeds = pairs(37, steps)
    assert len(set(seeds)) == len(seeds) == 8 * steps
    np.testing.assert_array_equal(pairs(37, 10, start_step=steps - 10)[1], seeds[-80:])
    others = np.concatenate([pairs(37, steps, seed=seed)[1] for seed in (-1, 0, 2, 2**63 - 1)])
    assert not set(others) & set(seeds)


def test_seeds_of_an_evaluation_belong_to_the_ids():
    _, seeds = pairs(1000, 125, training=False)
    assert len(set(seeds)) == 1000 and not set(seeds) & set(pairs(1000, 125)[1])
    np.testing.assert_array_equal(pairs(32, 4, training=False)[1], seeds[:32])
    # Every bit is set half of the time.
    assert np.unpackbits(seeds.view(np.uint8)).reshape(-1, 64).mean(0) == pytest.approx(0.5, abs=0.08)


def test_seeds_augment_alike_on_any_number_of_replicas():
    def augment(ids, seeds):
        noise = tf.map_fn(lambda seed: tf.random.stateless_normal([3], seed), seeds, fn_output_signature=tf.float32)
        return ids, noise

    runs = []
    for replicas in (1, 4):
        data = context(num_replicas=replicas).indices(37, seeds=True).map(augment, tf.data.AUTOTUNE).take(10 * replicas)
        runs.append(np.concatenate([noise for _, noise in data.as_numpy_iterator()]))
    np.testing.assert_array_equal(*runs)


def test_batches_have_the_size_that_was_asked_for():
    assert context(num_replicas=4).per_replica_batch_size == 2
    few = context(num_replicas=4).indices(3, repeat=True)  # even where an epoch is shorter than a batch
    assert next(iter(few)).shape == [2]


@pytest.mark.slow(spread=3)
@pytest.mark.parametrize(
    "size, replicas, message",
    [
        (10, 4, "4.*8.*12"),
        (3, 4, "4.*4$"),
        (0, 1, "1"),
        (-8, 2, "1"),
        (8.0, 2, "1"),
    ],
)
def test_a_batch_that_does_not_divide_names_the_nearest_that_do(size, replicas, message):
    with pytest.raises(looplib.UsageError, match=message):
        data_context.per_replica_batch_size(size, replicas)


def test_no_examples_are_a_sentence():
    with pytest.raises(EmptyDataError):
        context().indices(0)


class Pipeline(toy.Regression):
    """The regression on an ordinary tf.data pipeline."""

    make = None

    def dataset(self, context):
        return type(self).make(context)


def pipeline(make):
    return type("Pipeline", (Pipeline,), {"make": staticmethod(make)})


def examples(n=toy.NUM_EXAMPLES):
    return tf.data.Dataset.from_tensor_slices((np.arange(n), toy.X[:n], toy.Y[:n]))


def run(strategy, trainer_class, steps, **settings):
    with strategy.scope():
        trainer = trainer_class()
    with toy.controller(strategy, trainer, **settings) as controller:
        controller.train(steps)
    return trainer, controller


STRATEGIES = ["default", "one_device", "mirrored_x2", "mirrored_x4"]


def chosen(names, values, once):
    """Parametrizes a test by a product of strategies and other values, of which all but some are repetitions."""
    product = itertools.product(*values)
    marked = [pytest.param(*case, marks=() if case in once else pytest.mark.slow) for case in product]
    return pytest.mark.parametrize(names, marked, indirect=["strategy"])


def shuffled(context):
    data = examples().shuffle(37, seed=context.seed).repeat()
    return data.batch(context.per_replica_batch_size, drop_remainder=True)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["default", "mirrored_x2", *more(["one_device", "mirrored_x4"])], indirect=True)
def test_an_ordinary_pipeline_resumes_by_skipping(strategy, tmp_path):
    whole, _ = run(strategy, pipeline(shuffled), 12)
    first, _ = run(strategy, pipeline(shuffled), 7, model_dir=tmp_path)
    second, _ = run(strategy, pipeline(shuffled), 12, model_dir=tmp_path)
    np.testing.assert_array_equal(np.stack(whole.order), np.stack(first.order + second.order))
    np.testing.assert_array_equal(whole.weights()[0], second.weights()[0])


def test_an_ordinary_pipeline_gives_one_order_on_any_number_of_replicas():
    names = ["default", "mirrored_x2", *repetitions([], ["mirrored_x4"])]
    runs = [run(make_strategy(name), pipeline(shuffled), 12)[0] for name in names]
    for other in runs[1:]:
        np.testing.assert_array_equal(np.stack(runs[0].order), np.stack(other.order))


@pytest.mark.slow
@chosen("strategy, loop", [STRATEGIES, ["graph", "eager"]], [("default", "graph"), ("mirrored_x2", "eager")])
def test_finite_data_ends_at_the_right_step_with_a_save(strategy, loop, tmp_path):
    finite = lambda context: examples(32).batch(context.per_replica_batch_size, drop_remainder=True)
    trainer, controller = run(strategy, pipeline(finite), -1, loop=loop, model_dir=tmp_path, steps_per_loop=1)
    assert controller.global_step == 4
    np.testing.assert_array_equal(np.concatenate(trainer.order), np.arange(32))
    assert controller.latest_checkpoint.endswith("ckpt-4")
    again, controller = run(strategy, pipeline(finite), -1, loop=loop, model_dir=tmp_path)
    assert controller.global_step == 4


@pytest.mark.slow
@chosen(
    "strategy, loop_n_end",
    [STRATEGIES, [(3, 32, 4), (4, 32, 4), (100, 32, 4), (2, 37, 5)]],
    [
        ("default", (3, 32, 4)),
        ("one_device", (4, 32, 4)),
        ("mirrored_x2", (100, 32, 4)),
        ("mirrored_x2", (2, 37, 5)),
        ("mirrored_x4", (2, 37, 5)),
    ],
)
def test_finite_data_ends_exactly_whatever_the_loop(strategy, loop_n_end):
    steps_per_loop, n, end = loop_n_end
    seen = []

    class Seen(toy.Regression):
        def dataset(self, context):
            return examples(n).batch(context.per_replica_batch_size)

        def step_fn(self, batch):
            super().step_fn(batch)
            return {"ids": looplib.total(tf.reduce_sum(batch[0])), "n": looplib.total(tf.size(batch[0]))}

        def _in_global_batch(self, ids):  # the last batch is smaller
            return tf.zeros([1])

        def loop_end(self, metrics):
            seen.append(metrics)
            return metrics

    _, controller = run(strategy, Seen, -1, steps_per_loop=steps_per_loop)
    if (n, strategy.num_replicas_in_sync) == (37, 4):
        end, n = 4, 32  # the last step would have had no example for one of the four
    assert controller.global_step == end
    assert sum(m["ids"] for m in seen) == np.arange(n).sum() and sum(m["n"] for m in seen) == n


def test_data_that_ends_before_train_steps_ends_the_run_cleanly(caplog):
    finite = lambda context: examples(32).batch(context.per_replica_batch_size, drop_remainder=True)
    _, controller = run(make_strategy("default"), pipeline(finite), 100)
    assert controller.global_step == 4 and "ended at step 4, before step 100" in caplog.text


def none(i, x, y):
    return i < 0


def nothing(i, x, y):
    return i[0] < 0


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize(
    "make, message",
    [
        (lambda c: examples(3).batch(8, drop_remainder=True), "training data set is empty"),
        (lambda c: examples(32).batch(8, drop_remainder=True).filter(nothing), "training data set is empty"),
        (
            lambda c: examples().filter(none).repeat().batch(8, drop_remainder=True),
            "ended although its cardinality is infinite",
        ),
        (
            lambda c: examples().repeat().batch(16, drop_remainder=True),
            "16.*8",
        ),
        (lambda c: [1, 2, 3], "tf.data.Dataset"),
    ],
)
def test_data_that_cannot_be_trained_on_is_a_sentence(make, message):
    with pytest.raises(looplib.UsageError, match=message):
        run(make_strategy("default"), pipeline(make), 4)


BEHIND = {  # stages behind `indices` that depend on the batches before
    "shuffle": lambda ids: ids.shuffle(16, seed=1),
    "enumerate": lambda ids: ids.enumerate().map(lambda n, i: i + 1000 * n),
    "scan": lambda ids: ids.scan(tf.constant(0, tf.int64), lambda n, i: (n + 1, i + 1000 * n)),
    "filter": lambda ids: ids.filter(lambda i: i[0] % 3 > 0),
    "examples": lambda ids: ids.unbatch().map(lambda i: i + 1).batch(4, drop_remainder=True),
    "random": lambda ids: ids.map(lambda i: i + 1000 * tf.random.uniform([], 0, 100, tf.int64, seed=4)),
    "none": lambda ids: ids.map(lambda i: i + 1),
}
DOUBTFUL = {  # maps that keep the position, and why that may not be exact
    "random": (
        lambda i: i * tf.random.uniform([], 0, 9, tf.int64),
        "RandomUniformInt .* tf.random.stateless_.*seeds=True",
    ),
    "python": (lambda i: tf.numpy_function(np.sort, [i], tf.int64), "PyFunc .* Python code depends on its arguments"),
    "variable": (lambda i: i + COUNT, "ReadVariableOp .* variables .* have the values that they had at this step"),
}
COUNT = tf.Variable(1, dtype=tf.int64)


class Behind(looplib.Trainer):
    def __init__(self, stage):
        self.stage, self.weight, self.seen = stage, tf.Variable(0.0), []

    def dataset(self, context):
        return BEHIND[self.stage](context.indices(40))

    def step_fn(self, ids):
        self.weight.assign_add(1.0)
        return {"ids": looplib.last(ids)}

    def loop_end(self, metrics):
        self.seen += metrics.pop("ids").tolist()
        return metrics


@pytest.mark.slow
@pytest.mark.parametrize("stage", BEHIND)
def test_a_stage_behind_the_ids_that_depends_on_earlier_batches_resumes_exactly(stage, tmp_path):
    batches = list(BEHIND[stage](context(global_batch_size=4).indices(40)).take(20).as_numpy_iterator())
    seen = []
    for stop in (7, 20):
        trainer = Behind(stage)
        settings = dict(global_batch_size=4, steps_per_loop=1, seed=3, writers=[])
        with flat_config.controller(trainer=trainer, model_dir=tmp_path, **settings) as controller:
            controller.train(stop)
        seen += trainer.seen
    np.testing.assert_array_equal(np.reshape(seen, [20, 4]), batches)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DOUBTFUL)
def test_a_map_that_may_not_repeat_its_results_is_warned_of(kind, tmp_path, caplog, monkeypatch):
    stage, words = DOUBTFUL[kind]
    caplog.set_level("WARNING", logger="absl")
    monkeypatch.setitem(BEHIND, kind, lambda ids: ids.map(stage, 2).map(lambda i: tf.ensure_shape(i, [4])))
    warned = []
    for stop in (2, 4):
        caplog.clear()
        settings = dict(global_batch_size=4, steps_per_loop=1, seed=3, writers=[])
        with flat_config.controller(trainer=Behind(kind), model_dir=tmp_path, **settings) as controller:
            controller.train(stop)
        warned.append(len(re.findall(f"Behind.dataset has {words}", caplog.text)))
    assert warned == [int(kind == "random"), 1]
