"""`python -m looplib replay DIR --step=N`: back to any step of a run, and a close look at it."""

import collections
import contextlib
import dataclasses
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from looplib.base import files, folders
from looplib.base.messages import gist
from looplib.base.numbers import format_seconds
from looplib.commands import recorded_run, rerun
from looplib.commands.recorded_run import Recorded
from looplib.commands.runs import say
from looplib.errors import EXIT_DIFFERENT, EXIT_DONE, EXIT_STALLED, ReplayError
from looplib.loop import additions
from looplib.processes.children import dying_with_parent
from looplib.replay.player import Answer, Order
from looplib.run import commits, values
from looplib.run.commits import Commit

_LAST_LINES = 20  # of a process that failed
_NEWS_SECONDS = 10.0  # between two lines about the progress of a replay
_TICK = 0.1
_SIZE = "global_batch_size"  # in a report


def replay(directory: str, step: int, *, eager: bool = False, debug: bool = False, save: str | None = None) -> int:
    """Trains a run again from the newest checkpoint before a step, and shows what the step does.

    Args:
      directory: the run directory, which is only read.
      step: the global step to look at.
      eager: whether to run it only op by op, once, and to show what it prints.
      debug: whether to stop in it, in Python's debugger; needs `eager`.
      save: a file for its batch, `.npz`; default none.

    Returns:
      The exit code: `EXIT_DONE` if all that the run reported on the way was found again, else `EXIT_DIFFERENT`.

    Raises:
      UsageError: for a run or a step that cannot be replayed.
    """
    recorded_run.check_replay(directory, step, eager=eager, debug=debug, save=save)
    run = Replayable(directory)
    save = os.path.abspath(save) if save else ""
    start = next(run.intact(before=step), None)  # else from the start
    begin = f"from the checkpoint of step {start.step}" if start else "from the start of the run"
    say(f"{begin} to step {step}{run.next_report(start.step if start else 0, step)}")
    with tempfile.TemporaryDirectory(prefix="looplib-replay-") as folder:
        answer_to, exact = os.path.join(folder, "answer.json"), run.engine == "graph"
        order = Order(run.directory, step, answer_to, eager=eager, debug=debug, save=save, exact=exact)
        answer = run.start_again(start, order, folder)
    print(*answer.lines, sep="\n", flush=True)
    return EXIT_DONE if answer.equal else EXIT_DIFFERENT


