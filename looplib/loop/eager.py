"""Steps without `tf.function`, for print, pdb and exact stack traces."""

from collections.abc import Callable

import tensorflow as tf
from absl import logging

from looplib.data.stream import Stream
from looplib.errors import UsageError, gist
from looplib.loop.base import Metrics
from looplib.loop.reducer import Reducer, UnknownOutputsError
from looplib.loop.step import Step
from looplib.loop.stepwise import Collect, HostLoop


class EagerLoop(HostLoop):
    """Runs the user's Python code at each step. The structure of its outputs is known only after the first step.

    Args:
      strategy: `tf.distribute.Strategy`.
      step_fn: one step on one replica.
      reducer: reduces what the step returns.
      stream: reads the iterators.
      collect: takes what a step returns as `looplib.each`.
      counter: int64 `tf.Variable` that counts finished steps, or None.
      skip_bad: whether a step with a value that is not finite is to be undone, which this loop refuses.

    Raises:
      UsageError: if `skip_bad` is set.
    """

    ends_steps = False

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        step_fn: Callable[[object], object],
        reducer: Reducer,
        stream: Stream,
        collect: Collect,
        counter: tf.Variable | None = None,
        skip_bad: bool = False,
    ) -> None:
        if skip_bad:
            raise UsageError("the eager loop cannot undo steps; use another policy than skip with --loop=eager")
        super().__init__(strategy, reducer, stream, collect)
        self._step_fn = step_fn
        self._counter = counter

    def read(self) -> Metrics:
        """See `InnerLoop`.

        A run that resumes after its last step may report sums of steps that another process has run. Their structure is
        learned by tracing the step; where that fails, nothing is reported.
        """
        if not self._reducer.created:
            try:
                self._learn_outputs()
            except Exception as error:
                logging.warning(
                    "the metrics since the last report are left out: the eager loop has run no step since the resume, "
                    "and step_fn cannot be traced to learn their structure (%s)",
                    gist(error),
                )
                return {}
        return super().read()

    def _learn_outputs(self) -> None:
        """Traces the step, for the structure of what it returns."""
        Step(self._strategy, self._step_fn, self._reducer, self._stream)

    def _do(self, batch: object) -> object:
        try:
            results = self._strategy.run(self._replica_step, args=(batch,))
        except UnknownOutputsError:  # of the first replica of the first step, so that nothing is done twice
            self._learn_outputs()
            results = self._strategy.run(self._replica_step, args=(batch,))
        contributions, collected = self._reducer.divided(results)
        if not self._reducer.created:
            self._reducer.create()
        self._reducer.add(contributions)
        if self._counter is not None:
            self._counter.assign_add(1)
        return collected

    def _replica_step(self, inputs: object) -> object:
        return self._reducer.run_step(self._step_fn, inputs, self._stream.may_be_empty)
