"""One run of a trial: its process, started again from its checkpoints until it is done, and its metrics."""

import dataclasses
import fcntl
import math
import os
import signal
import subprocess
import time
from collections.abc import Sequence

import optuna

from looplib.errors import EXIT_PREEMPTED, EXIT_STALLED, UsageError
from looplib.extras.sweep.study import Plan
from looplib.extras.tools import children
from looplib.extras.tools.runs import saved_step
from looplib.report.records import read_metrics

_IDLE_STARTS = 5  # in a row that saved nothing new, after which a run that is killed again and again has failed
_GRACE = 30.0  # seconds that a process has to save and end


@dataclasses.dataclass
class Job:
    """A run of a trial.

    Attributes:
      trial: the trial.
      seed: which of its seeds.
      folder: the run directory.
      command: what to start.
      stopped: when it was asked to end because it is hopeless or another run of its trial failed; None if not.
    """

    trial: optuna.Trial
    seed: int
    folder: str
    command: Sequence[str]
    stopped: float | None = None
    _process: subprocess.Popen | None = None
    _found: int = 0
    _idle: int = 0
    _seen: tuple[int, int] = (0, 0)

    def start(self) -> bool:
        """Starts the process; returns False if one of an earlier start has not ended yet.

        Raises:
          UsageError: if it cannot be started.
        """
        os.makedirs(os.path.dirname(self.folder), exist_ok=True)
        with open(f"{self.folder}.log", "ab") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held by whatever has the log as its output
            except BlockingIOError:
                return False
            self._found = saved_step(self.folder)
            self._process = children.start(self.command, log)
        return True

    def poll(self) -> int | None:
        """Returns how the process ended; None while it runs."""
        if self.stopped is not None and time.monotonic() > self.stopped + _GRACE:
            self.kill()
        return self._process.poll()

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
        if code >= 0 and code not in (EXIT_PREEMPTED, EXIT_STALLED):
            return False
        self._idle = 0 if saved_step(self.folder) > self._found else self._idle + 1
        return self._idle < _IDLE_STARTS

    def failure(self, code: int) -> str:
        """Returns the last line of a run that failed."""
        with open(f"{self.folder}.log", "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 8192))
            lines = log.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        how = f"killed by signal {-code}, {_IDLE_STARTS} times without a new checkpoint" if code < 0 else f"code {code}"
        return f"{last[:300]} ({how})" if last else how

    def curve(self, metric: str) -> dict[int, float]:
        """Returns the values of a metric so far by step; nothing if the file has not changed since the last call."""
        path = os.path.join(self.folder, "metrics.jsonl")
        try:
            status = os.stat(path)
        except FileNotFoundError:
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
    """Returns the values of a metric by step, from a run directory; NaN where it was not finite."""
    split, _, name = metric.partition("/")
    records = (one for one in read_metrics(os.path.join(folder, "metrics.jsonl")) if one["split"] == split)
    return {one["step"]: math.nan if one[name] is None else float(one[name]) for one in records if name in one}


def result(folder: str, plan: Plan) -> float:
    """Returns the value of a run that a sweep compares: the last one of its metric, or the best.

    Raises:
      UsageError: if the run has none, or it is not finite.
    """
    metric, found = plan.metric, curve(folder, plan.metric)
    if not found:
        records = read_metrics(os.path.join(folder, "metrics.jsonl"))
        names = sorted({f"{one['split']}/{name}" for one in records for name in one if name not in ("step", "split")})
        raise UsageError(f"the run has no metric {metric}; name one with --metric: {', '.join(names) or 'it has none'}")
    values = [found[max(found)]] if plan.value == "last" else list(found.values())
    if finite := list(filter(math.isfinite, values)):
        return max(finite) if plan.goal == "max" else min(finite)
    raise UsageError(f"{metric} is not finite{' at the end' if plan.value == 'last' else ''}")
