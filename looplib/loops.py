"""The inner loop: many steps on the device for one call from the host.

An engine is a class built for one `step_fn` and one data set, called as `engine(iterator, steps)` and returning the
number of steps that it did, fewer if the data ended. `ENGINES` names them; an XLA engine takes its place there.
"""

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.errors import UsageError
from looplib.preemption import notice

_RANDOM_OPS = {
    "Multinomial", "ParameterizedTruncatedNormal", "RandomGamma", "RandomPoisson", "RandomPoissonV2", "RandomShuffle",
    "RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal",
}  # fmt: skip
_TO_THE_END = np.iinfo(np.int64).max


class GraphLoop:
    """Steps in a `tf.range` loop inside one `tf.function` around `strategy.run`.

    The user's step is traced once, when the engine is built, and the loop calls that trace. The number of steps is a
    tensor, so that no other number traces again.

    Args:
      strategy: `tf.distribute.Strategy`.
      step_fn: one step on one replica.
      reducer: `metrics.Reducer` for what it returns.
      stream: `feeds.Stream`, which reads the iterators that the loop is called with.
      counter: int64 `tf.Variable` that counts finished steps, or None.
      skip_bad: undoes a step in which a value is not finite.
    """

    def __init__(self, strategy, step_fn, reducer, stream, counter=None, skip_bad=False):
        self.traces = 0
        self._counter = counter
        self._reducer = reducer
        self._stream = stream
        self._skip_bad = skip_bad
        self._stop = notice.flag

        def replica_step(inputs):
            return reducer.run_step(step_fn, inputs, stream.may_be_empty)

        @tf.function(input_signature=[stream.element_spec])
        def step(inputs):
            return strategy.run(replica_step, args=(inputs,))

        try:
            self._step = step.get_concrete_function()
        except Exception as error:
            usage_error = _usage_error(error)  # AutoGraph hides the type of what is raised while it traces
            if usage_error is not None:
                raise usage_error from None
            if type(error).__name__ == "UnliftableError":  # has no public name
                raise UsageError(
                    "step_fn makes variables in its first call, and on several replicas they must exist before it; "
                    "build models (an Input layer, or a call) and optimizers (optimizer.build(variables)) in __init__, "
                    "under strategy.scope()"
                ) from error
            raise
        reducer.create()
        self._loop = tf.function(self._endless if stream.infinite else self._ending)
        self._read = tf.function(reducer.read)

    def __call__(self, iterator, steps, stride):
        """Runs steps until a signal asks to stop or a value is not finite.

        Args:
          iterator: of the stream's data set.
          steps: how many; -1 runs to the end of the data.
          stride: after how many steps to look whether to go on.

        Returns:
          `(done, finite)`: int, and whether all that the reducer watches was finite.
        """
        steps = _TO_THE_END if steps < 0 else steps
        done, finite = self._loop(iterator, tf.constant(steps, tf.int64), tf.constant(stride, tf.int64))
        return int(done), bool(finite)

    def read(self):
        """Returns the metrics since the last read, and starts anew."""
        return self._reducer.unpack(*self._read())

    @property
    def variables(self):
        """The `tf.Variable`s that the step uses."""
        return self._step.variables

    @property
    def random_ops(self):
        """The names of the ops in the step that draw random numbers from a state which nobody can save."""
        graph = self._step.graph.as_graph_def()
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        return [node.name for node in nodes if node.op in _RANDOM_OPS]

    def trace(self, iterator):
        """Traces the loop for this iterator, so that no later call does."""
        self._loop.get_concrete_function(iterator, tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.int64))
        self._read.get_concrete_function()

    def _one(self, inputs):
        contributions = self._undone_if_bad(inputs) if self._skip_bad else self._step(inputs)
        self._reducer.add(contributions)
        if self._counter is not None:
            # A step counts only once it had its data: without this, one that finds none is counted as it fails.
            with tf.control_dependencies(tf.nest.flatten(inputs, expand_composites=True)[:1]):
                self._counter.assign_add(1)

    def _undone_if_bad(self, inputs):
        """One step; if a value in it is not finite, every variable is as before it, and it contributes nothing."""
        before = [variable.read_value() for variable in self._step.variables]
        contributions = self._step(inputs)
        with tf.control_dependencies(tf.nest.flatten(contributions, expand_composites=True)):
            after = [variable.read_value() for variable in self._step.variables]
        finite = self._reducer.all_finite(contributions)
        for value in after:
            if value.dtype.is_floating:
                finite = tf.logical_and(finite, tf.reduce_all(tf.math.is_finite(value)))
        for variable, old, new in zip(self._step.variables, before, after):
            variable.assign(tf.where(finite, new, old))
        return self._reducer.skip_unless(finite, contributions)

    def _endless(self, iterator, steps, stride):
        self._note_trace()
        done = tf.constant(0, tf.int64)
        while done < steps and not self._stop and self._reducer.finite():
            until = tf.minimum(done + stride, steps)
            while done < until:
                self._one(self._stream.next(iterator))
                done += 1
        return done, self._reducer.finite()

    def _ending(self, iterator, steps, stride):
        # The last step stands apart, as a second loop of at most one round, so that no batch is fetched which this call
        # does not train on; a tf.cond in its place fails on several replicas (TensorFlow 2.20).
        self._note_trace()
        done = tf.constant(0, tf.int64)
        batch = self._stream.next_as_optional(iterator)
        while done < steps - 1 and self._stream.has_value(batch) and not self._stop and self._reducer.finite():
            until = tf.minimum(done + stride, steps - 1)
            while done < until and self._stream.has_value(batch):
                self._one(self._stream.get_value(batch))
                done += 1
                batch = self._stream.next_as_optional(iterator)
        finite = self._reducer.finite()
        until = done + 1 if finite else done  # a batch that was fetched is trained on, also when asked to stop
        while done < tf.minimum(steps, until) and self._stream.has_value(batch):
            self._one(self._stream.get_value(batch))
            done += 1
        return done, self._reducer.finite()

    def _note_trace(self):
        self.traces += 1  # runs when tf.function traces, not when it runs
        if self.traces > 1:
            logging.warning(
                "the loop was traced again (%d times now), because the structure or shapes of its input changed; each "
                "trace costs seconds, so keep the elements of dataset() alike",
                self.traces,
            )


