"""Checkpoints: what is saved, when, and how it is restored strictly."""

import dataclasses
import json
import os
import re
import tempfile
import time

import tensorflow as tf

from looplib import keras_family
from looplib.errors import UsageError


@dataclasses.dataclass(frozen=True)
class CheckpointPolicy:
    """When to save and what to keep.

    A save before each evaluation inside a training run, and one at the end, happen whatever the interval is.

    Attributes:
      every_steps: save at exact multiples of this many steps; default 1000.
      keep_last: how many of the newest checkpoints to keep; default 5.
    """

    every_steps: int = 1000
    keep_last: int = 5

    def __post_init__(self):
        for name in ("every_steps", "keep_last"):
            positive(name, getattr(self, name))


def positive(name, value):
    """Raises `UsageError` unless `value` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} is {value!r}; expected a whole number of at least 1")


class RunState(tf.train.experimental.PythonState):
    """The controller's own state, kept in the checkpoint as JSON.

    Attributes:
      values: dict of what JSON can hold.
    """

    def __init__(self):
        super().__init__()
        self.values = {}

    def serialize(self):
        """Returns the JSON text to save."""
        return json.dumps(self.values)

    def deserialize(self, string_value):
        """Takes the JSON text that was saved."""
        self.values = json.loads(string_value)


def state_of(task):
    """Finds what a trainer or evaluator holds that a checkpoint must.

    Args:
      task: a `Trainer` or `Evaluator`.

    Returns:
      dict from attribute name to a trackable object, or a list of variables where TensorFlow cannot track the object
      itself: a Keras 3 metric or seed generator (its variables), and `<name>_untracked` for the seeds in a Keras 3
      model and for what a list or dict holds of these.
    """
    state = {}
    for name, value in vars(task).items():
        if name == "global_step":
            continue  # the controller's own
        untracked = keras_family.untracked_variables(value)
        if _trackable(value):
            state[name] = value
            if untracked:
                state[f"{name}_untracked"] = untracked
        elif untracked:
            state[name] = untracked
    return state


def _trackable(value):
    if isinstance(value, (list, tuple, dict)):
        return any(_trackable(item) for item in (value.values() if isinstance(value, dict) else value))
    if value is None or isinstance(value, (bool, int, float, str, bytes, tf.Tensor, tf.data.Dataset)):
        return False
    try:  # TensorFlow has no public name for the class, but says what it takes
        tf.train.Checkpoint(value=value)
    except ValueError:
        return False
    return True


class Checkpoints:
    """The checkpoints of one run directory.

    Args:
      directory: where they are, such as `<model_dir>/checkpoints`; it is made by the first save.
      objects: dict from name to trackable object: the whole state.
      keep_last: how many to keep.
    """

    def __init__(self, directory, objects, keep_last=5):
        self.directory = directory
        self._checkpoint = tf.train.Checkpoint(**objects)
        self._manager = tf.train.CheckpointManager(
            self._checkpoint, directory, max_to_keep=keep_last, checkpoint_name="ckpt"
        )

    def save(self, step):
        """Saves the state as `ckpt-<step>`; returns its path.

        Raises:
          OSError, tf.errors.OpError: where it cannot be written.
        """
        return self._manager.save(checkpoint_number=step)

    @property
    def latest(self):
        """The path of the newest checkpoint, or None."""
        return latest_checkpoint(self.directory)

    def restore(self, path, partial=False):
        """Restores the state.

        Args:
          path: a checkpoint's path, `.../ckpt-<step>`.
          partial: lets the checkpoint hold more than the objects here, as an evaluation needs.

        Raises:
          UsageError: if the checkpoint is not one of this model; it lists the keys of both sides. The variables may
            then be partly restored.
        """
        try:
            status = self._checkpoint.restore(path)  # read() would not know the manager's save counter
            if partial:
                status.assert_existing_objects_matched().expect_partial()
            else:
                status.assert_consumed()
        except (ValueError, AssertionError) as error:
            raise UsageError(self._mismatch(path, partial)) from error
        except (tf.errors.OpError, IndexError) as error:
            raise UsageError(
                f"the checkpoint {path} cannot be read ({first_line(error)}); name an older one that is "
                "whole, or move it away"
            ) from error

    def _mismatch(self, path, partial):
        """Compares keys with a throw-away checkpoint of what is here: TensorFlow names only the first difference."""
        theirs = _keys(path)
        with tempfile.TemporaryDirectory() as folder:
            ours = _keys(self._checkpoint.write(os.path.join(folder, "live")))
        missing = sorted(ours.keys() - theirs.keys())
        unused = [] if partial else sorted(theirs.keys() - ours.keys())
        shapes = [
            f"{key} {theirs[key]} there, {ours[key]} here" for key in sorted(ours.keys() & theirs.keys())
            if theirs[key] != ours[key]
        ]  # fmt: skip
        differences = (("only here", missing), ("only there", unused), ("other shapes", shapes))
        return (
            f"the checkpoint {path} was made by another model or optimizer; give this run a model_dir of its own, or "
            "build the model that the checkpoint was made with ("
            + "; ".join(_listing(title, items) for title, items in differences if items)
            + ")"
        )


def latest_checkpoint(directory):
    """Returns the path of the newest checkpoint in a directory, or None."""
    latest = tf.train.latest_checkpoint(directory)
    if latest:
        return latest
    # The file `checkpoint`, which names the newest, may be lost.
    names = tf.io.gfile.glob(os.path.join(directory, "ckpt-*.index"))
    steps = [int(match[1]) for match in (re.search(r"ckpt-(\d+)\.index$", name) for name in names) if match]
    return os.path.join(directory, f"ckpt-{max(steps)}") if steps else None


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
            f"{path} is not a checkpoint that looplib can read ({first_line(error)}); name a checkpoint "
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
            f"model_dir {directory} cannot be written to ({first_line(error)}); name a directory that can be made and "
            "written, or mend its permissions"
        ) from error


def first_line(error):
    """The first line of an exception's message, for a sentence of one line."""
    lines = re.sub(r"\{\{.*?\}\}", "", str(getattr(error, "message", error))).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def _keys(path):
    return {key.replace("/.ATTRIBUTES/VARIABLE_VALUE", ""): shape for key, shape in tf.train.list_variables(path)
            if not key.startswith(("_CHECKPOINTABLE", "save_counter")) and not key.endswith("py_state")}  # fmt: skip


def _listing(title, items, most=4):
    shown = ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")
    return f"{title}: {shown}"
