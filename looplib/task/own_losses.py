"""Losses that the layers of a model add, where a batch is computed in parts: on replicas, or in micro-batches.

A part's own losses weigh by its share of the examples. That is right for means over examples, and for losses of the
weights alone. A sum over examples is none of these, and is refused.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base.messages import gist
from looplib.cluster.collectives import outside
from looplib.compat import tensorflow as _tf
from looplib.errors import LossError
from looplib.task.state import values_kept

_EXAMPLES, _LENGTH, _DRAWS = 8, 4, 8  # where a size is not known when a step is traced; of random numbers
_MOST = 2**0.5  # the factor between a mean, which is 1 for a batch that has each example twice, and a sum


@tf.autograph.experimental.do_not_convert
def examples_of(losses: tf.Tensor, inputs: Any) -> tf.Tensor:
    """Returns the number of examples of a batch, or of a part of it: float32 scalar.

    It is the first dimension of the batch; without any, that of the losses.
    """
    for leaf in (*tf.nest.flatten(inputs), losses):
        if isinstance(leaf, tf.RaggedTensor):
            return tf.cast(leaf.nrows(), tf.float32)
        if isinstance(leaf, tf.Tensor) and leaf.shape.rank:
            return tf.cast(tf.shape(leaf)[0], tf.float32)
    return tf.constant(1.0)


@tf.autograph.experimental.do_not_convert
def check_means(who: str, compute: Callable[[Any], Sequence[tf.Tensor]], own: Sequence[tf.Tensor], inputs: Any) -> None:
    """Checks that a model's own losses are means over examples, by a batch that has each example twice.

    The batch is one of random numbers between 0 and 1, and zeros for whole numbers. It is computed outside of the graph
    that is being traced, and the variables get their values back. Losses that depend on the weights alone are not
    tried.

    Args:
      who: the trainer, for messages.
      compute: returns the model's own losses for a batch.
      own: those of the step that is traced.
      inputs: its batch.

    Raises:
      UsageError: if a loss is none.
    """
    of_examples = [_tf.depends_on_inputs(loss) for loss in own]
    if not any(of_examples):
        return
    try:
        # In a thread that is not tracing; tf.init_scope would leave the graph too, but stops all gradient tapes.
        first, second = outside(lambda: _once_and_twice(compute, inputs))
    except Exception as error:  # of the user's loss_fn, which may take no such batch
        logging.warning(
            "whether the losses that layers of %s add are means over examples could not be tried (%s); a sum over "
            "examples would weigh too little on several replicas or in micro_batches", who, gist(error),
        )  # fmt: skip
        return
    for one, two in zip(first, second):
        if _is_known(one) and not 1 / _MOST < two / one < _MOST:
            raise LossError(
                f"with each example twice, a batch has {two / one:.3g} times the loss that a layer of {who}'s model "
                "adds (add_loss, an activity regularizer), so that it is no mean over examples, and parts of a batch, "
                "on replicas or in micro_batches, would have another sum; divide it by the examples of the batch, or "
                "return it with the losses of loss_fn"
            )
    if nothing := sum(not _is_known(one) for one, concerned in zip(first, of_examples) if concerned):
        logging.warning(
            "losses that layers of %s add are 0 or not finite at first (%d of %d), so that it is not known whether "
            "they are means over examples; a sum over examples would weigh too little on several replicas or in "
            "micro_batches", who, nothing, sum(of_examples),
        )  # fmt: skip


def _is_known(loss: float) -> bool:
    return 1e-12 < abs(loss) < np.inf


def _once_and_twice(
    compute: Callable[[Any], Sequence[tf.Tensor]], inputs: Any
) -> tuple[Sequence[float], Sequence[float]]:
    """Returns the values of each loss for a batch like `inputs`, and for one that has each example twice."""
    once = tf.nest.map_structure(_random, inputs)
    twice = tf.nest.map_structure(lambda leaf: tf.concat([leaf, leaf], 0) if leaf.shape.rank else leaf, once)
    return _values(compute, once), _values(compute, twice)


def _random(leaf: Any) -> tf.Tensor:
    if not isinstance(leaf, tf.Tensor):
        raise TypeError(f"its batch has a {type(leaf).__name__}")
    unknown = [_EXAMPLES, *[_LENGTH] * (leaf.shape.rank - 1)] if leaf.shape.rank else []
    shape = [most if size is None else size for size, most in zip(leaf.shape, unknown)]
    if leaf.dtype.is_floating:
        return tf.cast(tf.random.stateless_uniform(shape, (1, len(shape))), leaf.dtype)
    return tf.zeros(shape, leaf.dtype)


def _values(compute: Callable[[Any], Sequence[tf.Tensor]], batch: Any) -> np.ndarray:
    """Returns the mean of each loss over some draws of random numbers; restores the variables."""
    leaves = tf.nest.flatten(batch)
    function = tf.function(lambda *leaves: list(compute(tf.nest.pack_sequence_as(batch, leaves))))
    traced = function.get_concrete_function(*(tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves))
    with values_kept(traced.variables):
        return np.mean([[float(loss) for loss in traced(*leaves)] for _ in range(_DRAWS)], axis=0)
