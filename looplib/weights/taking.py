"""Takes the values of files of weights that are not TensorFlow's own."""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from looplib.base.console import printable
from looplib.compat import keras as _keras
from looplib.errors import WarmStartError
from looplib.weights import rules, values
from looplib.weights.hdf5 import Hdf5Weights
from looplib.weights.layers import ComputedValue, NumberedVariables, ordered
from looplib.weights.matching import Match
from looplib.weights.names import LiveVariables, NamedVariable, groups
from looplib.weights.pairing import Matched, Taken, pair, whole_layers
from looplib.weights.safetensors import SafetensorsFile
from looplib.weights.sources import StoredTensor, WeightsSource
from looplib.weights.targets import EqualNames, Targets


@dataclasses.dataclass(frozen=True)
class LoadedValues:
    """What was taken from a checkpoint or a file.

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
        """What was not taken: dict from a reason to names."""
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
    everything = list(live.leaves)
    views = _views(source, live)
    targets = Targets(live, views.values())
    keys = unique_names(source.tensors)
    saved = {name: _saved(name, key, source.tensors[key], views) for name, key in keys.items()}
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
        values.assign(taken.here.variable, taken.formed(source.read(taken.there.key)))
        rounded[type_there(taken), taken.here.variable.dtype.name] += 1
    for (there, here), count in rounded.items():
        if there != here:
            logging.info("%d values of %s were %s there and are %s here", count, path, there, here)
    found, done = {id(taken.here) for taken in pairs}, {id(taken.there) for taken in pairs}
    for computed in (taken.here.variable for taken in pairs if isinstance(taken.here.variable, ComputedValue)):
        found |= {id(live.leaf_of(variable)) for variable in computed.layer.variables}
    left = [name for name, leaf in saved.items() if id(leaf) not in done and not _is_left_out(ruled.get(name))]
    missing = [leaf for leaf in everything if id(leaf) not in found]
    return LoadedValues(len(whole.taken), missing, whole.misfits, sorted(left), targets)


def _is_left_out(form: rules.RuledName | None) -> bool:
    return form is not None and form.name is None


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
