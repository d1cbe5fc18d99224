"""What a step of a compiled model reports: the numbers that it returns, under the names that they have in `fit`."""

import sys
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tensorflow as tf

from looplib.compat import keras as _keras
from looplib.compat import models
from looplib.compat.autograph import converted
from looplib.data import rows
from looplib.errors import MetricError
from looplib.keras import building, origins
from looplib.keras.batch_logs import BatchLogs
from looplib.loop.reducer import UnknownOutputsError
from looplib.run import metric_names
from looplib.task import reductions

_HIDDEN = "metric of a repeated name "  # and a number, of metrics that are not reported


@runtime_checkable
class ReportsArrays(Protocol):
    """A task whose reports have a number for each element of a metric that is an array.

    Attributes:
      report_arrays: these metrics of the last report, whole.
    """

    report_arrays: dict[str, np.ndarray]


class KerasResults:
    """The metrics of the steps of one task.

    Keras's own steps report the model's metric objects. What a `train_step` or `test_step` of the model's own returns
    is reported by its names: the last value of what is computed from the state of metrics, which sum it up over steps
    themselves, and the mean over examples of any other. Of several replicas, the last value is computed again from the
    metrics of all of them. Compiled losses and metrics of tf_keras that the step never updates are left out, as
    in `fit`, which does not build them.

    Args:
      model: the compiled model.
      step: its method, "train_step" or "test_step".
      batch_logs: takes the logs of each batch too; or None.

    Attributes:
      arrays: the metrics of the last report that are arrays, of any shape.
    """

    def __init__(self, model: Any, step: str, batch_logs: BatchLogs | None = None) -> None:
        self._model, self._step, self._batch_logs = model, step, batch_logs
        self._own = models.has_own_step(model, step)
        self._on_several = model.distribute_strategy.num_replicas_in_sync > 1
        self._names: dict[str, str] = {}  # in fit, by those in reports
        self._returned: dict[str, str] | None = None  # in reports, by the names that an own step returns; None for all
        self._idle: set[str] = set()  # what an own step returns of compiled metrics that it does not update
        self._summed: dict[str, Any] = {}  # metrics that compute values from the sums over replicas, by name
        self.arrays: dict[str, np.ndarray] = {}

    def of_step(self, inputs: Any, number: tf.Tensor | None = None) -> dict[str, Any]:
        """Runs a step; returns its metrics, for `finished`. In replica context.

        Args:
          inputs: the batch.
          number: the steps before; only the logs of each batch need it.

        Raises:
          UsageError: for a value that is computed from metrics and from others on several replicas.
        """
        if self._own and tf.executing_eagerly():
            return self._of_eager_step(inputs, number)
        logs = self._run(inputs)
        self._idle = self._not_updated(logs)
        return self._outputs(inputs, logs, number, self._is_last(logs))

    def _run(self, inputs: Any) -> Any:
        run = converted(getattr(self._model, self._step))
        try:
            return run(inputs)
        except ValueError as error:
            building.explain(error)
            raise

    def _of_eager_step(self, inputs: Any, number: tf.Tensor | None) -> dict[str, Any]:
        if self._on_several:
            if self._returned is None:
                raise UnknownOutputsError  # the step is traced first
            known = {name for name, place in self._returned.items() if place != self._alone(name)}
            logs = self._run(inputs)
            return self._outputs(inputs, logs, number, known)
        tape, variables = origins.watching(self._metrics())
        with tape:
            for variable in variables:
                tape.watch(variable)
            compiled = models.compiled_metrics(self._model)
            before = [[one.numpy() for one in metric.variables] for metric in compiled]
            logs = self._run(inputs)
            flat = _flattened(logs)
        last = {name for name, value in flat.items() if tf.is_tensor(value) and value.dtype.is_floating}
        last = {name for name in last if origins.depends_by(tape, flat[name], variables)}
        for metric, values in zip(compiled, before):
            if all(np.array_equal(one.numpy(), value) for one, value in zip(metric.variables, values)):
                own = origins.watching([metric])[1]
                self._idle |= {metric.name} & {name for name in last if origins.depends_by(tape, flat[name], own)}
        return self._outputs(inputs, logs, number, last)

    @tf.autograph.experimental.do_not_convert
    def _not_updated(self, logs: Any) -> set[str]:
        """Returns the names of compiled metrics that a traced step has returned and not updated."""
        names = set()
        for metric in models.compiled_metrics(self._model) if self._own else ():
            value = _flattened(logs).get(metric.name)
            found = origins.Origins([metric])
            if tf.is_symbolic_tensor(value) and found.depends(value) and not found.may_change():
                names.add(metric.name)
        return names

    @tf.autograph.experimental.do_not_convert
    def _is_last(self, logs: Any) -> set[str]:
        """Returns the names of what a traced step has computed from the state of metrics."""
        found, last = origins.Origins(self._metrics()) if self._own else None, set()
        for name, value in _flattened(logs).items() if found else ():
            if tf.is_symbolic_tensor(value) and found.depends(value):
                last.add(name)
                if self._on_several:
                    self._sum(name, found.recomputed(value))
        return last

    def _sum(self, name: str, value: origins.Recomputed | None) -> None:
        if value is None:
            raise MetricError(
                f"{type(self._model).__name__}.{self._step} returned {name!r}, which is computed from the state of "
                "metrics and from something else (other tensors, or what a metric held before the step changed it "
                "last), so that no replica has its value for all of them; return what is computed from the results of "
                "metrics alone after their updates, and the rest by other names, or use one replica"
            )
        if not value.of_all_replicas:
            self._summed.setdefault(name, _Summed(self._model, name)).value = value

    @tf.autograph.experimental.do_not_convert
    def _outputs(self, inputs: Any, logs: Any, number: tf.Tensor | None, last: set[str]) -> dict[str, Any]:
        returns = isinstance(logs, dict)
        logs = {name: value for name, value in _flattened(logs).items() if name not in self._idle}
        metrics = self._by_name()
        self._note_names(metrics)
        metric_names.check(f"the compiled {type(self._model).__name__}", {*self._names.values(), *logs})
        size = tf.cast(rows.count(rows.parts(inputs)[0]), tf.float64)
        outputs, places = dict(metrics), {}
        for name, value in logs.items():
            if self._own or name not in self._names.values():
                places[name] = self._alone(name) if self._own else name
                exact = tf.cast(value, tf.float64)  # a mean of integers would be one
                # Guards watch the mean of a loss in each step, also where the last value is reported.
                outputs[places[name]] = reductions.mean(tf.reduce_mean(exact), size)
            if name in last:
                places[name] = f"last {places[name]}"
                summed = self._summed.get(name)
                outputs[places[name]] = summed.metric if summed else reductions.last(value)
        if self._own and returns:
            self._returned = places
        return outputs if self._batch_logs is None else outputs | self._batch_logs.outputs(logs, number)

    def finished(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Returns the metrics of a report with the names and the values that they have in `fit`.

        An array is a number for each element, such as `f1_0`; `arrays` has the whole.
        """
        metrics = metrics if self._batch_logs is None else self._batch_logs.taken(metrics)
        metrics = {name: value for name, value in metrics.items() if not name.startswith(_HIDDEN)}
        found = {self._names.get(name, name): value for name, value in metrics.items()}
        if self._returned is not None:
            kept = metrics.keys() - self._names.keys() - {self._alone(name) for name in self._returned}
            found = {name: metrics[name] for name in kept - {*self._returned.values()}}
            found |= {name: metrics[place] for name, place in self._returned.items() if place in metrics}
        self.arrays = {name: value for name, value in found.items() if np.ndim(value)}
        for name, value in self.arrays.items():
            del found[name]
            found |= {f"{name}_{number}": one for number, one in enumerate(np.ravel(value))}
        return found

    def _by_name(self) -> dict[str, Any]:
        """Returns the listed metrics; of those with one name, such as those of layers, `fit` reports the last."""
        found: dict[str, Any] = {}
        for metric in self._model.metrics:
            if metric.name in found:  # it is to begin anew after a report too
                found[f"{_HIDDEN}{len(found)}"] = found[metric.name]
            found[metric.name] = metric
        return found

    def _metrics(self) -> list[Any]:
        """Returns the metrics of the model, also those that its `metrics` leaves out."""
        return [*self._model.metrics, *models.unlisted_metrics(self._model)]

    def _note_names(self, metrics: dict[str, Any]) -> None:
        for key, metric in metrics.items():
            result = metric.result()
            self._names |= (_paths(key, result) if isinstance(result, dict) else {}) or {key: key}

    def _alone(self, name: str) -> str:
        return f"{name} of {self._step}"


class _Summed:
    """A value that is computed from the sums of metrics over replicas, as a metric, which a report takes the result of.

    Args:
      model: whose family the metric is of.
      name: of the value.

    Attributes:
      value: the value, as the newest trace computes it.
      metric: the metric, without variables of its own.
    """

    def __init__(self, model: Any, name: str) -> None:
        self.value: origins.Recomputed | None = None

        class OfOthers(sys.modules[_keras.family(model)].metrics.Metric):
            @tf.autograph.experimental.do_not_convert
            def update_state(own, *_: Any, **__: Any) -> None:  # noqa: N805
                """Leaves this to the metrics."""

            def result(own) -> tf.Tensor:  # noqa: N805
                return self.value.now()

            @tf.autograph.experimental.do_not_convert
            def reset_state(own) -> None:  # noqa: N805
                """Leaves this to the metrics."""

        self.metric = OfOthers(name=name)


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
        flat |= _flattened(value) if isinstance(value, dict) else {name: _keras.value_now(value)}
    return flat
