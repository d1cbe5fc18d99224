"""`run.json`: what ran, with which settings, and how each start ended; `run_report.RunReport` writes it.

Only `read_report` reads it, as it may come from somebody else: a part that is not of its type is left out. What a newer
looplib has added is kept.
"""

import dataclasses
import math
import os
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, Protocol, TypedDict, runtime_checkable

from looplib.base.files import parse_json, read_text
from looplib.masks import masked

TRAINING_REPORT = "run.json"
PAGE, CONFIG = "report.html", "config.yaml"  # beside it
MOST_STARTS = 200  # that are kept: the first one and the newest; each has up to 50 kB
_LARGEST = 2**63 - 1


class ProcessFields(TypedDict, total=False):
    """See `program.Process`."""

    host: str
    pid: int
    since: float


class ProgramFields(TypedDict, total=False):
    """See `program.Program`."""

    arguments: list[str]
    directory: str
    repository: str
    commit: str
    changes: str


class StartRecord(TypedDict, total=False):
    """One start of a run; see `RunReport`. Fields that are only shown are not listed, and may have any value."""

    started: str
    command: list[str]
    program: ProgramFields | None
    process: ProcessFields
    versions: dict[str, str]
    restored_from: str | None
    status: str
    step: int
    error: str
    seconds: dict[str, float]
    changed: dict[str, tuple[Any, Any]]


class Report(StartRecord, total=False):
    """A run: its newest start, and what is known of all of them; see `RunReport`."""

    final_step: int | None
    saved_step: int | None
    end: int | None
    strategy: str
    flags: dict[str, Any]
    config: dict[str, Any]
    metrics: dict[str, dict[str, float | None]]
    restarts: int
    starts: list[StartRecord]


def path_of(model_dir: str, trains: bool) -> str:
    """Returns the path of the report of a training, or of an evaluation job, in a run directory."""
    return os.path.join(model_dir, TRAINING_REPORT if trains else "run_eval.json")


def read_report(path: str) -> Report:
    """Returns the content of a report, without values of wrong types; {} if none can be read."""
    try:
        report = _typed(parse_json(read_text(path)), Report)
    except (OSError, ValueError):
        return {}
    if not report or report is _MISFIT:
        return {}
    return {**report, "starts": kept(report.get("starts", [report] if "started" in report else []))}


def kept(starts: list[StartRecord]) -> list[StartRecord]:
    """Returns the starts that a report has room for."""
    return [*starts[:1], *starts[1:][1 - MOST_STARTS :]]


_MISFIT = object()


def _typed(value: Any, kind: Any) -> Any:
    """Returns those parts of a JSON value that are of a type; `_MISFIT` if it is not of the type itself."""
    of = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return None if value is None else _typed(value, of[0])
    if isinstance(value, dict) and (typing.is_typeddict(kind) or typing.get_origin(kind) is dict):
        kinds = {} if of else typing.get_type_hints(kind)
        found = {name: _typed(item, kinds.get(name, of[1] if of else Any)) for name, item in value.items()}
        return {name: item for name, item in found.items() if item is not _MISFIT}
    if isinstance(value, list) and typing.get_origin(kind) is list:
        return [item for item in (_typed(item, of[0]) for item in value) if item is not _MISFIT]
    if isinstance(value, list) and typing.get_origin(kind) is tuple:
        return value if len(value) == len(of) else _MISFIT
    if kind is float and type(value) in (int, float):
        return value if abs(value) <= sys.float_info.max else _MISFIT
    if kind is int and type(value) is int:
        return value if abs(value) <= _LARGEST else _MISFIT
    return value if kind is Any or type(value) is kind else _MISFIT


@runtime_checkable
class _AsDict(Protocol):
    def as_dict(self) -> dict[str, Any]: ...


def as_dict(config: Any) -> dict[str, Any]:
    """Returns a program's own settings as a dict.

    Args:
      config: a dataclass, a mapping, or an object with `as_dict`; None for none.
    """
    if config is None:
        return {}
    if isinstance(config, _AsDict):  # Model Garden's are dataclasses too, of more than counts
        return config.as_dict()
    return dict(config) if isinstance(config, Mapping) else dataclasses.asdict(config)


def changed_settings(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns (old, new) of each setting that two reports have with different values, by its name on the command line.

    Args:
      earlier: a report.
      now: another one, of which `flags` and `config` count.
    """
    found = {}
    for kind, prefix in (("flags", ""), ("config", "config.")):
        before, after = flattened(masked(earlier.get(kind)), prefix), flattened(masked(strict(now.get(kind))), prefix)
        for name in before.keys() & after.keys():
            if before[name] != after[name] and name not in ("model_dir", "local_dir"):  # which may be moved
                found[name] = before[name], after[name]
    return found


def flattened(tree: Any, prefix: str) -> dict[str, Any]:
    """Returns the values of nested dicts by their joined names, each with a prefix."""
    if not isinstance(tree, dict):
        return {}
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat.update(flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value})
    return flat


def strict(value: Any) -> Any:
    """Returns a value for strict JSON: NaN and infinity become None, and other objects text."""
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    if isinstance(value, (set, frozenset)):  # whose order differs between processes
        return sorted(map(strict, value), key=repr)
    numpy = sys.modules.get("numpy")  # which `status` does without
    if numpy and isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (str, int, bool, type(None))) else str(value)
