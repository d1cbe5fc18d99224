"""Values from checkpoints that are not the run's own: a warm start, another program's, or only a part of one."""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from looplib.base.console import printable
from looplib.base.messages import gist, join_names
from looplib.buckets.local import local_path
from looplib.compat import keras as _keras
from looplib.compat import tensorflow as _tf
from looplib.errors import NoCheckpointError, UsageError, WarmStartError
from looplib.run import choice, commits
from looplib.task.record import RunRecord
from looplib.task.state import Constants, variables_of
from looplib.weights.checkpoints import Match, by_unique_name, is_weight
from looplib.weights.layers import Targets
from looplib.weights.names import NamedVariable, SavedVariables
from looplib.weights.opening import open_weights
from looplib.weights.pairing import pair, whole_layers
from looplib.weights.restoring import check_contents, contents_of, describe_differences, objects_of
from looplib.weights.rules import WarmStart, WeightRule, apply, given
from looplib.weights.tables import join_live, join_saved
from looplib.weights.taking import LoadedValues, give, take, weights_only

_IN_SAVED_MODEL = "/variables/variables"
_Rules = Mapping[str, str | WeightRule | None]


def take_what_fits(objects: Mapping[str, Any], path: str, rules: _Rules | None = None, weights: bool = False) -> None:
    """Restores the values that a checkpoint and some objects have in common, by name and shape; logs the others.

    Args:
      objects: dict from attribute name to trackable object, or from "" to a model, for a SavedModel of it.
      path: the checkpoint to take values from.
      rules: see `WarmStart`.
      weights: whether optimizers, averages and seeds keep their values.

    Raises:
      UsageError: if nothing fits, a value fits several variables, or the checkpoint cannot be read.
    """
    try:
        taken = _assign(objects, path, rules or {}, weights)
    except UsageError:
        raise
    except (ValueError, IndexError, tf.errors.OpError) as error:
        kind = WarmStartError if tf.io.gfile.exists(f"{path}.index") else NoCheckpointError
        raise kind(f"{path} cannot be read ({gist(error)}); name a checkpoint such as ckpt-1000") from error
    _report(taken, path)


def take_all(model: Any, path: str) -> None:
    """Gives a Keras model or a module all its weights from a SavedModel of it.

    Raises:
      WarmStartError: if one of them is not there, or has another shape or type.
      ValueError, IndexError, tf.errors.OpError: if it cannot be read.
    """
    place = path + _IN_SAVED_MODEL
    taken = _assign(_as_saved(model, place) if _keras.is_layer(model) else {"model": model}, place, {}, weights=True)
    if taken.missing or taken.misfits:
        raise WarmStartError(f"{path} is of another model ({describe_differences(taken.others)})")


def _report(taken: LoadedValues, path: str) -> None:
    """Logs what was taken and what was not; raises `WarmStartError` if that is nothing."""
    left_out = describe_differences(taken.others)
    if not taken.count:
        raise WarmStartError(
            f"nothing in {path} fits ({left_out or 'it has no such names'}); name a checkpoint or a file of the same "
            "model, or of a part of it under the same attribute names, or rename by rules (looplib.WarmStart)"
        )
    logging.info("took %d values from %s", taken.count, path)
    if left_out:
        logging.warning("not taken from %s (%s)", path, left_out)


