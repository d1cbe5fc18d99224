"""Files of records, read in ranges of bytes from several threads, and guarded against changes during a run."""

import concurrent.futures
import functools
import io
import math
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO, TypeVar

from absl import logging

from looplib.base.files import is_remote
from looplib.base.messages import join_names, with_cure
from looplib.errors import RecordsError, StoreError, UsageError
from looplib.stores.ranges import Ranges, ReplacedError

_MOST_OPEN = 256  # files at once
Argument, Result = TypeVar("Argument"), TypeVar("Result")
ByteRange = tuple[int, int, int]  # the number of a file, a first byte, and the byte after the last one
THREADS = 16  # that wait for files
# If the first ones of many spans take longer than from memory, the disk gets all others at once, to read in an order of
# its own: a number of spans, and seconds of each.
_PROBE, _IN_MEMORY = 16, 2e-5
_COMPRESSED = re.compile(rb"\x1f\x8b|\x78[\x01\x9c\xda]|BZh[1-9]1AY&SY|\xfd7zXZ\0|\x28\xb5\x2f\xfd")  # first bytes
_SECONDS = 1.0  # after which it is looked again whether a file was changed


class Files:
    """Files whose sizes and times of change were noted.

    Args:
      paths: the files.

    Attributes:
      paths: the files.
      sizes: bytes of each.
      times: nanoseconds at which each was changed last; of an object of a store, its version.
      threads: how many should run Python on the bytes; more only pay if they wait for a network.

    Raises:
      UsageError: if one cannot be found, or is a directory, a FIFO, a socket or a device.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = list(paths)
        remote = [index for index, path in enumerate(self.paths) if is_remote(path)]
        self._remote = {index: number for number, index in enumerate(remote)}
        self.threads = THREADS if remote else 2
        self._open: dict[int, BinaryIO] = {}
        self._checked: dict[int, float] = {}
        self._lock = threading.Lock()
        self._ranges = None
        if remote:
            try:
                self._ranges = Ranges([self.paths[index] for index in remote])
            except FileNotFoundError as error:
                raise RecordsError(f"{error} is not there any more; restore it, or check the path") from None
        found = in_threads(self._size_and_time, range(len(self.paths)))
        self.sizes = [size for size, _ in found]
        self.times = [time for _, time in found]
        if empty := [path for path, size in zip(self.paths, self.sizes) if not size]:
            logging.warning("0 bytes, and so no record, are in %s", join_names(empty))

    def read_at(self, spans: Iterable[ByteRange], named: Callable[[int, int], str] | None = None) -> bytes:
        """Returns the bytes of spans, one after another.

        Args:
          spans: of each, the number of the file, its first byte, and the byte after its last one.
          named: returns what stands in a file, given by its number, at a byte, for errors; default the byte.

        Raises:
          UsageError: if a file cannot be read, or was changed since it was found; names file and place.
        """
        spans = list(spans)
        named = named or (lambda _, at: f"byte {at}")
        firsts = {index: start for index, start, _ in reversed(spans)}
        for index, start in firsts.items():
            self.check(index, functools.partial(named, index, start))
        try:
            parts = self._any_parts(spans) if self._remote else self._local_parts(spans, firsts)
        except ReplacedError as error:
            index = list(self._remote)[error.index]
            raise self._changed(index, named(index, firsts[index])) from None
        except (OSError, StoreError) as error:
            names = join_names([f"{named(index, firsts[index])} of {self.paths[index]}" for index in sorted(firsts)])
            raise RecordsError(f"{names} cannot be read: {with_cure(error, 'check the disk')}") from error
        for (index, start, stop), part in zip(spans, parts):
            if len(part) < stop - start:
                raise self._changed(index, named(index, start + len(part)))
        return b"".join(parts)

    def _any_parts(self, spans: list[ByteRange]) -> list[bytes]:
        """Returns the bytes of spans of objects, and of local files if there are some among them."""
        remote = [(self._remote[index], start, stop) for index, start, stop in spans if index in self._remote]
        local = [span for span in spans if span[0] not in self._remote]
        found = iter(self._ranges.read(remote))
        here = iter(self._local_parts(local, {index for index, _, _ in local}))
        return [next(found if index in self._remote else here) for index, _, _ in spans]

    def _local_parts(self, spans: list[ByteRange], indices: Iterable[int]) -> list[bytes]:
        files = {index: self._file(index) for index in indices}  # held, so that none is closed meanwhile
        descriptors = {index: file.fileno() for index, file in files.items()}
        begin, pread = time.perf_counter(), os.pread
        parts = [pread(descriptors[index], stop - start, start) for index, start, stop in spans[:_PROBE]]
        rest = spans[_PROBE:]
        if rest and time.perf_counter() - begin > _PROBE * _IN_MEMORY and sys.platform == "linux":
            for index, start, stop in rest:
                os.posix_fadvise(descriptors[index], start, stop - start, os.POSIX_FADV_WILLNEED)
        return parts + [pread(descriptors[index], stop - start, start) for index, start, stop in rest]

    def check(self, index: int, named: Callable[[], str], at_once: bool = False) -> None:
        """Refuses a file that was changed since it was found.

        Args:
          index: of the file.
          named: returns what is read of it, for the error.
          at_once: whether to look in any case; else at most once a second.

        Raises:
          UsageError: if its size or time of change is another, or it is not there any more; names file and record.
        """
        now = time.monotonic()
        if not at_once and now - self._checked.get(index, -math.inf) < _SECONDS:
            return
        self._checked[index] = now
        if index in self._remote:
            if self._ranges.is_replaced(self._remote[index], at_once):
                raise self._changed(index, named())
        elif _size_and_time(self.paths[index], named) != (self.sizes[index], self.times[index]):
            raise self._changed(index, named())

    def _changed(self, index: int, place: str) -> UsageError:
        path, size = self.paths[index], self.sizes[index]
        if index in self._remote:
            differs = "was replaced or removed since"
        else:
            now, _ = _size_and_time(path, lambda: place)
            differs = f"has {now} now" if now != size else "another time of change now"
        return RecordsError(
            f"{path} was changed while it was read, at {place}: it had {size} bytes when it was opened, and "
            f"{differs}; a run needs the same data from start to end; restore the file, or start a new run with the "
            "new one"
        )

    def _size_and_time(self, index: int) -> tuple[int, int | str]:
        if index in self._remote:
            number = self._remote[index]
            return self._ranges.sizes[number], self._ranges.versions[number]
        return _size_and_time(self.paths[index])

    def opened(self, index: int) -> str | BinaryIO:
        """Returns what a library that reads a file by itself may open: its path, or a file in place of an object."""
        return _RangeFile(self, index) if index in self._remote else self.paths[index]

    @property
    def is_stored(self) -> bool:
        """Whether some are objects of a store."""
        return bool(self._remote)

    def _file(self, index: int) -> BinaryIO:
        if (file := self._open.get(index)) is not None:
            return file
        descriptor = os.open(self.paths[index], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may be a FIFO by now
        file = open(descriptor, "rb", buffering=0)
        found = os.fstat(descriptor)
        if (found.st_size, found.st_mtime_ns) != (self.sizes[index], self.times[index]):
            raise self._changed(index, "its start")
        if sys.platform == "linux":  # else the kernel reads on after each span, which is another worker's part
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        with self._lock:
            while len(self._open) >= _MOST_OPEN:
                self._open.pop(next(iter(self._open)))  # closed when no thread reads it any more
            self._open[index] = file
        return file


def new_pool(threads: int = THREADS) -> concurrent.futures.ThreadPoolExecutor:
    """Returns threads that wait for files."""
    return concurrent.futures.ThreadPoolExecutor(threads, "looplib-files")


def in_threads(
    function: Callable[[Argument], Result], arguments: Iterable[Argument], threads: int = THREADS
) -> list[Result]:
    """Calls a function with each argument, some at once; returns the results in the order of the arguments."""
    with new_pool(threads) as pool:
        return list(pool.map(function, arguments))


def absolute(paths: Sequence[str]) -> list[str]:
    """Returns paths; local ones are made absolute."""
    return [path if is_remote(path) else os.path.abspath(path) for path in paths]


def refuse_compressed(path: str, start: bytes) -> None:
    """Raises `UsageError` for a file that starts like one of gzip, zlib, bzip2, xz or zstd."""
    if _COMPRESSED.match(start):
        raise RecordsError(
            f"{path} is compressed, so that no record in it can be read by itself; decompress it, or write it again "
            "as ArrayRecord, whose records are compressed in groups"
        )


def _size_and_time(path: str, named: Callable[[], str] | None = None) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        what = f", of which {named()} is read," if named else ""
        raise RecordsError(
            f"the file of records {path}{what} cannot be found: {with_cure(error, 'restore it, or check the path')}"
        ) from error
    if not stat.S_ISREG(found.st_mode):  # which has no end, and a size of 0
        raise RecordsError(f"{path} is a directory, a FIFO, a socket or a device; records are read from regular files")
    return found.st_size, found.st_mtime_ns  # TensorFlow has seconds only


class _RangeFile(io.RawIOBase):
    """An object of a store, as a file for libraries.

    Args:
      files: the files.
      index: of the object.
    """

    def __init__(self, files: Files, index: int) -> None:
        self._files, self._index, self._at = files, index, 0

    def readable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def seekable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """See `io.IOBase`."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at}.get(whence, self._files.sizes[self._index])
        return self._at

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`."""
        stop = max(self._at, min(self._at + len(buffer), self._files.sizes[self._index]))
        content = self._files.read_at([(self._index, self._at, stop)]) if stop > self._at else b""
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)
