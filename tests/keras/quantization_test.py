"""Quantized and pruned models of other packages: on one device and two replicas, killed, and exported to int8."""

import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
import toy
from conftest import make_strategy, more
from paths import PYTHONPATH

import looplib
from looplib.errors import CallbackError

PROGRAM = pathlib.Path(__file__).parents[1] / "programs" / "quantized.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join((PYTHONPATH, *sys.path)), "TF_CPP_MIN_LOG_LEVEL": "2"}
KINDS = ("pruned", "qat", "annotated", "hgq_sat")
NEEDS = {"hgq_sat": "hgq"}
REFUSED = "so that each replica would keep a value of its own"


def ran(kind, how, replicas, folder, *flags, code=0, says=""):
    if not importlib.util.find_spec(NEEDS.get(kind.replace("wrap", "sat"), "tensorflow_model_optimization")):
        pytest.skip("needs the package")
    done = subprocess.run(
        [sys.executable, PROGRAM, kind, how, str(replicas), str(folder), *flags],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == code and says in done.stderr, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]) if not code else done.stderr


CASES = [("pruned", "keras")]
MORE = [(kind, "keras") for kind in KINDS[1:]] + [("pruned", "gradient"), ("pruned", "plain"), ("qat", "gradient")]


@pytest.mark.parametrize(("kind", "how"), [*CASES, *more(MORE)])
def test_two_replicas_have_equal_ranges_and_masks_those_of_one_device_where_these_are_of_the_weights(
    kind, how, tmp_path
):
    one, two = ran(kind, how, 1, tmp_path / "one"), ran(kind, how, 2, tmp_path / "two")
    assert one.keys() == two.keys()
    for name, parts in two.items():
        np.testing.assert_array_equal(parts[0], parts[1], err_msg=name)
        averaged = kind in ("qat", "annotated")  # the ends of outputs, and so what is trained with them
        exact = not averaged or "quantize_layer" in name
        np.testing.assert_allclose(parts[0], one[name][0], rtol=0, atol=1e-5 if exact else 0.05, err_msg=name)
    if kind == "pruned":
        masks = [np.mean(parts[0]) for name, parts in one.items() if "/mask:" in name]
        assert masks == [0.25] * 3
        assert {parts[0] for name, parts in one.items() if "pruning_step" in name} == {40.0}


@pytest.mark.parametrize("kind", ["pruned", *more(KINDS[1:])])
def test_a_run_that_is_killed_ends_with_the_ranges_and_masks_of_one_that_is_not(kind, tmp_path):
    ran(kind, "keras", 1, tmp_path / "killed", "--kill=24", code=-signal.SIGKILL)
    assert ran(kind, "keras", 1, tmp_path / "killed") == ran(kind, "keras", 1, tmp_path / "whole")


@pytest.mark.slow
def test_evaluations_do_not_change_what_a_pruned_model_learns(tmp_path):
    assert ran("pruned", "keras", 1, tmp_path / "a") == ran("pruned", "keras", 1, tmp_path / "b", "--no_evaluations")


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("plain", 0), ("gradient", 0), ("keras", 1)])
def test_ends_that_each_replica_has_of_its_own_examples_are_told(how, code, tmp_path):
    ran("qat_apart", how, 2, tmp_path, code=code, says=REFUSED)


@pytest.mark.parametrize("joined", [False, True])
def test_a_trainer_by_hand_is_told_of_what_a_layer_keeps_of_a_replicas_examples(joined, caplog):
    class Ends(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.largest = self.add_weight(name="largest", initializer="zeros", trainable=False)

        def call(self, inputs, training=False):
            if training:
                found = tf.reduce_max(inputs)
                self.largest.assign(tf.reduce_max(looplib.all_gather(found[None])) if joined else found)
            return inputs

    with (strategy := make_strategy("mirrored_x2")).scope():
        trainer = toy.Regression()
        trainer.model = keras.Sequential([keras.Input((toy.NUM_FEATURES,)), Ends(), keras.layers.Dense(3)])
        trainer.optimizer = keras.optimizers.SGD(0.1)
    with toy.controller(strategy, trainer):
        assert (REFUSED in caplog.text and "largest" in caplog.text) is not joined
    assert trainer.model.layers[0].largest.numpy() == 0


@pytest.mark.slow
def test_bits_that_each_replica_finds_by_itself_are_refused(tmp_path):
    assert REFUSED in ran("hgq_wrap", "keras", 2, tmp_path, code=1)


@pytest.fixture(params=["qat", *more(["annotated"])])
def exported(request, tmp_path):
    """A fake-quantized model, and its exports."""
    pytest.importorskip("tensorflow_model_optimization")
    import quantized

    controller, model, _ = quantized.controller_of(request.param, "keras", 1, str(tmp_path))
    controller.train(steps=quantized.STEPS)
    path = controller.export(formats=["int8", "tflite"])
    return model, quantized.x, pathlib.Path(path)


def test_an_int8_export_is_the_fake_quantized_model_within_steps_of_its_outputs(exported):
    model, x, path = exported
    record = json.loads((path / "export.json").read_text())
    cost = record["int8"]
    assert (cost["kind"], cost["reason"], cost["calibrated"]) == ("as trained", "", 0)
    expected = model(x, training=False).numpy()
    content = (path / "model.int8.tflite").read_bytes()
    interpreter = tf.lite.Interpreter(model_content=content)
    (found,) = interpreter.get_signature_runner("serving_default")(inputs=x).values()
    ends = [variable.numpy() for variable in model.variables if "post_activation_m" in variable.name][-2:]
    step = (ends[1] - ends[0]) / 255
    differences = np.abs(found - expected)
    assert 0 < step < 0.1 and differences.mean() < 0.001
    assert np.mean(differences < 1.01 * step) > 0.99  # in a layer behind others, their roundings add up
    assert differences.max() < 2.02 * step
    scales = [tensor["quantization_parameters"]["scales"] for tensor in interpreter.get_tensor_details()]
    assert any(one.size == 1 and np.isclose(one[0], step, rtol=1e-5) for one in scales)  # it is the model's own
    (floats,) = (
        tf.lite.Interpreter(str(path / "model.tflite")).get_signature_runner("serving_default")(inputs=x).values()
    )
    np.testing.assert_allclose(floats, expected, atol=1e-5)


def test_pruning_summaries_are_refused_by_name(tmp_path):
    tfmot = pytest.importorskip("tensorflow_model_optimization")
    import tf_keras

    model = tf_keras.Sequential([tf_keras.layers.Dense(2, input_shape=(8,))])
    model = tfmot.sparsity.keras.prune_low_magnitude(model)
    model.compile("sgd", "mse")
    callbacks = [tfmot.sparsity.keras.UpdatePruningStep(), tfmot.sparsity.keras.PruningSummaries(str(tmp_path))]
    with pytest.raises(
        CallbackError, match="PruningSummaries is a TensorBoard.*its own on_epoch_begin would be left out"
    ):
        looplib.KerasTrainer(model, np.zeros((8, 8)), np.zeros((8, 2)), callbacks=callbacks)
