"""Every engine computes what the graph loop does; auto finds the fastest and loses no step on the way."""

import functools
import json
import shutil
import time

import flat_config
import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy, more

import looplib
from looplib.data import pipelines
from looplib.errors import DatasetError, EngineError
from looplib.loop import engines, xla

RNG = np.random.default_rng(0)
IMAGES, LABELS = RNG.normal(size=(50, 8, 8, 1)).astype("float32"), RNG.integers(0, 3, 50)


class Images(looplib.Trainer):
    """A network of some kind on small images, which keeps its losses."""

    def __init__(self, keras=keras3, kind="mlp"):
        keras.utils.set_random_seed(0)
        layers = {
            "mlp": [keras.layers.Flatten(), keras.layers.Dense(200, "relu")],
            "cnn": [keras.layers.Conv2D(4, 3, activation="relu"), keras.layers.Flatten()],
            "normalized": [keras.layers.Flatten(), keras.layers.Dense(16), keras.layers.BatchNormalization()],
        }[kind]
        self.model = keras.Sequential([keras.layers.InputLayer((8, 8, 1)), *layers, keras.layers.Dense(3)])
        self.optimizer = keras.optimizers.Adam(1e-3)
        self.losses = []

    def dataset(self, context):
        return context.indices(50).map(lambda i: (tf.gather(IMAGES, i), tf.gather(LABELS, i)))

    def step_fn(self, inputs):
        x, y = inputs
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, self.model(x, training=True))
            loss = self.global_mean(losses)
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": losses}

    def loop_end(self, metrics):
        self.losses.append(metrics["loss"])
        return metrics


class Quick(looplib.Trainer):
    """One weight, where the model does not matter: most of what a trial costs is tracing and compiling."""

    def __init__(self):
        self.weight = tf.Variable(0.0)
        self.losses = []

    def dataset(self, context):
        return context.indices(50).map(lambda i: tf.gather(IMAGES, i))

    def step_fn(self, inputs):
        errors = tf.reduce_mean(inputs, [1, 2, 3]) - self.weight
        self.weight.assign_add(0.1 * self.global_mean(errors))
        return {"loss": tf.square(errors)}

    def loop_end(self, metrics):
        self.losses.append(metrics["loss"])
        return metrics


class Resident(Images):
    """Images whose arrays stay on the device."""

    def dataset(self, context):
        return context.resident((IMAGES, LABELS))


class Counted(looplib.Evaluator):
    """Counts and adds what it sees, with batches of another size at the end."""

    def __init__(self, examples):
        self.examples = examples

    def dataset(self, context):
        return tf.data.Dataset.range(self.examples).batch(context.per_replica_batch_size)

    def step_fn(self, inputs):
        return {"sum": looplib.total(tf.reduce_sum(inputs)), "mean": tf.cast(inputs, tf.float64) ** 2}


def train(loop, steps=200, trainer=None, steps_per_loop=10, **settings):
    trainer = trainer or Images()
    settings = dict(global_batch_size=8, steps_per_loop=steps_per_loop, writers=[], loop=loop, **settings)
    with flat_config.controller(trainer=trainer, **settings) as controller:
        controller.train(steps)
        return controller, trainer


@functools.cache
def graph_losses(make=Images, steps=200, *arguments):
    """The losses that the graph loop comes to, each the mean of ten steps."""
    return train("graph", steps, make(*arguments))[1].losses


@pytest.fixture
def fast_trials(monkeypatch):
    """Auto's trials at once and short, whether they pay or not."""
    monkeypatch.setattr(engines, "_PAYS_BACK", 0)
    monkeypatch.setattr(engines, "_SECONDS", 0.002)


