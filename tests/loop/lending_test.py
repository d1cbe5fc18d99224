"""An evaluation inside a training computes what an export does, and the training continues as if there was none."""

import json

import flat_config
import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from conftest import make_strategy, more

import looplib

FAMILIES = {"keras": keras3, "tf_keras": tf_keras}
BATCH, STEPS = 16, 4
# The halves of a batch are unlike, so that the moving statistics of two replicas are.
HALVES = np.where(np.arange(64) % BATCH < BATCH // 2, 10.0, -2.0)[:, None]
X = (HALVES + np.random.default_rng(0).normal(size=(64, 3))).astype("float32")
Y = X.sum(axis=1, keepdims=True)
HELD_OUT = X[:33:2] + 3, Y[:33:2]


def normalized(keras):
    norm = keras.layers.BatchNormalization(momentum=0.5, name="norm")
    return keras.Sequential([keras.layers.InputLayer((3,)), norm, keras.layers.Dense(1, name="line")])


def dataset_of(x, y):
    return lambda self, context: context.indices(len(x), shuffle=False).map(
        lambda i: (tf.gather(x, i), tf.gather(y, i))
    )


class Line(looplib.GradientTrainer):
    dataset = dataset_of(X, Y)

    def loss_fn(self, inputs):
        return tf.square(self.model(inputs[0], training=True) - inputs[1])[:, 0]


class Error(looplib.Evaluator):
    dataset = dataset_of(*HELD_OUT)

    def step_fn(self, inputs):
        return {"loss": tf.square(self.model(inputs[0], training=False) - inputs[1])[:, 0]}

    def predict_fn(self, inputs):
        return {"output": self.model(inputs[0], training=False)[:, 0]}


def pair(kind, keras):
    """A trainer of a model that normalizes, and its evaluator."""
    keras.utils.set_random_seed(1)
    model, optimizer = normalized(keras), keras.optimizers.SGD(0.01, momentum=0.9)
    if kind == "compiled":
        model.compile(optimizer, "mse")
        trainer = looplib.KerasTrainer(model, X, Y, shuffle=False, validation_data=HELD_OUT)
        return trainer, trainer.evaluator()
    return Line(model, optimizer, average_decay=0.9 if kind == "averaged" else None), Error(model)


def values(strategy, model):
    """All variables of a model, of each replica."""
    parts = [strategy.experimental_local_results(tf_of(variable)) for variable in model.variables]
    return [part.numpy().tolist() for each in parts for part in each]


def tf_of(variable):
    return variable if isinstance(variable, tf.Variable) else variable.value


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["graph", "eager"])
@pytest.mark.parametrize("kind", ["own", "compiled"])
@pytest.mark.parametrize("name", FAMILIES)
def test_replicas_evaluate_with_what_an_export_writes(name, kind, loop, tmp_path):
    keras, strategy = FAMILIES[name], make_strategy("mirrored_x2")
    settings = dict(strategy=strategy, global_batch_size=BATCH, writers=[], loop=loop, steps_per_loop=2)
    with strategy.scope():
        trainer, evaluator = pair(kind, keras)
    run = flat_config.controller(trainer=trainer, evaluator=evaluator, model_dir=tmp_path, **settings)
    run.train(2)
    means = strategy.experimental_local_results(tf_of(trainer.model.get_layer("norm").moving_mean))
    assert not np.allclose(*means, atol=1)
    found = run.evaluate()["eval"]["loss"]
    exported = tf.saved_model.load(f"{run.export()}/saved_model")
    outputs = exported.serve(tf.constant(HELD_OUT[0])).numpy()
    assert found == pytest.approx(np.mean(np.square(outputs - HELD_OUT[1])), rel=1e-5)
    path = run.predict()["eval"]
    lines = [json.loads(line) for part in sorted(tf.io.gfile.glob(f"{path}/*.jsonl")) for line in open(part)]
    field = "prediction" if kind == "compiled" else "output"
    np.testing.assert_allclose(np.ravel([line[field] for line in lines]), outputs[:, 0], rtol=1e-5)
    run.train(STEPS)
    with strategy.scope():
        other, _ = pair(kind, keras)
    flat_config.controller(trainer=other, **settings).train(STEPS)
    assert values(strategy, trainer.model) == values(strategy, other.model)


def recurrent(keras):
    keras.utils.set_random_seed(1)
    inputs = keras.Input(batch_shape=(BATCH, 3, 1)) if keras is keras3 else keras.Input((3, 1), batch_size=BATCH)
    dropped = keras.layers.Dropout(0.5)(keras.layers.LSTM(4, stateful=True, name="lstm")(inputs), training=True)
    return keras.Model(inputs, keras.layers.Dense(1)(dropped))


