"""Metrics of a task, Keras's or not, are reported and reset as under Model Garden's driver."""

import numpy as np
import pytest

pytest.importorskip("official", reason="needs Model Garden: pip install 'looplib[models]'")

import side_by_side
import tensorflow as tf
import tf_keras
from conftest import make_strategy
from official.core import base_task, config_definitions, task_factory
from official.projects.yolo.tasks.task_utils import ListMetrics

import looplib
from trainers import model_garden

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
BATCH, VALIDATION = 4, 9


class LineConfig(config_definitions.TaskConfig): ...


@task_factory.register_task_cls(LineConfig)
class Line(base_task.Task):
    """A task whose metrics are those of YOLO: no Keras metrics, with several results each."""

    def build_model(self):
        return tf_keras.Sequential([tf_keras.Input((4,)), tf_keras.layers.Dense(1)])

    def build_inputs(self, params, input_context=None):
        dataset = tf.data.Dataset.from_tensor_slices(X if params.is_training else X[:VALIDATION])
        batch = input_context.get_per_replica_batch_size(BATCH) if input_context else BATCH
        return dataset.repeat().batch(batch) if params.is_training else dataset.batch(batch)

    def build_metrics(self, training=True):
        return [ListMetrics(["loss", "largest"], name="net"), ListMetrics(["loss"], name="5")]

    def train_step(self, inputs, model, optimizer, metrics=None):
        with tf.GradientTape() as tape:
            loss, values = self.losses_of(inputs, model)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return self.logs(loss, values, metrics)

    def validation_step(self, inputs, model, metrics=None):
        return self.logs(*self.losses_of(inputs, model), metrics)

    def losses_of(self, inputs, model):
        losses = tf.square(model(inputs)[:, 0] - 1)
        return tf.reduce_mean(losses), {"loss": tf.reduce_mean(losses), "largest": tf.reduce_max(losses)}

    def logs(self, loss, values, metrics):
        logs = {self.loss: loss}
        for metric in metrics:
            metric.update_state(values)
            logs[metric.name] = metric.result()
        return logs


def configuration(task=LineConfig):
    optimizer = {"optimizer": {"type": "sgd"}, "learning_rate": {"type": "constant"}}
    steps = {"train_steps": 4, "steps_per_loop": 2, "checkpoint_interval": 4, "validation_interval": 4}
    trainer = config_definitions.TrainerConfig(**steps, validation_steps=-1, optimizer_config=optimizer)
    data = {"train_data": {"is_training": True}, "validation_data": {"is_training": False}}
    return config_definitions.ExperimentConfig(task=task(**data), trainer=trainer)


def means(weights, replicas):
    """The results of the metrics over the parts that replicas have of the validation batches."""
    kernel, bias = weights
    losses = np.square((X[:VALIDATION] @ kernel)[:, 0] + bias - 1)
    parts = [losses[start : start + BATCH // replicas] for start in range(0, VALIDATION, BATCH // replicas)]
    mean = np.mean([part.mean() for part in parts])
    return {"net_loss": mean, "5_loss": mean, "net_largest": np.mean([part.max() for part in parts])}


def test_objects_that_a_task_uses_as_metrics_report_what_they_do_under_the_driver(tmp_path):
    params = configuration()
    with side_by_side.eagerly():
        theirs = side_by_side.under_the_driver(params, f"{tmp_path}/theirs")
    reports = []
    ours = side_by_side.under_looplib(params, f"{tmp_path}/ours", steps_per_loop=1, watch=reports.append)
    for name, value in means(theirs.weights, replicas=1).items():
        assert theirs.evaluation[name] == pytest.approx(value, rel=1e-5)
        assert ours.evaluation[name] == pytest.approx(value, rel=1e-5)
    training = [event.metrics for event in reports if event.split == "train"]
    assert [metrics["net_loss"] for metrics in training] == pytest.approx(list(ours.losses.values()), rel=1e-6)
    assert len(training) == 4  # each report has the mean of its own steps alone


@pytest.mark.slow
def test_objects_that_a_task_uses_as_metrics_are_summed_over_replicas_of_which_one_is_empty(tmp_path):
    strategy = make_strategy("mirrored_x2")
    built, trainer = side_by_side.controller(configuration(), str(tmp_path), strategy=strategy)
    with built:
        found = built.train_and_evaluate(4, 4)["validation"]
    for name, value in means(trainer.model.get_weights(), replicas=2).items():
        assert found[name] == pytest.approx(value, rel=1e-5)


def test_a_metric_without_a_state_in_keras_metrics_is_refused(tmp_path, monkeypatch):
    class Counter:
        name, count = "count", 0

        def update_state(self, values):
            self.count += 1

        def result(self):
            return self.count

        def reset_states(self):
            self.count = 0

    monkeypatch.setattr(Line, "build_metrics", lambda self, training=True: [Counter()])
    with pytest.raises(looplib.UsageError, match="Line.build_metrics.*Counter.*aggregate_logs"):
        model_garden.make(configuration(), str(tmp_path))


def test_a_task_that_no_module_registers_is_refused_with_what_to_do(tmp_path):
    class ByHandConfig(config_definitions.TaskConfig): ...

    with pytest.raises(looplib.UsageError, match="ByHandConfig.*register_task_cls.*OrbitTrainer"):
        model_garden.make(configuration(ByHandConfig), str(tmp_path))
