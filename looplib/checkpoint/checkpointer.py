"""The checkpointer: the complete state of a run, saved, restored, and taken back to where it was good."""

import contextlib
import os
import shlex
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import tensorflow as tf
from absl import logging

from looplib.base.messages import join_names
from looplib.checkpoint.directory import RunDirectory
from looplib.checkpoint.perturbation import nudge
from looplib.checkpoint.recorded import RecordedParts
from looplib.checkpoint.saving import Checkpoints
from looplib.cluster.preemption import notice
from looplib.data.loader_state import is_position
from looplib.errors import MismatchError, MissingPartError, NoCheckpointError, Preempted, StateError, UsageError
from looplib.guards.guards import Diverged, Guards
from looplib.guards.non_finite import StateCheck
from looplib.report.reporter import Reporter
from looplib.run import choice, commits
from looplib.run.report import RunReport
from looplib.run.sweep_results import is_trial
from looplib.task.record import RunRecord, RunState
from looplib.task.state import InputState, ReplicaState, differing_variables, variables_of
from looplib.weights.names import stable_names
from looplib.weights.restoring import peek, read_position

# What a changed setting does, by its field of the run record.
_CONSEQUENCES = {
    "seed": "the order of examples differs from an uninterrupted run",
    "global_batch_size": "the batches are larger or smaller, and begin after the examples that were read",
    "loop": "the last bits may differ from an uninterrupted run",
}


