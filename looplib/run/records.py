"""The records of `metrics.jsonl`: one JSON object a line, with its step, its split and its metrics."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Hashable, Iterator
from typing import Any, BinaryIO

from absl import logging

from looplib.base import files
from looplib.errors import FileError

Record = dict[str, Any]  # a line as JSON has it: "step", "split", and a number or None for each metric
_MOST_BYTES = 1 << 29  # that are held at once; a million steps with ten metrics have 300 MB
_LONGEST_LINE, _PART = 1 << 22, 1 << 20  # bytes
_LARGEST_STEP = 2**63 - 1
_MOST_WARNINGS = 10


def key(record: Record) -> tuple[int, str]:
    """Returns the (step, split) of a record, which is unique in a file."""
    return record["step"], record["split"]


def cut_short(path: str) -> bool:
    """Returns whether a crash left the last line without its end, so that the next one would be lost with it."""
    if not (os.path.exists(path) and (size := os.path.getsize(path))):
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

    Raises:
      UsageError: if the file is too large to be held.
    """
    if os.path.exists(path) and os.path.getsize(path) > _MOST_BYTES:
        raise FileError(f"{path} has more than {_MOST_BYTES:,} bytes, which no run writes; move it away")
    return [{sys.intern(name): value for name, value in record.items()} for record in each_record(path)]


def each_record(path: str) -> Iterator[Record]:
    """Yields the records of a `metrics.jsonl`, as `read_jsonl` returns them, without holding all of them.

    Args:
      path: the file.
    """
    if not os.path.exists(path):
        return
    try:
        file = files.open_regular(path)
    except files.NotRegularError as error:
        logging.warning("%s", error)
        return
    with file:
        bad = 0
        for number, line in enumerate(_lines(file), 1):
            if record := parse_line(line):
                yield record
            elif line.strip():
                bad += 1
                if bad <= _MOST_WARNINGS:
                    logging.warning("%s: line %d is not a record and is left out: %r", path, number, line[:80])
        if bad > _MOST_WARNINGS:
            logging.warning("%s: %d lines are not records and are left out", path, bad)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines of a file; one that is longer than any record in parts, which are not records."""
    begun = b""
    while part := file.read(_PART):
        *lines, begun = (begun + part).split(b"\n")
        yield from lines
        if len(begun) > _LONGEST_LINE:
            yield begun
            begun = b""
    yield begun


def parse_line(line: bytes) -> Record | None:
    """Returns the record of a line; None if it holds none."""
    try:
        record = files.parse_json(line)
        fits = type(record["step"]) is int and abs(record["step"]) <= _LARGEST_STEP and isinstance(record["split"], str)
        return record if fits else None
    except (ValueError, KeyError, TypeError):
        return None


class RecordFile:
    """Records with unique keys: a record that is written again with other values replaces the first one.

    The file is open only while a line is appended, so that a training and an evaluation job may share it. Records that
    are taken out are kept once in a file beside it, with ".voided" in its name.

    Args:
      path: the file, appended to if it exists.
      key: function of a record.
    """

    def __init__(self, path: str, key: Callable[[Record], Hashable]) -> None:
        self._path, self._key = path, key
        self._written: set[Hashable] = set()  # the keys of the records in the file, and its size when they were read
        self._size = -1
        if cut_short(path):
            self._keep(lambda record: True)

    def resume(self, step: int, reported: dict[str, int]) -> None:
        """Takes out the records that a training will make again; see `Writer.resume`."""
        if any(r["step"] > reported.get(r["split"], step) for r in each_record(self._path)):  # another job's, too
            self._keep(lambda record: record["step"] <= reported.get(record["split"], step))

    def write(self, record: Record) -> None:
        """Appends one line."""
        while not self._append(record):
            if record in each_record(self._path):
                return
            self._keep(lambda other: self._key(other) != self._key(record))

    def _append(self, record: Record) -> bool:
        """Appends a record; returns False if its key is taken, or a crash or a full disk has cut the file short."""
        line = _line(record).encode()
        with files.appending(self._path) as file:  # alone, so that no other job writes this record at the same time
            size = os.path.getsize(self._path) if os.path.exists(self._path) else 0
            if size != self._size:
                self._written = {self._key(other) for other in each_record(self._path)}
            if self._key(record) in self._written or cut_short(self._path):
                return False
            file.write(line)
        self._size = size + len(line)
        self._written.add(self._key(record))
        return True

    def sync(self) -> None:
        """Puts the file on the disk; see `Writer.sync`."""
        with contextlib.suppress(FileNotFoundError):  # nothing was reported yet
            files.make_durable(self._path)
            files.make_durable(os.path.dirname(self._path) or ".")

    def _keep(self, condition: Callable[[Record], bool]) -> None:
        """Takes the other records out of the file, into the one beside it."""
        with files.rewriting(self._path):
            lines: dict[bool, list[str]] = {True: [], False: []}
            for record in each_record(self._path):
                lines[condition(record)].append(_line(record))
            if void := lines[False]:
                aside = ".voided".join(os.path.splitext(self._path))
                known = set(map(_line, each_record(aside)))
                with files.appending(aside) as file:
                    file.write("".join(line for line in void if line not in known).encode())
                files.make_durable(aside)
                logging.info("%d records of %s are void and are kept in %s", len(void), self._path, aside)
            files.write_whole(self._path, "".join(lines[True]))
        self._size = -1


def _line(record: Record) -> str:
    return json.dumps(record) + "\n"
