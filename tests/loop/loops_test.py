"""One trace per function and flat memory over many loops and evaluations; the loop as a function."""

import ctypes
import gc

import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy, more, repetitions

import looplib
from looplib.loop import device_loop
from looplib.loop.contracts import Request


def resident_bytes():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free but kept by the allocator comes and goes in steps of 10 MB
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("name", ["default", *more(["mirrored_x2"])])
def test_many_loops_and_evaluations_trace_once_and_keep_memory_flat(name, tmp_path):
    """With --all, 1,000 loops and 200 evaluations."""
    strategy = make_strategy(name)
    trainer, evaluator = toy.build(strategy)
    traced = []
    step_fn = trainer.step_fn
    trainer.step_fn = lambda inputs: traced.append(1) or step_fn(inputs)
    settings = dict(
        model_dir=tmp_path, writers=None, checkpoints=looplib.CheckpointPolicy(100, keep=(looplib.KeepLast(2),))
    )
    warm_up, window = repetitions((80, 15), (500, 200))
    # A thread's arena keeps the 8 MB that the writer of a checkpoint frees; with malloc's M_MMAP_THRESHOLD they are not
    # in it.
    ctypes.CDLL(None).mallopt(-3, 2**20)
    with toy.controller(strategy, trainer, evaluator, **settings) as controller:
        controller.train_and_evaluate(warm_up, 5)
        memory = []
        for step in range(warm_up, warm_up + 5 * window + 1, window):
            controller.train_and_evaluate(step, 5)
            trainer.order.clear()
            memory.append(resident_bytes() / 2**20)
        assert controller.global_step == warm_up + 5 * window
        assert (controller.loops["train"].traces, controller.loops["eval"].traces) == (1, 1)
        assert len(traced) == strategy.num_replicas_in_sync
    # TensorFlow's pools grow by some MB now and then, so the median of five windows; making an iterator on several
    # devices costs it 10 kB for ever, looplib or not.
    grown = np.median(np.diff(memory))
    assert grown < 1.0, f"{grown:.2f} MB more for {window} loops, with evaluations: {np.round(memory, 1)}"


@pytest.mark.slow
def test_data_of_another_structure_is_traced_again_with_a_warning(caplog):
    controller = toy.controller(None, None, toy.RegressionEvaluator(toy.build(make_strategy("default"))[0].model))
    engine = controller.loops["eval"]._inner
    shapes = [
        tf.data.Dataset.from_tensor_slices((toy.X, toy.Y)).batch(8, drop_remainder=drop) for drop in (True, False)
    ]
    for dataset in shapes:
        engine.run(iter(dataset), Request(-1))
    assert engine.traces == 2 and "traced again" in caplog.text and "shapes of its input" in caplog.text


@pytest.mark.slow
def test_the_graph_loop_equals_a_plain_loop_over_tf_function():
    """A peer written by hand: the same model, one tf.function a step."""
    trainer, _ = toy.build(make_strategy("default"))
    with toy.controller(None, trainer) as controller:
        controller.train(25)
    by_hand, _ = toy.build(make_strategy("default"))
    by_hand.global_batch_size = 8
    step = tf.function(lambda ids: by_hand.step_fn((ids, tf.gather(toy.X, ids), tf.gather(toy.Y, ids)))["loss"])
    for ids in trainer.order:
        step(tf.constant(ids))
    for a, b in zip(trainer.weights(), by_hand.weights()):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("ends", [False, True])
def test_a_step_of_many_ops_trains_like_one_of_few(ends, monkeypatch):
    weights = []
    for many_ops in (0, 1_000_000):
        monkeypatch.setattr(device_loop, "_MANY_OPS", many_ops)
        trainer = toy.Regression()
        if ends:
            trainer.dataset = lambda context: toy.Regression.dataset(trainer, context).take(23)
        with toy.controller(None, trainer, steps_per_loop=10) as controller:
            controller.train(-1 if ends else 23)
            assert controller.global_step == 23
        weights.append(trainer.weights())
    for a, b in zip(*weights):
        np.testing.assert_array_equal(a, b)


def test_a_loop_of_many_steps_is_one_call():
    """Host code runs once a loop, not once a step."""
    trainer, _ = toy.build(make_strategy("default"))
    calls = []
    trainer.loop_end = lambda metrics: calls.append(1) or {}
    with toy.controller(None, trainer, steps_per_loop=100) as controller:
        controller.train(400)
    assert len(calls) == 4


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_loop", [1, 3])
def test_loops_of_one_step_and_of_several_draw_one_sequence_of_random_numbers(steps_per_loop):
    """A program of its own for single steps would begin the sequence of a stateful op once more."""

    class Drawing(toy.Regression):
        def step_fn(self, inputs):
            return {**super().step_fn(inputs), "drawn": looplib.last(tf.random.uniform([], seed=1))}

    drawn = []
    actions = [lambda event: drawn.append(event.metrics["drawn"])]
    with toy.controller(None, Drawing(), steps_per_loop=steps_per_loop, actions=actions) as controller:
        for end in (1, 2, 4, 7, 8):
            controller.train(end)
    draw = tf.function(lambda: tf.random.uniform([], seed=1))
    sequence = [float(draw()) for _ in range(8)]
    assert drawn == sequence if steps_per_loop == 1 else set(drawn) <= set(sequence) and len(set(drawn)) == len(drawn)


@pytest.mark.slow
def test_the_global_step_is_a_tensor_that_the_step_can_read():
    class Scheduled(toy.Regression):
        def step_fn(self, inputs):
            return {**super().step_fn(inputs), "now": looplib.last(self.global_step)}

    steps = []
    trainer = Scheduled()
    with toy.controller(None, trainer, actions=[lambda event: steps.append(event.metrics["now"])]) as controller:
        controller.train(5)
    assert steps == [0, 1, 2, 3, 4]


def test_the_eager_loop_runs_python_at_every_step():
    seen = []

    class Printing(toy.Regression):
        def step_fn(self, inputs):
            seen.append(inputs[0].numpy())
            return super().step_fn(inputs)

    trainer = Printing()
    with toy.controller(None, trainer, loop="eager", steps_per_loop=5) as controller:
        controller.train(5)
    assert len(seen) == 5
    np.testing.assert_array_equal(np.sum(seen, axis=0), trainer.order[0])
