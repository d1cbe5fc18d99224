"""One experiment under Model Garden's own driver and under looplib, in one process, from the same seeds."""

import contextlib
import dataclasses
import os

import flat_config
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
    """What a run did.

    Attributes:
      losses: dict from step to the reported training loss.
      evaluation: dict of the last evaluation's metrics.
      weights: list of arrays, the model's.
    """

    losses: dict
    evaluation: dict
    weights: list


def configuration(name, directory, overrides=None):
    """The configuration of a small experiment, with its data in `directory`; float32."""
    params, experiment = exp_factory.get_exp_config(name), EXPERIMENTS[name]
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


def controller(params, model_dir, strategy=None, **settings):
    """Builds the experiment's controller as the binary does; returns it and the trainer."""
    start_anew()
    values = model_garden_config.flag_values(params)
    strategy = strategy or tf.distribute.OneDeviceStrategy("/cpu:0")
    with strategy.scope():
        trainer, evaluators = model_garden.make(params, model_dir)
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
