"""Rules that may be missing: for values whose shape and name agree with one variable alone. They are text to copy."""

import collections
import dataclasses
import math
import re
from collections.abc import Hashable, Iterable, Mapping

from looplib.weights.names import groups
from looplib.weights.rules import WeightRule

# Last parts of names that mean the same in Keras, PyTorch and Flax.
_ALIKE = {
    "weight": "kernel", "embeddings": "kernel", "embedding": "kernel", "gamma": "kernel", "scale": "kernel",
    "beta": "bias", "running_mean": "moving_mean", "mean": "moving_mean",
    "running_var": "moving_variance", "var": "moving_variance",
}  # fmt: skip
_OF_PYTORCH = {2: (1, 0), 3: (2, 1, 0), 4: (2, 3, 1, 0)}  # its kernels of Linear and of convolutions, for Keras
_MOST = 5_000  # names on a side that are compared
_ANY = "*"  # for the last part of a name that is only a number

Shape = tuple[int | None, ...]
Shapes = Mapping[str, Shape]
Rules = dict[str, str | WeightRule]


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A value and the variable that it may be for.

    Attributes:
      there: the name of the value.
      here: the name of the variable.
      transpose: the order of the axes.
      reshape: whether its axes are others.
    """

    there: str
    here: str
    transpose: tuple[int, ...] = ()
    reshape: bool = False

    def rule(self, to: str) -> str | WeightRule:
        """Returns the rule that makes it a new name."""
        return WeightRule(to, self.transpose, self.reshape) if self.transpose or self.reshape else to


def suggest(there: Shapes, here: Shapes, others: Iterable[str]) -> Rules:
    """Returns rules for values that agree with one variable alone, and that with no other value.

    Args:
      there: the values that no variable takes yet, with their shapes.
      here: the variables that take none.
      others: the names of all other values, which the rules must not touch.
    """
    names = {*there, *others}
    if max(len(there), len(here)) > _MOST:
        return {}
    pairs: list[Suggestion] = []
    while found := _with_their_layers(_pairs(there, here), there, here):  # what is left may fit one alone
        pairs += found
        done = {pair.there for pair in found}, {pair.here for pair in found}
        there = {name: shape for name, shape in there.items() if name not in done[0]}
        here = {name: shape for name, shape in here.items() if name not in done[1]}
    return _as_rules(pairs, names)


def _pairs(there: Shapes, here: Shapes) -> list[Suggestion]:
    """Returns the values and variables each of which is the only best partner of the other."""
    forms = {name: _forms(name, shape) for name, shape in there.items()}
    places = {name: _places(name, shape) for name, shape in here.items()}
    of_here, of_there = _Partners(places), _Partners(forms)
    forward = {name: of_here.best(name, wanted) for name, wanted in forms.items()}
    backward = {name: of_there.best(name, wanted) for name, wanted in places.items()}
    pairs = (
        _form(one, there[one], name, here[name]) for one, name in forward.items() if name and backward[name] == one
    )
    return [pair for pair in pairs if pair]


class _Partners:
    """The names of a side, by what a best partner has in common with them, so that no two names are compared.

    Args:
      keys: the keys of each name: a name of the other side fits if it has one of them too.
    """

    def __init__(self, keys: Mapping[str, Iterable[Hashable]]) -> None:
        self._names: dict[Hashable, dict[str, None]] = {}
        self._parts: dict[Hashable, dict[str, list[str]]] = {}
        self._known: dict[Hashable, tuple[str | None, int]] = {}
        for name, own in keys.items():
            for key in own:
                for place in _ends(key, name):
                    self._names.setdefault(place, {})[name] = None

    def best(self, name: str, keys: Iterable[Hashable]) -> str | None:
        """Returns the only best partner of a name: of equal numbers, and the most equal parts, at the end first."""
        places = zip(*(_ends(key, name) for key in keys))
        fitting = ([place for place in several if place in self._names] for several in places)
        best = next(filter(None, fitting), None)
        found = [self._most_equal(place, {*_parts(name)[:-1]}) for place in best or ()]  # a name fits by one key alone
        most = max((count for _, count in found), default=0)
        names = [one for one, count in found if count == most]
        return names[0] if len(names) == 1 else None

    def _most_equal(self, place: Hashable, parts: set[str]) -> tuple[str | None, int]:
        """Returns the only name at a place that has the most of some parts, None if several have; and how many."""
        if place not in self._parts:
            self._parts[place] = {}
            for name in self._names[place]:
                for part in {*_parts(name)[:-1], ""}:
                    self._parts[place].setdefault(part, []).append(name)
        own = frozenset(parts & self._parts[place].keys())
        if (place, own) not in self._known:
            counts = collections.Counter(name for part in own or {""} for name in self._parts[place][part])
            (first, most), *second = counts.most_common(2)
            self._known[place, own] = None if second and second[0][1] == most else first, most * bool(own)
        return self._known[place, own]


def _ends(key: Hashable, name: str) -> list[Hashable]:
    """Returns places with a key, the closest first: with the numbers of a name or any, and with ever fewer parts."""
    parts = tuple(_parts(name)[:-1])
    ends = [parts[start:] for start in range(len(parts) + 1)]
    return [(key, numbers, end) for numbers in (tuple(_numbers(name)), None) for end in ends]


def _with_their_layers(pairs: list[Suggestion], there: Shapes, here: Shapes) -> list[Suggestion]:
    """Adds the values beside one that was paired, such as a bias, which alone may fit many."""
    layers = {_layer(pair.here): _layer(pair.there) for pair in pairs}
    done = {pair.here for pair in pairs} | {pair.there for pair in pairs}
    beside: dict[Hashable, list[str]] = {}
    for name in there.keys() - done:
        for form in _forms(name, there[name]):
            beside.setdefault((_layer(name), form), []).append(name)
    added = []
    for name in here:
        if name not in done and (layer := layers.get(_layer(name))) is not None:
            fitting = {one for place in _places(name, here[name]) for one in beside.get((layer, place), ())[:2]}
            added += [_form(one, there[one], name, here[name]) for one in fitting if len(fitting) == 1]
    return pairs + [one for one in added if one]


def _layer(name: str) -> str:
    return re.split(r"[./](?=[^./]*$)", name)[0]


def _forms(name: str, shape: Shape) -> list[Hashable]:
    """Returns what a variable for a value has as one of its `_places`."""
    last = _ANY if name.rpartition("/")[2].isdigit() else _last(name)
    kernels = [True] * ("embed" not in "".join(_parts(name)[-2:]))  # such a table fits a small kernel by chance
    return [
        (last, is_kernel, tuple(shape[axis] for axis in _axes(name, shape, is_kernel)))
        for is_kernel in (*kernels, False)
    ]


def _places(name: str, shape: Shape) -> list[Hashable]:
    """Returns the forms of values for a variable: its own shape, and two or three axes as fewer."""
    shapes = {shape}
    if len(shape) in (2, 3) and None not in shape:
        shapes |= {(math.prod(shape),)} if len(shape) == 2 else _without_an_axis(*shape)
    return [(last, name.endswith("kernel"), one) for last in (_last(name), _ANY) for one in shapes]


def _without_an_axis(a: int, b: int, c: int) -> set[Shape]:
    return {(a, b * c), (a * b, c)}


def _axes(name: str, shape: Shape, is_kernel: bool) -> tuple[int, ...]:
    """Returns the order of the axes of a value for a variable."""
    axes = _OF_PYTORCH.get(len(shape), ()) if is_kernel and name.endswith("weight") else ()
    return axes or tuple(range(len(shape)))


def _form(there: str, shape: Shape, here: str, of: Shape) -> Suggestion | None:
    """Returns how a value would be in the form of a variable; None if it does not fit."""
    if not {*_forms(there, shape)} & {*_places(here, of)}:
        return None
    axes = _axes(there, shape, here.endswith("kernel"))
    moved = () if axes == tuple(range(len(shape))) else axes
    return Suggestion(there, here, moved, tuple(shape[axis] for axis in axes) != of)


def _parts(name: str) -> list[str]:
    return [part.lower() for part in re.split(r"[./]|_(?=\d)", name) if part]


def _last(name: str) -> str:
    part = re.split(r"[./]", name)[-1].lower()
    return _ALIKE.get(part, part)


def _numbers(name: str) -> list[str]:
    return re.findall(r"\d+", "/".join(_parts(name)[:-1]))


def _as_rules(pairs: list[Suggestion], names: set[str]) -> Rules:
    """Returns few rules for pairs: of a prefix, of names that differ in numbers, and else one for each."""
    rules: Rules = {}
    left = pairs
    for spell, alike in ((_by_prefix, _first), (_by_number, _without_numbers), (_alone, str)):
        rest = []
        matched = groups(names, alike)
        spelled = groups(((spell(pair), pair) for pair in left), lambda one: one[0])
        for rule, found in spelled.items():
            wanted = {pair.there for _, pair in found}
            if rule and {*matched[alike(found[0][1].there)]} == wanted:
                rules[rule[0]] = rule[1]
            else:
                rest += [pair for _, pair in found]
        left = rest
    return rules


def _first(name: str) -> str:
    """Returns what names have in common that a rule of a prefix matches."""
    return re.sub("/.*", "/", name, flags=re.DOTALL)


def _without_numbers(name: str) -> str:
    """Returns what names have in common that a rule of numbers matches."""
    return re.sub(r"\d+", "\0", name)


def _by_prefix(pair: Suggestion) -> tuple[str, str | WeightRule] | None:
    """Returns a rule for all names below a group; None if the names differ in more than that."""
    there, here = pair.there.split("/"), pair.here.split("/")
    if pair.transpose or pair.reshape or there[0] == here[0] or there[1:] != here[1:] or len(there) < 2:
        return None
    return f"^{re.escape(there[0])}/", f"{here[0]}/"


def _by_number(pair: Suggestion) -> tuple[str, str | WeightRule] | None:
    """Returns a rule for all names that differ in numbers alone, which the new names have in the same order."""
    numbers = re.findall(r"\d+", pair.there)
    if not numbers or numbers != re.findall(r"\d+", pair.here):
        return None
    count = iter(range(1, len(numbers) + 1))
    to = re.sub(r"\d+", lambda _: f"\\{next(count)}", pair.here)
    return "^" + re.sub(r"\d+", lambda _: r"(\d+)", re.escape(pair.there)) + "$", pair.rule(to)


def _alone(pair: Suggestion) -> tuple[str, str | WeightRule]:
    return f"^{re.escape(pair.there)}$", pair.rule(pair.here)
