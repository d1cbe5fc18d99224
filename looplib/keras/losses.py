"""Losses of Keras on several replicas: each divides by what it would divide by on one device, over the global batch."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from looplib.cluster import updates
from looplib.compat import keras as _keras
from looplib.compat.patches import Collectives, alone, collectives, weighs_collectives

_WEIGHTS = "mean_with_sample_weight"  # a reduction of Keras 3, which divides by the sum of the weights
_NONE = ("none", "None")


@contextlib.contextmanager
def part_of_batch(left_out: bool = False) -> Iterator[Collectives]:
    """Computes a replica's part of the global batch in the `with` block, by a step of Keras; in replica context.

    Each replica computes as if it were alone, and optimizers weigh its gradients by its examples. That is right for a
    mean over examples. A `Loss` of Keras that divides by something else, the elements that a mask leaves or the sum of
    the weights, divides by the sum of that over all replicas instead; one with `reduction="sum"` is not divided.

    Args:
      left_out: whether sums over replicas are left out, see `collectives`.

    Yields:
      What the step has to do with other replicas.
    """
    several = tf.distribute.get_replica_context().num_replicas_in_sync > 1
    if several:
        for root in _keras.imported():
            _replace(sys.modules[root].losses.Loss)
    with updates.weighting_means():
        found = Collectives(updates.weight_of_part(tf.float32), left_out)
        with collectives(found) if several else contextlib.nullcontext(), alone():
            yield found


def _replace(kind: type) -> None:
    """Replaces what a class of losses does when it is called; Keras has no hook between a loss and its mean."""
    plain = kind.__call__
    if plain.__module__ == __name__:
        return

    @functools.wraps(plain)
    def call(self: Any, y_true: Any, y_pred: Any, *args: Any, **kwargs: Any) -> Any:
        sample_weight = args[0] if args else kwargs.get("sample_weight")
        if not weighs_collectives() or str(self.reduction) in _NONE:
            return plain(self, y_true, y_pred, sample_weight)
        return _part(plain, self, y_true, y_pred, sample_weight)

    call.__module__ = __name__
    kind.__call__ = call


def _part(plain: Callable, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
    """Returns a loss of a replica's examples that adds up, weighted by examples, to that of the global batch."""
    reduction, values = str(loss.reduction), []

    def kept(y_true: Any, y_pred: Any) -> Any:
        values.append(loss.call(y_true, y_pred))
        return values[-1]

    def ones(y_true: Any, y_pred: Any) -> Any:
        return _keras.with_mask(tf.ones_like(values[0]), _keras.mask_of(values[0]))

    def reduced(call: Callable, how: str, weights: Any) -> tf.Tensor:
        return plain(_with(loss, call, how), y_true, y_pred, weights)

    own = reduced(kept, loss.reduction, sample_weight)
    masked = any(_keras.mask_of(part) is not None for part in (values[0], *tf.nest.flatten(y_pred)))
    by_weights = reduction == _WEIGHTS and (sample_weight is not None or masked)
    if not values[0].shape.rank or not (reduction == "sum" or by_weights or masked):
        return own  # a mean over examples, or a number that the loss reduces itself
    factor = updates.weight_of_part(own.dtype)
    if reduction == "sum":
        return tf.math.divide_no_nan(own, factor)
    count = reduced(ones, "sum", sample_weight if by_weights else None)
    if by_weights:  # Keras counts a weight once, for however many elements it is
        count = tf.math.divide_no_nan(count, reduced(ones, loss.reduction, sample_weight))
    count = updates.counted(tf.stop_gradient(count))
    whole = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, count)
    total = reduced(lambda y_true, y_pred: values[0], "sum", sample_weight)
    return tf.math.divide_no_nan(total, whole * factor)


def _with(loss: Any, call: Callable, reduction: str) -> Any:
    """Returns a copy of a loss with other values of the elements and another reduction."""
    other = object.__new__(type(loss))  # `copy.copy` would save and load an object of Keras 3
    vars(other).update(vars(loss), call=call, reduction=reduction)
    return other
