"""`ExportEvery`: versions that a server never sees torn, that only grow, and that are no worse than the gate allows."""

import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
import toy
from clouds import wait_for
from conftest import make_strategy
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from paths import PROGRAMS
from tensorflow.core.framework import tensor_pb2  # noqa: F401  (its descriptor)

import looplib
from looplib.__main__ import main as cli
from looplib.binary import trial
from looplib.errors import ActionError, EndlessDataError, ExportError, MetricError, RunDirectoryError, SettingError
from looplib.exports.versions import VersionRecord, versions_in
from looplib.processes.group import hold_ports
from looplib.report.alerts import RunObserver

FAMILIES = {"keras": keras3, "tf_keras": tf_keras}
GATE = looplib.ExportGate("eval/accuracy", worse_by=0.1)
UNGUARDED = looplib.Guards(non_finite="off")
KEEP_ALL = looplib.CheckpointPolicy(every_steps=1, keep=looplib.KeepLast(1000))


class Judged(toy.RegressionEvaluator):
    """Evaluates on labels that `wrong` may change."""

    wrong = False

    def __init__(self, model):
        super().__init__(model)
        self.turned = tf.Variable(0, dtype=tf.int64, trainable=False)

    def step_fn(self, inputs):
        x, y = inputs
        return super().step_fn((x, (y + self.turned) % toy.NUM_CLASSES))


def train(folder, steps, *actions, every=2, strategy="default", keras=keras3, **settings):
    """Trains to a step, and exports by `ExportEvery`; returns the trainer."""
    settings = {"keep": 3, "gate": GATE, **settings}
    with (strategy := make_strategy(strategy)).scope():
        trainer = toy.Regression(keras)
        evaluator = Judged(trainer.model)
    actions = [action(trainer, evaluator) for action in actions]
    export = looplib.ExportEvery(every, folder / "base", **settings)
    with toy.controller(
        strategy, trainer, evaluator, model_dir=folder / "run", checkpoints=KEEP_ALL, guards=UNGUARDED,
        actions=[*actions, export],
    ) as controller:  # fmt: skip
        controller.train(steps)
    return trainer


def at(step, change):
    """Makes an action that changes the weights before the export of a step."""

    def make(trainer, evaluator):
        def act(event):
            if (event.split, event.step) == ("train", step):
                change(trainer, evaluator)

        return act

    return make


GOOD = np.linalg.lstsq(toy.X, np.eye(toy.NUM_CLASSES)[toy.Y], rcond=None)[0].astype("float32")


def heal(trainer, evaluator):
    trainer.model.layers[-1].set_weights([GOOD, np.zeros(toy.NUM_CLASSES, "float32")])


def spoil(trainer, evaluator):
    trainer.model.layers[-1].set_weights([-GOOD, np.zeros(toy.NUM_CLASSES, "float32")])


def poison(trainer, evaluator):
    trainer.model.layers[-1].bias.assign([math.nan] * toy.NUM_CLASSES)


def whole(base):
    return sorted(int(path.parent.name) for path in pathlib.Path(base).glob("*/saved_model.pb"))


def record(folder):
    return json.loads((folder / "looplib.json").read_text())


def weights_of(version):
    """The kernel and the bias in a version, as TensorFlow reads them."""
    found = tf.saved_model.load(str(version)).variables
    return sorted((one.numpy() for one in found if one.shape.rank), key=lambda one: -one.ndim)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small SavedModel."""
    folder = tmp_path_factory.mktemp("model")
    train(folder, 1, every=1)
    return folder / "base" / "1"


def prediction_log():
    """The class of TensorFlow Serving's `PredictionLog`, as its public .proto files number the fields."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="tested.proto", package="tested", syntax="proto3")
    file.dependency.append("tensorflow/core/framework/tensor.proto")

    def message(owner, called, **fields):
        made = owner.add(name=called)
        for key, (number, kind, repeated) in fields.items():
            of = {"type": field.TYPE_STRING} if kind is str else {"type": field.TYPE_MESSAGE, "type_name": kind}
            label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            made.field.add(name=key, number=number, label=label, **of)
        return made

    messages = file.message_type
    message(messages, "ModelSpec", name=(1, str, False), signature_name=(3, str, False))
    request = message(
        messages, "PredictRequest", model_spec=(1, ".tested.ModelSpec", False),
        inputs=(2, ".tested.PredictRequest.InputsEntry", True),
    )  # fmt: skip
    entry = message(
        request.nested_type, "InputsEntry", key=(1, str, False), value=(2, ".tensorflow.TensorProto", False)
    )
    entry.options.map_entry = True
    message(messages, "PredictLog", request=(1, ".tested.PredictRequest", False))
    message(messages, "PredictionLog", predict_log=(6, ".tested.PredictLog", False))
    pool = descriptor_pool.Default()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tested.PredictionLog"))


