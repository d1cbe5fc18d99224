"""Checkpoints: when to save, in the background, what to keep, and how state is restored strictly."""

import dataclasses
import json
import os
import tempfile
import threading
import time

import tensorflow as tf
from absl import logging

from looplib import commits
from looplib.coordinator import lost_server
from looplib.errors import UsageError, gist, whole_number
from looplib.guards import Guards
from looplib.snapshots import Snapshots, host_device
from looplib.transfers import take_what_fits, told


@dataclasses.dataclass(frozen=True)
class KeepLast:
    """Keeps the newest checkpoints.

    Attributes:
      number: how many; default 5.
    """

    number: int = 5

    def __post_init__(self):
        object.__setattr__(self, "number", whole_number("KeepLast.number", self.number))

    def select(self, kept):
        """Returns those of a list of `Commit`, newest first, to keep."""
        return kept[: self.number]


@dataclasses.dataclass(frozen=True)
class KeepBest:
    """Keeps the checkpoints with the best values of a metric.

    Attributes:
      metric: evaluator and metric, such as "eval/accuracy".
      mode: "max" or "min", which is better.
      number: how many; default 1.
    """

    metric: str
    mode: str = "max"
    number: int = 1

    def __post_init__(self):
        object.__setattr__(self, "number", whole_number("KeepBest.number", self.number))
        if self.mode not in ("max", "min") or "/" not in self.metric:
            raise UsageError(
                f"KeepBest got the metric {self.metric!r} and the mode {self.mode!r}; expected <evaluator>/<metric>, "
                'such as "eval/accuracy", and "max" or "min"'
            )

    def select(self, kept):
        """Returns those of a list of `Commit`, newest first, to keep; of equal ones the newer."""
        scored = [done for done in kept if done.scores.get(self.metric) is not None]
        return sorted(scored, key=lambda done: done.scores[self.metric], reverse=self.mode == "max")[: self.number]


@dataclasses.dataclass(frozen=True)
class KeepEvery:
    """Keeps the checkpoints at multiples of a number of steps, for ever.

    Attributes:
      steps: the number.
    """

    steps: int

    def __post_init__(self):
        object.__setattr__(self, "steps", whole_number("KeepEvery.steps", self.steps))

    def select(self, kept):
        """Returns those of a list of `Commit` to keep."""
        return [done for done in kept if done.step % self.steps == 0]


@dataclasses.dataclass(frozen=True)
class CheckpointPolicy:
    """When to save, what to keep, and what a run may start from.

    A save before each evaluation inside a training run, and one at the end, happen whatever the interval is.

    Attributes:
      every_steps: save at exact multiples of this many steps; default 1000.
      keep: what to keep, a tuple of `KeepLast`, `KeepBest`, `KeepEvery` or anything with their `select`; a checkpoint
        is kept if one of them wants it. The newest always is.
      in_background: writes while the training goes on; default True.
      partial: restores what a checkpoint of this run has and leaves the rest as it was made, and the other way round;
        default False, which refuses a checkpoint of another model.
      guards: `Guards`, what may be committed, and when to go back to a checkpoint.
      warm_start: a checkpoint of another run, such as `<model_dir>/checkpoints/ckpt-1000`, or a SavedModel's directory,
        from which a run without a checkpoint of its own takes the weights that fit; default "" for none.
      continue_from: a checkpoint that another program wrote with `tf.train.Checkpoint`, as Orbit's and Model Garden's
        do, with `global_step` and the model and the optimizer under this run's attribute names; or a directory, for its
        newest. A run without a checkpoint of its own goes on from there, step, weights and optimizer, with its data
        from the start, as such a checkpoint has no place in it; default "" for none.
    """

    every_steps: int = 1000
    keep: tuple = (KeepLast(),)
    in_background: bool = True
    partial: bool = False
    guards: Guards = Guards()
    warm_start: str = ""
    continue_from: str = ""

    def __post_init__(self):
        object.__setattr__(self, "every_steps", whole_number("every_steps", self.every_steps))
        if self.warm_start and self.continue_from:
            raise UsageError(
                f"a run starts from warm_start ({self.warm_start}) or from continue_from ({self.continue_from}), not "
                "from both; leave one out"
            )
        keep = self.keep if isinstance(self.keep, (tuple, list)) else (self.keep,)
        if not keep or not all(hasattr(rule, "select") for rule in keep):
            raise UsageError(f"CheckpointPolicy.keep is {self.keep!r}; expected a tuple such as (KeepLast(5),)")
        object.__setattr__(self, "keep", tuple(keep))

    def check(self, evaluators, model_dir):
        """Raises `UsageError` for what a training with these evaluators and this directory could not do.

        Args:
          evaluators: dict from name to `Evaluator`.
          model_dir: the run directory, or None.
        """
        for rule in self.keep:
            name = (getattr(rule, "metric", None) or "").partition("/")[0]
            if name and name not in evaluators:
                raise UsageError(
                    f"the best checkpoints by {rule.metric!r} are to be kept, and there is no evaluator {name!r}; "
                    f"there is {', '.join(sorted(evaluators)) or 'none'}"
                )
        if self.guards.may_roll_back and not model_dir:
            raise UsageError(
                "a rollback needs checkpoints, and there is no model_dir to keep them in; give "
                "Controller(model_dir=...)"
            )


