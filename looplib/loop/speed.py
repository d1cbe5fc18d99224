"""The floating-point operations of a traced step, and the share of the devices' peak that a training reaches."""

import collections
import dataclasses
import functools
import math
import re
import time

import tensorflow as tf
from absl import logging

from looplib.base.messages import gist
from looplib.cluster.collectives import Workers
from looplib.compat import places
from looplib.compat import tensorflow as _tf
from looplib.loop.contracts import TrainingLoop

SHORT_TRAINING = 1.0  # seconds, below which the peak, which takes 0.1 s, is not measured
_ENOUGH, _TIMES, _LARGEST = 0.005, 4, 8192  # seconds of a product, products of each size, rows
_LOOPS, _BRANCHES = ("While", "StatelessWhile"), ("If", "StatelessIf", "Case", "StatelessCase")
_PRODUCTS = ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
_CONVOLUTION = re.compile(r"(Conv2D|Conv3D|(DepthwiseConv2dNative))(Backprop(Input|Filter))?(V2)?")


class _Unknown(Exception):
    """A shape, or how often a loop runs, is not known before it runs."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """How much a training computes.

    Attributes:
      flops_per_step: floating-point operations of a step on all replicas: those of products of matrices and
        convolutions, forward and backward.
      dtype: the type that most of them are computed in.
      peak: operations a second of the devices in products of large matrices; None until it is measured.
      share_of_peak: share of them that the training reached, with the time in which it waited for its data; None until
        the training has ended.
    """

    flops_per_step: int
    dtype: str
    peak: float | None = None
    share_of_peak: float | None = None

    def __str__(self) -> str:
        text = f"a step takes {_short(self.flops_per_step)}FLOPs"
        if self.share_of_peak is None:
            return text
        share = f"{100 * self.share_of_peak:.2g}%" if self.share_of_peak >= 0.001 else "<0.1%"
        return f"{text}, {share} of the measured peak ({_short(self.peak)}FLOPs a second, {self.dtype})"


@functools.cache
def measured_peak(device: str, dtype: str) -> float:
    """Measures the floating-point operations a second of a product of matrices; once in a process, in about 0.1 s.

    Args:
      device: the name of the device, such as "CPU:0".
      dtype: the name of the dtype.
    """
    size, seconds = 128, 0.0
    while seconds < _ENOUGH and size < _LARGEST:
        size, taken = 2 * size, []
        with tf.device(device):
            # Not random: to draw the numbers would take longer than the products.
            matrix = tf.cast(tf.reshape(tf.range(size * size) % 7 - 3, [size, size]), dtype)
            for _ in range(_TIMES):
                started = time.perf_counter()
                tf.matmul(matrix, matrix)[0, 0].numpy()  # waits for a GPU
                taken.append(time.perf_counter() - started)
        seconds = min(taken)
    return 2 * size**3 / seconds


def of_training(loop: TrainingLoop, strategy: tf.distribute.Strategy) -> Speed | None:
    """Returns the operations of a training step on all replicas; None where they cannot be counted.

    Args:
      loop: the loop of the trainer.
      strategy: what it runs on; the replicas of a TPU are not in the graph of a step. Each phase has other steps.
    """
    if isinstance(strategy, tf.distribute.TPUStrategy) or loop.task.training_phases:
        return None
    try:
        counted = of_step(loop.step.function)
    except Exception as error:  # what is only shown never ends a run
        logging.debug("the FLOPs of a step are not counted: %r", error)
        return None
    workers = Workers(strategy).count
    return Speed(workers * sum(counted.values()), max(counted, key=counted.get)) if counted else None


def with_share(speed: Speed, steps: int, seconds: float, strategy: tf.distribute.Strategy) -> Speed:
    """Returns the speed of a training that has ended with the share of the devices' peak; unchanged after a short one.

    Args:
      speed: what `of_training` returned.
      steps: number of steps.
      seconds: duration of these steps.
      strategy: the strategy that the training ran on.
    """
    if seconds < SHORT_TRAINING:
        return speed
    try:
        devices = _tf.worker_devices(strategy)
    except RuntimeError:  # the default strategy, which uses one device
        devices = [device.name for device in tf.config.list_logical_devices("GPU")][:1] or ["CPU:0"]
    count = len(devices) if "GPU" in devices[0] else 1  # replicas on a CPU share it
    try:
        peak = count * Workers(strategy).count * measured_peak(devices[0], speed.dtype)
        return dataclasses.replace(speed, peak=peak, share_of_peak=speed.flops_per_step * steps / seconds / peak)
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
    for op in places.needed(graph):
        if op.type in _BRANCHES:
            branches = [_of_graph(body) for body in places.graphs_called(op)]
            counted.update(max(branches, key=lambda one: one.total()))
        elif op.type in _LOOPS:
            inside = _of_graph(places.graphs_called(op, "body")[0])
            rounds = _rounds(op) if inside else 0
            counted.update({dtype: rounds * count for dtype, count in inside.items()})
        elif number := _of_op(op):
            counted[op.outputs[0].dtype.name] += number
        else:
            for body in places.graphs_called(op):
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
    condition = places.graphs_called(op, "cond")[0]
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
    found = [place for place, argument in enumerate(condition.inputs) if argument is tensor]
    return op.inputs[found[0]] if found else tensor


def _size(shape: tf.TensorShape) -> int:
    return math.prod(_sizes(shape))


def _sizes(shape: tf.TensorShape) -> list[int]:
    if not shape.is_fully_defined():
        raise _Unknown
    return shape.as_list()


def _short(number: float) -> str:
    """Returns a number with a prefix, such as "45.8 M"."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} P"