class EagerLoop:
    """The same steps one by one without `tf.function`, for print, pdb and exact stack traces.

    Takes the arguments of `GraphLoop`. The structure of the step's outputs is known only after the first step.
    """

    def __init__(self, strategy, step_fn, reducer, stream, counter=None, skip_bad=False):
        self.traces = 0
        if skip_bad:
            raise UsageError("the eager loop cannot undo steps; use another policy than skip with --loop=eager")
        self._stream = stream
        self._strategy = strategy
        self._counter = counter
        self._reducer = reducer
        self._step_fn = step_fn

    def __call__(self, iterator, steps, stride):
        """Runs steps; see `GraphLoop`. It looks after each step whether to go on."""
        done = 0
        while done != steps and not notice.requested and self._finite():
            batch = self._stream.next_as_optional(iterator)
            if not self._stream.has_value(batch):
                break
            contributions = self._strategy.run(self._replica_step, args=(self._stream.get_value(batch),))
            if not self._reducer.created:
                self._reducer.create()
            self._reducer.add(contributions)
            if self._counter is not None:
                self._counter.assign_add(1)
            done += 1
        return done, self._finite()

    def _finite(self):
        return not self._reducer.created or bool(self._reducer.finite())

    def _replica_step(self, inputs):
        return self._reducer.run_step(self._step_fn, inputs, self._stream.may_be_empty)

    def read(self):
        """Returns the metrics since the last read, and starts anew."""
        return self._reducer.unpack(*self._reducer.read())

    @property
    def variables(self):
        """None are known without a trace."""
        return []

    random_ops = variables

    def trace(self, iterator):
        """Nothing to trace."""


def _usage_error(error):
    """The `UsageError` that led to an error, or None."""
    while error is not None and not isinstance(error, UsageError):
        error = error.__cause__ or error.__context__
    return error


ENGINES = {"graph": GraphLoop, "eager": EagerLoop}
