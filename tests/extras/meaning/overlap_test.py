"""An evaluation that shares examples with the training is found, by files and by content, and others are not."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import make_strategy, more

import looplib
from looplib.extras.meaning.budget import Budget
from looplib.extras.meaning.overlap import OverlapChecks

RANDOM = np.random.default_rng(0)
TRAIN = RANDOM.normal(size=(400, 6)).astype("float32")
OTHER = RANDOM.normal(size=(100, 6)).astype("float32")


class OnData(looplib.GradientTrainer):
    """Trains on what a function makes of the context."""

    def __init__(self, data):
        super().__init__(keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)]), keras.optimizers.SGD(1e-3))
        self._data = data

    def dataset(self, context):
        return self._data(context)

    def loss_fn(self, inputs):
        return tf.square(self.model(inputs)[:, 0])


class OnOther(looplib.Evaluator):
    """Evaluates on what a function makes of the context."""

    def __init__(self, model, data):
        super().__init__(model)
        self._data = data

    def dataset(self, context):
        return self._data(context)

    def step_fn(self, inputs):
        return {"loss": tf.square(self.model(inputs)[:, 0])}


def found(train, evaluate, strategy="default", name="eval"):
    """Returns what the checks find in a controller that has not trained."""
    strategy = make_strategy(strategy)
    with strategy.scope():
        trainer = OnData(train)
        evaluator = OnOther(trainer.model, evaluate)
    config = looplib.RunConfig(global_batch_size=20)
    with looplib.Controller(
        config, trainer=trainer, evaluator={name: evaluator}, strategy=strategy, writers=[]
    ) as controller:
        checks = OverlapChecks()
        checks.begin(controller.loops, ())
        budget = Budget(1.0)
        budget._began -= 1000.0
        return checks.advance(budget)


def rows(array):
    return lambda context: context.indices(len(array)).map(lambda ids: tf.gather(array, ids))


def resident(array):
    return lambda context: context.resident(array)


@pytest.mark.parametrize("strategy", ["mirrored_x2", *more(["default"])])
def test_examples_that_both_have_are_counted(strategy):
    leaked = np.concatenate([OTHER[:80], TRAIN[40:60]])
    (finding,) = found(rows(TRAIN), rows(leaked), strategy)
    assert (finding.kind, finding.subjects) == ("overlap", ("eval",))
    assert "20 of 100 evaluation examples of 'eval'" in finding.text
    assert "among the 400 training examples" in finding.text
    assert not found(rows(TRAIN), rows(OTHER), strategy)


@pytest.mark.slow
def test_resident_arrays_and_plain_pipelines_are_compared_too():
    def plain(context):
        return tf.data.Dataset.from_tensor_slices(TRAIN[:100]).batch(context.per_replica_batch_size)

    assert "100 of 100" in found(resident(TRAIN), resident(TRAIN[:100]))[0].text
    assert "100 of 100" in found(resident(TRAIN), plain)[0].text
    assert not found(resident(TRAIN), resident(OTHER))


@pytest.mark.slow
def test_a_few_equal_examples_and_content_that_identifies_nothing_are_silent():
    two = np.concatenate([OTHER[:98], TRAIN[:2]])
    assert not found(rows(TRAIN), rows(two))
    licenses = np.concatenate([TRAIN[:390], np.tile(OTHER[:1], (10, 1))]), np.concatenate([OTHER, OTHER[:1], OTHER[:1]])
    assert not found(*map(rows, licenses))  # a row that the training repeats
    few = RANDOM.integers(0, 2, size=(400, 6)).astype("float32")  # 64 different examples
    assert not found(rows(few), rows(few[:100]))
    assert not found(rows(TRAIN), rows(TRAIN[:100]), name="train_accuracy")


@pytest.mark.slow
def test_a_shuffle_of_the_user_is_left_alone():
    def shuffled(context):
        return tf.data.Dataset.from_tensor_slices(TRAIN).shuffle(400).repeat().batch(context.per_replica_batch_size)

    assert not found(shuffled, rows(TRAIN[:100]))


def written(path, array):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in array:
            writer.write(row.tobytes())
    return str(path)


def records(source):
    def dataset(context):
        given = source() if callable(source) else source
        return context.records(given).map(lambda texts: tf.ensure_shape(tf.io.decode_raw(texts, tf.float32), [None, 6]))

    return dataset


@pytest.mark.slow
def test_records_of_one_file_are_found_by_number_and_copies_by_content(tmp_path):
    train, other = written(tmp_path / "train.tfrecord", TRAIN), written(tmp_path / "other.tfrecord", OTHER)
    (finding,) = found(records([train]), records([train]))
    assert "400 of 400 evaluation records" in finding.text and "train.tfrecord" in finding.text
    (tmp_path / "link.tfrecord").symlink_to(train)
    assert (
        "400 of 400 evaluation records" in found(records([train]), records([str(tmp_path / "link.tfrecord")]))[0].text
    )
    copy = written(tmp_path / "copy.tfrecord", np.concatenate([OTHER[:50], TRAIN[:50]]))
    assert "50 of 100 evaluation records" in found(records([train]), records([copy]))[0].text
    assert not found(records([train]), records([other]))


def test_disjoint_parts_of_one_file_are_silent(tmp_path):
    path = written(tmp_path / "all.tfrecord", TRAIN)
    is_test = np.arange(400) % 4 == 0

    def part(chosen):
        return records(lambda: looplib.Kept(chosen, path))

    assert not found(part(~is_test), part(is_test))
    (finding,) = found(part(np.arange(400) < 300), part(is_test))
    assert "75 of 100 evaluation records" in finding.text and "300 training records" in finding.text


@pytest.mark.slow
def test_a_budget_divides_the_work():
    checks, budget = OverlapChecks(), Budget(1e-9)
    trainer = OnData(rows(TRAIN))
    config = looplib.RunConfig(global_batch_size=20)
    evaluator = OnOther(trainer.model, rows(TRAIN[:100]))
    with looplib.Controller(config, trainer=trainer, evaluator=evaluator, writers=[]) as controller:
        checks.begin(controller.loops, ())
        assert not checks.advance(budget) and budget.seconds == 0
        calls, findings = 0, []
        while not findings and calls < 1000:
            budget.seconds, checks._seconds = 0.0, 0.0  # for one piece, which takes more than a billionth of the time
            findings, calls = checks.advance(budget), calls + 1
        assert calls > 5 and "100 of 100" in findings[0].text
