"""A file of records, one JSON object a line, each of which stands once."""

import contextlib
import json
import os
from collections.abc import Callable, Hashable

import tensorflow as tf
from absl import logging

from looplib import files
from looplib.report.records import Record, cut_short, each_record


class RecordFile:
    """Records of which each key stands once: one that is written again with other values replaces the first one.

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
            size = tf.io.gfile.stat(self._path).length if tf.io.gfile.exists(self._path) else 0
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
