"""`python -m looplib sweep`: runs of one command with many settings, resumed after a kill at any moment."""

import collections
import contextlib
import dataclasses
import errno
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from typing import NoReturn

import optuna
from sqlalchemy.exc import SQLAlchemyError

from looplib import console, files, folders
from looplib.checkpoint.lock import RunLock, acquire
from looplib.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, SweepError, UsageError
from looplib.extras.sweep import jobs, results, space
from looplib.extras.sweep.database import Database
from looplib.extras.sweep.jobs import Job
from looplib.extras.sweep.place import FILE, LOCKED, Place, SharedPlace
from looplib.extras.sweep.space import Parameter
from looplib.extras.sweep.study import PRUNERS, SEARCHES, VALUES, Study, SweepPlan, cause_of, name_of, values
from looplib.extras.tools.children import Signals
from looplib.extras.tools.runs import saved_step, say
from looplib.masks import masked
from looplib.messages import with_cure
from looplib.task.metric_names import mode_of

_TICK = 0.1
_MOST_SEEDS = 10_000
# What the machine is short of, so that a run which ends with it in its last line is no failure of its trial.
_OF_THE_MACHINE = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO))
_LEAST_SPACE = 1 << 20  # bytes
_WITHOUT_VALUE = 3  # trials: if the first ones end so, the command or the metric is wrong, and the others would be too


def sweep(directory: str, plan: SweepPlan, parallel: int, trials: int | None, database: Database | None = None) -> int:
    """Runs a sweep, or what is left of it.

    Args:
      directory: for its database and the run directories; maybe a URL.
      plan: what it does.
      parallel: how many runs at a time.
      trials: how many configurations; default all points of a grid.
      database: that of a sweep on several machines; default one in the directory, for this machine alone.

    Returns:
      The exit code: `EXIT_DONE`, `EXIT_FAILED` if no trial has a result, or `EXIT_PREEMPTED` if a signal ended it.

    Raises:
      UsageError: for bad input.
    """
    _check(plan, parallel, trials)
    try:
        plan = dataclasses.replace(plan, goal=mode_of("the sweep", plan.metric, plan.goal))
    except UsageError:
        raise SweepError(
            f"--metric is {plan.metric!r}, and the name does not imply whether higher or lower is better; add "
            "--goal=max or --goal=min"
        ) from None
    fixed, parameters = space.parse(plan.command)
    with console.guarded(), Signals() as signals, contextlib.ExitStack() as held:
        place = _place_of(directory, signals, database)
        directory = place.directory
        held.enter_context(_sentences(database.shown if database else os.path.join(directory, FILE)))
        place.prepare()
        folders.make_folder(directory)
        lock = None
        if place.is_alone:
            lock = acquire(directory, _give_up, LOCKED)
            held.callback(lock.release)
        held.enter_context(place)
        if lock:
            folders.remove_unfinished(directory, 0.0)  # of sweeps that were killed, as this one has the directory
        study = _study_of(place, plan, parameters, database, signals)
        held.callback(study.hand_back)
        limit = trials if trials and (plan.search == "tpe" or trials <= study.size) else int(study.size)
        if trials and trials > limit:
            say(f"--trials is {trials:,}, and the command has {limit:,} combinations of values: each is tried once")
        finished = _Sweep(place, lock, plan, fixed, study, parallel, limit).run(signals)
        if finished or not database:  # else older results might replace those of another machine
            trials_made = study.all()
            place.gather()
            results.write(directory, plan, parameters, trials_made, place.shown)
    if not finished:
        say(f"sweep: ended by a signal; all runs are saved; run the same command to resume (code {EXIT_PREEMPTED})")
        return EXIT_PREEMPTED
    return EXIT_DONE if results.ranked(trials_made, plan.goal) else EXIT_FAILED


def _place_of(directory: str, signals: Signals, database: Database | None) -> Place:
    if not files.is_remote(directory):
        return (SharedPlace if database else Place)(os.path.abspath(directory))
    from looplib.extras.sweep import stored  # a local sweep needs nothing of stores

    kind = stored.SharedStoredPlace if database else stored.StoredPlace
    return kind(directory, lambda: len(signals.came))


