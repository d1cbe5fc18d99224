"""Places of layers and variables in Keras's own formats of weights, and the variables here at these places."""

import dataclasses
import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.compat import keras as _keras
from looplib.errors import WarmStartError
from looplib.weights.hdf5 import NamesOfLayers, chain, numbered, snake_case
from looplib.weights.names import LiveVariables, NamedVariable, NameNormalizer, groups, whole_name

_LIST = "layers"


class ComputedValue:
    """A tensor that a layer computes when it is saved, such as a kernel with its adapters (LoRA), for a variable.

    The layer itself loads it, as Keras does: adapters begin with zero.

    Args:
      layer: a layer of Keras.
      given: the values of the layer that were assigned, by number; one dict for all of a layer.
      number: its number in a file.
      value: the tensor that the layer computes.
    """

    def __init__(self, layer: Any, given: dict[str, Any], number: str, value: Any) -> None:
        self.layer, self._given, self._number = layer, given, number
        value = value if tf.is_tensor(value) else np.asarray(value)
        self.name, self.shape = f"{layer.name}/{number}", tuple(value.shape)
        self.dtype = tf.as_dtype(value.dtype if tf.is_tensor(value) or value.dtype.kind in "biuf" else str)

    def assign(self, value: Any) -> None:
        """Has the layer load a value."""
        store: dict[str, Any] = {}
        self.layer.save_own_variables(store)
        self._given[self._number] = value
        self.layer.load_own_variables({**store, **self._given})


@dataclasses.dataclass(frozen=True)
class PlacedLayer:
    """A layer of a model here.

    Attributes:
      path: the attributes, and the classes in lists, that lead to it in a file.
      listed: which parts of the path are those of a list, by their indices.
      of_list: whether the list is that of the layers of a functional or sequential model.
      layer: the layer.
      own: its variables by their numbers in the file, or a `ComputedValue`.
    """

    path: tuple[str, ...]
    listed: frozenset[int]
    of_list: bool
    layer: Any
    own: dict[str, Any]


class LayerWalk:
    """Goes through a model as Keras of its family does when it saves weights.

    Args:
      model: the model, or a layer.

    Attributes:
      found: the layers.
    """

    def __init__(self, model: Any) -> None:
        self.found: list[PlacedLayer] = []
        self._three = _keras.family(model) == "keras"
        self._seen: set[int] = set()
        kind = type(importlib.import_module(_keras.family(model) or "keras").layers.Layer())
        self._skipped = frozenset(dir(kind())) if self._three else _skipped_by_tf_keras()
        self._own = kind.save_own_variables
        self._visit(model, (), frozenset(), False)

    def _visit(self, layer: Any, path: tuple[str, ...], listed: frozenset[int], of_list: bool) -> None:
        if id(layer) in self._seen:
            return
        self._seen.add(id(layer))
        self.found.append(PlacedLayer(path, listed, of_list, layer, self._variables(layer)))
        inner = _is_listing(layer)
        for name, value in self._attributes(layer, inner):
            if _keras.is_layer(value):
                self._visit(value, (*path, name), listed, False)
            elif isinstance(value, (list, tuple, dict)):
                self._visit_list(value, (*path, name), listed, inner and name == _LIST, set())

    def _visit_list(
        self, values: Any, path: tuple[str, ...], listed: frozenset[int], of_list: bool, lists: set[int]
    ) -> None:
        if id(values) in lists:
            return
        lists.add(id(values))
        numbers: dict[str, int] = {}
        for value in list(values.values() if isinstance(values, dict) else values):
            if _keras.is_layer(value) and (self._three or id(value) not in self._seen):
                name = numbered(snake_case(type(value).__name__), numbers)
                self._visit(value, (*path, name), listed | {len(path)}, of_list)
            elif self._three and isinstance(value, (list, tuple, dict)):
                place = (*path, numbered("container", numbers))
                self._visit_list(value, place, listed | {len(path)}, False, lists)

    def _attributes(self, layer: Any, inner: bool) -> Iterator[tuple[str, Any]]:
        """Yields the attributes in Keras's order: private ones last in Keras 3, the last name first in tf_keras."""
        names = sorted(dir(layer), reverse=True)
        if self._three:
            names = sorted(names, key=lambda name: f"~{name}" if name.startswith("_") else name)
        if self._three and inner:
            yield _LIST, layer.layers
            names = [name for name in names if name not in ("operations", "_operations", "_functional")]
        for name in names:
            if name.startswith("__") or name in self._skipped:
                continue
            try:
                yield name, getattr(layer, name)
            except Exception:  # of a property of any class, which Keras passes over too
                continue

    def _variables(self, layer: Any) -> dict[str, Any]:
        if not self._three and type(layer).save_own_variables is self._own:
            # tf_keras saves copies of their numbers, and has no public name for what a layer itself holds.
            own = [*layer._trainable_weights, *layer._non_trainable_weights]
            return {str(number): variable for number, variable in enumerate(own)}
        store: dict[str, Any] = {}
        given: dict[str, Any] = {}
        layer.save_own_variables(store)
        return {
            key: value
            if isinstance(_keras.tf_variable(value), tf.Variable)
            else ComputedValue(layer, given, key, value)
            for key, value in store.items()
        }


