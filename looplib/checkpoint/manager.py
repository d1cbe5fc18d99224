"""Checkpoints of one run: saved in the background, pruned by the policy, restored strictly."""

import dataclasses
import enum
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib import files, folders
from looplib.checkpoint import commits, contents, marker, worker_positions
from looplib.checkpoint.marker import Measured
from looplib.checkpoint.matching import differences, misplaced
from looplib.checkpoint.names import Live, Saved
from looplib.checkpoint.policy import CheckpointPolicy
from looplib.checkpoint.snapshot import Snapshots, host_device, objects_of
from looplib.checkpoint.warm_start import describe_differences, take_what_fits
from looplib.cluster import peers
from looplib.cluster.collectives import OF_OTHERS, Workers
from looplib.compat import tensorflow as _tf
from looplib.errors import UsageError, gist, with_cure
from looplib.task.plain import as_bytes
from looplib.task.record import Contents, RunRecord, VariableNames

_MOST_STEPS = 2**53  # beyond any run, and small enough for the arithmetic of positions in int64


class RestoreMode(enum.Enum):
    """Which differences between a checkpoint and the objects here a restore allows."""

    STRICT = enum.auto()  # none
    SUBSET = enum.auto()  # the checkpoint may hold more, such as the optimizer, which an evaluation does not have
    INTERSECTION = enum.auto()  # both may hold more


