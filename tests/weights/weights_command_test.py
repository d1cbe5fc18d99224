"""`python -m looplib weights`: what is in a file, beside what a model wants."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from rules_test import RULES, bert, encoder
from written import by_path, filled, write_safetensors

import looplib
from looplib.__main__ import main as cli


class Trainer(looplib.GradientTrainer):
    def __init__(self, model):
        super().__init__(model, keras.optimizers.Adam(0.0))

    def dataset(self, context):
        width = self.model.inputs[0].shape[1]
        return context.resident((np.zeros((4, width), self.model.inputs[0].dtype),))

    def loss_fn(self, inputs):
        return tf.reduce_sum(tf.reshape(self.model(inputs[0]), [4, -1]), 1)


def run_of(model, folder):
    config = looplib.RunConfig(global_batch_size=4)
    with looplib.Controller(config, trainer=Trainer(model), model_dir=folder) as controller:
        controller.train(1)
    return str(folder)


def small(*names):
    return keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(6 - n, name=x) for n, x in enumerate(names))])


def rows(text):
    """The printed table: {name: the rest of its line}."""
    return dict(line.split(None, 1) for line in text.splitlines() if " " in line)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("how", ["saved_model", "keras", "run", "checkpoint", "safetensors", "weights.h5"])
def test_it_lists_names_shapes_and_types_of_each_format(how, tmp_path, capsys):
    model, path = filled(small("encoder", "head")), str(tmp_path / f"w.{how}")
    if how == "safetensors":
        write_safetensors(path, by_path(model))
    elif how == "run":
        run_of(model, path)
    elif how == "saved_model":
        tf.saved_model.save(model, path)
    elif how == "checkpoint":
        path = tf.train.Checkpoint(model=model).save(path)
    else:
        (model.save if how == "keras" else model.save_weights)(path)
    assert cli(["weights", path]) == 0
    found = rows(capsys.readouterr().out)
    kernel = "encoder/0" if how in ("weights.h5", "keras") else "encoder/kernel"
    assert "(4, 6)" in found[kernel] and "float32" in found[kernel]
    assert found["4"].startswith("values, 260 B")  # 24 + 6 + 30 + 5 numbers


def test_it_says_what_a_run_takes_and_what_has_no_place(tmp_path, capsys):
    run = run_of(small("encoder", "head"), tmp_path / "run")
    path = write_safetensors(tmp_path / "w.safetensors", by_path(small("encoder", "head")))
    assert cli(["weights", path, "--to", run]) == 0
    assert "rules" not in capsys.readouterr().out
    filled(small("encoder", "head")).save_weights(tmp_path / "w.weights.h5")
    assert cli(["weights", str(tmp_path / "w.weights.h5"), "--to", run]) == 0
    assert "encoder, by its number" in capsys.readouterr().out
    other = write_safetensors(tmp_path / "o.safetensors", {"encoder/kernel": np.ones((4, 9), np.float32)})
    assert cli(["weights", other, "--to", run]) == 1
    out = capsys.readouterr().out
    assert "of the shape (4, 6)" in out and "only in" in out and "head/bias" in out


WITHOUT = """
import sys
blocked, arguments = sys.argv[1], sys.argv[2:]
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from looplib.__main__ import main
sys.exit(main(arguments))
"""


def without(package, *arguments):
    """Runs a tool where a package is missing; returns its exit code and what it says of errors."""
    command = [sys.executable, "-c", WITHOUT, package, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_a_package_that_is_missing_is_a_sentence_and_needed_for_its_own_files_alone(tmp_path):
    small("encoder").save_weights(tmp_path / "w.weights.h5")
    code, text = without("h5py", "weights", str(tmp_path / "w.weights.h5"))
    assert code == 2 and "pip install h5py" in text
    whole = write_safetensors(tmp_path / "w.safetensors", by_path(small("encoder")))
    assert without("h5py", "weights", whole)[0] == 0
    sweep = [f"--dir={tmp_path / 'sweep'}", "--metric=eval/loss", "--goal=min", "--", "program", "--a=1,2"]
    code, text = without("sqlalchemy", "sweep", *sweep)
    assert code == 2 and "a sweep needs sqlalchemy; install it" in text
    code, text = without("ml_dtypes", "weights", whole)
    assert code == 2 and "No module named 'ml_dtypes'; install the package that has it" in text


@pytest.mark.slow
def test_rules_that_a_file_holds_are_applied(tmp_path):
    write_safetensors(tmp_path / "bert.safetensors", bert())
    (tmp_path / "by_hand.yaml").write_text(RULES)
    run = run_of(encoder(), tmp_path / "run")
    assert cli(["weights", str(tmp_path / "bert.safetensors"), "--to", run]) == 1
    assert cli(["weights", str(tmp_path / "by_hand.yaml"), "--to", run]) == 0


def test_what_cannot_be_read_ends_with_a_sentence(tmp_path, capsys):
    (tmp_path / "w.bin").write_bytes(b"\x80\x02}q\x00.")
    for path in (tmp_path / "w.bin", tmp_path / "nothing", tmp_path):
        assert cli(["weights", str(path)]) == 2
        assert capsys.readouterr().err.startswith("looplib: error: ")
