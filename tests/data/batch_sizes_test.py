"""Training batches of another size than a step is told are noticed, where shapes do not say it beforehand too."""

import flat_config
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import make_strategy, more

import looplib
from looplib.errors import BatchSizeError

GLOBAL_BATCH = 8
X = np.random.RandomState(0).randn(96, 4).astype("float32")
ids = tf.data.Dataset.range


def dense(i):
    return tf.gather(X, i % 96)


class Line(looplib.Trainer):
    def __init__(self, make, element=dense, varies=False):
        self.make, self.element, self.batch_size_varies = make, element, varies
        self.model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(0.1)

    def dataset(self, context):
        return self.make(context.per_replica_batch_size).map(self.element)

    def step_fn(self, inputs):
        x = tf.nest.flatten(inputs)[-1]
        x = x.to_tensor(shape=[None, 4]) if isinstance(x, tf.RaggedTensor) else x
        x = tf.sparse.to_dense(x) if isinstance(x, tf.SparseTensor) else x
        x = tf.ensure_shape(x, [None, 4])
        with tf.GradientTape() as tape:
            losses = self.model(x, training=True)[:, 0] ** 2
            loss = self.global_mean(losses)
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": losses}


def train(trainer, strategy=None, steps=6, **settings):
    settings = {"steps_per_loop": 3, **settings}
    strategy = strategy or make_strategy("default")
    with flat_config.controller(
        trainer=trainer, strategy=strategy, global_batch_size=GLOBAL_BATCH, writers=[], **settings
    ) as controller:
        return controller.train(steps)


LARGE = lambda n: ids(960).repeat().batch(2 * n)
SMALL = lambda n: ids(960).repeat().batch(n - 1)


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("found", ["larger", "smaller"])
@pytest.mark.parametrize("name", ["default", "mirrored_x2", *more(["one_device"])])
@pytest.mark.parametrize("distribute", ["auto", "tf"])
def test_on_every_strategy(distribute, name, found):
    make = LARGE if found == "larger" else SMALL
    strategy = make_strategy(name)
    with strategy.scope():
        trainer = Line(make)
    replicas = strategy.num_replicas_in_sync
    size = GLOBAL_BATCH // replicas
    average = 2 * size if found == "larger" else size - 1
    expected = rf"Line.dataset made {found} batches than context.per_replica_batch_size, which is {size}: the first "
    expected += rf"{3 * replicas} have {average} examples on average"
    with pytest.raises(BatchSizeError, match=expected):
        train(trainer, strategy, distribute=distribute)


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("loop", ["graph", "xla", "eager"])
def test_in_every_engine(loop):
    with pytest.raises(BatchSizeError, match="16"):
        train(Line(LARGE), loop=loop)


def ragged(i):
    return tf.RaggedTensor.from_tensor(dense(i))


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("element", [
    lambda i: {"ids": i, "x": dense(i)}, ragged, lambda i: tf.sparse.from_dense(dense(i)), lambda i: (ragged(i), dense(i)),
])  # fmt: skip
def test_in_elements_of_every_kind(element):
    with pytest.raises(BatchSizeError, match="16"):
        train(Line(LARGE, element))


def test_one_larger_batch_among_smaller_ones_is_enough():
    make = lambda n: ids(n - 2).batch(n).concatenate(ids(n - 1).batch(n)).concatenate(ids(n + 1).batch(n + 1)).repeat()
    with pytest.raises(BatchSizeError, match="3.*7.33333"):
        train(Line(make))


def test_it_is_noticed_before_a_save(tmp_path):
    policy = looplib.CheckpointPolicy(every_steps=1)
    with pytest.raises(BatchSizeError, match="1.*16"):
        train(Line(LARGE), model_dir=str(tmp_path), checkpoints=policy, steps_per_loop=100)
    assert not list(tmp_path.glob("checkpoints/*.commit"))


# What is right.


@pytest.mark.slow(spread=1)
@pytest.mark.slow(pairs=True)
@pytest.mark.parametrize("make", [
    lambda n: ids(20 * n + 3).batch(n),  # ends with a smaller one
    lambda n: ids(n + n // 2).batch(n).repeat(),  # each second one is the last of its epoch
    lambda n: ids(3).batch(n),  # the only one
])  # fmt: skip
@pytest.mark.parametrize("name", ["default", "mirrored_x2"])
@pytest.mark.parametrize("distribute", ["auto", "tf"])
def test_the_last_batch_of_the_data_or_of_an_epoch_may_be_smaller(distribute, name, make):
    strategy = make_strategy(name)
    with strategy.scope():
        trainer = Line(make)
    if name == "mirrored_x2" and make(4).cardinality() == 1:
        pytest.skip("a step needs a batch for each replica")
    assert "batch_sizes" not in train(trainer, strategy, steps=12, steps_per_loop=1, distribute=distribute)


def test_epochs_smaller_than_a_batch_are_noticed():
    with pytest.raises(BatchSizeError, match="3.*5"):
        train(Line(lambda n: ids(5).batch(n).repeat()))


@pytest.mark.slow
def test_other_tensors_may_have_other_sizes():
    def boxes(i):
        return {"boxes": tf.repeat(dense(i), 3, axis=0), "x": dense(i)}

    train(Line(lambda n: ids(960).batch(n), boxes))


@pytest.mark.slow
def test_a_static_size_of_one_tensor_is_enough():
    train(
        Line(
            lambda n: ids(960).batch(n, drop_remainder=True),
            lambda i: {"some": tf.boolean_mask(i, i > 4), "x": dense(i)},
        )
    )


@pytest.mark.parametrize("kind", [tf.RaggedTensor, tf.SparseTensor])
def test_a_static_size_that_is_wrong_is_refused_before_the_first_step(kind):
    element = ragged if kind is tf.RaggedTensor else lambda i: tf.sparse.from_dense(dense(i))
    trainer = Line(lambda n: ids(960).batch(2 * n, drop_remainder=True), element)
    with pytest.raises(BatchSizeError, match="16"):
        looplib.Controller(looplib.RunConfig(global_batch_size=GLOBAL_BATCH), trainer=trainer)


@pytest.mark.slow
def test_sizes_that_vary_are_taken_as_they_are():
    assert set(train(Line(LARGE, varies=True))) == {"loss", "steps_per_second"}


@pytest.mark.slow
def test_where_no_metric_tells_the_size_the_input_does():
    class Total(Line):
        def step_fn(self, inputs):
            return {"loss": looplib.total(tf.reduce_sum(super().step_fn(inputs)["loss"]))}

    with pytest.raises(BatchSizeError, match="16"):
        train(Total(LARGE))
