"""`ReplicaAgreement`: one changed bit in one copy of a variable is found, named and undone; healthy runs are silent."""

import json
import logging
import re

import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy

import looplib
from benchmarks.corruptions import flip_bit
from looplib.actions.replica_agreement import compared_variables
from looplib.binary.flag_groups import IntegrityFlags
from looplib.errors import ActionError, CorruptionError, FlagError

EVERY = 4
OFTEN = looplib.CheckpointPolicy(every_steps=2, keep=looplib.KeepLast(1000), in_background=False)
X = np.random.default_rng(0).normal(size=(64, 5)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
OPTIMIZERS = {
    "adam": lambda optimizers: optimizers.Adam(0.01),
    "momentum": lambda optimizers: optimizers.SGD(0.01, momentum=0.9),
    "lion": lambda optimizers: optimizers.Lion(0.001),
    "adafactor": lambda optimizers: optimizers.Adafactor(0.01),
    "averaging": lambda optimizers: optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=3, clipnorm=0.5),
    "accumulating": lambda optimizers: optimizers.SGD(0.01, momentum=0.9, gradient_accumulation_steps=3),
}


class Net(looplib.GradientTrainer):
    """A network with everything that has a copy on each replica."""

    def __init__(self, keras=keras3, optimizer="adam", dtype="float32", **settings):
        layers = keras.layers
        frozen = layers.Dense(4, name="frozen", dtype=dtype)
        frozen.trainable = False
        model = keras.Sequential([
            layers.InputLayer((5,)), frozen, layers.BatchNormalization(dtype=dtype), layers.Dropout(0.2),
            layers.Dense(1, name="last", dtype=dtype), layers.Activation("linear", dtype="float32"),
        ])  # fmt: skip
        super().__init__(model, OPTIMIZERS[optimizer](keras.optimizers), **{"average_decay": 0.9, **settings})
        self.count = tf.Variable(7, trainable=False, name="count")
        self.big = tf.Variable([2**40, 1], trainable=False, name="big", dtype=tf.int64)
        self.flag = tf.Variable(True, trainable=False, name="flag")
        self.wave = tf.Variable([1 + 2j], trainable=False, name="wave")
        self.half = tf.Variable(tf.zeros([3], tf.bfloat16), trainable=False, name="half")
        self.nothing = tf.Variable(tf.zeros([0, 3]), trainable=False, name="nothing")

    def dataset(self, context):
        return context.indices(len(X)).map(lambda i: (tf.gather(X, i), tf.gather(Y, i)))

    def loss_fn(self, inputs):
        return tf.square(self.model(inputs[0], training=True) - inputs[1])[:, 0]


def made(kind, name="mirrored_x2", **arguments):
    with make_strategy(name).scope():
        return kind(**arguments)


def named(controller, name):
    """The variable of that name, among those that are compared."""
    found = compared_variables(controller.loops["train"])
    all_named = [*found.updated_alike, *found.not_updated]
    averages = name.startswith("average")
    (variable,) = [one for own, one in all_named if name in own and own.startswith("average") == averages][:1] or [None]
    assert variable is not None, [own for own, _ in all_named]
    return variable


def altering(name, step, replica=1, bit=None):
    """An action that changes one bit of one copy, once."""
    done = []

    def alter(event):
        if event.step == step and not done:
            variable = named(event.controller, name)
            part = variable.distribute_strategy.experimental_local_results(variable)[replica]
            flip_bit(part, bit=(20 if part.dtype == tf.float32 else 0) if bit is None else bit)
            done.append(step)

    return alter


def run(trainer, steps, actions, name="mirrored_x2", **settings):
    with toy.controller(make_strategy(name), trainer, actions=actions, **settings) as controller:
        controller.train(steps)
        return controller


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("optimizer, name", [
    ("adam", "last/kernel"), ("adam", "last/bias"), ("adam", "frozen/kernel"), ("adam", "kernel_momentum"), ("adam", "kernel_velocity"),
    ("momentum", "iteration"), ("adam", "average/"), ("adam", "count"), ("adam", "big"), ("adam", "flag"), ("adam", "wave"),
    ("adam", "half"), ("momentum", "momentum"), ("lion", "momentum"), ("float16", "steps_since_overflow"), ("averaging", "kernel_average"),
])  # fmt: skip
def test_one_bit_of_one_copy_is_found_at_the_next_comparison_and_named(optimizer, name):
    # The copies of a count of updates are written from the first replica in each step.
    agreement = looplib.ReplicaAgreement(EVERY)
    keras3.utils.set_random_seed(0)  # an overflow would set the copies of its count equal again
    settings = {"dtype": "mixed_float16"} if optimizer == "float16" else {"optimizer": optimizer}
    settings |= {} if name == "average/" else {"average_decay": None}
    with pytest.raises(CorruptionError) as caught:
        run(made(Net, **settings), 20, [altering(name, 2 * EVERY if name == "iteration" else EVERY + 1), agreement])
    said = str(caught.value)
    assert f"the replicas differ at step {2 * EVERY}, and agreed at step {EVERY}: " in said, said
    assert name.rstrip("/") in said and "replica 0 (worker 0) and replica 1 (worker 0), and which of them" in said, said
    assert "--check_replicas=0" in said and "--non_finite=rollback" in said
    assert agreement.passed == {"checks": 2, "last_step": EVERY}  # the first is that of the start