def possible(params):
    return params["loop"] != "eager" or params["kind"] == "mlp"  # conformance_test has the eager loop


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["xla", *more(["auto", "eager"])])
@pytest.mark.parametrize("kind", ["mlp", "normalized", *more(["cnn"])])
def test_the_losses_of_200_steps_are_those_of_the_graph_loop(loop, kind, keras, fast_trials):
    steps = 40 if loop == "eager" else 200
    controller, trainer = train(loop, steps, Images(keras, kind))
    np.testing.assert_allclose(trainer.losses, graph_losses(Images, 200, keras, kind)[: steps // 10], rtol=2e-4)
    assert (loop == "auto") == bool(controller.engines)
    if (loop, kind) == ("auto", "cnn"):  # convolutions are not compiled for a CPU
        assert set(controller.engines["train"]["seconds_per_step"]) == {"graph"}


@pytest.mark.slow
@pytest.mark.parametrize("loop, ahead", [("graph", True), *more([("xla", True), ("xla", False), ("auto", True)])])
def test_resident_data_trains_as_data_that_travels_does(loop, ahead, fast_trials, monkeypatch):
    if not ahead:  # as large rows are: gathered in the step
        monkeypatch.setattr(pipelines, "_SMALL", 0)
    _, trainer = train(loop, 60, Resident())
    np.testing.assert_allclose(trainer.losses, graph_losses()[:6], rtol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, loop, make",
    [
        ("mirrored_x2", "graph", Resident),
        *more([("mirrored_x2", "auto", Images), ("mirrored_x2", "auto", Resident), ("mirrored_x4", "graph", Resident)]),
    ],
)
def test_replicas_train_as_one_does_on_data_that_travels_or_is_resident(name, loop, make):
    strategy = make_strategy(name)
    with strategy.scope():
        trainer = make()
    _, trainer = train(loop, 23, trainer, strategy=strategy)  # two chunks and single steps
    np.testing.assert_allclose(trainer.losses[:2], graph_losses()[:2], rtol=1e-4)
    replicas = strategy.experimental_local_results
    for variable in trainer.model.variables:
        first, *others = [part.numpy() for part in replicas(looplib.compat.keras.tf_variable(variable))]
        for other in others:
            np.testing.assert_array_equal(first, other)


def test_resident_data_of_a_changed_data_set_is_refused():
    class Changed(Images):
        def dataset(self, context):
            return context.resident((IMAGES, LABELS)).map(lambda i: tf.gather(IMAGES, i))

    with pytest.raises(DatasetError):
        train("graph", 10, Changed())

    class Uneven(Images):
        def dataset(self, context):
            return context.resident((IMAGES, LABELS[:7]))

    with pytest.raises(DatasetError, match="50.*7"):
        train("graph", 10, Uneven())


@pytest.fixture(scope="module")
def by_boundaries(tmp_path_factory):
    """A function that trains with loops of 7, saves each 5 and evaluations each 12; once for each engine."""

    @functools.cache
    def run(loop):
        trainer, evaluator = toy.build(make_strategy("default"))
        records = []
        settings = dict(
            loop=loop,
            steps_per_loop=7,
            model_dir=tmp_path_factory.mktemp(loop),
            checkpoints=looplib.CheckpointPolicy(5),
            actions=[lambda event: records.append((event.step, event.split, event.metrics))],
        )
        with toy.controller(None, trainer, evaluator, **settings) as controller:
            controller.train_and_evaluate(65, 12)
            assert controller.global_step == 65
        for _, _, metrics in records:
            metrics.pop("steps_per_second", None)
        return records, trainer.order

    return run


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["xla", "auto"])
def test_boundaries_that_no_chunk_divides_lose_no_step_and_no_example(loop, by_boundaries, fast_trials):
    records, order = by_boundaries(loop)
    expected_records, expected_order = by_boundaries("graph")
    for (step, split, metrics), (*place, expected) in zip(records, expected_records, strict=True):
        assert [step, split] == place and metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    np.testing.assert_array_equal(order, expected_order)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["graph", "xla", "auto"])
