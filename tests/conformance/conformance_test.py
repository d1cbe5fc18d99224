"""Every promise of a training run, on every strategy, Keras family and engine."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
import toy
from conftest import make_strategy


@pytest.fixture(params=["graph", "xla", "eager"])
def loop(request, strategy):
    if request.param == "xla" and strategy.num_replicas_in_sync > 1:
        pytest.skip("one XLA program runs on one device; see engines_test")
    return request.param


def possible(params):
    return params["loop"] != "xla" or not params["strategy"].startswith("mirrored")


def train(strategy, keras, optimizer, loop, steps, model_dir=None):
    trainer, evaluator = toy.build(strategy, keras, optimizer)
    with toy.controller(strategy, trainer, evaluator, loop=loop, model_dir=model_dir) as controller:
        controller.train(steps)
        return trainer, controller.evaluate()["eval"]


@pytest.mark.pairs(possible=possible)
def test_order_weights_and_evaluation_equal_numpy(strategy, keras, loop):
    trainer, evaluation = train(strategy, keras, "sgd", loop, 12)
    _, expected = toy.numpy_losses_and_weights(trainer.order, "sgd")
    for found, weights in zip(trainer.weights(), expected):
        np.testing.assert_allclose(found, weights, rtol=1e-5, atol=1e-6)
    assert evaluation["accuracy"] == pytest.approx(toy.numpy_accuracy(trainer.weights()), abs=1e-12)
    assert evaluation["examples"] == toy.NUM_EXAMPLES
    # Two and a half epochs: each is a permutation of all examples.
    flat = np.concatenate(trainer.order)
    assert sorted(flat[: toy.NUM_EXAMPLES]) == sorted(flat[toy.NUM_EXAMPLES : 2 * toy.NUM_EXAMPLES]) == list(range(37))


@pytest.mark.pairs(possible=possible)
def test_a_run_stopped_and_started_again_equals_one_that_was_not(strategy, keras, loop, tmp_path):
    whole, _ = train(strategy, keras, "adam", loop, 12)
    first, _ = train(strategy, keras, "adam", loop, 7, tmp_path)
    second, _ = train(strategy, keras, "adam", loop, 12, tmp_path)
    np.testing.assert_array_equal(np.stack(whole.order), np.stack(first.order + second.order))
    for a, b in zip(whole.weights(), second.weights()):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_replica_counts_give_the_same_order_and_weights(keras, optimizer):
    runs = [
        train(make_strategy(name), keras, optimizer, "graph", 20)[0]
        for name in ("default", "mirrored_x2", "mirrored_x4")
    ]
    _, expected = toy.numpy_losses_and_weights(runs[0].order, optimizer)
    for run in runs:
        np.testing.assert_array_equal(np.stack(run.order), np.stack(runs[0].order))
        for found, weights in zip(run.weights(), expected):
            np.testing.assert_allclose(found, weights, rtol=1e-5, atol=1e-6)


# Pairs of each option, strategy, family and engine; not all of their product.
@pytest.mark.parametrize(
    "optimizer, name, family, loop",
    [
        ("clipnorm", "mirrored_x2", "keras", "graph"),
        ("clipvalue", "one_device", "tf_keras", "xla"),
        ("global_clipnorm", "mirrored_x4", "keras", "eager"),
        ("global_clipnorm", "mirrored_x2", "tf_keras", "graph"),
        ("weight_decay", "mirrored_x2", "keras", "graph"),
        ("weight_decay", "default", "tf_keras", "auto"),
        ("average", "mirrored_x4", "keras", "graph"),
        ("average", "mirrored_x2", "tf_keras", "graph"),
        ("accumulate", "mirrored_x2", "keras", "graph"),
        ("accumulate", "mirrored_x4", "keras", "eager"),
        ("accumulate", "one_device", "keras", "xla"),
    ],
)
def test_optimizers_that_clip_decay_average_and_accumulate(optimizer, name, family, loop, tmp_path):
    """They come to the weights of numpy; stopped after 7 steps, in the middle of an accumulation, and resumed too."""
    keras, strategy = pytest.importorskip(family), make_strategy(name)
    whole, _ = train(strategy, keras, optimizer, loop, 12)
    for found, weights in zip(whole.weights(), toy.numpy_losses_and_weights(whole.order, optimizer, keras)[1]):
        np.testing.assert_allclose(found, weights, rtol=1e-5, atol=1e-6)
    train(strategy, keras, optimizer, loop, 7, tmp_path)
    second, _ = train(strategy, keras, optimizer, loop, 12, tmp_path)
    for a, b in zip(whole.weights(), second.weights()):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("optimizer", ["adam", "accumulate"])
def test_a_run_goes_on_with_another_number_of_replicas(keras, optimizer, tmp_path):
    if optimizer == "accumulate" and keras.__name__ == "tf_keras":
        pytest.skip("tf_keras accumulates nothing")
    whole, _ = train(make_strategy("default"), keras, optimizer, "graph", 12)
    first, _ = train(make_strategy("mirrored_x4"), keras, optimizer, "graph", 7, tmp_path)
    second, _ = train(make_strategy("mirrored_x2"), keras, optimizer, "graph", 12, tmp_path)
    np.testing.assert_array_equal(np.stack(whole.order), np.stack(first.order + second.order))
    for a, b in zip(whole.weights(), second.weights()):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.pairs(possible=possible)
def test_losses_are_those_of_numpy_and_of_the_keras_metric(strategy, keras, loop):
    trainer, _ = toy.build(strategy, keras)
    records = []
    with toy.controller(
        strategy, trainer, loop=loop, actions=[lambda event: records.append(event.metrics)]
    ) as controller:
        controller.train(6)
    losses, _ = toy.numpy_losses_and_weights(trainer.order, "sgd")
    np.testing.assert_allclose([record["loss"] for record in records], losses, rtol=1e-5)
    assert all(0 <= record["keras_accuracy"] <= 1 for record in records)
    assert records[0]["keras_accuracy"] == pytest.approx(
        np.mean((toy.X[trainer.order[0]] @ toy.KERNEL).argmax(1) == toy.Y[trainer.order[0]])
    )


def test_dropout_trains(strategy, keras):
    with strategy.scope():
        trainer = toy.Regression(keras)
        trainer.model = keras.Sequential(
            [
                keras.layers.InputLayer((toy.NUM_FEATURES,)),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(toy.NUM_CLASSES),
            ]
        )
    before = trainer.weights()
    with toy.controller(strategy, trainer) as controller:
        controller.train(3)
    assert all(np.isfinite(weight).all() for weight in trainer.weights())
    assert not np.array_equal(before[0], trainer.weights()[0])
    assert controller.global_step == 3


def noisy(strategy, keras, pipeline, steps, model_dir=None):
    """Trains with everything that could go another way: dropout, noise, momentum, a schedule, a shuffle; past an epoch."""

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
    with toy.controller(strategy, trainer, model_dir=model_dir) as controller:
        controller.train(steps)
    return trainer


@pytest.mark.pairs
@pytest.mark.parametrize("pipeline", ["indices", "ordinary"])
def test_all_that_is_random_resumes_bit_by_bit(strategy, keras, pipeline, tmp_path, caplog):
    whole = noisy(strategy, keras, pipeline, 12)
    first, second = (noisy(strategy, keras, pipeline, steps, tmp_path) for steps in (7, 12))
    np.testing.assert_array_equal(np.stack(whole.order), np.stack(first.order + second.order))
    for a, b in zip(whole.weights(), second.weights()):
        np.testing.assert_array_equal(a, b)
    assert "cannot be saved" not in caplog.text and "are not saved" not in caplog.text


@pytest.mark.parametrize("name", ["mirrored_x2", "mirrored_x4"])
def test_what_each_replica_keeps_for_itself_resumes_too(name, keras, tmp_path):
    """The moving statistics of a batch normalization differ between replicas, and evaluation uses them."""
    strategy = make_strategy(name)

    class Normalized(toy.Regression):
        def __init__(self):
            super().__init__(keras)
            layers = [keras.layers.InputLayer((5,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
            self.model = keras.Sequential(layers)

    def run(steps, model_dir=None):
        with strategy.scope():
            keras.utils.set_random_seed(1)
            trainer = Normalized()
            evaluator = toy.RegressionEvaluator(trainer.model)
        records = []
        with toy.controller(
            strategy, trainer, evaluator, model_dir=model_dir, actions=[lambda e: records.append((e.split, e.metrics))]
        ) as controller:
            controller.train_and_evaluate(steps, eval_interval=4)
        return trainer, [metrics["accuracy"] for split, metrics in records if split == "eval"]

    def values(trainer):
        variables = [getattr(variable, "value", variable) for variable in trainer.model.variables]
        variables = [variable() if callable(variable) else variable for variable in variables]
        held = [v if isinstance(v, tf.Variable) else w for v, w in zip(variables, trainer.model.variables)]
        return [part.numpy() for variable in held for part in strategy.experimental_local_results(variable)]

    whole, evaluations = run(12)
    _, first = run(8, tmp_path)
    second, rest = run(12, tmp_path)
    assert len({value.tobytes() for value in values(whole) if value.shape == (5,)}) > 4  # they do differ
    for a, b in zip(values(whole), values(second), strict=True):
        np.testing.assert_array_equal(a, b)
    assert first + rest[1:] == evaluations
    assert rest[0] == first[-1]  # done again, from the restored state
