"""Model Garden's experiments train and evaluate as under its own driver, and its checkpoints go both ways."""

import contextlib
import json
import math
import os
import shutil

import numpy as np
import pytest

pytest.importorskip("official", reason="needs Model Garden: pip install 'looplib[models]'")

import side_by_side
import tensorflow as tf
import tf_keras
from conftest import make_strategy, more, repetitions
from official.core import base_trainer, exp_factory, registry, task_factory, train_utils
from official.modeling import optimization

import looplib
from looplib.run.records import read_jsonl
from trainers import model_garden

# Side by side, each random number that a pipeline draws in several threads would differ; these leave them out.
# What takes long to trace and is none of looplib's, such as pictures for TensorBoard, is left out too.
_FLOAT = {"dtype": "float32"}
_PLAIN = {
    "resnet_imagenet": {"train_data": {"aug_rand_hflip": False, "aug_crop": False}},
    "retinanet_resnetfpn_coco": {
        "train_data": {**_FLOAT, "parser": {"aug_rand_hflip": False, "aug_scale_min": 1.0, "aug_scale_max": 1.0}},
        "validation_data": _FLOAT,
        "model": {"detection_generator": {"nms_version": "batched"}},
    },
    "seg_resnetfpn_pascal": {
        "train_data": {"aug_rand_hflip": False, "aug_scale_min": 1.0, "aug_scale_max": 1.0},
        "allow_image_summary": False,
    },
}
# Sums in another order, and as many steps for them to grow in; ResNet's came out bit by bit.
_RTOL = 1e-4


def steps(number, loop=1, **others):
    settings = {"train_steps": number, "steps_per_loop": loop, "checkpoint_interval": number, **others}
    return {"trainer": {"summary_interval": loop, "validation_interval": number, **settings}}


# The last one is slow to trace; multi_task_test.py has tasks of text side by side.
@pytest.fixture(scope="module", params=["resnet_imagenet", "seg_resnetfpn_pascal", *more(["retinanet_resnetfpn_coco"])])
def both(request, tmp_path_factory):
    """(name, configuration, directory, the run under the driver, the run under looplib)."""
    directory = str(tmp_path_factory.mktemp("both"))
    params = side_by_side.configuration(
        request.param, directory, side_by_side.merged(steps(6), {"task": _PLAIN[request.param]})
    )
    with repetitions(side_by_side.eagerly, contextlib.nullcontext)():
        theirs = side_by_side.under_the_driver(params, f"{directory}/theirs")
    return request.param, params, directory, theirs, side_by_side.under_looplib(params, f"{directory}/ours")


@pytest.mark.slow(spread=1)
def test_the_training_losses_and_the_weights_are_the_drivers(both):
    _, _, _, theirs, ours = both
    assert list(ours.losses) == [1, 2, 3, 4, 5, 6]
    assert ours.losses == pytest.approx(theirs.losses, rel=_RTOL)
    assert len({round(loss, 6) for loss in ours.losses.values()}) > 3  # it trains
    for a, b in zip(ours.weights, theirs.weights):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.slow(spread=1)
def test_the_validation_metrics_are_the_drivers_except_its_mean_of_batches_means(both):
    name, params, directory, theirs, ours = both
    losses, counts = validation_losses(params, f"{directory}/ours")
    assert len(set(counts)) > 1  # the last batch is smaller
    assert ours.evaluation["examples"] == sum(counts)
    for metric, value in theirs.evaluation.items():
        if metric != "validation_loss" and "iou" not in metric and not math.isnan(value):
            assert ours.evaluation[metric] == pytest.approx(value, rel=1e-3, abs=1e-5), metric
    assert theirs.evaluation["validation_loss"] == pytest.approx(np.mean(losses), rel=1e-3)
    assert ours.evaluation["validation_loss"] == pytest.approx(np.average(losses, weights=counts), rel=1e-3)
    print(f"{name}: {theirs.evaluation['validation_loss']:.5f} there, {ours.evaluation['validation_loss']:.5f} here")


