"""Batches that Python makes, beside `fit`: of a `PyDataset`, a loader as PyTorch's, examples by number, generators."""

import math

import flat_config
import keras as keras3
import numpy as np
import pytest
from conftest import make_strategy

import looplib

BATCH, EPOCHS = 8, 3
X = np.random.default_rng(0).normal(size=(36, 3))  # float64; the last of 5 batches has 4
Y = X.sum(axis=1, keepdims=True)
STEPS = math.ceil(len(X) / BATCH)


def batch(number):
    part = slice(number * BATCH, (number + 1) * BATCH)
    return X[part], Y[part]


def py_dataset(keras, **arguments):
    """Counts the batches that are read."""

    class Data(keras.utils.Sequence):
        def __init__(self):
            super().__init__(**arguments)
            self.read = []

        def __len__(self):
            return STEPS

        def __getitem__(self, number):
            self.read.append(number)
            return batch(number)

    return Data()


class Loader:
    """Has passes, lists as batches, and no items by number."""

    def __init__(self, random=None):
        self.passes, self.read, self.random = 0, 0, random

    def __len__(self):
        return STEPS

    def __iter__(self):
        self.passes += 1
        for number in range(STEPS) if self.random is None else self.random.permutation(STEPS):
            self.read += 1
            yield list(batch(number))


class Sampled(Loader):
    """Has another order in each epoch, which it is told."""

    @property
    def sampler(self):
        return self

    def set_epoch(self, epoch):
        self.random = np.random.default_rng(epoch)


class Examples:
    """A map-style data set, without a base class."""

    def __len__(self):
        return len(X)

    def __getitem__(self, number):
        return X[number], Y[number]


def generator():
    return (batch(number) for number in range(STEPS))


KINDS = {
    "PyDataset": py_dataset,
    "PyDataset in threads": lambda keras: py_dataset(keras, workers=4) if keras is keras3 else py_dataset(keras),
    "loader": lambda keras: Loader(),
    "examples": lambda keras: Examples(),
    "generator": lambda keras: generator,
}


def build(keras=keras3):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.5), "mse", metrics=["mae"])
    return model


def trained(x, keras=keras3, strategy="default", epochs=EPOCHS, held_out=None, **settings):
    """Returns the model, the reports of the training and the last metrics."""
    strategy, reports = make_strategy(strategy), []
    shuffle = settings.pop("shuffle", False)
    with strategy.scope():
        trainer = looplib.KerasTrainer(build(keras), x, shuffle=shuffle, validation_data=held_out)
    seen = lambda event: reports.append(event.metrics) if event.split == "train" else None
    evaluator = None if held_out is None else trainer.evaluator()
    settings = {"writers": [], "strategy": strategy, "global_batch_size": BATCH, "actions": [seen], **settings}
    with flat_config.controller(trainer=trainer, evaluator=evaluator, **settings) as controller:
        controller.train(epochs=epochs)
        evaluated = controller.evaluate() if evaluator else None
    return trainer.model, reports, evaluated


def fitted(x, y=None, keras=keras3, epochs=EPOCHS):
    model = build(keras)
    batch_size = {} if y is None else {"batch_size": BATCH}
    history = model.fit(x, y, **batch_size, epochs=epochs, shuffle=False, verbose=0).history
    return model, history


def assert_equal_weights(one, other, **tolerance):
    for ours, theirs in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, **{"rtol": 1e-5, "atol": 1e-6, **tolerance})


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("strategy", ["default", "mirrored_x2"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_trains_as_in_fit(kind, keras, strategy):
    fit, history = fitted(py_dataset(keras), keras=keras) if kind == "PyDataset" else fitted(X, Y, keras)
    model, reports, evaluated = trained(KINDS[kind](keras), keras, strategy, held_out=KINDS[kind](keras))
    assert_equal_weights(model, fit)
    np.testing.assert_allclose([report["loss"] for report in reports], history["loss"], rtol=1e-5)
    assert evaluated["eval"]["examples"] == len(X)
    expected = fit.evaluate(X, Y, verbose=0, return_dict=True)
    np.testing.assert_allclose(evaluated["eval"]["mae"], expected["mae"], rtol=1e-5)


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_within_an_epoch_is_bit_equal_to_an_uninterrupted_run(kind, tmp_path):
    whole, _, _ = trained(KINDS[kind](keras3), shuffle=True)
    trained(KINDS[kind](keras3), shuffle=True, epochs=1.4, model_dir=tmp_path)
    model, _, _ = trained(KINDS[kind](keras3), shuffle=True, model_dir=tmp_path)
    assert_equal_weights(model, whole, rtol=0, atol=0)


def test_a_resume_reads_no_batch_again_of_a_py_dataset_and_none_of_an_earlier_pass_of_a_loader(tmp_path):
    for name, make in {"numbered": lambda: py_dataset(keras3), "loader": Loader}.items():
        trained(make(), epochs=1.4, model_dir=tmp_path / name)
        data = make()
        trained(data, epochs=2, model_dir=tmp_path / name)
        if name == "numbered":  # after two to look at, one to build the variables, and then what was left
            assert data.read[-20:].index(2) > 0 and 0 not in data.read[4:7]
        else:
            assert data.passes <= 8
