"""The metrics of a Model Garden task, as Keras metrics that a step returns."""

import contextlib
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tf_keras
from official.core import base_task

from looplib import UsageError


@runtime_checkable
class MetricLike(Protocol):
    """An object that tasks use as a metric and that is none of Keras's, such as YOLO's `ListMetrics`."""

    name: str

    def update_state(self, *values: Any) -> Any:
        """Adds the values of a batch."""

    def result(self) -> Any:
        """Returns a number, or a dict of numbers."""

    def reset_states(self) -> None:
        """Starts anew."""


class _Reported(tf_keras.metrics.Metric):
    """A Keras metric that has the results of a `MetricLike`, which keeps its state in Keras metrics.

    Args:
      metric: the object, which the task updates.
      held: the Keras metrics that it keeps.
    """

    def __init__(self, metric: MetricLike, held: Sequence[tf_keras.metrics.Metric]) -> None:
        super().__init__(name=metric.name)
        self._metric, self.held = metric, list(held)

    def update_state(self, *values: Any) -> Any:
        return self._metric.update_state(*values)

    def result(self) -> Any:
        return self._metric.result()

    def reset_state(self) -> None:
        self._metric.reset_states()


class TaskMetrics:
    """The metrics of a task and of its model.

    It is a plain object, which a checkpoint does not look into.

    Args:
      task: the task.
      model: its model.
      training: whether they are those of the training.

    Attributes:
      of_task: the objects that the task's steps update.
      reported: a Keras metric for each of them, which a checkpoint keeps.

    Raises:
      UsageError: if one of them is neither a Keras metric, nor keeps its state in some.
    """

    def __init__(self, task: base_task.Task, model: tf_keras.Model, training: bool) -> None:
        self.of_task = task.build_metrics(training=training) + list(model.metrics)
        self.reported = [_reported(metric, type(task).__name__) for metric in self.of_task]

    def by_name(self) -> dict[str, tf_keras.metrics.Metric]:
        """Returns what is reported by names; a second metric of a name gets a number."""
        named: dict[str, tf_keras.metrics.Metric] = {}
        for metric in self.reported:
            name, number = metric.name, 2
            while name in named:
                name, number = f"{metric.name}_{number}", number + 1
            named[name] = metric
        return named


def _reported(metric: Any, task: str) -> tf_keras.metrics.Metric:
    if isinstance(metric, tf_keras.metrics.Metric):
        return metric
    held = _metrics_in(list(vars(metric).values())) if isinstance(metric, MetricLike) else ()
    if not held:
        raise UsageError(
            f"{task}.build_metrics returned a {type(metric).__name__}; expected Keras metrics, or objects with name, "
            "update_state, result and reset_states that keep their state in Keras metrics; compute others in "
            "aggregate_logs and reduce_aggregated_logs, which run on the host"
        )
    return _Reported(metric, held)


def _metrics_in(value: Any) -> list[tf_keras.metrics.Metric]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [metric for item in value for metric in _metrics_in(item)]
    return [value] if isinstance(value, tf_keras.metrics.Metric) else []


@contextlib.contextmanager
def results_of_this_replica(metrics: Sequence[tf_keras.metrics.Metric]) -> Iterator[None]:
    """Makes `result` of metrics, and of those that they hold, that of this replica alone, within a `with` block.

    Tasks put results into the logs of each step, where nobody reads them. A result over all replicas would need all of
    them, and a replica without examples leaves its step out.
    """
    held = [inner for metric in metrics if isinstance(metric, _Reported) for inner in metric.held]
    every = [*metrics, *held]
    kept = [vars(metric).get("result") for metric in every]
    for metric in every:
        vars(metric)["result"] = types.MethodType(type(metric).result, metric)
    try:
        yield
    finally:
        for metric, result in zip(every, kept):
            vars(metric).pop("result")
            if result is not None:
                vars(metric)["result"] = result


def flat(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns numbers by name: a list gives one for each element, such as `iou_0`, `iou_1`; an image gives none."""
    numbers: dict[str, Any] = {}
    for name, value in metrics.items():
        value = np.asarray(value)
        if value.dtype.kind in "fiub" and value.ndim <= 1:
            parts = enumerate(value) if value.ndim else [(None, value)]
            numbers.update({name if number is None else f"{name}_{number}": part.item() for number, part in parts})
    return numbers
