"""One run of a trial: its process, started again from its checkpoints until it is done, and its metrics."""

import contextlib
import dataclasses
import fcntl
import math
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence

import optuna

from looplib import files, folders
from looplib.checkpoint import lock
from looplib.console import printable
from looplib.errors import EXIT_PREEMPTED, EXIT_STALLED, SweepError
from looplib.extras.page import values
from looplib.extras.sweep.study import SweepPlan
from looplib.extras.tools import children
from looplib.extras.tools.recorded_run import without
from looplib.extras.tools.runs import last_lines, saved_step, say
from looplib.messages import gist, join_names
from looplib.report import run_json
from looplib.report.records import each_record
from looplib.task.metric_names import best_first

_IDLE_STARTS = 5  # in a row that saved nothing new, after which a run that is killed again and again has failed
_GRACE = 30.0  # seconds that a process has to save and end
_GRACE_OF_A_STORE = 120.0  # the same with an upload
_GRACE_OF_A_LOCK = 120.0  # until a shared file system frees the locks of a machine that vanished
# How the last line of a run ends that could not use its store, which is no failure of its trial.
OF_THE_STORE = ("(StoreError)", "(LockedError)")
_MOST_NAMES, _LONGEST = 20, 300  # in a sentence
_SAID_AFTER = 5.0  # seconds of waiting for a process of an earlier start


@dataclasses.dataclass
class Job:
    """A run of a trial.

    Attributes:
      trial: the trial.
      seed: which of its seeds.
      directory: the sweep's.
      folder: the run directory, below it.
      command: what to start.
      stored: whether the run is in an object store.
      shared: whether another machine may have had the run.
      kept: the step of the newest checkpoint there, when the sweep was started.
      noted: what `Place.has` tells whether it may be started.
      stopped: when it was asked to end because it is hopeless or another run of its trial failed; None if not.
    """

    trial: optuna.Trial
    seed: int
    directory: str
    folder: str
    command: Sequence[str]
    stored: bool = False
    shared: bool = False
    kept: int = 0
    noted: int = 0
    stopped: float | None = None
    _process: subprocess.Popen | None = None
    _found: int = 0
    _idle: int = 0
    _seen: tuple[int, int] = (0, 0)
    _held: float | None = None
    _said: bool = False

    def start(self) -> bool:
        """Starts the process; returns False if one of an earlier start has not ended yet.

        Raises:
          UsageError: if it cannot be started.
        """
        folders.make_folder(self.directory, *os.path.relpath(self.folder, self.directory).split(os.sep)[:-1])
        folders.check_folder(self.folder)
        with files.open_to_append(f"{self.folder}.log") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held by whatever has the log as its output
            except BlockingIOError:
                if self._must_wait():
                    return False
            except OSError:  # a file system without locks
                pass
            self._found = max(saved_step(self.folder), self.kept)
            self._process = children.start(self.command, log)
        return True

    def _must_wait(self) -> bool:
        """Returns whether a process that has the log may be the run; False once it can only be a left-over."""
        now = time.monotonic()
        self._held = now if self._held is None else self._held
        if now > self._held + _SAID_AFTER and not self._said:
            self._said = True
            say(f"{self.folder}: waits for a process of an earlier start, which still has {self.folder}.log open")
        holder = lock.holder(self.folder)
        grace = _GRACE_OF_A_LOCK if self.shared else _GRACE
        return now < self._held + grace or bool(holder and holder.holds)

    def poll(self) -> int | None:
        """Returns how the process ended; None while it runs."""
        grace = _GRACE_OF_A_STORE if self.stored else _GRACE
        if self.stopped is not None and time.monotonic() > self.stopped + grace:
            self.kill()
        return children.poll(self._process)

    def stop(self) -> None:
        """Asks the process to save and end; it is killed if that takes long."""
        if self.stopped is None and self._process.poll() is None:
            self.stopped = time.monotonic()
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the process and its children."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def may_run_again(self, code: int) -> bool:
        """Returns whether the command is to be started again after this end, from its newest checkpoint."""
        if code >= 0 and code not in (EXIT_PREEMPTED, EXIT_STALLED) and not self.lacks_its_store():
            return False
        self._idle = 0 if saved_step(self.folder) > self._found else self._idle + 1
        return self._idle < _IDLE_STARTS

    def lacks_its_store(self) -> bool:
        """Returns whether the process could not use the store or the directory that the run is in."""
        return (self.stored or self.shared) and self._last_line().endswith(OF_THE_STORE)

    def _last_line(self) -> str:
        return next((line.strip() for line in reversed(last_lines(self.folder)) if line.strip()), "")

    def failure(self, code: int) -> str:
        """Returns the last line of a run that failed."""
        last = self._last_line()
        how = f"killed by signal {-code}, {_IDLE_STARTS} times without a new checkpoint" if code < 0 else f"code {code}"
        return f"{last[:300]} ({how})" if last else how

    def curve(self, metric: str) -> dict[int, float]:
        """Returns the values of a metric so far by step; nothing if the file has not changed since the last call."""
        path = os.path.join(self.folder, "metrics.jsonl")
        try:
            status = os.stat(path)
        except OSError:
            return {}
        if self._seen == (status.st_mtime_ns, status.st_size):
            return {}
        self._seen = status.st_mtime_ns, status.st_size
        return curve(self.folder, metric)


