"""The command under check: run in separate run directories, to its end or until it is killed."""

import contextlib
import dataclasses
import fcntl
import functools
import glob
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

from looplib.base import files, folders
from looplib.base.console import printable
from looplib.commands.compare import final_checkpoint
from looplib.errors import CheckError
from looplib.loop import additions
from looplib.processes import children
from looplib.run.commits import latest_checkpoint

_MOST_SHOWN = 10_000  # characters
_LAST_BYTES = 8192  # of a log
_LAST_SECONDS = 10.0  # for the processes of a killed run to end
# What kills wait for, in turn. The first start after one then finds a checkpoint, and each part of a life is hit.
_KILLS = ("after a save", "while it started", "while it ran")


def say(line: str) -> None:
    """Prints lines at once, so that they stand in order between the lines of the command; of a long text the beginning.

    Args:
      line: one or several, which may have what somebody else has written, such as a command.
    """
    line = line if len(line) <= _MOST_SHOWN else f"{line[:_MOST_SHOWN]}… ({len(line):,} characters)"
    print("\n".join(map(printable, line.expandtabs().split("\n"))), flush=True)


@dataclasses.dataclass
class ProcessRun:
    """One start of the command; the moments of kills in later ones are drawn from it.

    Attributes:
      found: the step of the newest checkpoint at its start.
      now: seconds since the start; once it has ended, the length of the life.
      ready: when the command had built and restored everything, or None.
      saves: from the step of each new checkpoint to when it was seen.
      saved: the step of the newest checkpoint, 0 if there is none.
      killed: whether it ended by a kill.
    """

    found: int
    now: float = 0.0
    ready: float | None = None
    saves: dict[int, float] = dataclasses.field(default_factory=dict)
    saved: int = 0
    killed: bool = False


def run(
    command: Sequence[str],
    folder: str,
    timeout: float,
    moment_of: Callable[[ProcessRun], float | None] = lambda life: None,
    environment: Mapping[str, str] | None = None,
) -> ProcessRun:
    """Starts the command and waits for its end, or kills it.

    Args:
      command: a looplib binary and its flags without `--model_dir`.
      folder: the run directory; what the command prints is appended to a file beside it.
      timeout: seconds that it may take.
      moment_of: called until it returns the moment of the kill, in seconds since the start.
      environment: variables to add; default the one that asks for checksums of examples.

    Raises:
      UsageError: if the command cannot be started, fails, or takes longer.
    """
    life, stamp, moment = ProcessRun(saved_step(folder)), _stamp(folder), None
    added = environment or {additions.VARIABLE: "1"}
    with files.open_to_append(f"{folder}.log") as log:
        _hold(log, folder)
        process = children.start([*command, f"--model_dir={folder}"], log, added)
    started = time.monotonic()
    struck = False
    try:
        while process.poll() is None and life.now <= timeout and not struck:
            time.sleep(0.005)
            life.now = time.monotonic() - started
            life.saved = saved_step(folder)
            if life.saved != life.found:
                life.saves.setdefault(life.saved, life.now)
            if life.ready is None and _stamp(folder) != stamp:
                life.ready = life.now
            if moment is None:
                moment = moment_of(life)
            struck = moment is not None and life.now >= moment
    finally:
        if process.poll() is None:  # not yet waited for, so the number still belongs to it
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    newest = latest_checkpoint(os.path.join(folder, "checkpoints"))  # a kill may leave a later one unfinished
    life.saved = int(newest.rsplit("-", 1)[1]) if newest else 0
    life.killed = struck and code == -signal.SIGKILL  # otherwise it ended before the kill
    if code and not life.killed:
        how = f"did not end within {timeout:g} s (--timeout)" if life.now > timeout else f"failed with code {code}"
        print("".join(f"  | {line}\n" for line in last_lines(folder)[-20:]), end="", file=sys.stderr)
        raise CheckError(f"the command {how}; its last lines are above, all are in {folder}.log")
    return life


def _hold(log: BinaryIO, folder: str) -> None:
    """Holds the log of a run for this process and those that have it as their output.

    Raises:
      UsageError: if another one holds it: one that was killed a moment ago is waited for.
    """
    end = time.monotonic() + _LAST_SECONDS
    with contextlib.suppress(OSError):  # a file system without locks
        while True:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > end:
                    break
                time.sleep(0.05)
        raise CheckError(
            f"another process has {folder}.log as its output, of a check that runs there or was killed; wait until it "
            "has ended, or use another directory"
        )


