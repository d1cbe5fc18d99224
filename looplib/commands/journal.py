"""`audit.jsonl` of a run directory: the verdicts of its audits, one JSON object a line, and how much they cover."""

import contextlib
import dataclasses
import datetime
import json
import os
from collections.abc import Sequence

from absl import logging

from looplib.base import files
from looplib.base.messages import gist
from looplib.errors import ReplayError
from looplib.run.records import cut_short
from looplib.run.run_json import StartRecord

NAME = "audit.jsonl"
EQUAL, DIFFERENT, UNKNOWN = "equal", "different", "unknown"
_MOST_BYTES, _LARGEST = 1 << 24, 2**53
_MOST_SECONDS = 10.0  # that another audit may write


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What an audit has found in an interval.

    Attributes:
      time: when it ended, in seconds since the epoch.
      begin: the step after which the interval begins.
      end: its last step.
      saved: when the checkpoint of that step was committed, in seconds since the epoch.
      rollbacks: how often the run had gone back to a checkpoint when it was saved.
      result: `EQUAL`, `DIFFERENT`, or `UNKNOWN` if the interval cannot be audited.
      why: why nothing could be told; "" if it could.
      differences: how many variables and reports differ.
      variables: the first of them, as texts.
      causes: what is likely to have caused the differences.
    """

    time: float
    begin: int
    end: int
    saved: float
    rollbacks: int
    result: str
    why: str
    differences: int
    variables: list[str]
    causes: list[str]

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end < _LARGEST or self.result not in (EQUAL, DIFFERENT, UNKNOWN):
            raise files.MisfitError("it is no verdict")


@dataclasses.dataclass(frozen=True)
class Coverage:
    """How much of a run is audited.

    Attributes:
      audited: the steps that were compared.
      refused: further steps that cannot be audited.
      total: the steps of the run.
    """

    audited: int
    refused: int
    total: int

    def __str__(self) -> str:
        text = f"{self.audited:,} of {self.total:,} steps ({_share(self.audited, self.total)})"
        if not self.refused:
            return text
        return f"{text}; {self.refused:,} steps ({_share(self.refused, self.total)}) cannot be audited"


def read(directory: str) -> list[Verdict]:
    """Returns the verdicts in a run directory, in the order of the audits.

    Args:
      directory: the run directory, whose contents may be anything.

    Raises:
      UsageError: if the file is no file of such lines.
    """
    path = os.path.join(directory, NAME)
    try:
        lines = files.read_text(path, _MOST_BYTES).splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ReplayError(f"{path} cannot be read ({gist(error)}); move it away to begin a new one") from error
    found, bad = [], 0
    for line in filter(None, lines):
        try:
            found.append(files.typed(files.parse_json(line), Verdict))
        except ValueError:
            bad += 1
    if bad:
        logging.warning("%s: %d lines are no verdicts and are left out", path, bad)
    return found


def append(directory: str, verdict: Verdict) -> None:
    """Appends a verdict; raises `OSError` or `UsageError` if the file cannot be written."""
    path = os.path.join(directory, NAME)
    with files.appending(path, _MOST_SECONDS) as file:
        line = json.dumps(dataclasses.asdict(verdict)) + "\n"
        file.write((b"\n" if cut_short(path) else b"") + line.encode())


def coverage(verdicts: Sequence[Verdict], begin: int, reached: int) -> Coverage:
    """Returns how much of a run some verdicts cover.

    Args:
      verdicts: the verdicts.
      begin: the step after which the run begins.
      reached: the step that it has reached.
    """
    told = [one for one in verdicts if one.result != UNKNOWN]
    audited = _length(told, begin, reached)
    return Coverage(audited, _length(verdicts, begin, reached) - audited, max(0, reached - begin))


def _length(verdicts: Sequence[Verdict], begin: int, reached: int) -> int:
    """Returns how many steps of a run the intervals of verdicts cover together."""
    length, at = 0, begin
    for one in sorted(verdicts, key=lambda one: one.begin):
        end = min(one.end, reached)
        length += max(0, end - max(one.begin, at))
        at = max(at, end)
    return length


def cut(
    verdict: Verdict, begins: Sequence[int], starts: Sequence[StartRecord], rollbacks: Sequence[int]
) -> Verdict | None:
    """Returns a verdict without the steps that the run has trained again since its checkpoint; None if none is left.

    Args:
      verdict: the verdict.
      begins: the step that each start of the run was restored at.
      starts: what the report says of each.
      rollbacks: the steps that the run went back to, in the order of time.
    """
    turns = [begin for begin, start in zip(begins, starts) if _seconds(start) > verdict.saved]
    end = min([verdict.end, *turns, *rollbacks[max(0, verdict.rollbacks) :]])
    return dataclasses.replace(verdict, end=end) if end > verdict.begin else None


def _seconds(start: StartRecord) -> float:
    """Returns when a start was, in seconds since the epoch; 0 if it is not known."""
    with contextlib.suppress(ValueError):
        return datetime.datetime.fromisoformat(start.get("started", "")).timestamp()
    return 0.0


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "0%"
