"""How a step's outputs are reduced, exactly, over steps, replicas and workers.

Each step adds one packed float64 vector, its contribution, to a variable that every replica keeps for itself; one sum
over replicas reads all of them at the end of a loop. A mean is kept as a weighted sum and a sum of weights, so that it
does not depend on how examples fall on steps, replicas and workers.
"""

import dataclasses
import math

import numpy as np
import tensorflow as tf

from looplib import guards, keras_family
from looplib.errors import UsageError
from looplib.reductions import Reduction, total
from looplib.workers import Workers


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Where one metric lies in the packed vector."""

    name: str
    kind: str  # "mean" takes two places, sum and weight; "total" and "last" take as many as the value has elements
    shape: tuple
    integer: bool
    start: int

    @property
    def size(self):
        return 2 if self.kind == "mean" else math.prod(self.shape)


class Reducer:
    """Accumulates and reduces what one `step_fn` returns.

    `run_step` runs in the replica and learns the structure when it is first traced or called; then `create` makes the
    variable, `add` runs once a step and `read` once a loop, both across replicas.

    Args:
      strategy: the `tf.distribute.Strategy`.
      who: the class name of the user's trainer or evaluator, for messages.
      count_examples: adds the total `examples`, from the first dimension of the inputs.
      guarded: watches losses and gradients for values that are not finite. From the first such step on nothing more is
        added, so that what stands there tells which step and which value it was.
      skips: counts steps that were undone, as `skipped_steps`.

    Attributes:
      collects: the `tf.TypeSpec`s of what the step returns as `looplib.each`, once it is traced; None for nothing.
    """

    def __init__(self, strategy, who, count_examples, guarded=False, skips=False):
        self._strategy = strategy
        self._who = who
        self._count_examples = count_examples
        self._guarded = guarded
        self._skips = skips
        self._watched = []  # names of what is watched
        self._slots = None
        self._keras = {}
        self._totals = None
        self._pending = None
        self._each = None
        self.collects = None

    def run_step(self, step_fn, inputs, may_be_empty):
        """Runs one step on one replica and packs its outputs; in replica context.

        Args:
          step_fn: the user's step.
          inputs: one batch of this replica.
          may_be_empty: leaves the step out where the batch has no example. Means of nothing are NaN, and TensorFlow
            2.20 fails on some convolutions of an empty batch (CPU, fused with their activation).

        Returns:
          float64 tensor `[n]` as `contribution` makes it, zeros for an empty batch. If the step returns a
          `looplib.each`, the tensor and `(whether there was an example, dict of these values)`.
        """
        batch = _batch_size(inputs)
        if self._guarded:
            return self._watch(*guards.watched(step_fn, inputs), inputs)
        if not may_be_empty or batch is None:
            return self._with_collected(self.contribution(step_fn(inputs), inputs))
        return tf.cond(
            batch[1] > 0, lambda: self._with_collected(self.contribution(step_fn(inputs), inputs)), self._nothing
        )

    @tf.autograph.experimental.do_not_convert
    def _with_collected(self, contribution):
        values, self._each = self._each, None
        if not values:
            return contribution
        self.collects = tf.nest.map_structure(tf.type_spec_from_value, values)
        return contribution, (tf.constant(True), values)

    @tf.autograph.experimental.do_not_convert
    def _nothing(self):
        """What a replica without examples returns; the step has been traced before."""
        contribution = tf.zeros([self._size], tf.float64)
        if not self.collects:
            return contribution

        def empty(spec):
            return tf.zeros([size or 0 for size in spec.shape.as_list()] if spec.shape.rank else [], spec.dtype)

        return contribution, (tf.constant(False), tf.nest.map_structure(empty, self.collects))

    @property
    def _size(self):
        return sum(slot.size for slot in self._slots)

    @tf.autograph.experimental.do_not_convert
    def _watch(self, outputs, norms, inputs):
        """Adds to a contribution [1 (steps), the sum of all that is watched, each of it]."""
        contribution = self.contribution(outputs, inputs)
        losses = [slot for slot in self._slots if "loss" in slot.name.lower() and slot.kind != "last"]
        self._watched = [slot.name for slot in losses] + [name for name, _ in norms]
        if not self._watched:
            return tf.concat([contribution, tf.constant([1.0, 0.0], tf.float64)], axis=0)
        parts = [contribution[slot.start : slot.start + 1] for slot in losses]
        if norms:
            parts.append(tf.cast(tf.stack([norm for _, norm in norms]), tf.float64))
        total_watched = tf.reduce_sum(tf.concat(parts, axis=0), keepdims=True)
        return tf.concat([contribution, tf.ones([1], tf.float64), total_watched, *parts], axis=0)

    @tf.autograph.experimental.do_not_convert
    def contribution(self, outputs, inputs):
        """Packs one step's outputs; in replica context.

        Args:
          outputs: what `step_fn` returned.
          inputs: what it was given, for the number of examples.

        Returns:
          float64 tensor `[n]`, n fixed by the structure of `outputs`.

        Raises:
          UsageError: for an output that does not say how it reduces, or a structure that changes between steps.
        """
        if not isinstance(outputs, dict):
            raise UsageError(
                f"{self._who}.step_fn returned {_describe(outputs)}; expected a dict from metric name to value, "
                'such as {"loss": losses} with losses of shape [per_replica_batch]'
            )
        batch = _batch_size(inputs)
        slots, parts, metrics, collected, start = [], [], {}, {}, 0
        values = dict(outputs)
        if self._count_examples and "examples" not in values and batch is not None:
            values["examples"] = total(batch[1])
        if self._skips:
            values["skipped_steps"] = total(tf.constant(0, tf.int64))
        for name, value in sorted(values.items(), key=lambda item: str(item[0])):
            check_metric_name(self._who, name)
            if keras_family.is_metric(value):
                metrics[name] = value
                continue
            if isinstance(value, Reduction) and value.kind == "each":
                collected[name] = value.value
                continue
            slot, part = self._pack(name, value, batch, start)
            slots.append(slot)
            parts.append(part)
            start += slot.size
        if collected and not self._count_examples:
            raise UsageError(
                f"{self._who}.step_fn returned {', '.join(map(repr, collected))} as looplib.each, and a training "
                "collects nothing on the host; only an evaluator does"
            )
        self._each = collected
        if self._slots is None:
            self._slots, self._keras = slots, metrics
        elif self._slots != slots or self._keras != metrics:
            raise UsageError(
                f"{self._who}.step_fn returned metrics {_names(slots, metrics)} after "
                f"{_names(self._slots, self._keras)}; expected the same names, kinds and shapes at every step"
            )
        return tf.concat([tf.reshape(part, [-1]) for part in parts] or [tf.zeros([0], tf.float64)], axis=0)

    def _pack(self, name, value, batch, start):
        where = f"{self._who}.step_fn returned {name!r} as {_describe(value)}"
        if not isinstance(value, Reduction):
            value = self._per_example(where, value, batch)
        for tensor in (value.value, value.weight):
            if tensor is not None and not _is_number(tensor):
                raise UsageError(f"{where}; expected real numbers, integers or booleans")
        data = tf.cast(value.value, tf.float64)
        integer = value.value.dtype.is_integer or value.value.dtype.is_bool
        if value.kind == "mean":
            slot = _Slot(name, "mean", (), False, start)
            if value.weight is None:
                return slot, [tf.reduce_sum(data), tf.cast(tf.size(data), tf.float64)]
            # Broadcast to a common shape, so that the weights are summed as often as they are used.
            shape = tf.broadcast_dynamic_shape(tf.shape(data), tf.shape(value.weight))
            weight = tf.broadcast_to(tf.cast(value.weight, tf.float64), shape)
            return slot, [tf.reduce_sum(tf.math.multiply_no_nan(data, weight)), tf.reduce_sum(weight)]
        if not data.shape.is_fully_defined():
            raise UsageError(
                f"{where}, and that shape is not fully known; sum over the batch first, "
                f"as in looplib.{value.kind}(tf.reduce_sum(value))"
            )
        slot = _Slot(name, value.kind, tuple(data.shape), integer, start)
        if value.kind == "last":
            first = tf.distribute.get_replica_context().replica_id_in_sync_group
            data = tf.where(tf.equal(first, 0), data, tf.zeros_like(data))
        return slot, data

    def _per_example(self, where, value, batch):
        try:
            value = tf.convert_to_tensor(value)
        except (TypeError, ValueError):
            raise UsageError(
                f"{where}; expected a tensor [per_replica_batch], looplib.mean, looplib.total, looplib.last or a Keras "
                "metric object"
            ) from None
        if value.shape.rank == 0:
            raise UsageError(
                f"{where} without a reduction; return one value per example, or say how a scalar reduces: "
                "looplib.mean(value, weight=<examples>), looplib.total(value) or looplib.last(value)"
            )
        if batch and value.shape.rank and value.shape[0] is not None and value.shape[0] not in batch[0]:
            sizes = " or ".join(map(str, sorted(batch[0]))) or "any size"
            raise UsageError(
                f"{where}, whose first dimension is not the batch ({sizes}); expected one value per example, or "
                "looplib.mean, looplib.total or looplib.last to say how it reduces"
            )
        if value.shape.rank != 1 and _is_number(value):
            value = tf.cast(value, tf.float64)
            value = tf.reduce_mean(value, axis=tf.range(1, tf.rank(value)))
        return Reduction("mean", value)

    @property
    def created(self):
        """Whether the structure is known and the variable exists."""
        return self._totals is not None

    def create(self):
        """Makes the accumulating variable, once the structure is known; outside any `tf.function`."""
        for name, metric in self._keras.items():
            keras_family.check_placement(self._strategy, f"the metric {name!r} of {self._who}", metric.variables)
        size = self._size + (2 + len(self._watched) if self._guarded else 0)
        self._totals = self._make_totals(size)
        replaced = [slot.kind == "last" for slot in self._slots for _ in range(slot.size)]
        self._replaced = np.array(replaced + [False] * (size - len(replaced)), bool) if any(replaced) else None
        if self._pending is not None:
            self.load(self._pending)

    def _make_totals(self, size):
        with self._strategy.scope():
            return tf.Variable(
                tf.zeros([size], tf.float64),
                trainable=False,
                name=f"{self._who}_totals",
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )

    @tf.autograph.experimental.do_not_convert
    def add(self, contributions):
        """Adds one step's contributions of all replicas; across replicas."""
        self._strategy.run(self._add_local, args=(contributions,))

    def _add_local(self, contribution):
        if self._watched or self._replaced is not None:
            self._totals.assign(self.joined(self._totals.read_value(), contribution))
        else:
            self._totals.assign_add(contribution)

    @tf.autograph.experimental.do_not_convert
    def joined(self, totals, contribution):
        """What `totals` float64 `[n]` come to with a contribution `[n]` of the step, or steps, that follow."""
        kept = totals if self._replaced is None else tf.where(self._replaced, tf.zeros_like(contribution), totals)
        if not self._watched:
            return kept + contribution
        return tf.where(tf.math.is_finite(totals[self._size + 1]), kept + contribution, totals)

    @tf.autograph.experimental.do_not_convert
    def finite(self):
        """Whether all that is watched was finite on all replicas so far: boolean scalar; across replicas."""
        if not self._watched:
            return tf.constant(True)
        local = self._strategy.run(lambda: self._totals.read_value()[self._size + 1])
        return tf.math.is_finite(self._strategy.reduce(tf.distribute.ReduceOp.SUM, local, axis=None))

    @tf.autograph.experimental.do_not_convert
    def all_finite(self, contributions):
        """Whether all that is watched is finite in one step's contributions of all replicas; across replicas."""
        if not self._watched:
            return tf.constant(True)
        local = self._strategy.run(lambda part: part[self._size + 1], args=(contributions,))
        return tf.math.is_finite(self._strategy.reduce(tf.distribute.ReduceOp.SUM, local, axis=None))

    @tf.autograph.experimental.do_not_convert
    def skip_unless(self, counted, contributions):
        """Leaves contributions as they are, or makes them one `skipped_steps` and nothing else; across replicas."""
        skipped = np.zeros([self._totals.shape[0]])
        skipped[next(slot.start for slot in self._slots if slot.name == "skipped_steps")] = 1

        def on_replica(part):
            first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
            return tf.where(counted, part, tf.where(first, skipped, tf.zeros_like(part)))

        return self._strategy.run(on_replica, args=(contributions,))

    def first_bad(self):
        """What was not finite, and when.

        Returns:
          `(steps, names)`: the number of steps after the first since the last `read`, `reset` or `load`, of those that
          are done; and the names of the losses and gradients that were not finite in that step, of the replicas that
          were the first.
        """
        found = []
        for totals in self._of_all_replicas():
            watch = totals[self._size :]
            names = [name for name, value in zip(self._watched, watch[2:]) if not np.isfinite(value)]
            if names:
                found.append((int(watch[0]), names))
        steps = min(steps for steps, _ in found)
        return steps, list(dict.fromkeys(name for first, names in found if first == steps for name in names))

    def read(self):
        """Reduces over replicas in one sum and starts anew; across replicas, in a `tf.function` or not.

        Returns:
          `(totals, results)`: float64 tensor `[n]` for `unpack`, and a dict of the Keras metrics' result tensors.
        """
        totals = self._sum_replicas()
        results = {name: metric.result() for name, metric in self._keras.items()}
        # The metrics are read before they are reset, also where nothing else orders the two.
        with tf.control_dependencies([totals, *tf.nest.flatten(results)]):
            self._strategy.run(self._reset_local)
        return totals, results

    @tf.autograph.experimental.do_not_convert
    def take(self, wanted):
        """The same inside of a loop that has no Keras metrics, at no extra call.

        Args:
          wanted: boolean scalar tensor, whether to start anew; without it, nothing changes.

        Returns:
          float64 tensor `[n]`, for `unpack`.
        """
        totals = self._sum_replicas()
        with tf.control_dependencies([totals]):
            self._strategy.run(self._reset_if, args=(wanted,))
        return totals

    def _reset_if(self, wanted):
        totals = self._totals.read_value()
        self._totals.assign(tf.where(wanted, tf.zeros_like(totals), totals))

    @property
    def has_keras_metrics(self):
        """Whether Keras metric objects are among the outputs, which `take` does not read."""
        return bool(self._keras)

    @tf.autograph.experimental.do_not_convert
    def _sum_replicas(self):
        local = self._strategy.run(lambda: self._totals.read_value())
        return self._strategy.reduce(tf.distribute.ReduceOp.SUM, local, axis=None)

    def _reset_local(self):
        self._totals.assign(tf.zeros_like(self._totals.read_value()))
        for metric in self._keras.values():
            metric.reset_state()

    def unpack(self, totals, results):
        """Turns what `read` returned into metrics.

        Args:
          totals: float64 `[n]`.
          results: dict from name to the result of a Keras metric.

        Returns:
          dict from name to a Python float or int, or a numpy array where the value was not a scalar.
        """
        totals = np.asarray(totals)
        metrics = {}
        for slot in self._slots:
            part = totals[slot.start : slot.start + slot.size]
            if slot.kind == "mean":
                metrics[slot.name] = float(part[0] / part[1]) if part[1] else math.nan
            else:
                value = part.astype(np.int64) if slot.integer else part
                metrics[slot.name] = value[0].item() if slot.shape == () else value.reshape(slot.shape)
        for name, result in results.items():
            if isinstance(result, dict):  # a Keras metric of several results
                metrics.update({f"{name}_{key}": _number(value) for key, value in result.items()})
            else:
                metrics[name] = _number(result)
        return metrics

    def state(self):
        """What has been accumulated since the last `read`, for a checkpoint.

        Returns:
          dict of what JSON can hold: `names`, and `totals`, a list for each replica.
        """
        if not self.created:
            return self._pending or {}
        return {
            "names": [slot.name for slot in self._slots],
            "totals": [totals[: self._size].tolist() for totals in self._of_all_replicas()],
        }

    def load(self, state):
        """Goes on from a `state()`; anew from one of other metrics, which belongs to an earlier program."""
        if not self.created:
            self._pending = state
            return
        local, workers = self._local(self._totals), Workers(self._strategy)
        replicas = len(local) * workers.count
        fits = state and state["names"] == [slot.name for slot in self._slots] and len(state["totals"][0]) == self._size
        totals = np.asarray(state["totals"] if fits else np.zeros([1, self._size]), np.float64)
        if len(totals) != replicas:
            totals = np.stack([totals.sum(axis=0)] + [np.zeros_like(totals[0])] * (replicas - 1))
        for part, values in zip(local, totals[workers.index * len(local) :]):
            part.assign(np.pad(values, [0, int(part.shape[0]) - self._size]))

    def _of_all_replicas(self):
        """The accumulated vector of each replica, float64 `[replicas, n]`; workers wait for each other."""
        local = np.stack([totals.numpy() for totals in self._local(self._totals)])
        return Workers(self._strategy).gather(local).reshape(-1, local.shape[1])

    def _local(self, variable):
        """The variables of this worker's replicas behind a distributed one."""
        return self._strategy.experimental_local_results(variable)


