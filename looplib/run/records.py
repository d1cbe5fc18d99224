"""The records of `metrics.jsonl` and its kin: one JSON object a line, with its step, its split and its values."""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, BinaryIO

from absl import logging

from looplib.base import files
from looplib.base.decoding import number, parse_json, whole
from looplib.errors import FileError

MOST_BYTES = 1 << 29  # that are held at once; a million steps with ten metrics have 300 MB
_LONGEST_LINE, _PART = 1 << 22, 1 << 20  # bytes
_LARGEST_STEP = 2**63 - 1
_MOST_WARNINGS = 10
_MOST_NEW = 1 << 22  # bytes of records for one look
_MOST_TAIL = 256  # bytes before the end of what was read, by which a file is known again


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """A line.

    Attributes:
      step: the global step.
      split: "train", or the name of an evaluator.
      values: what else it has: of `metrics.jsonl` a number for each metric, or None for one that is not finite. It is
        as the file has it, so anything may be there; see `numbers`.
    """

    step: int
    split: str
    values: dict[str, Any]

    @property
    def key(self) -> tuple[int, str]:
        """The (step, split), which is unique in `metrics.jsonl`."""
        return self.step, self.split

    @property
    def shown_step(self) -> int | None:
        """The step, if a browser can represent it."""
        return whole(self.step)

    @property
    def numbers(self) -> dict[str, float | None]:
        """The metrics: finite numbers, and None for those that are not finite."""
        return {  # this is the inner loop of a page
            name: (value if value - value == 0 else None) if type(value) is float else number(value)
            for name, value in self.values.items()
            if value is None or type(value) in (float, int)
        }

    @property
    def line(self) -> str:
        """The record as its file has it."""
        return json.dumps({"step": self.step, "split": self.split, **self.values}) + "\n"


def read_jsonl(path: str) -> list[dict[str, Any]]:
    """Reads a `metrics.jsonl`; returns its records, [] where there is no file. A line cut short by a crash is left out.

    Args:
      path: the file.

    Returns:
      list of dicts in file order.

    Raises:
      UsageError: if the file is too large to be held.
    """
    return [{"step": one.step, "split": one.split, **one.values} for one in RecordLog(path).all()]


class RecordLog:
    """The records of a file, which is opened anew for each look, follows no link, and need not exist.

    Args:
      path: the file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._at, self._tail = 0, b""  # how far `follow` has read, and the bytes before
        self._file = (0, 0, 0)
        self._old = 0  # the size of the file when it was found replaced
        self._steps: dict[str, int] = {}  # the last known step of each split
        self._known = -1  # the same of the others

    def __iter__(self) -> Iterator[Record]:
        """Yields the records, without holding all of them; says which lines are none. Raises `OSError`."""
        if not os.path.exists(self.path):
            return
        try:
            file = files.open_regular(self.path)
        except files.NotRegularError as error:
            logging.warning("%s", error)
            return
        with file:
            bad = 0
            for place, line in enumerate(_lines(file), 1):
                if record := _parsed(line):
                    yield record
                elif line.strip():
                    bad += 1
                    if bad <= _MOST_WARNINGS:
                        logging.warning("%s: line %d is not a record and is left out: %r", self.path, place, line[:80])
            if bad > _MOST_WARNINGS:
                logging.warning("%s: %d lines are not records and are left out", self.path, bad)

    @property
    def is_too_large(self) -> bool:
        """Whether it has more bytes than any run writes, so that it is not to be held."""
        return os.path.exists(self.path) and os.path.getsize(self.path) > MOST_BYTES

    def all(self) -> list[Record]:
        """Returns the records in file order; raises `UsageError` if the file is too large to be held."""
        if self.is_too_large:
            raise FileError(f"{self.path} has more than {MOST_BYTES:,} bytes, which no run writes; move it away")
        return [
            Record(one.step, one.split, {sys.intern(name): one.values[name] for name in one.values}) for one in self
        ]

    def by_key(self) -> dict[tuple[int, str], dict[str, float | None]]:
        """Returns the `Record.numbers` by `Record.key`; raises as `all`."""
        return {one.key: one.numbers for one in self.all()}

    def tail(self, most: int = 1 << 16) -> list[Record]:
        """Returns the records in the last bytes, at most so many, in file order; [] where none can be read."""
        try:
            with files.open_regular(self.path) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - most))
                return _records(file.read(most))
        except (OSError, files.NotRegularError):
            return []

    def curve(self, metric: str) -> dict[int, float | None]:
        """Returns the values of a metric such as "eval/loss" by step, None for one that is not finite.

        It raises `OSError`.
        """
        split, _, name = metric.partition("/")
        return {
            one.step: number(one.values[name])
            for one in self
            if one.split == split and name in one.values and one.shown_step is not None
        }

    # Reading on from the end of the last look.

    def know(self, step: int | None) -> None:
        """Notes before the first `follow` that the records up to a step are known."""
        self._known = -1 if step is None else step

    def go_back(self, step: int) -> None:
        """Notes that the run has gone back to a step: records of later ones are new when they come again."""
        self._steps = {split: min(step, last) for split, last in self._steps.items()}
        self._known = min(step, self._known)

    def skip(self) -> None:
        """Reads all records that there are."""
        before = -1
        while before != self._at:
            before = self._at
            self.follow()

    def follow(self) -> list[Record]:
        """Returns the records of the next whole lines since the last call, of at most 4 MiB.

        Of a file that a start or a rollback has replaced, these are those after the last known step of their split, at
        most the step that the run has gone back to.
        """
        try:
            with files.open_regular(self.path) as file:
                found = os.fstat(file.fileno())
                if self._is_replaced(file, found):
                    self._at, self._tail, self._old = 0, b"", found.st_size
                file.seek(self._at)
                text = file.read(min(_MOST_NEW, found.st_size - self._at))
        except (OSError, files.NotRegularError):
            return []
        is_old, self._file = self._at < self._old, (found.st_dev, found.st_ino, found.st_mtime_ns)
        text = text[: text.rfind(b"\n") + 1 or (len(text) if len(text) == _MOST_NEW else 0)]
        self._at, self._tail = self._at + len(text), (self._tail + text)[-_MOST_TAIL:]
        new = []
        for record in _records(text):
            last = self._steps.get(record.split, self._known)
            if record.step > last or not is_old:
                self._steps[record.split] = max(record.step, last)
                new.append(record)
        return new

    def _is_replaced(self, file: BinaryIO, found: os.stat_result) -> bool:
        """Returns whether it is another file, which may have the number of one that was removed."""
        if (found.st_dev, found.st_ino) != self._file[:2] or found.st_size < self._at:
            return True
        if found.st_size == self._at and found.st_mtime_ns != self._file[2]:
            return True
        file.seek(self._at - len(self._tail))
        return file.read(len(self._tail)) != self._tail


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines of a file; of one that is longer than any record the beginning, which is no record."""
    begun, is_cut = b"", False
    while part := file.read(_PART):
        *lines, begun = (begun + part).split(b"\n")
        for line in lines:
            yield line[:_LONGEST_LINE] if is_cut else line
            is_cut = False
        if len(begun) > _LONGEST_LINE:
            begun, is_cut = begun[:_LONGEST_LINE], True
    yield begun