def trained(params, model_dir):
    """The task and its model with the trained weights."""
    side_by_side.start_anew()
    task = task_factory.get_task(params.task, logging_dir=model_dir)
    model = task.build_model()
    path = tf.train.latest_checkpoint(f"{model_dir}/checkpoints")
    tf.train.Checkpoint(model=model).restore(path).expect_partial().assert_existing_objects_matched()
    return task, model


def validation_losses(params, model_dir, weights=None):
    """Each batch's loss and number of examples, by a plain loop over the validation data."""
    task, model = trained(params, model_dir)
    for variable, value in zip(model.variables, weights or []):
        variable.assign(value)
    losses, counts = [], []
    metrics = task.build_metrics(training=False)
    for batch in task.build_inputs(params.task.validation_data):
        counts.append(int(tf.nest.flatten(batch)[0].shape[0]))
        losses.append(float(task.validation_step(batch, model, metrics=metrics)[task.loss]))
    return losses, counts


@pytest.mark.slow
def test_the_mean_iou_counts_the_first_batch_which_the_driver_leaves_out(both):
    name, params, directory, theirs, ours = both
    if not name.startswith("seg"):
        pytest.skip("no segmentation")
    task, model = trained(params, f"{directory}/ours")
    classes = params.task.model.num_classes
    matrices = []
    for images, labels in task.build_inputs(params.task.validation_data):
        truth, valid = labels["masks"].numpy()[..., 0].astype(int), labels["valid_masks"].numpy()[..., 0]
        logits = tf.image.resize(model(images, training=False)["logits"], truth.shape[1:3]).numpy()
        matrix = np.zeros([classes, classes])
        np.add.at(matrix, (truth[valid], logits.argmax(-1)[valid]), 1)
        matrices.append(matrix)

    def mean_iou(matrix):
        hits = np.diag(matrix)
        return np.mean(hits / np.maximum(matrix.sum(0) + matrix.sum(1) - hits, 1))

    assert ours.evaluation["mean_iou"] == pytest.approx(mean_iou(sum(matrices)), rel=1e-3)
    assert theirs.evaluation["mean_iou"] == pytest.approx(mean_iou(sum(matrices[1:])), rel=1e-3)
    assert mean_iou(sum(matrices)) != pytest.approx(mean_iou(sum(matrices[1:])), rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "both",
    ["resnet_imagenet", *more(name for name in _PLAIN if name != "resnet_imagenet")],
    indirect=True,
    scope="module",
)
def test_an_evaluation_on_two_replicas_gives_the_same_numbers(both):
    """The last batch leaves one of them without an example."""
    name, params, directory, _, ours = both
    controller, _ = side_by_side.controller(params, f"{directory}/ours", strategy=make_strategy("mirrored_x2"))
    with controller:
        assert controller.global_step == 6
        found = controller.evaluate()["validation"]
    assert found["examples"] == ours.evaluation["examples"]
    for metric, value in ours.evaluation.items():
        if (
            not math.isnan(value) and "loss" not in metric
        ):  # those are means of what a replica's batch has, some of words
            assert found[metric] == pytest.approx(value, rel=1e-3, abs=1e-4), metric
    if name == "resnet_imagenet":
        assert found["validation_loss"] == pytest.approx(ours.evaluation["validation_loss"], rel=1e-4)


@pytest.mark.slow
def test_two_replicas_train_and_report_a_constant_learning_rate(tmp_path):
    params = side_by_side.configuration("mock", str(tmp_path))
    controller, _ = side_by_side.controller(params, f"{tmp_path}/run", strategy=make_strategy("mirrored_x2"))
    with controller:
        assert controller.train(3)["learning_rate"] == pytest.approx(0.1)
    controller, _ = side_by_side.controller(params, f"{tmp_path}/run")  # and on one device again
    with controller:
        assert controller.global_step == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sgd", "sgd_experimental"])
