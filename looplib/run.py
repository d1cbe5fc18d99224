"""A run: the parts that a controller trains and evaluates with, and what is done with them between loops."""

import contextlib
import dataclasses
import functools
import os
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import tensorflow as tf
from absl import logging

from looplib import console, runtime
from looplib.checkpoint.beginning import begin
from looplib.checkpoint.directory import RunDirectory
from looplib.checkpoint.names import stable_names
from looplib.checkpoint.policy import CheckpointPolicy
from looplib.checkpoint.recovery import Recovery
from looplib.checkpoint.store import Rollback, Store
from looplib.cluster.collectives import Workers
from looplib.compat.tensorflow import log_once, lost_server
from looplib.data.input_context import BadRecords
from looplib.diagnosis import diagnosis
from looplib.errors import Preempted, UsageError, join_names
from looplib.health.guards import Trouble
from looplib.health.preemption import notice
from looplib.health.watchdog import Watchdog
from looplib.loop.base import LoopResult
from looplib.loop.loops import Loops
from looplib.loop.recorded import RecordedParts
from looplib.loop.schedule import Boundary
from looplib.loop.window import Window
from looplib.report import run_json
from looplib.report.clock import Clock, Pace
from looplib.report.page import Page
from looplib.report.shown import Shown
from looplib.report.writers import Writer, Writers, make_writers
from looplib.run_config import RunConfig
from looplib.settings import as_flags
from looplib.task import checks
from looplib.task.actions import ActionStates, Event
from looplib.task.derived import Constants, starting
from looplib.task.evaluator import Evaluator
from looplib.task.record import RunRecord
from looplib.task.state import ReplicaState, differing_variables
from looplib.task.trainer import Trainer

Metrics = dict[str, float]