@pytest.mark.parametrize(
    ("family", "strategy"),
    [("keras", "default")]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("tf_keras", "default"), ("keras", "mirrored_x2"), ("tf_keras", "mirrored_x2"))
    ],
)
def test_versions_have_the_layout_of_a_server_and_the_weights_of_their_steps(family, strategy, tmp_path):
    seen = {}

    def note(trainer, evaluator):
        return lambda event: event.split == "train" and seen.update({event.step: trainer.weights()})

    train(
        tmp_path,
        9,
        note,
        strategy=strategy,
        keras=FAMILIES[family],
        gate=looplib.ExportGate("eval/accuracy", 1.0),
        keep=2,
    )
    base = tmp_path / "base"
    assert sorted(os.listdir(base)) == [".looplib-run", ".looplib-versions", "3", "4"]  # of steps 6 and 8
    for version in (3, 4):
        assert {"assets", "assets.extra", "saved_model.pb", "variables"} <= set(os.listdir(base / str(version)))
        expected = seen[2 * version]
        for found, here in zip(weights_of(base / str(version)), expected):
            np.testing.assert_array_equal(found, here)
        said = record(base / str(version))
        assert said["step"] == 2 * version and said["reason"] == ""
        assert said["metrics"]["accuracy"] == pytest.approx(toy.numpy_accuracy(expected))
        serve = tf.saved_model.load(str(base / str(version))).signatures["serving_default"]
        logs = tf.data.TFRecordDataset(str(base / str(version) / "assets.extra" / "tf_serving_warmup_requests"))
        requests = [LOG.FromString(one.numpy()).predict_log.request for one in logs]
        assert [one.model_spec.signature_name for one in requests] == ["serving_default"] * 2
        inputs = [{name: tf.make_ndarray(value) for name, value in one.inputs.items()} for one in requests]
        assert [list(one) for one in inputs] == [["inputs"]] * 2
        np.testing.assert_array_equal(inputs[0]["inputs"], toy.X[:1])
        np.testing.assert_array_equal(inputs[1]["inputs"], toy.X[: len(inputs[1]["inputs"])])
        (found,) = serve(**{name: tf.constant(value) for name, value in inputs[1].items()}).values()
        np.testing.assert_allclose(found, inputs[1]["inputs"] @ expected[0] + expected[1], atol=1e-5)


LOG = prediction_log()


@pytest.mark.parametrize("strategy", ["default", pytest.param("mirrored_x2", marks=pytest.mark.slow)])
def test_a_worse_model_is_rejected_and_told_and_the_training_continues(strategy, tmp_path):
    """One that is better later goes in."""

    observer = RunObserver(str(tmp_path / "run"))
    with (strategy := make_strategy(strategy)).scope():
        trainer = toy.Regression()
        evaluator = Judged(trainer.model)
    acts = [at(2, heal), at(4, spoil), at(6, poison), at(8, heal)]
    export = looplib.ExportEvery(2, tmp_path / "base", gate=GATE)
    with toy.controller(
        strategy, trainer, evaluator, model_dir=tmp_path / "run", guards=UNGUARDED,
        checkpoints=looplib.CheckpointPolicy(every_steps=10**9),
        actions=[*(make(trainer, evaluator) for make in acts), export],
    ) as controller:  # fmt: skip
        controller.train(2)
        observer.look()
        controller.train(8)
    base = tmp_path / "base"
    assert whole(base) == [1, 4] and whole(base / "rejected") == [2, 3]
    bad = weights_of(base / "rejected" / "2")
    text = f"eval/accuracy is {toy.numpy_accuracy(bad):.6g}, which is worse by more than 0.1: version 1 has "
    text += f"{toy.numpy_accuracy(weights_of(base / '1')):.6g} on the same data"
    assert record(base / "rejected" / "2")["reason"] == text
    assert np.isnan(weights_of(base / "rejected" / "3")[1]).all()
    told = [alert for alert in observer.look() if alert.kind == "rejected"]
    assert [alert.step for alert in told] == [4, 6] and text in told[0].sentence and "rejected/2" in told[0].sentence


