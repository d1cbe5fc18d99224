"""The graph loop of an evaluation, whose steps overlap because none needs what another one computes."""

from typing import Any

import tensorflow as tf

from looplib.loop.base import Iterator
from looplib.loop.calls import Numbers, Status
from looplib.loop.graph import GraphLoop, Steps
from looplib.loop.step import Step
from looplib.loop.timing import timed


class EvaluationLoop(GraphLoop):
    """A graph loop that keeps the totals as values, not in a variable, for whose update the next step would wait.

    Two steps run at a time, unless the user's own step updates variables, as Keras metrics do. A call that fails adds
    nothing to the totals.
    """

    _at_once = 2  # steps; more need memory and are not faster

    def _steps(self, iterator: Iterator, wanted: Numbers, status: Status) -> Steps:
        """See `GraphLoop`; while steps are sure to have data, nothing looks for its end."""
        totals = self._reducer.totals()
        done, totals, status = self._repeat(self._add, totals, iterator, wanted.chunks, wanted.stride, status)
        waited, ends = tf.constant(0, tf.float64), not self._stream.infinite
        if ends:
            left = tf.where(status.go, wanted.steps - done, 0)
            more, totals, waited = self._last(iterator, totals, left)
            done += more
            status = self._look()
        self._reducer.put(totals)
        # No batch follows the last step, so this call reads the metrics, although nothing has looked for one.
        return done, waited, status, tf.constant(ends)

    def _add(self, iterator: Iterator, totals: Any) -> Any:
        return self.step.added_to(totals, self._stream.next(iterator))

    @tf.autograph.experimental.do_not_convert
    def _note(self, rounds: tf.Tensor) -> None:
        self.step.count(rounds)

    def _last(self, iterator: Iterator, totals: Any, steps: tf.Tensor) -> tuple[tf.Tensor, Any, tf.Tensor]:
        """Does the step that may have no data; returns how many, the totals, and its wait."""
        batch, waited = timed(
            lambda: self._stream.next_as_optional(iterator), lambda batch: [self._stream.has_value(batch)]
        )
        done = tf.constant(0, tf.int64)
        one_more = (done < steps) & self._stream.has_value(batch)
        for _ in tf.range(tf.cast(one_more, tf.int64)):
            totals = self.step.added_to(totals, self._stream.get_value(batch))
            self.step.count(1)
            done += 1
        return done, totals, waited


def single_steps(step: Step) -> GraphLoop:
    """Returns the graph loop whose rounds are single steps, of a training or an evaluation.

    Steps overlap where the length of the data is known and there is one replica, so that all steps but the last are
    sure to have data.
    """
    evaluates = step.stream.renew is None and not isinstance(step.strategy, tf.distribute.TPUStrategy)
    overlaps = evaluates and step.stream.sure > 0 and step.strategy.num_replicas_in_sync == 1
    return EvaluationLoop(step) if overlaps else GraphLoop(step)