def _study_of(
    place: Place, plan: SweepPlan, parameters: Sequence[Parameter], database: Database | None, signals: Signals
) -> Study:
    if database is None:
        return Study(place.directory, plan, parameters)
    from looplib.extras.sweep.shared import SharedStudy  # a sweep on one machine needs nothing of it

    return SharedStudy(database, place, plan, parameters, lambda: bool(signals.came))


def _check(plan: SweepPlan, parallel: int, trials: int | None) -> None:
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
    for name, options in (("search", SEARCHES), ("prune", PRUNERS), ("goal", ("max", "min", None)), ("value", VALUES)):
        if (value := getattr(plan, name)) not in options:
            raise SweepError(f"--{name} is {value!r}; expected one of {', '.join(filter(None, options))}")
    for name, value in (("parallel", parallel), ("trials", trials)):
        if value is not None and value < 1:
            raise SweepError(f"--{name} is {value}; expected at least 1")
    if not 0 <= plan.seeds <= _MOST_SEEDS:
        raise SweepError(f"--seeds is {plan.seeds}; expected 1 to {_MOST_SEEDS:,}, or 0 for the command's own seed")
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
    except (SQLAlchemyError, optuna.exceptions.OptunaError) as error:
        raise SweepError(
            f"{database} cannot be read or written ({cause_of(error)}); mend that, and run "
            "the same command: no trial that has ended is lost, and the others resume"
        ) from error


def _give_up() -> NoReturn:
    """Refuses the directory to another sweep of this process."""
    raise SweepError("a sweep runs in this process; wait until it has ended")


