"""The types that fields of settings may have: their values as YAML holds them, and back, by cattrs."""

import collections
import contextlib
import copy
import dataclasses
import datetime
import difflib
import enum
import itertools
import pathlib
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NoReturn

import cattrs
import numpy as np
import yaml

from looplib.base.messages import duration, gist, is_utf8, shown
from looplib.errors import ConfigurationError

_MOST_NODES, _DEEPEST = 50_000, 50  # of a YAML text, after its aliases
_LONGEST_NUMBER = 100  # characters
At = Callable[[str], str]  # from the path of a setting to a phrase that also says where its value comes from

_ACCEPTED = (
    "numbers, text, booleans, enumerations, Literals, paths, dates and durations, and lists, tuples, sets, dicts and "
    "dataclasses of these; what __post_init__ makes of them may be a field(init=False) of any type"
)


class _WrongError(ValueError):
    """A value that is not of its type; its arguments are both."""


class _Loader(yaml.SafeLoader):
    """Reads 1e-3 as a number, which YAML 1.1 reads as text."""


class _Dumper(yaml.SafeDumper):
    """Puts text that `_Loader` would read as a number in quotes, and turns other objects into text."""

    def ignore_aliases(self, data: object) -> bool:
        return True


for _kind in (_Loader, _Dumper):
    _exponent = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+")
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _exponent, list("-+.0123456789"))
# yaml folds text at U+0085, unless it is in double quotes.
_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, '"' if "\x85" in text else None)
)
_Dumper.add_multi_representer(object, lambda dumper, value: dumper.represent_data(_shown(value)))


def load(text: str) -> Any:
    """Returns what a YAML text holds.

    Raises:
      ValueError: if it is not YAML, or holds more than settings do.
    """
    root = compose(text)
    with _in_sentences():
        return _Loader("").construct_document(root) if root else None


@contextlib.contextmanager
def _in_sentences() -> Iterator[None]:
    try:
        yield
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(getattr(error, "problem", None) or gist(error)) from error
    except Exception as error:  # of yaml's constructors any
        raise ValueError("a value in it is nested too deep, or does not fit its tag") from error


