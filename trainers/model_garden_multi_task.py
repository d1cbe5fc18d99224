"""Model Garden's multi-task experiments: its own trainers of several tasks in looplib's adapter for Orbit's classes."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import tensorflow as tf
from official.core import train_utils
from official.modeling.multitask import base_trainer, configs, multitask, train_lib
from official.modeling.multitask import evaluator as multitask_evaluator

import looplib


@runtime_checkable
class _Initialized(Protocol):
    """A model that loads pre-trained weights, as Model Garden's `MultiTaskBaseModel` does."""

    def initialize(self) -> None: ...


class MultiTaskTrainer(looplib.OrbitTrainer):
    """Trains several tasks, interleaved or jointly, by one of Model Garden's own trainers.

    Args:
      trainer: the trainer of Model Garden.
    """

    def __init__(self, trainer: base_trainer.MultiTaskBaseTrainer) -> None:
        super().__init__(trainer, checkpoint=trainer.checkpoint)

    def initialize(self) -> None:
        """Loads the model's pre-trained weights, if it has any."""
        if isinstance(self.model, _Initialized):
            self.model.initialize()


def make(
    params: configs.MultiTaskExperimentConfig,
    model_dir: str,
    mode: str,
    make_multi_task: Callable[[configs.MultiTaskExperimentConfig], tuple[multitask.MultiTask, Any]] | None = None,
) -> tuple[MultiTaskTrainer | None, dict[str, looplib.OrbitEvaluator] | None]:
    """Makes the trainer and the evaluator of a multi-task experiment; see `model_garden.make`."""
    if make_multi_task:
        task, model = make_multi_task(params)
    else:
        task = multitask.MultiTask.from_config(params.task, model_dir)
        model = next(iter(task.tasks.values())).build_model()
    trainer = evaluators = None
    if "train" in mode:
        strategy = tf.distribute.get_strategy()
        trainer = MultiTaskTrainer(train_lib.get_trainer(strategy, params, task, model))
    if "eval" in mode:
        evaluator = multitask_evaluator.MultiTaskEvaluator(
            eval_tasks=list(task.tasks.values()),
            model=model,
            eval_steps=task.task_eval_steps,
            global_step=trainer.trainer.global_step if trainer else None,
            checkpoint_exporter=train_utils.maybe_create_best_ckpt_exporter(params, model_dir),
        )
        checkpoint = None if trainer else evaluator.checkpoint
        evaluators = {params.trainer.validation_summary_subdir: looplib.OrbitEvaluator(evaluator, checkpoint)}
    return trainer, evaluators