class Run:
    """The loops, the run directory, the store and the writers of a run, opened and restored; see `Controller`.

    Attributes:
      model_dir: the run directory, or None.
      clock: adds up the time of the run by phase.
      loops: the loops of the trainer and the evaluators.
      window: the training steps since the last report; only with a trainer.
      directory: the run directory.
      end: the step that the training goes to; None before it starts, and where it is not known.
      pace: how fast the training goes.
      store: the complete state.
      recovery: guards the state of a training; None without a trainer.
      writers: all writers as one.
      report: `run.json`.
      watchdog: ends the process if nothing moves.
      restored_from: the path of the checkpoint that the run continues from, or None.
      last_evaluation: the metrics of the last evaluation, by evaluator.
    """

    directory: RunDirectory | None = None
    store: Store | None = None
    recovery: Recovery | None = None

    def __init__(
        self,
        run_config: RunConfig,
        strategy: tf.distribute.Strategy,
        trainer: Trainer | None,
        evaluators: Mapping[str, Evaluator],
        *,
        model_dir: str | None,
        policy: CheckpointPolicy,
        writers: Sequence[Writer | str] | None,
        actions: Sequence[Callable[[Event], object]],
        config: Any,
    ) -> None:
        log_once()
        self.clock = Clock()
        self.workers = Workers(strategy)
        left_out = BadRecords(run_config.bad_records, f"{model_dir}/bad_records" if model_dir else None)
        self.loops = Loops(run_config, strategy, self.clock, left_out)
        self.writers = Writers([])
        self.end: int | None = None
        self.pace = Pace(self.clock)
        self.restored_from: str | None = None
        self.last_evaluation: dict[str, Metrics] = {}
        self.model_dir, self._policy, self._run_config = model_dir, policy, run_config
        self._trains = self._closed = self._save_noted = False
        self._trained = 0  # steps of this start
        self._ended_at: int | None = None  # the step of the newest training's end; None while one trains
        action_states = ActionStates(actions)
        self._continued_from: tuple[int, int] | None = None  # a step, and the last report before it
        if trainer:
            policy.check(dict.fromkeys(evaluators), model_dir)
        self.directory = RunDirectory(model_dir, policy, trainer is not None, self.workers, self._give_up)
        self.report = self._make_report(config)
        self.directory.check_nothing_is_lost(self.report.saved_step)
        if self.workers.is_chief:
            place = model_dir if self.directory.writable else None
            self.writers = make_writers(writers, place, self.directory.check_lock)
        self.loops.build(trainer, evaluators, *self.directory.peek(), policy.guards.non_finite)
        if trainer:
            policy.check({name: loop.metric_names for name, loop in self.loops.evaluations.items()}, model_dir)
            self.window = Window(self.loops.training, self.clock, policy.guards)
            self._parts = RecordedParts(trainer, self.loops, self.window, action_states)
        self.watchdog = Watchdog(
            self.clock, self.loops.progress, lambda: self.directory.latest, policy.guards.stall_limit
        )
        objects = checks.collect_state(trainer, evaluators)
        if trainer:
            self.report.model = diagnosis().model(trainer)
            self.report.speed = diagnosis().speed(self.loops.training, strategy)
            logging.info("%s", self.report.speed or "the FLOPs of a step are not known")
        self._open(trainer, objects)

    # Building.

    def _make_report(self, config: Any) -> run_json.RunReport:
        strategy, writes = self.loops.strategy, self.workers.is_chief and self.directory.writable
        self._page = Page(self.model_dir if writes and self.directory.writes else None, self._flush_for_page)
        return run_json.RunReport(
            path=run_json.path_of(self.model_dir, self.directory.writes) if writes else None,
            clock=self.clock,
            strategy=runtime.describe(strategy),
            num_replicas=strategy.num_replicas_in_sync,
            flags={
                **as_flags(self._run_config),
                "checkpoint_interval": self._policy.every_steps,
                "keep_best": str(self._policy.best) if self._policy.best else None,
                "guards": dataclasses.asdict(self._policy.guards),
            },
            config=config,
            standing=self._standing,
            check=self.directory.check_lock,
            page=self._page,
        )

    def _flush_for_page(self) -> None:
        self.writers.flush()  # the page is made of what they have written
        self.directory.check_lock()

    def _open(self, trainer: Trainer | None, objects: dict[str, Any]) -> None:
        """Opens the store, and restores the newest checkpoint or starts from the beginning."""
        strategy, policy, own = self.loops.strategy, self._policy, None
        if trainer:
            self.loops.training.warn_of_what_is_not_saved(objects)
            own = ReplicaState(strategy, stable_names(objects, differing_variables(strategy, trainer, objects)))
        step, sync = self.loops.global_step, self.writers.sync
        self.store = Store(self.directory, policy, self.workers, objects, step, own, sync)
        self._averages, self._constants = functools.partial(starting, trainer, objects), Constants(objects)
        if self.directory.start:
            self._restore_start(self.directory.start.path)
        else:
            with self._averages(restores=False):
                self.restored_from, start = begin(trainer, objects, step, policy, strategy)
            self._renew_constants()
            if self.restored_from:
                self.store.record.input_offset, self.store.record.reported = -start, {"train": start}
            if trainer:
                self.window.start = start
            self._continued_from = start, start  # records of a run that was killed before its first save are void
        if trainer:
            self.recovery = Recovery(self.store, self.directory, policy.guards, self.workers, objects)

    def _restore_start(self, path: str) -> None:
        """Restores a checkpoint; another one in an evaluation whose training has meanwhile deleted it."""
        while True:
            try:
                self.restore(path)
                return
            except UsageError:
                if not self.directory.deleted(path):
                    raise
                path = self.directory.start.path

    # What a controller does between loops.

    @property
    def step(self) -> int:
        """The global step."""
        return int(self.loops.global_step)

    def say(self, sentence: str) -> None:
        """Shows the user a sentence about the run, on the console, or in the log where there is no console."""
        if not self.writers.note(sentence):
            logging.info("%s", sentence)

    def restore(self, path: str | os.PathLike[str] | None, rollback: Rollback | None = None) -> str | None:
        """Restores the complete state; returns the path of the checkpoint, or None if there is none.

        Args:
          path: the checkpoint; None takes the newest.
          rollback: the rollback that it is restored for, or None.
        """
        path = os.fspath(path) if path else self.directory.agreed_latest()
        if path is None:
            return None
        # Else every variable gets a value of the checkpoint's.
        some = self._averages(restores=True) if self._policy.partial else contextlib.nullcontext()
        with self.clock.phase("restore"), some:
            optimizers = self._parts.optimizers if self.loops.training else None
            step = self.store.restore(path, rollback, optimizers)
        self._renew_constants()
        if self.loops.training:
            self.store.warn_of_changes(step, self._run_config.recorded)
        self.restored_from, self.loops.torn = path, False
        self.say(f"restored step {step} from {path}")
        if self.loops.training:
            # After a rollback the data continues elsewhere than at the checkpoint's position.
            position = None if rollback else self.store.input_state.position or None
            self._parts.restore(self.store.record, step, position)
            self._continued_from = step, self.store.record.reported.get("train", 0)
        return path

    def _renew_constants(self) -> None:
        if layers := self._constants.renew():
            logging.info("the steps are traced again, with the restored constants of %s", join_names(layers))
            self.loops.retrace(join_names(layers))

    def restore_chosen(self, which: str | int) -> str | None:
        """Restores the checkpoint that a word or a step names, with its scores as the last evaluation.

        Returns:
          Its path, or None if there is no checkpoint at all.
        """
        found = self.directory.chosen(which)
        if found is None:
            return None
        self.restore(found.path)
        self.last_evaluation = {}
        for name, value in found.scores.items():
            split, _, metric = name.partition("/")
            self.last_evaluation.setdefault(split, {})[metric] = value
        return found.path

    def go_back(self, trouble: Trouble) -> None:
        """Restores the checkpoint before a trouble, with the data after it, if the policy allows it."""
        step, alone = trouble.resume_after, self.workers.count == 1
        command = f"python -m looplib replay {shlex.quote(self.model_dir or '')} --step={step}"
        can_replay = self.report.program and self.report.program.arguments and alone
        self._ended_at = step  # unless there is a rollback
        rollback = self.recovery.go_back(trouble, f"{command} shows that step" if can_replay else "")
        self._ended_at = None
        self.restore(rollback.path, rollback)
        self.report.note_rollback(trouble.resume_after, self.step, trouble.what)

    def drop_what_comes_after(self, evaluate_every: int | None) -> None:
        """Moves later checkpoints and records of the run aside, once a training continues from an earlier step.

        Args:
          evaluate_every: steps between the evaluations of the training, or None.
        """
        if self._continued_from is None:
            return
        (step, reported), self._continued_from = self._continued_from, None
        # An evaluation at the end of an earlier training is no evaluation of a longer one.
        evaluated = step if not evaluate_every or step % evaluate_every == 0 else step - 1
        self.store.set_newer_aside(step)
        self.writers.resume(step, {"train": reported, **dict.fromkeys(self.loops.evaluations, evaluated)})

    def train_to(self, step: int, boundary: Boundary, horizon: int) -> LoopResult:
        """Runs the steps up to a boundary, see `Loops.train`.

        Raises:
          Trouble: if a value of a step is not finite.
          UsageError: if a background save has failed, or the user's program counts the steps too.
        """
        ran = self.loops.train(step, boundary, horizon)
        self._trained += ran.done
        if not ran.finite:
            after, names = self.loops.training.reducer.first_bad()
            raise self.recovery.trouble_in_step(self.window.start + after, names)
        self.store.raise_failure()
        if not self._save_noted and self.store.saved_step and not self.store.saving:
            self._save_noted = True
            self.report.write("running")  # from now on the run does not start over without being asked to
        return ran

    def write(self, split: str, step: int, metrics: Metrics) -> None:
        """Gives metrics to the writers, and notes that they are reported."""
        self.directory.check_lock()
        if split == "train":
            self.report.points.note(step)
        self.writers.write(step, split, metrics)
        self.store.record.reported[split] = step
        self._page.note_news()
        if split == "train":
            self.store.record.train = metrics

    def note_speed(self) -> None:
        """Notes the share of the devices' peak that the training has reached, once one has ended that was not short."""
        seconds = self.clock.of("train") + self.clock.of("input")
        if self.report.speed and self.workers.is_chief and self._trained:
            with self.clock.phase("report"):
                strategy = self.loops.strategy
                self.report.speed = diagnosis().speed_of_ended(self.report.speed, strategy, self._trained, seconds)

    def show(self, split: str, step: int, shown: Mapping[str, Shown]) -> None:
        """Gives media to the writers, if there are any."""
        if shown:
            self.directory.check_lock()
            with self.clock.phase("report"):
                self.writers.show(step, split, shown)

    def note_evaluation(self, step: int, results: dict[str, Metrics]) -> None:
        """Keeps the metrics of all evaluators, also with the checkpoint of their step."""
        if not self._closed:
            with self.clock.phase("save"):
                self.store.add_scores(step, results)
        self.last_evaluation = results

    def save(self, wait: bool) -> None:
        """Saves, unless this step is saved; returns when it is committed, or at once if `wait` is not set."""
        with self.clock.phase("save"):
            self.writers.flush()  # records that the checkpoint calls reported are on disk before it is
            if self.recovery.may_save(self.step):
                self.store.save(self.step, self._fill_in, wait)

    def _fill_in(self, record: RunRecord) -> None:
        self.store.input_state.position = self.loops.training.position() or b""
        self._parts.fill_in(record)

    @contextlib.contextmanager
    def saved(self) -> Iterator[None]:
        """Saves before an evaluation, the `with` block, so that one that fails loses nothing; without a store, not."""
        if not self.store:
            yield
            return
        with self.clock.saving_for_an_evaluation():
            self.save(wait=False)
            try:
                yield
            finally:
                with self.clock.phase("save"):
                    self.store.wait()

    def _standing(self) -> run_json.Standing:
        trained = self.store.record.train if self.loops.training else None
        ended = self.step if self._ended_at is None else self._ended_at
        return run_json.Standing(
            step=ended,
            final_step=self.step if self.step < ended else None,
            end=self.end,
            metrics={**({"train": trained} if trained else {}), **self.last_evaluation},
            rollbacks=self.store.record.rollbacks,
            engines=self.loops.choices,
            saved_step=int(latest.rsplit("-", 1)[1]) if (latest := self.directory.latest) else None,
        )

    @contextlib.contextmanager
    def training_now(self) -> Iterator[None]:
        """Guards a training, the `with` block: the console, signals, the watchdog, and `run.json`."""
        self._trains = True
        self._ended_at, limit = None, self._run_config.max_time
        self.loops.own(self.loops.training.task)
        try:
            with (
                console.guarded(),
                self.report.of_a_start(self.restored_from),
                notice.listening(),
                notice.deferred(lambda: self.clock.current[0] == "save" or self.store.saving),
                notice.limited(self.clock.left_of(limit), f"max_time of {limit or 0:g} s"),
                self.watchdog.watching(),
            ):
                self.writers.settings(run_json.settings_of(as_flags(self._run_config), self.report.config))
                if self._policy.guards.may_roll_back and self.store and self.directory.agreed_latest() is None:
                    self.save(wait=True)  # a checkpoint to go back to
                yield
        except BaseException as error:
            try:
                self.store.wait()  # lets a background save end
            except UsageError as failure:
                logging.error("%s", failure)
            if lost := lost_server(error):
                raise lost from error
            raise
        finally:
            self._trains = False
            self._ended_at = self.step if self._ended_at is None else self._ended_at
            self.writers.progress(None)

    def note_end(self) -> None:
        """Notes in `run.json` that an action has restored another checkpoint at the end of a training."""
        if self.step != self._ended_at:
            self.report.write("done")

    def leave(self, step: int) -> NoReturn:
        """Ends the run for a signal or a time limit: saves, flushes, raises `Preempted`."""
        # IPython prints this advice after each SystemExit; it would end the kernel of a notebook.
        warnings.filterwarnings("ignore", "To exit: use", UserWarning)
        signal = notice.requested or "a signal or time limit of another worker"
        if not self._trains:
            raise Preempted(f"ended by {signal} in the evaluation of step {step}; run the same command again")
        if self.store:
            self.save(wait=True)
        self.writers.flush()
        kept = self.directory.agreed_latest()
        saved = f"saved in {kept}; run the same command to resume from it" if kept else "without a model_dir to save to"
        raise Preempted(f"ended by {signal} at step {step}, {saved}")

    # The end.

    def close(self) -> None:
        """Waits for a save under way, and releases the writers, the data and the directory; see `Controller.close`."""
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as stack:  # each is done, whatever the others raise; in the reverse order of these
            if self.directory is not None:  # it is None, as the store may be, if building this run failed
                stack.callback(self.directory.release)
                stack.callback(self._page.close)
            stack.callback(self.writers.close)
            stack.callback(self.loops.close)
            if self.store is not None:
                stack.callback(self.store.wait)  # a save needs the writers: what it calls reported is synced first

    def _give_up(self) -> None:
        """Closes this run, because another controller of the process is being built for its directory."""
        if self._trains:
            raise UsageError(
                f"another controller of this process is training in {self.model_dir}; wait until it ends, or use "
                "a separate model_dir"
            )
        logging.warning("the earlier controller for %s is closed, because another one is built for it", self.model_dir)
        try:
            self.close()
        except UsageError as error:  # a failed save of that run, and not of the new one
            logging.error("%s", error)

    def refuse_without_state(self) -> None:
        """Raises `UsageError` if a run that only evaluates has no checkpoint to evaluate."""
        if self.model_dir and not self.loops.training and not self.restored_from:
            raise UsageError(
                f"there is no checkpoint in {self.model_dir} to evaluate; train first, or name the directory of a "
                "training"
            )

    def refuse_if_closed_or_torn(self, what: str) -> None:
        """Raises `UsageError` if this run is closed, or a failed step may have updated only a part of the variables."""
        if self._closed:
            raise UsageError(
                f"{what} was called on a closed controller; another one may own its run directory; build a new one"
            )
        self.loops.refuse_if_torn(what, self.directory.latest)

    def refuse_while_training(self, what: str) -> None:
        """Raises `UsageError` if a training is under way, so that an action calls."""
        if self._trains:
            raise UsageError(f"{what} was called by an action inside a training; an action may save, evaluate or stop")