@pytest.mark.parametrize("examples", [1, 333, *more([7, 8, 9, 80])])
def test_an_evaluation_is_exact_whatever_is_left_at_the_end(loop, examples, fast_trials):
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=8, loop=loop), evaluator=Counted(examples), writers=[]
    )
    for _ in range(40 if (loop, examples) == ("auto", 333) else 2):
        results = controller.evaluate()["eval"]
        ids = np.arange(examples)
        assert results == {"sum": ids.sum(), "mean": pytest.approx((ids**2).mean()), "examples": examples}
    if loop == "auto" and examples == 333:
        assert set(controller.engines) == {"eval"}


class Ending(Quick):
    """Data that ends after 32 steps."""

    def dataset(self, context):
        data = tf.data.Dataset.from_tensor_slices(IMAGES).repeat(5)
        return data.batch(context.per_replica_batch_size)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["xla", *more(["auto"])])
def test_a_training_set_that_ends_is_trained_to_its_last_step(loop, fast_trials):
    controller, trainer = train(loop, -1, Ending())
    assert controller.global_step == 32 and len(trainer.losses) == 4
    np.testing.assert_allclose(trainer.losses, graph_losses(Ending, -1), rtol=2e-4)


class Noisy(Images):
    """Random numbers of both kinds; XLA draws others than the graph loop does, from the same seeds."""

    def __init__(self):
        super().__init__()
        keras3.utils.set_random_seed(0)
        layers = [keras3.layers.Flatten(), keras3.layers.Dropout(0.5), keras3.layers.Dense(3)]
        self.model = keras3.Sequential([keras3.Input((8, 8, 1)), *layers])

    def step_fn(self, inputs):
        x, y = inputs
        return super().step_fn((x + tf.random.stateless_normal(tf.shape(x), self.step_seed()), y))


class Shuffled(Images):
    """Batches of a pipeline whose position is its iterator's state, and which are read many at once."""

    def __init__(self, repeats=None):
        super().__init__()
        self.repeats = repeats

    def dataset(self, context):
        data = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).shuffle(20, seed=1).repeat(self.repeats)
        return data.batch(context.per_replica_batch_size, drop_remainder=True)


class Kept(Shuffled):
    """The same behind a cache of random numbers, whose state cannot be saved."""

    def dataset(self, context):
        return super().dataset(context).map(lambda x, y: (tf.numpy_function(np.copy, [x], tf.float32), y)).map(fixed)


def fixed(x, y):
    return tf.ensure_shape(x, [8, 8, 8, 1]), y


