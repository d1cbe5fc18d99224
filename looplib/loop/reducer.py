"""Reduces the outputs of steps, exactly, over steps, replicas and workers.

Each step adds one packed float64 vector, its contribution, to a variable that every replica keeps for itself; one sum
over replicas reads all of them at the end of a loop. A mean is kept as a weighted sum and a sum of weights, so that it
does not depend on how examples are divided over steps, replicas and workers.
"""

import abc
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.cluster import runtime
from looplib.cluster.collectives import Workers
from looplib.compat import keras as _keras
from looplib.compat.tensorflow import converted
from looplib.guards import non_finite
from looplib.loop.packing import Packer
from looplib.task.record import RunningTotals
from looplib.task.reductions import Media, Reduction

State = RunningTotals | dict[str, float]  # the second is for an Orbit trainer


class Accumulator(abc.ABC):
    """The sums over the steps since the last report, for checkpoints and guards."""

    @abc.abstractmethod
    def state(self) -> State:
        """Returns the sums since the last report, as JSON can hold them."""

    @abc.abstractmethod
    def load(self, state: State) -> None:
        """Continues from a `state()`, or from zero if that is of another program."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Removes the sums since the last report."""

    @abc.abstractmethod
    def first_bad(self) -> tuple[int, list[str]]:
        """Returns the first step with a value that was not finite, counted from the last report or `load`.

        With it come the names of the losses and gradients that were not finite in it.
        """


class UnknownOutputsError(Exception):
    """A replica has no examples, and no step before has shown what a step returns."""


