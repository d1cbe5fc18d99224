"""The number of micro-batches that fit into memory, for `micro_batches="auto"` of a `GradientTrainer`."""

import concurrent.futures
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from looplib.errors import StepError


@tf.autograph.experimental.do_not_convert
def fitting(compute: Callable[[Any, int], list[tf.Tensor]], inputs: Any) -> int:
    """Returns the smallest number of parts of a batch whose gradients, by `compute(batch, parts)`, fit into memory.

    Each number is tried on a batch of zeros, outside of the graph that is being traced. What that changes, such as
    moving statistics, is restored.
    """
    leaves = tf.nest.flatten(inputs)
    if not all(isinstance(leaf, tf.Tensor) and leaf.shape.is_fully_defined() for leaf in leaves):
        raise StepError(
            'micro_batches="auto" needs batches of static shapes, with the batch as the first dimension of each '
            "tensor; give a number"
        )
    size = next((leaf.shape[0] for leaf in leaves if leaf.shape.rank), 1)
    specs = [tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves]
    for count in (number for number in range(1, size + 1) if size % number == 0):
        function = tf.function(lambda *batch, count=count: compute(tf.nest.pack_sequence_as(inputs, batch), count))
        # In a thread that is not tracing; tf.init_scope would leave the graph too, but stops all gradient tapes.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            if thread.submit(_fits, function, specs).result():
                logging.info("micro_batches=auto: a per-replica batch of %d fits into memory in %d parts", size, count)
                return count
    raise StepError(
        "the memory does not suffice for the gradients of one example; use a smaller model, or rematerialize"
    )


def _fits(function: tf.types.experimental.PolymorphicFunction, specs: list[tf.TensorSpec]) -> bool:
    """Runs a function on zeros; returns whether the memory suffices. Restores the variables."""
    traced = function.get_concrete_function(*specs)
    before = [variable.read_value() for variable in traced.variables]
    try:
        return traced(*(tf.zeros(spec.shape, spec.dtype) for spec in specs)) is not None
    except tf.errors.ResourceExhaustedError:
        return False
    finally:
        for variable, value in zip(traced.variables, before):
            variable.assign(value)
