"""The store of a run: its complete state, saved in the checkpoints of its directory and restored from them."""

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from looplib.checkpoint.directory import RunDirectory
from looplib.checkpoint.policy import CheckpointPolicy
from looplib.checkpoint.restoring import RestoreMode, peek, read_position
from looplib.checkpoint.saving import Checkpoints
from looplib.cluster.collectives import Workers
from looplib.data.batches import Batches
from looplib.errors import UsageError
from looplib.task.record import RunRecord, RunState
from looplib.task.state import InputState, ReplicaState

# What a changed setting does, by its field of the run record.
_CONSEQUENCES = {
    "seed": "the order of examples differs from an uninterrupted run",
    "global_batch_size": "the batches are larger or smaller, and begin after the examples that were read",
    "loop": "the last bits may differ from an uninterrupted run",
}


@dataclasses.dataclass(frozen=True)
class Rollback:
    """Where a run continues after a guard has found something.

    Attributes:
      path: the checkpoint to restore.
      rollbacks: how often the run has gone back, this time included.
      input_offset: global batches that rollbacks have left out, those of this one included.
      batches: the sizes of the global batches; None where looplib reads none.
    """

    path: str
    rollbacks: int
    input_offset: int
    batches: Batches | None


class Store:
    """The complete state of a run: the objects of its trainer and evaluators, the global step, and the run record.

    Args:
      directory: `RunDirectory`.
      policy: `CheckpointPolicy`.
      workers: `Workers`.
      objects: dict from attribute name to trackable object, once all variables exist.
      global_step: the step's `tf.Variable`.
      replica_state: `ReplicaState`, or None for an evaluation.
      sync: puts on the disk what was reported; called before each commit, from another thread.

    Attributes:
      input_state: `InputState`.
      saved_step: the step whose state was last saved or restored, or None.

    Raises:
      UsageError: if an object has the name of one of looplib's own.
    """

    def __init__(
        self,
        directory: RunDirectory,
        policy: CheckpointPolicy,
        workers: Workers,
        objects: dict[str, Any],
        global_step: tf.Variable,
        replica_state: ReplicaState | None,
        sync: Callable[[], None],
    ) -> None:
        self._directory = directory
        self._policy = policy
        self._workers = workers
        self._run_state = RunState()
        self._replica_state = replica_state
        self._checkpoints: Checkpoints | None = None
        self.input_state = InputState()
        self.saved_step: int | None = None
        own = {"global_step": global_step, "run_state": self._run_state}
        if directory.writes:
            own |= {"input_state": self.input_state, "replica_state": replica_state}
        for name in objects.keys() & {*own, "save_counter"}:
            raise UsageError(f"the attribute name {name!r} is reserved in checkpoints; rename the attribute")
        if directory.checkpoints:
            self._checkpoints = Checkpoints(
                directory.checkpoints, {**objects, **own}, policy, workers, check=directory.check_lock, sync=sync
            )

    def __bool__(self) -> bool:
        """Returns whether anything is kept on disk."""
        return self._checkpoints is not None

    @property
    def record(self) -> RunRecord:
        """The `RunRecord`; another object after each restore."""
        return self._run_state.record

    @property
    def input_offset(self) -> int:
        """Global batches that rollbacks have left out: the position in the data is the step plus these."""
        return self.record.input_offset

    def save(self, step: int, fill_in: Callable[[RunRecord], None], wait: bool) -> None:
        """Saves the state, unless that of this step is saved.

        Args:
          step: the global step.
          fill_in: sets the fields of the run record that are known only at a save; called if something is saved.
          wait: returns only when the checkpoint is committed.

        Raises:
          UsageError: if it, or the save before it, could not be written.
        """
        if self.saved_step != step:
            fill_in(self.record)
            self._checkpoints.note_in(self.record)
            own = b""
            if self._workers.count > 1:
                own, self.input_state.position = self.input_state.position, b""
            self._checkpoints.save(step, wait, own)
            self.saved_step = step
        elif wait:
            self._checkpoints.wait()

    def forget_save_of_other_values(self, step: int) -> None:
        """Lets the next `save` write a step that is saved, if the variables have other values than its checkpoint.

        Workers wait for each other.
        """
        if self.saved_step == step and self._workers.any_of(self._checkpoints.differs(step)):
            self.saved_step = None

    def set_newer_aside(self, step: int) -> None:
        """Moves the checkpoints of later steps into `set_aside`, because the training continues from `step`."""
        if self._checkpoints:
            self._checkpoints.set_aside_after(step)

    @property
    def saving(self) -> bool:
        """Returns whether a save is being written in the background."""
        return self._checkpoints is not None and self._checkpoints.saving

    def take_committed(self) -> list[str]:
        """Returns the paths of the checkpoints that this process has committed since the last call."""
        committed = self._checkpoints.committed if self._checkpoints else []
        return [committed.pop(0) for _ in range(len(committed))]

    def wait(self) -> None:
        """Waits for a save under way.

        Raises:
          UsageError: if it failed.
        """
        if self._checkpoints:
            self._checkpoints.wait()

    def raise_failure(self) -> None:
        """Raises the `UsageError` of a background save that has failed meanwhile; does not wait."""
        if self._checkpoints:
            self._checkpoints.check()

    def add_scores(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Keeps the metrics of an evaluation with the checkpoint of its step, if there is one.

        Args:
          step: the global step.
          results: dict from evaluator name to metrics.
        """
        if self._directory.writes and self._checkpoints and self.saved_step == step and self._workers.is_chief:
            scores = {
                f"{name}/{metric}": value for name, metrics in results.items() for metric, value in metrics.items()
            }
            self._checkpoints.add_scores(step, scores)

    def restore(self, path: str, rollback: Rollback | None = None, optimizers: Mapping[str, str] | None = None) -> int:
        """Restores the state; returns its step.

        Args:
          path: the checkpoint.
          rollback: the `Rollback` for which it is restored, or None.
          optimizers: dict from the name of each of the trainer's optimizers to its class; None for an evaluation.

        Raises:
          UsageError: if it cannot be read or belongs to another model.
        """
        self._directory.check_intact(path)
        step, record = peek(path)
        self._check_optimizers(path, record, optimizers)
        writes, partial = self._directory.writes, self._policy.partial
        mode = RestoreMode.STRICT if writes else RestoreMode.SUBSET
        self._checkpoints.restore(path, RestoreMode.INTERSECTION if partial else mode)
        if self._replica_state:
            self._replica_state.apply()
        if writes:
            self._read_position(path)
        if rollback:
            self.record.rollbacks, self.record.input_offset = rollback.rollbacks, rollback.input_offset
            if rollback.batches:  # the checkpoint may be of a time before the last change of their size
                self.record.batches_are(rollback.batches)
        self.saved_step = step if os.path.dirname(path) == self._directory.checkpoints else None
        return step

    def _read_position(self, path: str) -> None:
        """Sets the position in the data: this worker's, if as many workers have saved theirs."""
        own, count = read_position(path, self._workers)
        count = 1 if self.input_state.position else count
        if self._workers.count > 1 or count > 1:
            self.input_state.position = own
        if count not in (0, self._workers.count):
            logging.info(
                "the positions in the data of %s were saved by %d worker%s, and this run has %d: no saved state of an "
                "iterator is used",
                path,
                count,
                "s" if count > 1 else "",
                self._workers.count,
            )

    def _check_optimizers(self, path: str, record: RunRecord, ours: Mapping[str, str] | None) -> None:
        """Raises `UsageError` if a checkpoint was made with other optimizers, some of whose slots may fit."""
        theirs = record.optimizers
        if theirs is None or ours is None or self._policy.partial:
            return
        # More of them here are no fault of theirs: the checkpoint lacks the variables of new ones, which is said later.
        swapped = any(theirs.get(name, kind) != kind for name, kind in ours.items())
        if swapped or Counter(theirs.values()) - Counter(ours.values()):
            raise UsageError(
                f"the checkpoint {path} was made by another optimizer ({', '.join(theirs.values())}) than this run's "
                f"({', '.join(ours.values())}); use a separate model_dir (and start from these weights with "
                "--warm_start), build the optimizer that the checkpoint was made with, or let the new one start from "
                "the beginning (--partial_restore)"
            )

    def warn_of_changes(self, step: int, settings: Mapping[str, int | str | None]) -> None:
        """Warns where the restored checkpoint was made with other settings that decide the numbers to come.

        Args:
          step: the step that was restored.
          settings: dict from the name of a field of the run record to its value in this start.
        """
        for name, ours in settings.items():
            theirs = getattr(self.record, name)
            if theirs is not None and theirs != ours:
                logging.warning(
                    "%s was %s in the checkpoint and is %s in this run: from step %d, %s",
                    name, theirs, ours, step,
                    _CONSEQUENCES[name],
                )  # fmt: skip
