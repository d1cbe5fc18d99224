"""Formats of records: TFRecord, lines of text, records of fixed length, ArrayRecord, Parquet."""

import functools
import struct
import threading
from collections.abc import Sequence
from typing import Any

import google_crc32c
import numpy as np

from looplib.base.files import is_remote
from looplib.base.messages import gist, join_names, whole_number
from looplib.data.records.files import Files, in_threads, refuse_compressed
from looplib.data.records.index import MOST_BYTES, IndexedFiles, Layout, Numbered, ReadElsewhere, find_offsets
from looplib.errors import PluginError, RecordsError, UsageError

_WINDOW = 1 << 22  # bytes that are read at once to find the records
_END = 10  # a byte, of a line
_MOST_ROWS = 1 << 24  # of a row group
_GROUPS = 80  # of Parquet files that are kept: for a batch, and the next ones
# A record of a TFRecord file: its length (8 bytes), a checksum of that (4), the data, a checksum of the data (4).
_BEFORE, _AFTER = 12, 4
_LARGE, _LARGE_STORED = 1 << 18, 1 << 22  # bytes of a large record: in a file, and in a store, whose answers take long
_LENGTH = struct.Struct("<Q")
_MASK = 0xA282EAD8  # that TensorFlow adds to rotated checksums


class TFRecords(IndexedFiles):
    """The records of TFRecord files.

    Args:
      paths: the files.

    Raises:
      UsageError: if a file is compressed, truncated, or no TFRecord file.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        files = Files(paths)
        layout = Layout("tfrecord", _BEFORE + _AFTER, _scan_tfrecords, _fits_tfrecords)
        super().__init__(files, find_offsets(files, layout), layout)

    def _take(self, raw: bytes, starts: np.ndarray, stops: np.ndarray, _: np.ndarray) -> tuple[list[bytes], int | None]:
        """See `IndexedFiles`."""
        words = np.frombuffer(raw, np.uint8)
        found = [raw[start:stop] for start, stop in zip((starts + _BEFORE).tolist(), (stops - _AFTER).tolist())]
        sums = np.fromiter(map(google_crc32c.value, found), np.uint32, len(found))
        lengths = words[starts[:, None] + np.arange(8)].view("<u8")[:, 0]
        stored = words[stops[:, None] - _AFTER + np.arange(_AFTER)].view("<u4")[:, 0]
        wrong = (_masked(sums) != stored) | (lengths != (stops - starts - _BEFORE - _AFTER).astype(np.uint64))
        return found, int(np.argmax(wrong)) if wrong.any() else None


def _masked(sums: np.ndarray) -> np.ndarray:
    """Returns checksums uint32 `[n]` as TFRecord files have them."""
    return ((sums >> 15) | (sums << 17)) + np.uint32(_MASK)


def _scan_tfrecords(files: Files, index: int) -> np.ndarray:
    """Finds the records of a file by the lengths in front of them.

    Args:
      files: the files.
      index: of the file.

    Returns:
      int64 `[records + 1]`, where each starts, and the size of the file.

    Raises:
      UsageError: if the file is compressed, truncated, or a length is damaged.
    """
    size, path = files.sizes[index], files.paths[index]
    starts: list[int] = []
    at = 0
    unpack = _LENGTH.unpack_from
    window = _WINDOW
    while at < size:
        raw = files.read_at([(index, at, min(at + window, size))])
        place, last, before = 0, len(raw) - _BEFORE, len(starts)
        while place <= last:
            starts.append(at + place)
            place += unpack(raw, place)[0] + _BEFORE + _AFTER
        if len(starts) == before:
            raise _truncated(path, len(starts), at, size)
        here = np.asarray(starts[before:]) - at
        _check_lengths(path, np.frombuffer(raw, np.uint8)[here[:, None] + np.arange(_BEFORE)], starts, before)
        # Large records are passed over, and only the pages of their lengths are read.
        large = _LARGE_STORED if files.is_stored else _LARGE
        window = _BEFORE if place > large * (len(starts) - before) else _WINDOW
        at += place
    if at > size:
        raise _truncated(path, len(starts) - 1, starts[-1], size)
    return np.asarray([*starts, size], np.int64)


def _fits_tfrecords(files: Files, index: int, starts: np.ndarray, stops: np.ndarray) -> bool:
    """See `Layout`."""
    raw = files.read_at([(index, start, start + _BEFORE) for start in starts.tolist()])
    heads = np.frombuffer(raw, np.uint8).reshape(-1, _BEFORE)
    lengths = heads[:, :8].copy().view("<u8")[:, 0]
    wrong = _wrong_lengths(heads) | (lengths != (stops - starts - _BEFORE - _AFTER).astype(np.uint64))
    return not wrong.any()


def _wrong_lengths(heads: np.ndarray) -> np.ndarray:
    """Returns bool `[n]`, whether lengths differ from their checksums: uint8 `[n, 12]`."""
    different, at = np.unique(heads[:, :8].copy().view("<u8"), return_inverse=True)
    sums = np.asarray([google_crc32c.value(length.tobytes()) for length in different], np.uint32)
    return _masked(sums)[at.ravel()] != heads[:, 8:].copy().view("<u4")[:, 0]


def _check_lengths(path: str, heads: np.ndarray, starts: list[int], before: int) -> None:
    """Refuses lengths whose checksums do not match: uint8 `[n, 12]`, of the records from `before` on."""
    wrong = _wrong_lengths(heads)
    if not wrong.any():
        return
    number = before + int(np.argmax(wrong))
    if number == 0:
        refuse_compressed(path, heads[0].tobytes())
    raise RecordsError(
        f"record {number} of {path}, at byte {starts[number]}, has a damaged length, so that the records after it "
        "cannot be found; expected a TFRecord file; restore it from a copy"
    )


def _truncated(path: str, number: int, at: int, size: int) -> UsageError:
    return RecordsError(
        f"{path} ends at byte {size} in the middle of record {number}, which starts at byte {at}; it was truncated, or "
        "is still being written; restore it from a copy, or wait"
    )


class Lines(IndexedFiles):
    """The lines of text files, without their ends; an empty line is a record too.

    Args:
      paths: the files.
    """

    _damage = "it is not one line"

    def __init__(self, paths: Sequence[str]) -> None:
        files = Files(paths)
        layout = Layout("lines", 1, _scan_lines, _fits_lines)
        super().__init__(files, find_offsets(files, layout), layout)

    def _take(
        self, raw: bytes, starts: np.ndarray, stops: np.ndarray, last: np.ndarray
    ) -> tuple[list[bytes], int | None]:
        """See `IndexedFiles`."""
        lines, _ = super()._take(raw, starts, stops, last)
        ended = np.frombuffer(raw, np.uint8)[stops - 1] == _END
        wrong = ~(ended | last)
        if raw.count(b"\n") != np.count_nonzero(ended):
            wrong |= np.asarray([b"\n" in line[:-1] for line in lines])
        lines = [line.removesuffix(b"\n").removesuffix(b"\r") for line in lines]
        return lines, int(np.argmax(wrong)) if wrong.any() else None


def _scan_lines(files: Files, index: int) -> np.ndarray:
    size, found = files.sizes[index], [np.zeros(1, np.int64)]
    for at in range(0, size, _WINDOW):
        raw = files.read_at([(index, at, min(at + _WINDOW, size))])
        if at == 0:
            refuse_compressed(files.paths[index], raw)
        found.append(np.flatnonzero(np.frombuffer(raw, np.uint8) == _END) + (at + 1))
    offsets = np.concatenate(found)
    return offsets if offsets[-1] == size else np.append(offsets, size)  # the last line may have no end


def _fits_lines(files: Files, index: int, starts: np.ndarray, stops: np.ndarray) -> bool:
    """See `Layout`; only the first bytes of a long line are looked at."""
    size = files.sizes[index]
    for start, stop in zip(starts.tolist(), stops.tolist()):
        raw = files.read_at([(index, max(0, start - 1), min(stop, start + _WINDOW))])
        raw = raw if start else b"\n" + raw
        is_open = stop == size or stop > start + _WINDOW
        if raw[:1] != b"\n" or b"\n" in raw[1:-1] or not (is_open or raw.endswith(b"\n")):
            return False
    return True


class FixedLength(IndexedFiles):
    """The records of files whose records all have one length.

    Args:
      paths: the files.
      record_bytes: bytes of a record.
      header_bytes: bytes in front of the first one of each file.

    Raises:
      UsageError: if a file ends in the middle of a record.
    """

    def __init__(self, paths: Sequence[str], record_bytes: int, header_bytes: int = 0) -> None:
        record_bytes = whole_number("record_bytes", record_bytes)
        header_bytes = whole_number("header_bytes", header_bytes, least=0)
        files = Files(paths)
        for path, size in zip(files.paths, files.sizes):
            if size < header_bytes or (size - header_bytes) % record_bytes:
                raise RecordsError(
                    f"{path} has {size} bytes, which is not {header_bytes} and a multiple of {record_bytes}; it was "
                    "truncated, or its records have another length"
                )
        super().__init__(
            files, [np.arange(header_bytes, size + 1, record_bytes, dtype=np.int64) for size in files.sizes]
        )


class Parquet(Numbered):
    """The rows of Parquet files, each a dict from column to value.

    Row groups are read as a whole, and are the blocks of the data; write them with about a megabyte each.

    Args:
      paths: the files.
      columns: the columns to read; None reads all.

    Attributes:
      mean_bytes: the average size of a row.
      block: rows of a row group.

    Raises:
      UsageError: if a file lacks a column.
    """

    def __init__(self, paths: Sequence[str], columns: Sequence[str] | None = None) -> None:
        parquet = _imported("pyarrow.parquet", "pyarrow")
        files = Files(paths)
        self._opened = [
            parquet.ParquetFile(files.opened(index), page_checksum_verification=True, pre_buffer=is_remote(path))
            for index, path in enumerate(paths)
        ]
        self._columns = list(columns) if columns is not None else None
        for path, file in zip(paths, self._opened):
            if lacking := set(self._columns or []) - set(names := file.schema_arrow.names):
                raise RecordsError(f"{path} has no column {join_names(sorted(lacking))}; it has {join_names(names)}")
        self._groups = [
            (i, group) for i, file in enumerate(self._opened) for group in range(file.metadata.num_row_groups)
        ]
        groups = [self._opened[index].metadata.row_group(group) for index, group in self._groups]
        for (index, number), group in zip(self._groups, groups):
            if not 0 <= group.num_rows <= _MOST_ROWS or not 0 <= group.total_byte_size <= MOST_BYTES:
                raise RecordsError(
                    f"row group {number} of {paths[index]} has {group.num_rows:,} rows and {group.total_byte_size:,} "
                    f"bytes; expected at most {_MOST_ROWS:,} and {MOST_BYTES:,}, as groups are read as a whole; write "
                    "it with about a megabyte each (row_group_size)"
                )
        super().__init__(files, [group.num_rows for group in groups])
        self.mean_bytes = sum(group.total_byte_size for group in groups) / max(1, len(self))
        self.block = max(1, *(group.num_rows for group in groups)) if groups else 1
        self._lock = threading.Lock()
        self._rows = functools.lru_cache(_GROUPS)(self._read)

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Returns rows by number.

        Raises:
          UsageError: if a file was changed, or rows are damaged; names file and rows.
        """
        numbers = np.asarray(numbers, np.int64)
        groups = np.searchsorted(self._firsts, numbers, side="right") - 1
        for group in np.unique(groups).tolist():
            self.files.check(self._groups[group][0], lambda group=group: self._named(group))
        return [
            self._rows(group)[row] for group, row in zip(groups.tolist(), (numbers - self._firsts[groups]).tolist())
        ]

    def named(self, number: int) -> str:
        """See `Numbered`."""
        group = int(np.searchsorted(self._firsts, number, side="right")) - 1
        row = number - int(self._firsts[group]) + self._first_of(group)
        return f"row {row} of {self.files.paths[self._groups[group][0]]}, in {self._named(group)}"

    def _first_of(self, index: int) -> int:
        """Returns the number in its file of the first row of a group."""
        number, _ = self._groups[index]
        return int(self._firsts[index] - self._firsts[[other for other, _ in self._groups].index(number)])

    def _named(self, index: int) -> str:
        number, group = self._groups[index]
        first = self._first_of(index)
        column = self._opened[number].metadata.row_group(group).column(0)
        at = column.dictionary_page_offset or column.data_page_offset
        return f"row group {group} (from row {first}, byte {at})"

    def _read(self, index: int) -> list[dict[str, Any]]:
        number, group = self._groups[index]
        file, path = self._opened[number], self.files.paths[number]
        try:
            with self._lock:  # a file is read by one thread at a time
                table = file.read_row_group(group, columns=self._columns)
            rows = table.to_pylist()
            if len(rows) != self._firsts[index + 1] - self._firsts[index]:
                raise ValueError(f"{len(rows)} rows were found")
        except MemoryError:  # pyarrow's too
            raise
        except Exception as error:  # pyarrow's have many types
            self.files.check(number, lambda: self._named(index), at_once=True)
            raise RecordsError(
                f"{self._named(index)} of {path}, {self._firsts[index + 1] - self._firsts[index]} rows, cannot be read "
                f"({gist(error)}); restore the file from a copy"
            ) from error
        if empty := [name for name in table.column_names if table[name].null_count]:
            raise RecordsError(
                f"the column {join_names(empty)} of {path} has rows without a value, which no tensor can hold; "
                "fill them, or name the columns to read: looplib.open_records(files, columns=[...])"
            )
        return rows


class ArrayRecords(ReadElsewhere):
    """The records of ArrayRecord files, read by their own library.

    Args:
      paths: the files.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        if stored := list(filter(is_remote, paths)):
            raise RecordsError(
                f"{stored[0]} is in a store, and the library of ArrayRecord opens local files alone; copy the files to "
                "a disk, or write them as TFRecord, which is read from stores"
            )
        package = "array_record.python.array_record_"
        opened = _imported(f"{package}module", "array_record").ArrayRecordReader

        def count_of(path: str) -> int:
            reader = opened(path)
            count = reader.num_records()
            reader.close()  # which raises an error if the file is none of this format
            return count

        files = Files(paths)
        counts = in_threads(count_of, paths)
        whole = [f"{path}[0:{count}]" for path, count in zip(paths, counts)]  # so that they are not counted once more
        source = _imported(f"{package}data_source", "array_record").ArrayRecordDataSource(whole)
        super().__init__(source, files, counts)


def _imported(module: str, package: str) -> Any:
    try:
        return __import__(module, fromlist=["_"])
    except ImportError as error:
        raise PluginError(f"files of this format are read by {package}; install it: pip install {package}") from error