def test_nan_is_rejected_whatever_the_metric_says(tmp_path):
    """The first class wins where all are NaN."""
    train(tmp_path, 4, at(4, poison), gate=looplib.ExportGate("eval/accuracy", worse_by=1.0))
    assert whole(tmp_path / "base") == [1]
    assert record(tmp_path / "base" / "rejected" / "2")["reason"] == "an output of the model is NaN"
    assert GATE.reason_against({"accuracy": 0.5, "loss": math.nan}) == "eval/loss is nan"


def test_lending_the_served_weights_changes_no_bit_of_the_training(tmp_path):
    without = []
    with toy.controller(None, trainer := toy.Regression(), model_dir=tmp_path / "other") as controller:
        controller.train(7)
        without += trainer.weights() + [np.array(one) for one in trainer.optimizer.variables]
    trainer = train(tmp_path / "one", 7, every=1)
    for found, expected in zip(trainer.weights() + [np.array(one) for one in trainer.optimizer.variables], without):
        np.testing.assert_array_equal(found, expected)
    assert len(whole(tmp_path / "one" / "base") + whole(tmp_path / "one" / "base" / "rejected")) >= 3


@pytest.mark.slow
def test_the_served_version_is_evaluated_on_the_data_of_now(tmp_path):
    """On which both are bad, so that the new one is no worse."""

    def turn(trainer, evaluator):
        evaluator.turned.assign(1)

    train(tmp_path, 4, at(2, heal), at(4, heal), at(4, turn))
    assert whole(tmp_path / "base") == [1, 2]
    was, now = (record(tmp_path / "base" / name)["metrics"]["accuracy"] for name in "12")
    assert now < was - GATE.worse_by


