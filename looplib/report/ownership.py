"""Which event files of a run directory are the run's own, and so may be rewritten.

The run's own are those of looplib's writer, recognized by the form of their names, and those that a process of the run
made itself, such as by `tf.summary`: the run record (`run.json`, and `run_eval.json` of an evaluation job) names the
processes, and TensorFlow puts host, process id and time into a file's name. All others are another program's.
"""

import contextlib
import dataclasses
import functools
import os
import platform
import re
import time

from looplib.report import run_file

RECORDS = ("run.json", "run_eval.json")
_OF_LOOPLIB = re.compile(r"events\.out\.tfevents\.\d+\.\d{6}\..+\.\d+\.v2")  # the time has six decimals


@dataclasses.dataclass(frozen=True)
class Process:
    """A process, as run records name it.

    Attributes:
      host: the name of its machine.
      pid: its number there.
      since: when it began, in seconds since the epoch; before that, its number was another's.
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


def event_files(directory: str, names: list[str]) -> list[str]:
    """Returns those of the names of files that are event files of the run, sorted.

    Args:
      directory: the run directory.
      names: of the files in one of its folders.
    """
    named = [name for name in sorted(names) if "tfevents" in name]  # as TensorBoard looks for them
    if all(_OF_LOOPLIB.fullmatch(name) for name in named):
        return named
    processes = _processes(directory)
    return [name for name in named if _OF_LOOPLIB.fullmatch(name) or _made_by(name, processes)]


def _made_by(name: str, processes: list[Process]) -> bool:
    for process in processes:
        form = rf"events\.out\.tfevents\.(\d+)\.{re.escape(process.host)}\.{process.pid}\.\d+(\D.*)?"
        match = re.fullmatch(form, name)
        if match and int(match[1]) + 1 > process.since:  # names have whole seconds
            return True
    return False


def _processes(directory: str) -> list[Process]:
    """Returns this process and those of the starts that the run's records list."""
    found = [this_process()]
    for name in RECORDS:
        for start in run_file.read(os.path.join(directory, name)).get("starts", []):
            with contextlib.suppress(KeyError):  # of a looplib that named none
                made = start["process"]
                found.append(Process(made["host"], made["pid"], made["since"]))
    return found
