"""What the directory of a run says about how it was started, and the refusals of what cannot be started again.

None of this needs TensorFlow, whose import takes seconds, so that a wrong argument is answered at once.
"""

import os
import re
import sys

from looplib.base.decoding import whole
from looplib.base.messages import whole_number
from looplib.errors import ReplayError, UsageError
from looplib.masks import MASK
from looplib.processes.child import CommandLine, without
from looplib.run import commits
from looplib.run.commits import Commit
from looplib.run.directory import CONFIG, RunDir
from looplib.run.metric_names import CHECKSUM
from looplib.run.report import RunReport, StartEntry
from looplib.run.status import read_status
from looplib.run.sweep_results import is_sweep

# A repetition sends no alerts, has a directory of its own, which is no URL, and reads its data itself.
_NOT_REPEATED = ("alert", "alert_when", "local_dir", "data_service")


def check_replay(
    directory: str, step: int, *, eager: bool = False, debug: bool = False, save: str | None = None
) -> None:
    """Refuses what cannot be replayed; see `replay.replay`.

    Raises:
      UsageError: for a run or a step that cannot be replayed.
    """
    whole_number("--step", step)
    if debug and not eager:
        raise ReplayError("--pdb stops where Python runs the step; add --eager")
    run = Recorded(directory)
    start_of(run.report, run.directory)  # refuses here what has no command
    run.refuse_beyond(step)
    save = os.path.abspath(save) if save else ""
    if save and (not save.endswith(".npz") or os.path.lexists(save)):
        raise ReplayError(f"--save={save} is there already, or no .npz file; name a new file, such as batch.npz")
    if save and os.path.realpath(save).startswith(os.path.realpath(run.directory) + os.sep):
        raise ReplayError(f"--save={save} is in the run directory, which a replay does not change; name another place")


def report_of(directory: str) -> RunReport:
    """Returns the `run.json` of a training.

    Args:
      directory: the run directory.

    Raises:
      UsageError: if it cannot be read.
    """
    run = RunDir(directory)
    if report := run.report():
        return report
    path = run.report_path()
    sweep = "; a trial of a sweep is a folder in its directory" if is_sweep(directory) else ""
    raise ReplayError(f"{path} cannot be read; name the run directory of a training{sweep}")


def start_of(report: RunReport, directory: str, number: int = 0) -> tuple[list[str], list[str], str]:
    """Returns how a run was started: (the arguments of Python, the program's, its working directory).

    What is started is what somebody has written into `run.json`. So only a file or a module is, as looplib notes them,
    which does not come with the run directory, and only if the user owns that report.

    Args:
      report: its `run.json`.
      directory: the run directory.
      number: of the start; default the first.

    Raises:
      UsageError: if the report does not say how the run was started, or that program is not to be started.
    """
    if not -len(report.starts) <= number < len(report.starts):
        raise untold(directory, "a start of the run")
    start = report.starts[number]
    if start.program is None:
        raise ReplayError(
            f"the run in {directory} is of a Controller without launch.run, so that it has no command to repeat; "
            "make the script a binary (docs/first_trainer.md)"
        )
    arguments, folder = start.program.arguments, start.program.directory
    flags = without(start.command[1:], *_NOT_REPEATED)
    for name, value in (("command", start.command or None), ("arguments", arguments), ("directory", folder)):
        if value is None:
            raise untold(directory, f"{name!r}")
    if any(MASK in str(flag) for flag in flags):
        raise ReplayError(
            f"the command of the run in {directory} has a secret, which run.json masks; repeat it by hand"
        )
    if not (arguments and folder):
        raise ReplayError("the run was not started from a file or module, or its folder was removed; repeat it by hand")
    path = RunDir(directory).report_path()
    is_file = len(arguments) == 1 and os.path.isabs(arguments[0])
    is_module = len(arguments) == 2 and arguments[0] == "-m" and re.fullmatch(r"\w[\w.-]*", arguments[1])
    if not (is_file or is_module) or "\0" in "".join([*arguments, *flags, folder]):
        raise ReplayError(
            f"{path} names {' '.join(arguments)!r:.200} as the program; expected the absolute path of a file, or -m "
            "and a module, as looplib writes it; repeat the run by hand"
        )
    own = os.path.realpath(directory)
    if os.path.commonpath([own, os.path.realpath(arguments[0] if is_file else folder)]) == own:
        raise ReplayError(
            f"{path} names a program in the run directory itself, which may have come with it; move the program to "
            "another place and start it there by hand"
        )
    if (owner := os.stat(path).st_uid) != os.geteuid():
        raise ReplayError(
            f"{path} belongs to the user of number {owner}, and says what is started; look at its command, and copy "
            "the run directory (cp -r) to make it yours"
        )
    return arguments, flags, folder


