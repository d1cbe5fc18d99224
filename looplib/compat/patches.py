"""Methods of Keras that are replaced while a training runs, for lack of another way."""

import contextlib
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from looplib.compat import keras as _keras
from looplib.compat.optimizers import num_replicas
from looplib.compat.versions import KNOWN, KNOWN_KERAS
from looplib.errors import ModelError, StepError

_alone: "weakref.WeakSet[tf.distribute.ReplicaContext]" = weakref.WeakSet()
_collectives: "weakref.WeakKeyDictionary[tf.distribute.ReplicaContext, Collectives]" = weakref.WeakKeyDictionary()
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
                f"TensorFlow {tf.__version__} counts replicas in a way that looplib does not know (it knows {KNOWN}), "
                "so that Keras would scale losses by it; train the compiled model on one replica"
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


@dataclasses.dataclass
class Collectives:
    """How a replica sums and gathers over the replicas, see `collectives`.

    Attributes:
      factor: float32 scalar tensor, what the replica's gradients are weighted by afterwards; not used if it may not.
      left_out: whether each replica gets what it gave, as on one device.
      called: whether the step has summed or gathered something, or asked for the number of the replica.
      refusal: why the step may not sum or gather, a sentence; "" if it may.
    """

    factor: tf.Tensor | None = None
    left_out: bool = False
    called: bool = False
    refusal: str = ""

    def may_join(self) -> bool:
        """See the function `may_join`."""
        if self.refusal:
            raise StepError(self.refusal)
        self.called = True
        return not self.left_out


@contextlib.contextmanager
def collectives(found: Collectives) -> Iterator[None]:
    """Weighs the gradients that pass sums over replicas in a `with` block, or leaves out or refuses sums; on a replica.

    What a replica sums, such as the statistics of a synchronized normalization, changes the losses of the others. Their
    gradients come back through the sum, and belong to their weights, not to that of this replica. Without sums, each
    replica can compute what one device computes for the whole batch: TensorFlow has no strategy of one replica that can
    use the variables of another strategy.

    Raises:
      UsageError: where the step sums or gathers, and may not.
    """
    for name in ("all_reduce", "all_gather"):
        method = getattr(tf.distribute.ReplicaContext, name)
        if method.__module__ != __name__:
            setattr(tf.distribute.ReplicaContext, name, _weighing(method, 1 if name == "all_reduce" else 0))
    number = tf.distribute.ReplicaContext.replica_id_in_sync_group
    if number.fget.__module__ != __name__:
        tf.distribute.ReplicaContext.replica_id_in_sync_group = property(functools.partial(_number, number.fget))
    context = tf.distribute.get_replica_context()
    _collectives[context] = found
    try:
        yield
    finally:
        del _collectives[context]


def may_join() -> bool:
    """Notes that the code of a replica joins the replicas; returns whether it may, or computes what one device does.

    Raises:
      UsageError: where the step may not join them.
    """
    found = _collectives.get(tf.distribute.get_replica_context())
    return found is None or found.may_join()


def weighs_collectives() -> bool:
    """Returns whether the code of a replica runs in the `with` block of `collectives`."""
    context = tf.distribute.get_replica_context()
    return context is not None and context in _collectives


def _number(of_context: Callable[[Any], tf.Tensor], context: tf.distribute.ReplicaContext) -> tf.Tensor:
    """Returns the number of a replica; 0 where it computes what one device does."""
    found = _collectives.get(context)
    if found is None:
        return of_context(context)
    found.called = True
    return tf.constant(0, tf.int32) if found.left_out else of_context(context)


def _weighing(method: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Replaces a method of the replica context, whose argument of a `place` is the value."""

    @functools.wraps(method)
    def weighing(context: tf.distribute.ReplicaContext, *args: Any, **kwargs: Any) -> Any:
        found = _collectives.get(context)
        if found is None:
            return method(context, *args, **kwargs)
        value = args[place] if len(args) > place else kwargs["value"]
        if not found.may_join():
            return tf.nest.map_structure(lambda part: part, value)
        value = _with_gradients_times(value, tf.math.reciprocal_no_nan(found.factor))
        if len(args) > place:
            args = (*args[:place], value, *args[place + 1 :])
        else:
            kwargs["value"] = value
        return _with_gradients_times(method(context, *args, **kwargs), found.factor)

    weighing.__module__ = __name__
    return weighing


def _with_gradients_times(value: Any, factor: tf.Tensor) -> Any:
    """Returns a structure of tensors whose gradients are multiplied by a factor."""

    @tf.custom_gradient
    def unchanged(part: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        return tf.identity(part), lambda gradient: gradient * tf.cast(factor, gradient.dtype)

    def of(part: Any) -> Any:
        return unchanged(part) if isinstance(part, tf.Tensor) and part.dtype.is_floating else part

    return tf.nest.map_structure(of, value)


def recompute(layer: Any) -> None:
    """Lets a layer that is built compute its activations again in the backward pass; sets its `call`."""
    call = layer.call

    @functools.wraps(call)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return tf.recompute_grad(functools.partial(call, **kwargs))(*args)  # which takes no keyword arguments

    layer.call = recomputed


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
                f"{layer.name} is synchronized over replicas in a way that looplib does not know (it knows Keras "
                f"{KNOWN_KERAS}), and which may leave out masks; use one replica, another version of Keras, or tf_keras"
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
