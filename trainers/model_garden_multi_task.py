"""Model Garden's multi-task experiments: its own trainers of several tasks in looplib's adapter for Orbit's classes."""

import tensorflow as tf
from official.core import train_utils
from official.modeling.multitask import evaluator as multitask_evaluator
from official.modeling.multitask import multitask, train_lib

import looplib


class MultiTaskTrainer(looplib.OrbitTrainer):
    """Trains several tasks, interleaved or jointly, by one of Model Garden's own trainers.

    Args:
      trainer: `official.modeling.multitask.base_trainer.MultiTaskBaseTrainer`.
    """

    def __init__(self, trainer):
        super().__init__(trainer, checkpoint=trainer.checkpoint)

    def initialize(self):
        """Loads pre-trained weights as the model says."""
        if hasattr(self.model, "initialize"):
            self.model.initialize()


def make(params, model_dir, mode, make_multi_task=None):
    """Makes the trainer and the evaluator of a multi-task experiment; see `model_garden.make`.

    Args:
      params: `MultiTaskExperimentConfig`.
      model_dir: the run directory.
      mode: what of it is needed.
      make_multi_task: function of `params` that returns `(MultiTask, model)`.

    Returns:
      `(MultiTaskTrainer, evaluators)`; None for what the mode does not need.
    """
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
