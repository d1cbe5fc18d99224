"""Damaged records, left out up to a number of them in all of a run."""

import bisect
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base import files, folders
from looplib.base.messages import with_cure
from looplib.data.dataset_requests import BadRecords
from looplib.data.records.indexed import BadRecordError
from looplib.data.records.sources import Chain, Source, items
from looplib.errors import RecordsError, UsageError

_NOTE = re.compile(r"(.+-\d+(?:-[0-9a-f]{12})?)\.txt")  # after what `BadRecordError.name` says


def leave_out(bad: BadRecords, error: BadRecordError) -> None:
    """Counts a damaged record, unless it was counted before.

    Each is a small file in the folder that the processes of the run share, named after the record, so that none counts
    twice and no process waits for another.

    Raises:
      UsageError: if there are more now than may be. The record is not counted then, so that a restart that allows
        more continues from those that were left out.
    """
    with bad.lock:
        is_new = error.name not in bad.names
        if is_new:
            bad.names |= _noted(bad)
        if (count := len(bad.names | {error.name})) > bad.most:
            raise _too_many(bad, error, count)
        bad.names.add(error.name)
        if is_new and bad.folder is not None:
            _share(bad, bad.folder, error)
    if is_new:
        logging.warning("left out a damaged record, %d of at most %d: %s", count, bad.most, error.what)


def _too_many(bad: BadRecords, error: BadRecordError, count: int) -> UsageError:
    left = " (bad_records in the run directory lists those left out)" if bad.folder else ""
    return RecordsError(
        f"{count} records are damaged, and --bad_records allows {bad.most} in a run{left}: {error.what}; restore "
        f"the file from a copy, or run again with --bad_records=skip:{count} or more, and delete nothing"
    )


def _noted(bad: BadRecords) -> set[str]:
    """Returns the names of the records that all processes of the run have left out."""
    try:
        found = tf.io.gfile.listdir(bad.folder) if bad.folder and tf.io.gfile.isdir(bad.folder) else []
    except (OSError, tf.errors.OpError):  # what is noted next says so
        found = []
    return {match[1] for name in found if (match := _NOTE.fullmatch(name))}


def _share(bad: BadRecords, folder: str, error: BadRecordError) -> None:
    note = f"{error.name}.txt"
    try:
        folders.make_folder(*os.path.split(folder))
        files.write_whole(folders.inside(folder, note), f"{error}\n")
        bad.names |= _noted(bad)
        count = len(bad.names)
        if count > bad.most:  # another process noted one at the same time
            folders.remove(folder, note)
    except (OSError, tf.errors.OpError) as problem:
        bad.folder = None
        logging.warning(
            "damaged records cannot be noted in %s, so this process counts its own alone: %s",
            folder,
            with_cure(problem),
        )
        return
    if count > bad.most:
        bad.names.discard(error.name)
        raise _too_many(bad, error, count)


def tolerant(source: Source, bad: BadRecords, replace: bool, kept: Sequence[np.ndarray | None]) -> Source:
    """Returns a source without its damaged records; for the arguments see `SkipsDamaged`, `kept` is of each source.

    Of several sources, each has its own records in place of damaged ones.
    """
    if isinstance(source, Chain):
        parts = [SkipsDamaged(part, bad, replace, own) for part, own in zip(source.sources, kept)]
        return Chain(parts, source.names)
    return SkipsDamaged(source, bad, replace, kept[0])


def given(source: Source, number: int) -> int:
    """Returns the number of the record that comes for a number of what `tolerant` has returned."""
    if isinstance(source, Chain):
        part = bisect.bisect_right(source.firsts, number) - 1
        return source.firsts[part] + given(source.sources[part], number - source.firsts[part])
    return source.given(number)[0]


class SkipsDamaged:
    """A source whose damaged records are left out.

    Which records these are depends on the files alone, so that a resumed run leaves out the same ones.

    Args:
      source: the records.
      bad: those of the run so far, and how many there may be.
      replace: whether the next good record, by number, comes in place of each, so that batches stay full; else None.
      kept: the numbers of the records that may come, as a filter keeps others out; None for all.

    Raises:
      UsageError: if none of those that are kept is good, or more are damaged than may be.
    """

    def __init__(self, source: Source, bad: BadRecords, replace: bool, kept: np.ndarray | None = None) -> None:
        self._source, self._bad, self._replace = source, bad, True
        self._kept = None if kept is None else np.unique(kept)
        if self._kept is not None:
            self.given(int(self._kept[0]))  # one of these has to be good
        self._replace = replace

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
        kept = range(len(self)) if self._kept is None else self._kept
        place = bisect.bisect_left(kept, number)
        for at in range(place, place + len(kept)):
            candidate = int(kept[at % len(kept)])
            try:
                return candidate, items(self._source, [candidate])[0]
            except BadRecordError as error:
                leave_out(self._bad, error)
                if not self._replace:
                    return number, None
        raise RecordsError(f"each of {len(kept)} records is damaged; restore the files from a copy")