class Normalized(looplib.GradientTrainer):
    """With batch normalization, and averages."""

    def __init__(self, keras):
        layers = [keras.layers.InputLayer((toy.NUM_FEATURES,)), keras.layers.BatchNormalization(momentum=0.5)]
        model = keras.Sequential([*layers, keras.layers.Dropout(0.5), keras.layers.Dense(toy.NUM_CLASSES)])
        model.layers[-1].set_weights([GOOD, np.zeros(toy.NUM_CLASSES, "float32")])
        super().__init__(model, keras.optimizers.SGD(0.05), average_decay=0.9)

    def dataset(self, context):
        return context.indices(toy.NUM_EXAMPLES).map(lambda i: (tf.gather(toy.X, i), tf.gather(toy.Y, i)))

    def loss_fn(self, inputs):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(inputs[1], self.model(inputs[0], training=True))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["default", "mirrored_x2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_averages_and_statistics_are_lent_too_and_put_back(family, strategy, tmp_path):
    """What the gate says of the served version is what that version computes by itself."""

    def run(name, *actions):
        with (chosen := make_strategy(strategy)).scope():
            FAMILIES[family].utils.set_random_seed(0)
            trainer = Normalized(FAMILIES[family])
            evaluator = toy.RegressionEvaluator(trainer.model)
            evaluator.averages = trainer.averages

        def bad(event):
            if (event.split, event.step) == ("train", 6):
                for average in (one for one in trainer.averages.values if one.shape.rank == 2):
                    average.assign(-5 * average)

        with toy.controller(
            chosen, trainer, evaluator, model_dir=tmp_path / name, guards=UNGUARDED,
            actions=[bad, *actions],
        ) as controller:  # fmt: skip
            controller.train(8)
            parts = (
                [chosen.experimental_local_results(one) for one in trainer.model.variables]
                if family == "tf_keras"
                else []
            )
            values = [np.array(one) for pair in parts for one in pair]
            return values + [np.array(one) for one in [*trainer.model.get_weights(), *trainer.averages.values]]

    without = run("without")
    found = run(
        "run", looplib.ExportEvery(2, tmp_path / "base", gate=looplib.ExportGate("eval/accuracy", worse_by=0.05))
    )
    for one, other in zip(found, without, strict=True):
        np.testing.assert_array_equal(one, other)
    said = [record(path) for path in (tmp_path / "base" / "rejected").iterdir()]
    (reason,) = [one["reason"] for one in said if one["step"] == 6]
    served, value = reason.split("version ")[1].split(" has ")
    serve = tf.saved_model.load(str(tmp_path / "base" / served)).signatures["serving_default"]
    (logits,) = serve(inputs=tf.constant(toy.X)).values()
    assert f"{np.mean(logits.numpy().argmax(1) == toy.Y):.6g}" == value.split(" ")[0]


def test_going_back_publishes_a_version_again_and_the_gate_compares_with_it(tmp_path, capsys):
    train(tmp_path, 6, at(2, heal), gate=looplib.ExportGate("eval/accuracy", worse_by=1.0))
    base = tmp_path / "base"
    assert whole(base) == [1, 2, 3]
    before = weights_of(base / "1")
    assert cli(["publish", str(base), "1"]) == 0
    assert f"version 4 of {base} is 1 again" in capsys.readouterr().out
    assert whole(base) == [1, 4] and whole(base / "rejected") == [2, 3]
    assert record(base / "rejected" / "3")["reason"] == "version 1 was published again, as 4"
    assert record(base / "4")["step"] == 2
    for found, expected in zip(weights_of(base / "4"), before):
        np.testing.assert_array_equal(found, expected)
    assert cli(["publish", str(base), "9"]) == 2
    assert "has no version 9; it has 1, 4, rejected/2, rejected/3" in capsys.readouterr().err
    train(tmp_path, 8, at(8, spoil))
    assert whole(base) == [1, 4] and "version 4 has" in record(base / "rejected" / "5")["reason"]
    moved = weights_of(base / "rejected" / "3")
    assert cli(["publish", str(base), "3"]) == 0
    assert whole(base) == [1, 4, 6] and record(base / "6")["reason"] == ""
    for found, expected in zip(weights_of(base / "6"), moved):
        np.testing.assert_array_equal(found, expected)
    data = base / "4" / "variables" / "variables.data-00000-of-00001"
    content = bytearray(data.read_bytes())
    content[5] ^= 1
    data.write_bytes(content)
    capsys.readouterr()
    assert cli(["publish", str(base), "4"]) == 2
    assert "version 4 of" in (said := capsys.readouterr().err) and "publish another one" in said
    assert whole(base) == [1, 4, 6]


@pytest.mark.slow
def test_versions_grow_over_restarts_lost_notes_and_a_run_that_goes_back(tmp_path):
    gate = looplib.ExportGate("eval/accuracy", worse_by=1.0)
    train(tmp_path, 4, gate=gate, keep=1)
    base = tmp_path / "base"
    assert whole(base) == [2]
    for content, expected in (("{", 3), ('{"newest": -7}', 4), ('{"newest": 40}', 41), (None, 42)):
        (base / ".looplib-versions").unlink() if content is None else (base / ".looplib-versions").write_text(content)
        steps = 4 + 2 * (expected - 2) if expected < 10 else 8 + 2 * (expected - 40)
        train(tmp_path, steps, gate=gate, keep=1)
        assert whole(base) == [expected]
    for step in range(5, 13):  # the checkpoints after step 4 are lost
        for path in (tmp_path / "run" / "checkpoints").glob(f"ckpt-{step}.*"):
            path.unlink()
    train(tmp_path, 6, gate=gate, keep=1)
    assert whole(base) == [43] and record(base / "43")["step"] == 6


def test_a_base_of_another_run_is_refused(model, tmp_path):
    shutil.copytree(model.parents[1], tmp_path / "copy")
    with pytest.raises(ExportError, match="has exports of another run or action"):
        train(tmp_path / "copy", 4)
    assert whole(tmp_path / "copy" / "base") == [1]
    (tmp_path / "other" / "base" / "7").mkdir(parents=True)
    with pytest.raises(ExportError, match="has exports of another run or action"):
        train(tmp_path / "other", 4)
    owner = tmp_path / "copy" / "base" / ".looplib-run"
    owner.unlink()
    owner.symlink_to(model.parents[0] / ".looplib-run")
    with pytest.raises(ExportError, match="has exports of another run or action"):
        train(tmp_path / "copy", 4)


def test_a_served_version_that_cannot_be_loaded_lets_nothing_in(tmp_path):
    train(tmp_path, 2)
    data = tmp_path / "base" / "1" / "variables" / "variables.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:20])
    train(tmp_path, 4)
    assert whole(tmp_path / "base") == [1]
    reason = record(tmp_path / "base" / "rejected" / "2")["reason"]
    assert "version 1, which is served, cannot be compared with (" in reason
    assert f"python -m looplib publish {tmp_path}/base VERSION" in reason


class Interrupted(toy.RegressionEvaluator):
    """Gets a SIGTERM while it evaluates, once."""

    left = 1

    def dataset(self, context):
        return super().dataset(context).map(lambda x, y: (x, tf.numpy_function(self._end, [y], tf.int64)))

    def _end(self, y):
        if Interrupted.left:
            Interrupted.left -= 1
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
        return y


@pytest.mark.slow
def test_a_signal_while_the_gate_evaluates_ends_the_run_and_the_next_start_exports(tmp_path):
    for start in range(2):
        trainer = toy.Regression()
        export = looplib.ExportEvery(2, tmp_path / "base", gate=GATE)
        settings = dict(model_dir=tmp_path / "run", actions=[export], checkpoints=KEEP_ALL)
        with toy.controller(None, trainer, Interrupted(trainer.model), **settings) as controller:
            if start == 0:
                with pytest.raises(looplib.Preempted):
                    controller.train(3)
                assert controller.global_step == 2 and not whole(tmp_path / "base")
            else:
                controller.train(3)
    assert whole(tmp_path / "base") == [1] and record(tmp_path / "base" / "1")["step"] == 3


class OfAnother(toy.RegressionEvaluator):
    """Evaluates a model that it does not hold as its `model`."""

    def __init__(self, model):
        self.another, self.num_examples = model, toy.NUM_EXAMPLES

    def step_fn(self, inputs):
        return {"accuracy": tf.equal(tf.argmax(self.another(inputs[0], training=False), 1), inputs[1])}


def test_bad_settings_are_a_sentence(tmp_path):
    for every in (0, -1, "x", 1.5, None):
        with pytest.raises(SettingError, match="ExportEvery.every"):
            looplib.ExportEvery(every, tmp_path)
    with pytest.raises(SettingError, match="ExportEvery.keep"):
        looplib.ExportEvery(1, tmp_path, keep=0)
    with pytest.raises(ActionError, match="the gate of ExportEvery is 'eval/loss'; expected a looplib.ExportGate"):
        looplib.ExportEvery(1, tmp_path, gate="eval/loss")
    for metric in ("eval/quality", "accuracy", "train/loss"):
        with pytest.raises(MetricError):
            looplib.ExportGate(metric)
    with pytest.raises(SettingError, match="worse_by"):
        looplib.ExportGate("eval/loss", worse_by=-1)
    with pytest.raises(MetricError, match="not reported"):
        train(tmp_path, 2, gate=looplib.ExportGate("eval/auc"))
    trainer = toy.Regression()
    other = OfAnother(toy.Regression().model)
    evaluators = {"eval": toy.RegressionEvaluator(trainer.model), "other": other}
    action = looplib.ExportEvery(1, tmp_path / "base", gate=looplib.ExportGate("other/accuracy"))
    with toy.controller(None, trainer, evaluators, actions=[action]) as controller:
        with pytest.raises(ActionError, match="other evaluates other weights than RegressionEvaluator exports"):
            controller.train(1)
    endless = toy.RegressionEvaluator(trainer.model)
    endless.dataset = lambda context: toy.RegressionEvaluator.dataset(endless, context).repeat()
    with toy.controller(None, trainer, endless, actions=[looplib.ExportEvery(1, tmp_path / "base", gate=GATE)]) as one:
        with pytest.raises(EndlessDataError, match="'eval' never ends"):
            one.train(1)
    assert not os.path.exists(tmp_path / "base")


@pytest.mark.parametrize("folder", ["", "checkpoints", "train", "eval/models", "export"])
def test_a_base_in_a_folder_that_the_run_writes_is_refused(folder, tmp_path):
    action = looplib.ExportEvery(1, tmp_path / folder)
    with toy.controller(None, *toy.build(make_strategy("default")), model_dir=tmp_path, actions=[action]) as controller:
        with pytest.raises(RunDirectoryError, match="which the run itself writes; name another directory"):
            controller.train(1)


def test_two_actions_do_not_share_a_base(tmp_path):
    both = [looplib.ExportEvery(1, tmp_path / "base", name=name) for name in ("", "other")]
    with toy.controller(None, toy.Regression(), model_dir=tmp_path / "run", actions=both) as controller:
        with pytest.raises(ExportError, match="has exports of another run or action"):
            controller.train(1)


def test_a_dry_run_writes_no_version(tmp_path):
    action = looplib.ExportEvery(1, tmp_path / "base")
    trial.keep_inside([action])
    with toy.controller(None, toy.Regression(), model_dir=tmp_path / "run", actions=[action]) as controller:
        controller.train(2)
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.slow
def test_exports_by_time_continue_over_restarts(tmp_path):
    """Also where each start is shorter than the time."""
    train(tmp_path, 2, every="1h")
    assert not whole(tmp_path / "base")
    train(tmp_path, 4, every="0.001s", gate=None)
    assert whole(tmp_path / "base") == [1, 2]
    note = tmp_path / "base" / ".looplib-versions"
    note.write_text(json.dumps({"newest": 2, "time": time.time() - 3000}))
    train(tmp_path, 6, every="1h", gate=None)
    assert whole(tmp_path / "base") == [1, 2]
    note.write_text(json.dumps({"newest": 2, "time": time.time() - 4000}))
    train(tmp_path, 9, every="1h", gate=None)
    assert whole(tmp_path / "base") == [1, 2, 3]


def reader(base, log, environment=()):
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        [sys.executable, PROGRAMS / "serving_reader.py", str(base)], stdout=open(log, "w"), stderr=subprocess.STDOUT,
        env={**variables, **dict(environment), "TF_CPP_MIN_LOG_LEVEL": "3"},
    )  # fmt: skip


