"""Files of records read by record number, through an index of where each starts."""

import abc
import hashlib
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from looplib.base.files import safe_name
from looplib.base.messages import gist
from looplib.data.records.files import Files
from looplib.data.records.index import Layout, refuse_misfit
from looplib.errors import RecordsError

MOST_BYTES = (1 << 31) - (1 << 12)  # of a record, or a row group: what a system call reads at most


class BadRecordError(RecordsError):
    """A record is damaged.

    Args:
      what: which record, and what shows it.
      files: what to restore.
      name: see below.

    Attributes:
      what: which record, and what shows it.
      name: names the record, wherever its file is mounted, and can name a file.
    """

    def __init__(self, what: str, files: str, name: str) -> None:
        super().__init__(
            f"{what}; restore {files} from a copy, or leave out a few such records by --bad_records=skip:N"
        )
        self.what, self.name = what, name


def ends_process(error: Exception) -> bool:
    """Returns whether a library could not read because the process ends; reading ahead may notice that first."""
    return "cannot schedule new futures" in str(error)


def bad_record(files: Files, index: int, row: int, why: str, at: int | None = None) -> BadRecordError:
    """Returns the error of a damaged record.

    Args:
      files: the files.
      index: of the file.
      row: the number of the record in it.
      why: what shows it.
      at: the first byte of the record; None where the file's library knows it alone.
    """
    path = files.paths[index]
    name = os.path.basename(path)
    digest = hashlib.sha256(f"{name}/{files.sizes[index]}/{row}".encode()).hexdigest()[:12]
    return BadRecordError(
        f"record {row} of {path}{'' if at is None else f', at byte {at},'} is damaged: {why}",
        "the file",
        f"{safe_name(name)}-{row}-{digest}",
    )