class Replayable(Recorded):
    """A run of one process that can be started again from any of its checkpoints; see `Recorded`."""

    def intact(self, before: float = math.inf) -> Iterator[Commit]:
        """Yields the intact checkpoints of steps below another one, newest first; says which others there are."""
        for done in self.checkpoints():
            if done.step < before:
                if not (reason := commits.verify(done)):
                    yield done
                else:
                    say(f"the checkpoint of step {done.step} is left out: {reason}")

    def next_report(self, start: int, step: int) -> str:
        """Returns a clause that names the next report, if there is none after one step and up to another; else ""."""
        records = values.metrics(os.path.join(self.directory, "metrics.jsonl"))
        steps = [record["step"] for record in records if record["split"] == "train"]
        later = [one for one in steps if one > step]
        if not later or any(start < one <= step for one in steps):
            return ""
        return f", which the run did not report; --step={min(later)} compares with its next report"

    def start_again(self, start: Commit | None, order: Order, folder: str) -> Answer:
        """Starts the run's own command in a directory with a copy of one checkpoint; returns its answer.

        Args:
          start: the checkpoint, or None.
          order: what to do from there.
          folder: an empty directory for all that the command writes.

        Raises:
          UsageError: if the command fails, or the run has changed its batch size on the way.
        """
        order = dataclasses.replace(order, batch_size=self._batch_size(start.step if start else 0, order.step))
        model_dir = os.path.join(folder, "run")
        saves = folders.make_folder(model_dir, "checkpoints")
        if start:
            copy_checkpoint(start, saves)
        command, place = recorded_run.command_of(self.report, self.directory, self.start_that_did(order.step))
        command += [f"--model_dir={model_dir}", *self._flags(order.debug)]
        say(f"{shlex.join(command)} (in {place})")
        environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **rerun.environment(self.directory), **order.as_environment()}
        environment |= {additions.VARIABLE: "1"} if order.trace else {}
        log = None if order.eager else os.path.join(folder, "output.log")
        try:
            with open(log or os.devnull, "ab") as output:
                process = subprocess.Popen(
                    command,
                    cwd=place,
                    env=environment,
                    stdin=None if order.debug else subprocess.DEVNULL,
                    **({"stdout": output, "stderr": subprocess.STDOUT} if log else {}),
                    preexec_fn=dying_with_parent(signal.SIGTERM),
                )
                try:
                    code = process.wait() if order.debug else _wait(process, order)
                finally:
                    if process.poll() is None:  # this process is being ended, and removes what the other one writes
                        process.kill()
                        process.wait()
        except (OSError, ValueError) as error:
            raise ReplayError(
                f"{command[0]} cannot be started in {place} ({gist(error)}); restore them, or repeat the run by hand"
            ) from error
        if code == 0 and os.path.exists(order.to):
            return Answer.from_file(order.to)
        if log:
            with files.open_regular(log) as lines:
                last = [line.decode(errors="replace") for line in collections.deque(lines, _LAST_LINES)]
            print("".join(f"  | {line}" for line in last), end="", file=sys.stderr)
        if code == EXIT_STALLED:
            raise ReplayError(
                f"the replay of {self.directory} made no progress before step {order.step}, and was ended; the lines "
                "above say where it hung"
            )
        raise ReplayError(f"the command of {self.directory} ended with code {code} before step {order.step}; see above")

    def _batch_size(self, start: int, end: int) -> int | None:
        """Returns the global batch size of the steps after one and up to another; None if it is not known.

        Raises:
          UsageError: if the run has changed it between them.
        """
        sizes = [_whole(self.report.get("flags", {}).get(_SIZE))]
        for number in range(len(self.starts) - 1, 0, -1):
            values = self.starts[number].get("changed", {}).get(_SIZE)
            sizes.insert(0, _whole(values[0]) if values else sizes[0])
        turns = [start, *(begin for begin in self.begins() if start < begin < end)]
        found = {step: sizes[self.start_that_did(step + 1)] for step in sorted(turns)}
        if len(set(found.values())) > 1:
            texts = [f"{size} from step {step + 1} on" for step, size in found.items()]
            raise ReplayError(
                f"the run in {self.directory} had batches of {' and '.join(texts)}, and a replay from step {start} "
                f"to {end} has one size; there is no checkpoint between the last change and that step, so name an "
                "earlier step"
            )
        return found[start]

    @property
    def engine(self) -> Any:
        """The name of the loop engine that the run was asked for."""
        return self.report.get("flags", {}).get("loop", "graph")

    def _flags(self, debug: bool) -> list[str]:
        flags = self.report.get("flags", {})
        found = ["--nodry_run", "--noestimate", "--max_time=", "--verbosity=-1", "--trackers="]  # which write elsewhere
        found += ["--loop=graph"] * (self.engine != "graph")  # the one that can stand before any step
        found += ["--non_finite=halt"] * (flags.get("non_finite") == "off")  # so that gradients are noted
        # Python's debugger follows one thread, and each replica has its own.
        return found + ["--strategy=auto", "--num_virtual_devices=1"] * debug


def copy_checkpoint(done: Commit, folder: str) -> None:
    """Copies the files of a checkpoint, the marker last.

    Args:
      done: the checkpoint.
      folder: an existing directory.

    Raises:
      OSError: if a file is missing, or cannot be read or written.
      files.NotRegularError: if it is no regular file.
    """
    for name in [*done.files, f"ckpt-{done.step}.commit"]:
        source = os.path.join(os.path.dirname(done.path), name)
        with files.open_regular(source) as read, open(folders.inside(folder, name), "wb") as write:
            shutil.copyfileobj(read, write)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _wait(process: subprocess.Popen, order: Order) -> int:
    """Waits for a replay, and prints from time to time what it is doing; returns its exit code."""
    said = started = time.monotonic()
    while True:
        try:
            return process.wait(_TICK)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if now > said + _NEWS_SECONDS:
            said, news = now, "starting"
            with contextlib.suppress(OSError, ValueError):
                news = files.read_text(order.news)
            say(f"  {news} ({format_seconds(now - started)})")