def read_under_kills(start, base, folder, kills, seconds, environment=()):
    """Kills what `start` starts again and again; returns the versions that a reader has seen, in their order."""
    process = reader(base, folder / "reader.log", environment)
    moments = random.Random(0)

    def seen():
        assert process.poll() is None, (folder / "reader.log").read_text()[-3000:]
        return [int(line) for line in (folder / "reader.log").read_text().split() if line.isdigit()]

    try:
        for _ in range(kills):
            before, life = len(seen()), start()
            end = time.monotonic() + 60
            while len(seen()) < before + 2 and time.monotonic() < end:
                assert not life.ended(), life.output()[-3000:]
                time.sleep(0.01)
            time.sleep(moments.uniform(0, seconds))
            life.kill()
            assert life.code() == -9, life.output()[-3000:]
        return seen()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("kills", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_a_reader_sees_no_torn_version_under_kills(kills, model, nursery, tmp_path):
    base = tmp_path / "base"
    seen = read_under_kills(
        lambda: nursery.life_of("exporting", "add", str(model), str(base)), base, tmp_path, kills, 0.3
    )
    assert len(seen) >= 2 * kills and seen == sorted(set(seen))
    versions_in(base).add(str(model), VersionRecord(1), keep=3)  # what was left is removed by the next
    assert len(whole(base)) <= 3 and len(whole(base / "rejected")) <= 3
    assert not [name for name in os.listdir(base) if name.startswith("version.")]


@pytest.mark.slow
def test_a_reader_sees_no_torn_version_of_a_training_that_is_killed(nursery, tmp_path):
    base = tmp_path / "base"
    start = lambda: nursery.life_of("exporting", "train", str(tmp_path / "run"), str(base))  # noqa: E731
    seen = read_under_kills(start, base, tmp_path, 8, 1.5)
    assert len(seen) >= 16 and seen == sorted(set(seen))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["add", "train"])
