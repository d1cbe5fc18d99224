"""One experiment under Model Garden's own driver and under looplib, in one process, from the same seeds."""

import contextlib
import dataclasses
import math
import os
import pathlib
import shutil

import flat_config
import numpy as np
import tensorflow as tf
import tf_keras
from experiment import merged
from official.core import exp_factory, task_factory, train_lib
from text_experiments import TEXT
from vision_experiments import VISION

import looplib
from trainers import model_garden, model_garden_config

EXPERIMENTS = {**VISION, **TEXT}


@dataclasses.dataclass
class Ran:
    """The results of a run.

    Attributes:
      losses: dict from step to the reported training loss.
      evaluation: dict of the last evaluation's metrics.
      weights: list of arrays, the model's.
    """

    losses: dict
    evaluation: dict
    weights: list


def configuration(name, directory, overrides=None, experiment=None):
    """The configuration of a small experiment, by default one of EXPERIMENTS, with its data in `directory`; float32."""
    experiment = experiment or EXPERIMENTS[name]
    params = experiment.base() if experiment.base else exp_factory.get_exp_config(name)
    paths = experiment.make_data(os.path.join(directory, "data"))
    params.override(
        merged(experiment.overrides(paths), {"runtime": {"mixed_precision_dtype": None}}, overrides or {}),
        is_strict=True,
    )
    return params


def start_anew():
    """Forgets the models before, and seeds everything; as `looplib.runtime.setup` does."""
    tf_keras.backend.clear_session()
    tf_keras.backend.experimental.enable_tf_random_generator()
    tf_keras.utils.set_random_seed(0)


@contextlib.contextmanager
def eagerly():
    """Runs the bodies of tf.functions op by op: a driver's numbers are what is wanted, and tracing is most of its cost."""
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(False)


def under_the_driver(params, model_dir, mode="train_and_eval"):
    """Runs an experiment as Model Garden's `train.py` does; returns `Ran`."""
    start_anew()
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    os.makedirs(model_dir, exist_ok=True)  # some tasks write there
    with strategy.scope():
        task = task_factory.get_task(params.task, logging_dir=model_dir)
    losses, evaluation = {}, {}
    runner = train_lib.OrbitExperimentRunner(
        strategy, task, mode, params, model_dir,
        train_actions=[lambda logs: losses.update({int(runner.trainer.global_step): float(logs["training_loss"])})],
        eval_actions=[evaluation.update],
        save_summary=False,
    )  # fmt: skip
    runner.run()
    return Ran(losses, _numbers(evaluation), runner.trainer.model.get_weights())


def _numbers(logs):
    """Numbers by name; of a metric with several results, by both names."""
    inner = {
        f"{name}_{key}": each for name, value in logs.items() if isinstance(value, dict) for key, each in value.items()
    }
    single = {name: value for name, value in logs.items() if not isinstance(value, dict)}
    return {name: float(value) for name, value in {**single, **inner}.items() if tf.rank(value) == 0}


def controller(params, model_dir, strategy=None, mode="train_and_eval", **settings):
    """Builds the experiment's controller as the binary does; returns it and the trainer."""
    start_anew()
    values = model_garden_config.flag_values(params)
    strategy = strategy or tf.distribute.OneDeviceStrategy("/cpu:0")
    with strategy.scope():
        trainer, evaluators = model_garden.make(params, model_dir, mode)
    built = flat_config.controller(
        trainer=trainer, evaluator=evaluators, strategy=strategy, model_dir=model_dir,
        global_batch_size=values.get("global_batch_size", 2),
        **{"steps_per_loop": values["steps_per_loop"], "writers": [], "checkpoints": looplib.CheckpointPolicy(every_steps=values["checkpoint_interval"]), **settings},
    )  # fmt: skip
    return built, trainer


def under_looplib(params, model_dir, watch=None, **settings):
    """Runs an experiment under looplib's controller, which calls `watch` with each event; returns `Ran`."""
    losses = {}

    def note(event):
        if event.split == "train":
            losses[event.step] = event.metrics["training_loss"]
        if watch:
            watch(event)

    built, trainer = controller(params, model_dir, actions=[note], **settings)
    options = params.trainer
    with built:
        found = built.train_and_evaluate(options.train_steps, options.validation_interval, options.validation_steps)
    return Ran(losses, found[options.validation_summary_subdir], trainer.model.get_weights())


@dataclasses.dataclass
class Compared:
    """How looplib's run of an experiment compares with that of Model Garden's driver.

    Attributes:
      theirs: the driver's run.
      ours: looplib's run.
      resumed: list of arrays, the weights of a run of looplib from the save in the middle.
      driver_evaluates: what the driver's evaluation of looplib's last checkpoint gives.
    """

    theirs: Ran
    ours: Ran
    resumed: list
    driver_evaluates: Ran


def compare(params, directory):
    """Trains and evaluates under both, resumes under looplib, and evaluates its checkpoint by the driver."""
    with eagerly():
        theirs = under_the_driver(params, f"{directory}/theirs")
    ours = under_looplib(params, f"{directory}/ours", loop="graph")
    shutil.copytree(f"{directory}/ours/checkpoints", f"{directory}/again/checkpoints")
    for path in pathlib.Path(directory, "again", "checkpoints").glob(f"ckpt-{params.trainer.train_steps}.*"):
        path.unlink()
    built, trainer = controller(params, f"{directory}/again", mode="train", loop="graph")
    with built:
        assert built.global_step == params.trainer.checkpoint_interval
        built.train(params.trainer.train_steps)
    resumed = trainer.model.get_weights()
    with eagerly():
        driver_evaluates = under_the_driver(params, f"{directory}/ours/checkpoints", mode="eval")
    return Compared(theirs, ours, resumed, driver_evaluates)


def differences(found, expected):
    """The largest difference of two lists of arrays, relative to the largest element of all."""
    largest = max(float(np.abs(each).max()) for each in expected if each.size)
    return max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True) if b.size) / largest


def metric_differences(found, expected):
    """Relative differences of metrics by name, without those that the driver takes of other examples."""
    names = [name for name in expected if name in found and name != "validation_loss" and "iou" not in name]
    return {
        name: abs(found[name] - expected[name]) / max(abs(expected[name]), 1e-3)
        for name in names
        if not math.isnan(expected[name])
    }