class NoisyShuffled(Shuffled, Noisy):
    """Shuffled data, trained on with random numbers."""


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("make", [NoisyShuffled, *more([Kept, Shuffled, Resident])])
def test_a_run_that_reads_many_batches_at_once_resumes_bit_by_bit_at_any_step(make, tmp_path):
    whole = make()
    settings = dict(global_batch_size=8, steps_per_loop=10, writers=[], loop="xla")
    with flat_config.controller(trainer=whole, model_dir=tmp_path / "whole", **settings) as controller:
        controller.train(33)  # within the batches that were read together
        shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
        controller.train(70)
        weights = whole.model.get_weights()
        controller.restore_checkpoint(tmp_path / "stopped" / "checkpoints" / "ckpt-33")
        controller.train(70)
    resumed = train("xla", 70, make(), model_dir=tmp_path / "stopped")[1]
    for trained in (whole, resumed):
        for a, b in zip(weights, trained.model.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
    if make is not NoisyShuffled:
        np.testing.assert_allclose(whole.losses[:3], graph_losses(make, 30), rtol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["xla", *more(["auto"])])
def test_data_that_is_read_many_batches_at_once_is_trained_to_its_last_step(loop, fast_trials):
    controller, trainer = train(loop, -1, Shuffled(11))
    assert controller.global_step == 11 * 50 // 8
    np.testing.assert_allclose(trainer.losses, graph_losses(Shuffled, -1, 11), rtol=2e-4)


def test_what_auto_chose_is_kept_and_a_resumed_run_does_not_try_again(tmp_path, fast_trials, monkeypatch):
    controller, _ = train("auto", 200, Quick(), model_dir=tmp_path)
    while not controller.engines and controller.global_step < 10_000:  # the trial takes longer on a busy machine
        controller, _ = train("auto", controller.global_step + 200, Quick(), model_dir=tmp_path)
    chosen, steps = controller.engines["train"], controller.global_step + 100
    assert chosen["seconds_per_step"].keys() >= {"graph", "xla x1"}  # longer chunks depend on the speed of a step
    monkeypatch.setattr(engines.Trial, "_try_all", lambda self: pytest.fail("it was tried again"))
    resumed, _ = train("auto", steps, Quick(), model_dir=tmp_path)
    assert resumed.engines["train"] == chosen and resumed.global_step == steps


@pytest.mark.slow
@pytest.mark.parametrize(
    "milliseconds, expected",
    [
        ({"graph": 3.0, "xla x10": 4.0, "xla x1": 2.5}, ("xla", 1)),
        ({"graph": 5.0, "xla x10": 3.0, "xla x1": 6.0}, ("xla", 10)),
        ({"graph": 3.0, "xla x1": 2.95}, ("graph", 1)),
    ],
)
def test_the_fastest_candidate_wins_and_graph_stays_where_none_is_faster_by_3_percent(
    milliseconds, expected, fast_trials, monkeypatch
):
    if "xla x10" not in milliseconds:  # it takes seconds to compile
        monkeypatch.setattr(engines.Trial, "_sizes", lambda self, seconds: [1])

    def measured(self, loop):
        yield loop, loop.round_size
        return milliseconds["graph" if loop is self._graph else f"xla x{loop.round_size}"] / 1e3

    monkeypatch.setattr(engines.Trial, "_measure", measured)
    record = train("auto", 300, Quick())[0].engines["train"]
    assert (record["loop"], record["chunk"]) == expected
    assert record["seconds_per_step"] == pytest.approx({name: value / 1e3 for name, value in milliseconds.items()})


@pytest.mark.slow
def test_a_short_training_is_not_worth_a_trial():
    assert train("auto", 100, Quick())[0].engines == {}


class Strings(Quick):
    """A step that XLA cannot take."""

    def step_fn(self, inputs):
        text = tf.strings.as_string(inputs[:, 0, 0, 0])
        return {**super().step_fn(inputs), "length": tf.strings.length(text)}


@pytest.mark.slow
def test_a_candidate_that_cannot_be_compiled_is_left_out(fast_trials):
    assert set(train("auto", 1000, Strings())[0].engines["train"]["seconds_per_step"]) == {"graph"}


class Growing(Quick):
    """A step in whose place XLA would compute something else; its mean of three copies changes nothing."""

    def step_fn(self, inputs):
        rows = tf.TensorArray(tf.float32, size=0, dynamic_size=True)
        for i in tf.range(3):
            rows = rows.write(i, inputs)
        return super().step_fn(tf.reduce_mean(rows.stack(), axis=0))


class Padded(Quick):
    """Batches with a dimension that changes, over which the mean of copies is taken, which changes nothing."""

    def dataset(self, context):
        def widen(i):
            return tf.repeat(tf.gather(IMAGES, i)[:, None], tf.cast(i[0] % 3 + 1, tf.int32), axis=1)

        return context.indices(50).map(widen)

    def step_fn(self, inputs):
        return super().step_fn(tf.reduce_mean(inputs, axis=1))


@pytest.mark.slow
@pytest.mark.parametrize("kind, message", [(Growing, "TensorArray"), (Padded, "")])
def test_what_xla_would_do_wrongly_is_left_out(kind, message, fast_trials):
    controller, trainer = train("auto", 1000, kind())
    assert set(controller.engines["train"]["seconds_per_step"]) == {"graph"}
    np.testing.assert_allclose(trainer.losses, graph_losses(Quick, 1000), rtol=2e-4)
    with pytest.raises(EngineError, match=message):
        train("xla", 10, kind())


@pytest.mark.slow
def test_auto_on_a_mirrored_strategy_of_one_device(fast_trials):
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"], cross_device_ops=tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        trainer = Images()
    controller, trainer = train("auto", 200, trainer, strategy=strategy)
    assert controller.engines
    np.testing.assert_allclose(trainer.losses, graph_losses(), rtol=2e-4)


def test_xla_says_what_it_cannot_run():
    with pytest.raises(EngineError, match="XLA.*loop=graph"):
        train("xla", 10, Strings())


@pytest.mark.parametrize("name", ["mirrored_x2", *more(["mirrored_x4"])])
def test_xla_is_refused_on_several_replicas_and_auto_takes_graph(name, fast_trials):
    strategy = make_strategy(name)
    with strategy.scope():
        trainer = Images()
    settings = dict(trainer=trainer, strategy=strategy, global_batch_size=8, writers=[])
    with pytest.raises(EngineError, match="[24].*jit_compile=True.*loop=graph"):
        flat_config.controller(loop="xla", **settings)
    controller, trainer = train("auto", 200, trainer, strategy=strategy)
    assert controller.engines == {}
    np.testing.assert_allclose(trainer.losses, graph_losses(), rtol=2e-4)


@pytest.mark.slow
def test_a_chunk_reads_more_batches_than_tensorflow_expects_of_an_unrolled_loop(monkeypatch):
    class Numbers(looplib.Trainer):
        def dataset(self, context):
            return tf.data.Dataset.range(400).batch(context.per_replica_batch_size)  # of a size that is not known

        def step_fn(self, numbers):
            return {"sum": looplib.total(tf.reduce_sum(numbers))}

    monkeypatch.setattr(engines, "_PINNED_CHUNK", 40)  # TensorFlow raises at more than 32 batches
    settings = dict(global_batch_size=8, steps_per_loop=120, loop="xla", writers=[])
    with flat_config.controller(trainer=Numbers(), **settings) as controller:
        assert controller.train(-1)["sum"] == 79800 and controller.global_step == 50


def test_the_time_that_steps_wait_for_their_data_is_reported():
    class Slow(Images):
        def dataset(self, context):
            def late(i):
                i.set_shape([None])  # of a static shape, many batches would be read ahead
                return tf.gather(IMAGES, i), tf.gather(LABELS, i)

            def wait(i):
                time.sleep(0.04)
                return i

            data = context.indices(50).map(lambda i: tf.numpy_function(wait, [i], tf.int64, stateful=False))
            options = tf.data.Options()
            options.experimental_optimization.map_parallelization = False  # else two batches wait at once
            return data.map(late).with_options(options)

    for loop in ("graph", "xla"):
        trainer, clocks = Slow(), []
        settings = dict(global_batch_size=8, steps_per_loop=10, writers=[], loop=loop)
        with flat_config.controller(trainer=trainer, **settings) as controller:
            for last_step in (10, 30):  # the first part compiles, while the input reads ahead
                controller.train(last_step)
                clocks.append(controller.clock.seconds())
        first, second = clocks
        waited, trained = (second[kind] - first[kind] for kind in ("input", "train"))
        assert waited > 0.5 * 20 * 0.04 and waited > 0.5 * (waited + trained)
        assert waited < second["wall"] - first["wall"]
        assert sum(second.values()) == pytest.approx(2 * second["wall"], rel=0.02)


@pytest.mark.parametrize("loop", ["graph", "xla"])
def test_what_tensorflow_does_in_the_first_call_is_no_training(loop):
    trainer, settings = Images(), dict(global_batch_size=8, steps_per_loop=40, writers=[], loop=loop)
    with flat_config.controller(trainer=trainer, **settings) as controller:
        before = controller.clock.seconds()
        controller.train(40)
        first = controller.clock.seconds()
        steady = []
        for last_step in (80, 120, 160):
            started = time.perf_counter()
            controller.train(last_step)
            steady.append(time.perf_counter() - started)
    compiled = first["compile"] - before["compile"]
    assert compiled > 3 * min(steady) and compiled > 2 * first["train"]  # of 40 steps each


@pytest.mark.slow
def test_the_longest_chunk_can_be_traced(monkeypatch):
    """TensorFlow takes more than some 30 calls of next() in a trace for a mistake, where AutoGraph is off."""
    monkeypatch.setattr(engines, "_PINNED_CHUNK", xla.LONGEST)
    controller, trainer = train("xla", 100, steps_per_loop=50)
    assert controller.loops["train"]._inner.round_size == 50
    expected = np.reshape(graph_losses()[:10], [2, 5]).mean(axis=1)
    np.testing.assert_allclose(trainer.losses, expected, rtol=2e-4)


class Changing(Quick):
    """Batches of no static size, and of another size now and then, where a chunk cannot be one program."""

    def dataset(self, context):
        parts = tf.data.Dataset.from_tensor_slices(IMAGES).batch(8)  # 8, 8, 8, 8, 8, 8, 2
        return parts.repeat()


class ChangingEvaluator(Counted):
    def dataset(self, context):
        ids = tf.data.Dataset.range(self.examples)
        return ids.take(30).batch(8).concatenate(ids.skip(30).batch(5))


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["xla", *more(["auto"])])
def test_batches_of_changing_size_are_no_trouble(loop, fast_trials):
    _, trainer = train(loop, 100, Changing())
    np.testing.assert_allclose(trainer.losses, graph_losses(Changing, 100), rtol=2e-4)
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=8, loop=loop), evaluator=ChangingEvaluator(200), writers=[]
    )
    for _ in range(10):
        results = controller.evaluate()["eval"]
        assert results == {"sum": 19900, "mean": pytest.approx((np.arange(200) ** 2).mean()), "examples": 200}


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps_per_loop, interval, tried", [(1, 1000, {"graph", "xla x1"}), (50, 3, {"graph", "xla x1"})]
)
def test_calls_that_are_too_short_for_a_chunk_do_not_hold_the_trial_up(steps_per_loop, interval, tried, monkeypatch):
    for name, value in {"_PAYS_BACK": 0, "_SECONDS": 0.0005}.items():
        monkeypatch.setattr(engines, name, value)
    policy = looplib.CheckpointPolicy(interval)
    controller, _ = train("auto", 1000, Quick(), steps_per_loop=steps_per_loop, checkpoints=policy)
    found = set(controller.engines["train"]["seconds_per_step"])
    assert found - {"xla x2", "xla x3"} == tried  # chunks of slow steps are so short that they fit


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["graph", "xla", "eager"])
@pytest.mark.parametrize("steps", [-1, 100])
def test_a_second_start_of_a_run_whose_data_has_ended_keeps_its_last_report(loop, steps, tmp_path):
    class Numbers(looplib.Trainer):
        def dataset(self, context):
            return tf.data.Dataset.range(56).batch(context.per_replica_batch_size, drop_remainder=True)

        def step_fn(self, numbers):
            return {"loss": tf.cast(numbers, tf.float32)}

    def reports():
        settings = dict(global_batch_size=8, steps_per_loop=4, loop=loop, model_dir=tmp_path)
        with flat_config.controller(trainer=Numbers(), **settings) as controller:
            last = controller.train(steps)
        records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        return last["loss"], [(record["step"], record["loss"]) for record in records]

    assert reports() == reports() == (43.5, [(4, 15.5), (7, 43.5)])
