"""Fused updates equal Keras's own, and stand back where they have no kernel."""

import collections
import itertools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from conftest import make_strategy, more

from looplib.cluster.updates import TrainingOptimizers
from looplib.compat import optimizers

# Of the model's variables, which have 10,000, 100, 300 and 3 elements, Adam's kernel updates the first and the last, and
# the kernel of gradient descent without momentum only the first.
OPTIMIZERS = {
    "adam": ("Adam", dict(learning_rate=0.01, beta_1=0.8)),
    "adam with clipping and average": ("Adam", dict(learning_rate=0.01, global_clipnorm=0.1, use_ema=True)),
    "adamw": ("AdamW", dict(learning_rate=0.01, weight_decay=0.1)),
    "sgd": ("SGD", dict(learning_rate=0.01)),
    "momentum": ("SGD", dict(learning_rate=0.01, momentum=0.9)),
    "nesterov": ("SGD", dict(learning_rate=0.01, momentum=0.9, nesterov=True)),
}
X = np.random.default_rng(0).normal(size=(16, 100)).astype("float32")


class Holder:
    """A trainer, as far as its optimizers are looked for."""


def train(keras, make_optimizer, name, fuse, steps=10):
    """Returns (all variables after some steps, how many kernels of each type a step has on one replica)."""
    strategy, holder = make_strategy(name), Holder()
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.InputLayer((100,)), keras.layers.Dense(100), keras.layers.Dense(3)])
        holder.optimizer = make_optimizer()
        holder.optimizer.build(model.trainable_variables)
    optimizers = TrainingOptimizers(holder, strategy, noted=False, fuse=fuse)

    def replica_step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(X) - 1))
        variables = model.trainable_variables
        holder.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    step = tf.function(lambda: strategy.run(replica_step)).get_concrete_function()
    for _ in range(steps):
        step()
    optimizers.close()
    graph = step.graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    values = [np.array(v) for v in [*model.variables, *_variables(holder.optimizer)]]
    kernels = collections.Counter(node.op for node in nodes if "ResourceApply" in node.op)
    return values, {kernel: count // strategy.num_replicas_in_sync for kernel, count in kernels.items()}


def _variables(optimizer):
    return optimizer.variables() if callable(optimizer.variables) else optimizer.variables


# Each optimizer once, and pairs of strategies and families.
FEW = [
    ("adam", "default", "keras"),
    ("adam with clipping and average", "mirrored_x2", "keras"),
    ("adamw", "mirrored_x2", "tf_keras"),
    ("sgd", "default", "tf_keras"),
    ("momentum", "mirrored_x2", "tf_keras"),
    ("nesterov", "default", "keras"),
]
EACH = itertools.product(OPTIMIZERS, ("default", "mirrored_x2"), ("keras", "tf_keras"))


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize(
    "optimizer, name, keras", [*FEW, *more(case for case in EACH if case not in FEW)], indirect=["keras"]
)
def test_a_fused_update_equals_the_plain_one(optimizer, name, keras):
    kind, arguments = OPTIMIZERS[optimizer]

    def make_optimizer():
        return getattr(keras.optimizers, kind)(**arguments)

    plain, ops = train(keras, make_optimizer, name, fuse=False)
    fast, fused_ops = train(keras, make_optimizer, name, fuse=True)
    expected = {
        "Adam": {"ResourceApplyAdam": 2},
        "AdamW": {"ResourceApplyAdam": 2},
        "SGD": {"ResourceApplyKerasMomentum": 4} if "momentum" in arguments else {"ResourceApplyGradientDescent": 1},
    }
    if keras.__name__ == "tf_keras" and optimizer == "sgd":  # it has a slot of momentum in any case
        expected["SGD"] = {"ResourceApplyKerasMomentum": 4}
    assert not ops and fused_ops == expected[kind]
    assert all(np.isfinite(value).all() for value in fast)
    for a, b in zip(plain, fast, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_what_is_no_plain_adam_or_sgd_is_left_alone(keras):
    class Mine(keras.optimizers.SGD):
        pass

    for make_optimizer in (Mine, lambda: keras.optimizers.Adam(amsgrad=True), keras.optimizers.RMSprop):
        assert not train(keras, make_optimizer, "default", fuse=True, steps=1)[1]


@pytest.mark.slow(spread=1)
def test_slots_that_keras_keeps_elsewhere_mean_a_plain_update(keras):
    def make_optimizer():
        optimizer = keras.optimizers.SGD(0.1)
        vars(optimizer)["momentum"] = 0.5  # as of a Keras whose slots have another name
        vars(optimizer).pop("momentums", None)
        return optimizer

    holder = Holder()
    holder.optimizer = make_optimizer()
    assert optimizers._kernel(optimizers._sgd, holder.optimizer, tf.Variable(tf.zeros([100, 100])), 0.1) is None


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_slots_are_among_the_variables_of_a_step(optimizer, keras):
    """By which a step that is not finite is undone, and what is not saved is found."""
    kind, arguments = OPTIMIZERS[optimizer]
    counts = []
    for fuse in (False, True):
        holder, variable = Holder(), tf.Variable(tf.zeros([100, 100]))
        holder.optimizer = getattr(keras.optimizers, kind)(**arguments)
        holder.optimizer.build([variable])
        optimizers = TrainingOptimizers(holder, tf.distribute.get_strategy(), noted=False, fuse=fuse)
        step = tf.function(lambda: holder.optimizer.apply_gradients([(tf.ones([100, 100]), variable)]))
        counts.append(len(step.get_concrete_function().variables))
        optimizers.close()
    assert counts[0] == counts[1]


def test_an_adaptive_epsilon_is_left_to_keras():
    def make_optimizer():
        return tf_keras.optimizers.Adam(adaptive_epsilon=True)

    assert not train(tf_keras, make_optimizer, "default", fuse=True, steps=1)[1]


def update_twice(optimizer, elements, fuse, gradient=tf.sin):
    """Returns (a variable after two updates, the ops of one)."""
    holder, variable = Holder(), tf.Variable(tf.ones([elements]))
    holder.optimizer = optimizer
    optimizer.build([variable])
    optimizers = TrainingOptimizers(holder, tf.distribute.get_strategy(), noted=False, fuse=fuse)
    step = tf.function(lambda: optimizer.apply_gradients([(gradient(variable), variable)]))
    step(), step()
    optimizers.close()
    return variable.numpy(), {node.op for node in step.get_concrete_function().graph.as_graph_def().node}


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("elements", [0, 1, 48, 49, 64, 100, 256, 272, 8192])
def test_adam_is_fused_where_its_kernel_keeps_to_one_thread_or_gains_by_several(elements, keras):
    """And it computes the same for a variable of any number of elements, also of none."""
    plain, _ = update_twice(keras.optimizers.Adam(0.1), elements, fuse=False)
    fast, ops = update_twice(keras.optimizers.Adam(0.1), elements, fuse=True)
    np.testing.assert_allclose(plain, fast, rtol=1e-5)
    assert ("ResourceApplyAdam" in ops) == (elements in (1, 48, 64, 256, 8192))


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("momentum", [tf.Variable(0.9), tf.constant(0.9, tf.float64)], ids=["a variable", "float64"])
def test_momentum_may_be_what_keras_casts(momentum):
    plain, fast = (update_twice(tf_keras.optimizers.SGD(0.1, momentum=momentum), 5, fuse)[0] for fuse in (False, True))
    np.testing.assert_allclose(plain, fast, rtol=1e-5)


@pytest.mark.slow(spread=1)
def test_a_gradient_that_broadcasts_is_left_to_keras(keras):
    value, _ = update_twice(keras.optimizers.Adam(0.1), 5, fuse=True, gradient=lambda variable: tf.constant(1.0))
    np.testing.assert_allclose(value, np.full([5], 0.8), rtol=1e-5)  # each step of a constant gradient is the rate
