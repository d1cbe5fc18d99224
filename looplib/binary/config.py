"""The typed configuration of a binary: a dataclass, maybe nested, from code, YAML files and flags; the later win.

1. `launch.run`'s default, or the variant that --experiment names
2. each --config_file, in order
3. each `--config.<field>=<value>`

The dataclass is made once, of the values of all of these, so that its `__post_init__` sees the final ones.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import flags, logging

from looplib.base import files
from looplib.base.messages import shown, with_cure
from looplib.binary.command_line import PRINT_FLAG
from looplib.buckets.local import local_path
from looplib.config.field_types import (
    At,
    check,
    dump,
    fields,
    hints,
    is_config_dict,
    is_listing,
    load,
    members,
    name_of,
    plain,
    refuse_name,
    typed,
    update,
)  # fmt: skip
from looplib.config.settings import Flag
from looplib.errors import ConfigurationError, UsageError
from looplib.masks import MASK, masked
from looplib.run.directory import CONFIG, RunDir
from looplib.run.report import RunReport, as_dict, changed_settings

_MOST_NAMED = 8  # settings that differ
_MOST_BYTES = 1 << 18  # of a --config_file

FLAGS = (
    Flag("experiment", str, None, "Named variant of the configuration to start from."),
    Flag("config_file", tuple, None, "YAML file of settings; of several, later ones win."),
    PRINT_FLAG,
)


def define(config: Any, experiments: Mapping[str, Any], argv: Sequence[str]) -> Callable[[], Any]:
    """Makes a flag of each field, and of those in optional dataclasses that the command line names.

    Args:
      config: an instance of a dataclass, unchanged.
      experiments: variants of it by name.
      argv: the command line; the program first.

    Returns:
      A function that returns, once the flags are parsed, the configuration, a dict of values for other flags, which is
      empty, and the configuration as YAML for --config_file.

    Raises:
      UsageError: for an unknown setting, or a field that no file can hold.
    """
    for name, variant in experiments.items():
        if type(variant) is not type(config):
            raise TypeError(f"experiment {name!r} is a {type(variant).__name__}; expected a {type(config).__name__}")
    check(config, type(config), "config")
    arguments = flags.FLAGS.read_flags_from_files(list(argv), force_gnu=False)[1:]
    named = (re.match(r"--?(?:no)?config\.([^=]+)", argument) for argument in arguments)
    found = {path: _hint(config, path) for path in [*_paths(config), *(match[1] for match in named if match)]}
    for path, hint in found.items():
        make = flags.DEFINE_boolean if hint is bool else flags.DEFINE_string
        make(f"config.{path}", None, f"A setting, {name_of(hint)}.")
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[f"config.{path}"])
    return lambda: _read(config, experiments, found)


def _read(config: Any, experiments: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[Any, dict[str, Any], str]:
    """Returns the configuration that the flags describe; see `define`."""
    name = flags.FLAGS["experiment"].value
    if name is not None:
        if name not in experiments:
            refuse_name(f"--experiment={name}", name, experiments, "a named variant")
        config = experiments[name]
        check(config, type(config), f"config of --experiment={name}")
    tree = given(config)
    for file in flags.FLAGS["config_file"].value or ():
        merge(
            tree,
            type(config),
            read_yaml(local_path(file, "--config_file")),
            lambda where, file=file: f"{where} in {file}",
        )
    for path, hint in sorted(found.items(), key=lambda item: item[0].count(".")):
        if flags.FLAGS[f"config.{path}"].present:
            value = _reading(flags.FLAGS[f"config.{path}"].value, hint, path)
            for name in reversed(path.split(".")):
                value = {name: value}
            merge(tree, type(config), value, _flag)
    if hidden := [path for path, value in _leaves(tree) if MASK in str(value)]:
        raise ConfigurationError(
            f"a file has {hidden[0]} as {MASK}, because looplib writes no secrets; set {_flag(hidden[0])} too"
        )
    made = typed(tree, type(config), str, "")
    return made, {}, text_of(made, tree)


def _is_given(name: str) -> bool:
    """Returns whether a flag has given a setting such as "config.model.width", or one that it is in."""
    paths = itertools.accumulate(name.split("."), "{}.{}".format)
    return any(path in flags.FLAGS and flags.FLAGS[path].present for path in paths)


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (path, value) of what settings hold, within dicts and lists."""
    if not isinstance(tree, (dict, list)):
        yield path, tree
    for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from _leaves(value, f"{path}.{name}" if path else str(name))


