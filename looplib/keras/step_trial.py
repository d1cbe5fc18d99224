"""Training steps that are tried: on one batch whole and in parts, from several states, without their updates."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.cluster import updates
from looplib.cluster.updates import refuse_others
from looplib.compat import keras as _keras
from looplib.compat import tensorflow as _tf
from looplib.compat.optimizers import Replacement
from looplib.compat.patches import alone
from looplib.compat.row_updates import is_divided, knows_owners
from looplib.compat.tensorflow import converted
from looplib.data.arrays import OmittedParts
from looplib.errors import StepError
from looplib.keras import rows
from looplib.keras.losses import part_of_batch
from looplib.loop.step_checks import kept_apart, shared_variables
from looplib.task.state import state_of_model, unheld, variables_of

_ELEMENTS = 2**16  # of each gradient that are compared, or rows of a sparse one
_LATER = 1000  # steps that a counter is moved by


@dataclasses.dataclass(frozen=True)
class Computed:
    """The common result of all replicas for a batch.

    Attributes:
      losses: float64 `[n]`, the losses that the step returns or layers add.
      gradients: float64 `[m]`, a linear function of all gradients that optimizers get; [0] for a step without one.
      results: float64 `[k]` for each metric that the trial reads.
    """

    losses: np.ndarray
    gradients: np.ndarray
    results: list[np.ndarray] = dataclasses.field(default_factory=list)

    @property
    def compared(self) -> np.ndarray:
        """The gradients, or the losses where there are none."""
        return self.gradients if self.gradients.size else self.losses


class _Given(_tf.ReplicaLocal):
    """The gradients that optimizers got in the step of a replica."""

    gradients: list[Any] = []  # noqa: RUF012


class StepTrial:
    """Runs a step of a model without its updates, in a `with` block; afterwards all variables are as before.

    Each run begins with the variables that the model has, apart from the state of random numbers. The step runs as in a
    training, see `part_of_batch`. Optimizers scale no loss, as an overflow would hide the gradients. Batch
    normalization that is not synchronized does not train: it depends on a replica's own examples, which hides whether
    the rest does.

    Args:
      model: a compiled model, whose variables exist, on several replicas.
      step: one step for a batch, in replica context; by default `train_step`.
      metrics: the metrics of Keras whose results after each run are read, without values; the step changes them.

    Raises:
      UsageError: for a model with parts of a table that other workers hold.

    Attributes:
      names: of the losses, once a step has run.
      sized: whether the step has to know how many examples it gets, so that the parts of a batch are of one size.
      apart: the variables that differed between replicas after the first run in parts; None before it.
    """

    def __init__(self, model: Any, step: Callable[[Any], Any] | None = None, metrics: Sequence[Any] = ()) -> None:
        if any(map(is_divided, model.variables)):
            raise StepError(
                "a compiled model has a ShardedEmbedding whose parts workers hold alone, so that its step cannot be "
                "compared with that of one device; use a GradientTrainer, or replicas of one process"
            )
        self._model, self._strategy, self._step = model, model.distribute_strategy, step or model.train_step
        self._replicas = self._strategy.num_replicas_in_sync
        self._metrics, self._given = metrics, _Given()
        self._joins = False  # whether the step takes something from other replicas
        self.sized = isinstance(self._strategy, tf.distribute.TPUStrategy)
        self._traced: dict[tuple, Any] = {}
        self._before: dict[int, tuple[tf.Variable, Any]] = {}  # that the step updates
        self._moved: list[tuple[tf.Variable, np.ndarray]] = []
        self._may_count: list[tf.Variable] = []
        self._replaced = contextlib.ExitStack()
        self.names: list[str] = []
        self.apart: list[str] | None = None

    def __enter__(self) -> "StepTrial":
        for optimizer in _keras.optimizers(self._model).values():
            name = "apply" if _keras.family(optimizer) == "keras" else "apply_gradients"
            taken = self._takes_gradients if name == "apply" else self._takes_pairs
            self._replaced.callback(Replacement(optimizer, name, lambda _, taken=taken: taken).undo)
            if _keras.scales_loss(optimizer) and optimizer is self._model.optimizer:
                optimizer.build(self._model.trainable_variables)  # which makes the variable of the scale
            if (scale := _keras.loss_scale(optimizer)) is not None:
                self._replaced.callback(scale.assign, scale.numpy())
                scale.assign(1)
        for layer in filter(_keras.has_own_statistics, _keras.sublayers(self._model)):
            trained = [(variable, variable.trainable) for variable in layer.variables]
            self._replaced.callback(_set_trainable, layer, trained)
            layer.trainable = False
        return self

    def __exit__(self, *error: object) -> None:
        self._put_back(lambda variable: True)
        for variable, value in reversed(self._moved):
            variable.assign(value)
        self._replaced.close()

    def whole(self, batch: Any) -> Computed:
        """Runs the step on a batch as one device does."""
        bounds = np.array([[[0, size]] * self._replicas for size in rows.sizes(batch)])
        found = self._run(batch, bounds, whole=True)
        self._put_back(lambda variable: not _is_random(variable))
        return found

    def in_parts(self, batch: Any, shares: Sequence[int] | None = None) -> Computed:
        """Runs the step on the parts of a batch, one a replica, as a training does.

        Args:
          batch: the batch.
          shares: how many rows each replica gets, of parts that have equally many rows; None for equal shares of each.
        """
        numbers = np.arange(self._replicas + 1)
        ends = [-(-numbers * size // self._replicas) for size in rows.sizes(batch)]
        ends = ends if shares is None else [np.cumsum([0, *shares])] * len(ends)
        found = self._run(batch, np.array([np.stack([each[:-1], each[1:]], axis=1) for each in ends]), whole=False)
        if self.apart is None:
            self.apart = kept_apart(self._strategy, shared_variables(state_of_model(self._model)))
        self._put_back(lambda variable: not _is_random(variable))
        return found

    def move(self, number: int) -> None:
        """Moves all weights and counters that the step reads, so that none is zero; equally on all replicas.

        Each number moves them in another way.
        """
        used = {_tf.identity_of(part) for traced in self._traced.values() for part in self._parts(traced)}
        chance = np.random.default_rng(number)
        metrics = {id(_keras.tf_variable(each)) for metric in self._model.metrics for each in metric.variables}
        for _, variable in variables_of(state_of_model(self._model)):
            parts = self._strategy.experimental_local_results(variable)
            value = parts[0].numpy()
            moved = _moved(value, variable.trainable, chance)
            if moved is not None and id(variable) not in metrics and _tf.identity_of(parts[0]) in used:
                self._moved += [(part, value) for part in parts]
                self._assign(parts, moved)
                if value.dtype.kind not in "iu" and not value.shape and value == 0 and not variable.trainable:
                    self._may_count += parts

    def move_later(self) -> bool:
        """Moves numbers that may count steps, though they are no whole numbers by type; returns whether there are any.

        A number that begins with 0 may also be a share, which `move` gives a value below 1.
        """
        self._assign(self._may_count, _LATER)
        return bool(self._may_count)

    def _assign(self, parts: Iterable[tf.Variable], value: Any) -> None:
        for part in parts:
            part.assign(value)
            if _tf.identity_of(part) in self._before:
                self._before[_tf.identity_of(part)] = part, tf.identity(part)

    def _parts(self, traced: Any) -> list[tf.Variable]:
        """Returns the replicas' parts of the variables of a trace, which has generators of tf_keras as they are."""
        return [part for each in traced.variables for part in self._strategy.experimental_local_results(each)]

    def _run(self, batch: Any, bounds: np.ndarray, whole: bool) -> Computed:
        """Runs a step; bounds are int64 `[leaves, replicas, 2]`, the first row and the one after the last."""
        flat = leaves(batch)
        try:
            traced = self._trace(batch, flat, bounds, whole)
        except (TypeError, ValueError, tf.errors.OpError):
            if self.sized:
                raise
            self.sized = True  # a step may need to know how many examples it gets
            traced = self._trace(batch, flat, bounds, whole)
        losses, gradients = traced(tf.constant(bounds), tf.constant(whole), *flat)
        return Computed(losses.numpy(), gradients.numpy(), self._results(whole))

    def _results(self, whole: bool) -> list[np.ndarray]:
        """Returns what the metrics are after a run: of the first replica, or of all together."""
        if not whole or not self._metrics:
            return [result.numpy() for result in self._read()]
        found = self._strategy.run(self._read_alone)
        return [self._strategy.experimental_local_results(result)[0].numpy() for result in found]

    def _read(self) -> list[tf.Tensor]:
        each = [tf.nest.flatten(metric.result()) for metric in self._metrics]
        flat = [[tf.reshape(tf.cast(_keras.value_now(one), tf.float64), [-1]) for one in some] for some in each]
        return [tf.concat(some, axis=0) for some in flat]

    @functools.cached_property
    def _read_alone(self) -> Callable[[], list[tf.Tensor]]:
        @tf.function(autograph=False)
        def read() -> list[tf.Tensor]:
            with alone():
                return self._read()

        return read

    def _trace(self, batch: Any, flat: list[Any], bounds: np.ndarray, whole: bool) -> Any:
        counts = bounds[:, :, 1] - bounds[:, :, 0]
        sizes = tuple(counts[:, 0].tolist()) if self.sized and (counts == counts[:, :1]).all() else None
        key = sizes, whole and self._joins
        if key in self._traced:
            return self._traced[key]

        @tf.autograph.experimental.do_not_convert
        def function(bounds: tf.Tensor, whole: tf.Tensor, *flat: Any) -> list[tf.Tensor]:
            found = self._strategy.run(lambda *flat: self._on_replica(batch, bounds, whole, flat, key), args=flat)
            return [self._strategy.reduce(tf.distribute.ReduceOp.SUM, part, axis=None) for part in found]

        specs = [tf.type_spec_from_value(leaf) if sizes else rows.spec(leaf) for leaf in flat]
        before = self._joins
        signature = tf.TensorSpec(bounds.shape, tf.int64), tf.TensorSpec([], tf.bool), *specs
        traced = tf.function(function).get_concrete_function(*signature)
        updated = _tf.updated_by(traced)
        for part in self._parts(traced):
            if _tf.identity_of(part) in updated:
                self._before.setdefault(_tf.identity_of(part), (part, tf.identity(part)))
        names = unheld(self._strategy, traced.variables, state_of_model(self._model))
        refuse_others(self._strategy, traced.variables, names)
        self._traced[key] = traced
        return self._trace(batch, flat, bounds, whole) if whole and self._joins != before else traced

    @tf.autograph.experimental.do_not_convert
    def _on_replica(
        self, batch: Any, bounds: tf.Tensor, whole: tf.Tensor, flat: Sequence[Any], key: tuple
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Does a step with a replica's rows; returns what it adds to the sums over replicas."""
        (sizes, left_out), self._given.gradients = key, []
        own = bounds[:, tf.distribute.get_replica_context().replica_id_in_sync_group]
        counts = own[:, 1] - own[:, 0]
        batch = OmittedParts(batch).restore(_of_replica(flat, own, counts if sizes is None else sizes))
        every = tf.reduce_sum(bounds[0, :, 1] - bounds[0, :, 0])
        share = updates.Share(batch, counts[0], tf.where(whole, counts[0], every))
        with updates.in_use(share), part_of_batch(left_out) as joined:
            logs = converted(self._step)(batch)
            factor = updates.weight_of_part(tf.float64)
        self._joins = self._joins or joined.called
        counted = tf.where(whole, tf.constant(1 / self._replicas, tf.float64), 1)  # all replicas compute the same
        losses = [_flat(loss) * factor for loss in self._losses(logs)]
        gradients = [_flat(gradient) for gradient in self._given.gradients if gradient is not None]
        empty = [tf.zeros([0], tf.float64)]
        return counted * tf.concat(losses or empty, axis=0), counted * tf.concat(gradients or empty, axis=0)

    @tf.autograph.experimental.do_not_convert
    def _losses(self, logs: Any) -> list[tf.Tensor]:
        named = {name: logs[name] for name in sorted(logs) if "loss" in name} if isinstance(logs, dict) else {}
        for number, loss in enumerate(self._model.losses):
            named[f"model.losses[{number}]"] = tf.reduce_mean(loss)
        self.names = [name for name, value in named.items() for _ in range(_flat(value).shape[0] or 0)]
        return list(named.values())

    def _takes_gradients(self, grads: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        self._given.gradients += updates.weighted(grads)

    def _takes_pairs(self, grads_and_vars: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        given = updates.weighted([gradient for gradient, _ in grads_and_vars])
        factor = tf.constant(1 / self._replicas) if updates.sums_itself(kwargs) else None
        self._given.gradients += [updates.times(each, factor) for each in given]

    def _put_back(self, chosen: Callable[[tf.Variable], bool]) -> None:
        for variable, value in self._before.values():
            if chosen(variable):
                variable.assign(value)


def _is_random(variable: tf.Variable) -> bool:
    """Returns whether a variable may be the state of random numbers, which are whole numbers in both families."""
    return variable.dtype.is_integer and variable.shape.rank != 0 and not knows_owners(variable)


def _set_trainable(layer: Any, trained: list[tuple[Any, bool]]) -> None:
    """Lets a layer train again, and of its variables those that did."""
    layer.trainable = True
    for variable, trainable in trained if _keras.family(layer) == "keras" else ():
        variable.trainable = trainable


def _moved(value: np.ndarray, trainable: bool, chance: np.random.Generator) -> np.ndarray | None:
    """Returns another value for a variable, of which no element is zero; None for the state of random numbers."""
    if value.dtype.kind in "iu" and value.ndim == 0:
        return value + np.asarray(_LATER, value.dtype)
    if not np.issubdtype(value.dtype, np.floating) and value.dtype.name != "bfloat16":
        return None
    share = chance.uniform(0.7, 1.3, value.shape)
    new = 0.1 * chance.normal(size=value.shape) if trainable else chance.uniform(0.1, 0.5, value.shape)
    return np.where(value == 0, new, value * share).astype(value.dtype)


@tf.autograph.experimental.do_not_convert
def _of_replica(flat: Sequence[Any], own: tf.Tensor, sizes: Any) -> list[Any]:
    found, numbers = [], itertools.count()
    for leaf in flat:
        if leaf.shape.rank == 0:
            found.append(leaf)
            continue
        number = next(numbers)
        ids = own[number, 0] + tf.range(tf.cast(sizes[number], tf.int64))
        found.append(rows.getter(leaf)(ids))
    return found


@tf.autograph.experimental.do_not_convert
def _flat(value: Any) -> tf.Tensor:
    """Returns some elements of a value, float64 `[n]`; of a sparse gradient, sums of some of its rows."""
    if isinstance(value, tf.IndexedSlices):
        rows_of_variable = None if value.dense_shape is None else tf.get_static_value(value.dense_shape)
        groups = _ELEMENTS if rows_of_variable is None else min(_ELEMENTS, int(rows_of_variable[0]))
        value = tf.math.unsorted_segment_sum(value.values, value.indices % groups, groups)
    flat = tf.reshape(tf.convert_to_tensor(value), [-1])
    return tf.cast(flat[:: max(1, (flat.shape[0] or 0) // _ELEMENTS)], tf.float64)


def ordered(model: Any, batch: Any) -> Any:
    """Returns a batch for all replicas, whose parts have other numbers of tokens and other weights."""
    replicas = model.distribute_strategy.num_replicas_in_sync
    sizes = set(rows.sizes(batch))
    if len(sizes) > 1:
        return batch  # whose rows do not belong together by their numbers
    size, each = sizes.pop(), _keras.fixed_batch(model) or 0
    ids = rows.by_content(batch, size)
    most = max(2, size // replicas)
    return rows.take(batch, [ids[number * size // (most * replicas)] for number in range((each or most) * replicas)])


def leaves(batch: Any) -> list[Any]:
    """Returns the tensors of a batch, without what is None."""
    given = OmittedParts(batch).remove(batch)
    return [tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in given]
