"""Rules that may be missing: for values whose shape and name agree with one variable alone. They are text to copy."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping

from looplib.checkpoint.names import groups
from looplib.extras.weights.rules import WeightRule

# Last parts of names that mean the same in Keras, PyTorch and Flax.
_ALIKE = {
    "weight": "kernel", "embeddings": "kernel", "embedding": "kernel", "gamma": "kernel", "scale": "kernel",
    "beta": "bias", "running_mean": "moving_mean", "mean": "moving_mean",
    "running_var": "moving_variance", "var": "moving_variance",
}  # fmt: skip
_OF_PYTORCH = {2: (1, 0), 3: (2, 1, 0), 4: (2, 3, 1, 0)}  # its kernels of Linear and of convolutions, for Keras
_MOST = 5_000  # names on a side that are compared

Shapes = Mapping[str, tuple[int | None, ...]]
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
        there = {name: shape for name, shape in there.items() if name not in {pair.there for pair in found}}
        here = {name: shape for name, shape in here.items() if name not in {pair.here for pair in found}}
    return _as_rules(pairs, names)


def _pairs(there: Shapes, here: Shapes) -> list[Suggestion]:
    """Returns the values and variables each of which is the only best partner of the other."""
    forward = {name: _best(name, there[name], here, _form) for name in there}
    backward = {
        name: _best(name, here[name], there, lambda one, shape, other, of: _form(other, of, one, shape))
        for name in here
    }
    return [
        pair for name, pair in forward.items() if pair and backward.get(pair.here) and backward[pair.here].there == name
    ]


def _with_their_layers(pairs: list[Suggestion], there: Shapes, here: Shapes) -> list[Suggestion]:
    """Adds the values beside one that was paired, such as a bias, which alone may fit many."""
    layers = {_layer(pair.here): _layer(pair.there) for pair in pairs}
    done = {pair.here for pair in pairs} | {pair.there for pair in pairs}
    beside = groups((name for name in there if name not in done), _layer)
    added = []
    for name in here:
        if name not in done and _layer(name) in layers:
            found = [_form(one, there[one], name, here[name]) for one in beside.get(layers[_layer(name)], ())]
            added += fitting if len(fitting := [one for one in found if one]) == 1 else []
    return pairs + added


def _layer(name: str) -> str:
    return re.split(r"[./](?=[^./]*$)", name)[0]


def _form(there: str, shape: tuple[int | None, ...], here: str, of: tuple[int | None, ...]) -> Suggestion | None:
    """Returns how a value would be in the form of a variable; None if it does not fit."""
    if _last(there) != _last(here) and not there.rpartition("/")[2].isdigit():
        return None
    if here.endswith("kernel") and "embed" in "".join(_parts(there)[-2:]):
        return None  # a table of embeddings fits a small kernel by chance
    axes = ()
    if there.endswith("weight") and here.endswith("kernel"):
        axes = _OF_PYTORCH.get(len(shape), ())
    now = tuple(shape[axis] for axis in axes) if axes else shape
    if now == of:
        return Suggestion(there, here, axes)
    splits = len(now) == 2 and len(of) == 3 and None not in of and (
        (now[0] == of[0] and now[1] == of[1] * of[2]) or (now[1] == of[2] and now[0] == of[0] * of[1])
    )  # fmt: skip
    split_bias = len(now) == 1 and len(of) == 2 and None not in of and now[0] == math.prod(of)
    return Suggestion(there, here, axes, reshape=True) if splits or split_bias else None


def _best(
    name: str, shape: tuple[int | None, ...], others: Shapes, form: Callable[..., Suggestion | None]
) -> Suggestion | None:
    """Returns the only best partner of a name: of fitting shape, equal numbers, and the most equal parts at the end."""
    scored = [
        (_numbers(name) == _numbers(other), *_agreement(name, other), found)
        for other, of in others.items()
        if (found := form(name, shape, other, of))
    ]
    scored.sort(key=lambda one: one[:3], reverse=True)
    if not scored or (len(scored) > 1 and scored[0][:3] == scored[1][:3]):
        return None
    return scored[0][3]


def _agreement(one: str, other: str) -> tuple[int, int]:
    """Returns how many parts before the last are equal at the end of two names, and how many anywhere."""
    parts = [_parts(name)[:-1] for name in (one, other)]
    same = 0
    for ours, theirs in zip(*map(reversed, parts)):
        if ours != theirs:
            break
        same += 1
    return same, len(set(parts[0]) & set(parts[1]))


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
    for spell in (_by_prefix, _by_number, _alone):
        rest = []
        spelled = groups(((spell(pair), pair) for pair in left), lambda one: one[0])
        for rule, found in spelled.items():
            wanted = {pair.there for _, pair in found}
            if rule and {name for name in names if re.search(rule[0], name)} == wanted:
                rules[rule[0]] = rule[1]
            else:
                rest += [pair for _, pair in found]
        left = rest
    return rules


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
