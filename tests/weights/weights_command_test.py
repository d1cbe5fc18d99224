"""`python -m looplib weights`: what is in a file, beside what a model wants, and the rules that are missing."""

import re
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
import yaml
from rules_test import RULES, bert, encoder
from written import by_path, filled, same, write_safetensors

import looplib
from looplib.__main__ import main as cli
from looplib.weights.suggestions import suggest


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


def test_thousands_of_names_are_paired_without_comparing_each_with_each():
    names = range(2000)
    there = {f"enc.{n}.weight": (1,) for n in names} | {f"enc.{n}.bias": (2,) for n in names}
    here = {f"layer_{n}/kernel": (1,) for n in names} | {f"layer_{n}/bias": (2,) for n in names}
    began = time.monotonic()
    rules = suggest(there, here, ["other.7.weight"])
    assert time.monotonic() - began < 20  # 16 million comparisons take five minutes
    assert {name: re.sub(*rule, name) for rule in rules.items() for name in there if re.search(rule[0], name)} == {
        name: name.replace("enc.", "layer_").replace(".weight", "/kernel").replace(".bias", "/bias") for name in there
    }
    alike = {f"a/{n}": (3,) for n in names}
    assert suggest({"a/x": (5,), **alike}, {"b/x": (5,), **alike}, []) == {"^a/x$": "b/x"}
    assert time.monotonic() - began < 40


@pytest.mark.slow
def test_suggested_rules_are_text_that_a_warm_start_takes(tmp_path, capsys):
    source, target = filled(small("encoder", "head")), filled(small("backbone", "top"), seed=1)
    path = write_safetensors(tmp_path / "w.safetensors", by_path(source))
    run = run_of(small("backbone", "top"), tmp_path / "run")
    assert cli(["weights", path, "--to", run]) == 1
    text = capsys.readouterr().out.partition(":\n\n")[2]
    assert yaml.safe_load(text)["rules"] == {"^encoder/": "backbone/", "^head/": "top/"}
    (tmp_path / "rules.yaml").write_text(text)
    assert cli(["weights", str(tmp_path / "rules.yaml"), "--to", run]) == 0
    looplib.warm_start({"model": target}, str(tmp_path / "rules.yaml"))
    same(source, target)


@pytest.mark.slow
def test_the_rules_suggested_for_bert_agree_with_those_by_hand(tmp_path, capsys):
    write_safetensors(tmp_path / "bert.safetensors", bert())
    run = run_of(encoder(), tmp_path / "run")
    assert cli(["weights", str(tmp_path / "bert.safetensors"), "--to", run]) == 1
    suggested = yaml.safe_load(capsys.readouterr().out.partition(":\n\n")[2])["rules"]
    (tmp_path / "by_hand.yaml").write_text(RULES)
    (tmp_path / "suggested.yaml").write_text(
        yaml.safe_dump({"path": "bert.safetensors", "rules": suggested}, sort_keys=False)
    )
    models = [filled(encoder()), filled(encoder())]
    for model, name in zip(models, ("by_hand", "suggested")):
        looplib.warm_start({"model": model}, str(tmp_path / f"{name}.yaml"))
    equal = [np.array_equal(one, other) for one, other in zip(*(model.get_weights() for model in models))]
    # The attention's outputs, and norms, have several partners: no rule is suggested for them, and none is wrong.
    untouched = [
        np.array_equal(one, other) for one, other in zip(models[1].get_weights(), filled(encoder()).get_weights())
    ]
    assert all(one or other for one, other in zip(equal, untouched)) and sum(equal) > 20
    assert cli(["weights", str(tmp_path / "by_hand.yaml"), "--to", run]) == 0


def test_a_table_of_embeddings_is_no_kernel_and_a_bias_comes_with_its_kernel():
    there = {
        "bert.token_type_embeddings.weight": (2, 4),
        "bert.one.weight": (3, 5),
        "bert.one.bias": (3,),
        "x.bias": (3,),
    }
    here = {"classifier/kernel": (4, 2), "one/kernel": (5, 3), "one/bias": (3,), "other/bias": (3,)}
    rules = suggest(there, here, ())
    assert {pattern: rule if isinstance(rule, str) else rule.to for pattern, rule in rules.items()} == {
        r"^bert\.one\.weight$": "one/kernel",
        r"^bert\.one\.bias$": "one/bias",
        r"^x\.bias$": "other/bias",
    }


def test_nothing_is_suggested_where_two_fit(tmp_path, capsys):
    tensors = {name: np.ones((6, 6), np.float32) for name in ("one", "two")}
    path = write_safetensors(tmp_path / "w.safetensors", {f"{name}/kernel": value for name, value in tensors.items()})
    other = write_safetensors(
        tmp_path / "o.safetensors", {f"{name}/kernel": tensors["one"] for name in ("three", "four")}
    )
    assert cli(["weights", path, "--to", other]) == 1
    assert "rules" not in capsys.readouterr().out


def test_what_cannot_be_read_ends_with_a_sentence(tmp_path, capsys):
    (tmp_path / "w.bin").write_bytes(b"\x80\x02}q\x00.")
    for path in (tmp_path / "w.bin", tmp_path / "nothing", tmp_path):
        assert cli(["weights", str(path)]) == 2
        assert capsys.readouterr().err.startswith("looplib: error: ")
