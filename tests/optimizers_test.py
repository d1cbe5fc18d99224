"""Optimizers train on several replicas as Keras trains on one device, and are given back as they were."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conftest import make_strategy

import looplib
from looplib import UsageError

STEPS, BATCH, FEATURES, CLASSES, WORDS = 7, 8, 5, 3, 6
_random = np.random.RandomState(0)
# Errors of very different size, so that replicas' own gradients are clipped otherwise than their sum.
X = _random.randn(STEPS * BATCH, FEATURES).astype(np.float32)
Y = (_random.randn(STEPS * BATCH, CLASSES) * np.exp(_random.randn(STEPS * BATCH, 1) * 2)).astype(np.float32)
KERNEL = _random.randn(FEATURES, CLASSES).astype(np.float32)
# Sentences of 1 to 9 words, padded to the longest of each global batch with word 0.
LENGTHS = _random.randint(1, 10, STEPS * BATCH)
LONGEST = LENGTHS.reshape(STEPS, BATCH).max(1)


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer, by the function that makes it, and what its variables are made with."""

    make: Callable[[], Any]
    constraint: bool = False
    dynamic: bool = False  # it scales the loss
    exclude: bool = False


OPTIONS = {
    "clipnorm": dict(clipnorm=0.5),
    "clipvalue": dict(clipvalue=0.3),
    "global_clipnorm": dict(global_clipnorm=0.5),
    "weight_decay": dict(weight_decay=0.05, clipvalue=1.0),
    "ema": dict(use_ema=True, ema_momentum=0.8, global_clipnorm=1.0),
    "ema_overwrite": dict(use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3, clipnorm=1.0),
}
KERAS_3_OPTIONS = {
    "accumulate": dict(gradient_accumulation_steps=3, global_clipnorm=0.5, weight_decay=0.05),
    "accumulate_and_ema": dict(gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=2, clipnorm=1.0),
    "loss_scale": dict(loss_scale_factor=8.0, clipnorm=0.5),
}
CLASSES_OF = {
    "keras": ["SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor", "Nadam", "Ftrl", "Lion",
              "Lamb", "Muon", "ScheduleFreeAdamW"],
    "tf_keras": ["SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor", "Nadam", "Ftrl", "Lion"],
}  # fmt: skip


def cases(keras) -> dict[str, Case]:
    """Every class of optimizer and every option of one Keras family, by name."""
    optimizers, name = keras.optimizers, keras.__name__
    found = {kind: Case(lambda kind=kind: getattr(optimizers, kind)(0.01, clipvalue=0.5)) for kind in CLASSES_OF[name]}
    options = OPTIONS | (KERAS_3_OPTIONS if name == "keras" else {})
    for option, arguments in options.items():
        for kind in ("SGD", "Adam"):
            found[f"{kind} {option}"] = Case(lambda k=kind, a=arguments: getattr(optimizers, k)(0.02, **a))
    found["amsgrad"] = Case(lambda: optimizers.Adam(0.02, amsgrad=True, clipnorm=0.5))
    found["nesterov"] = Case(lambda: optimizers.SGD(0.02, momentum=0.9, nesterov=True, global_clipnorm=0.5))
    schedule = optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    found["schedule"] = Case(lambda: optimizers.AdamW(schedule, weight_decay=0.1, clipvalue=0.5))
    found["constraint"] = Case(lambda: optimizers.SGD(0.1, clipnorm=1.0), constraint=True)
    found["no decay of biases"] = Case(lambda: optimizers.AdamW(0.02, weight_decay=0.5), exclude=True)
    if name == "keras":
        found["schedule and accumulate"] = Case(
            lambda: optimizers.Adam(schedule, gradient_accumulation_steps=2, global_clipnorm=0.5), constraint=True
        )
        found["Muon accumulate"] = Case(lambda: optimizers.Muon(0.02, gradient_accumulation_steps=3, clipnorm=0.5))
        inner = dict(gradient_accumulation_steps=2, global_clipnorm=0.5)
        scaled = lambda kind, **a: optimizers.LossScaleOptimizer(kind(0.02, **a), 4.0, dynamic_growth_steps=3)
        found["dynamic"] = Case(lambda: scaled(optimizers.SGD, clipnorm=0.5), dynamic=True)
        found["dynamic and accumulate"] = Case(lambda: scaled(optimizers.Adam, **inner), dynamic=True)
        found["several"] = Case(lambda: several(optimizers))
    else:
        for kind in [kind for kind in CLASSES_OF[name] if hasattr(optimizers.legacy, kind)]:
            found[f"legacy {kind}"] = Case(lambda kind=kind: getattr(optimizers.legacy, kind)(0.01, global_clipnorm=0.5))
        scaled = lambda inner: keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=4.0, dynamic_growth_steps=3)
        found["dynamic"] = Case(lambda: scaled(optimizers.SGD(0.02, clipnorm=0.5)), dynamic=True)
        found["legacy dynamic"] = Case(lambda: scaled(optimizers.legacy.SGD(0.02, clipnorm=0.5)), dynamic=True)
    return found


