"""State that layers have learned in `adapt` is part of a run: it follows a restore, or its difference is found."""

import json
import logging

import flat_config
import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import looplib
from looplib.errors import MismatchError, StaleTraceError

FAMILIES = {"keras": keras3, "tf_keras": tf_keras}
X = np.random.default_rng(0).normal(50, 20, size=(64, 3)).astype("float32")
Y = (X @ [[1.0], [2.0], [3.0]]).astype("float32")
OTHER = X / 10 - 3  # data that another program adapts to
BATCH, STEPS = 16, 6


def make_model(keras, kind="functional", data=None):
    norm, line = keras.layers.Normalization(name="norm"), keras.layers.Dense(1, name="line")
    norm.build((None, 3))
    if data is not None:
        norm.adapt(data)
    if kind == "sequential":
        return keras.Sequential([keras.layers.InputLayer((3,)), norm, line])
    if kind == "functional":
        inputs = keras.Input((3,))
        return keras.Model(inputs, line(norm(inputs)))

    class Line(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = {"first": [norm], "last": line}

        def call(self, inputs):
            return self.parts["last"](self.parts["first"][0](inputs))

    model = Line()
    model(tf.zeros([1, 3]))
    return model


class Line(looplib.GradientTrainer):
    def __init__(self, keras, model):
        super().__init__(model, keras.optimizers.SGD(0.1, momentum=0.9))

    def dataset(self, context):
        return context.indices(len(X)).map(lambda i: (tf.gather(X, i), tf.gather(Y, i)))

    def loss_fn(self, inputs):
        return tf.square(self.model(inputs[0], training=True) - inputs[1])[:, 0]


class Error(looplib.Evaluator):
    def dataset(self, context):
        return context.indices(len(X)).map(lambda i: (tf.gather(X, i), tf.gather(Y, i)))

    def step_fn(self, inputs):
        return {"error": tf.square(self.model(inputs[0], training=False) - inputs[1])[:, 0]}

    def export(self):
        spec = tf.TensorSpec([None, 3])
        return looplib.Exported(lambda inputs: self.model(inputs, training=False), spec, self.model)


def controller(path, trainer=None, evaluator=None, **kwargs):
    kwargs = {"steps_per_loop": 2, "writers": [], "global_batch_size": BATCH, **kwargs}
    return flat_config.controller(trainer=trainer, evaluator=evaluator, model_dir=path, **kwargs)


def weights(model):
    """(kernel, bias) as numpy arrays."""
    return tuple(sorted((v.numpy() for v in model.trainable_variables), key=np.ndim, reverse=True))


def by_hand(model, data=X):
    """The model's outputs for X by numpy, if it normalizes by the statistics of some data."""
    kernel, bias = weights(model)
    return (X - data.mean(axis=0)) / data.std(axis=0) @ kernel + bias


def error_by_hand(model):
    return np.mean(np.square(by_hand(model) - Y))


@pytest.fixture(scope="module", params=FAMILIES)
def trained(request, tmp_path_factory):
    """(keras, the directory of a run whose program has adapted the layer to X, its weights at the end)."""
    keras = FAMILIES[request.param]
    path = tmp_path_factory.mktemp("trained")
    trainer = Line(keras, make_model(keras, data=X))
    policy = looplib.CheckpointPolicy(every_steps=STEPS // 2, keep=(looplib.KeepLast(9),))
    controller(path, trainer, checkpoints=policy).train(STEPS)
    return keras, path, weights(trainer.model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sequential", "functional", "subclass"])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_evaluation_and_an_export_compute_with_the_restored_statistics(name, kind, tmp_path):
    keras = FAMILIES[name]
    trainer = Line(keras, make_model(keras, kind, data=X))
    controller(tmp_path, trainer).train(STEPS)
    model = make_model(keras, kind, data=OTHER if kind == "sequential" else None)  # or it was never adapted
    job = controller(tmp_path, evaluator=Error(model))
    assert job.evaluate()["eval"]["error"] == pytest.approx(error_by_hand(trainer.model), rel=1e-4)
    loaded = tf.saved_model.load(f"{job.export()}/saved_model")
    np.testing.assert_allclose(loaded.serve(tf.constant(X)), by_hand(trainer.model), rtol=1e-3, atol=1e-2)


@pytest.mark.slow(keep=1)
def test_a_resumed_run_continues_with_the_statistics_of_its_checkpoint(trained):
    keras, path, (kernel, bias) = trained
    trainer = Line(keras, make_model(keras, data=OTHER))
    resumed = controller(path, trainer)
    resumed.restore_checkpoint(path / "checkpoints" / f"ckpt-{STEPS // 2}")
    resumed.train(STEPS)
    assert [part.tolist() for part in weights(trainer.model)] == [kernel.tolist(), bias.tolist()]


@pytest.mark.slow
def test_a_warm_start_trains_with_the_statistics_that_it_takes(trained, tmp_path):
    keras, path, pretrained = trained
    trainer = Line(keras, make_model(keras))
    run = controller(
        tmp_path, trainer, start=looplib.Start(warm_start=str(path)), steps_per_loop=1, global_batch_size=len(X)
    )
    assert [part.tolist() for part in weights(trainer.model)] == [part.tolist() for part in pretrained]
    before = error_by_hand(trainer.model)
    assert run.train(1)["loss"] == pytest.approx(before, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_what_initialize_adapts_is_what_the_step_and_the_data_compute_with(name):
    class Adapts(Line):
        def __init__(self, keras):
            super().__init__(keras, make_model(keras))
            self.scale = keras.layers.Normalization(axis=None)
            self.scale.build((None, 1))

        def initialize(self):
            self.model.get_layer("norm").adapt(X)
            self.scale.adapt(Y)

        def dataset(self, context):
            return super().dataset(context).map(lambda x, y: (x, self.scale(y)))

    trainer = Adapts(FAMILIES[name])
    run = controller(None, trainer, steps_per_loop=1, global_batch_size=len(X))
    before = np.mean(np.square(by_hand(trainer.model) - (Y - Y.mean()) / Y.std()))
    assert run.train(1)["loss"] == pytest.approx(before, rel=1e-4)


@pytest.mark.slow(keep=1)
def test_a_function_that_keeps_earlier_constants_is_refused(trained):
    keras, path, _ = trained
    evaluator = Error(make_model(keras))
    evaluator.model_fn = tf.function(lambda inputs: evaluator.model(inputs, training=False))
    evaluator.step_fn = lambda inputs: {"error": tf.square(evaluator.model_fn(inputs[0]) - inputs[1])[:, 0]}
    with pytest.raises(StaleTraceError, match="tf.function"):
        controller(path, evaluator=evaluator)


@pytest.mark.slow
def test_a_layer_that_adapts_in_a_training_is_refused_at_the_next_step(trained):
    keras, _, _ = trained
    trainer = Line(keras, make_model(keras, data=X))
    run = controller(None, trainer, actions=[lambda event: trainer.model.get_layer("norm").adapt(OTHER)])
    with pytest.raises(StaleTraceError, match="norm.mean.*Line.loss_fn"):
        run.train(STEPS)


@pytest.mark.slow(spread=1)
def test_statistics_that_are_the_same_trace_nothing_again(trained, caplog):
    keras, path, _ = trained
    with caplog.at_level(logging.INFO, logger="absl"):
        controller(path, evaluator=Error(make_model(keras, data=X)))
    assert "traced again" not in caplog.text


WORDS = ["ant", "bee", "cat", "dog"]
TEXT = np.array(WORDS * 4)[:, None]
TARGETS = np.array([[0.0], [1.0], [2.0], [3.0]] * 4, "float32")


def lookups(keras, kind, words):
    """A layer that makes [n, 1] whole numbers of TEXT, from a list of words."""
    layers = keras.layers
    if kind == "adapted":
        layer = layers.StringLookup(name="words")
        layer.adapt(
            np.concatenate([[word] * (9 - number) for number, word in enumerate(words)])
        )  # the most frequent first
        return layer
    if kind == "text":
        return layers.TextVectorization(vocabulary=words, output_sequence_length=1, name="words")
    return layers.StringLookup(vocabulary=words, name="words")


class Embeds:
    """The part that a trainer and an evaluator share."""

    def dataset(self, context):
        return context.indices(len(TEXT)).map(lambda i: (tf.gather(TEXT, i), tf.gather(TARGETS, i)))

    def losses(self, inputs, training):
        return tf.square(self.model(inputs[0], training=training) - inputs[1])[:, 0]


class Embed(Embeds, looplib.GradientTrainer):
    def loss_fn(self, inputs):
        return self.losses(inputs, training=True)


class EmbedError(Embeds, looplib.Evaluator):
    def step_fn(self, inputs):
        return {"error": self.losses(inputs, training=False)}


def embedding(keras, kind, words):
    inputs = keras.Input((1,), dtype="string")
    embedded = keras.layers.Embedding(6, 1, name="embed")(lookups(keras, kind, words)(inputs))
    return keras.Model(inputs, keras.layers.Flatten()(embedded))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["given", "adapted", "text"])
@pytest.mark.parametrize("name", FAMILIES)
def test_another_vocabulary_than_that_of_the_training_is_refused(name, kind, tmp_path):
    keras = FAMILIES[name]
    model = embedding(keras, kind, WORDS)
    controller(tmp_path / "run", Embed(model, keras.optimizers.SGD(0.1))).train(STEPS)
    job = controller(tmp_path / "run", evaluator=EmbedError(embedding(keras, kind, WORDS)))
    found = model.get_layer("embed").get_weights()[0][np.arange(4) + (2 if kind == "text" else 1)]
    error = np.mean(np.square(np.tile(found, [4, 1]) - TARGETS))
    assert job.evaluate()["eval"]["error"] == pytest.approx(error, rel=1e-5)

    def other(words=("ant", "cat", "bee", "dog")):
        return embedding(keras, kind, list(words))

    with pytest.raises(MismatchError, match="model/words.*'cat'.*1.*'bee'"):
        controller(tmp_path / "run", evaluator=EmbedError(other()))
    with pytest.raises(MismatchError, match="model/words.*3.*4"):
        controller(tmp_path / "run", Embed(other(WORDS[:3]), keras.optimizers.SGD(0.1)))
    for policy in ({"warm_start": str(tmp_path / "run")}, {"continue_from": str(tmp_path / "run" / "checkpoints")}):
        with pytest.raises(MismatchError, match="model/words.*'cat'.*1"):
            trainer = Embed(other(), keras.optimizers.SGD(0.1))
            controller(tmp_path / "other", trainer, start=looplib.Start(**policy))


class Tables(Line):
    """A trainer with tables, and what other layers have learned, outside of its model."""

    def __init__(self, keras, **given):
        super().__init__(keras, make_model(keras, data=X))
        given = {"words": WORDS, "bins": [1.0, 2.0], "mean": 3.0, "seen": [2.0, 4.0]} | given
        numbers = tf.constant(range(len(given["words"])), tf.int64)
        self.tables = {
            "plain": tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(given["words"], numbers), 0)
        }

        class Shift(keras.layers.Layer):
            """Keeps in an attribute what it learns."""

            mean: np.ndarray

            def adapt(self, data):
                self.mean = np.mean(data, axis=0)

        shift = Shift(name="shift")
        shift.adapt(given["seen"])
        self.layers = [
            shift,
            keras.layers.Discretization(bin_boundaries=given["bins"], name="bins"),
            keras.layers.Normalization(mean=given["mean"], variance=1.0, name="given"),
        ]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_other_tables_and_boundaries_are_refused_by_name(name, tmp_path):
    keras = FAMILIES[name]

    def run(**given):
        return looplib.Controller(
            looplib.RunConfig(global_batch_size=BATCH), trainer=Tables(keras, **given), model_dir=tmp_path, writers=[]
        )

    run().train(1)
    run().train(2)
    for given, said in [
        ({"words": WORDS[::-1]}, "tables/plain has 'dog' as entry 0, and has 'ant' there"),
        ({"bins": [1.0, 3.0]}, "layers/bins has '3.0' as entry 1, and has '2.0' there"),
        ({"mean": 4.0}, "layers/given has '4.0' as entry 0, and has '3.0' there"),
        ({"seen": [2.0, 6.0]}, "layers/shift has '4.0' as entry 0, and has '3.0' there"),
    ]:
        with pytest.raises(MismatchError, match=said):
            run(**given)


@pytest.mark.slow
def test_a_subclass_that_nobody_adapted_or_built_evaluates_with_the_restored_statistics(tmp_path):
    """Keras 3 builds its layers, and these make their constants, in a graph of its own."""

    def make(data=None):
        class Line(keras3.Model):
            def __init__(self):
                super().__init__(name="model")
                self.norm, self.line = keras3.layers.Normalization(name="norm"), keras3.layers.Dense(1, name="line")

            def call(self, inputs):
                return self.line(self.norm(inputs))

        model = Line()
        if data is not None:
            model.norm.adapt(data)
        model.compile(keras3.optimizers.SGD(0.1), "mse")
        return model

    model = make(X)
    controller(tmp_path, looplib.KerasTrainer(model, X, Y)).train(STEPS)
    kernel, bias = (part.numpy() for part in model.line.trainable_variables)
    expected = np.mean(np.square((X - X.mean(axis=0)) / X.std(axis=0) @ kernel + bias - Y))
    trainer = looplib.KerasTrainer(make(), X, Y)
    found = controller(tmp_path, evaluator=trainer.evaluator(X, Y)).evaluate()["eval"]["loss"]
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_checkpoint_without_contents_continues(tmp_path):
    """As an earlier version has written it."""
    record = looplib.task.record.RunRecord.from_json(json.dumps({"reported": {"train": 3}}))
    looplib.weights.restoring.check_contents({"words": lookups(keras3, "given", WORDS)}, record, "ckpt-3")
