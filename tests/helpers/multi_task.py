"""A multi-task experiment: one BERT of a layer with two heads, for classifying sentences and for tagging their words."""

import copy
import pathlib

import tensorflow as tf
import text_data
import text_experiments
from official.core import exp_factory
from official.modeling.multitask import base_model, configs, multitask, train_lib
from official.nlp.configs import encoders
from official.nlp.modeling import models

TRAINER_TYPES = ("interleaving", "joint")
# By the names of their registered experiments.
TASKS = {"sentence_prediction": "bert/sentence_prediction", "tagging": "bert/tagging"}


class SharedEncoder(base_model.MultiTaskBaseModel):
    """A model for each task, on one encoder."""

    def __init__(self, encoder_config, **kwargs):
        self._encoder_config = encoder_config
        super().__init__(**kwargs)

    def _instantiate_sub_tasks(self):
        encoder = encoders.build_encoder(self._encoder_config)
        return {
            "sentence_prediction": models.BertClassifier(encoder, num_classes=len(text_data.MODULES)),
            "tagging": models.BertTokenClassifier(
                encoder, num_classes=len(text_data.TAGS), output="logits", output_encoder_outputs=True
            ),
        }


def make_data(directory):
    """Writes the data of both tasks; returns what `experiment` needs, by the task's name."""
    return {
        name: text_experiments.TEXT[kind].make_data(str(pathlib.Path(directory, name))) for name, kind in TASKS.items()
    }


def experiment(trainer_type, data):
    """The configuration of an experiment.

    Args:
      trainer_type: "interleaving", each step is of one task, drawn at random; or "joint", each step is of both.
      data: what `make_data` returned.

    Returns:
      `official.modeling.multitask.configs.MultiTaskExperimentConfig`.
    """
    routines = []
    for name, kind in TASKS.items():
        single = exp_factory.get_exp_config(kind)
        single.override(text_experiments.TEXT[kind].overrides(data[name]))
        weight = 2.0 if name == "tagging" else 1.0
        routines.append(configs.TaskRoutine(task_name=name, task_config=single.task, eval_steps=3, task_weight=weight))
    trainer = configs.MultiTaskTrainerConfig(**{**single.trainer.as_dict(), "trainer_type": trainer_type})
    return configs.MultiTaskExperimentConfig(
        task=configs.MultiTaskConfig(task_routines=tuple(routines)),
        trainer=trainer,
        runtime=copy.deepcopy(single.runtime),
    )


def build(config, logging_dir=None):
    """Makes the tasks and their model; call it under the strategy's scope.

    Args:
      config: what `experiment` returned.
      logging_dir: where tasks may write.

    Returns:
      (`MultiTask`, `SharedEncoder`)
    """
    task = multitask.MultiTask.from_config(config.task, logging_dir)
    return task, SharedEncoder(config.task.task_routines[0].task_config.model.encoder)


def run_under_the_driver(config, model_dir):
    """Trains and evaluates with Model Garden's own driver; returns the metrics of an evaluation at the end, by task."""
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    with strategy.scope():
        task, model = build(config, model_dir)
    _, metrics = train_lib.run_experiment(
        distribution_strategy=strategy,
        task=task,
        model=model,
        mode="train_and_eval",
        params=config,
        model_dir=model_dir,
        run_post_eval=True,
    )
    return metrics
