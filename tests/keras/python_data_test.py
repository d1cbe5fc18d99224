"""Batches that Python makes, beside `fit`: of a `PyDataset`, a loader as PyTorch's, examples by number, generators."""

import math

import flat_config
import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
from conftest import make_strategy, more

import looplib
from looplib.errors import BatchSizeError, DataError, DatasetError, SettingError

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


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["default", *more(["mirrored_x2"])])
@pytest.mark.parametrize("kind", ["PyDataset", *more([kind for kind in KINDS if kind != "PyDataset"])])
def test_each_kind_trains_as_in_fit(kind, keras, strategy):
    fit, history = fitted(py_dataset(keras), keras=keras) if kind == "PyDataset" else fitted(X, Y, keras)
    model, reports, evaluated = trained(KINDS[kind](keras), keras, strategy, held_out=KINDS[kind](keras))
    assert_equal_weights(model, fit)
    np.testing.assert_allclose([report["loss"] for report in reports], history["loss"], rtol=1e-5)
    assert evaluated["eval"]["examples"] == len(X)
    expected = fit.evaluate(X, Y, verbose=0, return_dict=True)
    np.testing.assert_allclose(evaluated["eval"]["mae"], expected["mae"], rtol=1e-5)


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("kind", [*KINDS, "loader with set_epoch"])
def test_a_resume_within_an_epoch_is_bit_equal_to_an_uninterrupted_run(kind, tmp_path):
    make = KINDS.get(kind, lambda keras: Sampled())
    whole, _, _ = trained(make(keras3), shuffle=True)
    trained(make(keras3), shuffle=True, epochs=1.4, model_dir=tmp_path)
    model, _, _ = trained(make(keras3), shuffle=True, model_dir=tmp_path)
    assert_equal_weights(model, whole, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind, read", [("PyDataset", 0), ("loader", 2)])
def test_a_resume_reads_no_batch_again_or_those_of_its_pass_alone(kind, read, tmp_path):
    trained(KINDS[kind](keras3), epochs=1.4, model_dir=tmp_path)
    data = KINDS[kind](keras3)
    trainer = looplib.KerasTrainer(build(), data, shuffle=False)
    data.read = 0 if read else []
    config = looplib.RunConfig(global_batch_size=BATCH)
    with looplib.Controller(config, trainer=trainer, writers=[], model_dir=tmp_path) as controller:
        controller.train(STEPS + 3)  # one step, after two of the second pass
    if read:
        assert read < data.read < STEPS + read
    else:
        assert data.read[0] == 2


def built(data):
    """Builds the controller of a trainer with some data, which reads the first batches."""
    looplib.Controller(looplib.RunConfig(global_batch_size=BATCH), trainer=looplib.KerasTrainer(build(), data)).close()


def test_a_loader_that_shuffles_without_being_told_the_epoch_is_said(caplog):
    built(Sampled())
    assert "begin with different batches" not in caplog.text
    built(Loader(np.random.default_rng(0)))
    assert "begin with different batches" in caplog.text


def test_nan_at_the_begin_of_a_pass_is_itself_and_no_other_number(caplog):
    class Begins(Loader):
        def __init__(self, *firsts):
            super().__init__()
            self.firsts = firsts

        def __iter__(self):
            self.passes += 1
            first = self.firsts[self.passes % len(self.firsts)]
            for number in range(STEPS):
                x, y = batch(number)
                yield np.where(np.arange(x.size).reshape(x.shape) == 0, first, x).astype("float32"), y

    built(Begins(np.nan))
    assert "begin with different batches" not in caplog.text
    built(Begins(np.nan, 1.0))
    assert "begin with different batches" in caplog.text


class Uneven(Loader):
    """Has passes of another length than its `len()` from the third on, which are those of a training."""

    def __init__(self, extra):
        super().__init__()
        self.extra = extra

    def __iter__(self):
        self.passes += 1
        return map(batch, [*range(STEPS), 0][: STEPS + self.extra * (self.passes > 3)])


def test_a_loader_whose_passes_have_another_length_than_its_len_is_said(caplog):
    model, _, _ = trained(Uneven(1))
    assert_equal_weights(model, fitted(X, Y)[0])
    (said,) = [one.message for one in caplog.records if "has more" in one.message]
    assert f"Uneven has {STEPS} batches by its len()" in said
    with pytest.raises(DataError, match=f"Uneven has {STEPS} batches.*ended before the batch {STEPS}"):
        trained(Uneven(-1))


class Listed(Examples):
    """Gives what `form` makes of an example, such as lists."""

    def __init__(self, form):
        self.form = form

    def __getitem__(self, number):
        return self.form(*super().__getitem__(number))


@pytest.mark.slow
def test_examples_in_lists_of_arrays_are_structures_and_lists_of_numbers_are_refused():
    model, _, _ = trained(Listed(lambda x, y: [x, [y]]))
    assert_equal_weights(model, fitted(X, Y)[0])
    for form in (lambda x, y: [list(x), y], lambda x, y: (x, list(y)), lambda x, y: ({"x": list(x)}, y)):
        with pytest.raises(DatasetError, match=r"Listed.__getitem__ returns a list of numbers, \[.*numpy.asarray"):
            looplib.KerasTrainer(build(), Listed(form))


@pytest.mark.parametrize(
    "example, said",
    [
        (lambda number: (X[number], None), "None"),
        (lambda number: ({"a": X[number], "b": None}, 1.0), "b: None"),
        (lambda number: (np.zeros(number % 3 + 1), 1.0), "several lengths"),
        (lambda number: (X[number], 1.0) if number % 2 else (X[number],), "make no batch"),
        (lambda number: (object(), 1.0), "make no batch"),
    ],
)
def test_examples_that_make_no_batch_are_refused(example, said):
    class Odd:
        def __len__(self):
            return len(X)

        def __getitem__(self, number):
            return example(number)

    with pytest.raises(DatasetError, match=said):
        looplib.KerasTrainer(build(), Odd())


@pytest.mark.slow
def test_a_resume_of_a_generator_says_that_it_reads_all_again(tmp_path, caplog):
    trained(generator, epochs=1.4, model_dir=tmp_path)
    trained(generator, epochs=2, model_dir=tmp_path)
    assert "is read again and skipped" in caplog.text


class Own(looplib.GradientTrainer):
    batches = "global"

    def __init__(self, data):
        super().__init__(build(), keras3.optimizers.SGD(0.05))
        self.data = data

    def dataset(self, context):
        return looplib.python_batches(context, self.data)

    def loss_fn(self, inputs):
        return tf.reduce_sum((self.model(inputs[0], training=True) - inputs[1]) ** 2, axis=1)


@pytest.mark.slow
def test_an_own_trainer_of_global_batches_takes_a_py_dataset_and_resumes_exactly_on_any_replicas(tmp_path):
    def run(strategy, steps, **settings):
        strategy = make_strategy(strategy)
        with strategy.scope():
            trainer = Own(py_dataset(keras3))
        config = looplib.RunConfig(global_batch_size=BATCH)
        with looplib.Controller(config, trainer=trainer, strategy=strategy, writers=[], **settings) as controller:
            controller.train(steps)
        return trainer.model

    whole = run("default", 12)
    run("default", 7, model_dir=tmp_path)
    assert_equal_weights(run("default", 12, model_dir=tmp_path), whole, rtol=0, atol=0)
    assert_equal_weights(run("mirrored_x2", 12), whole)


def with_hook(keras):
    data = py_dataset(keras)
    return type("Shuffled", (type(data),), {"on_epoch_end": print})()


REFUSED = {
    "a generator": (generator, "function that makes it"),
    "a hook": (lambda: with_hook(keras3), "on_epoch_end.*leave out"),
    "processes": (lambda: py_dataset(keras3, use_multiprocessing=True), "use_multiprocessing.*workers=8"),
    "no batch": (
        lambda: type("None", (Loader,), {"__len__": lambda self: 0, "__iter__": lambda self: iter(())})(),
        "no",
    ),
    "single examples": (lambda: lambda: iter([1.0, 2.0]), "single examples"),
    "structures": (lambda: lambda: iter([batch(0), {"x": X}]), "different structures"),
    "types": (lambda: lambda: iter([batch(0), (X.astype(int), Y)]), "types"),
    "a list": (lambda: lambda: [1, 2], "generator of batches"),
    "a list of batches": (lambda: [batch(0), batch(1)], "list of tuples as x.*generator of batches"),
    "no length": (lambda: type("Endless", (), {"__iter__": lambda self: generator()})(), "Endless.*no __len__"),
    "no example": (lambda: type("Empty", (Examples,), {"__len__": lambda self: 0})(), "Empty has no example"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_batches_is_refused_with_what_to_use(case):
    make, said = REFUSED[case]
    with pytest.raises(DatasetError, match=said):
        looplib.KerasTrainer(build(), make())


@pytest.mark.parametrize("data", [[(X, Y)], [batch(0), batch(1)], (X, Y, Y, Y)])
def test_validation_data_of_another_form_is_refused(data):
    with pytest.raises(DatasetError, match=r"expected \(x, y\), \(x, y, sample_weight\), or a data set"):
        looplib.KerasTrainer(build(), X, Y, validation_data=data).evaluator()


@pytest.mark.parametrize(
    "name, said",
    [
        ("phases", "GradientTrainer"),
        ("workers", "PyDataset"),
        ("validation_steps", "eval_steps"),
        ("epochs", "controller.train"),
        ("batch_size", "global_batch_size"),
        ("x_", "differs from Keras"),
    ],
)
def test_an_argument_of_fit_or_of_another_trainer_is_refused_with_its_place(name, said):
    with pytest.raises(SettingError, match=f"KerasTrainer got {name}=3.*{said}"):
        looplib.KerasTrainer(build(), X, Y, **{name: 3})


def test_a_py_dataset_says_its_batches_by_num_batches():
    class Data(keras3.utils.PyDataset):
        num_batches = 3

        def __len__(self):
            return len(X)  # examples

        def __getitem__(self, number):
            return batch(number)

    fit, model = build(), build()
    fit.fit(Data(), epochs=2, shuffle=False, verbose=0)
    trainer = looplib.KerasTrainer(model, Data(), shuffle=False)
    config = looplib.RunConfig(global_batch_size=BATCH)
    with looplib.Controller(config, trainer=trainer, writers=[]) as controller:
        controller.train(epochs=2)
        assert controller.global_step == 6
    assert_equal_weights(model, fit)
    Data.num_batches = None
    with pytest.raises(DatasetError, match="Data has no batch, or no end"):
        looplib.KerasTrainer(build(), Data())


@pytest.mark.parametrize("make", [Loader, lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)])
def test_batches_of_another_size_are_refused_before_the_first_step_unless_they_vary_on_purpose(make):
    trainer, config = looplib.KerasTrainer(build(), make()), looplib.RunConfig(global_batch_size=2 * BATCH)
    with pytest.raises(BatchSizeError, match=f"has {BATCH} examples.*global_batch_size={BATCH}.*batch_size_varies"):
        looplib.Controller(config, trainer=trainer, writers=[])
    trainer.batch_size_varies = True
    with looplib.Controller(config, trainer=trainer, writers=[]) as controller:
        controller.train(epochs=1)
        assert controller.global_step == STEPS


@pytest.mark.slow
def test_another_batch_size_and_batches_of_replicas_are_refused(tmp_path):
    trained(py_dataset(keras3), epochs=1, model_dir=tmp_path)
    with pytest.raises(BatchSizeError, match="PyDataset|Data makes"):
        trained(py_dataset(keras3), model_dir=tmp_path, global_batch_size=2 * BATCH)
    trainer = Own(Loader())
    trainer.batches = "per_replica"
    with pytest.raises(DatasetError, match='batches = "global"'):
        looplib.Controller(looplib.RunConfig(global_batch_size=BATCH), trainer=trainer, writers=[])
