"""OwnTimes: what a worker needs for its steps without waiting for the others, measured inside of each step.

The sums over workers are ops of the step's graph. The time between the moment at which what a worker adds is computed
and the moment at which the sum is there is waiting for the others, and for the network; all other time is its own.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from looplib.loop.step import StepFn, now

_WAITING = ("CollectiveReduce", "CollectiveGather")  # beginnings of the types of ops that wait for other workers
_MOST = 16  # such ops in a step; each costs two reads of the clock


class _Begun(NamedTuple):
    """A step whose tracing has begun: when its batch is there, and how many ops the graph has before it."""

    time: tf.Tensor
    ops: int


class OwnTimes:
    """Adds up the own time of the steps of this worker, on the device.

    Args:
      strategy: the `tf.distribute.Strategy` that runs the steps, on CPUs.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        with strategy.scope():
            # Seconds of own time, and between the end of a step's last sum and the batch of the next step; and when
            # that sum ended.
            variable = tf.Variable(
                tf.zeros([3], tf.float64),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
        self._sums = strategy.experimental_local_results(variable)[0]

    def measure(self, step_fn: StepFn) -> StepFn:
        """Returns a step on one replica that measures itself while it does what `step_fn` does."""

        def measured(inputs: Any) -> Any:
            begun = self._begin(inputs)
            outputs = step_fn(inputs)
            self._add(begun)
            return outputs

        return measured

    def read(self) -> tuple[float, float]:
        """Returns the seconds of own time so far, and of gaps in which the step had no batch."""
        own, gaps, _ = self._sums.numpy().tolist()
        return own, gaps

    @tf.autograph.experimental.do_not_convert
    def _begin(self, inputs: Any) -> _Begun | None:
        if tf.executing_eagerly():  # as in the eager loop
            return None
        ops = len(tf.compat.v1.get_default_graph().get_operations())
        with tf.control_dependencies(tf.nest.flatten(inputs, expand_composites=True)):
            return _Begun(now(), ops)

    @tf.autograph.experimental.do_not_convert
    def _add(self, begun: _Begun | None) -> None:
        graph = tf.compat.v1.get_default_graph()
        ops = graph.get_operations()[begun.ops :] if begun else []
        waiting = [op for op in ops if op.type.startswith(_WAITING)]
        if not 0 < len(waiting) <= _MOST:
            return
        # Ops and not methods of the variable, with which it would be one of those that the step of the user has.
        before = tf.raw_ops.ReadVariableOp(resource=self._sums.handle, dtype=tf.float64)
        last = tf.unstack(before)[2]
        at = start = tf.maximum(begun.time, last)
        parts = []
        for op in waiting:  # automatic control dependencies keep the reads of the clock in this order
            with tf.control_dependencies([op.inputs[0]]):
                parts.append(now() - at)
            with tf.control_dependencies([op]):
                at = now()
        more = tf.stack([tf.add_n(parts), start - last, at - last])
        tf.raw_ops.AssignAddVariableOp(resource=self._sums.handle, value=more)