class Checkpoints:
    """The checkpoints of one run directory, written by one process: where several workers train, by the chief.

    Only the positions in the data of several workers are written by each of them.

    A save takes a snapshot of the state and hands it to a thread that writes, commits and tidies; there is one save at
    a time. The first save of a process, from which the keys are learned, and every save of state that only TensorFlow
    can write (a lookup table, say), let the caller wait.

    Args:
      directory: where they are, such as `<model_dir>/checkpoints`; it is made by the first save.
      objects: dict from name to trackable object: the complete state.
      policy: `CheckpointPolicy`.
      workers: the workers. One that is not the chief has to read all values together with the chief, because some are
        summed over workers.
      check: raises `UsageError` if the directory is not this process's any more; called before files are written and
        before they are committed.
      sync: puts on the disk what the checkpoint calls reported; called before the commit.

    Attributes:
      committed: the paths that were committed here, of which the owner takes those that it has seen out.
    """

    def __init__(
        self,
        directory: str,
        objects: Mapping[str, Any],
        policy: CheckpointPolicy = CheckpointPolicy(),
        workers: Workers | None = None,
        check: Callable[[], None] = lambda: None,
        sync: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory = directory
        self._workers = workers or Workers(tf.distribute.get_strategy())
        self._writes = self._workers.is_chief
        self._check = check
        self._sync = sync
        self._policy = policy
        self._checkpoint = tf.train.Checkpoint(**objects)
        self._objects = objects
        _ = self._checkpoint.save_counter  # makes it, as TensorFlow's own tools expect one
        # The files are this process's, also of variables on parameter servers.
        self._options = tf.train.CheckpointOptions(experimental_io_device=host_device())
        self._snapshots: Snapshots | None = None
        self._noted: tuple[VariableNames, dict[str, Contents]] | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self.committed: list[str] = []

    def save(self, step: int, wait: bool, position: bytes = b"") -> str:
        """Saves the state as `ckpt-<step>`.

        Args:
          step: the global step.
          wait: returns only when it is committed.
          position: this worker's in its data, for a file of its own; where there is one worker, the state has it.

        Returns:
          The path of the checkpoint.

        Raises:
          UsageError: if it, or the save before it, could not be written.
        """
        self.wait()
        path = commits.path_of(self.directory, step)
        try:
            self._save(path, step, position)
        except (OSError, tf.errors.OpError) as error:
            failure = self._failure(path, error)
            if failure is error:
                raise
            raise failure from error
        if wait:
            self.wait()
        return path

    def _save(self, path: str, step: int, position: bytes) -> None:
        if self._writes:
            self._check()
            folders.make_folder(*os.path.split(self.directory))
            self._set_aside([done.step for done in commits.committed(self.directory) if done.step >= step])
            commits.make_way(self.directory, step)
            if self._workers.count > 1:
                commits.begin(path)  # before any worker writes
        positions = worker_positions.write(path, position, self._workers)
        if not self._writes:
            self._read_along()
            return
        if not self._policy.in_background or self._snapshots is None:
            commits.begin(path)
            self._checkpoint.write(path, self._options)
            self._commit(path, step, positions)
            self._learn_from(path)
            return
        snapshot = self._snapshots.take()

        def write() -> None:
            try:
                commits.begin(path)
                self._snapshots.write(path, snapshot)
                snapshot.clear()
                self._commit(path, step, positions)
            except Exception as error:  # of any kind; it is raised where the run waits for this save
                self._error = self._failure(path, error)

        self._thread = threading.Thread(target=write, name="looplib-save", daemon=True)
        self._thread.start()
        peers.current.let_end(self._thread)

    def set_aside_after(self, step: int) -> None:
        """Moves the checkpoints of steps after `step` into `set_aside`; waits for a save under way."""
        self.wait()
        if self._writes:
            self._set_aside([found.step for found in commits.listing(self.directory) if found.step > step])

    def _set_aside(self, steps: list[int]) -> None:
        for step in steps:  # newest first, so that a run which is killed in between resumes from the newest one left
            place = commits.set_aside(self.directory, step)
            logging.warning("the checkpoint of step %d was superseded by this run; moved to %s", step, place)

    def _learn_from(self, path: str) -> None:
        """Gets ready to take snapshots, by the keys of a checkpoint that TensorFlow wrote."""
        if self._policy.in_background and self._snapshots is None:
            try:
                self._snapshots = Snapshots(self._checkpoint, path)
            except NotImplementedError as error:
                self._policy = dataclasses.replace(self._policy, in_background=False)
                logging.info("only TensorFlow can save %s; training waits for each save", error)

    def _read_along(self) -> None:
        """Reads all values like the writing worker, because reading some of them is a sum over workers."""
        if self._snapshots is not None:
            self._snapshots.take()
            return
        with tempfile.TemporaryDirectory() as folder:
            self._learn_from(self._checkpoint.write(os.path.join(folder, "ckpt")))

    def _commit(self, path: str, step: int, positions: Mapping[str, Measured]) -> None:
        self._sync()
        self._check()
        commits.commit(path, step, positions)
        self.committed.append(path)
        self._prune()
        if commits.list_is_foreign(self.directory):
            return
        # TensorFlow's text file that lists the checkpoints, for tf.train.latest_checkpoint and other tools.
        names = [os.path.basename(done.path) for done in reversed(commits.committed(self.directory))]
        lines = [f'model_checkpoint_path: "{names[-1]}"', *(f'all_model_checkpoint_paths: "{name}"' for name in names)]
        files.write_whole(os.path.join(self.directory, "checkpoint"), "\n".join(lines) + "\n")

    def _failure(self, path: str, error: Exception) -> Exception:
        # Values are read by all workers together, so that a save also fails where another worker is lost.
        if isinstance(error, UsageError) or (self._workers.count > 1 and isinstance(error, OF_OTHERS)):
            return error
        return _tf.lost_server(error) or UsageError(
            f"the checkpoint {path} could not be saved: {with_cure(error, 'free space or fix the permissions')}; then "
            "run the same command again"
        )

    @property
    def saving(self) -> bool:
        """Returns whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Waits for a save under way.

        Raises:
          UsageError: if it failed.
        """
        if self._thread is not None:
            self._thread.join()
        self.check()

    def check(self) -> None:
        """Raises the `UsageError` of a save that has failed meanwhile; does not wait."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def add_scores(self, step: int, scores: Mapping[str, float]) -> None:
        """Adds the metrics of an evaluation to the checkpoint of its step, if there is one, and prunes.

        Args:
          step: the global step.
          scores: dict from "<evaluator>/<metric>" to number.

        Raises:
          UsageError: if the policy keeps the best by a metric that is not among them.
        """
        metrics: dict[str, set[str]] = {}
        for name, _, metric in (score.partition("/") for score in scores):
            metrics.setdefault(name, set()).add(metric)
        self._policy.check(metrics, self.directory)
        self.wait()
        for done in commits.committed(self.directory):
            if done.step == step:
                marker.add_scores(done, scores)
        self._prune()

    def _prune(self) -> None:
        kept = commits.committed(self.directory)
        wanted = {done.step for rule in self._policy.keep for done in rule.select(kept)}
        for done in kept[1:]:
            if done.step not in wanted:
                commits.remove(done)

    def restore(self, path: str, mode: RestoreMode = RestoreMode.STRICT) -> None:
        """Restores the state.

        Args:
          path: a checkpoint's path, `.../ckpt-<step>`.
          mode: `RestoreMode`, which differences are allowed.

        Raises:
          UsageError: if the checkpoint is not one of this model; it lists what differs. The variables may then be
            partly restored.
        """
        self.wait()
        if mode is RestoreMode.INTERSECTION:
            take_what_fits(self._objects, path)
            return
        try:
            if self._compared(path, shapes=False).get("other names"):
                raise UsageError(self._mismatch(path, mode))
            status = self._checkpoint.restore(path, self._options)
            if mode is RestoreMode.SUBSET:
                status.assert_existing_objects_matched().expect_partial()
            else:
                status.assert_consumed()
        except UsageError:
            raise
        except (ValueError, AssertionError) as error:
            raise UsageError(self._mismatch(path, mode, error)) from error
        except (tf.errors.OpError, IndexError) as error:
            raise UsageError(
                f"the checkpoint {path} cannot be read ({gist(error)}); specify an older, intact one, or move it away"
            ) from error

    def differs(self, step: int) -> bool:
        """Returns whether the variables differ from the checkpoint of a step; False on workers that do not write."""
        self.wait()
        with tempfile.TemporaryDirectory() as folder:
            live = self._checkpoint.write(os.path.join(folder, "live"), self._options)
            if not self._writes:
                return False
            path = commits.path_of(self.directory, step)
            if not tf.io.gfile.exists(f"{path}.commit"):
                return True
            ours, theirs = tf.train.load_checkpoint(live), tf.train.load_checkpoint(path)
            keys = [key for key in ours.get_variable_to_shape_map() if _tf.is_variable_key(key)]
            return any(
                not theirs.has_tensor(key)  # after a partial restore
                or as_bytes(np.asarray(ours.get_tensor(key))) != as_bytes(np.asarray(theirs.get_tensor(key)))
                for key in keys
                if not key.startswith("save_counter/")
            )

    def note_in(self, record: RunRecord) -> None:
        """Notes in the record of a checkpoint what its variables are called, and what no variable holds."""
        if self._noted is None:
            self._noted = Live(self._objects).record(), contents.contents_of(self._objects)
        record.names, record.contents = self._noted

    def _compared(self, path: str, shapes: bool) -> dict[str, list[str]]:
        """Returns what a checkpoint and the objects here have apart, by titles; {} where the names are not known.

        Args:
          path: the checkpoint's.
          shapes: whether to look at all, or else only for other names at the same places.

        Raises:
          UsageError: if what no variable holds is not what the checkpoint was made with.
        """
        reader = tf.train.load_checkpoint(path)
        record = RunRecord.in_checkpoint(reader, path)
        contents.check(self._objects, record, path)
        graph = _tf.object_graph(reader)
        if graph is None:
            return {}
        saved = Saved(reader, graph, record.names, self._objects)
        moved = {"other names": sorted(misplaced(saved, objects_of(graph, self._checkpoint)))}
        return {**differences(saved), **moved} if shapes else moved

    def _mismatch(self, path: str, mode: RestoreMode, error: Exception | None = None) -> str:
        """Returns the sentence that lists all differences; TensorFlow's error names only the first one."""
        found = self._compared(path, shapes=True)
        if mode is RestoreMode.SUBSET:
            found.pop("only there", None)
        return (
            f"the checkpoint {path} was made by another model or optimizer; use a separate model_dir, or "
            "build the model that the checkpoint was made with, or ask for a partial restore "
            f"(CheckpointPolicy(partial=True), --partial_restore) ({describe_differences(found) or gist(error)})"
        )


def latest_checkpoint(directory: str) -> str | None:
    """Returns the path of the newest committed checkpoint in a directory, or None."""
    done = commits.newest(directory)
    return done.path if done else None


def peek(path: str) -> tuple[int, RunRecord]:
    """Reads the global step and the run record without touching the model.

    Args:
      path: a checkpoint's path.

    Raises:
      UsageError: if it is not a looplib checkpoint, or its run record cannot be read.
    """
    try:
        reader = tf.train.load_checkpoint(path)
        step = int(reader.get_tensor(_tf.variable_key("global_step")))
        if os.path.basename(path) != f"ckpt-{step}":
            raise ValueError(f"the step in it is {step}")
        text = reader.get_tensor(_tf.python_state_key("run_state"))
    except (ValueError, TypeError, IndexError, tf.errors.OpError) as error:
        raise UsageError(
            f"{path} is not a checkpoint that looplib can read ({gist(error)}); name a checkpoint "
            "such as <model_dir>/checkpoints/ckpt-1000, or move this one away"
        ) from error
    record = RunRecord.from_json(text, path)
    if not 0 <= step + record.input_offset < _MOST_STEPS:
        raise UsageError(
            f"the position in the data of {path} is {step + record.input_offset} (step {step}, input_offset "
            f"{record.input_offset}), expected a position from 0 to 2**53; name another checkpoint"
        )
    if record.global_batch_size is not None and not record.saved_batches.holds(step, step + record.input_offset):
        raise UsageError(
            f"the run record in {path} has batches of {record.saved_batches} examples, of which no run comes to step "
            f"{step}; name another checkpoint"
        )
    return step, record
