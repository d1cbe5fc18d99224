"""The store of a run: its directory, the lock on it, its checkpoints, and the controller's own state in them."""

import dataclasses
import math
import os
import time
from collections.abc import Callable

import tensorflow as tf
from absl import logging

from looplib.checkpoint import commits, marker
from looplib.checkpoint.lock import acquire
from looplib.checkpoint.manager import Checkpoints, peek
from looplib.checkpoint.marker import Commit
from looplib.checkpoint.policy import CheckpointPolicy
from looplib.checkpoint.run_directory import check_inside
from looplib.cluster.collectives import Workers
from looplib.errors import DivergenceError, UsageError, gist
from looplib.files import check_writable
from looplib.health.guards import StateCheck, Trouble, listing
from looplib.task.record import RunRecord, RunState
from looplib.task.state import InputState, variables_of

_WAIT_NOTES = 300.0  # seconds from one line about waiting for a checkpoint to the next


@dataclasses.dataclass(frozen=True)
class Rollback:
    """Where a run continues after a guard has found something.

    Attributes:
      path: the checkpoint to restore.
      rollbacks: how often the run has gone back, this time included.
      input_offset: global batches that rollbacks have left out, those of this one included.
    """

    path: str
    rollbacks: int
    input_offset: int


class Store:
    """What of a run is on disk, and what the controller keeps there besides the tasks' state.

    Opening it for a training locks the directory, sets aside what is damaged or was not finished, and finds the newest
    checkpoint that is intact. An evaluation only reads.

    Args:
      model_dir: the run directory; None keeps nothing. Workers share it, and the chief writes.
      policy: `CheckpointPolicy`.
      writes: whether this controller trains.
      workers: `Workers`.
      give_up: closes the controller, see `lock.RunLock`.

    Attributes:
      record: the `RunRecord`; another object after each restore.
      input_state: `InputState`.
      start: the `Commit` that a run goes on from, or None.
      saved_step: the step whose state was last saved or restored, or None.
      writes: whether this controller trains.
      writable: whether metrics can be written to the run directory.

    Raises:
      UsageError: if the directory is in use by another process, or cannot be written by a training.
    """

    def __init__(
        self,
        model_dir: str | None,
        policy: CheckpointPolicy,
        writes: bool,
        workers: Workers,
        give_up: Callable[[], None],
    ) -> None:
        self._workers = workers
        self._policy = policy
        self._guards = policy.guards
        self._state_check = None
        self._checked_step = 0
        self.saved_step = None
        self._verified: str | None = None  # the path of the checkpoint that was just read through
        self._run_state = RunState()
        self.writes = writes
        self._lock = None
        self._checkpoints = None
        self._wait_noted = -math.inf
        self.input_state = InputState()
        self.start = None
        self.writable = bool(model_dir)
        self.directory = None
        if not model_dir:
            return
        self.directory = os.path.join(model_dir, "checkpoints")
        try:
            if workers.is_chief:
                check_writable(model_dir)
        except UsageError as error:
            if writes or not tf.io.gfile.isdir(model_dir):
                raise
            self.writable = False
            logging.warning("%s; this evaluation reports on the console only", error)
        if workers.is_chief:
            check_inside(model_dir, writes)
            if writes:
                self._lock = acquire(model_dir, give_up)
            self.start = self._newest_intact(tidy=writes)
        self.start = self._agreed(self.start)

    def check_lock(self) -> None:
        """Raises `UsageError` if the run directory is not this controller's any more."""
        if self._lock is not None:
            self._lock.check()

    def check_nothing_is_lost(self, saved_step: int | None) -> None:
        """Refuses to start from the beginning where the run had a checkpoint, unless the policy allows it.

        Args:
          saved_step: the newest step that the run is known to have saved, or None.

        Raises:
          UsageError: if there was one, and none is whole.
        """
        if self.start or not self.writes or not self.directory or self._policy.start_anew:
            return
        aside = commits.set_aside_before(self.directory)
        if not (aside or saved_step):
            return
        what = f"of step {saved_step} and before" if saved_step else f"in {', '.join(aside)}"
        raise UsageError(
            f"no checkpoint in {self.directory} is whole, and the run had some ({what}); bring one back, or let the "
            "run start from the beginning with --start_anew (CheckpointPolicy(start_anew=True))"
        )

    def _seen_by_the_chief(self, step):
        for done in commits.committed(self.directory):
            if done.step == step:
                return done
        raise UsageError(
            f"worker {self._workers.index} does not see the checkpoint of step {step} in {self.directory}, from which "
            "the chief goes on; let model_dir be on a file system that all workers share"
        )

    @property
    def record(self) -> RunRecord:
        """The `RunRecord`; another object after each restore."""
        return self._run_state.record

    def peek(self) -> tuple[int, RunRecord]:
        """Returns the global batches consumed by `start` and its run record; 0 and an empty one without a `start`."""
        if not self.start:
            return 0, RunRecord()
        step, record = peek(self.start.path)
        return step + record.input_offset, record

    def open(self, objects, global_step, replica_state, sync):
        """Takes the objects that make the state, once all variables exist.

        Args:
          objects: dict from attribute name to trackable object.
          global_step: the step's `tf.Variable`.
          replica_state: `state.ReplicaState`, or None for an evaluation.
          sync: puts on the disk what was reported; called before each commit, from another thread.

        Raises:
          UsageError: if a name is one of looplib's own.
        """
        own = {"global_step": global_step, "run_state": self._run_state}
        if self.writes:
            own |= {"input_state": self.input_state, "replica_state": replica_state}
        self._replica_state = replica_state
        for name in objects.keys() & {*own, "save_counter"}:
            raise UsageError(f"the attribute {name!r} has the name of something else in a checkpoint; rename it")
        if self.directory:
            self._checkpoints = Checkpoints(
                self.directory,
                {**objects, **own},
                self._policy,
                writes=self._workers.is_chief,
                check=self.check_lock,
                sync=sync,
            )

    def guard(self, objects):
        """Lets `check` look at the variables of these objects; those that are not finite now are meant so."""
        if self.writes:
            self._state_check = StateCheck(variables_of(objects))

    def need(self, what):
        """Raises `UsageError`, saying that `what` needs a `model_dir`, where there is none."""
        if not self._checkpoints:
            raise UsageError(f"{what} needs a model_dir, and this controller has none; give Controller(model_dir=...)")

    def __bool__(self):
        return self._checkpoints is not None

    def save(self, step: int, fill_in: Callable[[RunRecord], None], wait: bool) -> None:
        """Saves the state, unless that of this step is saved.

        Args:
          step: the global step.
          fill_in: sets the fields of the run record that only the controller knows; called if something is saved.
          wait: returns only when the checkpoint is committed.

        Raises:
          UsageError: if it, or the save before it, could not be written.
          Trouble: if a variable is not finite; nothing is saved then.
        """
        if self.saved_step != step:
            if self._guards.non_finite == "off" and (names := self._bad()):
                logging.error("the checkpoint of step %d is left out: %s", step, _not_finite(names))
                return
            self.check(step)
            fill_in(self.record)
            self._checkpoints.save(step, wait)
            self.saved_step = step
        elif wait:
            self._checkpoints.wait()

    def path_of(self, step: int) -> str:
        """Returns the path of a step's checkpoint."""
        return commits.path_of(self.directory, step)

    def forget_save_of_other_values(self, step: int) -> None:
        """Lets the next `save` write a step that is saved, if the variables have other values than its checkpoint.

        Workers wait for each other.
        """
        if self.saved_step == step and self._workers.any_of(self._checkpoints.differs(step)):
            self.saved_step = None

    def wait(self):
        """Waits for a save under way.

        Raises:
          UsageError: if it failed.
        """
        if self._checkpoints:
            self._checkpoints.wait()

    def raise_failure(self):
        """Raises the `UsageError` of a background save that has failed meanwhile; does not wait."""
        if self._checkpoints:
            self._checkpoints.check()

    def check(self, step):
        """Raises `Trouble` if a variable of the state is not finite."""
        if self._state_check is None or self._guards.non_finite == "off" or self._checked_step == step:
            return
        if names := self._bad():
            policy = "rollback" if self._guards.non_finite == "rollback" else "halt"
            raise Trouble(f"after step {step}, {_not_finite(names)}", policy, good_before=step - 1, resume_after=step)
        self._checked_step = step

    def trouble_in_step(self, step, names):
        """Returns the `Trouble` of losses and gradients that were not finite in a step, with the variables that are."""
        others = self._bad()
        what = f"at step {step}, {_not_finite(names)}" + (f", and now {_not_finite(others)}" if others else "")
        return Trouble(what, self._guards.non_finite, good_before=step - 1, resume_after=step)

    def _bad(self):
        """The names of the variables that are not finite here, or else on another worker."""
        names = self._state_check.bad()
        return names or (["a variable on another worker"] if self._workers.any_of(bool(names)) else [])

    def add_scores(self, step, results):
        """Keeps the metrics of an evaluation with the checkpoint of its step, if there is one.

        Args:
          step: the global step.
          results: dict from evaluator name to metrics.
        """
        if self.writes and self._checkpoints and self.saved_step == step and self._workers.is_chief:
            scores = {
                f"{name}/{metric}": value for name, metrics in results.items() for metric, value in metrics.items()
            }
            self._checkpoints.add_scores(step, scores)

    def restore(
        self, path: str | os.PathLike[str] | None, rollback: Rollback | None = None
    ) -> tuple[str, int] | tuple[None, None]:
        """Restores the state.

        Args:
          path: the checkpoint; None takes the newest.
          rollback: the `Rollback` for which it is restored, or None.

        Returns:
          `(path, step)`, or `(None, None)` if there is no checkpoint.

        Raises:
          UsageError: if it cannot be read or belongs to another model.
        """
        path = os.fspath(path) if path else self.agreed_latest()
        if path is None:
            return None, None
        self._verify(path)
        step, _ = peek(path)
        self._checkpoints.restore(path, partial="both" if self._policy.partial else not self.writes)
        if self._replica_state:
            self._replica_state.apply()
        if rollback:
            self.record.rollbacks, self.record.input_offset = rollback.rollbacks, rollback.input_offset
        self.saved_step = step if os.path.dirname(path) == self.directory else None
        self._checked_step = step
        return path, step

    def _verify(self, path: str) -> None:
        """Reads a checkpoint through before TensorFlow is given it, which may end the process on a damaged one.

        Raises:
          UsageError: if it is damaged, or has no whole marker.
        """
        if path == self._verified or not self._workers.is_chief:
            self._verified = None  # once: it may be changed by the next time
            return
        try:
            reason = commits.verify(marker.read(path))
        except (ValueError, KeyError, TypeError, AttributeError, OSError, tf.errors.OpError) as error:
            if isinstance(error, UsageError):
                raise
            if not tf.io.gfile.exists(f"{path}.index"):
                return  # not a checkpoint at all, which is said when it is opened
            reason = f"its marker cannot be read ({gist(error)})"
        if reason:
            raise UsageError(
                f"{path} is not a checkpoint that looplib can read: {reason}; name another one, such as those that "
                "`python -m looplib inspect --verify` calls intact"
            )

    def check_optimizers(self, path, names):
        """Raises `UsageError` if the restored checkpoint was made with other optimizers, of which slots may fit."""
        theirs = names if self.record.optimizers is None else self.record.optimizers
        if theirs != names and not self._policy.partial:
            raise UsageError(
                f"the checkpoint {path} was made by another optimizer ({', '.join(theirs)}) than this run's "
                f"({', '.join(names)}); give this run a model_dir of its own (and start from these weights with "
                "--warm_start), or build the optimizer that the checkpoint was made with"
            )

    def warn_of_changes(self, step, settings):
        """Warns where the restored checkpoint was made with other settings that decide the numbers to come.

        Args:
          step: the step that was restored.
          settings: dict of this run's.
        """
        recorded = {name: getattr(self.record, name) for name in settings}
        for name, ours in settings.items():
            theirs = recorded[name]
            if theirs is not None and theirs != ours:
                logging.warning(
                    "the checkpoint was made with %s %s and this run has %s: from step %d on %s an uninterrupted run",
                    name, theirs, ours, step,
                    "the last bits may differ from" if name == "loop" else "the examples come in another order than in",
                )  # fmt: skip

    def go_back(self, trouble):
        """Finds where to go on after a trouble.

        Args:
          trouble: `guards.Trouble`.

        Returns:
          A `Rollback` to the newest good checkpoint, and to the data past the bad steps.

        Raises:
          DivergenceError: if the policy is to halt, or the run may not or cannot go back.
        """
        kept, done = self.latest, self.record.rollbacks
        advice = f"the newest checkpoint, {kept}, is good" if kept else "nothing was saved"
        if trouble.policy == "halt":
            raise DivergenceError(
                f"{trouble.what}; {advice}; look at the data and the learning rate, or let the run go on by itself "
                "with the policy skip or rollback (--non_finite)"
            ) from None
        if done >= self._guards.rollbacks:
            raise DivergenceError(
                f"{trouble.what}, and the run has already gone back {done} times, as often as it may; {advice}"
            ) from None
        target = self._agreed(self._newest_up_to(trouble.good_before)) if self else None
        if target is None:
            raise DivergenceError(f"{trouble.what}, and there is no checkpoint to go back to; {advice}") from None
        logging.warning(
            "%s: going back to step %d and on with the data after step %d (rollback %d of %d)",
            trouble.what, target.step, trouble.resume_after, done + 1, self._guards.rollbacks
        )  # fmt: skip
        offset = trouble.resume_after + self.input_offset - target.step
        return Rollback(target.path, done + 1, offset)

    @property
    def input_offset(self):
        """Global batches that rollbacks have left out: the position in the data is the step plus these."""
        return self.record.input_offset

    @property
    def latest(self):
        """The path of the newest committed checkpoint, or None."""
        return self._checkpoints.latest if self._checkpoints else None

    def agreed_latest(self):
        """The same as the chief sees it, which may just be writing another one; workers wait for each other."""
        done = self._agreed(commits.newest(self.directory)) if self._checkpoints else None
        return done.path if done else None

    def _agreed(self, done):
        """The `Commit` that the chief has found, or None."""
        if self._workers.count == 1:
            return done
        step = self._workers.agree(done.step if done else -1)
        if step < 0:
            return None
        return done if self._workers.is_chief else self._seen_by_the_chief(step)

    @property
    def saving(self):
        """Whether a save is being written in the background."""
        return self._checkpoints is not None and self._checkpoints.saving

    def _newest_up_to(self, step):
        """Returns the newest intact `Commit` of at most a step, or None; newer ones are set aside."""
        self.set_newer_aside(step)
        return self._newest_intact(tidy=True) if self._workers.is_chief else None

    def _newest_intact(self, tidy: bool) -> Commit | None:
        done = commits.newest_intact(self.directory, tidy)
        self._verified = done.path if done else None
        return done

    def set_newer_aside(self, step: int) -> None:
        """Moves the checkpoints of later steps into `set_aside`, because the training continues from `step`."""
        if self._checkpoints:
            self._checkpoints.set_aside_after(step)

    def best(self) -> str | None:
        """Returns the path of the best committed checkpoint by the policy's first `KeepBest`; None without one.

        Raises:
          UsageError: if the policy has no `KeepBest`.
        """
        rule = self._policy.best
        if rule is None:
            raise UsageError(
                "there is no best checkpoint, because the policy does not say by what; give "
                'CheckpointPolicy(keep=(looplib.KeepLast(), looplib.KeepBest("eval/accuracy")))'
            )
        kept = commits.committed(self.directory) if self else []
        return next((done.path for done in rule.select(kept)), None)

    def wait_for_newer(self, than, timeout):
        """Waits until there is another newest checkpoint.

        Args:
          than: the path that is known; None for any.
          timeout: seconds to wait; None waits for ever.

        Returns:
          The path, or None if none came in time.
        """
        done = self._agreed(self._wait_for_newer(than, timeout) if self._workers.is_chief else None)
        return done.path if done else None

    def _wait_for_newer(self, than, timeout):
        started, damaged = time.monotonic(), None
        while True:
            done = commits.newest(self.directory)
            if done and done.path != than and done != damaged:
                try:
                    reason = commits.verify(done)
                    if not reason:
                        self._verified = done.path
                        return done
                    if tf.io.gfile.exists(done.path + ".commit"):  # else the training has deleted it
                        logging.warning("the checkpoint of step %d is left out: %s", done.step, reason)
                        damaged = done
                except commits.CannotReadError as error:  # it may be readable at the next look
                    logging.log_every_n_seconds(logging.WARNING, "%s", 60, error)
            waited = time.monotonic() - started
            if timeout is not None and waited >= timeout:
                return None
            self._note_wait(than, timeout, waited)
            time.sleep(min(1.0, timeout if timeout else 1.0))

    def _note_wait(self, than, timeout, waited):
        now = time.monotonic()
        if now - self._wait_noted < _WAIT_NOTES:
            return
        self._wait_noted = now
        logging.info(
            "waiting for a checkpoint%s in %s, %s%s",
            f" newer than {os.path.basename(than)}" if than else "",
            self.directory,
            "as long as it takes" if timeout is None else f"for up to {timeout:g} s",
            f" ({waited:.0f} s so far)" if waited >= 1 else "",
        )

    def close(self):
        """Waits for a save under way, releases the lock, and raises the save's error if it failed."""
        try:
            self.wait()
        finally:
            if self._lock is not None:
                self._lock.release()


def _not_finite(names):
    return f"{listing(names)} {'is' if len(names) == 1 else 'are'} not finite"
