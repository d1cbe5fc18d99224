"""Additions to the step of a task on each replica: shares of a global batch of any size."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from looplib.base.messages import join_names
from looplib.cluster import updates
from looplib.cluster.updates import Share
from looplib.compat import keras as _keras
from looplib.errors import MetricError
from looplib.loop.packing import batch_size
from looplib.loop.step import Step, StepFn
from looplib.loop.step_checks import is_summed
from looplib.task import reductions
from looplib.task.reductions import Reduction
from looplib.task.state import state_of, variables_of
from looplib.task.trainer import Evaluator, Trainer


def add_share(step_fn: StepFn, task: Trainer | Evaluator) -> StepFn:
    """Wraps a step so that its results are exact for a global batch of any size."""
    metrics = functools.cache(lambda: _metric_variables(vars(task)))  # a model may make some when it is called

    def with_share(inputs: Any) -> Any:
        if isinstance(inputs, Share):
            outputs = _counted(step_fn, inputs, metrics(), isinstance(task, Trainer))
            _check_made(task, metrics(), _metric_variables(vars(task)))
            _check_known(task, _metric_variables(outputs), metrics())
            return outputs
        batch = batch_size(inputs)
        if batch is None:
            return step_fn(inputs)
        count = tf.distribute.get_replica_context().num_replicas_in_sync
        with updates.in_use(Share(inputs, batch[1], batch[1] * count)):  # as large as the others
            return step_fn(inputs)

    return with_share


def count_examples_alone(step_fn: StepFn, task: Trainer | Evaluator, joins: Callable[[], bool]) -> StepFn:
    """Wraps a step so that it counts nothing on a replica without examples, where it `joins` the replicas.

    Totals stay: those of no example are 0, and those over all replicas belong to all.
    """
    metrics = functools.cache(lambda: _metric_variables(vars(task)))

    def on_any_batch(inputs: Any) -> Any:
        batch = batch_size(inputs)
        if batch is None or not joins():
            return step_fn(inputs)
        counts = batch[1] > 0
        with _metrics_kept_unless(counts, metrics()):
            outputs = step_fn(inputs)
        if not isinstance(outputs, dict):
            return outputs
        return {name: value if _is_total(value) else _if(counts, value) for name, value in outputs.items()}

    return on_any_batch


def check_share(task: Trainer | Evaluator, step: Step) -> None:
    """Raises `UsageError` if a traced step updates per-replica sums, such as metrics, that the task does not hold."""
    if isinstance(step.stream.element_spec, Share):
        used = [variable for variable in step.variables if is_summed(variable)]
        known = [*_metric_variables(vars(task)), *(variable for _, variable in variables_of(state_of(task)))]
        _check_known(task, used, [part for v in known for part in step.strategy.experimental_local_results(v)])


@tf.autograph.experimental.do_not_convert
def _check_made(task: Trainer | Evaluator, before: Iterable[tf.Variable], after: Iterable[tf.Variable]) -> None:
    known = {id(variable) for variable in before}
    if names := [variable.name for variable in after if id(variable) not in known]:
        raise MetricError(
            f"a metric of {type(task).__name__} makes {join_names(names)} in its first update, which is too late on "
            "several replicas; call its update_state once with zeros of the step's shapes, and reset_state, in __init__"
        )


@tf.autograph.experimental.do_not_convert
def _check_known(task: Trainer | Evaluator, used: Iterable[tf.Variable], known: Iterable[tf.Variable]) -> None:
    ids = {id(variable) for variable in known}
    if names := [variable.name for variable in used if id(variable) not in ids]:
        raise MetricError(
            f"{type(task).__name__}.step_fn changes {join_names(names)} of a metric that is not among the attributes "
            "of the task, so that examples would count twice where a global batch has fewer of them than there are "
            "replicas; keep the metric as an attribute of the task or its model, or in a list or dict there"
        )


def _metric_variables(holder: Any) -> list[tf.Variable]:
    """Lists the variables of the Keras metrics in a structure, its models and its modules."""
    metrics = filter(_keras.is_metric, _keras.parts(holder))
    return list({id(v): _keras.tf_variable(v) for metric in metrics for v in metric.variables}.values())


def _counted(step_fn: StepFn, share: Share, metrics: list[tf.Variable], training: bool) -> Any:
    """Runs a step; if the replica has no example of the global batch, the step counts nothing."""
    counts = share.examples > 0
    with updates.in_use(share), _metrics_kept_unless(counts, metrics):
        outputs = step_fn(share.inputs)
    if not isinstance(outputs, dict):
        return outputs
    outputs = {name: _if(counts, value) for name, value in outputs.items()}
    return outputs if training else {"examples": reductions.total(share.examples), **outputs}


@contextlib.contextmanager
def _metrics_kept_unless(counts: tf.Tensor, metrics: list[tf.Variable]) -> Iterator[None]:
    """Gives metrics the values from before the `with` block, unless the step `counts`."""
    before = [variable.read_value() for variable in metrics]
    yield
    for variable, value in zip(metrics, before):
        variable.assign(tf.where(counts, variable.read_value(), value))


def _is_total(value: Any) -> bool:
    return isinstance(value, Reduction) and value.kind == "total"


@tf.autograph.experimental.do_not_convert
def _if(counts: tf.Tensor, value: Any) -> Any:
    """Returns an output of a step, with the weight 0 unless it `counts`."""
    if isinstance(value, tf.Tensor) and value.shape.rank != 0:
        value = reductions.mean(value)
    if not isinstance(value, Reduction):
        return value
    if _is_total(value):
        return reductions.total(tf.where(counts, value.value, tf.zeros_like(value.value)))
    if value.kind == "each":
        return Reduction("each", value.value, counts)
    if value.kind == "last":
        return value
    if value.kind != "mean":
        raise NotImplementedError(f"a share of a global batch does not reduce by looplib.{value.kind}")
    weight = tf.cast(counts, tf.float64)
    return reductions.mean(value.value, weight if value.weight is None else tf.cast(value.weight, tf.float64) * weight)
