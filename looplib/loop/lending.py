"""The state of a training that an evaluation uses, and that the training gets back as it was."""

import contextlib
from collections.abc import Iterable, Iterator

import tensorflow as tf

from looplib.cluster.collectives import Workers
from looplib.compat import tensorflow as _tf
from looplib.loop.base import Loop
from looplib.task.state import no_weights, state_of

_Variables = dict[int, tf.Variable]  # by their `identity_of`


class Lending:
    """What a training lends to an evaluation or a prediction.

    Moving statistics and the like may differ between replicas: each of them evaluates with the values that an export
    writes. What the evaluation updates, such as the state of a stateful RNN, is put back. The variables are those that
    the traced steps use and update; where no step is traced, all of the trainer's that are no weights.

    Args:
      strategy: `tf.distribute.Strategy`.
      training: the loop of the trainer.
      evaluation: the loop that evaluates or predicts.
    """

    def __init__(self, strategy: tf.distribute.Strategy, training: Loop, evaluation: Loop) -> None:
        self._workers = Workers(strategy)
        state = [
            (variable, strategy.experimental_local_results(variable))
            for variable in no_weights(training.task, state_of(training.task))
        ]
        every = [part for _, parts in state for part in parts]
        (trained, trains), (evaluated, evaluates) = (_uses(strategy, loop, every) for loop in (training, evaluation))
        several = strategy.num_replicas_in_sync > 1
        self._differing = [
            (variable, parts)
            for variable, parts in state
            if several and trains.keys() & (ids := set(map(_tf.identity_of, parts))) and evaluated.keys() & ids
        ]
        differing = {_tf.identity_of(part): part for _, parts in self._differing for part in parts}
        updated = {key: part for key, part in evaluates.items() if key in trained}
        self._kept = list((differing | updated).values())
        self._reducer = evaluation.reducer

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Returns a context manager that an evaluation runs in; workers wait for each other."""
        before = [part.read_value() for part in self._kept]
        try:
            if self._differing:
                values = [tf.identity(variable) for variable, _ in self._differing]
                of_chief = self._workers.gather_tensors([values])[0]  # which writes an export
                for (_, parts), value in zip(self._differing, of_chief):
                    for part in parts:
                        part.assign(value)
            if self._kept:
                self._reducer.clear()  # of metrics that the training has too
            yield
        finally:
            for part, value in zip(self._kept, before):
                part.assign(value)


def _uses(strategy: tf.distribute.Strategy, loop: Loop, every: Iterable[tf.Variable]) -> tuple[_Variables, _Variables]:
    """Returns the variables that the step of a loop uses, and those of them that it may update."""
    variables = loop.traced.variables if loop.traced else every
    used = {_tf.identity_of(part): part for one in variables for part in strategy.experimental_local_results(one)}
    updated = _tf.updated_by(loop.traced.function) if loop.traced else used.keys()
    return used, {key: part for key, part in used.items() if key in updated}
