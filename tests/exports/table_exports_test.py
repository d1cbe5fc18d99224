"""Exports of tables in parts: read without looplib, and refused where the memory cannot hold them."""

import json
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import looplib
from looplib.errors import ExportError
from looplib.exports import parts

IDS = np.random.default_rng(0).integers(0, 50, (64, 3))


class Mean(looplib.GradientTrainer):
    def __init__(self, shards, combiner):
        ids = keras.Input((3,), dtype="int64", name="ids")
        super().__init__(
            keras.Model(ids, looplib.ShardedEmbedding(50, 4, shards=shards, combiner=combiner)(ids)),
            keras.optimizers.SGD(0.5),
        )

    def dataset(self, context):
        return context.indices(64).map(lambda i: tf.gather(IDS, i))

    def loss_fn(self, ids):
        return tf.reduce_mean(tf.square(tf.reshape(self.model(ids, training=True), [tf.shape(ids)[0], -1]) - 1), axis=1)


def exported(folder, shards, combiner="mean", **settings):
    trainer = Mean(shards, combiner)
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=32), trainer=trainer, model_dir=str(folder / "run")
    )
    controller.train(steps=2)
    return trainer, controller.export(str(folder / "export"), **settings)


READER = """
import sys
sys.modules["looplib"] = None  # whoever imports it fails
import numpy as np, tensorflow as tf
loaded = tf.saved_model.load(sys.argv[1] + "/saved_model")
np.save(sys.argv[2], loaded.serve(np.load(sys.argv[3])))
names = [name for name, _ in tf.train.list_variables(sys.argv[1] + "/saved_model/variables/variables")]
print(sum(name.startswith("variables/") for name in names))
"""


@pytest.mark.parametrize("shards", [1, 3])
def test_an_export_of_parts_is_read_without_looplib(tmp_path, shards):
    trainer, path = exported(tmp_path, shards)
    np.save(tmp_path / "ids.npy", IDS)
    command = [sys.executable, "-c", READER, path, str(tmp_path / "found.npy"), str(tmp_path / "ids.npy")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    np.testing.assert_array_equal(np.load(tmp_path / "found.npy"), trainer.model(IDS))
    assert int(done.stdout) == shards  # each part is a tensor of its own


def test_a_table_that_the_memory_cannot_hold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_free_memory", lambda: 700.0)
    with pytest.raises(
        ExportError, match="tables of embeddings have 800 B, and this process can take 700 B more.*--mode=export"
    ):
        exported(tmp_path, 3)
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize(("shards", "combiner"), [(1, None), (1, "mean"), (3, None)])
def test_tflite_has_a_table_of_one_part_or_says_what_to_do(tmp_path, shards, combiner):
    trainer, path = exported(tmp_path, shards, combiner=combiner, formats=("tflite", "int8"))
    left_out = json.loads((pathlib.Path(path) / "export.json").read_text())["left_out"]
    if shards == 1:
        assert left_out == {}
        return
    assert left_out.keys() == {"model.tflite", "model.int8.tflite"}
    assert all("export a model with shards=1" in reason for reason in left_out.values())
