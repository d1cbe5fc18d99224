"""Objects that are found to be state, and the content of a checkpoint."""

import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
import toy
from conftest import make_strategy

import looplib
from looplib.errors import StateError
from looplib.task.state import state_of
from looplib.weights.restoring import peek


def test_models_optimizers_and_metrics_are_state_and_plain_attributes_are_not(keras):
    trainer = toy.Regression(keras)
    trainer.array, trainer.text, trainer.data = toy.X, "text", tf.data.Dataset.range(3)
    trainer.pair, trainer.nothing, trainer.function = (toy.X, toy.Y), None, lambda: 0
    trainer.ema = {"kernel": tf.Variable(1.0)}
    assert set(state_of(trainer)) == {"model", "optimizer", "accuracy", "ema"}


@pytest.mark.slow
def test_everything_is_restored(keras, tmp_path):
    """Weights, slots, a variable in a dict, dropout's seeds; the running metrics have a test of their own."""

    class Rich(toy.Regression):
        def __init__(self):
            super().__init__(keras, "adam")
            self.extra = {"ema": tf.Variable(0.0, trainable=False)}
            layers = [keras.layers.InputLayer((5,)), keras.layers.Dropout(0.5), keras.layers.Dense(3)]
            self.model = keras.Sequential(layers)

        def step_fn(self, inputs):
            self.extra["ema"].assign_add(1.0)
            outputs = super().step_fn(inputs)
            del outputs["ids"]
            return outputs

        def loop_end(self, metrics):
            return metrics

    def values(trainer):
        held = [*trainer.model.variables, trainer.extra["ema"]]
        optimizer = trainer.optimizer.variables
        held += list(optimizer() if callable(optimizer) else optimizer)
        return [np.array(value) for value in tf.nest.flatten(held)]

    first, second = Rich(), Rich()
    with toy.controller(make_strategy("default"), first, model_dir=tmp_path, steps_per_loop=4) as controller:
        controller.train(6)
        saved = values(first)
    with toy.controller(make_strategy("default"), second, model_dir=tmp_path, steps_per_loop=4):
        for a, b in zip(saved, values(second), strict=True):
            np.testing.assert_array_equal(a, b)
    assert float(second.extra["ema"]) == 6


@pytest.mark.slow(spread=1)
def test_running_metrics_of_keras_are_in_the_checkpoint(keras, tmp_path):
    """Half a window before the stop and half after it make the metric of a whole window."""

    class Windowed(toy.Regression):
        def step_fn(self, inputs):
            outputs = super().step_fn(inputs)
            return {"keras_accuracy": outputs["keras_accuracy"], "accuracy": self._accuracy(inputs)}

        def _accuracy(self, inputs):
            _, x, y = inputs
            return tf.equal(tf.argmax(self.model(x), 1), y)

        def loop_end(self, metrics):
            self.reported = metrics
            return metrics

    settings = dict(model_dir=tmp_path, steps_per_loop=6)
    trainers = []
    for steps in (4, 6):
        trainers.append(Windowed(keras))
        with toy.controller(make_strategy("default"), trainers[-1], **settings) as controller:
            controller.train(steps)
    whole = Windowed(keras)
    with toy.controller(make_strategy("default"), whole, steps_per_loop=6) as controller:
        controller.train(6)
    assert trainers[1].reported == whole.reported


def test_the_seeds_of_keras_3_dropout_are_state():
    trainer = toy.Regression()
    trainer.model = keras3.Sequential([keras3.Input((5,)), keras3.layers.Dropout(0.5), keras3.layers.Dense(3)])
    assert [tuple(seed.shape) for seed in state_of(trainer)["model_untracked"]] == [(2,)]


def test_an_evaluation_job_has_the_layers_that_a_keras_3_model_keeps_in_lists_and_dicts(tmp_path):
    """TensorFlow does not find them in the model, and the optimizer that leads to them is no part of the job."""

    class Model(keras3.Model):
        def __init__(self):
            super().__init__()
            self.blocks = [keras3.layers.Dense(4), keras3.layers.Dense(4)]
            self.heads = {"classes": keras3.layers.Dense(3)}
            self(toy.X[:1])

        def call(self, x):
            for block in self.blocks:
                x = block(x)
            return self.heads["classes"](x)

    class Evaluator(looplib.Evaluator):
        def __init__(self):
            self.model = Model()

        def dataset(self, context):
            return context.indices(len(toy.X)).map(lambda ids: tf.gather(toy.X, ids))

        def step_fn(self, inputs):
            return {"outputs": self.model(inputs)}

    trainer = toy.Regression()
    trainer.model = Model()
    with toy.controller(make_strategy("default"), trainer, model_dir=tmp_path) as controller:
        controller.train(2)
    evaluator = Evaluator()
    with looplib.Controller(
        looplib.RunConfig(global_batch_size=8), evaluator=evaluator, model_dir=tmp_path, writers=[]
    ) as job:
        job.evaluate()
    np.testing.assert_array_equal(evaluator.model(toy.X), trainer.model(toy.X))


def test_a_checkpoint_tells_its_step_without_a_model(tmp_path):
    trainer = toy.Regression()
    with toy.controller(make_strategy("default"), trainer, model_dir=tmp_path, seed=4) as controller:
        controller.train(3)
    step, record = peek(str(tmp_path / "checkpoints" / "ckpt-3"))
    assert step == 3 and record.seed == 4 and record.global_batch_size == 8 and record.reported == {"train": 3}


