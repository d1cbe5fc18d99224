"""The hook of the plug-in that looks for causes: which line, record or stage of a pipeline a user has to look at."""

import functools
import os
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from looplib import plugins

OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
LIBRARIES = (
    os.path.dirname(os.path.abspath(tf.__file__)) + os.sep,
    *(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib", "stdlib")),
)


def is_installed(path: str) -> bool:
    """Returns whether a file belongs to looplib or to an installed package, and not to the user's program."""
    return path.startswith((OURS, *LIBRARIES))


class Diagnosis:
    """Guesses at causes, shown to users only; no run depends on one. This class has none, as without the plug-in."""

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

    def place_of_start(self) -> str:
        """Returns what of the user's program started TensorFlow's devices, for the middle of a sentence."""
        return "the program"

    def condition(self, op: str, *, by_skipping: bool) -> str:
        """Returns the condition under which an op of a pipeline repeats its results; "" if it always does.

        Args:
          op: a text that begins with the op's type.
          by_skipping: whether the pipeline is read again from its beginning, rather than from a later position.
        """
        return ""

    def refused_record(self, dataset: Callable[[Any], tf.data.Dataset], context: Any, step: int) -> str | None:
        """Returns which record a `dataset` function cannot process; None if that is not known.

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
          copy: seconds that the copy of an element to its device takes.
          reads: how records are read, see `records.reading.Reads`.
        """
        return None

    def model(self, trainer: Any) -> dict[str, Any] | None:
        """Logs the variables that a trainer trains, and returns them for `run.json`; None where they are not listed.

        Args:
          trainer: the `Trainer`.
        """
        return None

    def speed(self, loop: Any, strategy: tf.distribute.Strategy) -> Any:
        """Returns how much a training computes, a dataclass for `run.json`; None if that is not known.

        Args:
          loop: the `TrainingLoop`.
          strategy: what it runs on.
        """
        return None

    def speed_of_ended(self, speed: Any, strategy: tf.distribute.Strategy, steps: int, seconds: float) -> Any:
        """Returns the speed of a training that has ended, with the share of its devices' peak unless it was short.

        Args:
          speed: from `speed`.
          strategy: what it ran on.
          steps: how many it ran.
          seconds: that these took.
        """
        return speed


@functools.cache
def diagnosis() -> Diagnosis:
    """Returns the plug-in "diagnosis" of `looplib.parts`, or a `Diagnosis` without guesses where it is missing."""
    make = plugins.find("looplib.parts", "diagnosis")
    return Diagnosis() if make is None else make()
