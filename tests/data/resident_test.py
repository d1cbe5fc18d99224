"""Evaluations of rows that stay on the device, and the ids of an evaluation."""

import flat_config
import numpy as np
import pytest
import tensorflow as tf
from conftest import make_strategy, more

import looplib
from looplib.data import pipelines as data_pipelines

EXAMPLES, BATCH = 44, 8  # the last of six batches has four examples, so that two of four replicas get none
ROWS = np.random.default_rng(0).normal(size=(EXAMPLES, 3)).astype(np.float32)

CHANGES = {
    "none": lambda data: data,
    "skip": lambda data: data.skip(2),
    "another order": lambda data: data.map(lambda ids: ids[::-1] // 2),
    "shuffle": lambda data: data.unbatch().shuffle(EXAMPLES, seed=1).batch(3),
}
SIZES = {
    "small": data_pipelines._SMALL,
    "large": 0,
}  # the bytes of a step up to which its rows are gathered ahead of it
KEPT = np.arange(EXAMPLES) % 3 == 1


class Rows(looplib.Evaluator):
    """Adds up rows, and their products with their numbers, which no other rows have."""

    def __init__(self, change="none"):
        self.change = CHANGES[change]

    def dataset(self, context):
        return self.change(context.resident((np.arange(EXAMPLES, dtype=np.float32), ROWS)))

    def step_fn(self, inputs):
        numbers, rows = inputs
        return {
            "rows": looplib.total(tf.reduce_sum(rows)),
            "products": looplib.total(tf.reduce_sum(numbers[:, None] * rows)),
        }


def evaluate(engine, name="default", change="none"):
    strategy = make_strategy(name)
    settings = dict(global_batch_size=BATCH, loop=engine, writers=[], strategy=strategy)
    with flat_config.controller(evaluator=Rows(change), **settings) as controller:
        return [controller.evaluate()["eval"] for _ in range(2)]


def expected(ids):
    ids = np.concatenate([*ids]).astype(int)
    rows = ROWS[ids].astype(np.float64)
    return {"rows": rows.sum(), "products": (ids[:, None] * rows).sum(), "examples": len(ids)}


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("engine", ["graph", "xla", *more(["auto", "eager"])])
@pytest.mark.parametrize("name", ["default", "mirrored_x4", *more(["one_device", "mirrored_x2"])])
def test_an_evaluation_has_each_row_once(engine, name):
    if engine == "xla" and name.startswith("mirrored"):
        pytest.skip("XLA takes one replica")
    for metrics in evaluate(engine, name):
        wanted = expected([np.arange(EXAMPLES)])
        assert {key: metrics[key] for key in wanted} == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("change", list(CHANGES)[1:])
def test_ids_that_do_not_follow_one_another_get_their_own_rows(change):
    data = tf.data.Dataset.range(EXAMPLES).batch(BATCH)
    wanted = expected(CHANGES[change](data).as_numpy_iterator())
    for metrics in evaluate("graph", change=change):
        assert {key: metrics[key] for key in wanted} == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("replicas, pipelines", [(1, 1), (4, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("start_step", [0, 1, 3, 30])
def test_an_evaluation_continues_with_the_ids_behind_a_step(replicas, pipelines, start_step):
    found = {}
    for pipeline in range(pipelines):
        context = looplib.InputContext(
            global_batch_size=BATCH, num_replicas=replicas, pipeline_index=pipeline, num_pipelines=pipelines,
            start_step=start_step, training=False, seed=0,
        )  # fmt: skip
        own = replicas // pipelines
        for number, ids in enumerate(context.indices(EXAMPLES).as_numpy_iterator()):
            step, replica = divmod(number, own)
            found[start_step + step, pipeline * own + replica] = ids
    size = BATCH // replicas
    parts = np.split(np.arange(EXAMPLES), range(size, EXAMPLES, size))
    wanted = {divmod(number, replicas): part for number, part in enumerate(parts)}
    wanted = {place: part for place, part in wanted.items() if place[0] >= start_step}
    assert found.keys() == wanted.keys()
    for place, part in wanted.items():
        np.testing.assert_array_equal(found[place], part)


def test_the_ids_of_a_plan_get_their_own_rows():
    class Kept(Rows):
        def dataset(self, context):
            super().dataset(context)
            return context.indices(looplib.Kept(KEPT))

    with looplib.Controller(looplib.RunConfig(global_batch_size=BATCH), evaluator=Kept(), writers=[]) as controller:
        metrics = controller.evaluate()["eval"]
    wanted = expected([np.flatnonzero(KEPT)])
    assert {key: metrics[key] for key in wanted} == pytest.approx(wanted, rel=1e-5)


class Order(looplib.Trainer):
    """Weighs each number that it is given by its step, so that the sum shows the order."""

    def __init__(self):
        self.sum = tf.Variable(0, dtype=tf.int64, trainable=False)

    def dataset(self, context):
        return context.resident({"number": np.arange(EXAMPLES)})

    def step_fn(self, inputs):
        weights = 1 + tf.range(tf.size(inputs["number"], tf.int64)) + 10 * self.global_step
        self.sum.assign_add(tf.reduce_sum(weights * inputs["number"]))
        return {"rows": looplib.total(tf.size(inputs["number"]))}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["xla", *more(["auto", "graph"])])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stop", [3, *more([7, 200, 401])])
def test_a_training_continues_with_the_rows_behind_its_checkpoint(engine, size, stop, tmp_path, monkeypatch):
    monkeypatch.setattr(data_pipelines, "_SMALL", SIZES[size])
    context = looplib.InputContext(
        global_batch_size=BATCH, num_replicas=1, pipeline_index=0, num_pipelines=1, start_step=0, seed=5, training=True
    )
    steps = stop + 10
    wanted = sum(
        (ids * (1 + np.arange(BATCH) + 10 * step)).sum()
        for step, ids in enumerate(context.indices(EXAMPLES).take(steps).as_numpy_iterator())
    )
    for end in (stop, steps):
        trainer = Order()
        settings = dict(global_batch_size=BATCH, steps_per_loop=7, seed=5, loop=engine, writers=[])
        with flat_config.controller(trainer=trainer, model_dir=tmp_path, **settings) as controller:
            controller.train(end)
    assert trainer.sum.numpy() == wanted


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["xla", *more(["graph"])])
def test_rows_keep_the_structure_of_the_arrays(engine):
    numbers, names = np.arange(EXAMPLES), np.array([f"{i}" for i in range(EXAMPLES)])
    made = [
        ([numbers, numbers + 1], {"row": ROWS}),
        [numbers, ROWS],
        {"a": {"b": numbers, "c": (numbers,)}},
        ([ROWS, numbers],),
        (numbers, names) if engine == "graph" else (numbers, numbers.astype(np.float64)),
    ]
    for arrays in made:
        seen = []

        class Seen(looplib.Trainer):
            def dataset(self, context, arrays=arrays):
                return context.resident(arrays)

            def step_fn(self, inputs, seen=seen):
                seen.append(tf.nest.map_structure(lambda leaf: leaf.dtype, inputs))
                first = tf.nest.flatten(inputs)[0]
                return {"first": looplib.total(tf.reduce_sum(tf.cast(first, tf.float32)))}

        settings = dict(global_batch_size=BATCH, steps_per_loop=5, loop=engine, writers=[])
        with flat_config.controller(trainer=Seen(), **settings) as controller:
            controller.train(11)
        assert seen[0] == tf.nest.map_structure(
            lambda array: tf.as_dtype(array.dtype) if array.dtype.kind != "U" else tf.string, arrays
        )