def test_only_the_last_checkpoints_are_kept(tmp_path):
    trainer = toy.Regression()
    policy = looplib.CheckpointPolicy(every_steps=2, keep=(looplib.KeepLast(3),))
    with toy.controller(make_strategy("default"), trainer, model_dir=tmp_path, checkpoints=policy) as controller:
        controller.train(11)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("*.index"))
    assert kept == ["ckpt-10.index", "ckpt-11.index", "ckpt-8.index"]


class Contained(toy.Regression):
    """Its model with dropout in a list, its Keras 3 metric in a dict, a seed generator of its own."""

    def __init__(self):
        super().__init__(optimizer="adam")
        layers = keras3.layers
        self.models = [keras3.Sequential([keras3.Input((5,)), layers.Dropout(0.5), layers.Dense(3)])]
        self.metrics = {"accuracy": keras3.metrics.SparseCategoricalAccuracy()}
        self.noise = keras3.random.SeedGenerator(7)
        del self.model, self.accuracy

    def step_fn(self, inputs):
        _, x, y = inputs
        with tf.GradientTape() as tape:
            logits = self.models[0](x + keras3.random.normal(tf.shape(x), seed=self.noise), training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            loss = self.global_mean(losses)
        variables = self.models[0].trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        self.metrics["accuracy"].update_state(y, logits)
        return {"loss": losses, **self.metrics}

    def loop_end(self, metrics):
        self.order.append(metrics)
        return metrics


def contained(steps, **settings):
    keras3.utils.set_random_seed(3)
    trainer = Contained()
    with toy.controller(make_strategy("default"), trainer, steps_per_loop=4, **settings) as controller:
        controller.train(steps)
    return trainer


@pytest.mark.slow
def test_randomness_and_metrics_inside_lists_and_dicts_resume_exactly(tmp_path, caplog):
    whole = contained(12)
    contained(6, model_dir=tmp_path)
    parts = contained(12, model_dir=tmp_path)
    for a, b in zip(whole.models[0].get_weights(), parts.models[0].get_weights()):
        np.testing.assert_array_equal(a, b)
    assert [r["accuracy"] for r in whole.order[1:]] == [r["accuracy"] for r in parts.order]
    assert "not saved" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SGD", "Adam", "scaled"])
def test_an_optimizer_that_makes_its_variables_late_resumes_in_the_eager_loop(kind, tmp_path):
    legacy = tf_keras.optimizers.legacy

    class Late(toy.Regression):
        def __init__(self):
            super().__init__(tf_keras)
            self.optimizer = legacy.Adam(0.1) if kind == "Adam" else legacy.SGD(0.1, momentum=0.9)
            if kind == "scaled":
                self.optimizer = tf_keras.mixed_precision.LossScaleOptimizer(
                    self.optimizer, dynamic=False, initial_scale=1
                )

    whole, first, second = Late(), Late(), Late()
    for trainer, steps, folder in ((whole, 6, tmp_path / "a"), (first, 3, tmp_path / "b"), (second, 6, tmp_path / "b")):
        with toy.controller(make_strategy("default"), trainer, model_dir=folder, loop="eager") as controller:
            controller.train(steps)
    assert int(second.optimizer.iterations) == 6
    for a, b in zip(whole.weights(), second.weights()):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_variables_that_no_attribute_holds_are_named(caplog, keras):
    hidden = tf.Variable(1.0, name="hidden_scale")

    class Hiding(toy.Regression):
        def step_fn(self, inputs):
            hidden.assign_add(1.0)
            return super().step_fn(inputs)

    toy.controller(make_strategy("default"), toy.Regression(keras))
    toy.controller(make_strategy("mirrored_x2"), toy.build(make_strategy("mirrored_x2"), keras)[0])
    assert "not saved" not in caplog.text
    toy.controller(make_strategy("default"), Hiding(keras))
    assert "not attributes of the trainer; they are not saved" in caplog.text
    assert "hidden_scale" in caplog.text


def test_queues_tables_and_python_in_a_step_are_named_where_no_checkpoint_holds_them(caplog):
    queue = tf.queue.FIFOQueue(100, [tf.float32])
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
    steps = {
        "QueueEnqueueV2": lambda: queue.enqueue(1.0),
        "a lookup table that is no attribute": lambda: table.insert(tf.constant(0, tf.int64), 1.0),
        "PyFunc": lambda: tf.numpy_function(np.random.rand, [], tf.float64),
    }
    for words, step in steps.items():

        class Keeping(toy.Regression):
            def step_fn(self, inputs):
                step()
                return super().step_fn(inputs)

        caplog.clear()
        toy.controller(make_strategy("default"), Keeping())
        assert f"Keeping.step_fn uses {words}" in caplog.text
    caplog.clear()

    class Holding(toy.Regression):
        def step_fn(self, inputs):
            self.table.insert(tf.constant(0, tf.int64), 1.0)
            return super().step_fn(inputs)

    holding = Holding()
    holding.table = table
    toy.controller(make_strategy("default"), holding)
    assert "not saved" not in caplog.text


def test_attributes_that_tensorflow_cannot_save_are_refused_before_the_first_step():
    trainer = toy.Regression()
    trainer.scales = {0: tf.Variable(1.0)}
    with pytest.raises(StateError):
        toy.controller(make_strategy("default"), trainer)
