"""The step of a replica that has a share of a global batch, whose size may differ from step to step."""

from typing import Any

import tensorflow as tf

from looplib import _keras
from looplib.loop.packing import batch_size
from looplib.loop.step import StepFn
from looplib.task import reductions, shares
from looplib.task.evaluator import Evaluator
from looplib.task.reductions import Reduction
from looplib.task.shares import Share
from looplib.task.trainer import Trainer


def add_to(step_fn: StepFn, task: Trainer | Evaluator) -> StepFn:
    """Wraps a step, so that what it computes is that of the examples of the global batch, however many there are."""
    metrics = [value for value in vars(task).values() if _keras.is_metrics(value)]

    def with_share(inputs: Any) -> Any:
        if isinstance(inputs, Share):
            return _counted(step_fn, inputs, _variables(metrics), isinstance(task, Trainer))
        batch = batch_size(inputs)
        if batch is None:
            return step_fn(inputs)
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        with shares.in_use(Share(inputs, batch[1], batch[1] * replicas)):  # as large as the others
            return step_fn(inputs)

    return with_share


def _counted(step_fn: StepFn, share: Share, metrics: list[tf.Variable], training: bool) -> Any:
    """Runs a step, of which nothing counts where the replica has no example of the global batch."""
    counts = share.examples > 0
    before = [variable.read_value() for variable in metrics]
    with shares.in_use(share):
        outputs = step_fn(share.inputs)
    for variable, value in zip(metrics, before):
        variable.assign(tf.where(counts, variable.read_value(), value))
    if not isinstance(outputs, dict):
        return outputs
    outputs = {name: _if(counts, value) for name, value in outputs.items()}
    return outputs if training else {"examples": reductions.total(share.examples), **outputs}


@tf.autograph.experimental.do_not_convert
def _if(counts: tf.Tensor, value: Any) -> Any:
    """Returns an output of a step, which weighs nothing unless it counts."""
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


def _variables(value: Any) -> list[tf.Variable]:
    """Returns the variables of the Keras metrics in a structure."""
    if isinstance(value, (list, tuple, dict)):
        return [one for item in (value.values() if isinstance(value, dict) else value) for one in _variables(item)]
    return [_keras.tf_variable(variable) for variable in value.variables]