def test_the_reported_learning_rate_is_that_of_the_reported_step(kind, tmp_path):
    rate = {"type": "stepwise", "stepwise": {"boundaries": [1, 3], "values": [0.5, 0.2, 0.1]}}
    overrides = {"trainer": {"optimizer_config": {"optimizer": {"type": kind}, "learning_rate": rate}}}
    params = side_by_side.configuration("mock", str(tmp_path), side_by_side.merged(steps(5), overrides))
    seen = []
    controller, _ = side_by_side.controller(
        params, f"{tmp_path}/run", actions=[lambda event: seen.append(event.metrics)]
    )
    with controller:
        controller.train(5)
    assert [metrics["learning_rate"] for metrics in seen] == pytest.approx([0.5, 0.5, 0.2, 0.2, 0.1])


@pytest.mark.slow
def test_looplib_trains_on_from_the_drivers_checkpoint_and_the_driver_reads_looplibs(both, tmp_path):
    name, params, directory, whole, _ = both
    if name != "resnet_imagenet":
        pytest.skip("one experiment is enough")
    params = params.replace(trainer={"train_steps": 8})
    controller, trainer = side_by_side.controller(
        params, f"{tmp_path}/ours", start=looplib.Start(continue_from=f"{directory}/theirs")
    )
    with controller:
        assert controller.global_step == 6 and int(trainer.optimizer.iterations) == 6
        for a, b in zip(trainer.model.get_weights(), whole.weights):
            np.testing.assert_array_equal(a, b)
        controller.train(8)

    # The other way: the driver's own object for a run, all of whose variables must be in the checkpoint.
    side_by_side.start_anew()
    task = task_factory.get_task(params.task)
    theirs = train_utils.create_trainer(params, task, train=True, evaluate=True, trainer_cls=base_trainer.Trainer)
    weights = theirs.model.trainable_variables
    theirs.optimizer.apply_gradients([(tf.zeros_like(weight), weight) for weight in weights])  # makes its slots
    status = theirs.checkpoint.restore(tf.train.latest_checkpoint(f"{tmp_path}/ours/checkpoints"))
    status.assert_existing_objects_matched()
    assert int(theirs.global_step) == 8 and int(theirs.optimizer.iterations) == 8
    for a, b in zip(theirs.model.get_weights(), trainer.model.get_weights()):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """A run with averaged weights and an export of the best checkpoint: (directory, configuration, trainer, metrics)."""
    directory = str(tmp_path_factory.mktemp("averaged"))
    overrides = {
        "task": _PLAIN["resnet_imagenet"],
        "trainer": {
            "best_checkpoint_export_subdir": "best",
            "best_checkpoint_eval_metric": "accuracy",
            "optimizer_config": {"ema": {"average_decay": 0.9, "trainable_weights_only": False}},
        },
    }
    params = side_by_side.configuration(
        "resnet_imagenet",
        directory,
        side_by_side.merged(steps(4, 2, validation_interval=2, checkpoint_interval=2), overrides),
    )
    seen = []
    controller, trainer = side_by_side.controller(params, f"{directory}/run", actions=[seen.append])
    with controller:
        assert isinstance(trainer.optimizer, optimization.ExponentialMovingAverage)
        metrics = controller.train_and_evaluate(4, 2)["validation"]
    return directory, params, trainer, metrics, [event for event in seen if event.split == "validation"]


@pytest.mark.slow
def test_averaged_weights_are_evaluated_and_leave_the_weights_as_they_were(averaged):
    directory, params, trainer, metrics, _ = averaged
    losses, counts = validation_losses(params, f"{directory}/run")  # of the weights that were trained
    assert metrics["validation_loss"] != pytest.approx(np.average(losses, weights=counts), rel=1e-5)
    averages = [trainer.optimizer.get_slot(weight, "average").numpy() for weight in trainer.model.variables]
    weights = trainer.model.get_weights()
    losses, counts = validation_losses(params, f"{directory}/run", averages)
    assert metrics["validation_loss"] == pytest.approx(np.average(losses, weights=counts), rel=1e-6)
    saved = tf.train.load_checkpoint(tf.train.latest_checkpoint(f"{directory}/run/checkpoints"))
    keys = [key for key in saved.get_variable_to_shape_map() if "OPTIMIZER" not in key]
    found = {saved.get_tensor(key).tobytes() for key in keys if key.endswith("VARIABLE_VALUE")}
    assert {weight.tobytes() for weight in weights} <= found