@pytest.mark.slow
@pytest.mark.parametrize("replica", [0, 2, 3])
def test_of_four_replicas_the_one_in_the_minority_is_named(replica):
    alter = altering("last/kernel", 5, replica)
    with pytest.raises(
        CorruptionError, match=rf"last/kernel.* differ on replica {replica} \(worker 0\) from the other 3"
    ):
        run(made(Net, "mirrored_x4"), 20, [alter, looplib.ReplicaAgreement(EVERY)], "mirrored_x4")


@pytest.mark.slow
def test_two_replicas_of_four_that_changed_otherwise_are_both_named():
    alter = [altering("last/kernel", 5, 1), altering("count", 5, 3)]
    with pytest.raises(CorruptionError) as caught:
        run(made(Net, "mirrored_x4"), 20, [*alter, looplib.ReplicaAgreement(EVERY)], "mirrored_x4")
    assert "on replica 1 (worker 0)" in str(caught.value) and "count:0 differs on replica 3" in str(caught.value)


# Healthy runs.


class Gan(looplib.Trainer):
    """Two models and two optimizers."""

    def __init__(self):
        layers = keras3.layers
        self.generator = keras3.Sequential([layers.Input((5,)), layers.Dense(4, "relu"), layers.Dense(1)])
        self.critic = keras3.Sequential(
            [layers.Input((1,)), layers.Dense(4, "relu"), layers.BatchNormalization(), layers.Dense(1)]
        )
        self.g, self.d = keras3.optimizers.Adam(0.01), keras3.optimizers.SGD(0.01, momentum=0.5)
        self.g.build(self.generator.trainable_variables)
        self.d.build(self.critic.trainable_variables)

    dataset = Net.dataset

    def step_fn(self, inputs):
        noise, real = inputs
        with tf.GradientTape(persistent=True) as tape:
            fake = self.generator(noise, training=True)
            g = tf.nn.softplus(-self.critic(fake, training=True))[:, 0]
            d = (
                tf.nn.softplus(self.critic(fake, training=True))[:, 0]
                + tf.nn.softplus(-self.critic(real, training=True))[:, 0]
            )
            losses = self.global_mean(g), self.global_mean(d)
        for optimizer, model, loss in zip((self.g, self.d), (self.generator, self.critic), losses):
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": g, "critic": d}


class Scaled(looplib.Trainer):
    """An optimizer that scales the loss."""

    def __init__(self):
        self.model = keras3.Sequential([keras3.Input((5,)), keras3.layers.Dense(1)])
        self.optimizer = keras3.optimizers.LossScaleOptimizer(keras3.optimizers.Adam(0.01), dynamic_growth_steps=3)
        self.optimizer.build(self.model.trainable_variables)

    dataset = Net.dataset

    def step_fn(self, inputs):
        with tf.GradientTape() as tape:
            losses = tf.square(self.model(inputs[0]) - inputs[1])[:, 0]
            loss = self.optimizer.scale_loss(self.global_mean(losses))
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": losses}


class Recurrent(looplib.GradientTrainer):
    """A recurrent layer, and sparse gradients."""

    def __init__(self):
        import tf_keras

        layers = tf_keras.layers
        model = tf_keras.Sequential([
            layers.InputLayer((5,), dtype="int64"), layers.Embedding(8, 3), layers.GRU(3), layers.Dense(1),
        ])  # fmt: skip
        super().__init__(model, tf_keras.optimizers.Adam(0.01))

    def dataset(self, context):
        return context.indices(len(X)).map(lambda i: (tf.cast(tf.gather(X, i) * 2 + 4, tf.int64) % 8, tf.gather(Y, i)))

    loss_fn = Net.loss_fn


