"""A sweep: its trials are started, watched and stopped, and their results written as text and CSV."""

import collections
import contextlib
import csv
import dataclasses
import errno
import io
import json
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from typing import NoReturn

import optuna
from optuna.trial import FrozenTrial, TrialState

from looplib.base import console, files, folders
from looplib.base.console import printable
from looplib.base.messages import with_cure
from looplib.commands.check import say
from looplib.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, SweepError, UsageError
from looplib.masks import masked, masked_text
from looplib.processes.child import Signals
from looplib.run.lock import LockKind, RunLock, acquire
from looplib.run.metric_names import best_first, mode_of
from looplib.run.report import strict_json
from looplib.run.sweep_results import RESULTS, TRIALS, SweepResults, TrialResult
from looplib.sweep import jobs, space
from looplib.sweep.jobs import Job
from looplib.sweep.space import Parameter
from looplib.sweep.study import (
    GRACE,
    STORAGE_ERRORS,
    Database,
    Study,
    SweepPlan,
    cause_of,
    deviation,
    error,
    name_of,
    values,
)

_STATES = {TrialState.COMPLETE: "done", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
_FEWEST_TRIALS = 4  # of which importances say something
Cell = str | int | float | None


def ranked(trials: Sequence[FrozenTrial], goal: str) -> list[FrozenTrial]:
    """Returns the trials that have a result, the best first.

    Args:
      trials: all trials.
      goal: "max" or "min".
    """
    done = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    return best_first(done, lambda trial: trial.value, goal)


def write(directory: str, plan: SweepPlan, parameters: Sequence[Parameter], trials: Sequence[FrozenTrial]) -> None:
    """Writes results.csv, results.txt and results.json into a sweep's directory, and prints the table.

    Args:
      directory: the sweep's.
      plan: what it does.
      parameters: what it searches.
      trials: all trials.
    """
    if not trials:
        return
    best = ranked(trials, plan.goal)
    in_order = [*best, *(trial for trial in trials if trial not in best)]
    rows = _rows(plan, parameters, in_order)
    found = SweepResults(
        plan.compared,
        plan.goal,
        [TrialResult(name_of(trial), plan.result_of(trial)) for trial in in_order],
        *_importances(best, len(trials)),
    )
    files.write_whole(os.path.join(directory, RESULTS), json.dumps(strict_json(found), indent=2))
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    files.write_whole(os.path.join(directory, "results.csv"), text.getvalue().encode(errors="replace"))
    table = _aligned(rows)
    files.write_whole(os.path.join(directory, "results.txt"), table)
    say(table.rstrip())
    if best:
        settings = " ".join(f"{flag}={value}" for flag, value in best[0].params.items())
        say(f"best: {name_of(best[0])}, {plan.compared} {best[0].value:.6g} {settings}")
    say(f"results.csv and results.txt are in {directory}")


def _importances(done: Sequence[FrozenTrial], count: int) -> tuple[dict[str, float], str]:
    """Returns how much each setting mattered, by PED-ANOVA (Watanabe et al., 2023), the largest first; or why not.

    Args:
      done: the trials that have a result, the best first.
      count: of all trials.
    """
    if len(done) < _FEWEST_TRIALS:
        needed = f"{_FEWEST_TRIALS} are needed to say which setting mattered"
        return {}, f"{len(done)} of {count} trials {'has' if len(done) == 1 else 'have'} a result, and {needed}"
    if done[0].value == done[-1].value:
        return {}, f"all {len(done)} trials with a result have the same, so that no setting mattered"
    study = optuna.create_study(direction="maximize" if done[0].value > done[-1].value else "minimize")
    study.add_trials(done)
    shares = optuna.importance.get_param_importances(study, evaluator=optuna.importance.PedAnovaImportanceEvaluator())
    return {name.lstrip("-"): share for name, share in shares.items()}, ""


def _rows(plan: SweepPlan, parameters: Sequence[Parameter], trials: Sequence[FrozenTrial]) -> list[list[Cell]]:
    several = plan.seeds > 1
    names = [one.flag.lstrip("-") for one in parameters]
    seeds = [f"seed {seed}" for seed in range(plan.seeds)] if several else []
    rows: list[list[Cell]] = [["trial", "state", plan.compared, *["deviation"] * several, *seeds, *names, "error"]]
    for trial in trials:
        known = values(trial)
        row: list[Cell] = [name_of(trial), _STATES.get(trial.state, "not ended"), plan.result_of(trial)]
        if several:
            row += [deviation(trial), *(known.get(seed) for seed in range(plan.seeds))]
        row += [trial.params.get(one.flag) for one in parameters]
        rows.append([*row, error(trial)])
    return rows


def _aligned(rows: Sequence[Sequence[Cell]]) -> str:
    used = [column for column in range(len(rows[0])) if any(row[column] not in (None, "") for row in rows[1:])]
    short = [[_short(row[column]) for column in used] for row in rows]
    widths = [max(len(row[column]) for row in short) for column in range(len(used))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in short)
    return "\n".join(lines) + "\n"


def _short(cell: Cell) -> str:
    return "" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else printable(str(cell))


_LOCKED = LockKind("directory of a sweep", "use another --dir", "sweep.lock")
_TICK = 0.1
_PAUSE = 1.0  # seconds before a database that does not answer is asked again
_PATIENCE = GRACE / 2  # seconds; the other half is for runs to be saved before another process takes them
# What the machine is short of, so that a run which ends with it in its last line is no failure of its trial.
_OF_THE_MACHINE = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO))
_LEAST_SPACE = 1 << 20  # bytes
_WITHOUT_VALUE = 3  # trials: if the first ones end so, the command or the metric is wrong, and the others would be too