def _flag(where: str) -> str:
    return f"--config.{where}"


def _paths(config: Any) -> Iterator[str]:
    """Yields the names of the settings in a value, those within them with a point."""
    for name, value in fields(config).items():
        yield from (name, *(f"{name}.{path}" for path in _paths(value)))


def _hint(config: Any, path: str) -> Any:
    """Returns the type of a setting, which a flag names."""
    hint = type(config)
    for name in path.split("."):
        known = {name: type(value) for name, value in fields(config).items()} if is_config_dict(type(config)) else {}
        for kind in filter(dataclasses.is_dataclass, members(hint)):
            known |= hints(kind)
        if not known:
            raise ConfigurationError(
                f"{_flag(path)} is not a setting, because {name} would be in a value of the type {name_of(hint)}"
            )
        if name not in known:
            refuse_name(_flag(path), name, known, f"a setting of {name_of(hint)}")
        hint, config = known[name], fields(config).get(name)
    return hint


def _reading(text: str | bool, hint: Any, path: str) -> Any:
    """Returns what the value of a flag holds: YAML, a list without brackets, or text as it is."""
    if isinstance(text, bool):
        return text
    readings = [text]
    lists = any(map(is_listing, members(hint)))
    brackets = text.translate(str.maketrans("()", "[]")) if text.startswith("(") else f"[{text}]"
    for yaml_text in (brackets, text) if lists else (text,):
        with contextlib.suppress(ValueError):
            if not isinstance(value := load(yaml_text), str):  # YAML drops quotes and comments from a text
                readings.insert(0, value)
    for reading in readings:
        with contextlib.suppress(UsageError):
            typed(reading, hint, _flag, path)
            return reading
    return readings[0] if not lists or isinstance(readings[0], list) else readings[-1]


def given(config: Any) -> dict[str, Any]:
    """Returns the settings of a configuration as YAML holds them, for `merge`.

    What `__post_init__` makes of the others is left out, so that it follows them.

    Args:
      config: an instance of a dataclass.

    Raises:
      UsageError: for a dataclass that makes other values of those that it has.
    """
    tree, wanted, places = plain(config), repr(plain(config)), list(_not_default(config))
    for group in [places, *([place] for place in places)] if places else []:
        trial = copy.deepcopy(tree)
        for *above, name in group:
            functools.reduce(dict.get, above, trial).pop(name, None)
        with contextlib.suppress(UsageError):  # of a __post_init__ that misses something
            if repr(plain(typed(trial, type(config), str, ""))) == wanted:
                tree = trial
                if group is places:
                    break
    if places and repr(plain(typed(tree, type(config), str, ""))) != wanted:
        raise ConfigurationError(
            f"{shown(config)} is not what {type(config).__name__} makes of its own values; its __post_init__ may only "
            "change fields that have their defaults"
        )
    return tree


def _not_default(config: Any) -> Iterator[tuple[str, ...]]:
    """Yields the paths of the fields whose value is not their default."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name) if field.init else None
        if dataclasses.is_dataclass(value):
            yield from ((field.name, *path) for path in _not_default(value))
        elif field.init and _differs(field, value):
            yield (field.name,)


def _differs(field: dataclasses.Field[Any], value: Any) -> bool:
    """Returns whether a field has a default, and the value is another."""
    if field.default_factory is not dataclasses.MISSING:
        return repr(plain(field.default_factory())) != repr(plain(value))
    return field.default is not dataclasses.MISSING and repr(plain(field.default)) != repr(plain(value))


def merge(tree: dict[str, Any], kind: Any, values: Mapping[Any, Any], at: At, path: str = "") -> None:
    """Replaces settings by the values of a file or a flag.

    Args:
      tree: settings as YAML holds them, by name; of a dataclass those in it.
      kind: the dataclass.
      values: the new ones.
      at: see `field_types.At`.
      path: of the dataclass within the configuration, with a point at its end.

    Raises:
      UsageError: for an unknown name, or a value of another type.
    """
    known = hints(kind)
    for name, value in values.items():
        where = f"{path}{name}"
        if name not in known:
            refuse_name(at(where), name, kind)
        old, kinds = tree.get(name), [one for one in members(known[name]) if dataclasses.is_dataclass(one)]
        if isinstance(value, Mapping) and kinds:
            names = {*value, *(old or ())}
            inner = next(
                (one for wanted in (names, value) for one in kinds if hints(one).keys() >= set(wanted)), kinds[0]
            )
            tree[name] = old if isinstance(old, dict) and (len(kinds) == 1 or hints(inner).keys() >= names) else {}
            merge(tree[name], inner, value, at, f"{where}.")
        elif isinstance(value, Mapping) and is_config_dict(type(old)):
            update(old, value, at, where)
        else:
            typed(value, known[name], at, where)
            if lost := list(_left_out(old, value)):
                logging.warning("%s replaces the whole dict, and leaves out %s", at(where), ", ".join(lost))
            tree[name] = value


def _left_out(old: Any, new: Any) -> Iterator[str]:
    """Yields the entries of a dict, and of those in it, that another one does not have."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in old:
            yield from (f"{name}.{path}" for path in _left_out(old[name], new[name])) if name in new else (str(name),)


