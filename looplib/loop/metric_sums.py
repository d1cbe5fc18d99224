"""Whether what a metric keeps may be summed over replicas."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.compat import keras as _keras
from looplib.errors import UsageError
from looplib.loop.step import Step


def check(step: Step, who: str, metrics: Mapping[str, Any]) -> None:
    """Checks metrics of classes that are not Keras's own, by two steps that change nothing in the end.

    TensorFlow sums what replicas keep for a metric. That is the metric of the global batch only where every step adds
    to it, and adds a number that does not depend on the steps before: not for a maximum or a moving average.

    Args:
      step: the traced step, on several replicas, with its data.
      who: the user's method, for the message.
      metrics: dict from name to Keras metric, each of them returned by the step.

    Raises:
      UsageError: for a metric that is not such a sum.
    """
    kept = {f"the variable {_keras.variable_path(v)} of the metric {name!r}": v for name, v in _foreign(metrics)}
    if not kept:
        return
    before = [(variable, tf.identity(variable)) for variable in step.variables]
    iterator = step.stream.iterate()
    try:
        optional = step.stream.next_as_optional(iterator)
        if not step.stream.has_value(optional):
            return
        batch = step.stream.get_value(optional)
        first = _values(step, kept)
        step.contribution(batch)
        second = _values(step, kept)
        own = {id(part) for v in kept.values() for part in step.strategy.experimental_local_results(v)}
        _put_back((variable, value) for variable, value in before if id(variable) not in own)
        step.contribution(batch)
        third = _values(step, kept)
    finally:
        _put_back(before)
        step.stream.end(iterator)
    tolerance = 0.5 if step.random_ops else 1e-3  # other random numbers may change it a little
    for name, at_first in first.items():
        change, again = second[name] - at_first, third[name] - second[name]
        sums = np.linalg.norm(again - change) <= tolerance * np.linalg.norm(change)
        if np.any(second[name] != at_first) and (np.any(at_first) or not sums or not is_summed(kept[name])):
            raise UsageError(
                f"{name} ({who}) is not a sum over examples that begins with zero and that replicas sum (a maximum, a "
                "moving average, or what derives from sums, say), so that the metric would be wrong on several "
                "replicas; keep sums in add_weight's default aggregation, compute the rest in result(), or use one "
                "replica"
            )


def _foreign(metrics: Mapping[str, Any]) -> Iterable[tuple[str, tf.Variable]]:
    """Yields the variables of metrics of other classes than Keras's own, which all keep sums."""
    for metric in metrics.values():
        for one in _keras.inner_metrics(metric):
            if not _keras.is_own_class(one):
                yield from ((one.name, _keras.tf_variable(variable)) for variable in one.variables)


def is_summed(variable: tf.Variable) -> bool:
    """Returns whether each replica keeps a value of a variable, and what is read is their sum."""
    sums = (tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM)
    return (variable.synchronization, variable.aggregation) == sums


def _values(step: Step, kept: Mapping[str, tf.Variable]) -> dict[str, np.ndarray]:
    """Returns what the first replica of this process keeps, float64 `[n]` of each variable."""
    parts = {name: step.strategy.experimental_local_results(variable)[0] for name, variable in kept.items()}
    return {name: part.numpy().astype(np.float64).ravel() for name, part in parts.items()}


def _put_back(values: Iterable[tuple[tf.Variable, tf.Tensor]]) -> None:
    for variable, value in values:
        variable.assign(value)
