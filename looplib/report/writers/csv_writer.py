"""CsvWriter: the metrics of a run as tables."""

import contextlib
import csv
import io
import os
import re
from collections.abc import Callable, Iterable, Mapping

import tensorflow as tf

from looplib.base import files, folders
from looplib.errors import FileError
from looplib.report.writers.contract import Writer
from looplib.run.records import cut_short

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
