"""Settings: fields of frozen dataclasses, each declared once with its default, its check, its text and its flag."""

import dataclasses
import numbers
import os
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from absl import flags

from looplib.base.messages import shown, whole_number
from looplib.errors import SettingError

_Settings = TypeVar("_Settings")
_AS_THE_FIELD: Any = object()


class _NumbersByName(flags.ArgumentParser):
    """Reads one whole number, or one for each of several names: "eval:100,test:500"."""

    syntactic_help = "a whole number, or NAME:NUMBER,NAME:NUMBER"

    def parse(self, argument: Any) -> int | dict[str, int]:
        if not isinstance(argument, str):  # a default
            return argument
        found = {name: int(number) for name, _, number in (one.rpartition(":") for one in argument.split(","))}
        return found.pop("", found) if len(found) == 1 else found


def _define_numbers(name: str, default: Any, help: str) -> None:
    flags.DEFINE(_NumbersByName(), name, default, help)


_DEFINE = {
    bool: flags.DEFINE_boolean,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
    list: flags.DEFINE_list,
    tuple: flags.DEFINE_multi_string,
    dict: _define_numbers,
}
_EXPECTED = {bool: "True or False", float: "a number", str: "a text"}  # of a field without a check of its own
_KINDS = {bool: bool, float: numbers.Real, str: (str, os.PathLike)}
flags.disclaim_key_flags()  # --help lists them under the module that calls `Flag.make`


class Flag(NamedTuple):
    """A flag of the command line.

    Attributes:
      name: without dashes.
      kind: the type of its value; list for comma-separated text, tuple for a flag that may be given several times,
        dict for a whole number, or one for each of several names.
      default: its default value.
      help: what --help says.
      choices: the allowed values of an enum.
      least: the smallest allowed number, or None.
    """

    name: str
    kind: type
    default: Any
    help: str
    choices: Sequence[str] = ()
    least: int | None = None

    def make(self, default: Any, more_choices: Iterable[str] = ()) -> None:
        """Defines the flag, with the given default and, for an enum, more choices."""
        if self.choices:
            flags.DEFINE_enum(self.name, default, [*self.choices, *more_choices], self.help)
        else:
            _DEFINE[self.kind](self.name, default, self.help)


@dataclasses.dataclass(frozen=True)
class _Declared:
    """The arguments of `setting`, without the default."""

    help: str
    choices: Sequence[str]
    least: int | None
    check: Callable[[str, Any], Any] | None
    flag_default: Any
    read: Callable[[str], Any] | None
    flag: str


def setting(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    least: int | None = None,
    check: Callable[[str, Any], Any] | None = None,
    flag_default: Any = _AS_THE_FIELD,
    read: Callable[[str], Any] | None = None,
    flag: str = "",
) -> Any:
    """Declares a field of a dataclass as a setting. It has a flag.

    Args:
      default: the default value. If it is None, None is allowed and not checked.
      help: the text of --help.
      choices: the allowed values.
      least: the smallest allowed value of a whole number.
      check: function of the name and a value; returns the value to keep, or raises `UsageError`.
      flag_default: the default of the flag, if it differs from the field's.
      read: converts the text of the flag to the value of the field, if the two have different types.
      flag: the name of the flag; "" for the field's name.
    """
    declared = _Declared(help, choices, least, check, flag_default, read, flag)
    return dataclasses.field(default=default, metadata={"setting": declared})


def check(settings: Any) -> None:
    """Checks and converts each setting of a dataclass in place; for `__post_init__`.

    Raises:
      UsageError: for a value that is not allowed.
    """
    for field, declared in _declared(type(settings)):
        name, value = field.name, getattr(settings, field.name)
        if value is None and field.default is None:
            continue
        kind = _type(field)
        if declared.choices:
            if value not in declared.choices:
                raise SettingError(f"{name} is {value!r}; expected one of {', '.join(declared.choices)}")
        elif declared.least is not None:
            value = whole_number(name, value, least=declared.least)
        elif declared.check:
            value = declared.check(name, value)
        elif not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind is not bool):
            raise SettingError(f"{name} is {shown(value)}; expected {_EXPECTED[kind]}")
        object.__setattr__(settings, name, value)


def flags_of(kind: type) -> list[Flag]:
    """Returns the flags for the settings of a dataclass."""
    found = []
    for field, declared in _declared(kind):
        default = field.default if declared.flag_default is _AS_THE_FIELD else declared.flag_default
        kind, least = (str, None) if declared.read else (_type(field), declared.least)
        found.append(Flag(declared.flag or field.name, kind, default, declared.help, declared.choices, least))
    return found


def from_flags(kind: type[_Settings], values: Mapping[str, Any], **others: Any) -> _Settings:
    """Returns the settings that flags describe, and other fields; `UsageError` for a value that is not allowed.

    Args:
      kind: the dataclass.
      values: the value of each flag, by name.
      **others: fields that are no settings.
    """
    given = {field.name: (values[declared.flag or field.name], declared.read) for field, declared in _declared(kind)}
    return kind(**others, **{name: read(value) if read else value for name, (value, read) in given.items()})


def as_flags(settings: Any) -> dict[str, Any]:
    """Returns the settings by name, without those whose flag has another type."""
    return {
        declared.flag or field.name: getattr(settings, field.name)
        for field, declared in _declared(type(settings))
        if not declared.read
    }


def _declared(kind: type) -> Iterator[tuple[dataclasses.Field, _Declared]]:
    for field in dataclasses.fields(kind):
        if "setting" in field.metadata:
            yield field, field.metadata["setting"]


def _type(field: dataclasses.Field) -> type:
    """Returns the type of a field, without None."""
    return next(kind for kind in _DEFINE if kind in (typing.get_args(field.type) or (field.type,)))
