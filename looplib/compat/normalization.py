"""Batch normalization of Keras 3 with `synchronized=True` behind a mask, where its public interface does not suffice.

Keras leaves out the synchronization where there is a mask, so each replica would have its own statistics. Its method
for the statistics is replaced, in its class. Without a mask, and on one replica, the method is Keras's own.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from looplib.compat import keras as _keras
from looplib.compat.optimizers import KNOWN, num_replicas
from looplib.errors import ModelError

_MOMENTS, _ARGUMENTS = "_moments", ["self", "inputs", "mask"]


def synchronize(holder: Any) -> None:
    """Makes the synchronized batch normalizations that a model or trainer holds compute what one device does.

    To be called on several replicas, before a step is traced.

    Raises:
      UsageError: if this version of Keras computes the statistics in a way that looplib does not know.
    """
    for layer in _keras.sublayers(holder):
        if _keras.family(layer) != "keras" or not _keras.is_a(layer, "layers", "BatchNormalization"):
            continue
        if not layer.synchronized:
            continue
        kind = next((one for one in type(layer).__mro__ if _MOMENTS in vars(one)), None)
        if kind is None or list(inspect.signature(vars(kind)[_MOMENTS]).parameters) != _ARGUMENTS:
            raise ModelError(
                f"{layer.name} is synchronized over replicas in a way that looplib does not know (it knows {KNOWN}), "
                "and which may leave out masks; use one replica, another version of Keras, or tf_keras"
            )
        if vars(kind)[_MOMENTS].__module__ != __name__:
            setattr(kind, _MOMENTS, _of_all_replicas(vars(kind)[_MOMENTS]))


def _of_all_replicas(original: Callable) -> Callable:
    @functools.wraps(original)
    def moments(self: Any, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        context = tf.distribute.get_replica_context()
        if mask is None or not self.synchronized or context is None or num_replicas() == 1:
            return original(self, inputs, mask)
        axes, of = self._reduction_axes, tf.distribute.ReduceOp.SUM
        mask = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))
        values = tf.where(mask, inputs, tf.zeros_like(inputs))
        weights = tf.reduce_sum(tf.cast(mask, inputs.dtype), axes)
        total, weight = context.all_reduce(of, [tf.reduce_sum(values, axes), weights])
        mean = tf.math.divide_no_nan(total, weight)
        squares = tf.where(mask, tf.square(inputs - mean), tf.zeros_like(inputs))
        return mean, tf.math.divide_no_nan(context.all_reduce(of, tf.reduce_sum(squares, axes)), weight)

    moments.__module__ = __name__
    return moments
