"""The layers of a model here at the places that Keras's own format of weights gives them."""

import dataclasses
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from looplib.compat import keras as _keras
from looplib.errors import WarmStartError
from looplib.weights.hdf5 import NamesOfLayers, chain, numbered, snake_case
from looplib.weights.names import LiveVariables, NamedVariable, NameNormalizer

_LIST = "layers"


class ComputedValue:
    """What a layer computes when it is saved, such as a kernel with its adapters added (LoRA), in place of a variable.

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
        kind = type(_base_layer(model))
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


def _base_layer(model: Any) -> Any:
    return importlib.import_module(_keras.family(model) or "keras").layers.Layer()


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
