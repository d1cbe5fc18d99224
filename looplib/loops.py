"""The inner loop: many steps on the device for one call from the host.

An engine is a class built for one `step_fn` and one data set, called as `engine(iterator, steps)` and returning the
number of steps that it did, fewer if the data ended. `ENGINES` names them; an XLA engine takes its place there.
"""

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.errors import UsageError

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
    """

    def __init__(self, strategy, step_fn, reducer, stream, counter=None):
        self.traces = 0
        self._counter = counter
        self._reducer = reducer
        self._stream = stream

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

    def __call__(self, iterator, steps):
        """Runs `steps` steps (-1: to the end of the data); returns how many it did, as an int."""
        steps = _TO_THE_END if steps < 0 else steps
        return int(self._loop(iterator, tf.constant(steps, tf.int64)))

    def read(self):
        """Returns the metrics since the last read, and starts anew."""
        return self._reducer.unpack(*self._read())

    @property
    def variables(self):
        """The `tf.Variable`s that the step uses."""
        return self._step.variables

    def trace(self, iterator):
        """Traces the loop for this iterator, so that no later call does."""
        self._loop.get_concrete_function(iterator, tf.TensorSpec([], tf.int64))
        self._read.get_concrete_function()

    def _one(self, inputs):
        self._reducer.add(self._step(inputs))
        if self._counter is not None:
            # A step counts only once it had its data: without this, one that finds none is counted as it fails.
            with tf.control_dependencies(tf.nest.flatten(inputs, expand_composites=True)[:1]):
                self._counter.assign_add(1)

    def _endless(self, iterator, steps):
        self._note_trace()
        for _ in tf.range(steps):
            self._one(self._stream.next(iterator))
        return steps

    def _ending(self, iterator, steps):
        # The last step stands apart, as a second loop of at most one round, so that no batch is fetched which this call
        # does not train on; a tf.cond in its place fails on several replicas (TensorFlow 2.20).
        self._note_trace()
        done = tf.constant(0, tf.int64)
        batch = self._stream.next_as_optional(iterator)
        while done < steps - 1 and self._stream.has_value(batch):
            self._one(self._stream.get_value(batch))
            done += 1
            batch = self._stream.next_as_optional(iterator)
        while done < steps and self._stream.has_value(batch):
            self._one(self._stream.get_value(batch))
            done += 1
        return done

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

    def __init__(self, strategy, step_fn, reducer, stream, counter=None):
        self.traces = 0
        self._stream = stream
        self._strategy = strategy
        self._counter = counter
        self._reducer = reducer
        self._step_fn = step_fn

    def __call__(self, iterator, steps):
        """Runs `steps` steps (-1: to the end of the data); returns how many it did."""
        done = 0
        while done != steps:
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
        return done

    def _replica_step(self, inputs):
        return self._reducer.run_step(self._step_fn, inputs, self._stream.may_be_empty)

    def read(self):
        """Returns the metrics since the last read, and starts anew."""
        return self._reducer.unpack(*self._reducer.read())

    @property
    def variables(self):
        """None are known without a trace."""
        return []

    def trace(self, iterator):
        """Nothing to trace."""


def _usage_error(error):
    """The `UsageError` that led to an error, or None."""
    while error is not None and not isinstance(error, UsageError):
        error = error.__cause__ or error.__context__
    return error


ENGINES = {"graph": GraphLoop, "eager": EagerLoop}