def _assign(objects: Mapping[str, Any], path: str, rules: _Rules, weights: bool = False) -> LoadedValues:
    """Gives objects the values of a checkpoint by rules, and where names and shapes agree; or its weights alone."""
    reader = tf.train.load_checkpoint(path)
    graph = _tf.object_graph(reader)
    if graph is None:
        raise ValueError(f"TensorFlow {tf.__version__} keeps the structure of a checkpoint in a way unknown to looplib")
    record = RunRecord.in_checkpoint(reader, path)
    check_contents(objects, record, path)
    if weights and not record.contents:
        _warn_of_contents(objects, path)
    saved = SavedVariables(reader, graph, record.names, objects)
    live = saved.live
    if weights:
        weights_only(live)
    join_live(live)
    join_saved(saved)
    everything, targets = list(live.leaves), Targets(live)
    for leaf in saved.leaves.values():
        leaf.name = printable(leaf.name)
    named = by_unique_name(saved)
    if weights and not named and len(objects) > 1:
        there = "one model" if path.endswith(_IN_SAVED_MODEL) else join_names(sorted(saved.attributes), most=4)
        raise WarmStartError(
            f"{path} has the values of {there}, and here are {join_names(sorted(objects), most=4)}; "
            "call looplib.warm_start({'NAME': ...}, path) in initialize, with the name there and the model here"
        )
    ruled = apply(rules, named, path)
    touched = {id(named[name]) for name in ruled}

    def match(rest: list[NamedVariable]) -> Match:
        return Match([leaf for leaf in saved.leaves.values() if id(leaf) not in touched], live, record.optimizers)

    pairs = pair(named, ruled, targets, match, path)
    for name, leaf in named.items():  # for the log, as rules know them
        leaf.name = name
    found = {id(taken.here) for taken in pairs}
    types = reader.get_variable_to_dtype_map()
    whole = whole_layers(pairs, live, (named.values(), everything), touched, lambda taken: types[taken.there.key].name)
    for taken in whole.taken:
        give(taken, reader.get_tensor)
    left_out = [named[name] for name, form in ruled.items() if form.name is None]
    done = {part.key for leaf in [*(one.there for one in pairs), *left_out] for part in leaf.parts or [leaf]}
    parts = {part.node: leaf for leaf in saved.leaves.values() for part in leaf.parts}
    unused = set()
    states = objects_of(graph, objects.get("") or tf.train.Checkpoint(**objects))
    for number, node in enumerate(graph.nodes):
        for attribute in node.attributes:
            if isinstance(state := states.get(number), tf.train.experimental.PythonState):
                state.deserialize(reader.get_tensor(attribute.checkpoint_key))
            elif attribute.checkpoint_key not in done and attribute.name != "py_state":
                there = parts.get(number) or saved.leaves.get(number)
                if not weights or (there and is_weight(there)):
                    name = there.name if there else attribute.full_name or attribute.checkpoint_key
                    unused.add((bool(there and there.origin), name))
    missing = [leaf for leaf in everything if id(leaf) not in found]
    known = {"save_counter", *(taken.there.name for taken in pairs)}  # a variable may be in two places
    others = [name for _, name in sorted(unused) if name not in known]
    return LoadedValues(len(whole.taken), missing, whole.misfits, others, targets)