def several(optimizers):
    """One optimizer for matrices, another one for vectors."""
    made = [optimizers.SGD(0.02, clipnorm=0.5), optimizers.Adam(0.02, gradient_accumulation_steps=2, clipvalue=0.1)]
    return optimizers.MultiOptimizer(lambda variable: made[len(variable.shape) == 1])


class Zoo(looplib.Trainer):
    """A linear regression for each optimizer, all trained on the same batches. Built under the strategy's scope."""

    def __init__(self, keras, cases):
        self.models, self.optimizers, self.cases = [], [], cases
        for case in cases.values():
            constraint = keras.constraints.MaxNorm(1.0) if case.constraint else None
            dense = keras.layers.Dense(CLASSES, kernel_constraint=constraint)
            model = keras.Sequential([keras.layers.InputLayer((FEATURES,)), dense])
            dense.set_weights([KERNEL, np.ones(CLASSES, np.float32)])
            optimizer = case.make()
            if case.exclude:
                optimizer.exclude_from_weight_decay(var_names=["bias"])
            if hasattr(optimizer, "build"):
                optimizer.build(model.trainable_variables)
            self.models.append(model)
            self.optimizers.append(optimizer)

    def dataset(self, context):
        return tf.data.Dataset.from_tensor_slices((X, Y)).batch(context.per_replica_batch_size, drop_remainder=True)

    def step_fn(self, inputs):
        for model, optimizer, case in zip(self.models, self.optimizers, self.cases.values()):
            train(model, optimizer, case, inputs, self.global_mean)
        return {}

    def values(self):
        """dict from the case's name to all its variables, of the model and the optimizer."""
        found = {}
        for name, model, optimizer in zip(self.cases, self.models, self.optimizers):
            variables = optimizer.variables
            variables = variables() if callable(variables) else variables
            found[name] = [np.array(variable) for variable in [*model.variables, *variables]]
        return found


def train(model, optimizer, case, inputs, mean):
    x, y = inputs
    with tf.GradientTape() as tape:
        loss = mean(tf.reduce_sum(tf.square(model(x) - y), axis=1))
        if hasattr(optimizer, "scale_loss"):
            loss = optimizer.scale_loss(loss)
        elif case.dynamic:
            loss = optimizer.get_scaled_loss(loss)
    gradients = tape.gradient(loss, model.trainable_variables)
    if case.dynamic and hasattr(optimizer, "get_unscaled_gradients"):
        gradients = optimizer.get_unscaled_gradients(gradients)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))


def plainly(keras, cases):
    """What Keras alone comes to, on one device, in a plain loop."""
    zoo = Zoo(keras, cases)

    @tf.function
    def step(x, y):
        for model, optimizer, case in zip(zoo.models, zoo.optimizers, cases.values()):
            train(model, optimizer, case, (x, y), tf.reduce_mean)

    for i in range(0, STEPS * BATCH, BATCH):
        step(X[i : i + BATCH], Y[i : i + BATCH])
    return zoo.values()


@pytest.fixture(scope="module")
def expected():
    return functools.cache(lambda keras: plainly(keras, cases(keras)))


@pytest.mark.parametrize("name", ["mirrored_x2", "mirrored_x4"])
def test_every_optimizer_and_option_equals_keras_on_one_device(name, keras, expected):
    with make_strategy(name).scope():
        zoo = Zoo(keras, cases(keras))
    with looplib.Controller(
        trainer=zoo, strategy=make_strategy(name), global_batch_size=BATCH, steps_per_loop=STEPS, writers=[]
    ) as controller:
        controller.train(-1)
    assert controller.global_step == STEPS
    wrong = {}
    for case, values in zoo.values().items():
        for found, wanted in zip(values, expected(keras)[case], strict=True):
            if not np.allclose(found, wanted, rtol=1e-4, atol=1e-5):
                wrong[case] = float(np.abs(found - wanted).max())
    assert not wrong
