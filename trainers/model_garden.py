"""Runs any experiment of TensorFlow Model Garden: `python -m trainers.model_garden --experiment=resnet_imagenet ...`.

Takes the flags of Model Garden's own `train.py` (`--experiment --mode --model_dir --config_file --params_override --tpu
--gin_file --gin_params --tf_data_service`), and looplib's, which override the configuration.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from absl import flags, logging

from looplib import Controller, Evaluator, Trainer, UsageError, launch
from looplib.base.files import resolve
from looplib.base.messages import gist
from looplib.binary import config
from looplib.config import field_types
from trainers import needed

try:
    with needed.extra("models", "trainers.model_garden"):
        import gin
        from official.common import registry_imports  # noqa: F401  (registers the experiments)
        from official.core import base_task, config_definitions, exp_factory, task_factory, train_utils
        from official.modeling.multitask import configs as multitask_configs
except UsageError as error:
    if __name__ == "__main__":
        sys.exit(f"looplib: error: {error}")
    raise

from trainers import model_garden_config, model_garden_multi_task
from trainers.model_garden_tasks import Experiment, TaskEvaluator, TaskTrainer

flags.DEFINE_string("experiment", None, "The name of a registered experiment.")
flags.DEFINE_multi_string("config_file", None, "YAML or JSON files that override the experiment's configuration.")
flags.DEFINE_string("params_override", None, "Overrides as YAML or JSON, or the path of a YAML file; they come last.")
flags.DEFINE_multi_string("gin_file", None, "Files of gin bindings.")
flags.DEFINE_multi_string("gin_params", None, "Gin bindings.")
flags.DEFINE_string("tf_data_service", None, "Address of a tf.data service.")
for _name in ("experiment", "config_file", "params_override", "gin_file", "gin_params", "tf_data_service"):
    flags.declare_key_flag(_name)


Params = config_definitions.ExperimentConfig
MakeMultiTask = Callable[[multitask_configs.MultiTaskExperimentConfig], tuple[Any, Any]]
Parts = tuple[Trainer | None, Mapping[str, Evaluator] | None]


def settings() -> tuple[Params, dict[str, Any]]:
    """Reads the experiment's configuration from the flags.

    Returns:
      The configuration, and the values that it has for looplib's flags.

    Raises:
      UsageError: for an unknown experiment, or a configuration that cannot be read.
    """
    chosen = flags.FLAGS
    if chosen.experiment not in experiments():
        found = f"--experiment is {chosen.experiment!r}" if chosen.experiment else "--experiment is missing"
        raise UsageError(f"{found}; name one of Model Garden's: {', '.join(experiments())}")
    chosen["config_file"].value = [resolve(path, "--config_file") for path in chosen.config_file or ()]
    try:
        gin.parse_config_files_and_bindings(chosen.gin_file, chosen.gin_params)
        for path in chosen.config_file or ():
            field_types.compose(config.text_in(path))  # Model Garden's own reader has no bounds
        params = train_utils.parse_configuration(chosen, lock_return=False, print_return=False)
    except (LookupError, ValueError, TypeError, OSError, tf.errors.OpError, AttributeError) as error:
        raise UsageError(
            f"the configuration of {chosen.experiment} cannot be read ({gist(error)}); look at --config_file, "
            "--params_override and the gin flags"
        ) from error
    for flag, path in model_garden_config.FIELDS.items():
        if chosen[flag].present:
            model_garden_config.replace(params, path, chosen[flag].value)
    values = model_garden_config.flag_values(params, chosen.mode)
    if chosen.model_dir and tf.train.latest_checkpoint(
        resolve(chosen.model_dir, "model_dir")
    ):  # of Model Garden's own driver
        values["continue_from"] = chosen.model_dir
    params.lock()
    return params, values


def experiments() -> list[str]:
    """Returns the names of all registered experiments."""

    def walk(found: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
        for name, value in found.items():
            yield from walk(value, f"{prefix}{name}/") if isinstance(value, dict) else [prefix + name]

    return sorted(walk(exp_factory._REGISTERED_CONFIGS))


def build(params: Params, make_multi_task: MakeMultiTask | None = None) -> Parts:
    """Builds the experiment that the flags ask for, under the strategy's scope; for `launch.run`.

    Args:
      params: the configuration.
      make_multi_task: see `make`.

    Returns:
      The trainer and the evaluators, see `make`.
    """
    for sentence in model_garden_config.not_honoured(params):
        logging.warning("not honoured: %s", sentence)
    return make(params, flags.FLAGS.model_dir, flags.FLAGS.mode, make_multi_task)


def started(params: Params, controller: Controller) -> None:
    """Writes `params.yaml` and the gin bindings of a training that is about to start; for `launch.run`."""
    if "train" in flags.FLAGS.mode and controller.is_chief:
        train_utils.serialize_config(params, flags.FLAGS.model_dir)
        train_utils.save_gin_config(flags.FLAGS.mode, flags.FLAGS.model_dir)


def make(
    params: Params, model_dir: str, mode: str = "train_and_eval", make_multi_task: MakeMultiTask | None = None
) -> Parts:
    """Makes the trainer and the evaluators of an experiment, under the strategy's scope.

    Args:
      params: the configuration.
      model_dir: the run directory.
      mode: as in `--mode`; decides which of them are needed.
      make_multi_task: makes the `MultiTask` of a `MultiTaskExperimentConfig` and its model: a `MultiTaskBaseModel`, or
        one model for all tasks; default the tasks that the configuration names on the model of the first.

    Returns:
      The trainer, and the evaluators by name, which are their TensorBoard directories below `eval`; None for those that
      the mode does not need.
    """
    if model_dir:
        tf.io.gfile.makedirs(model_dir)  # some tasks write there
    if isinstance(params, multitask_configs.MultiTaskExperimentConfig):
        return model_garden_multi_task.make(params, model_dir, mode, make_multi_task)
    experiment = Experiment(_task(params.task, model_dir), params, model_dir)
    # The trainer first: tasks keep the metrics that they build last.
    trainer = TaskTrainer(experiment) if "train" in mode else None
    if "eval" not in mode:
        return trainer, None
    evaluators = {}
    if isinstance(params, multitask_configs.MultiEvalExperimentConfig):
        for routine in params.eval_tasks:
            name = routine.task_name or routine.task_config.name
            evaluators[name] = TaskEvaluator(experiment.of_task(_task(routine.task_config, model_dir, name=name)))
    else:
        evaluators[params.trainer.validation_summary_subdir] = TaskEvaluator(experiment)
    return trainer, evaluators


def _task(config: config_definitions.TaskConfig, model_dir: str, **others: str) -> base_task.Task:
    kind = type(config)
    try:
        if config.BUILDER is None:
            task_factory.get_task_cls(kind)
    except LookupError as error:
        raise UsageError(
            f"no task is registered for {kind.__module__}.{kind.__qualname__}; import the module that registers it "
            "with task_factory.register_task_cls; if the program of the experiment builds its task and trainer itself, "
            "as that of official.recommendation.ranking does, give that trainer to looplib.OrbitTrainer"
        ) from error
    return task_factory.get_task(config, logging_dir=model_dir, **others)


if __name__ == "__main__":
    launch.run(build, settings=settings, started=started)