def warm_start(objects: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Takes the weights that fit, by name and shape, from a file of weights, another run's checkpoint or a SavedModel.

    Only layers and modules take values, also those in lists and dicts; optimizers, averages and seeds keep their
    initial ones. What does not fit, such as a head for other classes, keeps its values and is named in the log.

    Args:
      objects: dict from attribute name to trackable object.
      path: a `.keras`, `.weights.h5` or `.safetensors` file, the `.safetensors.index.json` or `.weights.json` of
        several, or a folder that has one; a checkpoint, such as `<model_dir>/checkpoints/ckpt-1000`; a run directory,
        for the checkpoint that the run ended with, or with "@latest", "@best" or "@1000" after it for another one; the
        directory of a SavedModel, which is that of the only model here, as a file of Keras is; a `looplib.WarmStart`,
        or a `.yaml` file of one.

    Raises:
      UsageError: if it cannot be read or fits nothing, or if a rule does not fit.
    """
    objects = {**_untracked(objects), **objects}
    constants = Constants(objects)
    _take(objects, given(path))
    constants.renew()


def _take(objects: Mapping[str, Any], start: WarmStart) -> None:
    models = {name: value for name, value in objects.items() if _holds_weights(value) or _is_rest_of_one(name, objects)}
    place = located(start.path)
    if source := open_weights(place):
        with contextlib.closing(source):
            _report(take(source, models, dataclasses.replace(start, path=place)), place)
        _warn_of_contents(models, place)
        return
    if place.endswith(_IN_SAVED_MODEL):
        whole = [value for value in models.values() if _keras.is_layer(value)]
        if len(whole) == 1:
            models = _as_saved(whole[0], place)
    take_what_fits(models, place, start.rules, weights=True)


def _warn_of_contents(objects: Mapping[str, Any], path: str) -> None:
    """Warns of the vocabularies and constants here, which only checkpoints of looplib can be compared with."""
    if names := list(contents_of(objects)):
        logging.warning(
            "%s does not say with which vocabularies or constants its weights were trained; check that they are equal "
            "to those here, of %s", path, join_names(names, most=4),
        )  # fmt: skip


def located(path: str) -> str:
    """Returns the local path of the checkpoint, or the file of weights, that a path or a URL names.

    Raises:
      UsageError: if a run has no such checkpoint, or the path cannot be used.
    """
    place, which = choice.divided(local_path(path, "warm_start"))
    runs = [folder for folder in (os.path.join(place, "checkpoints"), place) if commits.newest(folder)]
    if which != choice.FINAL and not runs:
        raise NoCheckpointError(f"there is no checkpoint in {place}, although {path} names one; name a run directory")
    if tf.io.gfile.exists(os.path.join(place, "saved_model.pb")):
        return place + _IN_SAVED_MODEL
    return choice.choose(runs[0], which).path if runs else place.removesuffix(".index")


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
    path = local_path(path, "continue_from")
    if tf.io.gfile.isdir(path) and not (path := tf.train.latest_checkpoint(folder := path)):
        raise NoCheckpointError(
            f"there is no checkpoint in {folder} to continue from; specify one, or omit continue_from"
        )
    path = path.removesuffix(".index")
    needed = {name: value for name, value in objects.items() if _keras.is_layer(value) or _keras.is_optimizer(value)}
    try:
        global_step.assign(tf.train.load_checkpoint(path).get_tensor(_tf.variable_key("global_step")))
        taken = _assign({"global_step": global_step, **objects}, path, {})
    except UsageError:
        raise
    except (ValueError, IndexError, tf.errors.OpError) as error:
        raise WarmStartError(
            f"the run cannot continue from {path} ({gist(error)}); expected a checkpoint with global_step; use "
            "warm_start for the weights alone"
        ) from error
    ids = {id(variable) for _, variable in variables_of(needed)} - _counts_of_steps(objects, global_step, path)
    missing = [leaf.name for leaf in taken.missing if id(leaf.variable) in ids]
    if missing or taken.misfits:
        differences = describe_differences({**taken.others, "only here": missing})
        raise WarmStartError(
            f"the run cannot continue from {path}, because its model or optimizer differs ({differences}); use "
            "warm_start to load only the matching weights"
        )
    return path, int(global_step)


def _counts_of_steps(objects: Mapping[str, Any], global_step: tf.Variable, path: str) -> set[int]:
    """Gives the step to what is a variable of its own here and the `global_step` in a checkpoint; returns their ids.

    That is an optimizer's count of updates for a program that counts its steps in it.
    """
    graph = _tf.object_graph(tf.train.load_checkpoint(path))
    numbers = [child.node_id for child in graph.nodes[0].children if child.local_name == "global_step"]
    found = objects_of(graph, tf.train.Checkpoint(**objects))
    counts = [_keras.tf_variable(found[number]) for number in numbers if number in found]
    for count in counts:
        count.assign(tf.cast(global_step, count.dtype))
    return set(map(id, counts))


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


def _untracked(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the layers in lists of models of Keras 3, which TensorFlow does not track, as `state_of` names them."""
    found = {name: _keras.untracked_variables(value) for name, value in objects.items() if _keras.is_layer(value)}
    return {f"{name}_untracked": variables for name, variables in found.items() if variables}


def _is_rest_of_one(name: str, objects: Mapping[str, Any]) -> bool:
    """Returns whether an attribute has the layers in lists of a model, which TensorFlow does not track."""
    model = name.removesuffix("_untracked")
    return model != name and model in objects and _holds_weights(objects[model])