def test_a_reader_of_a_bucket_sees_no_torn_version_under_kills(what, model, cloud):
    base = cloud.url("base")
    place = str(model) if what == "add" else str(cloud.folder / "run")
    start = lambda: cloud.nursery.life_of("exporting", what, place, base, environment=cloud.environment())  # noqa: E731
    environment = {**cloud.environment(), "PYTHONPATH": ""}
    seen = read_under_kills(start, base, cloud.folder, 8, 1.0, environment)
    assert len(seen) >= 16 and seen == sorted(set(seen))
    life = cloud.tool("publish", base, seen[-1])
    assert life.code() in (0, 2), life.output()
    if life.code() == 0:
        names = cloud.names("base")
        newest = max(
            int(name.split("/")[0]) for name in names if name.endswith("/saved_model.pb") and "rej" not in name
        )
        assert newest > seen[-1] and f"version {newest} of {base} is {seen[-1]} again" in life.output()


def check_numbers(start):
    """Lets two processes add versions at once, of which each has to have a number of its own."""
    lives = [start() for _ in range(2)]
    added = [[], []]
    while min(map(len, added)) < 12:
        assert not any(life.ended() for life in lives), [life.output()[-3000:] for life in lives]
        added = [[int(line) for line in life.output().split() if line.isdigit()] for life in lives]
        time.sleep(0.05)
    for life in lives:
        life.kill()
    assert len({*added[0], *added[1]}) == len(added[0]) + len(added[1])


