"""Damaged records, left out up to a number of them in all of a run."""

import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from looplib import files
from looplib.errors import UsageError, told, whole_number
from looplib.records.indexed import BadRecordError
from looplib.records.sources import Chain, Source, items

_NOTE = ".txt"


class LeftOut:
    """The damaged records that a run has left out, counted over its data sets, workers and restarts.

    Each is a small file in a folder that the processes of the run share, named after the record, so that none counts
    twice and no process waits for another.

    Args:
      most: how many there may be.
      folder: the folder, made when there is a record to note; None counts those of this process alone.

    Attributes:
      most: how many there may be.

    Raises:
      UsageError: if `most` is not a whole number of at least 0.
    """

    def __init__(self, most: int, folder: str | None = None) -> None:
        self.most, self._folder = whole_number("bad_records", most, least=0), folder
        self._names: set[str] = set()
        self._lock = threading.Lock()

    def add(self, error: BadRecordError) -> None:
        """Counts a damaged record, unless it was counted before.

        Raises:
          UsageError: if there are more now than may be. The record is not counted then, so that a restart that allows
            more continues from those that were left out.
        """
        with self._lock:
            is_new = error.name not in self._names
            if is_new:
                self._names |= self._noted()
            if (count := len(self._names | {error.name})) > self.most:
                raise self._too_many(error, count)
            self._names.add(error.name)
            if is_new and self._folder is not None:
                self._share(self._folder, error)
        if is_new:
            logging.warning("left out a damaged record, %d of at most %d: %s", count, self.most, error.what)

    def _too_many(self, error: BadRecordError, count: int) -> UsageError:
        left = " (bad_records in the run directory lists those left out)" if self._folder else ""
        return UsageError(
            f"{count} records are damaged, and --bad_records allows {self.most} in a run{left}: {error.what}; restore "
            f"the file from a copy, or run again with --bad_records=skip:{count} or more, and delete nothing"
        )

    def _noted(self) -> set[str]:
        """Returns the names of the records that all processes of the run have left out."""
        try:
            found = tf.io.gfile.listdir(self._folder) if self._folder and tf.io.gfile.isdir(self._folder) else []
        except (OSError, tf.errors.OpError):  # what is noted next says so
            found = []
        return {name.removesuffix(_NOTE) for name in found if name.endswith(_NOTE)}

    def _share(self, folder: str, error: BadRecordError) -> None:
        note = f"{folder}/{error.name}{_NOTE}"
        try:
            tf.io.gfile.makedirs(folder)
            files.write_whole(note, f"{error}\n")
            self._names |= self._noted()
            count = len(self._names)
            if count > self.most:  # another process noted one at the same time
                tf.io.gfile.remove(note)
        except (OSError, tf.errors.OpError) as problem:
            self._folder = None
            logging.warning(
                "damaged records cannot be noted in %s, so this process counts its own alone: %s", folder, told(problem)
            )
            return
        if count > self.most:
            self._names.discard(error.name)
            raise self._too_many(error, count)


def tolerant(source: Source, left_out: LeftOut, replace: bool) -> Source:
    """Returns a source without its damaged records; for the arguments see `Tolerant`.

    Of several sources, each has its own records in place of damaged ones.
    """
    if isinstance(source, Chain):
        return Chain([Tolerant(part, left_out, replace) for part in source.sources], source.names)
    return Tolerant(source, left_out, replace)


class Tolerant:
    """A source whose damaged records are left out.

    Which records these are depends on the files alone, so that a resumed run leaves out the same ones.

    Args:
      source: the records.
      left_out: those of the run so far, and how many there may be.
      replace: whether the next good record, by number, comes in place of each, so that batches stay full; else None.
    """

    def __init__(self, source: Source, left_out: LeftOut, replace: bool) -> None:
        self._source, self._left_out, self._replace = source, left_out, replace

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Returns records by number."""
        try:
            return items(self._source, numbers)
        except BadRecordError:
            return [self.given(int(number))[1] for number in numbers]

    def given(self, number: int) -> tuple[int, Any]:
        """Returns what comes for a number: a number, which is another one in place of a damaged record, and the record.

        Raises:
          UsageError: if more records are damaged than may be.
        """
        for candidate in range(number, number + len(self)):
            try:
                return candidate % len(self), items(self._source, [candidate % len(self)])[0]
            except BadRecordError as error:
                self._left_out.add(error)
                if not self._replace:
                    return number, None
        raise UsageError(f"each of {len(self)} records is damaged; restore the files from a copy")