def check_metric_name(who, name):
    """Raises `UsageError` for a name that is no string, or that a record of `metrics.jsonl` needs itself."""
    if not isinstance(name, str) or not name or name in ("step", "split"):
        raise UsageError(f"{who} has a metric named {name!r}; expected a string other than '', 'step' and 'split'")


@tf.autograph.experimental.do_not_convert
def _batch_size(inputs):
    """The batch's (known first dimensions of the inputs, size by the first of them as a tensor), or None."""
    known, size = set(), None
    for leaf in tf.nest.flatten(inputs):
        if isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)) and leaf.shape.rank != 0:
            if leaf.shape.rank is not None and leaf.shape[0] is not None:
                known.add(leaf.shape[0])
            if size is None:
                size = _rows(leaf)
    return None if size is None else (known, size)


def _rows(leaf):
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows()
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return tf.shape(leaf, tf.int64)[0]


def _number(value):
    value = np.asarray(value)
    return value.item() if value.shape == () else value


def _is_number(tensor):
    return tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool


def _names(slots, metrics):
    return sorted(
        [f"{slot.name} ({slot.kind} {list(slot.shape)})" for slot in slots] + [f"{m} (Keras)" for m in metrics]
    )


def _describe(value):
    if isinstance(value, Reduction):
        return f"looplib.{value.kind} of {_describe(value.value)}"
    if isinstance(value, (tf.Tensor, tf.Variable)):
        return f"a {value.dtype.name} tensor of shape {value.shape}"
    return f"a {type(value).__name__}"
