"""Every promise of a training run, on every strategy, Keras family and engine."""

import shutil

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
import toy
from conftest import make_strategy, more

import looplib


@pytest.fixture(params=["graph", "xla", "eager"])
def loop(request, strategy):
    if request.param == "xla" and strategy.num_replicas_in_sync > 1:
        pytest.skip("XLA takes one replica; see engines_test")
    return request.param


def possible(params):
    """One device differs little from the default, so one case of it is enough."""
    if params["strategy"] == "one_device":
        return (params["loop"], params["keras"], params["optimizer"]) == ("graph", "keras", "sgd")
    return params["loop"] != "xla" or not params["strategy"].startswith("mirrored")


STOP, STEPS = 7, 12


def train(strategy, keras, optimizer, loop, steps, model_dir, evaluates=False):
    """Returns the trainer and the reports of a training, whose last is an evaluation where that is asked for."""
    trainer, evaluator = toy.build(strategy, keras, optimizer)
    reports = []
    actions = [lambda event: event.split == "train" and reports.append(event.metrics)]
    settings = dict(loop=loop, model_dir=model_dir, actions=actions)
    with toy.controller(strategy, trainer, evaluator if evaluates else None, **settings) as controller:
        for step in steps:
            controller.train(step)
            if step == STOP:  # what a process that is killed now leaves behind
                shutil.copytree(model_dir, model_dir.with_name("stopped"))
        if evaluates:
            reports.append(controller.evaluate()["eval"])
    return trainer, reports


def order(steps):
    """The ids of each global batch, as one replica is given them."""
    context = looplib.InputContext(
        global_batch_size=8, num_replicas=1, pipeline_index=0, num_pipelines=1, seed=0, training=True, start_step=0
    )
    return np.stack([ids.numpy() for ids in context.indices(toy.NUM_EXAMPLES).take(steps)])


def check_weights(found, expected, exact=False):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b) if exact else np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow(spread=3)
@pytest.mark.slow(pairs=possible)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("strategy", ["default", "one_device", "mirrored_x2", *more(["mirrored_x4"])], indirect=True)
def test_a_run_equals_numpy_and_resumes_bit_by_bit(strategy, keras, loop, optimizer, tmp_path):
    """The order, losses, weights and evaluation are those of numpy, on any number of replicas."""
    whole, reports = train(strategy, keras, optimizer, loop, (STOP, STEPS), tmp_path / "whole", evaluates=True)
    losses, expected = toy.numpy_losses_and_weights(whole.order, optimizer)
    np.testing.assert_array_equal(np.stack(whole.order), order(STEPS))
    check_weights(whole.weights(), expected)
    *trained, evaluation = reports
    np.testing.assert_allclose([report["loss"] for report in trained], losses, rtol=1e-5)
    assert trained[0]["keras_accuracy"] == pytest.approx(
        np.mean((toy.X[whole.order[0]] @ toy.KERNEL).argmax(1) == toy.Y[whole.order[0]])
    )
    assert evaluation["accuracy"] == pytest.approx(toy.numpy_accuracy(whole.weights()), abs=1e-12)
    assert evaluation["examples"] == toy.NUM_EXAMPLES
    # Two and a half epochs: each is a permutation of all examples.
    flat = np.concatenate(whole.order)
    assert sorted(flat[: toy.NUM_EXAMPLES]) == sorted(flat[toy.NUM_EXAMPLES : 2 * toy.NUM_EXAMPLES]) == list(range(37))

    resumed, reports = train(strategy, keras, optimizer, loop, [STEPS], tmp_path / "stopped")
    np.testing.assert_array_equal(np.stack(resumed.order), np.stack(whole.order[STOP:]))
    check_weights(resumed.weights(), whole.weights(), exact=True)
    assert [report["loss"] for report in reports] == [report["loss"] for report in trained[STOP:]]


# Pairs of each option, strategy, family and engine; not all of their product.
@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "optimizer, name, family, loop",
    [
        ("clipnorm", "mirrored_x2", "tf_keras", "graph"),
        ("average", "default", "keras", "graph"),
        ("accumulate", "mirrored_x2", "keras", "eager"),  # and clips by the global norm
        *more(
            [
                ("clipnorm", "mirrored_x2", "keras", "graph"),
                ("global_clipnorm", "mirrored_x2", "tf_keras", "graph"),
                ("average", "mirrored_x4", "keras", "graph"),
                ("accumulate", "one_device", "keras", "xla"),
                ("clipvalue", "one_device", "tf_keras", "xla"),
                ("weight_decay", "default", "tf_keras", "auto"),
                ("average", "mirrored_x2", "tf_keras", "graph"),
                ("global_clipnorm", "mirrored_x4", "keras", "eager"),
                ("weight_decay", "mirrored_x2", "keras", "graph"),
                ("accumulate", "mirrored_x2", "keras", "graph"),
                ("accumulate", "mirrored_x4", "keras", "eager"),
            ]
        ),
    ],
)
def test_optimizers_that_clip_decay_average_and_accumulate(optimizer, name, family, loop, tmp_path):
    """They come to the weights of numpy; stopped after 7 steps, in the middle of an accumulation, and resumed too."""
    keras, strategy = pytest.importorskip(family), make_strategy(name)
    whole, _ = train(strategy, keras, optimizer, loop, (STOP, STEPS), tmp_path / "whole")
    check_weights(whole.weights(), toy.numpy_losses_and_weights(whole.order, optimizer, keras)[1])
    resumed, _ = train(strategy, keras, optimizer, loop, [STEPS], tmp_path / "stopped")
    check_weights(resumed.weights(), whole.weights(), exact=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer, family", [("adam", "tf_keras"), ("accumulate", "keras"), *more([("adam", "keras")])]
)
def test_a_run_resumes_with_another_number_of_replicas(optimizer, family, tmp_path):
    keras = pytest.importorskip(family)
    first, _ = train(make_strategy("mirrored_x4"), keras, optimizer, "graph", [STOP], tmp_path / "run")
    second, _ = train(make_strategy("mirrored_x2"), keras, optimizer, "graph", [STEPS], tmp_path / "run")
    np.testing.assert_array_equal(np.stack(first.order + second.order), order(STEPS))
    check_weights(second.weights(), toy.numpy_losses_and_weights(order(STEPS), optimizer, keras)[1])


