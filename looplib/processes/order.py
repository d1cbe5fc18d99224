"""What the process of an audit is started for, in its environment. Importing this file is cheap."""

import os

from looplib.errors import FlagError

VARIABLE = "LOOPLIB_AUDIT"  # the step at which the training is to end, saved


def requested() -> int | None:
    """Returns the step at which this process is to end its training for an audit; None in any other process.

    What writes to places outside of the run directory leaves that out in an audit.

    Raises:
      UsageError: if the variable is no number of a step.
    """
    if not (text := os.environ.get(VARIABLE)):
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**53):
        raise FlagError(
            f"{VARIABLE} is {text!r:.100} in the environment; expected the step at which `python -m looplib audit` "
            "has a training end; unset it for any other run"
        )
    return int(text)