class NumberedVariables:
    """The variables of a model here, by the names of their layers and their numbers in a file.

    Args:
      live: the variables here, of which only those in `leaves` count.
      root: the attribute of the trainer that has the model.
      names: how much the file knows of the names of layers.

    Attributes:
      leaves: a `NamedVariable` for each, under the name that it has in such a file.
      original: the variable of `live` of each of them, by its id; a computed value itself.
      layers: the numbers of the variables of each layer here, by the id of the variable in `live`.
      vague: the names of layers that a file without names cannot tell from others, by the id of a variable in `live`.
    """

    def __init__(self, live: LiveVariables, root: str, names: NamesOfLayers) -> None:
        wanted, walk = {id(leaf) for leaf in live.leaves}, LayerWalk(live.objects[root])
        known = {place.path: place.layer.name for place in walk.found
                 if names is NamesOfLayers.ALL or (names is NamesOfLayers.OF_LISTS and place.of_list)}  # fmt: skip
        self.leaves: list[NamedVariable] = []
        self.original: dict[int, NamedVariable] = {}
        self.layers: dict[int, frozenset[str]] = {}
        self.vague: dict[int, str] = {}
        alike: dict[object, dict[str, list[NamedVariable]]] = {}
        for place in walk.found:
            layer, mine = chain(place.path, known, names is NamesOfLayers.ALL), []
            for number, variable in place.own.items():
                leaf, way = live.leaf_of(variable), (len(place.listed), ordered((*place.path, number), place.listed))
                name = "/".join([*layer, number])
                if isinstance(variable, ComputedValue):
                    own = NamedVariable(name, variable.shape, variable.dtype.is_floating, {root: way}, variable)
                    leaf = own
                elif leaf and id(leaf) in wanted:
                    own = NamedVariable(name, leaf.shape, leaf.floating, {root: way}, leaf.variable)
                else:
                    continue
                self.original[id(own)] = leaf
                self.leaves.append(own)
                mine.append(leaf)
                self.layers[id(leaf)] = frozenset(place.own)
            if place.path not in known and len(place.path) - 1 in place.listed:
                shapes = tuple((leaf.name.rpartition("/")[2], leaf.shape) for leaf in mine)
                kind = (place.path[:-1], type(place.layer).__name__, shapes)
                alike.setdefault(kind, {})[place.layer.name] = mine
        normal = NameNormalizer(live)
        for layers in alike.values():
            if len(layers) > 1 and any(map(normal.given, layers)):
                self.vague.update({id(leaf): name for name, leaves in layers.items() for leaf in leaves})


def ordered(path: tuple[str, ...], listed: Iterable[int]) -> str:
    """Returns a path that `names.in_order` sorts as the layers in lists are."""
    parts = list(path)
    for index in listed:
        name, _, number = parts[index].rpartition("_")
        parts[index] = f"{name}-{number}" if name and number.isdigit() else f"{parts[index]}-0"
    return "/".join(parts)


def _is_listing(layer: Any) -> bool:
    """Returns whether a layer is a functional or sequential model, of which Keras 3 has no public class."""
    return _keras.is_model(layer) and any(base.__name__ in ("Functional", "Sequential") for base in type(layer).__mro__)


def _skipped_by_tf_keras() -> frozenset[str]:
    # There is no public name for these; without them, variables might get other places than in the file.
    try:
        return importlib.import_module("tf_keras.src.saving.saving_lib").ATTR_SKIPLIST
    except (ImportError, AttributeError) as error:
        raise WarmStartError(
            "where this version of tf_keras saves layers in a file is not known to looplib; save the weights as "
            "safetensors, or as a checkpoint"
        ) from error


_Shapes = frozenset[tuple[str, tuple[int | None, ...]]]
_Layers = dict[str, dict[str, list[NamedVariable]]]  # by name, each by the name of a variable in it


