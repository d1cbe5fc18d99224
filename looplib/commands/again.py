"""An interval of a run trained once more, by the run's own commands, in a temporary run directory."""

import collections
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from looplib.base import files, folders
from looplib.base.messages import gist, with_cure
from looplib.base.numbers import format_seconds
from looplib.commands import rerun
from looplib.commands.intervals import AuditedRun, Interval
from looplib.commands.replay import copy_checkpoint
from looplib.commands.runs import say
from looplib.errors import FileError, ReplayError, UsageError
from looplib.processes import order
from looplib.processes.children import dying_with_parent
from looplib.run import commits
from looplib.run.commits import Commit
from looplib.run.newest import read_newest

_LAST_LINES = 20  # of a process that failed
_NEWS_SECONDS = 10.0  # between two lines about the progress
_TICK = 0.1
_NICE = 10  # so that a run which trains on this machine goes first


class GoneError(Exception):
    """A checkpoint was removed while it was copied, by a run that trains and keeps few."""


class DamagedError(Exception):
    """A checkpoint is damaged, or cannot be read.

    Attributes:
      step: its step.
    """

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"the checkpoint of step {step:,} is damaged: {reason}")
        self.step = step


def secure(done: Commit, folder: str) -> Commit:
    """Copies a checkpoint, and reads the copy through; returns the copy.

    Args:
      done: the checkpoint.
      folder: an existing directory.

    Raises:
      GoneError: if it was removed meanwhile.
      DamagedError: if it does not read as it was written.
      UsageError: if it cannot be read, or copied, now.
    """
    try:
        copy_checkpoint(done, folder)
        copy = commits.read_marker(commits.path_of(folder, done.step))
        reason = commits.verify(copy)
    except UsageError:  # it cannot be read now, or only by a newer version
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
        if files.fails_here(error, folder):
            raise FileError(
                f"the checkpoint of step {done.step:,} cannot be copied to {folder}: {with_cure(error)}, or set TMPDIR "
                "to a folder on another one"
            ) from error
        reason = gist(error)
    if not reason:
        return copy
    if not os.path.exists(f"{done.path}.commit"):
        raise GoneError
    raise DamagedError(done.step, reason)


def train(run: AuditedRun, interval: Interval, first: Commit | None, model_dir: str) -> str:
    """Trains an interval; returns the path of the checkpoint of its last step.

    Args:
      run: the run.
      interval: the interval.
      first: a copy of the checkpoint that it begins with; None for the start of the run.
      model_dir: the run directory of the training, which does not exist yet.

    Raises:
      UsageError: if a command cannot be started, or fails.
    """
    saves = folders.make_folder(model_dir, "checkpoints")
    if first:
        copy_checkpoint(first, saves)
    for segment in run.segments(interval):
        command, place = run.command(segment, model_dir)
        say(f"{shlex.join(command)} (in {place})")
        environment = {
            "TF_CPP_MIN_LOG_LEVEL": "3",
            **rerun.environment(run.directory),
            order.VARIABLE: f"{segment.end}",
        }
        log = f"{model_dir}.log"
        if code := _run(command, place, environment, log, lambda: _news(model_dir, interval)):
            with files.open_regular(log) as lines:
                last = [line.decode(errors="replace") for line in collections.deque(lines, _LAST_LINES)]
            print("".join(f"  | {line}" for line in last), end="", file=sys.stderr)
            raise ReplayError(
                f"the command of {run.directory} ended with code {code} before step {segment.end}; see above"
            )
        _check_ended(saves, segment.end)
    return commits.path_of(saves, interval.end)


def _check_ended(saves: str, step: int) -> None:
    newest = commits.newest(saves)
    if newest is None or newest.step != step:
        ended = f"at step {newest.step}" if newest else "without a checkpoint"
        raise ReplayError(
            f"the command ended {ended} by itself, and the run had gone on to step {step}: its data, code or settings "
            "are not those that it had"
        )


def _run(command: Sequence[str], place: str, environment: dict[str, str], log: str, news: Callable[[], str]) -> int:
    """Runs a command to its end, and says from time to time how far it is; returns its exit code."""
    ask = dying_with_parent(signal.SIGKILL)

    def prepare() -> None:
        if ask:
            ask()
        os.nice(_NICE)

    try:
        with files.open_to_append(log) as output:
            process = subprocess.Popen(
                command,
                cwd=place,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=prepare,
            )
    except (OSError, ValueError) as error:
        raise ReplayError(
            f"{command[0]} cannot be started in {place} ({gist(error)}); restore them, or repeat the run by hand"
        ) from error
    said = started = time.monotonic()
    try:
        while True:
            try:
                return process.wait(_TICK)
            except subprocess.TimeoutExpired:
                now = time.monotonic()
            if now > said + _NEWS_SECONDS:
                said = now
                say(f"  {news()} ({format_seconds(now - started)})")
    finally:
        if process.poll() is None:  # this process is being ended, and removes what the other one writes
            process.kill()
            process.wait()


def _news(model_dir: str, interval: Interval) -> str:
    steps = [record["step"] for record in read_newest(os.path.join(model_dir, "metrics.jsonl"))]
    return f"at step {max(steps):,} of {interval.end:,}" if steps else "starting"
