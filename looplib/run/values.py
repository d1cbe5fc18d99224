"""Values of a file that somebody else may have written, as the page takes them: of the right type, finite and short."""

import datetime
import json
import math
from typing import Any

from looplib.run.records import Record, read_jsonl

_LONGEST_TEXT = 4000  # characters
_MOST_ITEMS = 2000  # of a list or an object
_LARGEST_INT = 2**53  # a browser has doubles
_LONGEST_SECONDS = 1e12  # of a duration; sums of these are finite
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_FIRST, _LAST = -62_135_596_800, 253_402_300_799  # seconds of the years 1 to 9999, which `datetime` has


def text(value: Any, longest: int = _LONGEST_TEXT) -> str:
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


def whole(value: Any) -> int | None:
    """Returns an integer that a browser can represent; None for anything else."""
    return value if type(value) is int and abs(value) <= _LARGEST_INT else None


def mapping(value: Any) -> dict[str, Any]:
    """Returns a dict of bounded size with short names; {} for anything else."""
    if not isinstance(value, dict):
        return {}
    return {text(key, 200): item for key, item in list(value.items())[:_MOST_ITEMS] if isinstance(key, str)}


def items(value: Any) -> list[Any]:
    """Returns a list of bounded length; [] for anything else."""
    return value[:_MOST_ITEMS] if isinstance(value, list) else []


def numbers(value: Any) -> dict[str, float]:
    """Returns the finite numbers of a dict."""
    found = {name: number(item) for name, item in mapping(value).items()}
    return {name: item for name, item in found.items() if item is not None}


def durations(value: Any) -> dict[str, float]:
    """Returns the numbers of a dict that can be seconds of a run, in either direction."""
    return {name: item for name, item in numbers(value).items() if abs(item) <= _LONGEST_SECONDS}


def utc(seconds: float) -> datetime.datetime:
    """Returns the time that is so many seconds after 1970, or the nearest one that `datetime` has."""
    return _EPOCH + datetime.timedelta(seconds=min(max(seconds, _FIRST), _LAST))


def shown(value: Any) -> str:
    """Returns a setting as a person would write it: a text as it is, anything else as JSON."""
    return text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of nested dicts by their names, with a point between the names of a path."""
    found: dict[str, Any] = {}
    for name, value in mapping(tree).items():
        inner = flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
        found.update(inner)
        if len(found) > _MOST_ITEMS:
            break
    return found


def metrics(path: str) -> list[Record]:
    """Returns the records of a `metrics.jsonl` with their numbers alone, and None for those that are not finite."""
    records = read_jsonl(path)
    for place, record in enumerate(records):  # in place, because there may be a million
        records[place] = {
            name: value if name in ("step", "split") else number(value) for name, value in record.items()
            if name in ("step", "split") or value is None or type(value) in (int, float)
        }  # fmt: skip
    return records
