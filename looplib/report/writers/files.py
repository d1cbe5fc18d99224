"""Writers of files in the run directory: `metrics.jsonl`, `media.jsonl` and tables."""

import contextlib
import csv
import hashlib
import io
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from looplib.base import files, folders
from looplib.base.messages import with_cure
from looplib.errors import FileError
from looplib.report.writers.contract import Histogram, Images, Shown, Writer
from looplib.run.directory import MEDIA
from looplib.run.records import Record, RecordWriter, cut_short


class JsonlWriter(Writer):
    """One JSON object a line: `{"step": 100, "split": "train", "loss": 0.25}`.

    Each (step, split) stands once, see `RecordWriter`. A number that is not finite is written as null, because JSON has
    no other word for it.

    Args:
      path: the file, appended to if it exists.
    """

    def __init__(self, path: str) -> None:
        self._file = RecordWriter(path, lambda record: record.key)

    def resume(self, step: int, reported: dict[str, int]) -> None:
        """Takes out the records that the run will make again."""
        self._file.resume(step, reported)

    def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Appends one line."""
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(Record(step, split, numbers))

    def sync(self) -> None:
        """See `Writer`."""
        self._file.sync()


_MOST_BYTES = 1 << 29  # of a table
_Row = Mapping[str, str | float]


class CsvWriter(Writer):
    """A table for each split, such as `csv/train.csv`, with a column for each metric and a row for each step.

    Each step stands once: a row that is written again replaces the first one. A metric that comes later adds a column.

    Args:
      directory: the run directory.
    """

    def __init__(self, directory: str) -> None:
        self._directory, self._folder = directory, os.path.join(directory, "csv")
        self._known: dict[str, tuple[list[str], set[str]]] = {}  # by path: the columns, and the steps of the rows

    def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Appends a row."""
        path, row = self._path(split), {"step": step, **metrics}
        if path not in self._known or not os.path.exists(path):  # or somebody has removed it
            folders.make_folder(self._directory, "csv")
            self._keep(path, lambda other: True)
        columns, steps = self._known[path]
        if str(step) in steps or not row.keys() <= set(columns):
            self._keep(path, lambda other: other["step"] != str(step), [row])
            return
        with files.appending(path) as file:
            file.write(_text([], columns, [row]).encode())
        steps.add(str(step))

    def resume(self, step: int, reported: dict[str, int]) -> None:
        """Takes out the rows that the run will make again."""
        last = {self._path(split): at for split, at in reported.items()}
        for name in tf.io.gfile.listdir(self._folder) if tf.io.gfile.isdir(self._folder) else []:
            path = os.path.join(self._folder, name)
            if name.endswith(".csv"):
                self._keep(path, lambda row, at=last.get(path, step): int(row["step"]) <= at)

    def sync(self) -> None:
        """See `Writer`."""
        for path in self._known:
            with contextlib.suppress(FileNotFoundError):
                files.make_durable(path)

    def _path(self, split: str) -> str:
        return os.path.join(self._folder, f"{split}.csv")

    def _keep(self, path: str, condition: Callable[[_Row], bool], more: Iterable[_Row] = ()) -> None:
        """Takes the other rows out of a table, and appends some."""
        rows = [*filter(condition, _read(path)), *more]
        columns = list(dict.fromkeys(["step", *(name for row in rows for name in row)]))
        if rows or tf.io.gfile.exists(path):
            files.write_whole(path, _text([columns], columns, rows))
        self._known[path] = columns, {str(row["step"]) for row in rows}


def _read(path: str) -> list[_Row]:
    """Returns the rows of a table, without a last one that a crash has cut short; [] if there is no table."""
    if not tf.io.gfile.exists(path):
        return []
    try:
        with files.open_regular(path) as file:
            text = file.read(_MOST_BYTES + 1).decode(errors="replace")
        rows = list(csv.DictReader(io.StringIO(text)))
    except (files.NotRegularError, csv.Error) as error:
        raise FileError(f"{path} is not a table of looplib's ({error}); move it away") from error
    if len(text) > _MOST_BYTES:
        raise FileError(f"{path} has more than {_MOST_BYTES:,} bytes; move it away")
    rows = rows[:-1] if cut_short(path) else rows
    rows = [{name: value for name, value in row.items() if name is not None and value is not None} for row in rows]
    return [row for row in rows if re.fullmatch("[0-9]{1,18}", row.get("step", ""))]


def _text(headers: list[list[str]], columns: list[str], rows: Iterable[_Row]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(headers)
    csv.DictWriter(buffer, columns, restval="", lineterminator="\n").writerows(rows)
    return buffer.getvalue()


FOLDER = "media"


class MediaWriter(Writer):
    """A JSON object a line in `media.jsonl`, and the images as PNG files in `media/`.

    A line has "step", "split", "name" and "kind", with "files" (names in `media/`) of an "image", "texts" of a "text",
    "edges" and "counts" of a "histogram". Each (step, split, name) stands once, see `RecordWriter`. A file's name has a
    checksum of its content, so that none is ever replaced by another image.

    Args:
      directory: the run directory.
    """

    def __init__(self, directory: str) -> None:
        self._directory, self._folder = directory, os.path.join(directory, FOLDER)
        path = os.path.join(directory, MEDIA)
        self._file = RecordWriter(path, lambda record: (*record.key, str(record.values.get("name"))))
        self._failed = False
        self._new: list[str] = []  # paths of images that may not be on the disk yet

    def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Does nothing: metrics are in other files."""

    def show(self, step: int, split: str, shown: Mapping[str, Shown]) -> None:
        """Appends one line for each name, and writes the images; what cannot be written is a warning, once."""
        for name, each in shown.items():
            try:
                self._file.write(Record(step, split, {"name": name, **self._fields(step, split, name, each)}))
            except (OSError, ValueError, tf.errors.OpError) as error:
                if not self._failed:
                    logging.warning("media cannot be written to %s: %s", self._folder, with_cure(error))
                self._failed = True

    def resume(self, step: int, reported: dict[str, int]) -> None:
        """Takes out the lines that the run will make again; their images stay."""
        self._file.resume(step, reported)

    def sync(self) -> None:
        """See `Writer`."""
        new, self._new = self._new, []
        for path in [*new, *([self._folder] if new else [])]:
            with contextlib.suppress(FileNotFoundError):  # somebody has tidied up
                files.make_durable(path)
        self._file.sync()

    def _fields(self, step: int, split: str, name: str, shown: Shown) -> dict[str, Any]:
        if isinstance(shown, Images):
            begin = f"{files.safe_name(split)}.{files.safe_name(name)}.{step:08}"
            folders.make_folder(self._directory, FOLDER)
            return {"kind": "image", "files": [self._write(begin, i, png) for i, png in enumerate(shown.files)]}
        if isinstance(shown, Histogram):
            return {"kind": "histogram", "edges": list(shown.edges), "counts": list(shown.counts)}
        return {"kind": "text", "texts": list(shown.texts)}

    def _write(self, begin: str, number: int, png: bytes) -> str:
        """Writes an image; returns the name of its file."""
        name = f"{begin}.{number}.{hashlib.sha256(png).hexdigest()[:8]}.png"
        path = os.path.join(self._folder, name)
        files.write_whole(path, png, durable=False)
        self._new.append(path)
        return name