class Checkpointer:
    """The complete state of a run: the objects of its trainer and evaluators, the global step, and the run record.

    Making it restores the checkpoint that the run starts from, or gives the run its first state. Values that are not
    finite are kept out of checkpoints; variables that are not finite at the start of the run are intended.

    Args:
      directory: the run directory, opened.
      reporter: flushed before a save and synced before a commit.
      parts: what follows a checkpoint besides the variables.
      guards: decide when nothing is committed, and how often the run may go back.
      objects: dict from attribute name to trackable object, once all variables exist.

    Attributes:
      restored_from: the path of the checkpoint that the run continues from, or None.
      saved_step: the step whose state was last saved or restored, or None.

    Raises:
      UsageError: if an object has the name of one of looplib's own, or a checkpoint does not fit.
    """

    def __init__(
        self, directory: RunDirectory, reporter: Reporter, parts: RecordedParts, guards: Guards, objects: dict[str, Any]
    ) -> None:
        self.directory = directory
        self.restored_from: str | None = None
        self.saved_step: int | None = None
        self._reporter, self._parts, self._guards = reporter, parts, guards
        self._run_state, self._input_state = RunState(), InputState()
        self._replica_state: ReplicaState | None = None
        self._saver: Checkpoints | None = None
        self._state_check: StateCheck | None = None
        self._continued_from: tuple[int, int] | None = None  # a step, and the last report before it
        trainer, strategy = parts.trainer, parts.loops.strategy
        if trainer:
            parts.loops.training.warn_of_what_is_not_saved(objects)
            differing = differing_variables(strategy, trainer, objects)
            self._replica_state = ReplicaState(strategy, stable_names(objects, differing))
        own = {"global_step": parts.loops.global_step, "run_state": self._run_state}
        if directory.trains:
            own |= {"input_state": self._input_state, "replica_state": self._replica_state}
        for name in objects.keys() & {*own, "save_counter"}:
            raise StateError(f"the attribute name {name!r} is reserved in checkpoints; rename the attribute")
        if directory.checkpoints:
            self._saver = Checkpoints(directory, {**objects, **own}, reporter.writers.sync)
        if directory.starts_from:
            self._restore_start(directory.starts_from.path)
        else:
            self._begin(objects, strategy)
        if trainer:
            self._state_check = StateCheck(variables_of(objects))

    def __bool__(self) -> bool:
        """Returns whether anything is kept on disk."""
        return self._saver is not None

    @property
    def record(self) -> RunRecord:
        """The `RunRecord`; another object after each restore."""
        return self._run_state.record

    @property
    def step(self) -> int:
        """The global step."""
        return int(self._parts.loops.global_step)

    def need_state(self) -> None:
        """Raises `UsageError` if a controller that only evaluates has no checkpoint to evaluate."""
        directory = self.directory
        if directory.model_dir and not directory.trains and not self.restored_from:
            raise NoCheckpointError(
                f"there is no checkpoint in {directory.model_dir} to evaluate; train first, or name the directory of a "
                "training"
            )

    def not_evaluated(self, names: Iterable[str]) -> tuple[str, ...]:
        """Returns which of some evaluators have not reported at the current step."""
        return tuple(name for name in names if self.record.reported.get(name) != self.step)

    def standing(self) -> RunReport:
        """Returns where the run stands, for `run.json`.

        The step is the one that the error names if a guard has ended the run, whose loop may have gone on; after a
        training, the one that it has reached.
        """
        record, loops, reporter, latest = self.record, self._parts.loops, self._reporter, self.directory.latest
        ended = self.step if reporter.ended_at is None else reporter.ended_at
        trained = {"train": record.train} if loops.training and record.train else {}
        return RunReport(
            step=ended,
            final_step=self.step if self.step < ended else None,
            end=reporter.end,
            metrics={**trained, **reporter.last_evaluation},
            rollbacks=record.rollbacks,
            engines=loops.choices,
            url=self.directory.mirror.url,
            saved_step=int(latest.rsplit("-", 1)[1]) if latest else None,
        )

    # The start of a run.

    def _begin(self, objects: dict[str, Any], strategy: tf.distribute.Strategy) -> None:
        """Sets the initial state of a run that has no checkpoint yet."""
        start, parts, step = self.directory.start, self._parts, None
        with parts.averages_start(restores=False):
            if start.continue_from:
                from looplib.weights.loading import continue_from  # here, as few starts need it

                self.restored_from, step = continue_from(objects, parts.loops.global_step, start.continue_from)
            elif parts.trainer:
                with strategy.scope():
                    parts.trainer.initialize()
            if start.warm_start:
                from looplib.weights.loading import warm_start

                warm_start(objects, start.warm_start)
                self.restored_from = None if parts.trainer else os.fspath(start.warm_start)
            if parts.trainer and not start.continue_from:
                nudge(strategy, objects)
        if step := parts.loops.begin_at(step):
            where = self.restored_from or "the trainer's own count"
            logging.info("continuing from step %d of %s; the data starts from the beginning", step, where)
            self.record.input_offset, self.record.reported = -step, {"train": step}
        parts.renew_constants()
        if parts.trainer:
            parts.warn_of_updates(step)
            parts.window.start = step
        self._continued_from = step, step  # records of a run that was killed before its first save are void

    def _restore_start(self, path: str) -> None:
        """Restores a checkpoint; an evaluation takes another one if the training has deleted it meanwhile."""
        while True:
            try:
                self.restore(path)
                return
            except UsageError:
                if not self.directory.deleted(path):
                    raise
                path = self.directory.starts_from.path

    # Saves.

    def save(self, wait: bool) -> None:
        """Saves the state, unless this step is saved already.

        Args:
          wait: returns only when the checkpoint is committed.

        Raises:
          Diverged: if a variable is not finite.
          UsageError: if it, or the save before it, could not be written.
        """
        with self._reporter.clock.phase("save"):
            self._reporter.writers.flush()  # records that the checkpoint calls reported are on disk before it is
            step = self.step
            if not self._may_save(step):
                return
            if self.saved_step != step:
                self._input_state.position = self._parts.loops.training.position(step + self.record.input_offset) or b""
                self._parts.fill_in(self.record)
                self._saver.note_in(self.record)
                own = b""
                if self.directory.workers.count > 1:
                    own, self._input_state.position = self._input_state.position, b""
                self._saver.save(step, wait, own)
                self.saved_step = step
            elif wait:
                self._saver.wait()

    def save_changed(self, wait: bool) -> str:
        """Saves also if this step is already saved with other values; returns the path. For `wait` see `save`.

        Workers wait for each other.

        Raises:
          UsageError: without a run directory or a trainer, or if it cannot be written.
          DivergenceError: if a variable is not finite; nothing is saved then.
        """
        self.directory.need("save_checkpoint")
        if not self.directory.trains:
            raise MissingPartError(
                "save_checkpoint needs a trainer, but this controller has none; evaluation jobs are read-only"
            )
        if self.saved_step == self.step and self.directory.workers.any_of(self._saver.differs(self.step)):
            self.saved_step = None
        try:
            self.save(wait)
        except Diverged as fault:
            if fault.repeats and self.directory.is_training:
                raise
            raise fault.kind(f"{fault.what}; it is not saved") from None
        return commits.path_of(self.directory.checkpoints, self.step)

    def leave(self, step: int) -> NoReturn:
        """Ends the run for a signal or a time limit: in a training saves, flushes; raises `Preempted`."""
        # IPython prints this advice after each SystemExit; it would end the kernel of a notebook.
        warnings.filterwarnings("ignore", "To exit: use", UserWarning)
        signal = notice.requested or "a signal, notice or time limit of another worker"
        if not self.directory.is_training:
            raise Preempted(f"ended by {signal} in the evaluation of step {step}; run the same command again")
        if self:
            self.save(wait=True)
        self._reporter.writers.flush()
        kept = commits.path_of(self.directory.checkpoints, step) if self else ""
        in_sweep = is_trial(self.directory.model_dir)
        again = "its sweep decides whether it resumes" if in_sweep else "run the same command to resume from it"
        saved = f"saved in {kept}; {again}" if kept else "without a model_dir to save to"
        raise Preempted(f"ended by {signal} at step {step}, {saved}")

    @contextlib.contextmanager
    def saved(self) -> Iterator[None]:
        """Saves before an evaluation, the `with` block, so that a failure of it loses nothing; with a run directory."""
        if not self:
            yield
            return
        with self._reporter.clock.saving_for_an_evaluation():
            self.save(wait=False)
            try:
                yield
            finally:
                with self._reporter.clock.phase("save"):
                    self.wait()

    @property
    def saving(self) -> bool:
        """Returns whether a save is being written in the background."""
        return self._saver is not None and self._saver.saving

    def wait(self) -> None:
        """Waits for a save under way; raises `UsageError` if it failed."""
        if self._saver:
            self._saver.wait()

    def finish(self) -> None:
        """Ends the saves of a run that closes, see `Checkpoints.finish`; raises `UsageError` if one failed."""
        if self._saver and self.directory.trains:
            self._saver.finish()

    def wait_and_log(self) -> None:
        """Waits for a save under way, and logs its error; for a run that has another one."""
        try:
            self.wait()
        except UsageError as failure:
            logging.error("%s", failure)

    def take_committed(self) -> list[str]:
        """Returns the paths of the checkpoints that this process has committed since the last call."""
        committed = self._saver.committed if self._saver else []
        return [committed.pop(0) for _ in range(len(committed))]

    def add_scores(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Keeps the metrics of an evaluation, by evaluator, with the checkpoint of its step, if there is one."""
        directory = self.directory
        if directory.trains and self._saver and self.saved_step == step and directory.workers.is_chief:
            scores = {f"{name}/{metric}": value for name, each in results.items() for metric, value in each.items()}
            self._saver.add_scores(step, scores)

    # Restores.

    def restore(self, path: str | os.PathLike[str] | None, update: Mapping[str, int] | None = None) -> str | None:
        """Restores the complete state; returns the path of the checkpoint, or None if there is none.

        Args:
          path: the checkpoint; None takes the newest.
          update: fields of the run record that a rollback replaces; None for no rollback.

        Raises:
          UsageError: if it cannot be read or belongs to another model.
        """
        path = os.fspath(path) if path else self.directory.agreed_latest()
        if path is None:
            return None
        parts, partial, batches = self._parts, self.directory.start.partial, None
        if update and self.record.global_batch_size is not None:
            batches = self.record.saved_batches.back_to(int(path.rsplit("-", 1)[1]))
        # Else every variable gets a value of the checkpoint's.
        some = parts.averages_start(restores=True) if partial else contextlib.nullcontext()
        with self._reporter.clock.phase("restore"), some:
            self.directory.check_intact(path)
            step, record = peek(path)
            self._check_optimizers(path, record)
            self._saver.restore(path, partial)
            if self._replica_state:
                self._replica_state.apply()
            if self.directory.trains:
                self._read_position(path)
            moved = bool(update) and update["input_offset"] != self.record.input_offset
            for name, value in (update or {}).items():
                setattr(self.record, name, value)
            if batches:  # the checkpoint may be of a time before the last change of their size
                self.record.batches_are(batches)
            self.saved_step = step if os.path.dirname(path) == self.directory.checkpoints else None
        parts.loops.step = step
        if partial:  # the checkpoint may lack the trainer's own count
            parts.loops.begin_at(step)
        parts.renew_constants()
        if parts.trainer:
            self._warn_of_changes(step, parts.loops.config.recorded)
        self.restored_from, parts.loops.half_updated = path, False
        self._reporter.say(f"restored step {step} from {path}")
        if parts.trainer:
            # After most rollbacks the data continues elsewhere than at the checkpoint's position.
            parts.restore(self.record, step, None if moved else self._input_state.position or None)
            self._continued_from = step, self.record.reported.get("train", 0)
        return path

    def restore_chosen(self, which: str | int | os.PathLike[str]) -> str | None:
        """Restores the checkpoint that a word, a step or a path names; returns its path, or None if there is none."""
        if which == choice.LATEST:
            return self.restore(None)
        if isinstance(which, (str, os.PathLike)) and which not in (choice.BEST, choice.FINAL):
            return self.restore(which)
        found = self.directory.chosen(which)
        if found is None:
            return None
        self.restore(found.path)
        self._reporter.last_evaluation = {}  # its scores are the last evaluation
        for name, value in found.scores.items():
            split, _, metric = name.partition("/")
            self._reporter.last_evaluation.setdefault(split, {})[metric] = value
        return found.path

    def each_new(self, timeout: float | None) -> Iterator[None]:
        """Restores each new checkpoint of another job; waits up to some seconds for each, or forever for None."""
        known = None
        while path := self.directory.wait_for_newer(known, timeout):
            try:
                self.restore(path)
            except UsageError:
                if os.path.exists(path + ".commit") or self.directory.workers.count > 1:
                    raise
                continue  # the training has meanwhile deleted it, and has newer ones
            yield
            known = self.restored_from
        if known is None:
            raise NoCheckpointError(
                f"no checkpoint came in {self.directory.checkpoints} within {timeout} s; check that the training "
                "writes there"
            )

    def drop_later(self, evaluate_every: Mapping[str, int]) -> None:
        """Moves later checkpoints and records of the run aside, once a training continues from an earlier step.

        Args:
          evaluate_every: steps between the evaluations of the training, by evaluator; empty for none.
        """
        if self._continued_from is None:
            return
        (step, reported), self._continued_from = self._continued_from, None
        # An evaluation at the end of an earlier training is no evaluation of a longer one.
        evaluated = {name: step - (step % evaluate_every.get(name, 1) > 0) for name in self._parts.loops.evaluations}
        if self._saver:
            self._saver.set_aside_after(step)
        self._reporter.writers.resume(step, {"train": reported, **evaluated})

    def _read_position(self, path: str) -> None:
        """Sets this worker's position in the data; one of another number of workers if it says what it is part of."""
        workers = self.directory.workers
        found, count = read_position(path, workers)
        if self._input_state.position:
            found, count = self._input_state.position, 1
        if count not in (0, workers.count) and not is_position(found):
            found = b""
            logging.info(
                "the positions in the data of %s were saved by %d worker%s, and this run has %d: no saved state of an "
                "iterator is used",
                path, count, "s" if count > 1 else "", workers.count,
            )  # fmt: skip
        self._input_state.position = found

    def _check_optimizers(self, path: str, record: RunRecord) -> None:
        """Raises `UsageError` if a checkpoint was made with other optimizers; some slots might fit by chance."""
        theirs, ours = record.optimizers, self._parts.optimizers
        if theirs is None or not self._parts.trainer or self.directory.start.partial:
            return
        # More of them here are refused later, because the checkpoint lacks their variables.
        swapped = any(theirs.get(name, kind) != kind for name, kind in ours.items())
        if swapped or Counter(theirs.values()) - Counter(ours.values()):
            raise MismatchError(
                f"the checkpoint {path} was made by another optimizer ({', '.join(theirs.values())}) than this run's "
                f"({', '.join(ours.values())}); use a separate model_dir (and start from these weights with "
                "--warm_start), build the optimizer that the checkpoint was made with, or let the new one start from "
                "the beginning (--partial_restore)"
            )

    def _warn_of_changes(self, step: int, settings: Mapping[str, int | str | None]) -> None:
        """Warns if the restored checkpoint was made with other settings that affect the results."""
        for name, ours in settings.items():
            theirs = getattr(self.record, name)
            if theirs is not None and theirs != ours:
                logging.warning(
                    "%s was %s in the checkpoint and is %s in this run: from step %d, %s",
                    name, theirs, ours, step, _CONSEQUENCES[name],
                )  # fmt: skip

    # Values that are not finite.

    def check_finite(self, step: int) -> None:
        """Raises `Diverged` if a variable is not finite; workers wait for each other."""
        if self._guards.non_finite == "off" or self.saved_step == step:
            return
        if names := self._not_finite():
            policy = "rollback" if self._guards.non_finite == "rollback" else "halt"
            raise Diverged(f"after step {step}, {_say(names)}", policy, good_before=step - 1, resume_after=step)

    def _may_save(self, step: int) -> bool:
        """Returns whether the state may be committed. With the policy "off" it may not if a variable is not finite."""
        self.check_finite(step)
        if self._guards.non_finite == "off" and self.saved_step != step and (names := self._not_finite()):
            logging.error("the checkpoint of step %d is left out: %s", step, _say(names))
            return False
        return True

    def check(self, finite: bool) -> None:
        """Raises `Diverged` if a value of a step was not finite, and `UsageError` for a background save that failed."""
        if not finite:
            after, names = self._parts.loops.training.reducer.first_bad()
            step, others = self._parts.window.start + after, self._not_finite()
            what = f"at step {step}, {_say(names)}" + (f", and now {_say(others)}" if others else "")
            raise Diverged(what, self._guards.non_finite, good_before=step - 1, resume_after=step)
        if self._saver:
            self._saver.check()
        if self.saved_step and not self.saving:
            self._reporter.note_first_save()

    def roll_back(self, fault: Diverged) -> None:
        """Restores the newest good checkpoint, and sets newer ones aside. Data that is at fault is left out.

        Workers wait for each other.

        Raises:
          DivergenceError: to halt, or if the run may not or cannot go back; a CorruptionError for what a device did.
        """
        self.wait_and_log()  # a checkpoint under way may be the newest
        if self._saver and fault.repeats:
            self._saver.set_aside_after(fault.good_before)
        kept, done, program = self.directory.latest, self.record.rollbacks, self._reporter.report.program
        self._reporter.ended_at = fault.resume_after  # unless there is a rollback
        advice = f"the newest checkpoint, {kept}, is good" if kept else "no checkpoint was saved"
        if program and program.arguments and self.directory.workers.count == 1:
            folder = shlex.quote(self.directory.model_dir or "")
            advice += f"; python -m looplib replay {folder} --step={fault.resume_after} shows that step"
        kind, may_skip = fault.kind, fault.flag == "--non_finite" and self._guards.non_finite != "skip"
        if fault.policy == "halt":
            if fault.cure:
                raise kind(f"{fault.what}; {advice}; {fault.cure}") from None
            raise kind(
                f"{fault.what}; {advice}; check the data and the learning rate, or use the policy "
                f"{'skip or ' * may_skip}rollback to continue automatically ({fault.flag})"
            ) from None
        if done >= self._guards.rollbacks:
            raise kind(f"{fault.what}, and the run has used all {done} rollbacks; {advice}") from None
        target = None
        if self._saver:
            self._saver.set_aside_after(fault.good_before)
            target = self.directory.newest_intact()
        if target is None:
            raise kind(f"{fault.what}, and there is no checkpoint to roll back to; {advice}") from None
        after = target.step if fault.repeats else fault.resume_after
        logging.warning(
            "%s: rolling back to step %d and continuing with the data after step %d (rollback %d of %d)",
            fault.what, target.step, after, done + 1, self._guards.rollbacks
        )  # fmt: skip
        offset = after + self.record.input_offset - target.step
        self.restore(target.path, {"rollbacks": done + 1, "input_offset": offset})
        self._reporter.note_rollback(fault.resume_after, self.step, fault.what)

    def _not_finite(self) -> list[str]:
        """Returns the names of the variables that are not finite on this worker, or, if none is, on another one."""
        names = self._state_check.find()
        return names or (["a variable on another worker"] if self.directory.workers.any_of(bool(names)) else [])


def _say(names: list[str]) -> str:
    return f"{join_names(names)} {'is' if len(names) == 1 else 'are'} not finite"
