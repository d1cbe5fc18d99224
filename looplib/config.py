"""The typed configuration of a binary: a dataclass, maybe nested, from code, YAML files and flags; the later win.

1. `launch.run`'s default, or the variant that --experiment names
2. each --config_file, in order
3. each `--config.<field>=<value>`
"""

import copy
import dataclasses
import difflib
import enum
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import tensorflow as tf
import yaml
from absl import flags, logging
from ml_collections import config_flags

from looplib import files
from looplib.errors import UsageError, gist

FILE = "config.yaml"  # in the run directory

# As `command_line.FLAGS`: (name, define, default, help).
PRINT_FLAG = (
    "print_config", flags.DEFINE_boolean, False, "Prints the configuration as YAML and ends."
)  # fmt: skip
FLAGS = (
    ("experiment", flags.DEFINE_string, None, "Named variant of the configuration to start from."),
    ("config_file", flags.DEFINE_multi_string, None, "YAML file of settings; of several, later ones win."),
    PRINT_FLAG,
)


def define(config: Any, experiments: Mapping[str, Any], argv: Sequence[str]) -> Callable[[], Any]:
    """Makes a flag of each field that the command line names.

    Args:
      config: an instance of a dataclass, unchanged.
      experiments: variants of it by name.
      argv: the command line, which is read already; the program first.

    Returns:
      A function that returns the configuration once the flags are parsed.

    Raises:
      UsageError: for an unknown variant or setting, or a file that cannot be read.
    """
    for name, variant in experiments.items():
        if not isinstance(variant, type(config)):
            raise TypeError(f"experiment {name!r} is a {type(variant).__name__}; expected a {type(config).__name__}")
    argv = flags.FLAGS.read_flags_from_files(list(argv), force_gnu=False)
    early = flags.FlagValues()
    early.set_gnu_getopt(True)  # unknown flags may have their values as arguments of their own
    for name, define_flag, default, help_text in FLAGS:
        define_flag(name, default, help_text, flag_values=early)
    early(argv, known_only=True)
    if early.experiment is not None:
        if early.experiment not in experiments:
            _refuse_name(f"--experiment={early.experiment}", early.experiment, experiments, "a named variant")
        config = experiments[early.experiment]
    config = copy.deepcopy(config)
    for path in early.config_file or ():
        override(config, read(path), path)
    for argument in argv[1:]:
        if match := re.match(r"--?(?:no)?config\.([^=]+)", argument):
            hint = _hint(config, match[1].split("."))
            if typing.get_origin(hint) in (list, dict, typing.Literal) or hint in (list, dict):
                raise UsageError(
                    f"--config.{match[1]} is of the type {str(hint).replace('typing.', '')}, which a flag cannot set; "
                    "set it in a --config_file"
                )
    try:
        defined = config_flags.DEFINE_config_dataclass("config", config, sys_argv=argv)
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"a --config flag is wrong: {error.args[0] if error.args else error}") from error
    return lambda: defined.value


def parse(argv: Sequence[str]) -> list[str]:
    """Parses the command line, as `app.run` does.

    Args:
      argv: the command line.

    Returns:
      What it has besides flags.

    Raises:
      UsageError: for an unknown flag, or a value of another type.
    """
    try:
        return flags.FLAGS(argv)
    except flags.IllegalFlagValueError as error:
        match = re.match(r"flag --config\.([\w.]+)=(.*?): ", str(error), re.DOTALL)
        if match and "config" in flags.FLAGS:
            if hint := _hint(flags.FLAGS["config"].value, match[1].split(".")):
                _refuse_type(f"--config.{match[1]}", match[2], hint)
        raise UsageError(f"{error}") from error
    except flags.UnrecognizedFlagError as error:
        setting = _setting_like(flags.FLAGS["config"].value, error.flagname) if "config" in flags.FLAGS else ""
        hint = f"did you mean the setting {setting}? " if setting else ""
        raise UsageError(f"{error}; {hint}--help lists the flags") from error
    except flags.Error as error:
        raise UsageError(f"{error}; --help lists the flags") from error


def _setting_like(config: Any, flag: str) -> str:
    """Returns the flag of the setting whose name is nearest to that of an unknown flag; "" if none is near."""
    paths = list(_paths(config))
    names = {**{path.rpartition(".")[2]: path for path in reversed(paths)}, **{path: path for path in paths}}
    close = difflib.get_close_matches(flag, names, n=1, cutoff=0.8)
    return f"--config.{names[close[0]]}" if close else ""


def _paths(config: Any) -> Iterable[str]:
    """Yields the names of the settings of a dataclass, those of dataclasses in it with a point; of others none."""
    for field in dataclasses.fields(config) if dataclasses.is_dataclass(config) else ():
        yield from [field.name, *(f"{field.name}.{name}" for name in _paths(getattr(config, field.name)))]


