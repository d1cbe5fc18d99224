"""The floating-point operations of a traced step: those of its products of matrices and its convolutions."""

import collections
import math
import re

import tensorflow as tf
from absl import logging

from looplib.cluster.collectives import Workers
from looplib.compat import tensorflow as _tf
from looplib.errors import gist
from looplib.loop.base import TrainingLoop
from looplib.report.speed import Speed

SHORT_TRAINING = 1.0  # seconds, below which the peak, which takes 0.1 s, is not measured
_LOOPS, _BRANCHES = ("While", "StatelessWhile"), ("If", "StatelessIf", "Case", "StatelessCase")
_PRODUCTS = ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
_CONVOLUTION = re.compile(r"(Conv2D|Conv3D|(DepthwiseConv2dNative))(Backprop(Input|Filter))?(V2)?")


class _Unknown(Exception):
    """A shape, or how often a loop runs, is not known before it runs."""


def of_training(loop: TrainingLoop, strategy: tf.distribute.Strategy) -> Speed | None:
    """Returns the operations of a training step on all replicas; None where they cannot be counted.

    Args:
      loop: the loop of the trainer.
      strategy: what it runs on; the replicas of a TPU are not in the graph of a step.
    """
    if isinstance(strategy, tf.distribute.TPUStrategy):
        return None
    try:
        counted = of_step(loop.step.function)
    except Exception as error:  # what is only shown never ends a run
        logging.debug("the FLOPs of a step are not counted: %r", error)
        return None
    workers = Workers(strategy).count
    return Speed(workers * sum(counted.values()), max(counted, key=counted.get)) if counted else None


def with_share(speed: Speed, strategy: tf.distribute.Strategy, steps_per_second: float) -> Speed:
    """Returns the speed of a training that has ended, with the peak of its devices; without it if that fails.

    Args:
      speed: from `of_training`.
      strategy: what it ran on.
      steps_per_second: how fast it was.
    """
    try:
        devices = _tf.worker_devices(strategy)
    except RuntimeError:  # the default strategy, which uses one device
        devices = [device.name for device in tf.config.list_logical_devices("GPU")][:1] or ["CPU:0"]
    count = len(devices) if "GPU" in devices[0] else 1  # replicas on a CPU share it
    try:
        return speed.after(steps_per_second, devices[0], count * Workers(strategy).count)
    except Exception as error:  # what is only shown never ends a run
        logging.warning("the peak of %s cannot be measured (%s)", devices[0], gist(error))
        return speed


def of_step(function: tf.types.experimental.ConcreteFunction) -> dict[str, int] | None:
    """Counts the operations of one call of a traced function, on all replicas of this worker.

    A multiplication and an addition are two. Only products of matrices and convolutions count, as usual: they are
    nearly all that a device computes for a model, and what its peak is measured by. Ops whose result nothing uses do
    not count. Of several branches the largest counts.

    Args:
      function: the function.

    Returns:
      dict from the dtype of the results, such as "float32", to the number; None if a shape in a product, or the number
      of rounds of a loop around it, is not known.
    """
    try:
        return dict(_of_graph(function.graph))
    except _Unknown:
        return None


def _of_graph(graph: tf.Graph) -> collections.Counter[str]:
    counted: collections.Counter[str] = collections.Counter()
    for op in _tf.needed(graph):
        if op.type in _BRANCHES:
            branches = [_of_graph(body) for body in _tf.graphs_called(op)]
            counted.update(max(branches, key=lambda one: one.total()))
        elif op.type in _LOOPS:
            inside = _of_graph(_tf.graphs_called(op, "body")[0])
            rounds = _rounds(op) if inside else 0
            counted.update({dtype: rounds * count for dtype, count in inside.items()})
        elif number := _of_op(op):
            counted[op.outputs[0].dtype.name] += number
        else:
            for body in _tf.graphs_called(op):
                counted.update(_of_graph(body))
    return counted


def _of_op(op: tf.Operation) -> int:
    """Returns the operations of an op by itself."""
    if op.type == "MatMul":
        return 2 * _size(op.outputs[0].shape) * _sizes(op.inputs[0].shape)[0 if op.get_attr("transpose_a") else 1]
    if op.type in _PRODUCTS:
        return 2 * _size(op.outputs[0].shape) * _sizes(op.inputs[0].shape)[-2 if op.get_attr("adj_x") else -1]
    if op.type == "Einsum" and len(op.inputs) == 2:
        return 2 * _of_einsum(op)
    if match := _CONVOLUTION.fullmatch(op.type):
        results = op.inputs[2] if match[3] else op.outputs[0]
        kernel = _sizes((op.outputs[0] if match[4] == "Filter" else op.inputs[1]).shape)
        per_result = kernel[:2] if match[2] else kernel[:-1]  # its last size, or two sizes, are the results of a patch
        return 2 * _size(results.shape) * math.prod(per_result)
    return 0


def _of_einsum(op: tf.Operation) -> int:
    """Returns the product of the sizes of all indices of two operands; those behind "..." broadcast."""
    sizes: dict[str, int] = {}
    subscripts = op.get_attr("equation").decode().replace(" ", "").split("->")[0].split(",")
    for labels, operand in zip(subscripts, op.inputs):
        shape = _sizes(operand.shape)
        hidden = len(shape) - len(labels.replace("...", ""))
        names = [chr(0x100 + hidden - i) for i in range(hidden)]  # counted from the last, as they broadcast
        before, _, after = labels.partition("...")
        for name, size in zip([*before, *names, *after], shape):
            sizes[name] = max(size, sizes.get(name, 1))
    return math.prod(sizes.values())


def _rounds(op: tf.Operation) -> int:
    """Returns how often a loop runs that counts from 0, or that is the gradient of one; raises `_Unknown` else."""
    condition = _tf.graphs_called(op, "cond")[0]
    limits = []
    for compared in condition.get_operations():
        if compared.type == "Less" and compared.inputs[0].op.type == "Placeholder":
            start = tf.get_static_value(_outside(compared.inputs[0], condition, op))
            limit = _outside(compared.inputs[1], condition, op)
            value = tf.get_static_value(limit)
            if value is None and limit.op.type in _LOOPS and limit.value_index == 0:
                value = _rounds(limit.op)  # the first output of a loop is how often it ran
            if value is not None and start == 0:
                limits.append(int(value))
    if not limits:
        raise _Unknown
    return min(limits)


def _outside(tensor: tf.Tensor, condition: tf.Graph, op: tf.Operation) -> tf.Tensor:
    """Returns the input of a loop that a tensor of its condition is; the tensor itself for any other."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    places = [place for place, argument in enumerate(condition.inputs) if argument is tensor]
    return op.inputs[places[0]] if places else tensor


def _size(shape: tf.TensorShape) -> int:
    return math.prod(_sizes(shape))


def _sizes(shape: tf.TensorShape) -> list[int]:
    if not shape.is_fully_defined():
        raise _Unknown
    return shape.as_list()
