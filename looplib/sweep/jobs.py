"""One run of a trial: its process, started again from its checkpoints until it is done, and its metrics."""

import dataclasses
import math
import os
import signal
import textwrap
import time
from collections.abc import Sequence

import optuna

from looplib.base import files, folders
from looplib.base.messages import gist, join_names
from looplib.commands.check import saved_step
from looplib.errors import EXIT_PREEMPTED, EXIT_STALLED, SweepError
from looplib.processes.child import Child, CommandLine, last_lines
from looplib.report.page.html import write_of_run
from looplib.run.directory import RunDir
from looplib.run.report import RunReport, as_text
from looplib.sweep.study import SweepPlan

_IDLE_STARTS = 5  # in a row that saved nothing new, after which a run that is killed again and again has failed
_GRACE = 30.0  # seconds that a process has to save and end
_PAUSE = 20.0  # seconds before a run is started again whose directory another process has
_MOST_NAMES, _LONGEST_LINE = 20, 1000  # in a sentence


@dataclasses.dataclass
class Job:
    """A run of a trial.

    Attributes:
      trial: the trial.
      seed: which of its seeds.
      directory: the sweep's.
      folder: the run directory, below it.
      command: what to start.
      waits_until: the time before which it is not to be started again.
      stopped: when it was asked to end because it is hopeless or another run of its trial failed; None if not.
    """

    trial: optuna.Trial
    seed: int
    directory: str
    folder: str
    command: Sequence[str]
    stopped: float | None = None
    waits_until: float = 0.0
    _process: Child | None = None
    _found: int = 0
    _idle: int = 0
    _seen: tuple[int, int] = (0, 0)

    def start(self) -> None:
        """Starts the process.

        Raises:
          UsageError: if it cannot be started.
        """
        folders.make_folder(self.directory, *os.path.relpath(self.folder, self.directory).split(os.sep)[:-1])
        folders.check_folder(self.folder)
        with files.open_to_append(f"{self.folder}.log") as log:
            self._found = saved_step(self.folder)
            self._process = Child(CommandLine(self.command), output=log)

    def poll(self) -> int | None:
        """Returns how the process ended; None while it runs."""
        if self.stopped is not None and time.monotonic() > self.stopped + _GRACE:
            self.kill()
        return self._process.poll()

    def stop(self) -> None:
        """Asks the process to save and end; it is killed if that takes long."""
        if self.stopped is None and self._process.poll() is None:
            self.stopped = time.monotonic()
            self._process.send(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the process and its children."""
        if self._process is not None:
            self._process.kill()

    def may_run_again(self, code: int) -> bool:
        """Returns whether the command is to be started again after this end, from its newest checkpoint."""
        if self.is_locked():
            self.waits_until = time.monotonic() + _PAUSE
            return True
        if code >= 0 and code not in (EXIT_PREEMPTED, EXIT_STALLED):
            return False
        self._idle = 0 if saved_step(self.folder) > self._found else self._idle + 1
        return self._idle < _IDLE_STARTS

    def note_end(self, status: str, outcome: str, plan: SweepPlan) -> None:
        """Writes what the sweep makes of the run into its `run.json` and page, and into its log if that says otherwise.

        Args:
          status: "done", "pruned" or "failed".
          outcome: a clause.
          plan: of the sweep, which compares runs by a metric.
        """
        run = RunDir(self.folder)
        if not (report := run.report()) or not report.starts:
            return
        agrees = report.status == status
        report.status = report.newest.status = status
        report.newest.outcome, report.objective = outcome, f"{plan.goal}:{plan.metric}"
        files.write_whole(run.report_path(), as_text(report))
        if not agrees:
            with files.open_to_append(f"{self.folder}.log") as log:
                log.write(f"looplib: {outcome}; the sweep does not resume it\n".encode(errors="replace"))
        write_of_run(self.folder)

    def note_failure(self, sentence: str) -> None:
        """Writes a `run.json` for a run that has failed before it had one, so that it is among the others."""
        path = RunDir(self.folder).report_path()
        if not os.path.lexists(path):
            folders.make_folder(*os.path.split(self.folder))
            settings = {flag.lstrip("-"): value for flag, value in self.trial.params.items()}
            report = RunReport(status="failed", error=sentence, flags=settings, command=[*self.command])
            files.write_whole(path, as_text(report))

    def is_locked(self) -> bool:
        """Returns whether the process ended because another one has its run directory, as of a killed sweep."""
        return self._last_line().endswith("(LockedError)")

    def _last_line(self) -> str:
        return next((line.strip() for line in reversed(last_lines(f"{self.folder}.log")) if line.strip()), "")

    def failure(self, code: int) -> str:
        """Returns the last line of a run that failed."""
        last = self._last_line()
        how = f"killed by signal {-code}, {_IDLE_STARTS} times without a new checkpoint" if code < 0 else f"code {code}"
        return f"{textwrap.shorten(last, _LONGEST_LINE, placeholder=' …')} ({how})" if last else how

    def curve(self, metric: str) -> dict[int, float]:
        """Returns the values of a metric so far by step; nothing if the file has not changed since the last call."""
        try:
            status = os.stat(RunDir(self.folder).records().path)
        except OSError:
            return {}
        if self._seen == (status.st_mtime_ns, status.st_size):
            return {}
        self._seen = status.st_mtime_ns, status.st_size
        return curve(self.folder, metric)


def command_of(fixed: Sequence[str], trial: optuna.Trial, seed: int | None, folder: str) -> list[str]:
    """Returns the command of a run.

    Args:
      fixed: the arguments that all runs have.
      trial: has the others.
      seed: to be set; None leaves the command's own.
      folder: the run directory.
    """
    seeds = [] if seed is None else [f"--seed={seed}"]
    return [*fixed, *(f"{flag}={value}" for flag, value in trial.params.items()), *seeds, f"--model_dir={folder}"]


def curve(folder: str, metric: str) -> dict[int, float]:
    """Returns the values of a metric by step, from a run directory; NaN where it was not a finite number."""
    try:
        found = RunDir(folder).records().curve(metric)
    except OSError:  # `result` says what is wrong
        return {}
    return {step: math.nan if value is None else value for step, value in found.items()}


def result(folder: str, plan: SweepPlan) -> float:
    """Returns the value of a run that a sweep compares: the last one of its metric, or the best.

    Raises:
      UsageError: if the run has none, or it is not a finite number.
    """
    records, metric, found = RunDir(folder).records(), plan.metric, curve(folder, plan.metric)
    if not found:
        try:
            files.open_regular(records.path).close()
            names = {f"{one.split}/{name}" for one in records for name in one.values}
        except FileNotFoundError:
            names = set()
        except (OSError, files.NotRegularError) as error:
            raise SweepError(f"{records.path} cannot be read ({gist(error)})") from error
        shown = join_names(sorted(names), most=_MOST_NAMES)
        raise SweepError(f"the run has no metric {metric}; name one with --metric: {shown or 'it has none'}")
    if (value := plan.value_of(found)) is not None:
        return value
    raise SweepError(f"{metric} is not a finite number{' at the end' if plan.value == 'last' else ''}")
