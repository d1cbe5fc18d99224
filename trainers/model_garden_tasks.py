"""A Model Garden task as a looplib Trainer and Evaluator."""

import contextlib
import copy
import inspect
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from official.core import base_task, config_definitions, train_utils
from official.modeling import optimization

import looplib
from looplib import UsageError
from looplib.base.messages import gist
from trainers.model_garden_metrics import TaskMetrics, flat, results_of_this_replica

_MOST_IMAGES = 20  # as many as Model Garden's own summaries have


class Experiment:
    """The task, model and optimizer that a trainer and an evaluator of one experiment share.

    It is a plain object, which a checkpoint does not look into.

    Args:
      task: the task.
      params: the configuration.
      model_dir: the run directory.

    Attributes:
      model: the task's model, with its variables.
      strategy: the strategy in whose scope this is made.
      optimizer: the task's optimizer, with shadow variables if it averages weights; None if the experiment has none.
    """

    def __init__(self, task: base_task.Task, params: config_definitions.ExperimentConfig, model_dir: str) -> None:
        self.task = task
        self.params = params
        self.model_dir = model_dir
        self.strategy = tf.distribute.get_strategy()
        self.model = task.build_model()
        if not self.model.built:
            self._make_variables()
        has_optimizer = params.trainer.optimizer_config and params.trainer.optimizer_config.optimizer.type
        self.optimizer = train_utils.create_optimizer(task, params) if has_optimizer else None
        if self.averages:
            self.optimizer.shadow_copy(self.model)

    @property
    def averages(self) -> bool:
        """Returns whether the optimizer keeps an exponential moving average of the weights."""
        return isinstance(self.optimizer, optimization.ExponentialMovingAverage)

    def averaged(self) -> Iterator[tuple[tf.Variable, tf.Variable]]:
        """Yields each weight of the model with its average."""
        for weight in self.model.variables:
            try:
                yield weight, self.optimizer.get_slot(weight, "average")
            except KeyError:
                pass  # it may keep those of trainable weights only

    def of_task(self, task: base_task.Task) -> "Experiment":
        """Returns a copy of this experiment, with its model, for another task: one to evaluate."""
        other = copy.copy(self)
        other.task = task
        return other

    def inputs(self, data: config_definitions.DataConfig, context: looplib.InputContext) -> tf.data.Dataset:
        """Builds the task's pipeline for one of its `DataConfig`s.

        Raises:
          UsageError: if the data cannot be read.
        """
        try:
            return self._inputs(data, context)
        except (ValueError, OSError, tf.errors.OpError) as error:
            split = "train_data" if context.training else "validation_data"
            raise UsageError(
                f"the pipeline of task.{split} cannot be built ({gist(error)}); look at its input_path "
                f"({getattr(data, 'input_path', None)!r}) and tfds_name"
            ) from error

    def _inputs(self, data: config_definitions.DataConfig, context: looplib.InputContext) -> tf.data.Dataset:
        if "input_context" not in inspect.signature(self.task.build_inputs).parameters:
            return self.task.build_inputs(data)
        place = tf.distribute.InputContext(context.num_pipelines, context.pipeline_index, context.num_replicas)
        return self.task.build_inputs(data, input_context=place)

    def _make_variables(self) -> None:
        """Calls the model with a batch of zeros, because some models make their variables in their first call."""
        dataset = self.task.build_inputs(self.params.task.train_data)

        def zeros(spec: tf.TensorSpec) -> tf.Tensor:
            return tf.zeros([size or 1 for size in spec.shape.as_list()], spec.dtype)

        inputs = tf.nest.map_structure(zeros, dataset.element_spec)
        self.model(inputs[0] if isinstance(inputs, tuple) and len(inputs) == 2 else inputs, training=False)


