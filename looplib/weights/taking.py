"""Takes the values of files of weights that are not TensorFlow's own, and writes them."""

import collections
import dataclasses
import functools
import json
import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base.console import printable
from looplib.base.messages import join_names
from looplib.compat import keras as _keras
from looplib.errors import ExportError, WarmStartError
from looplib.task.state import state_of
from looplib.weights import rules
from looplib.weights.checkpoints import Match
from looplib.weights.hdf5 import Hdf5Weights
from looplib.weights.layers import ComputedValue, EqualNames, NumberedVariables, Targets, ordered
from looplib.weights.names import LiveVariables, NamedVariable, groups
from looplib.weights.opening import DTYPES, METADATA, SafetensorsFile
from looplib.weights.pairing import Matched, Taken, pair, whole_layers
from looplib.weights.sources import StoredTensor, WeightsSource
from looplib.weights.tables import count_rows, join_live, join_named, row_values, whole_value

_LARGE = 1 << 22  # bytes
_ALIGNMENT = 64  # bytes, without which TensorFlow copies the memory that it is given


def assign(variable: tf.Variable, value: np.ndarray) -> None:
    """Gives a variable a value of its shape; floating-point numbers become those of its type.

    It is given as a whole: once a part of a variable was assigned, TensorFlow copies all of it at each read. It would
    copy an array of numpy twice; memory that it shares becomes that of the variable.

    Raises:
      WarmStartError: if a number is too large for the type.
    """
    if not variable.dtype.is_floating:
        variable.assign(value)
        return
    found = _cast(variable, np.asarray(value))
    if found.nbytes > _LARGE:
        bits = found.view(f"u{found.itemsize}")  # numpy shares no types of others, such as bfloat16
        found = tf.bitcast(tf.experimental.dlpack.from_dlpack(bits.__dlpack__()), variable.dtype)
    variable.assign(found)


