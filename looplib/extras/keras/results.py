"""What a step of a compiled model reports: the numbers that it returns, under the names that they have in `fit`."""

from typing import Any

import numpy as np
import tensorflow as tf

from looplib.compat import keras as _keras
from looplib.data import rows
from looplib.extras.keras import building, models
from looplib.extras.keras.batch_logs import BatchLogs
from looplib.task import metric_names, reductions


class KerasResults:
    """The metrics of the steps of one task, by the model's metric objects where the step has changed these.

    Keras holds metrics that a `train_step` or `test_step` of the model's own may leave alone, such as the loss tracker
    of Keras 3: what the step returns by the name of such a metric is a number of its own, and is averaged.

    Args:
      model: the compiled model.
      step: its method, "train_step" or "test_step".
      batch_logs: takes the logs of each batch too; or None.
    """

    def __init__(self, model: Any, step: str, batch_logs: BatchLogs | None = None) -> None:
        self._model, self._step, self._batch_logs = model, step, batch_logs
        self._own = models.has_own_step(model, step)
        self._names: dict[str, str] = {}  # in fit, by those in reports
        self._objects: dict[str, str] = {}  # the metric that a name in fit belongs to
        self._returned: frozenset[str] | None = None  # the names that an own step returns; None for all

    def of_step(self, inputs: Any, number: tf.Tensor | None = None) -> dict[str, Any]:
        """Runs a step; returns its metrics, for `finished`. In replica context.

        Args:
          inputs: the batch.
          number: the steps before; only the logs of each batch need it.
        """
        run, metrics, before = getattr(self._model, self._step), *self._before()
        try:
            logs = run(inputs)
        except ValueError as error:
            building.explain(error)
            raise
        outputs = self._outputs(inputs, metrics, before, logs)
        return outputs if self._batch_logs is None else outputs | self._batch_logs.outputs(_flattened(logs), number)

    # AutoGraph, which takes longer for this than for a model, is for the step alone.
    @tf.autograph.experimental.do_not_convert
    def _before(self) -> tuple[dict[str, Any], dict[str, list[tf.Tensor]]]:
        metrics = {metric.name: metric for metric in self._model.metrics}
        return metrics, {name: _values(metric) for name, metric in metrics.items()} if self._own else {}

    @tf.autograph.experimental.do_not_convert
    def _outputs(self, inputs: Any, metrics: dict[str, Any], before: dict[str, Any], logs: Any) -> dict[str, Any]:
        returns, logs = isinstance(logs, dict), _flattened(logs)
        self._note_names(metrics)
        metric_names.check(f"the compiled {type(self._model).__name__}", {*self._objects, *logs})
        size = rows.count(rows.parts(inputs)[0])
        outputs = dict(metrics)
        for name, value in logs.items():
            if name not in self._objects or self._own:
                mean = reductions.mean(tf.reduce_mean(value), tf.cast(size, tf.float32))
                outputs[self._alone(name) if name in self._objects else name] = mean
        if self._own and returns:
            self._returned = frozenset(logs)
            for name in {self._objects[name] for name in logs if name in self._objects}:
                outputs[self._changed(name)] = reductions.total(_differ(before[name], _values(metrics[name])))
        return outputs

    def finished(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Returns the metrics of a report with the names and the values that they have in `fit`."""
        metrics = metrics if self._batch_logs is None else self._batch_logs.taken(metrics)
        added = {self._alone(name) for name in self._objects} | {self._changed(name) for name in self._objects.values()}
        found = {}
        for name, value in metrics.items():
            name = self._names.get(name, name)
            if name in added or (name in self._objects and self._returned is not None and name not in self._returned):
                continue
            if metrics.get(self._changed(self._objects.get(name, "")), 1) == 0:
                value = metrics[self._alone(name)]
            each = {f"{name}_{number}": one for number, one in enumerate(np.ravel(value))} if np.ndim(value) else {}
            found |= each or {name: value}
        return found

    def _note_names(self, metrics: dict[str, Any]) -> None:
        for key, metric in metrics.items():
            result = metric.result()
            several = _paths(key, result) if isinstance(result, dict) else {}
            self._names |= several
            self._objects |= dict.fromkeys(several.values() or [key], key)

    def _alone(self, name: str) -> str:
        return f"{name} of {self._step}"

    def _changed(self, metric: str) -> str:
        return f"{self._step} changes {metric}"


def _paths(path: str, results: dict[str, Any]) -> dict[str, str]:
    """Returns the names in `fit` of the results of a metric, also of those in dicts, by their names in reports."""
    names: dict[str, str] = {}
    for key, value in results.items():
        names |= _paths(f"{path}_{key}", value) if isinstance(value, dict) else {f"{path}_{key}": key}
    return names


def _flattened(logs: Any) -> dict[str, Any]:
    """Returns what a step returned without the dicts in it, whose names are those in `fit`; {} if it is no dict."""
    flat: dict[str, Any] = {}
    for name, value in logs.items() if isinstance(logs, dict) else ():
        flat |= _flattened(value) if isinstance(value, dict) else {name: value}
    return flat


def _values(metric: Any) -> list[tf.Tensor]:
    return [_keras.tf_variable(variable).read_value() for variable in metric.variables]


def _differ(before: list[tf.Tensor], after: list[tf.Tensor]) -> tf.Tensor:
    """Returns 1 if a value has changed, else 0; 1 for a metric that has got its variables meanwhile."""
    if len(before) != len(after):
        return tf.constant(1)
    return tf.cast(tf.reduce_any([tf.reduce_any(one != other) for one, other in zip(before, after)]), tf.int32)
