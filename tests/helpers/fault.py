"""A fault: what is done before or during a run, and how the run may end then."""

import dataclasses
from collections.abc import Callable
from typing import Any

import lives
from sandbox import Sandbox

NEWEST = 40  # the step of the newest checkpoint of a run that was stopped


def nothing(*_: Any) -> None:
    """Does nothing."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
      name: what it is.
      part: what it concerns; two faults that strike one run are of different parts.
      codes: how the struck start may end; with a minus by a signal.
      line: pattern that the last line has to match where that code is above 0: what is wrong and what to do.
      prepare: is done before the struck start.
      strike: is done while it runs.
      stopped: whether the run was started before, and stopped at the step `NEWEST`; None for either.
      refused: pattern of the last line of a later start that is refused until `advice` is followed; "" for never.
      advice: flags that the refusal advises.
      mend: does what else the refusal advises.
      loses_records: whether records that were written before are lost with the file that held them.
    """

    name: str
    part: str
    codes: tuple[int, ...] = (0,)
    line: str = ""
    prepare: Callable[[Sandbox], None] = nothing
    strike: Callable[[Sandbox, lives.Life], None] = nothing
    stopped: bool | None = None
    refused: str = ""
    advice: tuple[str, ...] = ()
    mend: Callable[[Sandbox], None] = nothing
    loses_records: bool = False
