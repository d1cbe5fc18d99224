"""What is added to the step of a task on each replica: a look at batch sizes, and shares of a global batch."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.cluster import replicas
from looplib.cluster.replicas import Share
from looplib.compat import keras as _keras
from looplib.errors import BatchSizeError, MetricError
from looplib.loop.packing import Packer, batch_size
from looplib.loop.step import Step, StepFn
from looplib.loop.step_checks import is_summed
from looplib.messages import join_names
from looplib.task import metric_names, reductions
from looplib.task.evaluator import Evaluator
from looplib.task.reductions import Reduction, total
from looplib.task.state import state_of, variables_of
from looplib.task.trainer import Trainer

# Totals of a step: the examples that larger batches have too many, full batches, examples more than expected, batches.
METRICS = metric_names.BATCH_SIZES


class BatchSizes:
    """Compares the sizes of training batches with what is expected.

    The size of a batch is that of the first value per example that the step returns, else that of its input. No batch
    may be larger than expected. The last batch of the data or of an epoch may be smaller, so at least half of the
    batches have to be full.

    Args:
      who: the class name of the user's trainer, for messages.
      expected: examples of a batch.
      replicas: batches of a step.
    """

    def __init__(self, who: str, expected: int, replicas: int) -> None:
        self._who, self._expected, self._replicas = who, expected, replicas
        self._seen = np.zeros(len(METRICS))

    def add_to(self, step_fn: Callable[[object], object]) -> Callable[[object], object]:
        """Wraps a training step on one replica, to add the sizes of its batches to its metrics, for `check`."""

        def measured(inputs: object) -> object:
            outputs = step_fn(inputs)
            size = _size(inputs, outputs) if isinstance(outputs, dict) else None
            if size is None:
                return outputs
            more = size - self._expected
            parts = tf.maximum(more, 0), tf.cast(more == 0, tf.float64), more, tf.constant(1, tf.float64)
            return {**outputs, **{name: total(part) for name, part in zip(METRICS, parts)}}

        return measured

    def check(self, metrics: dict[str, object]) -> dict[str, object]:
        """Returns the metrics since the last check, without the sizes; raises `UsageError` for wrong batch sizes."""
        if METRICS[0] not in metrics:
            return metrics
        self._seen += [metrics[name] for name in METRICS]
        self._refuse(self._seen)
        return {name: value for name, value in metrics.items() if name not in METRICS}

    def check_totals(self, packer: Packer, totals: list[list[float]]) -> None:
        """Raises as `check` does, from the totals of each replica since the last check; before they are saved."""
        if METRICS[0] in packer.names:
            places = [packer.start_of(name) for name in METRICS]
            self._refuse(self._seen + np.sum(totals, axis=0)[places])

    def _refuse(self, seen: np.ndarray) -> None:
        larger, full, more, count = seen
        if larger > 0 or 2 * full < count - self._replicas:
            raise BatchSizeError(
                f"{self._who}.dataset made {'larger' if larger > 0 else 'smaller'} batches than "
                f"context.per_replica_batch_size, which is {self._expected}: the first {int(count)} have "
                f"{self._expected + more / count:g} examples on average, so that means and gradients are scaled "
                "wrongly; batch by that size, with drop_remainder=True to have it checked before the first step, or "
                "set batch_size_varies of the trainer if the batch size varies intentionally"
            )


@tf.autograph.experimental.do_not_convert
def _size(inputs: object, outputs: dict[str, object]) -> tf.Tensor | None:
    """Returns the examples of a batch, float64 scalar; None if unknown."""
    for _, value in sorted(outputs.items(), key=lambda item: str(item[0])):
        if isinstance(value, tf.Tensor) and value.shape.rank == 1:
            # The ops of packing a mean, which TensorFlow then runs once.
            return tf.cast(tf.size(tf.cast(value, tf.float64)), tf.float64)
    batch = batch_size(inputs)
    return None if batch is None else tf.cast(batch[1], tf.float64)


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
        with replicas.in_use(Share(inputs, batch[1], batch[1] * count)):  # as large as the others
            return step_fn(inputs)

    return with_share


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
    before = [variable.read_value() for variable in metrics]
    with replicas.in_use(share):
        outputs = step_fn(share.inputs)
    for variable, value in zip(metrics, before):
        variable.assign(tf.where(counts, variable.read_value(), value))
    if not isinstance(outputs, dict):
        return outputs
    outputs = {name: _if(counts, value) for name, value in outputs.items()}
    return outputs if training else {"examples": reductions.total(share.examples), **outputs}


@tf.autograph.experimental.do_not_convert
def _if(counts: tf.Tensor, value: Any) -> Any:
    """Returns an output of a step, with the weight 0 unless it `counts`."""
    if isinstance(value, tf.Tensor) and value.shape.rank != 0:
        value = reductions.mean(value)
    if not isinstance(value, Reduction):
        return value
    if value.kind == "total":
        return reductions.total(tf.where(counts, value.value, tf.zeros_like(value.value)))
    if value.kind == "each":
        return Reduction("each", value.value, counts)
    if value.kind == "last":
        return value
    if value.kind != "mean":
        raise NotImplementedError(f"a share of a global batch does not reduce by looplib.{value.kind}")
    weight = tf.cast(counts, tf.float64)
    return reductions.mean(value.value, weight if value.weight is None else tf.cast(value.weight, tf.float64) * weight)