def noisy(strategy, keras, pipeline, steps, model_dir):
    """Trains with dropout, noise, momentum, a schedule and a shuffle, past an epoch."""

    class Noisy(toy.Regression):
        def __init__(self):
            super().__init__(keras)
            layers = keras.layers
            self.model = keras.Sequential(
                [layers.InputLayer((toy.NUM_FEATURES,)), layers.Dropout(0.3), layers.Dense(toy.NUM_CLASSES)]
            )
            rate = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.7)
            self.optimizer = keras.optimizers.SGD(rate, momentum=0.9)

        def dataset(self, context):
            if pipeline == "indices":
                ids = context.indices(self.num_examples, seeds=True)
            else:
                size = context.per_replica_batch_size
                data = tf.data.Dataset.range(self.num_examples).shuffle(20, seed=context.seed).repeat()
                data = data.map(lambda i: (i, tf.stack([tf.cast(i, tf.int32), 7])), num_parallel_calls=tf.data.AUTOTUNE)
                ids = data.batch(size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

            def augmented(i, seeds):
                shift = tf.map_fn(
                    lambda seed: tf.random.stateless_normal([], seed), seeds, fn_output_signature=tf.float32
                )
                return i, tf.gather(toy.X, i) + shift[:, None], tf.gather(toy.Y, i)

            return ids.map(augmented)

        def step_fn(self, inputs):
            ids, x, y = inputs
            return super().step_fn((ids, x + tf.random.stateless_normal(tf.shape(x), self.step_seed()), y))

    tf_keras.backend.experimental.enable_tf_random_generator()
    with strategy.scope():
        keras.utils.set_random_seed(1)
        trainer = Noisy()
    before = trainer.weights()
    with toy.controller(strategy, trainer, model_dir=model_dir) as controller:
        for step in steps:
            controller.train(step)
            if step == STOP:
                shutil.copytree(model_dir, model_dir.with_name("stopped"))
    assert all(np.isfinite(weight).all() for weight in trainer.weights())
    assert not np.array_equal(before[0], trainer.weights()[0])
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["indices", "ordinary"])
def test_all_that_is_random_resumes_bit_by_bit(strategy, keras, pipeline, tmp_path, caplog):
    whole = noisy(strategy, keras, pipeline, (STOP, STEPS), tmp_path / "whole")
    resumed = noisy(strategy, keras, pipeline, [STEPS], tmp_path / "stopped")
    np.testing.assert_array_equal(np.stack(whole.order[STOP:]), np.stack(resumed.order))
    check_weights(resumed.weights(), whole.weights(), exact=True)
    assert "cannot be saved" not in caplog.text and "are not saved" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, family",
    [
        ("mirrored_x2", "keras"),
        ("mirrored_x2", "tf_keras"),
        *more([("mirrored_x4", "keras"), ("mirrored_x4", "tf_keras")]),
    ],
)
def test_what_each_replica_keeps_for_itself_resumes_too(name, family, tmp_path):
    """The moving statistics of a batch normalization differ between replicas, and evaluation uses them."""
    keras, strategy = pytest.importorskip(family), make_strategy(name)

    class Normalized(toy.Regression):
        def __init__(self):
            super().__init__(keras)
            layers = [keras.layers.InputLayer((5,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
            self.model = keras.Sequential(layers)

    def run(steps, model_dir):
        with strategy.scope():
            keras.utils.set_random_seed(1)
            trainer = Normalized()
            evaluator = toy.RegressionEvaluator(trainer.model)
        evaluations = []
        actions = [lambda event: event.split == "eval" and evaluations.append(event.metrics["accuracy"])]
        with toy.controller(strategy, trainer, evaluator, model_dir=model_dir, actions=actions) as controller:
            for step in steps:
                controller.train_and_evaluate(step, eval_interval=4)
                if step == 8:
                    shutil.copytree(model_dir, model_dir.with_name("stopped"))
        return trainer, evaluations

    def values(trainer):
        variables = [getattr(variable, "value", variable) for variable in trainer.model.variables]
        variables = [variable() if callable(variable) else variable for variable in variables]
        held = [v if isinstance(v, tf.Variable) else w for v, w in zip(variables, trainer.model.variables)]
        return [part.numpy() for variable in held for part in strategy.experimental_local_results(variable)]

    whole, evaluations = run((8, 12), tmp_path / "whole")
    resumed, rest = run([12], tmp_path / "stopped")
    assert len({value.tobytes() for value in values(whole) if value.shape == (5,)}) > 4  # they do differ
    check_weights(values(resumed), values(whole), exact=True)
    assert len(evaluations) == 3 and rest == evaluations[1:]  # that of step 8 again, from the restored state