class _Sweep:
    """The runs of a sweep.

    Args:
      place: where it is.
      lock: the lock of the directory, which this process holds; None if it is for several machines.
      plan: what it does.
      fixed: the arguments that all runs have.
      study: its trials.
      parallel: how many runs at a time.
      limit: how many trials.
    """

    def __init__(
        self,
        place: Place,
        lock: RunLock | None,
        plan: SweepPlan,
        fixed: Sequence[str],
        study: Study,
        parallel: int,
        limit: int,
    ) -> None:
        self._place, self._directory, self._lock = place, place.directory, lock
        self._plan, self._fixed, self._study = plan, fixed, study
        self._parallel, self._limit = parallel, limit
        self._waiting: collections.deque[Job] = collections.deque()
        self._running: list[Job] = []
        self._ended: set[int] = set()  # trials that failed in this start
        self._without_value = 0  # trials that ended without any value of the metric

    def run(self, signals: Signals) -> bool:
        """Runs all trials; returns whether they have ended, so that False says that a signal came."""
        before = self._study.all()
        unfinished = self._study.unfinished()
        if before:
            ended = sum(trial.state.is_finished() for trial in before)
            left = f"that resume: {len(unfinished)}"
            if self._study.shared:
                left = f"that machines have begun: {len(before) - ended}"
            say(f"trials that have ended: {ended}; {left}")
        for trial in unfinished:
            if not self._study.end_if_complete(trial):
                self._add(trial)
        try:
            while not signals.came:
                if self._lock:
                    self._lock.check()
                self._place.check()
                self._fill()
                if not self._running and not self._waiting and self._study.is_over():
                    return True
                signals.wait(_TICK)
                self._drop(self._study.lost())
                for job in [*self._running]:
                    self._look_at(job)
            return False
        finally:
            self._stop(signals)

    def _drop(self, lost: set[int]) -> None:
        """Ends the runs of trials that another machine has taken."""
        for job in [job for job in (*self._running, *self._waiting) if job.trial.number in lost]:
            job.kill()
            (self._running if job in self._running else self._waiting).remove(job)
            self._say(job, "another machine has taken the trial, because this one gave no sign of life for long")

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
        folder = os.path.join(self._directory, name_of(trial))
        known, noted = values(trial), self._place.note()
        for seed in range(max(1, self._plan.seeds)):
            if seed not in known:
                place = os.path.join(folder, f"seed-{seed}") if self._plan.seeds else folder
                flags, kept = self._place.flags(place), self._place.take(place)
                command = jobs.command_of(self._fixed, trial, seed if self._plan.seeds else None, flags)
                if self._study.had_runs_before:
                    jobs.refuse_other_run(place, command, kept)
                at = self._place
                job = Job(trial, seed, self._directory, place, command, at.stored, at.shared, kept, noted)
                self._waiting.append(job)

    def _fill(self) -> None:
        """Starts runs up to the number that may run at a time."""
        held = []
        while len(self._running) < self._parallel:
            if not self._waiting and (trial := self._study.next(self._limit)):
                self._add(trial)
            if not self._waiting:
                break
            job = self._waiting.popleft()
            if not self._place.has(job.noted):
                held.append(job)
                break
            if job.start():
                self._running.append(job)
            else:  # a process of the sweep's last start is still ending
                held.append(job)
        self._waiting.extendleft(reversed(held))

    def _look_at(self, job: Job) -> None:
        code = job.poll()
        if self._plan.prune != "none":
            self._report(job)
        if code is None:
            return
        self._running.remove(job)
        trial = job.trial
        if trial.number in self._ended:
            return
        if code == EXIT_DONE:
            try:
                value = jobs.result(job.folder, self._plan)
            except UsageError as error:
                self._fail(job, str(error))
                return
            self._study.note(trial, job.seed, value)
            self._place.note()
            self._say(job, f"{self._plan.compared} {value:.6g}")
        elif job.stopped is not None:
            self._study.prune(trial)
            self._place.note()
            self._say(job, f"stopped at step {saved_step(job.folder)}: other trials were better there")
        elif job.may_run_again(code):
            job.noted = self._place.note()  # a store that did not take the run has to answer first
            self._waiting.appendleft(job)
        else:
            self._fail_by_its_own(job, job.failure(code))

    def _fail_by_its_own(self, job: Job, sentence: str) -> None:
        """Marks a trial as failed, unless the machine failed it: then the sweep ends, and the trial resumes later.

        Raises:
          UsageError: if the machine failed it.
        """
        space = os.statvfs(self._directory)
        full = space.f_bavail * space.f_frsize < _LEAST_SPACE
        if full or job.lacks_its_store() or any(words in sentence for words in _OF_THE_MACHINE):
            raise SweepError(
                f"a run of the sweep ended in {job.folder}: {console.printable(sentence)}"
                f"{', and the disk is full' if full else ''}; mend that, and run the same command: no trial that has "
                "ended is lost, and the others resume"
            )
        self._fail(job, sentence)

    def _report(self, job: Job) -> None:
        """Passes new metrics on to the pruner, and stops a hopeless run."""
        found = job.curve(self._plan.metric)
        if not found or job.stopped is not None:
            return
        known = self._study.all()[job.trial.number].intermediate_values
        for step in sorted(found.keys() - known.keys()):
            if step >= 0:
                job.trial.report(found[step], step)
        if max(found) >= max(known, default=0) and job.trial.should_prune():  # else by what a rollback has taken back
            job.stop()

    def _fail(self, job: Job, sentence: str) -> None:
        """Marks a trial as failed, and ends its other runs."""
        self._ended.add(job.trial.number)
        self._study.fail(job.trial, sentence)
        self._place.note()
        self._say(job, f"failed: {sentence}")
        self._without_value += not jobs.curve(job.folder, self._plan.metric)
        self._waiting = collections.deque(one for one in self._waiting if one.trial.number != job.trial.number)
        for other in self._running:
            if other.trial.number == job.trial.number:
                other.stop()
        if self._without_value == len(self._ended) == _WITHOUT_VALUE and not results.ranked(
            self._study.all(), self._plan.goal
        ):
            say(
                f"sweep: {_WITHOUT_VALUE} trials ended without a value of {self._plan.metric}, and none with one, so "
                "no more are started; mend the program or the command (another command needs another --dir)"
            )
            self._limit = 0
            self._waiting.clear()

    def _say(self, job: Job, text: str) -> None:
        settings = " ".join(f"{flag}={value}" for flag, value in job.trial.params.items())
        text = console.printable(text)
        say(f"{os.path.relpath(job.folder, self._directory)}: {text}{f' ({settings})' if settings else ''}")
