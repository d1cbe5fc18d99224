"""The typed content of `run.json`, and where it is; `RunReport` in `run_json.py` writes it.

The file may come from somebody else, so `read` is the only one that reads it: a part that is not of its type is left
out. What a newer looplib has added is kept.
"""

import os
import sys
import types
import typing
from typing import Any, TypedDict

from looplib.files import failures, parse_json, read_text

OF_TRAINING = "run.json"
MOST_STARTS = 200  # that are kept: the first one and the newest; each has up to 50 kB
_LARGEST = 2**63 - 1


class Process(TypedDict, total=False):
    """See `ownership.Process`."""

    host: str
    pid: int
    since: float


class Program(TypedDict, total=False):
    """See `program.Program`."""

    arguments: list[str]
    directory: str
    repository: str
    commit: str
    changes: str


class Start(TypedDict, total=False):
    """One start of a run; see `RunReport`. Fields that are only shown are not listed, and may have any value."""

    started: str
    command: list[str]
    program: Program | None
    process: Process
    versions: dict[str, str]
    restored_from: str | None
    status: str
    step: int
    error: str
    seconds: dict[str, float]
    changed: dict[str, tuple[Any, Any]]


class Report(Start, total=False):
    """A run: its newest start, and what is known of all of them; see `RunReport`."""

    final_step: int | None
    saved_step: int | None
    end: int | None
    strategy: str
    flags: dict[str, Any]
    config: dict[str, Any]
    metrics: dict[str, dict[str, float | None]]
    restarts: int
    starts: list[Start]


def path_of(model_dir: str, trains: bool) -> str:
    """Returns the path of the report of a training, or of an evaluation job, in a run directory."""
    return os.path.join(model_dir, OF_TRAINING if trains else "run_eval.json")


def saved_step(model_dir: str | None, trains: bool) -> int | None:
    """Returns the step of the newest checkpoint that a report knows of; None without one."""
    return read(path_of(model_dir, trains)).get("saved_step") if model_dir else None


def read(path: str) -> Report:
    """Returns the content of a report, without what is not of its type; {} if none can be read."""
    try:
        report = _typed(parse_json(read_text(path)), Report)
    except (*failures(path), ValueError):
        return {}
    if not report or report is _MISFIT:
        return {}
    return {**report, "starts": kept(report.get("starts", [report] if "started" in report else []))}


def kept(starts: list[Start]) -> list[Start]:
    """Returns the starts of which a report has room."""
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
