"""The decoder of foreign JSON: from a text to values of Python types and dataclasses, with bounds.

What is read from a disk or a network may come from somebody else, or be damaged. A strict decoder raises `MisfitError`
for a value of another type; the other one leaves it out and keeps the rest.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

_DEEPEST = 100  # levels of JSON
_MISFIT: Any = object()
_Convert = Callable[[Any, "Limits"], Any]


class MisfitError(ValueError):
    """A JSON value is not of the type that is expected."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of what is decoded. A longer text or list is cut; a larger integer is a misfit.

    Attributes:
      text: characters of a text. If there is a bound, a field of type `Annotated[str, number]` has its own; the one of
        a field of type `Annotated[float, number]` always holds.
      name: characters of a name in an object.
      items: entries of a list or an object.
      whole: the largest absolute value of an integer.
    """

    text: int = sys.maxsize
    name: int = sys.maxsize
    items: int = sys.maxsize
    whole: float = 2**63 - 1


READ = Limits()
"""For a file whose size is bounded."""
SHOWN = Limits(4000, 200, 2000, 2**53)
"""For what a page or a table shows; a browser has doubles for integers."""


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text; a `ValueError` says that it is none, or nested deeper than 100 levels."""
    text = text.decode() if isinstance(text, bytes) else text
    with contextlib.suppress(RecursionError):
        level = [value := json.loads(text)]
        if text.count("[") + text.count("{") <= _DEEPEST:
            return value
        for _ in range(_DEEPEST):
            groups = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
            if not (level := list(itertools.chain.from_iterable(groups))):
                return value
    raise ValueError("its JSON is nested too deep")


def decode(kind: Any, value: Any, limits: Limits = READ, *, strict: bool) -> Any:
    """Converts a JSON value to a type: of a number, a text, a list, a dict, a union, or a dataclass.

    Args:
      kind: the type. A dataclass may have a field `unknown`, which takes what it has no other field for.
      value: the value.
      limits: bounds of texts, lists and integers; without effect if `strict`.
      strict: whether all of it has to fit. If not, a field that is missing or misfits has its default, and an item of
        a list or a dict is left out; an object that lacks a field without a default is a misfit itself.

    Raises:
      MisfitError: if the value does not fit, and without `strict`, if it is of another type as a whole.
    """
    limits = Limits(whole=math.inf) if strict else limits
    if (found := _converter(kind, strict)(value, limits)) is _MISFIT:
        raise _misfit(value, kind)
    return found


def text(value: Any, longest: int = SHOWN.text) -> str:
    """Returns a text of bounded length; "" for anything else."""
    return (value if len(value) <= longest else f"{value[: longest - 1]}…") if isinstance(value, str) else ""


def number(value: Any) -> float | None:
    """Returns a finite number; None for anything else."""
    if type(value) not in (int, float):  # a bool is neither here
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def whole(value: Any, largest: float = SHOWN.whole) -> int | None:
    """Returns an integer that a browser can represent; None for anything else."""
    return value if type(value) is int and abs(value) <= largest else None


def _misfit(value: Any, kind: Any) -> MisfitError:
    return MisfitError(f"{value!r:.50} is there in place of {getattr(kind, '__name__', kind)}")


@functools.cache
def _converter(kind: Any, strict: bool) -> _Convert:
    """Returns what converts a value to a type; of another value it returns `_MISFIT`, or raises if it is strict."""
    convert = _lenient(kind, strict)
    if not strict or kind is Any:
        return convert

    def checked(value: Any, limits: Limits) -> Any:
        if (found := convert(value, limits)) is _MISFIT:
            raise _misfit(value, kind)
        return found

    return checked


def _lenient(kind: Any, strict: bool) -> _Convert:
    of, origin = typing.get_args(kind), typing.get_origin(kind)
    if kind is Any:
        return lambda value, limits: value
    if origin is typing.Annotated and of[0] is float:
        return lambda value, limits: value if _float(value, limits) is not _MISFIT and abs(value) <= of[1] else _MISFIT
    if origin is typing.Annotated:
        return lambda value, limits: _text(value, of[1] if limits.text < sys.maxsize else sys.maxsize)
    if origin in (types.UnionType, typing.Union):
        kinds = [_lenient(one, strict) for one in of]
        return lambda value, limits: _first(value, kinds, limits)
    if origin is tuple:  # of values of any type
        return lambda value, limits: tuple(value) if isinstance(value, list) and len(value) == len(of) else _MISFIT
    if origin in (list, dict):
        item, collected = _converter(of[-1], strict), _items if origin is list else _mapping
        return lambda value, limits: collected(value, item, limits)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=not strict)
        known = {name: _converter(of, strict) for name, of in hints.items() if name != "unknown"}
        return functools.partial(_object, kind, known, "unknown" in hints, strict)
    if kind is float and strict:  # of which older versions wrote Boolean metrics as they were
        return lambda value, limits: int(value) if type(value) is bool else _float(value, limits)
    return _LEAVES.get(kind) or (lambda value, limits: value if type(value) is kind else _MISFIT)


def _first(value: Any, kinds: list[_Convert], limits: Limits) -> Any:
    for convert in kinds:
        with contextlib.suppress(MisfitError):
            if (found := convert(value, limits)) is not _MISFIT:
                return found
    return _MISFIT


def _items(value: Any, item: _Convert, limits: Limits) -> Any:
    if not isinstance(value, list):
        return _MISFIT
    return [found for one in value[: limits.items] if (found := item(one, limits)) is not _MISFIT]


def _mapping(value: Any, item: _Convert, limits: Limits) -> Any:
    if not isinstance(value, dict):
        return _MISFIT
    pairs = (
        (text(name, limits.name), item(one, limits)) for name, one in itertools.islice(value.items(), limits.items)
    )
    return {name: found for name, found in pairs if found is not _MISFIT}


def _object(kind: type, known: dict[str, _Convert], keeps: bool, strict: bool, value: Any, limits: Limits) -> Any:
    if not isinstance(value, dict) or (strict and not known.keys() <= value.keys()):
        return _MISFIT
    found = {name: item for name in known.keys() & value.keys()
             if (item := known[name](value[name], limits)) is not _MISFIT}  # fmt: skip
    if keeps:
        found["unknown"] = {name: item for name, item in value.items() if name not in known}
    try:
        return kind(**found)
    except TypeError:  # a field without a default is missing
        return _MISFIT


def _text(value: Any, longest: int) -> Any:
    return text(value, longest) if isinstance(value, str) else _MISFIT


def _float(value: Any, limits: Limits) -> Any:
    if type(value) is float and limits.whole == math.inf:  # strict: a loss or a rate may have been infinite, or NaN
        return value
    return value if type(value) in (int, float) and abs(value) <= sys.float_info.max else _MISFIT


_LEAVES: dict[type, _Convert] = {
    str: lambda value, limits: _text(value, limits.text),
    int: lambda value, limits: value if type(value) is int and abs(value) <= limits.whole else _MISFIT,
    float: _float,
    types.NoneType: lambda value, limits: None if value is None else _MISFIT,
}