def _cast(variable: tf.Variable, value: np.ndarray) -> np.ndarray:
    """Returns a copy with the type of a variable, in memory that TensorFlow can share."""
    dtype = np.dtype(variable.dtype.as_numpy_dtype)
    memory = np.empty(value.size * dtype.itemsize + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    found = memory[start : start + value.size * dtype.itemsize].view(dtype).reshape(value.shape)
    with np.errstate(over="ignore"):
        found[...] = value
    if dtype != value.dtype and not np.array_equal(np.isinf(found), np.isinf(value)):
        raise WarmStartError(
            f"{variable.name} is {variable.dtype.name}, and the file has larger numbers for it, up to "
            f"{np.abs(value[np.isfinite(value)]).max():.3g}; build the model with float32 weights"
        )
    return found


def give(taken: Taken, read: Callable[[str], np.ndarray]) -> None:
    """Gives a variable here its saved value; a table of embeddings takes rows by their ids, a part at a time.

    Args:
      taken: the two.
      read: returns the saved value of a key.
    """
    there, here = taken.there, taken.here
    if not here.parts:
        assign(here.variable, taken.formed(whole_value(there, read)))
        return
    if taken.form.transpose:
        turned = taken.formed(whole_value(there, read))
        there, read = dataclasses.replace(there, shape=turned.shape, parts=[]), lambda _: turned
    for variable, values in row_values(here, there, functools.lru_cache(maxsize=1)(read)):
        assign(variable, values)
    if not there.origin:
        more = count_rows(here) - count_rows(there)
        also = f"; {more} new rows keep their initial values" if more > 0 else f"; {-more} have no place here"
        taken = count_rows(here) - max(more, 0)
        logging.info("took %d rows of the table %s by their ids%s", taken, here.name, also * bool(more))


_ALIGNED = 8  # bytes


def named_weights(model: Any) -> dict[str, tf.Variable]:
    """Returns the weights of a model by name, such as `encoder/kernel`; no seeds, optimizers and metrics.

    Layers that Keras has named and numbered are counted from 0 on, as `python -m looplib weights` shows them.

    Args:
      model: a Keras model or `tf.Module`.

    Raises:
      ExportError: if several weights have one name.
    """
    live = LiveVariables(state_of(types.SimpleNamespace(model=model)))
    targets = Targets(live)
    weights = _keras.without_vocabularies(model.weights if _keras.is_model(model) else model.variables)
    named: dict[str, tf.Variable] = {}
    twice = []
    for variable in map(_keras.tf_variable, weights):
        name = targets.counted(live.leaf_of(variable))
        twice += [name] * (name in named)
        named[name] = variable
    if twice:
        raise ExportError(
            f"several weights have the name {join_names(sorted(set(twice)))}; give the layers or variables that hold "
            "them names of their own"
        )
    return named


def write_safetensors(path: str, tensors: Mapping[str, tf.Variable]) -> None:
    """Writes a file of safetensors, one tensor at a time in memory.

    Args:
      path: the new file.
      tensors: the variables by name.

    Raises:
      ExportError: for a type that the format does not have.
      OSError: if it cannot be written.
    """
    types = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": METADATA}
    at = 0
    for name, variable in tensors.items():
        dtype, shape = np.dtype(variable.dtype.as_numpy_dtype), variable.shape.as_list()
        if dtype not in types:
            raise ExportError(f"{name} is {dtype}; expected one of the types of safetensors: {', '.join(DTYPES)}")
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": types[dtype], "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for variable in tensors.values():
            value = np.ascontiguousarray(variable.numpy())
            file.write(value.reshape(-1).view(np.uint8).data)


@dataclasses.dataclass(frozen=True)
class LoadedValues:
    """Weights that were taken from a checkpoint or a file.

    Attributes:
      count: how many values.
      missing: the variables here that got none.
      misfits: the names of those that have another shape or type there, or are in a layer with one; by the reason.
      unused: the names of what the checkpoint has besides.
      targets: the names here.
    """

    count: int
    missing: list[NamedVariable]
    misfits: dict[str, list[str]]
    unused: list[str]
    targets: Targets

    @property
    def others(self) -> dict[str, list[str]]:
        """Names that were not taken, by the reason."""
        missing = sorted((leaf.owned, self.targets.shown(leaf)) for leaf in self.missing)  # weights first
        return {"only here": [name for _, name in missing], "only there": self.unused, **self.misfits}


def weights_only(live: LiveVariables) -> None:
    """Takes out of `live.leaves` what is of an optimizer, a metric, an average or a seed."""
    layers = [part for part in live.parts if _keras.is_layer(part) and not _keras.is_metric(part)]
    weights = {id(live.leaf_of(variable)) for layer in layers for variable in layer.variables}
    holders = [part for part in live.parts if _keras.is_optimizer(part) or _keras.is_metric(part)]
    parts = (part for holder in holders for part in tf.train.TrackableView(holder).descendants())
    others = {id(leaf) for part in parts if (leaf := live.leaf_of(part))} - weights
    live.leaves = [
        leaf
        for leaf in live.leaves
        if not (leaf.owned or id(leaf) in others or leaf.name.endswith("seed_generator_state"))
    ]


def unique_names(tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Returns the keys of the values that are weights, by names of which each means one; by the key if need be.

    Characters that a terminal would take for a command are escaped in the names.
    """
    alike = groups(((key, tensor) for key, tensor in tensors.items() if not tensor.owned), lambda item: item[1].name)
    return {printable(name if len(items) == 1 else key): key for name, items in alike.items() for key, _ in items}


def take(source: WeightsSource, objects: Mapping[str, Any], start: rules.WarmStart) -> LoadedValues:
    """Gives objects the values of a file, by rules and by equal names.

    Args:
      source: the file.
      objects: dict from attribute name to trackable object.
      start: its path, and the rules.

    Raises:
      WarmStartError: if the rules do not fit, or it is not clear which value is for which variable.
    """
    live, path = LiveVariables(objects), start.path
    weights_only(live)
    if not _is_numbered(source):
        join_live(live)
    everything = list(live.leaves)
    views = _views(source, live)
    targets = Targets(live, views.values())
    keys = unique_names(source.tensors)
    saved = {name: _saved(name, key, source.tensors[key], views) for name, key in keys.items()}
    saved = saved if _is_numbered(source) else join_named(saved)
    ruled = rules.apply(start.rules, saved, path)

    def match(rest: list[NamedVariable]) -> Matched:
        if not _is_numbered(source):
            return EqualNames(rest, live, targets, isinstance(source, SafetensorsFile) and source.counted)
        return _match_numbered(rest, live, views, path)

    pairs = pair(saved, ruled, targets, match, path)
    if views:
        _check_numbers(pairs, source.tensors, views, path)

    def type_there(taken: Taken) -> str:
        return str(source.tensors[taken.there.key].dtype or "text")

    for taken in pairs:
        equal = taken.here.floating or taken.here.variable.dtype.name == type_there(taken)
        if not equal and taken.there.name in ruled:
            types = f"{type_there(taken)} there and {taken.here.variable.dtype.name} here"
            raise WarmStartError(
                f"{taken.there.name} of {path} is {types}, for {targets.shown(taken.here)}; leave it out by a rule "
                "with null (None)"
            )
    rounded: collections.Counter[tuple[str, str]] = collections.Counter()
    whole = whole_layers(pairs, live, (saved.values(), everything), {id(saved[name]) for name in ruled}, type_there)
    for taken in whole.taken:
        give(taken, source.read)
        rounded[type_there(taken), taken.here.variable.dtype.name] += 1
    for (there, here), count in rounded.items():
        if there != here:
            logging.info("%d values of %s were %s there and are %s here", count, path, there, here)
    found, done = _ids(taken.here for taken in pairs), _ids(taken.there for taken in pairs)
    for computed in (taken.here.variable for taken in pairs if isinstance(taken.here.variable, ComputedValue)):
        found |= {id(live.leaf_of(variable)) for variable in computed.layer.variables}
    left_out = {name for name, form in ruled.items() if form.name is None}
    left = [name for name, leaf in saved.items() if id(leaf) not in done and name not in left_out]
    missing = [leaf for leaf in everything if id(leaf) not in found]
    return LoadedValues(len(whole.taken), missing, whole.misfits, sorted(left), targets)


def _ids(leaves: Iterable[NamedVariable]) -> set[int]:
    return {id(one) for leaf in leaves for one in (leaf, *leaf.parts)}


def _is_numbered(source: WeightsSource) -> bool:
    return isinstance(source, Hdf5Weights) and source.numbered


def _views(source: WeightsSource, live: LiveVariables) -> dict[str, NumberedVariables]:
    """Returns the models here, by attribute, as a file that numbers variables would have them; those in no other."""
    if not _is_numbered(source):
        return {}
    layers = {name: value for name, value in live.objects.items() if _keras.is_layer(value)}
    held = {name: {id(variable) for variable in value.variables} for name, value in layers.items()}
    roots = []
    for name, own in held.items():
        outer = [other for other, variables in held.items() if other != name and own <= variables]
        if not any(own != held[other] or other < name for other in outer):
            roots.append(name)
    if not roots:
        raise WarmStartError(
            "a file of Keras that numbers the variables of layers is for a layer or a model, and there is none here; "
            "keep the model in an attribute of the trainer"
        )
    return {root: NumberedVariables(live, root, source.names) for root in roots}


def _saved(name: str, key: str, tensor: StoredTensor, views: Mapping[str, NumberedVariables]) -> NamedVariable:
    way = (len(tensor.listed), ordered((*tensor.layer, tensor.number), tensor.listed))
    return NamedVariable(name, tensor.shape, tensor.floating, dict.fromkeys(views, way), key=key)


def _match_numbered(
    rest: list[NamedVariable], live: LiveVariables, views: Mapping[str, NumberedVariables], path: str
) -> Matched:
    """Pairs layers as checkpoints of TensorFlow do; the variables of a layer by their numbers."""
    if len(views) > 1 and rest:
        raise WarmStartError(
            f"{path} is of one model, and here are {', '.join(views)}; call looplib.warm_start({{'model': ...}}, path) "
            f"in initialize for the one that it is of, or put {next(iter(views))}/ before its names by a rule"
        )
    view, left = next(iter(views.values())), live.leaves
    ids = {id(leaf) for leaf in left}
    live.leaves = [
        one for one in view.leaves if isinstance(one.variable, ComputedValue) or id(view.original[id(one)]) in ids
    ]
    match = Match(rest, live, None)
    live.leaves = left
    match.pairs = [(there, view.original[id(here)]) for there, here in match.pairs]
    for there, here in match.pairs:
        if id(here) in view.vague:
            raise WarmStartError(
                f"{path} has no names of layers, and {there.name} there fits {view.vague[id(here)]} here as well as "
                "another layer of that class and shape; say by rules which is which, such as "
                f"'^{there.name.rpartition('/')[0]}/': '{view.vague[id(here)]}/', or save a .keras file, which has the "
                "names of layers"
            )
    return match


def _check_numbers(
    pairs: list[Taken], tensors: Mapping[str, StoredTensor], views: Mapping[str, NumberedVariables], path: str
) -> None:
    """Raises `WarmStartError` where a layer here has other numbers than in the file, which may mean others."""
    there: dict[tuple[str, ...], set[str]] = {}
    for tensor in tensors.values():
        there.setdefault(tensor.layer, set()).add(tensor.number)
    here = {leaf: numbers for view in views.values() for leaf, numbers in view.layers.items()}
    for taken in pairs:
        tensor = tensors[taken.there.key]
        by_number = (taken.form.name or "").rpartition("/")[2] == tensor.number
        numbers = here.get(id(taken.here), frozenset())
        if by_number and numbers != there[tensor.layer]:
            layer = taken.there.name.rpartition("/")[0]
            raise WarmStartError(
                f"the variables of {layer} in {path} have the numbers {', '.join(sorted(there[tensor.layer]))}, and "
                f"those of the layer here {', '.join(sorted(numbers)) or 'none'}, so what a number means cannot be "
                f"told; name each by a rule, such as '^{layer}/0$': '{taken.here.name}', or leave the layer out by "
                f"'^{layer}/': null"
            )
