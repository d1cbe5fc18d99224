"""Records of the process of a run, and of its program: its command, and the git commit of its code."""

import contextlib
import dataclasses
import functools
import os
import platform
import time

DIFF = "code.diff"  # in the run directory


@dataclasses.dataclass(frozen=True)
class Program:
    """The program of a process, as recorded in `run.json`.

    Attributes:
      arguments: the arguments of Python before the program's own: ["-m", MODULE], or the path of a file.
      directory: the working directory; "" if it was removed.
      repository: the root of the git repository that contains the program; "" for none.
      commit: its commit; "" for none.
      changes: checksum of `git diff HEAD`; "" for no changes.
      diff: text of `git diff HEAD`, which is stored in a separate file, `DIFF`.
    """

    arguments: list[str]
    directory: str
    repository: str
    commit: str
    changes: str
    diff: str

    def as_dict(self) -> dict[str, str | list[str]]:
        """Returns all fields except the diff."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "diff"}


@dataclasses.dataclass(frozen=True)
class Process:
    """A process, as recorded in `run.json`.

    Attributes:
      host: the name of its machine.
      pid: its process id on that machine.
      since: its start in seconds since the epoch, because process ids are reused.
    """

    host: str
    pid: int
    since: float


def this_process() -> Process:
    """Returns this process."""
    return Process(platform.node(), os.getpid(), _began(os.getpid()))


@functools.cache  # by process id, so that a forked child asks for itself
def _began(pid: int) -> float:
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):  # a system without /proc
        with open(f"/proc/{pid}/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    return time.time()