def compose(text: str) -> yaml.Node | None:
    """Returns the nodes of a YAML text, without the values that they are for.

    Raises:
      ValueError: if it is not YAML, more than settings are after its aliases, or has a name twice.
    """
    with _in_sentences():
        root = yaml.compose(text, _Loader)
    level, count = [root] if root else [], 0
    for depth in itertools.count():
        count += len(level)
        if count > _MOST_NODES or depth > _DEEPEST:
            raise ValueError(
                f"it has more than {_MOST_NODES:,} values, or {_DEEPEST} levels; write less, or no aliases"
            )
        if not level:
            return root
        for node in level:
            line = f"line {node.start_mark.line + 1}"
            if isinstance(node, yaml.MappingNode):
                names = [(name.tag, name.value) for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
                for (_, name), times in collections.Counter(names).most_common(1):
                    if times > 1:
                        raise ValueError(f"it has {shown(name)} {times} times, {line}; write it once")
            elif isinstance(node, yaml.ScalarNode) and not is_utf8(node.value):
                raise ValueError(f"it has text that is not UTF-8, {line}")
            elif node.tag.endswith((":int", ":float")) and len(node.value) > _LONGEST_NUMBER:
                raise ValueError(f"it has a number of {len(node.value):,} characters, {line}")
        level = list(itertools.islice(itertools.chain.from_iterable(map(_within, level)), _MOST_NODES + 1))


def _within(node: yaml.Node) -> Iterable[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return itertools.chain.from_iterable(node.value)
    return node.value if isinstance(node, yaml.SequenceNode) else ()


def dump(value: Any) -> str:
    """Returns plain values as YAML."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def plain(value: Any, hint: Any = None) -> Any:
    """Returns a value as YAML holds it, by its own or its field's type."""
    return _CONVERTER.unstructure(value, unstructure_as=hint)


def typed(value: Any, hint: Any, at: At, where: str) -> Any:
    """Returns what YAML holds as a value of a type.

    Args:
      value: what it holds.
      hint: the type.
      at: see `At`.
      where: the path of the setting.

    Raises:
      UsageError: for a value of another type; names the first fault in it.
    """
    try:
        return _CONVERTER.structure(value, hint)
    except Exception as reason:  # of a hook, or of a __post_init__
        error = reason
    while isinstance(error, cattrs.BaseValidationError):
        noted, others = error.group_exceptions()
        if others and isinstance(others[0], cattrs.ForbiddenExtraKeysError):
            name = min(others[0].extra_fields, key=str)
            refuse_name(at(f"{where}.{name}".lstrip(".")), name, others[0].cl)
        if others:
            place = f"{at(where)}: " if where else ""
            raise ConfigurationError(f"{place}{error.cl.__name__} refuses its settings: {gist(others[0])}") from error
        kind, (error, note) = error.cl, noted[0]
        name = note.name if isinstance(note, cattrs.AttributeValidationNote) else note.index
        where = f"{where}[{name}]" if is_listing(kind) else f"{where}.{name}".lstrip(".")
        if isinstance(error, KeyError):
            raise ConfigurationError(f"{at(where)} is missing") from error
    value, hint = error.args if isinstance(error, _WrongError) else (value, hint)
    raise ConfigurationError(f"{at(where):.300} is {shown(value)}; expected {name_of(hint)}") from error


def check(value: Any, hint: Any, found: str) -> None:
    """Checks that what a file holds of a value is read back equal.

    Args:
      value: of a field, as the program gives it.
      hint: the type of the field.
      found: the field, for the message.

    Raises:
      UsageError: if a file cannot hold it.
    """
    if dataclasses.is_dataclass(value) and type(value) in members(hint):
        for name, one in fields(value).items():
            check(one, hints(type(value))[name], f"{found}.{name}")
        for other in filter(dataclasses.is_dataclass, members(hint)):
            if other is not type(value) and hints(other).keys() >= fields(value).keys():
                raise ConfigurationError(
                    f"{found} is a {name_of(type(value))}, whose fields a {name_of(other)} has too; a file does not "
                    "say which one it is; give each a field that the other lacks"
                )
        return
    try:
        _CONVERTER.get_structure_hook(hint)
    except cattrs.StructureHandlerNotFoundError as error:
        kinds = f"the type {name_of(hint)}, and no file can hold a {name_of(error.type_)}"
        raise ConfigurationError(f"{found} is of {kinds}; expected {_ACCEPTED}") from error
    try:
        text = dump(plain(value, hint))
        if is_config_dict(type(value)):
            update(again := copy.deepcopy(value), load(text), str, "")
        else:
            again = _CONVERTER.structure(load(text), hint)
        equal = dump(plain(again, hint)) == text and (again == value or repr(again) == repr(value))
    except Exception:  # a value of another type may fail in any way
        equal = False
    if not equal:
        raise ConfigurationError(
            f"{found} is {shown(value)}; expected a value of its type, {name_of(hint)}, of {_ACCEPTED}"
        )


def update(old: Any, values: Mapping[Any, Any], at: At, path: str) -> None:
    """Replaces settings in a `ConfigDict`, which checks their types by itself.

    Args:
      old: the `ConfigDict`.
      values: the new ones, as YAML holds them.
      at: see `At`.
      path: of the `ConfigDict`.

    Raises:
      UsageError: for an unknown name, or a value of another type.
    """
    for name, value in values.items():
        where = f"{path}.{name}"
        if name not in old:
            refuse_name(at(where), name, list(old), "a setting")
        if is_config_dict(type(old[name])) and isinstance(value, Mapping):
            update(old[name], value, at, where)
            continue
        try:
            old[name] = value
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{at(where)} is {shown(value)}; expected {name_of(old.get_type(name))}"
            ) from error


def fields(value: Any) -> dict[str, Any]:
    """Returns the settings in an instance of a dataclass or a `ConfigDict`; of other values none."""
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return dict(value.items()) if is_config_dict(type(value)) else {}
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}


def hints(kind: Any) -> dict[str, Any]:
    """Returns the types of the fields of a dataclass that files and flags may set."""
    found = typing.get_type_hints(kind)
    return {field.name: found[field.name] for field in dataclasses.fields(kind) if field.init}


def members(hint: Any) -> tuple[Any, ...]:
    """Returns the types of a union; of another type, itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def is_listing(hint: Any) -> bool:
    """Returns whether the values of a type are lists in YAML: lists, tuples and sets."""
    return _is_a(typing.get_origin(hint) or hint, Sequence | Set) and not _is_a(hint, str | bytes)


def is_config_dict(hint: Any) -> bool:
    """Returns whether a type is ml_collections' `ConfigDict`, which a program that uses it has imported."""
    return "ml_collections" in sys.modules and hint is sys.modules["ml_collections"].ConfigDict


def name_of(hint: Any) -> str:
    """Returns a type as a program writes it; an enumeration as its names."""
    if _is_a(hint, enum.Enum):
        return f"one of {', '.join(hint.__members__)}"
    return hint.__name__ if _is_a(hint, object) else re.sub(r"(\w+\.)+", "", str(hint))


def refuse_name(found: str, name: Any, known: Any, what: str = "") -> NoReturn:
    """Refuses a name, with the nearest one.

    Args:
      found: where it is.
      name: the name.
      known: a dataclass, whose fields are expected, or the names that are.
      what: what they are; default settings of the dataclass.
    """
    what = what or f"a setting of {known.__name__}"
    names = [str(one) for one in (hints(known) if isinstance(known, type) else known)]
    close = difflib.get_close_matches(f"{name!s:.100}", names, n=1)
    nearest = f"did you mean {close[0]}? " if close else ""
    raise ConfigurationError(
        f"{found:.300} is not {what}; {nearest}expected one of {', '.join(names) or '(there are none)'}"
    )


