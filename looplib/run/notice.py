"""Notice: the word that the machine or the job of a run goes soon, as `run.json` and messages have it."""

import dataclasses
from typing import Any

from looplib.run import values


@dataclasses.dataclass(frozen=True)
class Notice:
    """What a cloud or a cluster manager has said of the machine or the job of a process.

    Attributes:
      source: who has said it: "gcp", "aws" or "slurm".
      kind: what comes, in its own words, such as "terminate".
      host: the name of the machine.
      time: when it was seen, in ISO 8601.
      deadline: when it comes at the earliest, in ISO 8601; None where that is not known.
    """

    source: str
    kind: str
    host: str
    time: str
    deadline: str | None

    def __str__(self) -> str:
        deadline = f", deadline {self.deadline}" if self.deadline else ""
        return f"the notice of {self.source} ({self.kind}, seen {self.time}{deadline})"


def notices_of(start: Any) -> list[Notice]:
    """Returns the notices of a start in `run.json`, whose values may be anything; those that are none are left out."""
    found = []
    for each in map(values.mapping, values.items(values.mapping(start).get("notices"))):
        source, kind, host, time = (values.text(each.get(name), 100) for name in ("source", "kind", "host", "time"))
        if source and kind:
            found.append(Notice(source, kind, host, time, values.text(each.get("deadline"), 100) or None))
    return found


def iso_time(seconds: float) -> str:
    """Returns a time in ISO 8601, from the seconds since 1970."""
    return values.utc(seconds).isoformat(timespec="seconds")
