"""Steps without `tf.function`, for print, pdb and exact stack traces."""

from collections.abc import Callable

import tensorflow as tf

from looplib.data.stream import Stream
from looplib.errors import UsageError
from looplib.loop.reducer import Reducer
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

    def _do(self, batch: object) -> object:
        contributions, collected = self._reducer.divided(self._strategy.run(self._replica_step, args=(batch,)))
        if not self._reducer.created:
            self._reducer.create()
        self._reducer.add(contributions)
        if self._counter is not None:
            self._counter.assign_add(1)
        return collected

    def _replica_step(self, inputs: object) -> object:
        return self._reducer.run_step(self._step_fn, inputs, self._stream.may_be_empty)
