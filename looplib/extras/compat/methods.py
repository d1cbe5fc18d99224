"""Methods that plug-ins replace, because neither Keras nor TensorFlow has another way: of replicas, and of a layer."""

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from looplib.errors import StepError

_alone: "weakref.WeakSet[tf.distribute.ReplicaContext]" = weakref.WeakSet()
_of_strategy: property = tf.distribute.Strategy.num_replicas_in_sync


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Lets the code of a replica see one replica in the `with` block; in replica context.

    Keras divides its own losses by the number of replicas, but not what a loss function returns as a scalar, what a
    layer adds, or what a `train_step` computes by itself. Where it sees one replica it divides nothing: each replica's
    loss, metrics and gradients are those of a training on its examples alone, weighted by `replicas.weighting_means`.

    Neither Keras nor TensorFlow has a setting for this. TensorFlow's own code, except for TPUs, reads another
    attribute than the one that is changed here.

    Raises:
      UsageError: if this TensorFlow computes the number in another way.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        yield
        return
    if tf.distribute.Strategy.num_replicas_in_sync is _of_strategy:
        tf.distribute.Strategy.num_replicas_in_sync = property(_seen, doc=_of_strategy.__doc__)
        tf.distribute.ReplicaContext.num_replicas_in_sync = property(_seen_by_context)
    _alone.add(context)
    try:
        if tf.distribute.get_strategy().num_replicas_in_sync != 1:
            raise StepError(
                f"TensorFlow {tf.__version__} counts replicas in a way that looplib does not know (it knows 2.20 and "
                "2.21), so that Keras would scale losses by it; train the compiled model on one replica"
            )
        yield
    finally:
        _alone.discard(context)


def _seen(strategy: tf.distribute.Strategy) -> int:
    context = tf.distribute.get_replica_context()
    return 1 if context is not None and context in _alone else _of_strategy.fget(strategy)


def _seen_by_context(context: tf.distribute.ReplicaContext) -> int:
    if context in _alone and isinstance(context.strategy, tf.distribute.TPUStrategy):
        raise StepError(
            "the train_step of a compiled model asks the replica context for the number of replicas (all_gather does "
            "so too), which a TPU needs and looplib hides; write a looplib.Trainer for it"
        )
    return context.strategy.num_replicas_in_sync


def recompute(layer: Any) -> None:
    """Lets a layer that is built compute its activations again in the backward pass; sets its `call`."""
    call = layer.call

    @functools.wraps(call)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return tf.recompute_grad(functools.partial(call, **kwargs))(*args)  # which takes no keyword arguments

    layer.call = recomputed