def command_of(report: RunReport, directory: str, number: int = 0) -> CommandLine:
    """Returns the command of a start of a run, for another --model_dir after it.

    Args:
      report: its `run.json`.
      directory: the run directory, whose settings the command takes.
      number: of the start; default the first.

    Raises:
      UsageError: if the report does not say how the run was started.
    """
    arguments, flags, folder = start_of(report, directory, number)
    if os.path.exists(kept := os.path.join(directory, CONFIG)):  # its sources may have changed since
        flags = [*without(flags, "config_file", "experiment"), f"--config_file={kept}"]
    return CommandLine([sys.executable, *arguments, *flags], folder)


def untold(directory: str, missing: str) -> UsageError:
    """Returns the error for a report that does not say how the run was started; `missing` says what it lacks."""
    return ReplayError(
        f"{RunDir(directory).report_path()} does not say how the run was started: {missing} is missing in it; name the "
        "directory of a training by this version of looplib"
    )


def refuse_several_processes(report: RunReport, directory: str, cure: str) -> None:
    """Raises `UsageError` for a run of several workers, or with parameter servers.

    Args:
      report: its `run.json`.
      directory: the run directory.
      cure: what to do, as the end of the sentence.
    """
    strategy = report.strategy
    if strategy.startswith(("MultiWorker", "ParameterServer")):
        raise ReplayError(f"the run in {directory} had several processes ({strategy:.200}); {cure}")


def has_checksums(directory: str) -> bool:
    """Returns whether the metrics of a run have checksums of the examples."""
    return any(CHECKSUM in record.values for record in RunDir(directory).records())


class Recorded:
    """A run of one process, as its directory has it.

    Args:
      directory: the run directory, which is only read.

    Attributes:
      directory: its absolute path.
      report: its `run.json`.

    Raises:
      UsageError: if it is no run, or one of several processes.
    """

    def __init__(self, directory: str) -> None:
        self.directory = os.path.abspath(directory)
        self.report = report_of(self.directory)
        refuse_several_processes(
            self.report, self.directory, "replay, diff and rerun --from start one; name a run of one process"
        )

    def checkpoints(self) -> list[Commit]:
        """Returns the committed checkpoints, newest first."""
        return commits.committed(os.path.join(self.directory, "checkpoints"))

    @property
    def starts(self) -> list[StartEntry]:
        """What the report says of each start."""
        return self.report.starts

    def begins(self) -> list[int]:
        """Returns the step that each start of the run was restored at."""
        return [start.restored_step or 0 for start in self.starts]

    def start_that_did(self, step: int) -> int:
        """Returns the number of the start that trained a step: the last one that was restored below it."""
        return max([number for number, begin in enumerate(self.begins()) if begin < step], default=0)

    def refuse_beyond(self, step: int) -> None:
        """Refuses a step that the run has not trained.

        A run that was killed or failed, or still runs, has gone on after its last report, at most to the next one.

        Args:
          step: the step.

        Raises:
          UsageError: if the step lies behind the last one of a run that has ended, or behind the next report.
        """
        seen = read_status(self.directory)
        if seen.step is None:
            return
        ended = seen.state in ("done", "preempted")
        last = seen.step
        if not ended:
            between = self.report.flags.get("steps_per_loop")
            if whole(between) is None:
                return
            steps = [record.step for record in RunDir(self.directory).records(voided=True).tail()]
            last = max([last, *steps, *(done.step for done in self.checkpoints())]) + between
            last = min(last, seen.end) if seen.end and seen.end > 0 else last
        if step > last:
            how = f"ended at step {last}" if ended else f"is known up to step {seen.step} ({seen.state})"
            raise ReplayError(f"--step is {step}, but the run {how}; expected a step of 1 to {last}")
