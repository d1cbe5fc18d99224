"""What is raised for a user to mend."""

import operator
from typing import Any


class UsageError(ValueError):
    """Bad input: says what was found, what was expected and what to do.

    Binaries print it as one last line, without a stack trace, and exit with code 1.
    """


class DivergenceError(UsageError):
    """A loss, gradient or weight was not finite, or the loss jumped, and the policy was to halt or could not go on."""


def whole_number(name: str, value: Any, least: int = 1, most: int | None = None, or_all: bool = False) -> int:
    """Checks a whole number and returns it as a Python int, which JSON can hold.

    Args:
      name: what it is, for the message.
      value: anything that `operator.index` takes, such as an int or a numpy integer; a bool is refused.
      least: the smallest value that is allowed; default 1.
      most: the largest value that is allowed; None for no bound.
      or_all: whether -1, which stands for all, is allowed too.

    Raises:
      UsageError: for anything else.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    allowed = number is not None and number >= least and (most is None or number <= most)
    if not allowed and not (or_all and number == -1):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"{name} is {value!r}; expected a whole number {bounds}{', or -1 for all' * or_all}")
    return number


def gist(error):
    """The line of a message that says what happened; TensorFlow's and AutoGraph's begin with where it happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    if lines[0] not in ("Graph execution error:", "in user code:"):
        return lines[0][:300]
    roots = [line.split(":", 1)[1].strip() for line in lines if line.startswith("(0) ") and ":" in line]
    told = [line for line in lines if "[[" not in line and not line.startswith(("Detected at", "File ", "<stack"))]
    return (roots or told[-1:] or lines)[0][:300]
