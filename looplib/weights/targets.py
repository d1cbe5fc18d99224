"""The names by which rules, and files of names alone, mean the variables here."""

import re
from collections.abc import Callable, Iterable
from typing import Any

from looplib.compat import keras as _keras
from looplib.weights.layers import NumberedVariables
from looplib.weights.names import LiveVariables, NamedVariable, NameNormalizer, groups

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
            own = [counted.get(leaf.path, leaf.name), leaf.name]
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