class Sequences(Line):
    dataset = dataset_of(X[..., None], Y)


class SequencesError(Error):
    def dataset(self, context):
        data = dataset_of(X[:32, :, None], Y[:32])(self, context)
        return data.map(lambda x, y: (tf.ensure_shape(x, [BATCH, 3, 1]), y))


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize(("name", "loop"), [("tf_keras", "graph"), ("keras", "eager"), ("keras", "graph")])
def test_a_training_has_its_own_recurrent_and_random_state_after_an_evaluation(name, loop):
    keras, results = FAMILIES[name], []
    if keras is tf_keras:
        keras.backend.experimental.enable_tf_random_generator()
    for evaluates in (False, True):
        model = recurrent(keras)
        trainer = Sequences(model, keras.optimizers.SGD(0.01))
        run = looplib.Controller(
            looplib.RunConfig(global_batch_size=BATCH, loop=loop),
            trainer=trainer,
            evaluator=SequencesError(model),
            writers=[],
        )
        for step in range(1, STEPS + 1):
            run.train(step)
            if evaluates:
                run.evaluate()
        results.append([tf_of(variable).numpy().tolist() for variable in model.variables])
    assert results[0] == results[1]


class WithMetric(Line):
    """Reports a Keras metric that its evaluator has too."""

    def __init__(self, model, optimizer, metric):
        super().__init__(model, optimizer)
        self.metric = metric

    def step_fn(self, inputs):
        outputs = super().step_fn(inputs)
        self.metric.update_state(inputs[1], self.model(inputs[0], training=False))
        return {**outputs, "distance": self.metric}


class MetricEvaluator(Error):
    def __init__(self, model, metric):
        super().__init__(model)
        self.metric = metric

    def step_fn(self, inputs):
        self.metric.update_state(inputs[1], self.model(inputs[0], training=False))
        return {"distance": self.metric}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_metric_that_both_have_counts_the_examples_of_each_alone(name, tmp_path):
    keras, strategy, distances = FAMILIES[name], make_strategy("mirrored_x2"), []
    for interval in (3, 4):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            metric = keras.metrics.MeanAbsoluteError(name="distance")
            model = keras.Sequential([keras.layers.InputLayer((3,)), keras.layers.Dense(1)])
            trainer, evaluator = WithMetric(model, keras.optimizers.SGD(0.0), metric), MetricEvaluator(model, metric)
        run = looplib.Controller(
            looplib.RunConfig(global_batch_size=BATCH, steps_per_loop=4),
            trainer=trainer,
            evaluator=evaluator,
            strategy=strategy,
            writers=[],
        )
        found = run.train_and_evaluate(4, interval)["eval"]["distance"]
        assert found == pytest.approx(np.mean(np.abs(model(HELD_OUT[0]).numpy() - HELD_OUT[1])), rel=1e-5)
        assert run.evaluate()["eval"]["distance"] == pytest.approx(found)
        distances.append(run.train(4)["distance"])
    assert distances == pytest.approx([np.mean(np.abs(model(X).numpy() - Y))] * 2, rel=1e-5)


@pytest.mark.slow
def test_a_training_without_such_state_lends_nothing_to_an_evaluation(monkeypatch):
    model = normalized(keras3)
    model.trainable = False  # as a frozen one
    trainer = Line(keras3.Sequential([model, keras3.layers.Dense(1)]), keras3.optimizers.SGD(0.01))
    run = looplib.Controller(
        looplib.RunConfig(global_batch_size=BATCH), trainer=trainer, evaluator=Error(trainer.model), writers=[]
    )
    run.train(1)
    run.evaluate()
    (borrowing,) = run._loops._borrowings.values()
    assert not borrowing._kept


@pytest.mark.parametrize("kind", ["compiled", *more(["own"])])
def test_an_evaluation_on_replicas_runs_nothing_on_them_that_is_not_traced(kind, monkeypatch):
    """TensorFlow would warn of it at each evaluation."""
    strategy, run, eager = make_strategy("mirrored_x2"), tf.distribute.Strategy.run, []
    with strategy.scope():
        trainer, evaluator = pair(kind, keras3)
    config = looplib.RunConfig(global_batch_size=BATCH)
    controller = looplib.Controller(config, trainer=trainer, evaluator=evaluator, strategy=strategy, writers=[])

    def watched(self, *args, **kwargs):
        eager.append(tf.executing_eagerly())
        return run(self, *args, **kwargs)

    monkeypatch.setattr(tf.distribute.Strategy, "run", watched)
    for _ in range(2):
        controller.train_and_evaluate(steps=controller.global_step + 1, eval_interval=1)
    assert eager and not any(eager)