def sweep(directory: str, plan: SweepPlan, parallel: int, trials: int | None, database: Database | None = None) -> int:
    """Runs a sweep, or what is left of it.

    Args:
      directory: for the run directories, the results, and the trials if there is no database.
      plan: what it does.
      parallel: how many runs at a time.
      trials: how many configurations; default all points of a grid.
      database: has the trials of a sweep that several processes run; default a file that is this process's alone.

    Returns:
      The exit code: `EXIT_DONE`, `EXIT_FAILED` if no trial has a result, or `EXIT_PREEMPTED` if a signal ended it.

    Raises:
      UsageError: for bad input.
    """
    _check(directory, plan, trials)
    try:
        plan = dataclasses.replace(plan, goal=mode_of("the sweep", plan.metric, plan.goal))
    except UsageError:
        raise SweepError(
            f"--metric is {plan.metric!r}, and the name does not imply whether higher or lower is better; add "
            "--goal=max or --goal=min"
        ) from None
    fixed, parameters = space.parse(plan.command)
    with console.guarded(), Signals() as signals, contextlib.ExitStack() as held:
        directory = os.path.abspath(directory)
        held.enter_context(_sentences(database.shown if database else os.path.join(directory, TRIALS)))
        folders.make_folder(directory)
        lock = None
        if not database:
            lock = acquire(directory, _give_up, _LOCKED)
            held.callback(lock.release)
            folders.remove_unfinished(directory, 0.0)  # of sweeps that were killed, as this one has the directory
        study = Study(directory, plan, parameters, trials, database)
        held.callback(study.hand_back)
        if trials and trials > study.limit:
            say(f"--trials is {trials:,}, and the command has {study.limit:,} combinations: each is tried once")
        finished = _Sweep(directory, lock, plan, fixed, study, parallel).run(signals)
        if finished or not database:  # else older results might replace those of another process
            write(directory, plan, parameters, trials_made := study.trials())
    if not finished:
        say(f"sweep: ended by a signal; all runs are saved; run the same command to resume (code {EXIT_PREEMPTED})")
        return EXIT_PREEMPTED
    return EXIT_DONE if ranked(trials_made, plan.goal) else EXIT_FAILED


