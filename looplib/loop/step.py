"""One step on all replicas: the user's `step_fn`, traced once, counted, and its contribution to the metrics."""

import collections
import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from looplib.base.messages import gist
from looplib.cluster import updates
from looplib.cluster.collectives import Workers
from looplib.compat import keras as _keras
from looplib.compat import places
from looplib.compat import tensorflow as _tf
from looplib.data.streams import Stream
from looplib.errors import StepError, UsageError
from looplib.loop.packing import batch_size
from looplib.loop.reducer import Reducer

StepFn = Callable[[Any], Any]  # one step on one replica: from its batch to the outputs
_Batch = TypeVar("_Batch")


class Step:
    """The user's step on every replica, traced once, and its contribution to the metrics.

    Args:
      strategy: `tf.distribute.Strategy`.
      step_fn: one step on one replica.
      reducer: reduces what it returns.
      stream: reads the iterators that a loop is called with.
      counter: int64 `tf.Variable` that counts finished steps, or None.
      skip_bad: undoes a step with a value that is not finite.

    Attributes:
      function: the traced step.
      replica_step: `on_replica` of this step, as a function of the batch.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, step_fn: StepFn, reducer: Reducer, stream: Stream,
        counter: tf.Variable | None = None, skip_bad: bool = False,
    ) -> None:  # fmt: skip
        self.strategy, self.reducer, self.stream = strategy, reducer, stream
        self._counter, self._skip_bad = counter, skip_bad
        self.replica_step = functools.partial(on_replica, step_fn, reducer, stream.properties.may_be_empty)
        self._trace()

    def _trace(self) -> None:
        strategy, replica_step = self.strategy, self.replica_step

        @tf.function(input_signature=[self.stream.element_spec])
        @tf.autograph.experimental.do_not_convert
        def step(inputs: Any) -> Any:
            # A copy of dicts and lists, because a step may remove entries from them.
            return strategy.run(replica_step, args=(tf.nest.map_structure(lambda leaf: leaf, inputs),))

        try:
            with strategy.scope(), tf.variable_creator_scope(_keras.make_sums_outside):
                self.function = step.get_concrete_function()
        except Exception as error:
            if self.stream.properties.may_be_empty and not self.reducer.joins and _tf.is_merge_in_branch(error):
                self.reducer.joins = True  # the branch may be the reducer's own
                self._trace()
                return
            raise_refusal(error)
            self._raise_fixed_size(error)
            raise
        self.reducer.create()

    def _raise_fixed_size(self, error: Exception) -> None:
        """Raises `StepError` for shapes of a replica's batch and of the global batch that do not fit together."""
        count, size = self.strategy.num_replicas_in_sync, self.stream.properties.batch_size
        sizes = {int(number) for number in re.findall(r"\b\d+\b", gist(error))}
        if count > 1 and isinstance(error, ValueError) and {size, size * count} <= sizes:
            raise StepError(
                f"the step cannot be traced on {count} replicas ({gist(error)}); each replica gets {size} of the "
                f"{size * count} examples of a global batch: if {size * count} is fixed in the step, take "
                "tf.shape(x)[0] in its place"
            ) from error

    @property
    def variables(self) -> tuple[tf.Variable, ...]:
        """The `tf.Variable`s that the step uses."""
        return self.function.variables

    @property
    def ops(self) -> list[tf.compat.v1.NodeDef]:
        """The `NodeDef` of each op in the step, which takes 0.2 s for a model of 1,000 variables."""
        return list(_tf.nodes_in(self.function.graph.as_graph_def()))

    @functools.cached_property
    def op_counts(self) -> dict[str, int]:
        """How many ops of each type the step has."""
        return collections.Counter(node.op for node in self.ops)

    @property
    def random_ops(self) -> list[str]:
        """The names of the ops in the step that draw random numbers from a state that cannot be saved."""
        random = _tf.RANDOM_OPS
        return [node.name for node in self.ops if node.op in random] if random & self.op_counts.keys() else []

    def unsaved(self, saves_tables: bool) -> list[str]:
        """Returns what may have a state in the step that no checkpoint holds: ops of queues and of Python functions.

        So may a lookup table that the step changes, unless the checkpoint `saves_tables`.
        """
        ops = self.op_counts.keys()
        names = sorted(op for op in ops if op.startswith("Queue") or op in ("PyFunc", "EagerPyFunc"))
        changes = not ops.isdisjoint(("LookupTableInsertV2", "LookupTableRemoveV2"))
        return names + ["a lookup table that is no attribute of the trainer"] * (changes and not saves_tables)

    @tf.autograph.experimental.do_not_convert
    def contribution(self, inputs: Any) -> Any:
        """Does one step; returns what each replica adds to the metrics. In a `tf.function`, across replicas."""
        return self.function(inputs)

    @tf.autograph.experimental.do_not_convert
    def run(self, inputs: Any) -> Any:
        """Does and counts one step. In a `tf.function`, across replicas.

        Returns:
          What the replicas collect, see `Reducer.packed`; None for nothing.
        """
        run = self._undone_if_bad if self._skip_bad else self._done
        contributions, collected = run(inputs)
        self.reducer.add(contributions)
        # A step counts only once it had its data: without this, one that finds none is counted as it fails.
        with tf.control_dependencies(tf.nest.flatten(inputs, expand_composites=True)[:1]):
            self.count(1)
        return collected

    @tf.autograph.experimental.do_not_convert
    def added_to(self, totals: Any, inputs: Any) -> Any:
        """Does one step; returns totals of the replicas with its contributions. In a `tf.function`, across replicas."""
        contributions, _ = self._done(inputs)
        return self.reducer.sum_of(totals, contributions)

    @tf.autograph.experimental.do_not_convert
    def count(self, steps: tf.Tensor) -> None:
        """Counts steps, int64 scalar tensor; across replicas."""
        if self._counter is not None:
            self._counter.assign_add(steps)

    @tf.autograph.experimental.do_not_convert
    def counted(self) -> tf.Tensor:
        """Returns the counter, int64 scalar tensor; 0 without one. In a `tf.function`, across replicas."""
        return tf.constant(0, tf.int64) if self._counter is None else self._counter.read_value()

    def _done(self, inputs: Any) -> tuple[Any, Any]:
        return self.reducer.divided(self.contribution(inputs))

    def _undone_if_bad(self, inputs: Any) -> tuple[Any, Any]:
        """Does one step; if a value in it is not finite, undoes it, so that it contributes nothing."""
        before = [variable.read_value() for variable in self.function.variables]
        contributions, collected = self._done(inputs)
        with tf.control_dependencies(tf.nest.flatten(contributions, expand_composites=True)):
            after = [variable.read_value() for variable in self.function.variables]
        finite = self.reducer.all_finite(contributions)
        for value in after:
            if value.dtype.is_floating:
                finite = tf.logical_and(finite, tf.reduce_all(tf.math.is_finite(value)))
        finite = tf.logical_not(Workers(self.strategy).any(tf.logical_not(finite)))
        for variable, old, new in zip(self.function.variables, before, after):
            variable.assign(tf.where(finite, new, old))
        return self.reducer.skip_unless(finite, contributions), collected


