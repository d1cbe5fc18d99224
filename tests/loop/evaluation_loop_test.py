"""An evaluation adds up exactly what a plain loop over the same batches does, however its steps are run."""

import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy, more

import looplib
from looplib.errors import UsageError
from looplib.loop.device_loop import EvaluationLoop
from looplib.run import commits
from looplib.run.records import read_jsonl

BATCH = 8
VALUES = np.random.default_rng(0).normal(size=60)


class Sums(looplib.Evaluator):
    """Reduces numbers in each way there is; fails at a number, if that is asked for."""

    def __init__(self, examples, known):
        self.examples, self.known = examples, known
        self.fails_at = tf.Variable(np.inf, dtype=tf.float64)

    def dataset(self, context):
        values = tf.data.Dataset.from_tensor_slices(VALUES[: self.examples])
        values = values if self.known else values.filter(lambda value: True)
        return values.batch(context.per_replica_batch_size)

    def step_fn(self, inputs):
        with tf.control_dependencies([tf.debugging.assert_none_equal(inputs, self.fails_at, message="planted")]):
            positive = tf.cast(inputs > 0, tf.float64)
        square, weight = tf.reduce_sum(inputs**2), tf.reduce_sum(positive)
        return {"value": inputs, "weighted": looplib.mean(square, weight), "batches": looplib.total(tf.constant(1))}


def plain_totals(examples, batch):
    """Returns the totals of a loop in Python over the batches of replicas."""
    weights = squares = batches = values = 0
    for start in range(0, examples, batch):
        part = VALUES[start : min(start + batch, examples)]
        values += part.sum()
        squares += (part**2).sum() * (part > 0).sum()
        weights += (part > 0).sum()
        batches += 1
    mean = squares / weights if weights else np.nan
    return {"value": values / examples, "weighted": mean, "batches": batches, "examples": examples}


def evaluate(controller, steps=-1):
    return controller.evaluate(steps)["eval"]


def possible(params):
    return params["loop"] != "xla" or not params["strategy"].startswith("mirrored")  # whose replicas are several


@pytest.mark.slow(spread=1)
@pytest.mark.slow(pairs=possible)
@pytest.mark.parametrize("loop", ["graph", "xla", "eager", *more(["auto"])])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("examples", [BATCH, 5 * BATCH + 3, *more([5, 5 * BATCH])])
def test_the_totals_are_those_of_a_plain_loop(strategy, loop, known, examples):
    replicas = strategy.num_replicas_in_sync
    if loop == "xla" and replicas > 1:
        pytest.skip("XLA takes one replica")
    with strategy.scope():
        evaluator = Sums(examples, known)
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=BATCH, loop=loop), evaluator=evaluator, strategy=strategy, writers=[]
    )
    expected = pytest.approx(plain_totals(examples, BATCH // replicas), nan_ok=True)
    for _ in range(2):  # nothing of an evaluation is left for the next one
        assert evaluate(controller) == expected
        first = min(examples, 2 * BATCH)
        assert evaluate(controller, 2) == pytest.approx(plain_totals(first, BATCH // replicas), nan_ok=True)


def test_steps_overlap_only_where_all_but_the_last_are_sure_to_have_data():
    def loop_of(strategy, known):
        with strategy.scope():
            evaluator = Sums(20, known)
        return looplib.Controller(
            looplib.RunConfig(global_batch_size=BATCH), evaluator=evaluator, strategy=strategy, writers=[]
        )

    for name, known, overlaps in [("default", True, True), ("default", False, False), ("mirrored_x2", True, False)]:
        inner = loop_of(make_strategy(name), known).loops["eval"]._inner
        assert isinstance(inner, EvaluationLoop) == overlaps


class KerasSums(Sums):
    """Has a Keras metric too, whose variables each step updates."""

    def __init__(self, examples, known):
        super().__init__(examples, known)
        self.mean = tf.keras.metrics.Mean(dtype="float64")

    def step_fn(self, inputs):
        outputs = super().step_fn(inputs)
        self.mean.update_state(inputs)
        return {**outputs, "mean": self.mean}


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("known", [True, False])  # False: the totals are a variable, which each step updates
@pytest.mark.parametrize("kind, loop", [(Sums, "graph"), (KerasSums, "eager"), *more([(KerasSums, "graph")])])
def test_an_evaluation_that_failed_adds_nothing_to_the_next(kind, loop, known):
    evaluator = kind(45, known)
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=BATCH, loop=loop), evaluator=evaluator, writers=[]
    )
    expected = plain_totals(45, BATCH) | ({"mean": VALUES[:45].mean()} if kind is KerasSums else {})
    for failing in (0, 30, 44):  # in the first step, in one of several that run at once, in the last
        evaluator.fails_at.assign(VALUES[failing])
        with pytest.raises(tf.errors.InvalidArgumentError, match="planted"):
            evaluate(controller)
        evaluator.fails_at.assign(np.inf)
        assert evaluate(controller) == pytest.approx(expected)


def test_auto_tries_an_engine_for_longer_than_an_evaluation_lasts():
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=BATCH, loop="auto"), evaluator=Sums(43, True), writers=[]
    )
    for _ in range(3):
        assert evaluate(controller) == pytest.approx(plain_totals(43, BATCH))


class FailsOnce(toy.RegressionEvaluator):
    """An evaluator whose second evaluation ends the start that does it."""

    def evaluating(self):
        type(self).evaluations += 1
        if type(self).evaluations == 2:
            raise SystemExit("planted")
        return super().evaluating()


def test_each_evaluator_is_due_at_its_own_multiples_and_a_restart_makes_up_for_what_was_missed(tmp_path):
    FailsOnce.evaluations = 0

    def start():
        trainer = toy.Regression()
        evaluators = {"often": toy.RegressionEvaluator(trainer.model), "rare": FailsOnce(trainer.model)}
        with toy.controller(
            tf.distribute.get_strategy(), trainer, evaluators, model_dir=tmp_path, writers=["jsonl"]
        ) as controller:
            return controller.train_and_evaluate(13, {"often": 2, "rare": 5})

    with pytest.raises(SystemExit, match="planted"):
        start()
    found = start()
    records = read_jsonl(str(tmp_path / "metrics.jsonl"))
    due = {name: [record["step"] for record in records if record["split"] == name] for name in ("often", "rare")}
    assert due == {"often": [2, 4, 6, 8, 10, 12, 13], "rare": [5, 10, 13]}
    assert found.keys() == {"often", "rare"}
    scored = {
        done.step: sorted({name.split("/")[0] for name in done.scores})
        for done in commits.committed(str(tmp_path / "checkpoints"))
    }
    assert scored[13] == ["often", "rare"] and scored[12] == ["often"] and scored[10] == ["often", "rare"]


def test_intervals_by_name_are_those_of_all_evaluators():
    trainer = toy.Regression()
    controller = toy.controller(tf.distribute.get_strategy(), trainer, {"eval": toy.RegressionEvaluator(trainer.model)})
    with pytest.raises(
        UsageError, match="eval_interval has intervals of test; expected one for each of the evaluators eval"
    ):
        controller.train_and_evaluate(10, {"test": 5})
    with pytest.raises(UsageError, match=r"eval_interval\['eval'\] is 0"):
        controller.train_and_evaluate(10, {"eval": 0})