class TaskTrainer(looplib.Trainer):
    """Trains a Model Garden task by its own `train_step`.

    Reports the values of Model Garden's driver under their names: `training_loss`, the task's training metrics and
    `learning_rate`.

    Args:
      experiment: the experiment.

    Raises:
      UsageError: if it has no optimizer.
    """

    loss_name = "training_loss"
    batch_size_varies = True  # batches of a translation have a number of tokens, not of examples

    def __init__(self, experiment: Experiment) -> None:
        if experiment.optimizer is None:
            raise UsageError(
                "the experiment has no optimizer to train with; set the types in trainer.optimizer_config.optimizer "
                "and trainer.optimizer_config.learning_rate"
            )
        self._experiment = experiment
        self.model = experiment.model
        self.optimizer = experiment.optimizer
        self._metrics = TaskMetrics(experiment.task, self.model, training=True)
        self.train_metrics = self._metrics.reported
        for name, item in getattr(self.model, "checkpoint_items", {}).items():
            setattr(self, name, item)

    def dataset(self, context: looplib.InputContext) -> tf.data.Dataset:
        """See `looplib.Trainer.dataset`."""
        return self._experiment.inputs(self._experiment.params.task.train_data, context)

    def step_fn(self, inputs: Any) -> Mapping[str, Any]:
        """Calls the task's `train_step` on one replica's batch."""
        task = self._experiment.task
        rate = looplib.learning_rate(self.optimizer)  # before the update, which counts on to the next step's
        logs = task.train_step(inputs, model=self.model, optimizer=self.optimizer, metrics=self._metrics.of_task)
        values = {"training_loss": _mean(logs[task.loss], inputs), "learning_rate": looplib.last(rate)}
        return {**values, **self._metrics.by_name()}

    def initialize(self) -> None:
        """Loads the task's pre-trained checkpoint, if its configuration names one."""
        self._experiment.task.initialize(self.model)

    def loop_end(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Gives each number of a metric with several a name of its own."""
        return flat(metrics)


class TaskEvaluator(looplib.Adapter, looplib.Evaluator):
    """Evaluates a Model Garden task by its own `validation_step`, with averaged weights where its optimizer has them.

    `validation_loss` is the mean of the batches' losses weighted by their examples. Model Garden's own driver does not
    weight them, so a smaller last batch counts too much there. The task's `aggregate_logs` gets the logs of each step.
    The images that it makes of them (`task.allow_image_summary`) are shown.

    Args:
      experiment: the experiment.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self.model = experiment.model
        if experiment.averages:
            self.optimizer = experiment.optimizer
        self._metrics = TaskMetrics(experiment.task, self.model, training=False)
        self.validation_metrics = self._metrics.reported
        self.global_batch_size = self._data.global_batch_size or None
        self._aggregates = type(experiment.task).aggregate_logs is not base_task.Task.aggregate_logs
        self._state = self._exporter = self._averages = None
        self._collected = False
        self._images: dict[str, np.ndarray] = {}
        found = [value for value in vars(experiment.task).values() if isinstance(value, tf_keras.metrics.Metric)]
        self._of_task = [metric for metric in found if all(metric is not other for other in self.validation_metrics)]
        self._options = experiment.params.trainer

    @property
    def own_actions(self) -> Sequence[Callable[[looplib.Event], object]]:
        """See `looplib.Adapter.own_actions`."""
        return (self._show_images,)

    def _show_images(self, event: looplib.Event) -> None:
        images, self._images = self._images, {}  # of the evaluation that this event reports
        if images:
            event.controller.show(
                {name: looplib.image(each, _MOST_IMAGES) for name, each in images.items()}, event.split
            )

    @property
    def _data(self) -> config_definitions.DataConfig:
        return self._experiment.task.task_config.validation_data

    def dataset(self, context: looplib.InputContext) -> tf.data.Dataset:
        """See `looplib.Evaluator.dataset`."""
        return self._experiment.inputs(self._data, context)

    def step_fn(self, inputs: Any) -> Mapping[str, Any]:
        """Calls the task's `validation_step` on one replica's batch."""
        task = self._experiment.task
        with results_of_this_replica([*self.validation_metrics, *self._of_task]):
            logs = task.validation_step(inputs, model=self.model, metrics=self._metrics.of_task)
        outputs: dict[str, Any] = self._metrics.by_name()
        if task.loss in logs:
            outputs["validation_loss"] = _mean(logs[task.loss], inputs)
        if self._aggregates:
            outputs["logs"] = looplib.each(logs)
        return outputs

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Gives the model its averaged weights, and afterwards its own weights back, bit by bit.

        The optimizer's own `swap_weights` adds and subtracts, which leaves rounding errors in the weights.
        """
        self._state, self._collected = None, False
        for metric in self._of_task:
            metric.reset_state()
        if not self._experiment.averages:
            yield
            return
        weights, averages = zip(*self._experiment.averaged())
        with self._kept(weights):
            for weight, average in zip(self._parts(weights), self._parts(averages)):
                weight.assign(average)
            yield

    def _parts(self, variables: Iterable[tf.Variable]) -> list[tf.Variable]:
        """Returns the variables of each replica of this worker that distributed variables consist of."""
        return [
            part for variable in variables for part in self._experiment.strategy.experimental_local_results(variable)
        ]

    @contextlib.contextmanager
    def _kept(self, variables: Iterable[tf.Variable]) -> Iterator[None]:
        """Restores the present values of variables at the end of a `with` block."""
        parts = self._parts(variables)
        values = [part.read_value() for part in parts]
        try:
            yield
        finally:
            for part, value in zip(parts, values):
                part.assign(value)

    def collect(self, outputs: Sequence[Mapping[str, Any]]) -> None:
        """Passes a step's logs to the task's `aggregate_logs`.

        Some tasks reset their own metrics in its first call, which comes after the first step has updated them: under
        Model Garden's driver the first batch is missing from the mean IoU of a segmentation. Here it counts.
        """
        if not outputs:
            return
        logs = tf.nest.map_structure(lambda *parts: parts, *(output["logs"] for output in outputs))
        first = [] if self._collected else [variable for metric in self._of_task for variable in metric.variables]
        with self._kept(first):
            self._state = self._experiment.task.aggregate_logs(self._state, logs)
        self._collected = True

    def loop_end(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Adds the metrics of the task's aggregated logs, and exports the best and the averaged weights."""
        if self._state is not None:
            reduced = self._experiment.task.reduce_aggregated_logs(self._state, global_step=self.global_step)
            metrics = {**metrics, **{name: np.asarray(value) for name, value in reduced.items()}}
            self._images = {name: each for name, each in metrics.items() if name.startswith("image/")}
            self._state = None
        metrics = flat(metrics)
        if self._options.best_checkpoint_export_subdir and self._options.best_checkpoint_eval_metric:
            metrics = self._export_best(metrics)
        if self._experiment.averages:
            self._save_averages()
        return metrics

    def _checkpoint(self) -> tf.train.Checkpoint:
        items = {"optimizer": self._experiment.optimizer} if self._experiment.optimizer else {}
        return tf.train.Checkpoint(model=self.model, global_step=self.global_step, **items)

    def _directory(self, name: str) -> str:
        """Returns the folder to export to: all workers take part in a save, and only the chief's files are kept."""
        chief = self._experiment.strategy.extended.should_checkpoint
        return os.path.join(self._experiment.model_dir if chief else tempfile.mkdtemp(), name)

    def _export_best(self, metrics: dict[str, Any]) -> dict[str, Any]:
        options, name = self._options, self._options.best_checkpoint_eval_metric
        if name not in metrics:
            raise UsageError(
                f"trainer.best_checkpoint_eval_metric is {name!r}, and the evaluation gives "
                f"{', '.join(sorted(metrics))}; name one of these"
            )
        if self._exporter is None:
            folder = self._directory(options.best_checkpoint_export_subdir)
            better = options.best_checkpoint_metric_comp
            self._exporter = train_utils.BestCheckpointExporter(folder, name, better), self._checkpoint()
        exporter, checkpoint = self._exporter
        exporter.maybe_export_checkpoint(checkpoint, metrics, int(self.global_step))
        return {**metrics, f"best_{name}": float(exporter.best_ckpt_logs[name])}

    def _save_averages(self) -> None:
        if self._averages is None:
            folder, most = self._directory("ema_checkpoints"), self._options.max_to_keep
            name = "average_weights"
            self._averages = tf.train.CheckpointManager(
                self._checkpoint(), folder, max_to_keep=most, checkpoint_name=name
            )
        self._averages.save(checkpoint_number=int(self.global_step))


def _mean(loss: tf.Tensor, inputs: Any) -> Any:
    """Returns a batch's mean loss, weighted by the number of its examples."""
    leaf = next(leaf for leaf in tf.nest.flatten(inputs) if leaf.shape.rank != 0)
    return looplib.mean(loss, weight=tf.shape(leaf)[0])
