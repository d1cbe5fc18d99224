"""The core without its plug-ins: with `looplib/extras` removed from disk, it trains on ids and resumes."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import looplib
from looplib.run.records import read_jsonl

PROGRAM = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]  # which has other folders
import keras, looplib, tensorflow as tf

class Line(looplib.GradientTrainer):
    def __init__(self):
        model = keras.Sequential([keras.layers.Input([1]), keras.layers.Dense(1)])
        super().__init__(model, keras.optimizers.SGD(0.1))

    def dataset(self, context):
        return context.indices(32).map(lambda ids: tf.cast(ids, tf.float32)[:, None] / 32)

    def loss_fn(self, x):
        return tf.reduce_sum((self.model(x) - 2 * x) ** 2, axis=1)

for steps in (10, 20):
    controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=8, steps_per_loop=5), trainer=Line(), model_dir=sys.argv[1]
    )
    controller.train(steps)
    print(controller.global_step, controller.restored_from)
    controller.close()
assert not [name for name in sys.modules if name.startswith("looplib.extras")]
"""


@pytest.mark.slow
def test_the_core_trains_and_resumes_without_its_plug_ins(tmp_path):
    copy = tmp_path / "copy" / "looplib"
    shutil.copytree(pathlib.Path(looplib.__file__).parent, copy, ignore=shutil.ignore_patterns("extras", "__pycache__"))
    for path in pathlib.Path(looplib.__file__).parents[1].glob("looplib.egg-info"):
        shutil.copytree(path, copy.parent / path.name)  # the plug-ins are registered all the same
    environment = {**os.environ, "PYTHONPATH": str(copy.parent)}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "run")],
        cwd=copy.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.strip().splitlines()[-2:]
    assert first == "10 None" and second.startswith("20 ") and second.endswith("ckpt-10"), result.stdout
    assert "these writers are not installed and are left out: console, tensorboard, media" in result.stderr
    assert [record["step"] for record in read_jsonl(str(tmp_path / "run" / "metrics.jsonl"))] == [5, 10, 15, 20]
