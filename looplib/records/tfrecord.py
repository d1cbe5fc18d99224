"""TFRecord files read by record number, with their checksums verified."""

import struct
from collections.abc import Sequence

import google_crc32c
import numpy as np

from looplib.errors import UsageError
from looplib.records.files import Files, refuse_compressed
from looplib.records.index import Layout, offsets_of
from looplib.records.indexed import IndexedFiles

# A record of a TFRecord file: its length (8 bytes), a checksum of that (4), the data, a checksum of the data (4).
_BEFORE, _AFTER = 12, 4
_WINDOW = 1 << 22  # bytes that are read at once to find the records
_LARGE = 1 << 18  # bytes of a large record
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
        layout = Layout("tfrecord", _BEFORE + _AFTER, scan, _fits)
        super().__init__(files, offsets_of(files, layout), layout)

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


def scan(files: Files, index: int) -> np.ndarray:
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
        raw = files.read([(index, at, min(at + window, size))])
        place, last, before = 0, len(raw) - _BEFORE, len(starts)
        while place <= last:
            starts.append(at + place)
            place += unpack(raw, place)[0] + _BEFORE + _AFTER
        if len(starts) == before:
            raise _truncated(path, len(starts), at, size)
        here = np.asarray(starts[before:]) - at
        _check_lengths(path, np.frombuffer(raw, np.uint8)[here[:, None] + np.arange(_BEFORE)], starts, before)
        # Large records are passed over, and only the pages of their lengths are read.
        window = _BEFORE if place > _LARGE * (len(starts) - before) else _WINDOW
        at += place
    if at > size:
        raise _truncated(path, len(starts) - 1, starts[-1], size)
    return np.asarray([*starts, size], np.int64)


def _fits(files: Files, index: int, starts: np.ndarray, stops: np.ndarray) -> bool:
    """See `Layout`."""
    raw = files.read([(index, start, start + _BEFORE) for start in starts.tolist()])
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
    raise UsageError(
        f"record {number} of {path}, at byte {starts[number]}, has a damaged length, so that the records after it "
        "cannot be found; expected a TFRecord file; restore it from a copy"
    )


def _truncated(path: str, number: int, at: int, size: int) -> UsageError:
    return UsageError(
        f"{path} ends at byte {size} in the middle of record {number}, which starts at byte {at}; it was truncated, or "
        "is still being written; restore it from a copy, or wait"
    )
