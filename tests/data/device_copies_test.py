"""Inputs of GPUs, with CPUs that stand in for them: a plain iterator, and copies to the devices ahead of the steps."""

import logging
import time

import numpy as np
import pytest
import tensorflow as tf
from conftest import make_strategy, more
from feeds_test import GLOBAL_BATCH, expected, loop_of, order, read, shuffled, stream

import looplib
from looplib.data import pipelines
from looplib.loop.contracts import Request

pytestmark = pytest.mark.usefixtures("stand_ins")


@pytest.fixture
def stand_ins(monkeypatch):
    """Has batches copied to CPUs as to GPUs; the default strategy's to another CPU than the one that computes."""
    other = {1: ("/job:localhost/replica:0/task:0/device:CPU:1",)}
    found = pipelines.local_devices
    monkeypatch.setattr(
        pipelines, "local_devices", lambda strategy: other.get(strategy.num_replicas_in_sync) or found(strategy)
    )
    monkeypatch.setattr(pipelines, "runs_on_host", lambda strategy: False)


def ending(context):
    return tf.data.Dataset.range(37).shuffle(37, seed=context.seed).repeat(4).batch(context.per_replica_batch_size)


CASES = [("default", shuffled, 5), ("mirrored_x2", ending, 5)]
OTHERS = [("default", ending, 1), ("mirrored_x2", shuffled, 1), ("mirrored_x4", ending, 3), ("one_device", ending, 4)]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name, make, first", [*CASES, *more(OTHERS)])
def test_a_run_resumes_from_the_state_of_the_iterator_after_any_call(name, make, first, caplog):
    """No batch that was fetched ahead is left over at the end of a call."""
    caplog.set_level(logging.INFO, logger="absl")
    strategy = make_strategy(name)
    loop = loop_of(strategy, make)
    assert loop.data.stream.ahead
    whole = np.array(expected(strategy, make, 12)).reshape(12, GLOBAL_BATCH)
    assert loop.run(Request(first), "train").done == first  # in one call
    loop.read_metrics(), loop.task.order.clear()
    position = loop.position(0)
    np.testing.assert_array_equal(order(loop, 12 - first), whole[first:])
    assert loop.traces == 1
    loop.rewind(first, position)
    np.testing.assert_array_equal(order(loop, 12 - first), whole[first:])
    assert f"resumes after step {first} from its saved state" in caplog.text
    loop.close()


@pytest.mark.parametrize("name", ["default", "mirrored_x2"])
def test_batches_are_copied_to_the_device_of_their_replica(name):
    strategy = make_strategy(name)
    for make in (shuffled, ending):
        data = stream(strategy, make)
        iterator = data.iterate()
        batch = data.get_value(data.next_as_optional(iterator))
        for found, device in zip(strategy.experimental_local_results(batch), data.devices, strict=True):
            assert found.device == device
        data.end(iterator)


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("name", ["default", "mirrored_x2"])
@pytest.mark.parametrize("n", [17, 37])
def test_every_example_is_evaluated_once(name, n):
    strategy = make_strategy(name)
    data = stream(strategy, lambda c: tf.data.Dataset.range(n).batch(c.per_replica_batch_size), training=False)
    iterator = data.iterate()
    taken = read(data, iterator, 100)
    assert sorted(i for step in taken for replica in step for i in replica[0]) == list(range(n))
    data.end(iterator)


class Noting(looplib.Trainer):
    """Notes when a batch is fetched, and when a step begins and ends; each takes 5 ms."""

    def __init__(self):
        self.events, self.weight = [], tf.Variable(0.0)

    def noting(self, what, value):
        def note(value):
            self.events.append((what, int(value)))
            time.sleep(0.005)
            self.events.append((f"{what} ends", int(value)))
            return value

        return tf.ensure_shape(tf.numpy_function(note, [value], tf.int64), [])

    def dataset(self, context):
        options = tf.data.Options()
        options.experimental_optimization.apply_default_optimizations = False  # which read ahead by themselves
        return tf.data.Dataset.counter().map(lambda i: self.noting("fetch", i)).batch(1).with_options(options)

    def step_fn(self, inputs):
        self.weight.assign_add(tf.cast(self.noting("step", inputs[0]), tf.float32))
        return {"loss": tf.cast(inputs, tf.float32)}


def overlaps():
    """How many of 19 fetches began before the step before them had ended."""
    trainer = Noting()
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=1, steps_per_loop=20), trainer=trainer, writers=[]
    ) as controller:
        controller.train(20)
    assert float(trainer.weight) == sum(range(20)) and ("fetch", 20) not in trainer.events  # none is left over
    return sum(trainer.events.index(("fetch", i + 1)) < trainer.events.index(("step ends", i)) for i in range(19))


@pytest.mark.slow
def test_a_batch_is_fetched_and_copied_while_the_step_before_it_runs(monkeypatch):
    assert overlaps() >= 15
    monkeypatch.undo()  # on CPUs, where nothing is copied, the step itself fetches
    assert overlaps() == 0