def _check(directory: str, plan: SweepPlan, trials: int | None) -> None:
    if files.is_remote(directory):
        raise SweepError(
            f"--dir is {masked_text(directory)}; expected a local directory, or one that machines share; give "
            "--storage too if several of them are to run the sweep"
        )
    if not plan.command:
        raise SweepError(
            "the command is missing; write it after --, as in -- python -m trainers.my_trainer --config.a=1,2"
        )
    for before, argument, shown in zip(["", *plan.command], plan.command, masked(plan.command)):
        if argument != shown:
            flag = argument if argument.startswith("-") and "=" in argument else before  # not a secret that begins so
            named = f"in {flag.partition('=')[0]}" if flag.startswith("-") else "in an argument"
            raise SweepError(
                f"the command has a secret {named}, which sweep.db and the results would hold; give it to the program "
                "in an environment variable or in a file, and leave out the flag"
            )
    if trials is None and plan.search != "grid":
        raise SweepError(f"--search={plan.search} has no end of its own; give a number of trials (--trials=20)")
    if plan.prune != "none" and plan.seeds > 1:
        raise SweepError("--prune compares single runs, and --seeds ranks means of several; leave out one of them")
    if not all(plan.metric.partition("/")):
        raise SweepError(f"--metric is {plan.metric!r}; expected SPLIT/NAME, such as eval/accuracy")
    for argument in plan.command:
        name = argument.lstrip("-").split("=")[0] if argument.startswith("-") else ""
        if name in ("model_dir", "local_dir") or (name == "seed" and plan.seeds):
            raise SweepError(f"the command {shlex.join(plan.command)} has --{name}, which the sweep sets; remove it")


@contextlib.contextmanager
def _sentences(database: str) -> Iterator[None]:
    """Says in a sentence what cannot be read or written while the block runs."""
    try:
        yield
    except OSError as error:
        raise SweepError(f"{with_cure(error, 'mend that')}; then the same command resumes the sweep") from error
    except STORAGE_ERRORS as error:
        raise SweepError(
            f"{database} cannot be read or written ({cause_of(error)}); mend that, and run "
            "the same command: no trial that has ended is lost, and the others resume"
        ) from error


def _give_up() -> NoReturn:
    """Refuses the directory to another sweep of this process."""
    raise SweepError("a sweep runs in this process; wait until it has ended")