class Targets:
    """The variables here by each of their names.

    A variable has the name that Keras gives it, without the name of a model that is an attribute of the trainer, or
    with the attribute before it: `encoder/kernel` is `model/encoder/kernel` too. The names that `python -m looplib
    weights` shows count the layers that Keras has named from 0 on, as checkpoints do.

    Args:
      live: the variables here, of which only those in `leaves` count.
      numbered: those of a file that numbers the variables of a layer.
    """

    def __init__(self, live: LiveVariables, numbered: Iterable[NumberedVariables] = ()) -> None:
        self.leaves = live.leaves
        self._by_name: dict[str, dict[int, NamedVariable]] = {}
        self._names: dict[int, list[str]] = {}
        self._models: set[str] = set()
        for value in filter(_keras.is_model, live.objects.values()):
            self._models |= {value.name, _counted_from_zero(value)}
        counted = live.record().own
        for leaf in live.leaves:
            first = (leaf.parts or [leaf])[0]
            own = [counted.get(first.path, first.name), first.name]
            own = list(map(whole_name, own)) if leaf.parts else own
            names = dict.fromkeys(name for one in own for name in (self.without_model(one), one))
            names |= dict.fromkeys(f"{root}/{name}" for name in list(names) for root in leaf.paths)
            self._names[id(leaf)] = list(names)
            for name in names:
                self._by_name.setdefault(name, {})[id(leaf)] = leaf
        for view in numbered:
            for one in view.leaves:
                leaf, number = view.original[id(one)], one.name.rpartition("/")[2]
                layers = [name.rpartition("/")[0] for name in self._names.setdefault(id(leaf), [one.name])]
                roots = [f"{root}/{one.name}" for root in one.paths]
                for name in (one.name, *roots, *(f"{layer}/{number}" for layer in layers if layer)):
                    self._by_name.setdefault(name, {})[id(leaf)] = leaf

    def find(self, name: str) -> list[NamedVariable]:
        """Returns the variables that a name may mean."""
        return list(self._by_name.get(name, {}).values())

    def shown(self, leaf: NamedVariable) -> str:
        """Returns the shortest name that means a variable alone; any if there is none."""
        names = self._names[id(leaf)]
        return min((name for name in names if len(self._by_name[name]) == 1), key=len, default=names[0])

    def counted(self, leaf: NamedVariable) -> str:
        """Returns the name of a variable whose layers that Keras has named are counted from 0 on, without the model."""
        return self._names[id(leaf)][0]

    def without_model(self, name: str) -> str:
        """Returns a name without that of the model that holds the layer."""
        first, _, rest = name.partition("/")
        return rest if first in self._models and "/" in rest else name


class EqualNames:
    """Pairs the names of a file that has nothing but names with the variables here.

    A name that somebody has given is equal here. A layer that Keras has named and numbered (`dense_1`) is paired by its
    name if both sides have the same numbers, and else by its shapes if no other layer of that kind has them.

    Args:
      saved: the variables of the file.
      live: those here, of which only those in `leaves` count.
      targets: the names of these.
      counted: whether the file counts the layers that Keras has named from 0 on, as looplib writes it.

    Attributes:
      pairs: list of (saved, here).
      ambiguous: the saved variables that could belong to several here.
    """

    def __init__(
        self, saved: Iterable[NamedVariable], live: LiveVariables, targets: Targets, counted: bool = False
    ) -> None:
        self.pairs: list[tuple[NamedVariable, NamedVariable]] = []
        self.ambiguous: list[NamedVariable] = []
        normal = NameNormalizer(live)
        saved, left = list(saved), {id(leaf) for leaf in live.leaves}

        def kind(leaf: NamedVariable) -> str | None:
            name = targets.without_model(leaf.name)
            return None if normal.given(name) else normal(name).rpartition("/")[0]

        there, here = (groups(side, kind) for side in (saved, live.leaves))
        for one in there.pop(None, []):
            names = (one.name, normal.given(targets.without_model(one.name)) or "")
            found = [leaf for leaf in targets.find(names[0]) or targets.find(names[1]) if id(leaf) in left]
            self.pairs += [(one, leaf) for leaf in found if len(found) == 1]
            self.ambiguous += [one] * (len(found) > 1)

        def plain(leaf: NamedVariable) -> str:
            return targets.without_model(leaf.name)

        for name in there.keys() & here.keys():
            known = _layers(here[name], targets.counted if counted else plain)
            self._of_kind(_layers(there[name], plain), known)

    def _of_kind(self, there: _Layers, here: _Layers) -> None:
        if there.keys() == here.keys():
            for name in there:
                self._pair(there[name], here[name])
            return
        shapes = [groups(side.values(), _shapes) for side in (there, here)]
        for shape, layers in shapes[0].items():
            others = shapes[1].get(shape, [])
            if len(layers) == len(others) == 1:
                self._pair(layers[0], others[0])
            elif others:
                self.ambiguous += [leaf for layer in layers for leaves in layer.values() for leaf in leaves]

    def _pair(self, there: dict[str, list[NamedVariable]], here: dict[str, list[NamedVariable]]) -> None:
        for own in there.keys() & here.keys():
            if len(there[own]) == len(here[own]) == 1:
                self.pairs.append((there[own][0], here[own][0]))
            else:
                self.ambiguous += there[own]


def _layers(leaves: list[NamedVariable], name_of: Callable[[NamedVariable], str]) -> _Layers:
    found: _Layers = {}
    for leaf in leaves:
        layer, _, own = name_of(leaf).rpartition("/")
        found.setdefault(layer, {}).setdefault(own, []).append(leaf)
    return found


def _counted_from_zero(model: Any) -> str:
    """Returns the name of a model without the number that Keras has put behind it, if Keras has named it."""
    base = re.sub(r"_\d+$", "", model.name)
    kinds = {type(model).__name__.lower(), "functional", "model"}
    return base if base.replace("_", "").lower() in kinds else model.name


def _shapes(layer: dict[str, list[NamedVariable]]) -> _Shapes:
    return frozenset((name, leaf.shape) for name, leaves in layer.items() for leaf in leaves)
