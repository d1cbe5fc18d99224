"""AutoGraph converts the user's functions, and of looplib's own the inner loop alone."""

import pathlib
import re
import subprocess
import sys

import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from conftest import make_strategy, more

import looplib

X = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")


def halved(x):
    """Halves a scalar until it is below 1: a loop and a condition that need AutoGraph."""
    while x >= 1.0:
        x = x / 2
    if x < 0.75:
        x = x + 1
    return x


def halved_in_python(x):
    while x >= 1:
        x = x / 2
    return x + 1 if x < 0.75 else x


def size(x):
    return tf.cast(tf.shape(x)[0], tf.float32)


class Layer(tf_keras.layers.Layer):
    def call(self, x):
        if tf.reduce_sum(x) > 1e9:
            x = tf.zeros_like(x)
        return halved(size(x))


class Own(looplib.Trainer):
    """Returns what its own functions compute with conditions on tensors, each by another way into them."""

    def __init__(self):
        self.layer = Layer()
        self.weight = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)

    def dataset(self, context):
        def at(ids):
            rows = tf.gather(X, ids)
            if ids[0] < 0:
                rows = -rows
            return rows

        return context.indices(32, shuffle=False).map(at)

    def step_fn(self, x):
        total = tf.reduce_sum(tf.abs(x))
        if total > 1e9:
            total = -total
        self.weight.assign_add(total)
        return {"own": looplib.total(halved(size(x))), "layer": looplib.total(self.layer(x))}


class Losses(looplib.GradientTrainer):
    def __init__(self, keras, **settings):
        super().__init__(
            keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), keras.optimizers.SGD(), **settings
        )

    def dataset(self, context):
        return context.indices(32, shuffle=False).map(lambda ids: tf.gather(X, ids))

    def loss_fn(self, x):
        return tf.square(self.model(x))[:, 0], {"total": looplib.total(halved(size(x)))}


class Evaluated(looplib.Evaluator):
    def dataset(self, context):
        return context.indices(32).map(lambda ids: tf.gather(X, ids))

    def step_fn(self, x):
        return {"own": looplib.total(halved(size(x)))}


def run(strategy, trainer, loop="graph", steps=4, **more_of_it):
    settings = looplib.RunConfig(global_batch_size=8, loop=loop)
    with looplib.Controller(settings, trainer=trainer, strategy=strategy, writers=[], **more_of_it) as controller:
        return controller.train(steps), controller.evaluate()["eval"] if more_of_it else None


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("loop", ["graph", "xla", "eager"])
@pytest.mark.parametrize("name", ["default", "mirrored_x2"])
def test_conditions_on_tensors_work_in_each_function_of_the_user(name, loop):
    if loop == "xla" and name != "default":
        pytest.skip("a program of many steps has one replica")
    strategy = make_strategy(name)
    with strategy.scope():
        trainer = Own()
    metrics, evaluated = run(strategy, trainer, loop, evaluator=Evaluated())
    parts = strategy.num_replicas_in_sync
    expected = 4 * parts * halved_in_python(8 / parts)
    assert metrics["own"] == metrics["layer"] == evaluated["own"] == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("keras", [keras3, tf_keras])
@pytest.mark.parametrize("settings", [{}, {"micro_batches": 2}, {"jit_compile": True}], ids=str)
def test_conditions_on_tensors_work_in_a_loss_fn(settings, keras):
    (metrics, _) = run(make_strategy("default"), Losses(keras, **settings))
    parts = settings.get("micro_batches", 1)
    assert metrics["total"] == pytest.approx(4 * parts * halved_in_python(8 / parts))


def test_an_error_in_a_loss_fn_names_the_line_of_the_user():
    class Wrong(Losses):
        def loss_fn(self, x):
            return tf.matmul(x, tf.zeros([7, 7]))[:, 0]  # the line

    with pytest.raises(ValueError, match=r"(?s)autograph_test.py.*# the line|autograph_test.py.*tf.zeros\(\[7, 7\]\)"):
        run(make_strategy("default"), Wrong(keras3))


PROGRAM = """
import pathlib, re, sys, tempfile
tempfile.tempdir = sys.argv[1]  # where AutoGraph writes what it converts
import autograph_test, conftest
import keras, numpy as np, tensorflow as tf, looplib
strategy = conftest.make_strategy(sys.argv[2])
with strategy.scope():
    trainer = autograph_test.Losses(keras)
autograph_test.run(strategy, trainer, evaluator=autograph_test.Evaluated())
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    trainer = looplib.KerasTrainer(model, autograph_test.X, autograph_test.X[:, :1])
autograph_test.run(strategy, trainer)
"""


@pytest.mark.parametrize("name", ["default", *more(["mirrored_x2"])])
def test_of_looplib_s_own_functions_the_inner_loop_alone_is_converted(name, tmp_path):
    program = f"import sys; sys.path[:0] = {sys.path!r}\n{PROGRAM}\nimport os; os._exit(0)"  # keeps the files
    subprocess.run([sys.executable, "-c", program, str(tmp_path), name], check=True, timeout=300)
    files = pathlib.Path(tmp_path).glob("__autograph_generated_file*.py")
    names = {name for file in files for name in re.findall(r"^ +def tf__(\w+)", file.read_text(), re.M)}
    own = {"_call", "_repeat", "_repeat_to_the_end"}  # the first calls the functions of the user
    assert names - own - {"lam", "kept"} == {"loss_fn", "step_fn", "halved", "size"}  # "kept" calls a Keras loss
