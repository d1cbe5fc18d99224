"""When launchers start workers again, with how many, and what they say of them. Imports no TensorFlow."""

import collections
import dataclasses
import math
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

import looplib.errors as errors
from looplib.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_UNKNOWN, CommandError, UsageError
from looplib.masks import masked_text

_LONGEST_PAUSE = 60.0
# What may be otherwise at the next start: other machines, the network, a disk, a store.
_PASSING = (
    errors.DataError, errors.DeviceError, errors.FileError, errors.LockedError, errors.ParameterServerError,
    errors.SaveError, errors.StoreError, errors.TpuError, errors.WorkerError,
)  # fmt: skip
_HOUR = 3600.0
_SHORT = 60.0  # seconds; a start that has lasted shorter than this doubles the next pause
_MOST_DOUBLINGS = 6


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


@dataclasses.dataclass
class RestartBudget:
    """The restarts of the last hour.

    Attributes:
      backoff: seconds before a restart; twice as long for each that follows a start of less than a minute, up to a
        minute.
    """

    backoff: float
    _times: list[float] = dataclasses.field(default_factory=list)
    _short: int = 0  # starts in succession that were short

    def pause(self, most: int, lived: float, now: float) -> float | None:
        """Counts a restart and returns the seconds to wait before it; None if no restart is left.

        Args:
          most: how many there may be in an hour.
          lived: seconds that the start before it has lasted.
          now: `time.monotonic()`.
        """
        self._times = [time for time in self._times if time > now - _HOUR]
        if len(self._times) >= most:
            return None
        self._times.append(now)
        self._short = self._short + 1 if lived < _SHORT else 0
        return min(_LONGEST_PAUSE, self.backoff * 2 ** min(max(0, self._short - 1), 30))

    @property
    def used(self) -> int:
        """The restarts within an hour before the newest one, with that one."""
        return len(self._times)


@dataclasses.dataclass
class WorkerNumbers:
    """How many workers a start has: those that are left, if they can share the global batch, and later all again.

    A worker that died leaves its place empty for some time, and is tried again after that. Each worker that dies within
    an hour of another one doubles the time.

    Attributes:
      least: the smallest number of workers.
      most: the number of workers if no place is empty.
      rest: seconds for which a place stays empty.
      global_batch_size: the examples that the workers divide among them; None while it is not known.
    """

    least: int
    most: int
    rest: float
    global_batch_size: int | None = None
    _losses: list[float] = dataclasses.field(default_factory=list)
    _back: list[float] = dataclasses.field(default_factory=list)  # when each empty place is tried again, sorted

    @property
    def possible(self) -> list[int]:
        """The numbers of workers that can share the global batch."""
        numbers = range(self.least, self.most + 1)
        return [n for n in numbers if self.global_batch_size is None or self.global_batch_size % n == 0]

    def lose(self, count: int, now: float) -> None:
        """Notes that some workers have died.

        Args:
          count: how many, at once.
          now: `time.monotonic()`.
        """
        self._losses = [time for time in self._losses if time > now - _HOUR]
        rest = self.rest * 2 ** min(len(self._losses), _MOST_DOUBLINGS)
        self._losses.append(now)
        self._back = sorted([*(time for time in self._back if time > now), *[now + rest] * count])

    def choose(self, now: float) -> int | None:
        """Returns how many workers to start: the largest possible number for which there are places.

        If there are places for none, it is the smallest possible number, on places that are empty still.

        Args:
          now: `time.monotonic()`.

        Returns:
          The number; None if no number of workers can share the global batch.
        """
        places = self.most - sum(time > now for time in self._back)
        return max((n for n in self.possible if n <= places), default=min(self.possible, default=None))

    def grows_at(self, count: int) -> float | None:
        """Returns when there are places for more workers, by `time.monotonic()`; None for never.

        Args:
          count: how many there are.
        """
        return next((time for time in self._back if (self.choose(time) or 0) > count), None)