@tf.autograph.experimental.do_not_convert
def on_replica(step_fn: StepFn, reducer: Reducer, may_be_empty: bool, inputs: Any) -> Any:
    """Does one step on one replica, and returns what `Reducer.packed` does; in replica context.

    With `may_be_empty`, the step is left out where the batch has no example, unless it joins the replicas. Means of no
    example are NaN, and TensorFlow 2.20 fails on some convolutions of an empty batch (CPU, fused with their
    activation).
    """
    batch = batch_size(inputs)
    if reducer.watches:
        with updates.watching() as gradients:
            outputs = step_fn(inputs)
        return reducer.packed(outputs, inputs, gradients)
    if not may_be_empty or batch is None or reducer.joins:
        return reducer.packed(step_fn(inputs), inputs)
    return tf.cond(batch[1] > 0, lambda: reducer.packed(step_fn(inputs), inputs), reducer.nothing)


def raise_refusal(error: Exception) -> None:
    """Raises the `UsageError` behind an error of tracing, whose type AutoGraph hides; or says what to do about it."""
    cause: BaseException | None = error
    found: UsageError | None = None
    while cause is not None:
        if isinstance(cause, UsageError) and (found is None or str(cause) in str(found)):  # Keras writes text around it
            found = cause
        cause = cause.__cause__ or cause.__context__
    if found is not None:
        raise found from None
    if _tf.is_late_variable(error):
        if _keras.GLOBAL_SEED in str(error):
            raise StepError(_keras.UNSEEDED) from error
        raise StepError(
            "the step (step_fn, or a Keras model's train_step) makes variables in its first call, and on several "
            "replicas they must exist before it; build models (an Input layer, or a call) and optimizers "
            "(optimizer.build(variables)) when they are made, under strategy.scope()"
        ) from error
    if _tf.is_across_replicas(error):
        raise StepError(
            "the step calls a method of the strategy (reduce, gather, run, scope) that only code around the replicas "
            f"can call ({places.place_of(error)}), and a step is the code of one replica: return the value, which "
            "looplib reduces (looplib.mean, looplib.total), or sum it within the step by "
            "tf.distribute.get_replica_context().all_reduce; enter the scope where models are made"
        ) from error
    if _tf.is_merge_in_branch(error):
        raise StepError(
            "the step joins the replicas, as an update by an optimizer does, inside of a condition, a loop or a "
            "tf.function (tf.cond, tf.while_loop, an if or for that AutoGraph converts, micro_batches), which "
            f"TensorFlow cannot do ({places.place_of(error)}); call it outside, in every step. For an update in "
            "every n-th step, give an optimizer of Keras 3 gradient_accumulation_steps=n; or train on one device "
            "without a strategy"
        ) from error


@tf.autograph.experimental.do_not_convert
def now() -> tf.Tensor:
    """Returns the time in seconds, float64 scalar tensor; 0 if ops have to be deterministic.

    With `tf.config.experimental.enable_op_determinism` TensorFlow refuses to run a clock.
    """
    with tf.init_scope():
        try:
            tf.timestamp()
        except tf.errors.FailedPreconditionError:
            return tf.constant(0, tf.float64)
    return tf.timestamp()


@tf.autograph.experimental.do_not_convert
def timed(fetch: Callable[[], _Batch], ready: Callable[[_Batch], Any] | None = None) -> tuple[_Batch, tf.Tensor]:
    """Calls a function that fetches a batch, in a `tf.function`; returns the batch and the seconds, float64 scalar.

    `ready` returns the tensors that exist once the batch has arrived; by default all of the batch.
    """
    start = now()
    with tf.control_dependencies([start]):
        batch = fetch()
    arrived = batch if ready is None else ready(batch)
    with tf.control_dependencies(tf.nest.flatten(arrived, expand_composites=True)):
        return batch, now() - start