def read(path: str) -> Mapping[str, Any]:
    """Returns the settings of a YAML file.

    Raises:
      UsageError: if it cannot be read, or is not a mapping.
    """
    try:
        if files.is_remote(path):
            text = files.read_text(path)
        else:
            with open(path) as file:  # the user's own, so a link may be followed
                text = file.read()
        values = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError, tf.errors.OpError) as error:
        raise UsageError(f"--config_file={path} cannot be read ({gist(error)})") from error
    if values is not None and not isinstance(values, dict):
        raise UsageError(f"--config_file={path} holds a {type(values).__name__}; expected settings, as name: value")
    return values or {}


def override(config: Any, values: Mapping[str, Any], source: str, path: str = "") -> None:
    """Sets fields of a dataclass, and of those in it.

    Args:
      config: the instance of the dataclass.
      values: its new values by name, as a YAML file has them.
      source: where they come from, for messages.
      path: the name of the dataclass within the configuration, with a point at its end.

    Raises:
      UsageError: for an unknown name, or a value of another type.
    """
    hints = typing.get_type_hints(type(config))
    for name, value in values.items():
        where = f"{path}{name}"
        if name not in hints:
            _refuse_name(f"{where} in {source}", str(name), hints, f"a setting of {type(config).__name__}")
        setattr(config, name, _converted(value, hints[name], getattr(config, name), source, where))


def write(directory: str, values: Mapping[str, Any]) -> None:
    """Writes a configuration into a run directory, for --config_file. A failure is a warning and does not end a run.

    Args:
      directory: the run directory.
      values: the configuration as a mapping.
    """
    path = os.path.join(directory, FILE)
    try:
        files.write_whole(path, dump(values))
    except (OSError, tf.errors.OpError) as error:
        logging.warning("%s cannot be written (%s)", path, error)


def dump(values: Mapping[str, Any]) -> str:
    """Returns a configuration as YAML.

    Args:
      values: the configuration as a mapping.
    """
    return yaml.safe_dump(_plain(values), sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.name
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _hint(config: Any, names: Sequence[str]) -> Any:
    """Returns the type of a setting; None where the configuration does not declare it."""
    hint = None
    for number, name in enumerate(names):
        if not dataclasses.is_dataclass(config):
            return None
        hints = typing.get_type_hints(type(config))
        if name not in hints:
            _refuse_name(
                f"--config.{'.'.join(names[: number + 1])}", name, hints, f"a setting of {type(config).__name__}"
            )
        hint, config = hints[name], getattr(config, name)
    return hint


def _converted(value: Any, hint: Any, current: Any, source: str, where: str) -> Any:
    """Returns the value that a YAML file has for a field, with the field's type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [kind for kind in arguments if kind is not type(None)]
        if value is None and len(kinds) < len(arguments):
            return None
        for kind in sorted(kinds, key=lambda kind: type(value) is not kind)[:-1]:
            try:
                return _converted(value, kind, current, source, where)
            except UsageError:
                continue
        hint = sorted(kinds, key=lambda kind: type(value) is not kind)[-1]
        return _converted(value, hint, current, source, where)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        part = copy.deepcopy(current) if isinstance(current, hint) else hint()
        override(part, value, source, f"{where}.")
        return part
    if isinstance(hint, type) and issubclass(hint, enum.Enum) and str(value) in hint.__members__:
        return hint[value]
    kind = origin or hint
    if kind is typing.Literal:
        if value in arguments:
            return value
        _refuse_type(f"{where} in {source}", value, hint)
    if kind in (list, tuple) and isinstance(value, list):
        inner = _inner_hints(kind, arguments, len(value))
        if len(inner) == len(value):
            return kind(
                _converted(item, one, None, source, f"{where}[{number}]")
                for number, (item, one) in enumerate(zip(value, inner))
            )
    elif kind is float and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 1e-3 as text
        except (TypeError, ValueError):
            pass
    elif kind is int and isinstance(value, bool):
        pass
    elif not isinstance(kind, type) or isinstance(value, kind):
        return value
    _refuse_type(f"{where} in {source}", value, hint)


def _inner_hints(kind: type, arguments: tuple[Any, ...], count: int) -> Sequence[Any]:
    """Returns the types of the elements of a list or tuple that has so many."""
    if not arguments:
        return [Any] * count
    if kind is list or arguments[-1] is Ellipsis:
        return [arguments[0]] * count
    return arguments


def _refuse_name(found: str, name: str, names: Iterable[str], what: str) -> NoReturn:
    names = list(names)
    close = difflib.get_close_matches(name, names, n=1)
    nearest = f"did you mean {close[0]}? " if close else ""
    raise UsageError(f"{found} is not {what}; {nearest}expected one of {', '.join(names) or '(there are none)'}")


def _refuse_type(found: str, value: Any, hint: Any) -> NoReturn:
    name = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        name = f"one of {', '.join(hint.__members__)}"
    raise UsageError(f"{found} is {value!r}; expected {name}")
