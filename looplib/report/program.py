"""The process of a run: its command, and the git commit of its code."""

import contextlib
import dataclasses
import functools
import hashlib
import os
import platform
import subprocess
import sys
import threading
import time

from looplib.masks import masked_text

DIFF = "code.diff"  # in the run directory
_MOST_BYTES = 1 << 20  # of a diff
_MOST_SECONDS = 10.0  # for git


@dataclasses.dataclass(frozen=True)
class Program:
    """The program of a process, as recorded in `run.json`.

    Attributes:
      arguments: the arguments of Python before those of the program: ["-m", MODULE], or the path of a file.
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


def this_program() -> Program:
    """Returns the program of this process."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    arguments = ["-m", spec.name.removesuffix(".__main__")] if spec else [os.path.abspath(file)] if file else []
    folder = os.path.dirname(os.path.abspath(file)) if file else ""
    found = git(folder, "rev-parse", "--show-toplevel", "HEAD").splitlines() if folder else []
    repository, commit = found if len(found) == 2 else ("", "")
    text = diff(repository, "HEAD") if repository else ""
    changes = hashlib.sha256(text.encode()).hexdigest() if text else ""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        here = ""
    return Program(arguments, here, repository, commit, changes, text)


def diff(repository: str, commit: str) -> str:
    """Returns the diff between the files of a git repository and a commit: at most 1 MB, with secrets masked.

    Args:
      repository: its folder.
      commit: the commit.
    """
    return masked_text(git(repository, "diff", "--no-color", "--no-ext-diff", "--no-textconv", commit, "--"))


def git(folder: str, *arguments: str) -> str:
    """Returns the output of a git command, at most 1 MB; "" if git is missing, fails or takes too long.

    Args:
      folder: the folder to run it in.
      *arguments: the arguments of git.
    """
    try:
        process = subprocess.Popen(
            ["git", "-C", folder, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # only reads
        )
    except (OSError, ValueError):  # of a name with NUL
        return ""
    timer = threading.Timer(_MOST_SECONDS, process.kill)
    timer.start()
    try:
        content = process.stdout.read(_MOST_BYTES)
        whole = len(content) < _MOST_BYTES
        if not whole:
            process.kill()
        process.stdout.close()
        code = process.wait()
    finally:
        timer.cancel()
    return "" if whole and code else content.decode(errors="replace")


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