def compiled(keras):
    model = keras.Sequential(
        [
            keras.layers.InputLayer((5,)),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.RMSprop(0.01), "mse", metrics=["mae"])
    return looplib.KerasTrainer(model, X, Y)


@pytest.mark.slow
@pytest.mark.parametrize("kind, arguments", [
    *[(Net, {"optimizer": name}) for name in OPTIMIZERS if name != "averaging"],
    (Net, {"optimizer": "averaging", "average_decay": None}), (Net, {"clip_global_norm": 0.1, "micro_batches": 2}),
    (Net, {"dtype": "mixed_float16"}), (Scaled, {}), (Net, {"dtype": "mixed_bfloat16"}),
    (Net, {"family": "tf_keras"}), (Net, {"family": "tf_keras", "optimizer": "momentum", "dtype": "mixed_float16"}),
    (Gan, {}), (Recurrent, {}), (compiled, {"family": "keras"}), (compiled, {"family": "tf_keras"}), (toy.Regression, {}),
])  # fmt: skip
def test_healthy_runs_are_silent(kind, arguments, tmp_path):
    arguments = dict(arguments)
    if (family := arguments.pop("family", None)) is not None:
        arguments["keras"] = pytest.importorskip(family)
    agreement = looplib.ReplicaAgreement(1)
    run(made(kind, **arguments), 20, [agreement], model_dir=tmp_path, checkpoints=OFTEN)
    assert agreement.passed == {"checks": 21, "last_step": 20}
    (start,) = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert start["replica_checks"] == [{"every": 1, "passed": {"checks": 21, "last_step": 20}}]


@pytest.mark.slow
@pytest.mark.parametrize("keras", ["keras", "tf_keras"])
def test_statistics_that_were_frozen_after_they_came_to_differ_are_left_out_with_a_line(keras, caplog):
    """Fine-tuning with batch normalization frozen, in the process that trained it."""
    keras = pytest.importorskip(keras)

    class Tuned(looplib.GradientTrainer):
        dataset, loss_fn = Net.dataset, Net.loss_fn

    trainer = made(Net, keras=keras)
    run(trainer, 4, [])
    trainer.model.layers[1].trainable = False
    agreement = looplib.ReplicaAgreement(1)
    with caplog.at_level(logging.INFO, logger="absl"):
        run(made(lambda: Tuned(trainer.model, keras.optimizers.SGD(0.01))), 4, [agreement])
    assert agreement.passed["checks"] == 5
    if keras is keras3:  # those of tf_keras are ON_READ, which are never compared
        assert "not in those that a step may update from its own data: " in caplog.text


@pytest.mark.slow
def test_one_replica_compares_nothing():
    agreement = looplib.ReplicaAgreement()
    run(made(Net, "default"), 4, [agreement], "default")
    assert agreement.passed == {"checks": 0, "last_step": None}


@pytest.mark.slow
def test_where_every_copy_is_nan_the_bits_of_nan_do_not_matter():
    def spoil(event):
        if event.step == 5:
            variable = named(event.controller, "last/kernel")
            for number, part in enumerate(variable.distribute_strategy.experimental_local_results(variable)):
                part.assign(np.full(part.shape, np.uint32(0x7FC00000 + number)).view(np.float32))

    agreement = looplib.ReplicaAgreement(EVERY)
    guards = looplib.Guards(non_finite="off")
    run(made(Net, average_decay=None), 6, [spoil, agreement], guards=guards)
    assert agreement.passed["last_step"] == 6


@pytest.mark.slow
def test_nan_in_every_copy_hides_no_other_difference():
    def spoil(event):
        if event.step == 5:
            variable = named(event.controller, "last/kernel")
            for number, part in enumerate(variable.distribute_strategy.experimental_local_results(variable)):
                part.assign([[np.nan], *part.numpy()[1:-1], [number]])

    with pytest.raises(CorruptionError, match="last/kernel"):
        run(made(Net, average_decay=None), 5, [spoil, looplib.ReplicaAgreement(EVERY)], guards=looplib.Guards("off"))


# What a difference leads to.


class Piped(Net):
    """The data is an ordinary pipeline, whose position is the state of its iterator."""

    def dataset(self, context):
        data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(64, seed=context.seed).repeat()
        return data.batch(context.per_replica_batch_size, drop_remainder=True)


def state(controller):
    found = compared_variables(controller.loops["train"])
    return {
        re.sub(r"_\d+", "", name): [
            part.numpy() for part in variable.distribute_strategy.experimental_local_results(variable)
        ]
        for name, variable in found.updated_alike
    }


def check_equal(one, other):
    assert one.keys() == other.keys() and len(one) > 8
    for name, parts in one.items():
        for part, expected in zip(parts, other[name], strict=True):
            np.testing.assert_array_equal(part, expected, err_msg=name)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kind, interval", [(Net, 2), (Net, 3), (Piped, 2), (Piped, 3)])
def test_a_rollback_repeats_the_data_and_ends_with_the_weights_of_an_uninterrupted_run(
    kind, interval, tmp_path, caplog
):
    keras3.utils.set_random_seed(1)
    whole = state(run(made(kind), 12, [], model_dir=tmp_path / "whole"))
    keras3.utils.set_random_seed(1)
    policy = looplib.CheckpointPolicy(every_steps=interval, in_background=False)
    controller = run(
        made(kind), 12, [altering("last/kernel", 7), looplib.ReplicaAgreement(EVERY)], model_dir=tmp_path / "run",
        guards=looplib.Guards(non_finite="rollback"), checkpoints=policy, writers=None,
    )  # fmt: skip
    target = 6
    assert controller.rollbacks == 1
    assert f"rolling back to step {target} and continuing with the data after step {target}" in caplog.text
    check_equal(state(controller), whole)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 13))