def _is_a(hint: Any, kinds: Any) -> bool:
    return isinstance(hint, type) and not typing.get_args(hint) and issubclass(hint, kinds)


def _exactly(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise _WrongError(value, kind)
    return value


def _read_scalar(value: Any, kind: Any) -> Any:
    """Returns a value of a subclass of bool, float, int or str, or of numpy's: enumerations may be such, too."""
    if issubclass(kind, enum.Enum):
        return _read_member(value, kind)
    families = {bool: np.bool_, float: np.floating, int: np.integer}
    base = next((base for base, family in families.items() if issubclass(kind, (base, family))), str)
    if base is float and type(value) in (int, str):  # 1, "1e-3" and "inf"
        value = float(value)
    return kind(_exactly(value, base))


def _bare(value: Any) -> Any:
    """Returns a scalar as YAML holds it, or as a text if YAML cannot hold it."""
    if isinstance(value, enum.Enum):
        return value.name
    value = value.item() if isinstance(value, np.generic) else value
    return next((base(value) for base in (bool, int, float, str) if isinstance(value, base)), str(value))


def _shown(value: Any) -> Any:
    return value.to_dict() if is_config_dict(type(value)) else _bare(value)


def _read_member(value: Any, kind: Any) -> enum.Enum:
    if isinstance(value, str) and value in kind.__members__:
        return kind[value]
    return kind(value if type(value) is not bool else None)  # True is equal to 1


def _read_moment(value: Any, kind: Any) -> Any:
    return _exactly(kind.fromisoformat(value) if isinstance(value, str) else value, kind)


def _read_duration(value: Any, kind: Any) -> datetime.timedelta:
    return kind(seconds=duration("it", value) if isinstance(value, str) else _read_scalar(value, float))


def _refuse_errors(read: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns a hook for which each error of a function means that the value is not of the type."""

    def hook(value: Any, kind: Any) -> Any:
        try:
            return read(value, kind)
        except (ValueError, OverflowError, TypeError):
            raise _WrongError(value, kind) from None

    return hook


_composing: list[Any] = []  # types whose hook of cattrs is asked for


def _read_listing(hint: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    """Returns cattrs' hook, which takes any iterable, also text, for lists alone."""
    _composing.append(hint)
    try:
        hook = converter.get_structure_hook(hint, cache_result=False)
    finally:
        _composing.remove(hint)
    arguments = typing.get_args(hint)
    count = len(arguments) if _is_a(typing.get_origin(hint), tuple) and Ellipsis not in arguments else None

    def read(value: Any, _: Any) -> Any:
        if not isinstance(value, (list, tuple, set)) or count not in (None, len(value)):
            raise _WrongError(value, hint)
        return hook(value, hint)

    return read


def _read_union(hint: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    """Returns a hook that takes the type that a value has already, or the first one that takes it."""
    hooks = {kind: converter.get_structure_hook(kind) for kind in members(hint)}

    def read(value: Any, _: Any) -> Any:
        errors: list[Exception] = [_WrongError(value, hint)]
        for kind in sorted(hooks, key=lambda kind: type(value) is not kind):
            try:
                return hooks[kind](value, kind)
            except Exception as error:  # of any hook
                errors.append(error)
        raise next((error for error in errors if isinstance(error, cattrs.BaseValidationError)), errors[0])

    return read


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(
        forbid_extra_keys=True, unstruct_collection_overrides={Set: lambda items: sorted(items, key=repr)}
    )
    for kind in (bool, int, float, str):
        converter.register_structure_hook(kind, _refuse_errors(_read_scalar))
        converter.register_unstructure_hook(kind, _bare)
    converter.register_unstructure_hook(float, lambda value: float(value) if type(value) is int else _bare(value))
    for kind in (bytes, type(None)):
        converter.register_structure_hook(kind, _exactly)
    for kind in (datetime.date, datetime.datetime, datetime.time):
        converter.register_structure_hook(kind, _refuse_errors(_read_moment))
        converter.register_unstructure_hook(kind, kind.isoformat)
    converter.register_structure_hook(datetime.timedelta, _refuse_errors(_read_duration))
    converter.register_unstructure_hook(datetime.timedelta, datetime.timedelta.total_seconds)
    converter.register_structure_hook(pathlib.Path, _refuse_errors(lambda value, kind: kind(_exactly(value, str))))
    for matches, read, write in (
        (lambda hint: _is_a(hint, enum.Enum), _refuse_errors(_read_member), _bare),
        (lambda hint: _is_a(hint, np.generic), _refuse_errors(_read_scalar), _bare),
        (is_config_dict, lambda value, kind: value if type(value) is kind else kind(value), copy.deepcopy),
    ):
        converter.register_structure_hook_func(matches, read)
        converter.register_unstructure_hook_func(matches, write)
    converter.register_structure_hook_factory(lambda hint: len(members(hint)) > 1, _read_union)
    converter.register_structure_hook_factory(lambda hint: is_listing(hint) and hint not in _composing, _read_listing)
    return converter


_CONVERTER = _converter()