def text_of(config: Any, tree: Mapping[str, Any]) -> str:
    """Returns a configuration as YAML for --config_file, with what `__post_init__` has made in comments.

    Args:
      config: the configuration.
      tree: the settings that it is made of.
    """
    derived: dict[str, Any] = {}
    text = dump(masked(_written(config, tree, derived, "")))
    return text + textwrap.indent(f"Made of these by the program:\n{dump(masked(derived))}" * bool(derived), "# ")


def _written(config: Any, tree: Mapping[str, Any], derived: dict[str, Any], path: str) -> dict[str, Any]:
    found = {}
    for field in (field for field in dataclasses.fields(config) if field.init):
        name, value = field.name, getattr(config, field.name)
        if name in tree and dataclasses.is_dataclass(value) and isinstance(tree[name], dict):
            found[name] = _written(value, tree[name], derived, f"{path}{name}.")
        elif name in tree:
            found[name] = tree[name]
        else:
            found |= {} if _differs(field, value) else {name: plain(value, hints(type(config))[name])}
            derived |= {f"{path}{name}": plain(value)} if _differs(field, value) else {}
    return found


def text_in(path: str) -> str:
    """Returns the text of a --config_file, which may be a link; see `files.read_text`."""
    return files.read_text(os.path.realpath(path), _MOST_BYTES)


def read_yaml(path: str) -> Mapping[str, Any]:
    """Returns the settings of a YAML file.

    Raises:
      UsageError: if it cannot be read, is too large, or is not a mapping.
    """
    try:
        values = load(text_in(path))
    except (OSError, ValueError, tf.errors.OpError) as error:
        raise ConfigurationError(f"--config_file={path} cannot be read: {with_cure(error)}") from error
    if values is not None and not isinstance(values, dict):
        raise ConfigurationError(
            f"--config_file={path} holds a {type(values).__name__}; expected settings, as name: value"
        )
    return values or {}


def write(directory: str, text: str) -> None:
    """Writes a configuration into a run directory, for --config_file. A failure is a warning and does not end a run.

    Args:
      directory: the run directory.
      text: the configuration as YAML.
    """
    path = os.path.join(directory, CONFIG)
    try:
        files.write_whole(path, text)
    except (OSError, tf.errors.OpError) as error:
        logging.warning("%s cannot be written: %s", path, with_cure(error))


def warn_of_other_settings(model_dir: str, config: Any) -> None:
    """Names the settings of a job without training that differ from the training's, and that no flag has given."""
    trained = RunDir(model_dir).report() or RunReport()
    changed = changed_settings(RunReport(config=trained.config), RunReport(config=as_dict(config)))
    if changed := {name: values for name, values in changed.items() if not _is_given(name)}:
        texts = [f"{name}={shown(new)} (the training has {shown(old)})" for name, (old, new) in sorted(changed.items())]
        kept = os.path.join(model_dir, CONFIG)  # Model Garden's experiments have none
        logging.warning(
            "settings differ from those of the training: %s; they are used as given%s",
            ", ".join(texts[:_MOST_NAMED]) + (f" and {len(texts) - _MOST_NAMED} more" * (len(texts) > _MOST_NAMED)),
            f". --config_file={kept} takes those of the training" if tf.io.gfile.exists(kept) else "",
        )