def command_of(fixed: Sequence[str], trial: optuna.Trial, seed: int | None, place: Sequence[str]) -> list[str]:
    """Returns the command of a run.

    Args:
      fixed: the arguments that all runs have.
      trial: has the others.
      seed: to be set; None leaves the command's own.
      place: flags with the run directory.
    """
    seeds = [] if seed is None else [f"--seed={seed}"]
    return [*fixed, *(f"{flag}={value}" for flag, value in trial.params.items()), *seeds, *place]


def curve(folder: str, metric: str) -> dict[int, float]:
    """Returns the values of a metric by step, from a run directory; NaN where it was not a finite number."""
    split, _, name = metric.partition("/")
    found = {}
    with contextlib.suppress(OSError):  # `result` says what is wrong
        for one in each_record(os.path.join(folder, "metrics.jsonl")):
            if one["split"] == split and name in one and (step := values.whole(one["step"])) is not None:
                value = values.number(one[name])
                found[step] = math.nan if value is None else value
    return found


def result(folder: str, plan: SweepPlan) -> float:
    """Returns the value of a run that a sweep compares: the last one of its metric, or the best.

    Raises:
      UsageError: if the run has none, or it is not a finite number.
    """
    path, metric, found = os.path.join(folder, "metrics.jsonl"), plan.metric, curve(folder, plan.metric)
    if not found:
        try:
            files.open_regular(path).close()
            names = {f"{one['split']}/{name}" for one in each_record(path) for name in one.keys() - {"step", "split"}}
        except FileNotFoundError:
            names = set()
        except (OSError, files.NotRegularError) as error:
            raise SweepError(f"{path} cannot be read ({gist(error)})") from error
        shown = join_names(sorted(names), most=_MOST_NAMES)
        raise SweepError(f"the run has no metric {metric}; name one with --metric: {shown or 'it has none'}")
    compared = [found[max(found)]] if plan.value == "last" else list(found.values())
    if scores := best_first(compared, lambda value: value, plan.goal):
        return scores[0]
    raise SweepError(f"{metric} is not a finite number{' at the end' if plan.value == 'last' else ''}")


def refuse_other_run(folder: str, command: Sequence[str], kept: int) -> None:
    """Refuses to continue a run of an earlier sweep in this directory, whose database is gone, with other settings.

    Args:
      folder: the run directory, which may not be there.
      command: what would continue it.
      kept: the step of the run's newest checkpoint in a store.

    Raises:
      UsageError: if the run was started by another command, or does not say by which.
    """
    if not max(saved_step(folder), kept):
        return
    try:
        flags = run_json.read_report(run_json.path_of(folder, trains=True))["starts"][-1]["command"][1:]
        before = without(list(map(str, flags)), "model_dir", "local_dir")
    except (LookupError, TypeError):
        before = None
    now = without(command, "model_dir", "local_dir")
    if before is None or now[len(now) - len(before) :] != before:
        found = shlex.join(before)[:_LONGEST] if before is not None else "nobody can say by what"
        raise SweepError(
            f"{folder} has a run of an earlier sweep, without whose sweep.db it can only be continued with equal "
            f"settings: it was started by {printable(found)}; move it away, or use another --dir"
        )