@pytest.mark.slow
def test_averaged_weights_resume_exactly(averaged, tmp_path):
    directory, params, trainer, _, _ = averaged
    shutil.copytree(f"{directory}/run/checkpoints", tmp_path / "run" / "checkpoints")
    for path in (tmp_path / "run" / "checkpoints").glob("ckpt-4.*"):
        path.unlink()
    controller, again = side_by_side.controller(params, f"{tmp_path}/run")
    with controller:
        assert controller.global_step == 2
        controller.train(4)
    for a, b in zip(again.model.get_weights(), trainer.model.get_weights()):
        np.testing.assert_array_equal(a, b)
    for weight, other in zip(again.model.variables, trainer.model.variables):
        np.testing.assert_array_equal(
            again.optimizer.get_slot(weight, "average"), trainer.optimizer.get_slot(other, "average")
        )


@pytest.mark.slow
def test_the_best_checkpoint_and_the_averages_are_exported_as_model_garden_does(averaged):
    directory, _, trainer, metrics, evaluations = averaged
    with open(f"{directory}/run/best/info.json") as file:
        best = json.load(file)
    accuracies = {event.step: event.metrics["accuracy"] for event in evaluations}
    assert best["accuracy"] == max(accuracies.values()) == metrics["best_accuracy"]
    assert best["best_ckpt_global_step"] == min(s for s, a in accuracies.items() if a == max(accuracies.values()))
    assert tf.train.latest_checkpoint(f"{directory}/run/best")
    average = tf.train.latest_checkpoint(f"{directory}/run/ema_checkpoints")
    assert os.path.basename(average) == "average_weights-4"
    side_by_side.start_anew()
    model = tf_keras.models.clone_model(trainer.model)
    tf.train.Checkpoint(model=model).restore(average).expect_partial()
    for a, b in zip(model.variables, trainer.model.variables):
        np.testing.assert_array_equal(a, trainer.optimizer.get_slot(b, "average"))


def test_an_experiment_without_an_optimizer_is_a_sentence(tmp_path):
    with pytest.raises(looplib.UsageError, match="trainer.opt"):
        model_garden.make(exp_factory.get_exp_config("mock"), str(tmp_path))


@pytest.mark.slow
@pytest.mark.slow
def test_the_names_of_all_experiments_are_known():
    names = model_garden.experiments()
    assert len(names) >= 35 and {"resnet_imagenet", "bert/pretraining", "wmt_transformer/large"} <= set(names)
    for name in names:
        assert exp_factory.get_exp_config(name) is not None
    makers = {name: registry.lookup(exp_factory._REGISTERED_CONFIGS, name) for name in names}
    own = {name for name, make in makers.items() if not make.__module__.startswith("official.projects.")}
    assert own == set(side_by_side.EXPERIMENTS)  # other tests register those of projects too


@pytest.mark.slow
def test_the_image_summaries_of_a_task_are_shown(tmp_path):
    changes = {**steps(2), "task": {"allow_image_summary": True}}
    params = side_by_side.configuration("seg_resnetfpn_pascal", str(tmp_path), changes)
    side_by_side.under_looplib(params, f"{tmp_path}/run", writers=None)
    lines = read_jsonl(f"{tmp_path}/run/media.jsonl")
    assert [line["name"] for line in lines] == [f"image/validation_outputs/{i}" for i in range(len(lines))]
    assert all((line["step"], line["split"]) == (2, "validation") for line in lines)
    paths = [f"{tmp_path}/run/media/{name}" for line in lines for name in line["files"]]
    images = [tf.io.decode_png(tf.io.read_file(path)).numpy() for path in paths]
    assert images and all(image.shape == (64, 64, 3) and image.std() > 10 for image in images)