@pytest.mark.slow
def test_a_halted_run_continues_from_the_last_agreement_and_ends_as_an_uninterrupted_one(tmp_path):
    keras3.utils.set_random_seed(1)
    whole = state(run(made(Net), 12, [], model_dir=tmp_path / "whole"))
    keras3.utils.set_random_seed(1)
    settings = dict(model_dir=tmp_path / "run", checkpoints=OFTEN)
    with pytest.raises(CorruptionError, match=r"differ at step 8, .*ckpt-6, is good"):
        run(made(Net), 12, [altering("count", 7), looplib.ReplicaAgreement(EVERY)], **settings)
    assert looplib.list_checkpoints(tmp_path / "run")[0].step == 6
    controller = run(made(Net), 12, [looplib.ReplicaAgreement(EVERY)], **settings)
    assert controller.restored_from.endswith("ckpt-6")
    check_equal(state(controller), whole)


def stopping(step):
    return lambda event: event.controller.stop() if event.step == step else None


@pytest.mark.slow
@pytest.mark.parametrize("how", ["end", "stop", "interval", "no directory"])
def test_no_checkpoint_hides_a_difference(how, tmp_path):
    """The first replica's values are saved, and a run that restores them would have them everywhere."""
    settings = {} if how == "no directory" else {"model_dir": tmp_path}
    settings |= {"checkpoints": looplib.CheckpointPolicy(every_steps=3 if how == "interval" else 100)}
    actions = [
        altering("flag", 5),
        looplib.ReplicaAgreement(1000),
        *([stopping(6)] if how in ("stop", "no directory") else []),
    ]
    with pytest.raises(CorruptionError, match="differ at step 6, and agreed at step"):
        run(made(Net), 12 if how != "end" else 6, actions, **settings)
    if how != "no directory":
        assert all(found.step < 5 for found in looplib.list_checkpoints(tmp_path))


# What is refused.


def test_comparisons_between_reports_are_refused():
    with pytest.raises(ActionError, match=r"every 5 steps, and a report comes every 10.*--check_replicas"):
        run(made(Net), 20, [looplib.ReplicaAgreement(5)], steps_per_loop=10)
    agreement = looplib.ReplicaAgreement()  # as rare as the reports
    run(made(Net), 20, [agreement], steps_per_loop=10)
    assert agreement.passed == {"checks": 2, "last_step": 20}
    values = {"mode": "train", "steps_per_loop": 10}
    with pytest.raises(FlagError, match="--check_replicas is 5, and --steps_per_loop is 10"):
        IntegrityFlags().check({**values, "check_replicas": 5})
    with pytest.raises(FlagError, match="--check_replicas is for trainings, and --mode=eval"):
        IntegrityFlags().check({**values, "check_replicas": 50, "mode": "eval"})
    for every, count in ((None, 1), (0, 0), (50, 1)):
        IntegrityFlags().check({**values, "check_replicas": every})
        assert len(IntegrityFlags().actions({**values, "check_replicas": every})) == count


@pytest.mark.slow
def test_an_eager_run_compares_what_optimizers_own():
    agreement = looplib.ReplicaAgreement(1)
    with pytest.raises(CorruptionError, match="last/kernel"):
        run(made(Net), 4, [altering("last/kernel", 2), agreement], loop="eager")
    assert agreement.passed["last_step"] == 1
