"""Tables in parts: a warm start takes rows by their ids, whatever the parts; a resume names what differs."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import looplib
from looplib.commands import weights as command
from looplib.errors import MismatchError, WarmStartError

ROWS, DIM, EXAMPLES = 50, 4, 320
RNG = np.random.default_rng(3)
IDS = RNG.integers(0, 40, (EXAMPLES, 3))
TARGETS = RNG.normal(size=(EXAMPLES, 1)).astype("float32")
FAMILIES = {"keras": keras, "tf_keras": tf_keras}


class Two(looplib.GradientTrainer):
    """Trains two tables, of which Keras has named one."""

    def __init__(self, rows=ROWS, shards=4, dim=DIM, family="keras", name="items"):
        module = FAMILIES[family]
        ids = module.Input((3,), dtype="int64")
        self.tables = [
            looplib.ShardedEmbedding(rows, dim, shards=shards, combiner="mean", family=family, **settings)
            for settings in ({"name": name}, {})
        ]
        one, other = (table(ids) for table in self.tables)
        optimizer = module.optimizers.Adam(0.1)
        super().__init__(module.Model(ids, module.layers.Dense(1)(one + other)), optimizer)

    def dataset(self, context):
        return context.indices(EXAMPLES).map(lambda i: (tf.gather(IDS, i), tf.gather(TARGETS, i)))

    def loss_fn(self, inputs):
        return tf.reduce_sum(tf.square(self.model(inputs[0], training=True) - inputs[1]), axis=1)


def whole(layer):
    return np.concatenate([tf.convert_to_tensor(part).numpy() for part in layer.tables])


def controller(trainer, folder, **start):
    config = looplib.RunConfig(global_batch_size=32)
    return looplib.Controller(config, trainer=trainer, model_dir=str(folder), start=looplib.Start(**start))


def trained(folder, steps=5, **settings):
    trainer = Two(**settings)
    with controller(trainer, folder) as run:
        run.train(steps=steps)
    return trainer


def check_rows(found, initial, saved):
    for here, before, there in zip(found, initial, saved):
        count = min(len(here), len(there))
        np.testing.assert_array_equal(here[:count], there[:count])
        np.testing.assert_array_equal(here[count:], before[count:])
        assert not np.array_equal(before[:count], there[:count])


@pytest.mark.parametrize(("shards", "rows", "family"), [
    (2, ROWS, "keras"), (1, 70, "tf_keras"), (7, 70, "keras"), (3, 41, "keras"), (4, 70, "keras"),
])  # fmt: skip
def test_a_warm_start_takes_rows_by_their_ids(tmp_path, caplog, shards, rows, family):
    caplog.set_level("INFO", logger="absl")
    saved = [whole(table) for table in trained(tmp_path / "there", family=family).tables]
    trainer = Two(shards=shards, rows=rows, family=family)
    initial = [whole(table) for table in trainer.tables]
    with controller(trainer, tmp_path / "here", warm_start=str(tmp_path / "there")):
        check_rows([whole(table) for table in trainer.tables], initial, saved)
    taken = min(rows, ROWS)
    also = f"; {rows - ROWS} new rows keep their initial values" if rows > ROWS else ""
    also = f"; {ROWS - rows} have no place here" if rows < ROWS else also
    assert f"took {taken} rows of the table items/rows by their ids{also}" in caplog.text
    assert "not taken" not in caplog.text


@pytest.mark.parametrize("strategy", ["mirrored_x2"], indirect=True)
def test_replicas_take_rows_alike(strategy, tmp_path):
    saved = [whole(table) for table in trained(tmp_path / "there").tables]
    with strategy.scope():
        trainer = Two(shards=3, rows=70)
    initial = [whole(table) for table in trainer.tables]
    start, config = looplib.Start(warm_start=str(tmp_path / "there")), looplib.RunConfig(global_batch_size=32)
    looplib.Controller(config, trainer=trainer, strategy=strategy, model_dir=str(tmp_path / "here"), start=start)
    check_rows([whole(table) for table in trainer.tables], initial, saved)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_partial_restore_in_other_parts_continues_as_if_the_parts_were_the_same(tmp_path, family):
    keras.utils.set_random_seed(1)
    tf_keras.utils.set_random_seed(1)
    straight = trained(tmp_path / "straight", steps=8, family=family)
    keras.utils.set_random_seed(1)
    tf_keras.utils.set_random_seed(1)
    trained(tmp_path / "parts", steps=4, family=family)
    trainer = Two(shards=3, family=family)
    with controller(trainer, tmp_path / "parts", partial=True) as run:
        run.train(steps=8)
    for found, expected in zip(trainer.tables, straight.tables):
        np.testing.assert_allclose(whole(found), whole(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [{"shards": 2}, {"shards": 5, "rows": 60}, {"rows": 60}])
def test_a_resume_in_other_parts_says_so_and_what_to_do(tmp_path, settings):
    trained(tmp_path)
    differ = {"shards": (4, settings.get("shards", 4)), "rows": (ROWS, settings.get("rows", ROWS))}
    words = ", ".join(f"{name}={one} there and {two} here" for name, (one, two) in differ.items() if one != two)
    with pytest.raises(MismatchError, match=f"items has {words}.*--partial_restore.*--warm_start"):
        controller(Two(**settings), tmp_path).train(steps=6)


@pytest.mark.parametrize("shards", [4, 3])
@pytest.mark.parametrize("name", ["model.safetensors", "model.weights.h5", "model.keras", "saved_model"])
def test_files_of_an_export_are_taken_by_rows(tmp_path, name, shards):
    trainer = Two()
    with controller(trainer, tmp_path / "there") as run:
        run.train(steps=3)
        run.export(str(tmp_path / "export"), formats=("safetensors", "weights.h5"))
    saved = [whole(table) for table in trainer.tables]
    numbered = name.endswith((".h5", ".keras"))
    other = Two(shards=shards, rows=ROWS if numbered else 70)
    initial = [whole(table) for table in other.tables]
    if shards != 4 and numbered:  # what a number means cannot be told
        with pytest.raises(WarmStartError, match="have the numbers 0, 1, 2, 3, and those of the layer here 0, 1, 2"):
            looplib.warm_start({"model": other.model}, tmp_path / "export" / name)
        return
    looplib.warm_start({"model": other.model}, tmp_path / "export" / name)
    check_rows([whole(table) for table in other.tables], initial, saved)


def test_rules_rename_a_whole_table_and_take_that_of_a_layer_of_keras(tmp_path):
    trainer = trained(tmp_path / "there", name="old")
    rules = {"^old/": "items/", "^sharded_embedding/rows": None}
    other = Two(shards=3)
    initial = whole(other.tables[1])
    looplib.warm_start({"model": other.model}, looplib.WarmStart(str(tmp_path / "there"), rules))
    np.testing.assert_array_equal(whole(other.tables[0]), whole(trainer.tables[0]))
    np.testing.assert_array_equal(whole(other.tables[1]), initial)
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Embedding(60, DIM, name="table")])
    tf.train.Checkpoint(model=plain).write(str(tmp_path / "plain"))
    rules = {"^table/embeddings": "items/rows"}
    looplib.warm_start({"model": other.model}, looplib.WarmStart(str(tmp_path / "plain"), rules))
    np.testing.assert_array_equal(whole(other.tables[0]), plain.layers[0].get_weights()[0][:ROWS])


def test_rows_of_another_size_stay(tmp_path):
    trained(tmp_path / "there")
    trainer = Two(dim=3, shards=2)
    rules = {"^dense": None}
    with pytest.raises(WarmStartError, match="of another shape: items/rows"):
        looplib.warm_start({"model": trainer.model}, looplib.WarmStart(str(tmp_path / "there"), rules))


def test_other_variables_of_such_names_are_no_table(tmp_path):
    class Own(tf.Module):
        def __init__(self, rows):
            super().__init__()
            self.rows_0, self.rows_1 = tf.Variable(tf.ones([rows, 2])), tf.Variable(tf.ones([3, 2]))

    tf.train.Checkpoint(own=Own(3)).write(str(tmp_path / "own"))
    other = Own(3)
    other.rows_1.assign(tf.zeros([3, 2]))
    looplib.warm_start({"own": other}, tmp_path / "own")
    np.testing.assert_array_equal(other.rows_1, np.ones((3, 2)))


def test_the_command_lists_a_table_as_one(tmp_path, capsys):
    trained(tmp_path / "there", steps=1)
    trained(tmp_path / "here", steps=1, shards=2, rows=60)
    options = type("Options", (), {"file": str(tmp_path / "there"), "to": ""})
    assert command._weights(options) == 0
    assert re.search(r"items/rows +\(50, 4\) in 4 parts +float32\n", capsys.readouterr().out)
    options.to = str(tmp_path / "here")
    assert command._weights(options) == 0
    assert re.search(r"items/rows +\(50, 4\) in 4 parts +float32  items/rows\n", capsys.readouterr().out)
