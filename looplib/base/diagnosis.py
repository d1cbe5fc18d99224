"""The hook for diagnosis: which line, record or stage of a pipeline a user should look at."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf


class Diagnosis:
    """Guesses at causes, for messages only: no run depends on one. This base class makes none."""

    def place_of(self, error: BaseException, functions: Iterable[tf.types.experimental.ConcreteFunction] = ()) -> str:
        """Returns the line of the user's program that an error comes from, as "file:line: text"; "" if none is known.

        Args:
          error: what was raised.
          functions: traced functions, one of whose ops may have failed.
        """
        return ""

    def place_of_function(self, function: Callable) -> str:
        """Returns the first line of a function of the user's, as "file:line: text"; "" for any other function."""
        return ""

    def condition(self, op: str, *, by_skipping: bool) -> str:
        """Returns the condition under which a pipeline op gives the same results again; "" if it always does.

        Args:
          op: text that begins with the type of the op.
          by_skipping: whether the pipeline is read again from the start; otherwise from a later position.
        """
        return ""

    def refused_record(self, dataset: Callable[[Any], tf.data.Dataset], context: Any, step: int) -> str | None:
        """Names the record that a `dataset` function cannot process; None if it is not known.

        Args:
          dataset: the `dataset` function of a task.
          context: the `InputContext` of the pipeline that failed.
          step: global batches that were consumed before.
        """
        return None

    def slowest_stage(self, iterator: tf.data.Iterator, copy: float, reads: Sequence[Any]) -> tuple[str, str] | None:
        """Returns the slowest stage of the pipeline behind an iterator, and what to change; None if none stands out.

        Args:
          iterator: the iterator.
          copy: seconds to copy one element to its device.
          reads: how records are read, see `data.input_context.Reads`.
        """
        return None

    def model(self, trainer: Any) -> dict[str, Any] | None:
        """Logs the trained variables, and returns them for `run.json`; None if they are not listed.

        Args:
          trainer: the `Trainer`.
        """
        return None

    def speed(self, loop: Any, strategy: tf.distribute.Strategy) -> Any:
        """Returns the computation per step (a dataclass for `run.json`); None if it is not known.

        Args:
          loop: the `TrainingLoop`.
          strategy: the strategy it runs on.
        """
        return None

    def speed_of_ended(self, speed: Any, strategy: tf.distribute.Strategy, steps: int, seconds: float) -> Any:
        """Returns `speed` with the share of the devices' peak, once a training has ended; unchanged after a short one.

        Args:
          speed: from `speed`.
          strategy: the strategy it ran on.
          steps: number of steps.
          seconds: duration of these steps.
        """
        return speed


_make: Callable[[], Diagnosis] = Diagnosis


def provide(make: Callable[[], Diagnosis]) -> None:
    """Has `diagnosis` return what a function makes, for those who import what can find causes."""
    global _make
    _make = make
    diagnosis.cache_clear()


@functools.cache
def diagnosis() -> Diagnosis:
    """Returns what finds causes; without any, the base class."""
    return _make()