def test_processes_that_publish_at_once_take_numbers_of_their_own(model, nursery, tmp_path):
    check_numbers(lambda: nursery.life_of("exporting", "add", str(model), str(tmp_path / "base")))


@pytest.mark.slow
def test_processes_that_publish_in_a_bucket_at_once_take_numbers_of_their_own(model, cloud):
    environment = cloud.environment()
    check_numbers(
        lambda: cloud.nursery.life_of("exporting", "add", str(model), cloud.url("base"), environment=environment)
    )


@pytest.mark.slow
@pytest.mark.parametrize("methods", [("PUT", "POST", "DELETE"), ("GET", "HEAD", "PUT")])
def test_a_store_that_refuses_ends_no_training_and_gets_the_export_later(methods, cloud):
    """Also where the gate cannot read the version that is served, which is no fault of the model."""
    base, environment = cloud.url("base"), cloud.environment()

    def numbers():
        found = (re.fullmatch(r"(\d+)/saved_model.pb", name) for name in cloud.names("base"))
        return sorted(int(one[1]) for one in found if one)

    life = cloud.nursery.life_of("exporting", "train", str(cloud.folder / "run"), base, environment=environment)
    wait_for(lambda: life.ended() or numbers()[-1:] > [2], 100)
    cloud.proxy.faults.status = 403
    cloud.proxy.faults.only = lambda request: request.method in methods and "/base" in request.path
    cloud.proxy.faults.share = 1.0
    wait_for(lambda: life.ended() or life.output().count("an export is not served: s3://") > 1, 100)
    before = numbers()
    cloud.proxy.faults.share = 0.0
    wait_for(lambda: life.ended() or numbers()[-1:] > [before[-1] + 2], 100)
    assert not life.ended(), life.output()[-3000:]
    cloud.proxy.stop()  # is waited for, but not by a run that is to end
    time.sleep(3)
    life.kill(signal.SIGTERM)
    assert life.code(60) == 75, life.output()[-3000:]
    cloud.proxy.start()
    assert "cannot be compared with" not in life.output()
    folder = cloud.s3.download("bucket", f"{cloud.prefix}/base", cloud.folder / "found")
    assert [version for version in numbers() if not np.isfinite(weights_of(folder / str(version))[0]).all()] == []


@pytest.mark.slow
def test_two_workers_export_as_one_process_does(nursery, tmp_path):
    """The chief decides; both lend the weights of the version that is served."""
    base = tmp_path / "base"
    with hold_ports(2) as ports:
        cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
        lives = [
            nursery.life_of(
                "exporting", "train", str(tmp_path / "run"), str(base), "7", "6",
                environment={"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})},
            )
            for index in range(2)
        ]  # fmt: skip
        for life in lives:
            assert life.code() == 0, life.output()[-3000:]
    assert whole(base) == [1, 2] and whole(base / "rejected") == [3]
    one = nursery.life_of("exporting", "train", str(tmp_path / "other"), str(tmp_path / "alone"), "7", "6")
    assert one.code() == 0, one.output()[-3000:]
    assert record(base / "rejected" / "3") == record(tmp_path / "alone" / "rejected" / "3")
    for found, expected in zip(weights_of(base / "2"), weights_of(tmp_path / "alone" / "2")):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
