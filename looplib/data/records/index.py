"""Where the records of files start: found once, kept in a file, and verified by the sizes and times of the files.

An index is foreign input, as it is beside data of somebody else's or in a cache that others share: no more of it is
read than the data files can need, and one that does not fit them is made again.
"""

import abc
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base import files as whole_files
from looplib.base import folders
from looplib.base.files import is_remote, safe_name
from looplib.base.messages import gist, join_names
from looplib.data.records.files import Files, absolute, in_threads
from looplib.errors import RecordsError, UsageError
from looplib.stores import stores

_MAGIC = b"looplib index of records 1\n"
_PIECE = 1 << 20  # offsets that are read at once
_WAIT, _WAIT_STORED = 120.0, 1800.0  # seconds for another process that finds the records, and may be stopped
_TRIED, _TRIED_IN_ALL = 16, 1024  # records of a file, and of all, that are looked for where an index says
_LOOKING = threading.Lock()
_SOUND: set[tuple[str, int, int | str]] = (
    set()
)  # files, with sizes and times, that have their records where an index says


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the records of a format lie in a file.

    Attributes:
      kind: the name of the format.
      least: bytes that a record has at least.
      scan: finds the records of a file, given by its number: int64 `[records + 1]`, where each record starts, and where
        the last one ends.
      fits: returns whether a file, given by its number, has records that start and stop at the given bytes.
    """

    kind: str
    least: int
    scan: Callable[[Files, int], np.ndarray]
    fits: Callable[[Files, int, np.ndarray, np.ndarray], bool]


def find_offsets(files: Files, layout: Layout) -> list[np.ndarray]:
    """Returns where the records of files start: of each file what `Layout.scan` returns."""
    head = json.dumps([layout.kind, list(map(os.path.basename, files.paths)), files.sizes, files.times]).encode()
    places = _places(files.paths)
    if (found := _first(places, head, files, layout)) is not None:
        return found
    with _one_process_at_a_time(places, _WAIT_STORED if files.is_stored else _WAIT):
        if (found := _first(places, head, files, layout, says=True)) is not None:
            return found
        found = in_threads(functools.partial(layout.scan, files), range(len(files.paths)), files.threads)
        _write(places, head, found)
    return found


def refuse_misfit(files: Files, index: int, layout: Layout, offsets: np.ndarray, row: int) -> None:
    """Finds the records of a file once more, if one of them is not where the index says.

    Args:
      files: the files.
      index: of the file.
      layout: of its records.
      offsets: where they are, as the index says.
      row: the number of the record.

    Raises:
      UsageError: if they are elsewhere, so that the index is wrong and not the record; the index is removed.
    """
    path = files.paths[index]
    with _LOOKING:
        key = (path, files.sizes[index], files.times[index])
        if key in _SOUND or layout.fits(files, index, offsets[row : row + 1], offsets[row + 1 : row + 2]):
            return
        try:
            equal = np.array_equal(layout.scan(files, index), offsets)
        except UsageError:
            equal = True  # the file is damaged
        if equal:
            _SOUND.add(key)
            return
    places = _places(files.paths)
    for place in places:
        _remove(place)
    left = join_names(list(filter(os.path.isfile, places)))
    raise RecordsError(
        f"the index of records does not fit {path}, as record {row} shows: one of them was changed, and the time "
        f"of the file was not; {f'remove {left}' if left else 'the index was removed'}; run the same command again"
    )


def _first(places: list[str], head: bytes, files: Files, layout: Layout, says: bool = False) -> list[np.ndarray] | None:
    """Returns the first index that fits, or None; says of others why they do not."""
    for place in places:
        try:
            with whole_files.open_regular(place) as file:
                found = _read(file, head, files.sizes, layout.least)
            _try(files, layout, found)
            return found
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError, MemoryError, tf.errors.OpError) as error:
            if says and not isinstance(error, tf.errors.NotFoundError):
                logging.warning("the index of records %s is not used, and made again: %s", place, gist(error))
    return None


@contextlib.contextmanager
def _one_process_at_a_time(places: list[str], wait: float) -> Iterator[None]:
    """Keeps the other workers from finding the same records, where a lock can be had."""
    with contextlib.ExitStack() as stack:
        for lock in (place + ".lock" for place in places):
            try:
                folders.make_folder(os.path.dirname(lock))
                stack.enter_context(whole_files.appending(lock, wait))
            except TimeoutError:
                logging.warning("%s is held by another process, which may be stopped; not waiting for it", lock)
                break
            except (OSError, ValueError):
                continue
            stack.callback(_remove, lock)
            break
        yield


def _try(files: Files, layout: Layout, found: list[np.ndarray]) -> None:
    """Looks for a few records of local files where an index says; raises `ValueError` if one is not there.

    Objects of stores are left out: looking takes long there, and each has a version.
    """
    most = min(_TRIED, max(1, _TRIED_IN_ALL // len(found)))
    for index in range(0, len(found), -(-len(found) // _TRIED_IN_ALL)):
        starts, stops = found[index][:-1], found[index][1:]
        few = slice(None, None, max(1, -(-len(starts) // most)))
        if not is_remote(path := files.paths[index]) and not layout.fits(files, index, starts[few], stops[few]):
            raise ValueError(f"its offsets are not those of {path}")


def _remove(path: str) -> None:
    with contextlib.suppress(OSError, ValueError, tf.errors.OpError), whole_files.open_regular(path):
        folders.remove(*os.path.split(path))


def cache_directory() -> str:
    """Returns `stores.cache_directory`; where there is none, `os.devnull`, in which no file can be made."""
    try:
        return stores.cache_directory()
    except UsageError:
        return os.devnull


def _places(paths: list[str]) -> list[str]:
    """Returns where the index of files may be: beside the first one if it is local, and in a cache directory."""
    key = hashlib.sha256(os.fsencode("\n".join(absolute(paths)))).hexdigest()[:16]
    cached = os.path.join(cache_directory(), f"{key}.index")
    if is_remote(paths[0]):
        return [cached]
    beside = f"{os.path.dirname(paths[0]) or '.'}/.looplib-{key}.index"
    return [beside, cached]


def _read(file: BinaryIO, head: bytes, sizes: list[int], least: int) -> list[np.ndarray]:
    """Returns the offsets of an index.

    Raises:
      ValueError: if it is of other files, or damaged, or its offsets do not fit the files.
    """
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ValueError("it is none of this version")
    checksum = int.from_bytes(file.read(8), "little")
    body = file.read(8 + len(head))
    if body != len(head).to_bytes(8, "little") + head:
        raise ValueError("it is of other files, or they were changed")
    crc = google_crc32c.value(body)

    def numbers(count: int) -> np.ndarray:
        nonlocal crc
        content = file.read(8 * count)
        crc = google_crc32c.extend(crc, content)
        return np.frombuffer(content[: len(content) // 8 * 8], np.int64)

    counts, found = numbers(len(sizes)), []
    for size, count in zip(sizes, counts.tolist()):
        fits = 1 <= count <= size // least + 1
        offsets = np.empty(count if fits else 0, np.int64)
        for at in range(0, len(offsets), _PIECE):
            piece = numbers(min(_PIECE, count - at))
            offsets[at : at + len(piece)] = piece
            fits = at + len(piece) == min(at + _PIECE, count)
            if not fits or (np.diff(offsets[max(0, at - 1) : at + len(piece)]) < least).any():
                fits = False
                break  # before what does not fit fills the memory
        if not fits or offsets[0] != 0 or offsets[-1] != size:
            raise ValueError("its offsets do not fit the files")
        found.append(offsets)
    if len(found) < len(sizes) or file.read(1) or crc != checksum:
        raise ValueError("it is damaged")
    return found


def _write(places: list[str], head: bytes, found: list[np.ndarray]) -> None:
    counts = np.asarray([len(offsets) for offsets in found], np.int64)
    body = len(head).to_bytes(8, "little") + head + counts.tobytes() + np.concatenate(found).tobytes()
    content = _MAGIC + google_crc32c.value(body).to_bytes(8, "little") + body
    for place in places:
        with contextlib.suppress(OSError, ValueError, tf.errors.OpError):
            folders.make_folder(os.path.dirname(place))
            whole_files.write_whole(place, content, durable=False)
            return
    logging.warning(
        "the index of the records cannot be written to %s; each start has to find the records again", places
    )


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


@dataclasses.dataclass(frozen=True)
class Opening:
    """How files were opened, for another process that opens them too."""

    paths: list[str]  # absolute ones
    format: str
    options: dict[str, Any]  # of the format


class ReadTogether(abc.ABC):
    """Records that are read several at once, and so also one alone."""

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    @abc.abstractmethod
    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Returns records by number."""


class Numbered(ReadTogether):
    """Records of files, numbered through from file to file.

    Args:
      files: the files.
      counts: how many records each file, or part of one, has.

    Attributes:
      files: the files.
      opening: how they were opened; None for files that looplib was not asked to open.
    """

    opening: Opening | None = None

    def __init__(self, files: Files, counts: Sequence[int]) -> None:
        self.files = files
        self._firsts = np.concatenate([[0], np.cumsum(counts)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

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
