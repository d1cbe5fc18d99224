"""Values from checkpoints that are not the run's own: a warm start, another program's, or only a part of one."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from looplib import files
from looplib.checkpoint import choice, commits
from looplib.checkpoint.names import NamedVariable, SavedVariables
from looplib.checkpoint.restoring import check_contents, describe_differences, objects_of
from looplib.compat import keras as _keras
from looplib.compat import tensorflow as _tf
from looplib.errors import NoCheckpointError, UsageError, WarmStartError
from looplib.extras.weights.matching import Match
from looplib.messages import gist, join_names
from looplib.task.record import RunRecord
from looplib.task.state import variables_of


def take_what_fits(objects: Mapping[str, Any], path: str, weights_only: bool = False) -> None:
    """Restores the values that a checkpoint and some objects have in common, by name and shape; logs the others.

    Args:
      objects: dict from attribute name to trackable object, or from "" to a model, for a SavedModel of it.
      path: the checkpoint to take values from.
      weights_only: whether optimizers, averages and seeds keep their values.

    Raises:
      UsageError: if nothing fits, a value fits several variables, or the checkpoint cannot be read.
    """
    try:
        taken = _assign(objects, path, weights_only)
    except UsageError:
        raise
    except (ValueError, IndexError, tf.errors.OpError) as error:
        kind = WarmStartError if tf.io.gfile.exists(f"{path}.index") else NoCheckpointError
        raise kind(f"{path} cannot be read ({gist(error)}); name a checkpoint such as ckpt-1000") from error
    left_out = describe_differences(taken.others)
    if not taken.count:
        raise WarmStartError(
            f"nothing in {path} fits ({left_out or 'it has no such names'}); name a checkpoint of the same model, or "
            "of a part of it under the same attribute names"
        )
    logging.info("took %d values from %s", taken.count, path)
    if left_out:
        logging.warning("not taken from %s (%s)", path, left_out)


@dataclasses.dataclass(frozen=True)
class _LoadedValues:
    """What was taken from a checkpoint.

    Attributes:
      count: how many values.
      missing: the variables here that got none.
      reshaped: the names of those that have another shape there.
      unused: the names of what the checkpoint has besides.
    """

    count: int
    missing: list[NamedVariable]
    reshaped: list[str]
    unused: list[str]

    @property
    def others(self) -> dict[str, list[str]]:
        """What was not taken: dict from a reason to names."""
        missing = [name for _, name in sorted((leaf.owned, leaf.name) for leaf in self.missing)]  # weights first
        return {"only here": missing, "only there": self.unused, "of another shape": self.reshaped}


def _assign(objects: Mapping[str, Any], path: str, weights_only: bool = False) -> _LoadedValues:
    """Gives objects the values of a checkpoint where names and shapes agree."""
    reader = tf.train.load_checkpoint(path)
    graph = _tf.object_graph(reader)
    if graph is None:
        raise ValueError(f"TensorFlow {tf.__version__} keeps the structure of a checkpoint in a way unknown to looplib")
    record = RunRecord.in_checkpoint(reader, path)
    check_contents(objects, record, path)
    saved = SavedVariables(reader, graph, record.names, objects)
    live = saved.live
    if weights_only:
        live.leaves = [leaf for leaf in live.leaves if not (leaf.owned or leaf.name.endswith("seed_generator_state"))]
    match = Match(saved.leaves.values(), live, record.optimizers)
    if match.ambiguous:
        raise WarmStartError(
            f"values of {path} fit several layers here, whose names Keras has made and numbered: "
            f"{join_names(sorted({leaf.name for leaf in match.ambiguous}), most=4)}; give the layers that only one of "
            'the two models has names of their own, such as Dense(8, name="adapter")'
        )
    found, reshaped = {}, []
    for there, here in match.pairs:
        found[id(here)] = there.key
        if there.shape == here.shape:
            here.variable.assign(reader.get_tensor(there.key))
        else:
            reshaped.append(there.name)
    done, unused = set(found.values()), []
    states = objects_of(graph, objects.get("") or tf.train.Checkpoint(**objects))
    for number, node in enumerate(graph.nodes):
        for attribute in node.attributes:
            if isinstance(state := states.get(number), tf.train.experimental.PythonState):
                state.deserialize(reader.get_tensor(attribute.checkpoint_key))
            elif attribute.checkpoint_key not in done and attribute.name != "py_state":
                there = saved.leaves.get(number)
                if not weights_only or (there and not there.origin):
                    name = there.name if there else attribute.full_name or attribute.checkpoint_key
                    unused.append((bool(there and there.origin), name))
    missing = [leaf for leaf in live.leaves if id(leaf) not in found]
    known = {"save_counter", *(there.name for there, _ in match.pairs)}  # a variable may be in two places
    others = [name for _, name in sorted(unused) if name not in known]
    return _LoadedValues(len(found) - len(reshaped), missing, reshaped, others)


def warm_start(objects: Mapping[str, Any], path: str) -> None:
    """Takes the weights that fit, by name and shape, from another run's checkpoint or a SavedModel.

    Only layers and modules take values, also those in lists and dicts; optimizers, averages and seeds keep their
    initial ones. What does not fit, such as a head for other classes, keeps its values and is named in the log.

    Args:
      objects: dict from attribute name to trackable object.
      path: a checkpoint, such as `<model_dir>/checkpoints/ckpt-1000`; a run directory, for the checkpoint that the run
        ended with, or with "@latest", "@best" or "@1000" after it for another one; or the directory of a SavedModel,
        which is that of the only model here.

    Raises:
      UsageError: if it cannot be read or fits nothing.
    """
    models = {name: value for name, value in objects.items() if _holds_weights(value) or _is_rest_of_one(name, objects)}
    given, (path, which) = path, choice.divided(files.resolve(path, "warm_start", fetch=True))
    runs = [place for place in (os.path.join(path, "checkpoints"), path) if commits.newest(place)]
    if path != given and not runs:
        raise NoCheckpointError(f"there is no checkpoint in {path}, although {given} names one; name a run directory")
    if tf.io.gfile.exists(os.path.join(path, "saved_model.pb")):
        path = os.path.join(path, "variables", "variables")
        whole = [value for value in models.values() if _keras.is_layer(value)]
        if len(whole) == 1:
            models = _as_saved(whole[0], path)
    elif runs:
        path = choice.choose(runs[0], which).path
    take_what_fits(models, path.removesuffix(".index"), weights_only=True)


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
    path = files.resolve(path, "continue_from", fetch=True)
    if tf.io.gfile.isdir(path) and not (path := tf.train.latest_checkpoint(folder := path)):
        raise NoCheckpointError(
            f"there is no checkpoint in {folder} to continue from; specify one, or omit continue_from"
        )
    path = path.removesuffix(".index")
    needed = {name: value for name, value in objects.items() if _keras.is_layer(value) or _keras.is_optimizer(value)}
    try:
        global_step.assign(tf.train.load_checkpoint(path).get_tensor(_tf.variable_key("global_step")))
        taken = _assign({"global_step": global_step, **objects}, path)
    except UsageError:
        raise
    except (ValueError, IndexError, tf.errors.OpError) as error:
        raise WarmStartError(
            f"the run cannot continue from {path} ({gist(error)}); expected a checkpoint with global_step"
        ) from error
    ids = {id(variable) for _, variable in variables_of(needed)}
    missing = [leaf.name for leaf in taken.missing if id(leaf.variable) in ids]
    if missing or taken.reshaped:
        differences = describe_differences({**taken.others, "only here": missing})
        raise WarmStartError(
            f"the run cannot continue from {path}, because its model or optimizer differs ({differences}); use "
            "warm_start to load only the matching weights"
        )
    return path, int(global_step)


def _as_saved(model: Any, path: str) -> dict[str, Any]:
    """Returns a model under the names of a SavedModel: `model.export` saves a list of its variables."""
    try:
        exported = any(name.startswith("variables/0/") for name, _ in tf.train.list_variables(path))
    except (ValueError, tf.errors.OpError):
        exported = False  # the next reader raises the error
    if not exported:
        return {"": model}
    return {"variables": tf.train.Checkpoint(variables=list(model.variables)).variables, "model": model}


def _holds_weights(value: Any) -> bool:
    """Returns whether an attribute is a layer or a module, or holds some, and is no optimizer, metric or averages."""
    holder = tf.train.Checkpoint(value=value)
    parts = tf.train.TrackableView(holder).descendants()
    if any(_keras.is_optimizer(part) or _keras.is_metric(part) for part in parts) and not _keras.is_layer(value):
        return False
    own = type(value).__module__.startswith("looplib.") and not _keras.is_layer(value)
    return not own and any(_keras.is_layer(part) or isinstance(part, tf.Module) for part in parts[1:])


def _is_rest_of_one(name: str, objects: Mapping[str, Any]) -> bool:
    """Returns whether an attribute has the layers in lists of a model, which TensorFlow does not track."""
    model = name.removesuffix("_untracked")
    return model != name and model in objects and _holds_weights(objects[model])