def last_lines(folder: str) -> list[str]:
    """Returns the last lines of what the command of a run has printed; [] if they cannot be read."""
    try:
        with files.open_regular(f"{folder}.log") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _LAST_BYTES))
            return log.read(_LAST_BYTES).decode(errors="replace").splitlines()
    except (OSError, files.NotRegularError):
        return []


def run_to_the_end(
    command: Sequence[str], folder: str, timeout: float, environment: Mapping[str, str] | None = None
) -> ProcessRun:
    """Runs the command to its end, and says how long it took; see `run`."""
    life = run(command, folder, timeout, environment=environment)
    final_checkpoint(folder)
    start = "" if life.ready is None else f", of which {life.ready:.1f} s to start"
    say(f"{os.path.basename(folder)}: {life.now:.1f} s{start}; the last save is of step {life.saved}")
    return life


def run_killed(
    command: Sequence[str], folder: str, whole: ProcessRun, kills: int, moments: random.Random, timeout: float
) -> list[int]:
    """Runs the command with kills, and then to its end.

    Args:
      command: see `run`.
      folder: see `run`.
      whole: the life of an uninterrupted run.
      kills: how often to kill it.
      moments: draws the moments of the kills.
      timeout: seconds that each start may take.

    Returns:
      The step that each start after a kill found.

    Raises:
      UsageError: as `run` does, or if the command always ended before a kill came.
    """
    start, steps = whole.ready or whole.now, []
    ended = False
    for _ in range(2 * kills + 4):
        if len(steps) == kills:
            break
        kind = _KILLS[1 if ended else len(steps) % 3]
        # The first of as many moments as there are kills to come in the rest of the run, so that they spread over it.
        to_come = 1 if kind == _KILLS[1] else sum(i % 3 != 1 for i in range(len(steps), kills))
        part = 1 - moments.random() ** (1 / to_come)
        life = run(command, folder, timeout, functools.partial(_moment_of, whole, start, kind, part))
        start = min(start, life.ready or start)  # the first start of all is slow: nothing is in memory yet
        if life.killed:
            steps.append(life.saved)
            when = f"{kind}, {life.now:.2f} s after its start"
            say(f"killed: {when}, kill {len(steps)} of {kills}; it had saved step {life.saved}")
        elif steps:
            ended = True  # the remaining kills hit starts that find nothing left to do
            say(f"killed: ended after {life.now:.2f} s, before the kill")
        else:
            say(f"killed: ended after {life.now:.2f} s, before the kill; restarting from step 0")
            folders.remove(*os.path.split(folder))
    if not steps:
        raise CheckError("the command ended before the first kill; use more steps")
    run_to_the_end(command, folder, timeout)
    return steps


def _moment_of(whole: ProcessRun, start: float, kind: str, part: float, life: ProcessRun) -> float | None:
    """Returns the moment to kill a life at, in seconds since its start; None while that is not known.

    Args:
      whole: the life of an uninterrupted run.
      start: seconds that a start takes.
      kind: of `_KILLS`.
      part: from 0 to 1, how far into the time that this kind of kill may strike.
      life: the life.
    """
    if kind == _KILLS[1]:
        return part * start
    # The rest of this life is about as long as that of the uninterrupted run after this save; the first kill comes
    # before the last save, so that the next start has both a checkpoint and work to do.
    end = max(whole.saves.values(), default=whole.now) if kind == _KILLS[0] else whole.now
    rest = end - whole.saves.get(life.saved, start)
    waits = not life.saves if kind == _KILLS[0] else life.ready is None
    return None if waits else life.now + part * rest


def _stamp(folder: str) -> tuple[int, int] | None:
    """Returns what changes when `run.json` is written, which a binary does first once it has built and restored."""
    try:
        status = os.stat(os.path.join(folder, "run.json"))
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


def saved_step(folder: str) -> int:
    """Returns the step of the newest committed checkpoint in a run directory; 0 if there is none."""
    names = glob.glob(os.path.join(glob.escape(folder), "checkpoints", "ckpt-*.commit"))
    found = (re.search(r"ckpt-(\d+)\.commit$", name) for name in names)
    return max((int(match[1]) for match in found if match), default=0)