@dataclasses.dataclass
class _Sweep:
    """The runs of a sweep.

    Attributes:
      directory: where it is.
      lock: the lock of the directory, which this process holds; None if several processes run the sweep.
      plan: what it does.
      fixed: the arguments that all runs have.
      study: its trials.
      parallel: how many runs at a time.
    """

    directory: str
    lock: RunLock | None
    plan: SweepPlan
    fixed: Sequence[str]
    study: Study
    parallel: int
    _waiting: collections.deque[Job] = dataclasses.field(default_factory=collections.deque)
    _running: list[Job] = dataclasses.field(default_factory=list)
    _ended: set[int] = dataclasses.field(default_factory=set)  # trials that failed in this start
    _without_value: int = 0  # trials that ended without any value of the metric

    def run(self, signals: Signals) -> bool:
        """Runs all trials; returns whether they have ended, so that False says that a signal came."""
        if before := self.study.trials():
            ended = sum(trial.state.is_finished() for trial in before)
            others = "were begun" if self.study.shared else "resume"
            say(f"trials that have ended: {ended}; that {others}: {len(before) - ended}")
        answered = time.monotonic()
        try:
            while not signals.came:
                if self.lock:
                    self.lock.check()
                try:
                    if self._turn():
                        return True
                    answered = time.monotonic()
                    signals.wait(_TICK)
                except (*STORAGE_ERRORS, TimeoutError):
                    if not self.study.shared or time.monotonic() > answered + _PATIENCE:
                        raise
                    signals.wait(_PAUSE)
            return False
        finally:
            self._stop(signals)

    def _turn(self) -> bool:
        """Looks at all runs, and starts others; returns whether all trials have ended.

        It may be called again if the storage does not answer in the middle.
        """
        self._drop(self.study.beat())
        for job in [*self._running]:
            self._look_at(job)
        self._fill()
        return not self._running and not self._waiting and self.study.is_over

    def _drop(self, lost: set[int]) -> None:
        """Ends the runs of trials that another process has taken."""
        for job in [job for job in (*self._running, *self._waiting) if job.trial.number in lost]:
            job.kill()
            (self._running if job in self._running else self._waiting).remove(job)
            self._say(job, "another process has taken the trial, because this one gave no sign of life for long")

    def _stop(self, signals: Signals) -> None:
        """Lets all runs save and end; a second signal ends them at once."""
        try:
            for job in self._running:
                job.stop()
            while self._running and len(signals.came) < 2:
                time.sleep(_TICK)
                self._running = [job for job in self._running if job.poll() is None]
        finally:
            for job in self._running:
                job.kill()

    def _add(self, trial: optuna.Trial) -> None:
        """Queues the runs of a trial that have no result yet."""
        known = values(trial)
        for seed in range(max(1, self.plan.seeds)):
            if seed not in known:
                parts = [name_of(trial), *([f"seed-{seed}"] if self.plan.seeds else [])]
                folder = os.path.join(self.directory, *parts)
                command = jobs.command_of(self.fixed, trial, seed if self.plan.seeds else None, folder)
                self._waiting.append(Job(trial, seed, self.directory, folder, command))

    def _fill(self) -> None:
        """Starts runs up to the number that may run at a time."""
        while len(self._running) < self.parallel:
            job = next((one for one in self._waiting if one.waits_until <= time.monotonic()), None)
            if job is not None:
                job.start()
                self._waiting.remove(job)
                self._running.append(job)
            elif trial := self.study.next():
                self._add(trial)
            else:
                break

    def _look_at(self, job: Job) -> None:
        code = job.poll()
        if self.plan.prune != "none" and job.stopped is None and (found := job.curve(self.plan.metric)):
            if self.study.is_hopeless(job.trial, found):
                job.stop()
        if code is None:
            return
        if job.trial.number not in self._ended:
            with self.study.alone():
                if not self.study.has(job.trial):
                    self._drop({job.trial.number})
                    return
                self._note_end(job, code)
        self._running.remove(job)

    def _note_end(self, job: Job, code: int) -> None:
        """Notes how a run has ended, or queues it to be started again."""
        if code == EXIT_DONE:
            try:
                value = jobs.result(job.folder, self.plan)
            except UsageError as error:
                job.note_end("failed", f"its trial has failed: {error}", self.plan)
                self._fail(job, str(error))
                return
            self.study.note(job.trial, job.seed, value)
            job.note_end("done", f"compared by {self.plan.compared} {value:.6g}", self.plan)
            self._say(job, f"{self.plan.compared} {value:.6g}")
        elif job.stopped is not None:
            trial = self.study.prune(job.trial)
            value = self.plan.result_of(trial)
            why = "not a finite number" if value is None else f"{value:.6g}, and other trials were better"
            outcome = f"pruned at step {trial.last_step}: {self.plan.compared} was {why} there"
            job.note_end("pruned", outcome, self.plan)
            self._say(job, outcome)
        elif job.may_run_again(code):
            if job.is_locked():
                self._say(job, f"waits: {job.failure(code)}")
            self._waiting.appendleft(job)
        else:
            self._fail_by_its_own(job, job.failure(code))

    def _fail_by_its_own(self, job: Job, sentence: str) -> None:
        """Marks a trial as failed, unless the machine failed it: then the sweep ends, and the trial resumes later.

        Raises:
          UsageError: if the machine failed it.
        """
        space = os.statvfs(self.directory)
        full = space.f_bavail * space.f_frsize < _LEAST_SPACE
        if full or any(words in sentence for words in _OF_THE_MACHINE):
            raise SweepError(
                f"a run of the sweep ended in {job.folder}: {console.printable(sentence)}"
                f"{', and the disk is full' if full else ''}; mend that, and run the same command: no trial that has "
                "ended is lost, and the others resume"
            )
        self._fail(job, sentence)

    def _fail(self, job: Job, sentence: str) -> None:
        """Marks a trial as failed, and ends its other runs."""
        job.note_failure(sentence)
        self.study.fail(job.trial, sentence)
        self._ended.add(job.trial.number)
        self._say(job, f"failed: {sentence}")
        self._without_value += not jobs.curve(job.folder, self.plan.metric)
        self._waiting = collections.deque(one for one in self._waiting if one.trial.number != job.trial.number)
        for other in self._running:
            if other.trial.number == job.trial.number:
                other.stop()
        has_result = bool(ranked(self.study.trials(), self.plan.goal))
        if self._without_value == len(self._ended) == _WITHOUT_VALUE and not has_result:
            say(
                f"sweep: {_WITHOUT_VALUE} trials ended without a value of {self.plan.metric}, and none with one, so "
                "no more are started; mend the program or the command (another command needs another --dir), or run "
                "the same command again, if only these settings fail"
            )
            self.study.limit = 0

    def _say(self, job: Job, text: str) -> None:
        settings = " ".join(f"{flag}={value}" for flag, value in job.trial.params.items())
        text = console.printable(text)
        say(f"{os.path.relpath(job.folder, self.directory)}: {text}{f' ({settings})' if settings else ''}")