class Numbered(abc.ABC):
    """Records of files, numbered through from file to file.

    Args:
      files: the files.
      counts: how many records each file, or part of one, has.

    Attributes:
      files: the files.
    """

    def __init__(self, files: Files, counts: Sequence[int]) -> None:
        self.files = files
        self._firsts = np.concatenate([[0], np.cumsum(counts)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    @abc.abstractmethod
    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Returns records by number."""

    @abc.abstractmethod
    def named(self, number: int) -> str:
        """Returns what an error calls a record: its number in its file, the file, and the byte where it is known."""


class ReadElsewhere(Numbered):
    """Records of files that another library reads.

    Args:
      source: the records.
      files: the files.
      counts: how many records of each there are.
      skipped: how many records of each come before these; default none.
    """

    def __init__(self, source: Any, files: Files, counts: Sequence[int], skipped: Sequence[int] | None = None) -> None:
        super().__init__(files, counts)
        self._source, self._skipped = source, np.asarray(skipped or [0] * len(counts), np.int64)

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Returns records by number.

        Raises:
          BadRecordError: for one that cannot be read; names file and record.
          UsageError: if a file was changed; names file and record.
        """
        numbers = np.asarray(numbers, np.int64)
        self._check(numbers)
        try:
            found = list(self._source.__getitems__(numbers.tolist()))  # TFDS's sources take no array
        except Exception as error:  # the libraries' have many types
            if ends_process(error) or isinstance(error, MemoryError):
                raise
            self._check(numbers, at_once=True)
            if len(numbers) > 1:
                return [self[number] for number in numbers.tolist()]
            ((index, row),) = self._firsts_of(numbers)
            raise bad_record(self.files, index, row, gist(error)) from error
        if empty := [number for number, record in zip(numbers, found) if isinstance(record, bytes) and not record]:
            self._check(np.asarray(empty), at_once=True)  # given beyond the end of a file that was truncated
        return found

    def named(self, number: int) -> str:
        """See `Numbered`."""
        ((index, row),) = self._firsts_of(np.asarray([number]))
        return f"record {row} of {self.files.paths[index]}"

    def _firsts_of(self, numbers: np.ndarray) -> list[tuple[int, int]]:
        """Returns the files of records, and the number in its file of the first one of each."""
        files, places = np.unique(np.searchsorted(self._firsts, numbers, side="right") - 1, return_index=True)
        rows = numbers[places] - self._firsts[files] + self._skipped[files]
        return list(zip(files.tolist(), rows.tolist()))

    def _check(self, numbers: np.ndarray, at_once: bool = False) -> None:
        """Refuses files of records that were changed."""
        for index, row in self._firsts_of(numbers):
            self.files.check(index, lambda row=row: f"record {row}", at_once)


class IndexedFiles(Numbered):
    """The records of files, each of which is a range of bytes. Subclasses take the data out of the bytes.

    Args:
      files: the files.
      offsets: for each file, int64 `[records + 1]`: where each record starts, and where the last one ends.
      layout: the layout that gave the offsets; None if they follow from the sizes.

    Attributes:
      mean_bytes: the average size of a record.

    Raises:
      UsageError: if a record is larger than a tensor can hold.
    """

    _damage = "its checksum does not match its data"

    def __init__(self, files: Files, offsets: Sequence[np.ndarray], layout: Layout | None = None) -> None:
        self._offsets, self._sizes, self._layout = offsets, np.asarray(files.sizes), layout
        for path, ends in zip(files.paths, offsets):
            if ends[-1] > MOST_BYTES and (lengths := np.diff(ends)).max() > MOST_BYTES:
                row = int(np.argmax(lengths))
                raise RecordsError(
                    f"record {row} of {path}, at byte {ends[row]}, has {lengths[row]:,} bytes; expected at most "
                    f"{MOST_BYTES:,}; check that the file is of this format"
                )
        self._taking = threading.Lock()  # threads that run Python at the same time slow each other down
        super().__init__(files, [len(ends) - 1 for ends in offsets])
        self.mean_bytes = sum(files.sizes) / max(1, len(self))

    def __getitems__(self, numbers: Sequence[int]) -> list[bytes]:
        """Returns records by number, neighbours by one read.

        Raises:
          BadRecordError: for a damaged one; names file, record and offset.
          UsageError: if a file was changed, cannot be read, or has its records elsewhere than the index says.
        """
        numbers = np.asarray(numbers, np.int64)
        file = np.searchsorted(self._firsts, numbers, side="right") - 1
        starts, stops = self._bounds(numbers, file)
        joined = (file[1:] == file[:-1]) & (starts[1:] == stops[:-1])
        heads = np.concatenate([[0], np.flatnonzero(~joined) + 1])
        tails = np.concatenate([heads[1:], [len(numbers)]]) - 1
        raw = self.files.read_at(zip(file[heads].tolist(), starts[heads].tolist(), stops[tails].tolist()), self._named)
        ends = np.cumsum(stops - starts)
        with self._taking:
            records, bad = self._take(raw, np.concatenate([[0], ends[:-1]]), ends, stops == self._sizes[file])
        if bad is not None:
            index = int(file[bad])
            row = int(numbers[bad] - self._firsts[index])
            at = int(self._offsets[index][row])
            self.files.check(index, lambda: self._named(index, at), at_once=True)
            if self._layout is not None:
                refuse_misfit(self.files, index, self._layout, self._offsets[index], row)
            raise bad_record(self.files, index, row, self._damage, at)
        return records

    def named(self, number: int) -> str:
        """See `Numbered`."""
        index = int(np.searchsorted(self._firsts, number, side="right")) - 1
        row = number - int(self._firsts[index])
        return f"record {row} of {self.files.paths[index]}, at byte {self._offsets[index][row]}"

    def _named(self, index: int, byte: int) -> str:
        row = int(np.searchsorted(self._offsets[index], byte, side="right")) - 1
        return f"record {row} (byte {self._offsets[index][row]})"

    def _take(
        self, raw: bytes, starts: np.ndarray, stops: np.ndarray, last: np.ndarray
    ) -> tuple[list[bytes], int | None]:
        """Returns the data of records that follow one another, and the index of the first damaged one, or None.

        Args:
          raw: their bytes.
          starts: where each starts in them.
          stops: where each ends.
          last: bool, whether it is the last one of its file.
        """
        return [raw[start:stop] for start, stop in zip(starts.tolist(), stops.tolist())], None

    def _bounds(self, numbers: np.ndarray, file: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns where records start and stop in their files."""
        starts, stops = np.empty_like(numbers), np.empty_like(numbers)
        order = np.argsort(file, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(file[order])) + 1):
            index = file[rows[0]]
            within = numbers[rows] - self._firsts[index]
            starts[rows], stops[rows] = self._offsets[index][within], self._offsets[index][within + 1]
        return starts, stops
