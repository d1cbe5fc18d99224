"""What launchers of several processes share: the lines of the processes, how they ended, and what that means."""

import collections
import dataclasses
import math
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from looplib import errors
from looplib.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_UNKNOWN, CommandError, UsageError
from looplib.masks import masked_text

_LONGEST_PAUSE = 60.0
# What may be otherwise at the next start: other machines, the network, a disk, a store.
_PASSING = (
    errors.DataError, errors.DeviceError, errors.FileError, errors.LockedError, errors.ParameterServerError,
    errors.SaveError, errors.StoreError, errors.TpuError, errors.WorkerError,
)  # fmt: skip


@dataclasses.dataclass(eq=False)
class Task:
    """A process of a run that a launcher has started.

    Attributes:
      kind: "worker", "chief" or "ps".
      index: among those of its kind.
      code: its end as `subprocess` has it: the exit code, or less than 0 for a signal; None while it runs.
      ended: when it was found to have ended, by `time.monotonic`.
      killed: whether the launcher has killed it.
      lost: how it was lost, as a predicate, if it did not end by itself and was not just too slow; else "".
    """

    kind: str
    index: int
    code: int | None = None
    ended: float = 0.0
    killed: bool = False
    lost: str = ""

    @property
    def name(self) -> str:
        """Its name, for messages."""
        return self.kind if self.kind == "chief" else f"{self.kind} {self.index}"


class TaskLines:
    """Prints the lines of tasks, each after the name of its task, and lines of errors once."""

    def __init__(self) -> None:
        self._errors: collections.defaultdict[str, set[str]] = collections.defaultdict(set)

    def show(self, task: Task, stream: TextIO, content: bytes) -> None:
        """Prints one line, unless it repeats the error of another task."""
        line = content.decode(errors="replace")
        if line.startswith("looplib: error: "):
            # All workers print the line of the first cause, and the failed one says more: each line is shown once.
            about = re.match(r"looplib: error: (worker \d+) \(", line)
            if (about and self._errors[about[1]]) or any(line in shown for shown in self._errors.values()):
                return
            self._errors[task.name].add(line)
        print(f"[{task.name}] {line}", file=stream, flush=True)

    def usage_error(self) -> str:
        """Returns the class of an error that the next start would meet again; "" if no task has printed one."""
        for line in set().union(*self._errors.values()):
            kind = getattr(errors, name[1], None) if (name := re.search(r"\((\w+)\)$", line)) else None
            if isinstance(kind, type) and issubclass(kind, UsageError) and not issubclass(kind, _PASSING):
                return kind.__name__
        return ""


def check_options(counts: Iterable[tuple[str, int, int]], seconds: Iterable[tuple[str, float]]) -> None:
    """Raises `CommandError` for an option of a launcher that cannot be.

    Args:
      counts: the name, the value and the smallest value of each that is a number of things.
      seconds: the name and the value of each that is a time.
    """
    for name, value, least in counts:
        if value < least:
            raise CommandError(f"--{name} is {value}; expected at least {least}")
    for name, value in seconds:
        if not 0 <= value < math.inf:
            raise CommandError(f"--{name} is {value}; expected seconds of at least 0")


def say(text: str) -> None:
    """Prints a line of the launcher itself."""
    print(masked_text(f"looplib: {text}"), file=sys.stderr, flush=True)


def outcome(tasks: Sequence[Task], grace: float) -> str:
    """Says how tasks ended; they end almost together, so their own lines have to say which one failed first.

    Args:
      tasks: all of them, ended.
      grace: seconds after which the launcher has killed the others.
    """
    ways = collections.defaultdict(list)
    for task in sorted(tasks, key=lambda task: (task.killed, not task.lost, task.code > 0)):
        if task.lost:
            ways[task.lost].append(task.name)
        elif task.killed:
            ways[f"did not exit within {grace:g} s and had to be killed"].append(task.name)
        elif task.code < 0:
            known = -task.code in set(signal.Signals)  # most real-time signals have no name
            name = signal.Signals(-task.code).name if known else f"signal {-task.code}"
            ways[f"was ended by {name}"].append(task.name)
        elif task.code:
            ways[f"exited with code {task.code}"].append(task.name)
    return "; ".join(f"{', '.join(names)} {way}" for way, names in ways.items())


def exit_code(tasks: Sequence[Task], signals: Sequence[int]) -> int:
    """Returns the exit code of the launcher.

    Args:
      tasks: those that decide, ended.
      signals: the numbers of those that the launcher has passed on.
    """
    codes = {EXIT_FAILED if task.lost else task.code for task in tasks}
    if codes == {EXIT_DONE}:
        return EXIT_DONE
    # A signal ends a process that is still starting in the default way: it has nothing to save.
    preempted = {EXIT_DONE, EXIT_PREEMPTED, *(-number for number in signals)}
    return EXIT_PREEMPTED if codes <= preempted else EXIT_FAILED


def cannot_succeed(tasks: Sequence[Task], lines: TaskLines) -> str:
    """Returns why another start would fail too, as a sentence: the command is used wrongly; "" if it may succeed."""
    if kind := lines.usage_error():
        return f"a restart would end with the same {kind}"
    wrong = {EXIT_UNKNOWN: "was used wrongly", 126: "cannot be run", 127: "was not found"}  # the last two are a shell's
    return next((f"the command {wrong[task.code]} (exit code {task.code})" for task in tasks if task.code in wrong), "")


def pause(backoff: float, before: int) -> float:
    """Returns the seconds to wait before a restart: `backoff`, doubled with each one before, and at most a minute."""
    return min(_LONGEST_PAUSE, backoff * 2 ** min(before, 30))
