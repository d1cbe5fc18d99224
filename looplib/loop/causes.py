"""Causes: which line, record or stage of a pipeline a user should look at, for messages."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from looplib.base.diagnosis import Diagnosis
from looplib.compat import places
from looplib.compat import tensorflow as _tf
from looplib.data import causes
from looplib.data.context import InputContext, Reads
from looplib.loop.contracts import TrainingLoop
from looplib.loop.speed import Speed, of_training, with_share
from looplib.task import model_table
from looplib.task.trainer import Trainer

# The beginnings of TensorFlow's names of ops, and parts of them.
_PYTHON = ("PyFunc", "EagerPyFunc", "PyFuncStateless")
_RESOURCES = ("Variable", "Rng", "StatefulUniform", "StatefulStandardNormal", "StatefulTruncatedNormal")


class Causes(Diagnosis):
    """See `Diagnosis`, which has the arguments and results."""

    def place_of(self, error: BaseException, functions: Iterable[tf.types.experimental.ConcreteFunction] = ()) -> str:
        """See `Diagnosis`."""
        return places.place_of(error, functions)

    def place_of_function(self, function: Callable) -> str:
        """See `Diagnosis`."""
        return places.place_of_function(function)

    def condition(self, op: str, *, by_skipping: bool) -> str:
        """See `Diagnosis`."""
        if op.startswith(_PYTHON):
            return "its Python code depends on its arguments only, not on time or on earlier runs"
        if op.startswith(tuple(_tf.RANDOM_OPS)):
            repeats = "its random ops have seeds and run without num_parallel_calls"
            return repeats if by_skipping else "its random numbers come from tf.random.stateless_*, with seeds=True"
        if any(name in op for name in _RESOURCES):
            values = "from the start of the run" if by_skipping else "that they had at this step"
            return f"its variables and tf.random.Generators have the values {values}"
        return ""

    def refused_record(
        self, dataset: Callable[[InputContext], tf.data.Dataset], context: InputContext, step: int
    ) -> str | None:
        """See `Diagnosis`."""
        return causes.find(dataset, context, step)

    def slowest_stage(self, iterator: tf.data.Iterator, copy: float, reads: Sequence[Reads]) -> tuple[str, str] | None:
        """See `Diagnosis`."""
        found = causes.of(iterator, copy, reads)
        return (str(found), found.advice) if found else None

    def model(self, trainer: Trainer) -> dict[str, Any]:
        """See `Diagnosis`."""
        return model_table.note(trainer)

    def speed(self, loop: TrainingLoop, strategy: tf.distribute.Strategy) -> Speed | None:
        """See `Diagnosis`."""
        return of_training(loop, strategy)

    def speed_of_ended(self, found: Speed, strategy: tf.distribute.Strategy, steps: int, seconds: float) -> Speed:
        """See `Diagnosis`."""
        return with_share(found, strategy, steps, seconds)
