"""Faults of single rows of a table: a gradient that is not finite, and ids that the table does not have."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import looplib
from looplib.errors import DivergenceError

ROWS, DIM, EXAMPLES, BATCH, BAD_STEP, STEPS = 40, 4, 320, 32, 6, 12
RANDOM = np.random.default_rng(5)
IDS, TARGETS = RANDOM.integers(0, ROWS, (EXAMPLES, 2)), RANDOM.normal(size=(EXAMPLES, 1)).astype("float32")
BAD_EXAMPLE = BAD_STEP * BATCH - 3  # of the last replica
BOTH = pytest.mark.parametrize("strategy", ["one_device", "mirrored_x2"], indirect=True)


class Rows(looplib.GradientTrainer):
    """A regression on rows, with factors of the gradient of one example's rows."""

    def __init__(self, factor=1.0, ids=IDS):
        inputs, self.ids = keras.Input((2,), dtype="int64"), ids
        uniform = keras.initializers.RandomUniform(seed=3)
        self.table = looplib.ShardedEmbedding(ROWS, DIM, shards=3, initializer=uniform)
        self.factors = np.ones(EXAMPLES, "float32")
        self.factors[(BAD_STEP - 1) * BATCH : BAD_STEP * BATCH] = 0.0 if factor == 0 else 1.0
        self.factors[BAD_EXAMPLE] = factor
        super().__init__(keras.Model(inputs, self.table(inputs)), keras.optimizers.Adagrad(0.1))

    def dataset(self, context):
        return context.indices(EXAMPLES, shuffle=False).map(
            lambda i: tuple(tf.gather(one, i) for one in (self.ids, TARGETS, self.factors))
        )

    def loss_fn(self, inputs):
        ids, targets, factors = inputs

        @tf.custom_gradient
        def scaled(rows):
            return rows, lambda upstream: upstream * factors[:, tf.newaxis, tf.newaxis]

        rows = scaled(self.model(ids, training=True))
        return tf.reduce_sum(tf.square(tf.reduce_mean(rows, axis=1) - targets), axis=1)


def trained(strategy, folder, policy, **settings):
    with strategy.scope():
        trainer = Rows(**settings)
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=BATCH, steps_per_loop=3), trainer=trainer, strategy=strategy,
        model_dir=str(folder), guards=looplib.Guards(non_finite=policy),
        checkpoints=looplib.CheckpointPolicy(every_steps=3, keep=(looplib.KeepLast(100),)),
    )  # fmt: skip
    try:
        controller.train(STEPS)
    finally:
        values = np.concatenate([tf.convert_to_tensor(part).numpy() for part in trainer.table.tables])
    return values, controller


def saved_rows(folder, step):
    reader = tf.train.load_checkpoint(str(folder / "checkpoints" / f"ckpt-{step}"))
    return np.concatenate([reader.get_tensor(f"table/rows_{n}/.ATTRIBUTES/VARIABLE_VALUE") for n in range(3)])


@BOTH
def test_a_gradient_of_one_row_that_is_not_finite_halts_before_it_is_saved(strategy, tmp_path):
    with pytest.raises(DivergenceError, match=f"step {BAD_STEP}"):
        trained(strategy, tmp_path, "halt", factor=np.nan)
    newest = tf.train.latest_checkpoint(str(tmp_path / "checkpoints"))
    assert newest.endswith(f"ckpt-{BAD_STEP - 3}") and np.isfinite(saved_rows(tmp_path, BAD_STEP - 3)).all()


@BOTH
def test_a_skipped_step_changes_no_row_and_no_slot(strategy, tmp_path):
    found, _ = trained(strategy, tmp_path / "skip", "skip", factor=np.nan)
    expected, _ = trained(strategy, tmp_path / "zero", "halt", factor=0.0)  # by which Adagrad changes nothing
    np.testing.assert_array_equal(found, expected)
    for step in (BAD_STEP, STEPS):
        np.testing.assert_array_equal(saved_rows(tmp_path / "skip", step), saved_rows(tmp_path / "zero", step))


@BOTH
def test_a_rollback_leaves_the_data_out_and_trains_on(strategy, tmp_path):
    found, _ = trained(strategy, tmp_path, "rollback", factor=np.nan)
    assert np.isfinite(found).all() and not np.array_equal(found, saved_rows(tmp_path, BAD_STEP))
    lines = (tmp_path / "run.json").read_text()
    assert '"rollbacks": 1' in lines


@BOTH
@pytest.mark.parametrize("wrong", [-1, ROWS])
def test_an_id_that_the_table_does_not_have_ends_the_training_and_names_it(strategy, tmp_path, wrong):
    ids = IDS.copy()
    ids[BAD_EXAMPLE, 1] = wrong
    words = rf"of {ROWS} rows does not have; expected 0 to {ROWS - 1}(.|\n)*{wrong}"
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        trained(strategy, tmp_path, "halt", ids=ids)
    assert np.isfinite(saved_rows(tmp_path, BAD_STEP - 3)).all()
