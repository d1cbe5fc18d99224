"""The process of a run, how its program was started, and the version of its code that git knows."""

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
    """The program of a process, as `run.json` names it.

    Attributes:
      arguments: those of Python before the program's own: ["-m", MODULE], or the path of a file.
      directory: the working directory; "" if it was removed.
      repository: the folder of the git repository that the program's file is in; "" for none.
      commit: its commit; "" for none.
      changes: a checksum of `git diff HEAD`; "" for no changes.
      diff: the text of `git diff HEAD`, which is in a file of its own, `DIFF`.
    """

    arguments: list[str]
    directory: str
    repository: str
    commit: str
    changes: str
    diff: str

    def as_dict(self) -> dict[str, str | list[str]]:
        """Returns all but the diff."""
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
    """Returns how the files of a git repository differ from those of a commit; at most 1 MB of it, and no secrets.

    Args:
      repository: its folder.
      commit: the commit.
    """
    return masked_text(git(repository, "diff", "--no-color", "--no-ext-diff", "--no-textconv", commit, "--"))


def git(folder: str, *arguments: str) -> str:
    """Returns what a git command prints, at most 1 MB of it; "" if there is no git, it fails or takes long.

    Args:
      folder: where to run it.
      *arguments: its command line.
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
