"""`python -m looplib replay DIR --step=N`: back to any step of a run, and a close look at it."""

import dataclasses
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

from looplib.base import files, folders, orders
from looplib.base.orders import Order, ReplayOrder
from looplib.commands.check import say
from looplib.errors import EXIT_DIFFERENT, EXIT_DONE, EXIT_STALLED, ReplayError
from looplib.processes.child import Child, CommandLine, TemporaryFolder, last_lines, news_of
from looplib.replay.player import Answer
from looplib.run import commits, started
from looplib.run.commits import Commit
from looplib.run.directory import RunDir
from looplib.run.started import Recorded

_NICE, _LOG = 10, "output.log"
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
    started.check_replay(directory, step, eager=eager, debug=debug, save=save)
    run = Replayable(directory)
    save = os.path.abspath(save) if save else ""
    start = next(run.intact(before=step), None)  # else from the start
    begin = f"from the checkpoint of step {start.step}" if start else "from the start of the run"
    say(f"{begin} to step {step}{run.next_report(start.step if start else 0, step)}")
    order = ReplayOrder(run.directory, step, eager=eager, debug=debug, save=save, exact=run.engine == "graph")
    with TemporaryFolder() as folder:
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
        steps = [one.step for one in RunDir(self.directory).records().all() if one.split == "train"]
        later = [one for one in steps if one > step]
        if not later or any(start < one <= step for one in steps):
            return ""
        return f", which the run did not report; --step={min(later)} compares with its next report"

    def start_again(self, start: Commit | None, order: ReplayOrder, folder: TemporaryFolder) -> Answer:
        """Starts the run's own command in a directory with a copy of one checkpoint; returns its answer.

        Args:
          start: the checkpoint, or None.
          order: what to do from there.
          folder: for all that the command writes.

        Raises:
          UsageError: if the command fails, or the run has changed its batch size on the way.
        """
        order = dataclasses.replace(order, batch_size=self._batch_size(start.step if start else 0, order.step))
        model_dir = os.path.join(folder.path, "run")
        saves = folders.make_folder(model_dir, "checkpoints")
        if start:
            copy_checkpoint(start, saves)
        command = started.command_of(self.report, self.directory, self.start_that_did(order.step))
        command = command.adding(f"--model_dir={model_dir}", *self._flags(order.debug))
        path = os.path.join(folder.path, "order.json")
        given = Order(example_checksums=order.trace or started.has_checksums(self.directory), replay=order)
        shows = order.eager  # what the step prints
        code = self.train(command, given.give(path), folder, lambda: orders.news(path), shows, order.debug)
        if code or not orders.is_answered(path):
            raise self.failed(code, order.step, folder)
        return orders.answer_to(path, Answer)

    def train(
        self,
        command: CommandLine,
        environment: dict[str, str],
        folder: TemporaryFolder,
        news: Callable[[], str],
        shows: bool = False,
        debug: bool = False,
    ) -> int:
        """Runs a command of the run to its end, and says from time to time what it is doing.

        Args:
          command: the command.
          environment: variables to add, with an order.
          folder: for a file with what it prints.
          news: returns what it is doing.
          shows: whether to show all that it prints.
          debug: whether it has the terminal.

        Returns:
          Its exit code.

        Raises:
          UsageError: if it cannot be started.
        """
        say(str(command))
        environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **environment}
        with (
            files.open_to_append(os.path.join(folder.path, _LOG)) as output,
            # A run that trains on this machine goes first.
            Child(
                command, environment, output=None if shows else output, terminal=debug, nice=_NICE, held=(folder.lock,)
            ) as child,
        ):
            return child.wait(tick=(lambda: None) if debug else news_of(news, say))

    def failed(self, code: int, step: int, folder: TemporaryFolder) -> ReplayError:
        """Prints the last lines of a command that has failed before a step; returns the error."""
        log = os.path.join(folder.path, _LOG)
        print("".join(f"  | {line}\n" for line in last_lines(log)), end="", file=sys.stderr)
        if code == EXIT_STALLED:
            return ReplayError(
                f"the replay of {self.directory} made no progress before step {step}, and was ended; the lines above "
                "say where it hung"
            )
        return ReplayError(f"the command of {self.directory} ended with code {code} before step {step}; see above")

    def _batch_size(self, start: int, end: int) -> int | None:
        """Returns the global batch size of the steps after one and up to another; None if it is not known.

        Raises:
          UsageError: if the run has changed it between them.
        """
        sizes = [_whole(self.report.flags.get(_SIZE))]
        for number in range(len(self.starts) - 1, 0, -1):
            values = self.starts[number].changed.get(_SIZE)
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
        return self.report.flags.get("loop", "graph")

    def _flags(self, debug: bool) -> list[str]:
        flags = self.report.flags
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