class Reducer(Accumulator):
    """Accumulates and reduces the outputs of one `step_fn`.

    `packed` runs in the replica and learns the structure when it is first traced or called. Then `create` makes the
    variable, `add` runs once per step and `read` once per loop, both across replicas.

    Args:
      strategy: the `tf.distribute.Strategy`.
      who: the user's method, such as "Digits.step_fn", for messages.
      count_examples: adds the total `examples`, from the first dimension of the inputs.
      watched_loss: the name of the loss; it, other losses and gradients are watched for values that are not finite.
        Accumulation stops at the first such step, so that the totals identify the step and the value. "" for no watch.
      skips: counts steps that were undone, as `skipped_steps`.

    Attributes:
      packer: `Packer` of the step's outputs; its `unpack` makes metrics from the results of `read` and `take`.
      joins: whether the step joins the replicas, by `all_reduce` say, so that one without examples has to take part.
      collects: the `tf.TypeSpec`s of the step's media and `looplib.each` outputs, once it is traced, by name.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        who: str,
        count_examples: bool,
        watched_loss: str = "",
        skips: bool = False,
    ) -> None:
        self._strategy, self._who, self._watched_loss = strategy, who, watched_loss
        self.packer = Packer(who, count_examples, skips)
        self._watched: list[str] = []  # names of the watched values
        self._totals = self._pending = None  # the second is what `load` was given too early
        self.joins = False
        self.collects: dict[str, Any] = {}

    @property
    def watches(self) -> bool:
        """Returns whether losses and gradients are watched."""
        return bool(self._watched_loss)

    @tf.autograph.experimental.do_not_convert
    def packed(self, outputs: Any, inputs: Any, gradients: list[tuple[str, Any]] | None = None) -> Any:
        """Packs the outputs of a step on a batch; in replica context.

        In a step that is watched, what `updates.watching` has collected is the gradients, and the contribution ends
        with [1 (steps), each of the watched values].

        Returns:
          float64 tensor `[n]`, a step's contribution. If the step returns media or a `looplib.each`, the tensor and
          `(whether there was an example, dict of these values)`; see `divided`.
        """
        names, measures = non_finite.measure_gradients(gradients or [])
        contribution, collected = self.packer.pack(outputs, inputs)
        if self.watches:
            losses = self.packer.losses(self._watched_loss)
            self._watched = [slot.name for slot in losses] + names
            parts = [tf.gather(contribution, [slot.start for slot in losses])] if losses else []
            contribution = tf.concat([contribution, tf.ones([1], tf.float64), *parts, *measures], axis=0)
        if not collected:
            return contribution
        values = {name: each.tensors if isinstance(each, Media) else each.value for name, each in collected.items()}
        self.collects = tf.nest.map_structure(tf.type_spec_from_value, values)
        counts = [each.weight for each in collected.values() if isinstance(each, Reduction) and each.weight is not None]
        return contribution, (tf.reduce_all(counts) if counts else tf.constant(True), values)

    @tf.autograph.experimental.do_not_convert
    def nothing(self) -> Any:
        """Makes what `packed` returns, of a replica without examples, once a step was traced or called."""
        if self.packer.slots is None:
            raise UnknownOutputsError
        contribution = tf.zeros([self.packer.size], tf.float64)
        if not self.collects:
            return contribution

        def empty(spec: tf.TensorSpec) -> tf.Tensor:
            return tf.zeros([size or 0 for size in spec.shape.as_list()] if spec.shape.rank else [], spec.dtype)

        return contribution, (tf.constant(False), tf.nest.map_structure(empty, self.collects))

    def divided(self, outputs: Any) -> tuple[Any, Any]:
        """Returns what `packed` returned as (the contribution, what is collected or None)."""
        return outputs if self.collects else (outputs, None)

    @property
    def collects_examples(self) -> bool:
        """Returns whether `looplib.each` is among the outputs, so that each step's values go to the host."""
        return self.collects.keys() != self.packer.media.keys()

    def gradient_norms(self, contribution: np.ndarray) -> dict[str, float]:
        """Returns the norms of the gradients by variable, from what `packed` returned in an eager step: `[n]`."""
        halves = dict(zip(self._watched, contribution[self.packer.size + 1 :]))  # of the squares
        prefix = non_finite.GRADIENT_OF
        return {
            name.removeprefix(prefix): float(np.sqrt(2 * half))
            for name, half in halves.items()
            if name.startswith(prefix)
        }

    @property
    def created(self) -> bool:
        """Returns whether the structure is known and the variable exists."""
        return self._totals is not None

    def create(self) -> None:
        """Makes the accumulating variable, once the structure is known; outside any `tf.function`."""
        for name, metric in self.packer.keras.items():
            runtime.check_placement(self._strategy, f"the metric {name!r} of {self._who}", metric.variables)
        size = self.packer.size + (1 + len(self._watched) if self.watches else 0)
        self._totals = self._make_totals(size)
        marks = self.packer.replaced_by() + [None] * (size - self.packer.size)
        self._replaced = np.array([mark is not None for mark in marks]) if self.packer.keeps_last else None
        self._marks = np.array([mark or 0 for mark in marks])
        if self._pending is not None:
            self.load(*self._pending)

    def _make_totals(self, size: int) -> tf.Variable:
        """Makes a variable with a copy per replica; a subclass may keep the totals elsewhere."""
        with self._strategy.scope():
            return tf.Variable(
                tf.zeros([size], tf.float64),
                trainable=False,
                name=f"{self._who}_totals",
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )

    @tf.autograph.experimental.do_not_convert
    def add(self, contributions: Any) -> None:
        """Adds one step's contributions of all replicas; across replicas."""
        self._strategy.run(self._add_local, args=(contributions,))

    def _add_local(self, contribution: tf.Tensor) -> None:
        if self._replaced is not None:
            self._totals.assign(self.joined(self._totals.read_value(), contribution))
            return
        if self._watched:
            # In a graph the totals are read before the step's gradients are known. Each op that waits for the gradients
            # makes the step longer: here two do, in `joined` three.
            counts = tf.cast(self.finite_in(self._totals.read_value()), tf.float64)
            contribution = tf.math.multiply_no_nan(contribution, counts)
        self._totals.assign_add(contribution)

    @tf.autograph.experimental.do_not_convert
    def finite_in(self, totals: tf.Tensor) -> tf.Tensor:
        """Returns whether the watched values are finite in totals of a replica, float64 `[n]`: boolean scalar."""
        return tf.math.is_finite(self._sum_of_watched(totals))

    def _sum_of_watched(self, totals: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(totals[self.packer.size + 1 :])

    @tf.autograph.experimental.do_not_convert
    def totals(self) -> Any:
        """Returns what every replica has added up so far; across replicas."""
        return self._strategy.run(lambda: self._totals.read_value())

    @tf.autograph.experimental.do_not_convert
    def sum_of(self, totals: Any, contributions: Any) -> Any:
        """Returns `totals()` with one step's contributions, for `put`; across replicas."""
        return self._strategy.run(self.joined, args=(totals, contributions))

    @tf.autograph.experimental.do_not_convert
    def put(self, totals: Any) -> None:
        """Replaces what every replica has added up; across replicas."""
        self._strategy.run(lambda part: self._totals.assign(part), args=(totals,))

    @tf.autograph.experimental.do_not_convert
    def joined(self, totals: tf.Tensor, contribution: tf.Tensor) -> tf.Tensor:
        """Returns totals, float64 `[n]`, plus the contribution `[n]` of the next step or steps."""
        kept = totals
        if self._replaced is not None:
            is_given = tf.gather(contribution, self._marks) > 0  # not of a step that was skipped or had no examples
            kept = tf.where(self._replaced & is_given, tf.zeros_like(totals), totals)
        if not self._watched:
            return kept + contribution
        return tf.where(self.finite_in(totals), kept + contribution, totals)

    @tf.autograph.experimental.do_not_convert
    def finite(self) -> tf.Tensor:
        """Returns whether all watched values were finite on all replicas so far: boolean scalar; across replicas."""
        return self.all_finite(self.totals()) if self._watched else tf.constant(True)

    @tf.autograph.experimental.do_not_convert
    def all_finite(self, contributions: Any) -> tf.Tensor:
        """Returns whether all values that are watched are finite on all replicas, a boolean scalar; across replicas."""
        if not self._watched:
            return tf.constant(True)
        local = self._strategy.run(self._sum_of_watched, args=(contributions,))
        return tf.math.is_finite(self._strategy.reduce(tf.distribute.ReduceOp.SUM, local, axis=None))

    @tf.autograph.experimental.do_not_convert
    def skip_unless(self, counted: tf.Tensor, contributions: Any) -> Any:
        """Returns contributions unchanged, or else one `skipped_steps` and nothing more; across replicas."""
        skipped = np.zeros([self._totals.shape[0]])
        skipped[self.packer.start_of("skipped_steps")] = 1

        def on_replica(part: tf.Tensor) -> tf.Tensor:
            first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
            return tf.where(counted, part, tf.where(first, skipped, tf.zeros_like(part)))

        return self._strategy.run(on_replica, args=(contributions,))

    def first_bad(self) -> tuple[int, list[str]]:
        """See `Accumulator`; the names come from the replicas that were first."""
        found = []
        for totals in self._totals_by_replica():
            watch = totals[self.packer.size :]
            names = [name for name, value in zip(self._watched, watch[1:]) if not np.isfinite(value)]
            if names:
                found.append((int(watch[0]), names))
        steps = min(steps for steps, _ in found)
        return steps, list(dict.fromkeys(name for first, names in found if first == steps for name in names))

    def read(self) -> tuple[tf.Tensor, dict[str, Any]]:
        """Reduces over replicas in one sum, and resets; across replicas, in a `tf.function` or not.

        Returns:
          `(totals, results)` for `packer.unpack`: float64 tensor `[n]`, and a dict of result tensors of Keras metrics.
        """
        totals = self._sum_replicas()
        results = self.results()
        # The metrics are read before they are reset, also where nothing else orders the two.
        with tf.control_dependencies([totals, *tf.nest.flatten(results)]):
            self._strategy.run(self._reset_local)
        return totals, results

    def results(self) -> dict[str, Any]:
        """Returns the results of the Keras metrics by their names, which a reset does not change."""
        return {n: tf.nest.map_structure(_keras.value_now, converted(m.result)()) for n, m in self.packer.keras.items()}

    @tf.autograph.experimental.do_not_convert
    def take(self, wanted: tf.Tensor) -> tf.Tensor:
        """Reads in the `tf.function` of a loop without Keras metrics, for `packer.unpack`; resets only if `wanted`."""
        totals = self._sum_replicas()
        with tf.control_dependencies([totals]):
            self._strategy.run(self._reset_if, args=(wanted,))
        return totals

    def _reset_if(self, wanted: tf.Tensor) -> None:
        totals = self._totals.read_value()
        self._totals.assign(tf.where(wanted, tf.zeros_like(totals), totals))

    @property
    def has_keras_metrics(self) -> bool:
        """Returns whether Keras metric objects are among the outputs, which `take` does not read."""
        return bool(self.packer.keras)

    @tf.autograph.experimental.do_not_convert
    def _sum_replicas(self) -> tf.Tensor:
        return self._strategy.reduce(tf.distribute.ReduceOp.SUM, self.totals(), axis=None)

    def clear(self) -> None:
        """See `Accumulator`; the Keras metrics are reset too."""
        if self.created:
            self._strategy.run(self._reset_local)

    def _reset_local(self) -> None:
        self._totals.assign(tf.zeros_like(self._totals.read_value()))
        for metric in self.packer.keras.values():
            metric.reset_state()

    def state(self) -> State:
        """See `Accumulator`; before the first step, returns what `load` was given."""
        if not self.created:
            return self._pending[0] if self._pending else RunningTotals([], [])
        totals = [totals[: self.packer.size].tolist() for totals in self._totals_by_replica()]
        return RunningTotals(self.packer.names, totals)

    @property
    def steps(self) -> int:
        """The finite steps that a watching reducer has added up, for `first_bad`; 0 for any other."""
        return int(self._totals_by_replica()[0, self.packer.size]) if self.watches and self.created else 0

    def load(self, state: State, steps: int = 0) -> None:
        """Continues from a `state()` of some `steps`; from zero if that has metrics which are not here.

        Only `skipped_steps` may be missing here: it is a metric with `non_finite="skip"`, which may change. A metric
        that is new begins with zero.
        """
        if not self.created:
            self._pending = state, steps
            return
        local, workers = self._strategy.experimental_local_results(self._totals), Workers(self._strategy)
        replicas = len(local) * workers.count
        totals = self._loaded(state)
        if len(totals) != replicas:
            totals = np.stack([totals.sum(axis=0)] + [np.zeros_like(totals[0])] * (replicas - 1))
        for part, values in zip(local, totals[workers.index * len(local) :]):
            part.assign(np.concatenate([values, [steps, *[0] * len(self._watched)]])[: part.shape[0]])

    def _loaded(self, state: State) -> np.ndarray:
        """Returns the totals of a `state()` in this order of metrics, float64 `[replicas, n]`; zeros if they differ."""
        sizes = {slot.name: slot.size for slot in self.packer.slots}
        state = state if isinstance(state, RunningTotals) else RunningTotals([], [])
        earlier = {name: sizes.get(name, 1) for name in state.names}
        others = earlier.keys() - sizes.keys() - {"skipped_steps"}
        lengths = {len(totals) for totals in state.totals}
        if not earlier or not sizes or others or lengths != {sum(earlier.values())}:
            return np.zeros([1, self.packer.size])
        totals = np.asarray(state.totals, np.float64)
        parts = dict(zip(earlier, np.split(totals, np.cumsum([*earlier.values()])[:-1], axis=1)))
        return np.concatenate([parts.get(name, np.zeros([len(totals), size])) for name, size in sizes.items()], axis=1)

    def _totals_by_replica(self) -> np.ndarray:
        """Returns the accumulated vector of each replica, float64 `[replicas, n]`; workers wait for each other."""
        local = np.stack([part.numpy() for part in self._strategy.experimental_local_results(self._totals)])
        workers = Workers(self._strategy)
        return workers.gather(local).reshape(len(local) * workers.count, local.shape[1])