def _records(text: bytes) -> list[Record]:
    return list(filter(None, map(_parsed, text.splitlines())))


def _parsed(line: bytes) -> Record | None:
    """Returns the record of a line; None if it holds none."""
    try:
        found = parse_json(line)
        step, split = found.pop("step"), found.pop("split")
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    if type(step) is not int or abs(step) > _LARGEST_STEP or not isinstance(split, str):
        return None
    return Record(step, split, found)


def cut_short(path: str) -> bool:
    """Returns whether a crash left the last line without its end, so that the next one would be lost with it."""
    if not (os.path.exists(path) and (size := os.path.getsize(path))):
        return False
    with files.open_regular(path) as file:
        file.seek(size - 1)
        return file.read(1) not in (b"", b"\n")


def aside_of(path: str) -> str:
    """Returns the path of the file that keeps the void records of a file."""
    return ".voided".join(os.path.splitext(path))


class RecordWriter:
    """Appends records with unique keys: one that is written again with other values replaces the first one.

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
        if any(one.step > reported.get(one.split, step) for one in self._records()):  # another job's, too
            self._keep(lambda record: record.step <= reported.get(record.split, step))

    def write(self, record: Record) -> None:
        """Appends one line."""
        while not self._append(record):
            if record in self._records():
                return
            self._keep(lambda other: self._key(other) != self._key(record))

    def _records(self) -> Iterable[Record]:
        return RecordLog(self._path)

    def _append(self, record: Record) -> bool:
        """Appends a record; returns False if its key is taken, or a crash or a full disk has cut the file short."""
        line = record.line.encode()
        with files.appending(self._path) as file:  # alone, so that no other job writes this record at the same time
            size = os.path.getsize(self._path) if os.path.exists(self._path) else 0
            if size != self._size:
                self._written = set(map(self._key, self._records()))
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
            for record in self._records():
                lines[condition(record)].append(record.line)
            if void := lines[False]:
                aside = aside_of(self._path)
                known = {one.line for one in RecordLog(aside)}
                with files.appending(aside) as file:
                    file.write("".join(line for line in void if line not in known).encode())
                files.make_durable(aside)
                logging.info("%d records of %s are void and are kept in %s", len(void), self._path, aside)
            files.write_whole(self._path, "".join(lines[True]))
        self._size = -1
