"""Values from checkpoints that are not the run's own: a warm start, another program's, or only a part of one."""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from looplib import _keras, _tf
from looplib.checkpoint import choice, commits
from looplib.checkpoint.snapshot import assign_what_fits
from looplib.errors import UsageError, gist, join_names
from looplib.task.state import variables_of


def describe_differences(differences: Mapping[str, Iterable[str]]) -> str:
    """Returns a phrase of the differences between a checkpoint and objects: titles with names; "" for none."""
    return "; ".join(f"{title}: {join_names(sorted(names), most=4)}" for title, names in differences.items() if names)


def take_what_fits(root: Any, path: str) -> None:
    """Restores the values that a checkpoint and some objects have in common, by name and shape; logs the others.

    Args:
      root: the objects, under a `tf.train.Checkpoint`, or a model itself for a SavedModel of it.
      path: the checkpoint to take values from.

    Raises:
      UsageError: if nothing fits, or it cannot be read.
    """
    try:
        taken, others = assign_what_fits(root, path)
    except (ValueError, IndexError, tf.errors.OpError) as error:
        raise UsageError(f"{path} cannot be read ({gist(error)}); name a checkpoint such as ckpt-1000") from error
    left_out = describe_differences(others)
    if not taken:
        raise UsageError(
            f"nothing in {path} fits ({left_out}); name a checkpoint of the same model, or of a part of it under the "
            "same attribute names"
        )
    logging.info("took %d values from %s", taken, path)
    if left_out:
        logging.warning("not taken from %s (%s)", path, left_out)


def warm_start(objects: Mapping[str, Any], path: str) -> None:
    """Takes the weights that fit, by name and shape, from another run's checkpoint or a SavedModel.

    Only models and layers take values; optimizers keep their initial ones. What does not fit, such as a head for other
    classes, keeps its values and is named in the log.

    Args:
      objects: dict from attribute name to trackable object.
      path: a checkpoint, such as `<model_dir>/checkpoints/ckpt-1000`; a run directory, for the checkpoint that the run
        ended with, or with "@latest", "@best" or "@1000" after it for another one; or the directory of a SavedModel,
        which is that of the only model here.

    Raises:
      UsageError: if it cannot be read or fits nothing.
    """
    models = {name: value for name, value in objects.items() if _keras.is_layer(value)}
    root = tf.train.Checkpoint(**models)
    given, (path, which) = path, choice.divided(path)
    runs = [place for place in (os.path.join(path, "checkpoints"), path) if commits.newest(place)]
    if path != given and not runs:
        raise UsageError(f"there is no checkpoint in {path}, although {given} names one; name a run directory")
    if tf.io.gfile.exists(os.path.join(path, "saved_model.pb")):
        path = os.path.join(path, "variables", "variables")
        if len(models) == 1:
            root = next(iter(models.values()))
            if exported := _exported_variables(path):
                if exported != len(root.variables):  # an export has a list of them, and no names
                    raise UsageError(
                        f"nothing in {path} fits: it has {exported} variables and the model here "
                        f"{len(root.variables)}; expected an export of the same model"
                    )
                root = tf.train.Checkpoint(variables=list(root.variables))
    elif runs:
        path = choice.choose(runs[0], which).path
    take_what_fits(root, path.removesuffix(".index"))


def continue_from(objects: Mapping[str, Any], global_step: tf.Variable, path: str) -> tuple[str, int]:
    """Takes step, weights and optimizers from a checkpoint that another program wrote.

    Args:
      objects: dict from attribute name to trackable object.
      global_step: the step's `tf.Variable`.
      path: the checkpoint, or a directory, for its newest.

    Returns:
      `(path, step)`: the checkpoint that was taken and its step.

    Raises:
      UsageError: if it cannot be read, has no `global_step`, or lacks a weight or a variable of an optimizer.
    """
    if tf.io.gfile.isdir(path) and not (path := tf.train.latest_checkpoint(folder := path)):
        raise UsageError(f"there is no checkpoint in {folder} to continue from; specify one, or omit continue_from")
    path = path.removesuffix(".index")
    needed = {name: value for name, value in objects.items() if _keras.is_layer(value) or _keras.is_optimizer(value)}
    try:
        global_step.assign(tf.train.load_checkpoint(path).get_tensor(_tf.variable_key("global_step")))
        _, others = assign_what_fits(tf.train.Checkpoint(global_step=global_step, **objects), path)
    except (ValueError, IndexError, tf.errors.OpError) as error:
        raise UsageError(
            f"the run cannot continue from {path} ({gist(error)}); expected a checkpoint with global_step"
        ) from error
    names = {name for name, _ in variables_of(needed)}
    missing = [name for name in others["only here"] if name in names]
    if missing or others["of another shape"]:
        differences = describe_differences({**others, "only here": missing})
        raise UsageError(
            f"the run cannot continue from {path}, because its model or optimizer differs ({differences}); use "
            "warm_start to load only the matching weights"
        )
    return path, int(global_step)


def _exported_variables(path: str) -> int:
    """Returns how many variables a SavedModel of `model.export` lists instead of its layers; 0 for another one."""
    try:
        return sum(bool(re.match(r"variables/\d+/", name)) for name, _ in tf.train.list_variables(path))
    except (ValueError, tf.errors.OpError):
        return 0  # the next reader raises the error
