"""The records of `metrics.jsonl`: one JSON object a line, with its step, its split and its metrics."""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from absl import logging

from looplib import files

Record = dict[str, Any]  # a line as JSON has it: "step", "split", and a number or None for each metric
_T = TypeVar("_T")


def key(record: Record) -> tuple[int, str]:
    """Returns the (step, split) of a record, of which a file has each once."""
    return record["step"], record["split"]


def divided(records: Iterable[_T], condition: Callable[[_T], bool]) -> tuple[list[_T], list[_T]]:
    """Returns (the records that meet a condition, the others)."""
    kept: list[_T] = []
    void: list[_T] = []
    for record in records:
        (kept if condition(record) else void).append(record)
    return kept, void


def cut_short(path: str) -> bool:
    """Returns whether a crash left the last line without its end, so that the next one would be lost with it."""
    if not (files.exists(path) and (size := files.size(path))):
        return False
    with files.open_regular(path) as file:
        file.seek(size - 1)
        return file.read(1) not in (b"", b"\n")


def read_jsonl(path: str) -> list[Record]:
    """Reads a `metrics.jsonl`; returns its records, [] where there is no file. A line cut short by a crash is left out.

    Args:
      path: the file.

    Returns:
      list of dicts in file order.
    """
    return list(each_record(path))


def each_record(path: str) -> Iterator[Record]:
    """Yields the records of a `metrics.jsonl`, as `read_jsonl` returns them, without holding all of them.

    Args:
      path: the file.
    """
    if not files.exists(path):
        return
    try:
        file = files.open_regular(path)
    except files.NotRegularError as error:
        logging.warning("%s", error)
        return
    with file:
        for number, line in enumerate(file, 1):
            if record := _parsed(line):
                yield record
            elif line.strip():
                logging.warning("%s: line %d is not a record and is left out: %.80r", path, number, line)


def read_newest(path: str, most: int = 1 << 16) -> list[Record]:
    """Returns the records in the last bytes of a local `metrics.jsonl`, in file order; [] where none can be read.

    Args:
      path: the file.
      most: how many bytes are read.
    """
    try:
        with files.open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            lines = file.read(most).splitlines()
    except (OSError, files.NotRegularError):
        return []
    return list(filter(None, map(_parsed, lines)))


def _parsed(line: bytes) -> Record | None:
    try:
        record = files.parse_json(line.decode())
        return record if type(record["step"]) is int and isinstance(record["split"], str) else None
    except (ValueError, KeyError, TypeError):
        return None
