"""The store of a run: its directory, the lock on it, its checkpoints, and the controller's own state in them."""

import os
import time

import tensorflow as tf
from absl import logging

from looplib import commits, keras_family
from looplib.checkpoints import Checkpoints, check_writable, peek
from looplib.errors import UsageError
from looplib.lock import acquire
from looplib.state import InputState, RunState


class Store:
    """What of a run is on disk, and what the controller keeps there besides the tasks' state.

    Opening it for a training locks the directory, sets aside what is damaged or was not finished, and finds the newest
    checkpoint that is intact. An evaluation only reads.

    Args:
      model_dir: the run directory; None keeps nothing.
      policy: `CheckpointPolicy`.
      writes: whether this controller trains.

    Attributes:
      values: dict of what JSON can hold: the controller's own state.
      input_state: `InputState`.
      start: the `Commit` that a run goes on from, or None.
      writable: whether metrics can be written to the run directory.

    Raises:
      UsageError: if the directory is in use by another process, or cannot be written by a training.
    """

    def __init__(self, model_dir, policy, writes):
        self._policy = policy
        self._run_state = RunState()
        self._writes = writes
        self._lock = None
        self._checkpoints = None
        self.input_state = InputState()
        self.start = None
        self.writable = bool(model_dir)
        self.directory = None
        if not model_dir:
            return
        self.directory = os.path.join(model_dir, "checkpoints")
        try:
            check_writable(model_dir)
        except UsageError as error:
            if writes or not tf.io.gfile.isdir(model_dir):
                raise
            self.writable = False
            logging.warning("%s; this evaluation reports on the console only", error)
        if writes:
            self._lock = acquire(model_dir)
        self.start = commits.newest_intact(self.directory, tidy=writes)

    @property
    def values(self):
        """The controller's own state."""
        return self._run_state.values

    def start_position(self):
        """Returns the global batches that were consumed when `start` was saved; 0 without one."""
        if not self.start:
            return 0
        step, values = peek(self.start.path)
        return step + values.get("input_offset", 0)

    def open(self, objects, global_step):
        """Takes the objects that make the state, once all variables exist.

        Args:
          objects: dict from attribute name to trackable object.
          global_step: the step's `tf.Variable`.

        Raises:
          UsageError: if a name is one of looplib's own.
        """
        own = {"global_step": global_step, "run_state": self._run_state}
        if self._writes:
            own["input_state"] = self.input_state
        for name in objects.keys() & {*own, "save_counter"}:
            raise UsageError(f"the attribute {name!r} has the name of something else in a checkpoint; rename it")
        if self.directory:
            self._checkpoints = Checkpoints(self.directory, {**objects, **own}, self._policy)

    def checkpoints(self, what):
        """Returns the `Checkpoints`.

        Raises:
          UsageError: without a `model_dir`, naming `what` needs it.
        """
        if not self._checkpoints:
            raise UsageError(f"{what} needs a model_dir, and this controller has none; give Controller(model_dir=...)")
        return self._checkpoints

    def __bool__(self):
        return self._checkpoints is not None

    @property
    def latest(self):
        """The path of the newest committed checkpoint, or None."""
        return self._checkpoints.latest if self._checkpoints else None

    @property
    def saving(self):
        """Whether a save is being written in the background."""
        return self._checkpoints is not None and self._checkpoints.saving

    def newest_up_to(self, step):
        """Finds the newest intact checkpoint of at most a step, and sets aside the newer ones.

        Returns:
          A `Commit`, or None.
        """
        self._checkpoints.wait()
        for newer, _, _ in commits.listing(self.directory):
            if newer > step:
                commits.set_aside(self.directory, newer)
        return commits.newest_intact(self.directory, tidy=True)

    def wait_for_newer(self, than, timeout):
        """Waits until there is another newest checkpoint.

        Args:
          than: the path that is known; None for any.
          timeout: seconds to wait; None waits for ever.

        Returns:
          The path, or None if none came in time.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            done = commits.newest(self.directory)
            if done and done.path != than and not commits.verify(done, thorough=False):
                return done.path
            if until is not None and time.monotonic() >= until:
                return None
            time.sleep(min(1.0, timeout if timeout else 1.0))

    def close(self):
        """Waits for a save under way, lets go of the lock, and raises the save's error if it failed."""
        self._lock = None
        if self._checkpoints:
            self._checkpoints.wait()


def warm_start(objects, path):
    """Takes the weights that fit from another run's checkpoint or a SavedModel.

    Only models and layers are looked at; optimizers start anew.

    Args:
      objects: dict from attribute name to trackable object.
      path: a checkpoint, such as `<model_dir>/checkpoints/ckpt-1000`, or the directory of a SavedModel, which is taken
        for the only model here.

    Raises:
      UsageError: if it cannot be read, fits nothing, or has a weight of another shape.
    """
    models = {name: value for name, value in objects.items() if keras_family.is_layer(value)}
    saved_model = tf.io.gfile.exists(os.path.join(path, "saved_model.pb"))
    prefix = os.path.join(path, "variables", "variables") if saved_model else path
    if saved_model and len(models) == 1:
        target = tf.train.Checkpoint(next(iter(models.values())))
    else:
        target = tf.train.Checkpoint(**models)
    try:
        target.read(prefix).assert_nontrivial_match().expect_partial()
    except (AssertionError, ValueError, IndexError, tf.errors.OpError) as error:
        raise UsageError(
            f"nothing could be taken from {path} to start from ({commits.first_line(error)}); expected a checkpoint with "
            f"weights under {', '.join(sorted(models)) or 'the name of a model'}, or a SavedModel of the same model"
        ) from error
    logging.info("started from the weights in %s", path)