class Checkpoints:
    """The checkpoints of one run directory, written by one process: where several workers train, by the chief.

    A save takes a snapshot of the state and hands it to a thread that writes, commits and tidies; there is one save at
    a time. The first save of a process, from which the keys are learned, and every save of state that only TensorFlow
    can write (a lookup table, say), let the caller wait.

    Args:
      directory: where they are, such as `<model_dir>/checkpoints`; it is made by the first save.
      objects: dict from name to trackable object: the whole state.
      policy: `CheckpointPolicy`.
      writes: False for a worker that is not the chief. It has to read all values with it, as some are summed over
        workers, and writes nothing.
    """

    def __init__(self, directory, objects, policy=CheckpointPolicy(), writes=True):
        self.directory = directory
        self._writes = writes
        self._policy = policy
        self._checkpoint = tf.train.Checkpoint(**objects)
        _ = self._checkpoint.save_counter  # makes it, as TensorFlow's own tools expect one
        # The files are this process's, also of variables on parameter servers.
        self._options = tf.train.CheckpointOptions(experimental_io_device=host_device())
        self._snapshots = None
        self._thread = None
        self._error = None

    @property
    def latest(self):
        """The path of the newest committed checkpoint, or None."""
        return latest_checkpoint(self.directory)

    def save(self, step, wait):
        """Saves the state as `ckpt-<step>`.

        Args:
          step: the global step.
          wait: returns only when it is committed.

        Returns:
          str, its path.

        Raises:
          UsageError: if it, or the save before it, could not be written.
        """
        self.wait()
        path = commits.path_of(self.directory, step)
        try:
            self._save(path, step)
        except (OSError, tf.errors.OpError) as error:
            raise self._failure(path, error) from error
        if wait:
            self.wait()
        return path

    def _save(self, path, step):
        if not self._writes:
            self._read_along()
            return
        tf.io.gfile.makedirs(self.directory)
        for other, done, _ in commits.listing(self.directory):
            if done and other >= step:  # an older one was restored, and the run goes on otherwise
                place = commits.set_aside(self.directory, other)
                logging.warning(
                    "the checkpoint of step %d is of a run that went on otherwise; it is in %s", other, place
                )
        if not self._policy.in_background or self._snapshots is None:
            self._checkpoint.write(path, self._options)
            self._commit(path, step)
            self._learn_from(path)
            return
        snapshot = self._snapshots.take()

        def write():
            try:
                self._snapshots.write(path, snapshot)
                snapshot.clear()
                self._commit(path, step)
            except Exception as error:  # whatever it is, it belongs to whoever waits for this save
                self._error = self._failure(path, error)

        self._thread = threading.Thread(target=write, name="looplib-save", daemon=True)
        self._thread.start()

    def _learn_from(self, path):
        """Gets ready to take snapshots, by the keys of a checkpoint that TensorFlow wrote."""
        if self._policy.in_background and self._snapshots is None:
            try:
                self._snapshots = Snapshots(self._checkpoint, path)
            except NotImplementedError as error:
                self._policy = dataclasses.replace(self._policy, in_background=False)
                logging.info("only TensorFlow can save %s, so the training waits for each save", error)

    def _read_along(self):
        if self._snapshots is not None:
            self._snapshots.take()
            return
        with tempfile.TemporaryDirectory() as folder:
            self._learn_from(self._checkpoint.write(os.path.join(folder, "ckpt")))

    def _commit(self, path, step):
        commits.commit(path, step)
        self._prune()
        # For tf.train.latest_checkpoint and other tools, TensorFlow's text file of what there is.
        names = [os.path.basename(done.path) for _, done, _ in reversed(commits.listing(self.directory)) if done]
        lines = [f'model_checkpoint_path: "{names[-1]}"', *(f'all_model_checkpoint_paths: "{name}"' for name in names)]
        commits.write_whole(os.path.join(self.directory, "checkpoint"), "\n".join(lines) + "\n")

    def _failure(self, path, error):
        return lost_server(error) or UsageError(
            f"the checkpoint {path} could not be saved ({gist(error)}); free space or mend the permissions and "
            "run the same command again"
        )

    @property
    def saving(self):
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self):
        """Waits for a save under way.

        Raises:
          UsageError: if it failed.
        """
        if self._thread is not None:
            self._thread.join()
        self.check()

    def check(self):
        """Raises the `UsageError` of a save that has failed meanwhile; does not wait."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def add_scores(self, step, scores):
        """Notes the metrics of an evaluation with the checkpoint of its step, if there is one, and tidies.

        Args:
          step: the global step.
          scores: dict from "<evaluator>/<metric>" to number.

        Raises:
          UsageError: if the policy keeps the best by a metric that is not among them.
        """
        for rule in self._policy.keep:
            if getattr(rule, "metric", None) and rule.metric not in scores:
                raise UsageError(
                    f"the best checkpoints by {rule.metric!r} are to be kept, and the evaluation gives "
                    f"{', '.join(sorted(scores))}; name one of these"
                )
        self.wait()
        for _, done, _ in commits.listing(self.directory):
            if done and done.step == step:
                commits.add_scores(done, scores)
        self._prune()

    def _prune(self):
        kept = [done for _, done, _ in commits.listing(self.directory) if done]
        wanted = {done.step for rule in self._policy.keep for done in rule.select(kept)}
        for done in kept[1:]:
            if done.step not in wanted:
                commits.remove(done)

    def restore(self, path, partial=False):
        """Restores the state.

        Args:
          path: a checkpoint's path, `.../ckpt-<step>`.
          partial: lets the checkpoint hold more than the objects here, as an evaluation needs; "both" lets also the
            objects here be more than it holds.

        Raises:
          UsageError: if the checkpoint is not one of this model; it lists the keys of both sides. The variables may
            then be partly restored.
        """
        self.wait()
        if partial == "both":
            take_what_fits(self._checkpoint, path)
            return
        try:
            status = self._checkpoint.restore(path, self._options)
            if partial:
                status.assert_existing_objects_matched().expect_partial()
            else:
                status.assert_consumed()
        except (ValueError, AssertionError) as error:
            raise UsageError(self._mismatch(path, partial)) from error
        except (tf.errors.OpError, IndexError) as error:
            raise UsageError(
                f"the checkpoint {path} cannot be read ({gist(error)}); name an older one that is "
                "whole, or move it away"
            ) from error

    def _mismatch(self, path, partial):
        """Compares keys with a throw-away checkpoint of what is here: TensorFlow names only the first difference."""
        theirs = _keys(path)
        with tempfile.TemporaryDirectory() as folder:
            ours = _keys(self._checkpoint.write(os.path.join(folder, "live"), self._options))
        differences = {
            "only here": ours.keys() - theirs.keys(),
            "only there": set() if partial else theirs.keys() - ours.keys(),
            "other shapes": [
                f"{key} {theirs[key]} there, {ours[key]} here" for key in ours.keys() & theirs.keys()
                if theirs[key] != ours[key]
            ],
        }  # fmt: skip
        return (
            f"the checkpoint {path} was made by another model or optimizer; give this run a model_dir of its own, or "
            "build the model that the checkpoint was made with, or ask for a partial restore "
            f"(CheckpointPolicy(partial=True), --partial_restore) ({told(differences)})"
        )


def latest_checkpoint(directory):
    """Returns the path of the newest committed checkpoint in a directory, or None."""
    done = commits.newest(directory)
    return done.path if done else None


def peek(path):
    """Reads the global step and the controller's own state without touching the model.

    Args:
      path: a checkpoint's path.

    Returns:
      `(step, values)`: int and dict.

    Raises:
      UsageError: if it is not a looplib checkpoint.
    """
    try:
        reader = tf.train.load_checkpoint(path)
        step = int(reader.get_tensor("global_step/.ATTRIBUTES/VARIABLE_VALUE"))
        return step, json.loads(reader.get_tensor("run_state/.ATTRIBUTES/py_state"))
    except (ValueError, IndexError, tf.errors.OpError) as error:
        raise UsageError(
            f"{path} is not a checkpoint that looplib can read ({gist(error)}); name a checkpoint "
            "such as <model_dir>/checkpoints/ckpt-1000"
        ) from error


def check_writable(directory):
    """Makes a directory and fails now, in a sentence, if it could not be written to at the first save.

    Raises:
      UsageError: naming the reason.
    """
    probe = os.path.join(directory, f".looplib-{os.getpid()}-{time.time_ns()}")
    try:
        tf.io.gfile.makedirs(directory)
        with tf.io.gfile.GFile(probe, "w") as file:
            file.write("")
        tf.io.gfile.remove(probe)
    except (OSError, tf.errors.OpError) as error:
        raise UsageError(
            f"model_dir {directory} cannot be written to ({gist(error)}); name a directory that can be made and "
            "written, or mend its permissions"
        ) from error


def _keys(path):
    return {key.replace("/.ATTRIBUTES/VARIABLE_VALUE", ""): shape for key, shape in tf.train.list_variables(path)
            if not key.startswith(("_CHECKPOINTABLE", "save_counter")) and not key.endswith("py_state")}  # fmt: skip
