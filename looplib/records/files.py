"""Files of records, read in ranges of bytes from several threads, and guarded against changes during a run."""

import concurrent.futures
import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import BinaryIO, NamedTuple

import tensorflow as tf

from looplib.errors import UsageError, gist
from looplib.files import is_remote

_MOST_OPEN = 256  # files at once
THREADS = 16  # that wait for files
# If the first ones of many spans take longer than from memory, the disk gets all others at once, to read in an order of
# its own: a number of spans, and seconds of each.
_PROBE, _IN_MEMORY = 16, 2e-5
_SECONDS = 1.0  # after which it is looked again whether a file was changed


class Span(NamedTuple):
    """A range of bytes of a file.

    Attributes:
      file: the number of the file.
      start: its first byte.
      stop: the byte after its last one.
    """

    file: int
    start: int
    stop: int


class Files:
    """Files whose sizes and times of change were noted.

    Args:
      paths: the files.

    Attributes:
      paths: the files.
      sizes: bytes of each.
      times: nanoseconds at which each was changed last.

    Raises:
      UsageError: if one cannot be found.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = list(paths)
        self._remote = any(map(is_remote, self.paths))
        self._open: dict[int, BinaryIO] = {}
        self._checked: dict[int, float] = {}
        self._lock = threading.Lock()
        self._pool = concurrent.futures.ThreadPoolExecutor(THREADS, "looplib-files")
        found = list(self._pool.map(_size_and_time, self.paths))
        self.sizes = [size for size, _ in found]
        self.times = [time for _, time in found]

    def read(self, spans: Iterable[Span]) -> bytes:
        """Returns the bytes of spans, one after another.

        Raises:
          UsageError: if a file cannot be read, or was changed since it was found.
        """
        spans = list(spans)
        for index in {span.file for span in spans}:
            self.check(index)
        if self._remote:
            return b"".join(self._pool.map(lambda span: self._read(*span), spans))
        start = time.perf_counter()
        found = [self._read(*span) for span in spans[:_PROBE]]
        rest = spans[_PROBE:]
        if rest and time.perf_counter() - start > _PROBE * _IN_MEMORY and sys.platform == "linux":
            for index, first, last in rest:
                with contextlib.suppress(OSError):  # it is only advice
                    file = self._file(index)
                    os.posix_fadvise(file.fileno(), first, last - first, os.POSIX_FADV_WILLNEED)
        return b"".join(found + [self._read(*span) for span in rest])

    def check(self, index: int) -> None:
        """Refuses a file that was changed since it was found; looks at most once a second.

        Raises:
          UsageError: if its size or time of change is another, or it is not there any more.
        """
        now = time.monotonic()
        if now - self._checked.get(index, -math.inf) < _SECONDS:
            return
        self._checked[index] = now
        if _size_and_time(self.paths[index]) != (self.sizes[index], self.times[index]):
            raise self._changed(index)

    def _changed(self, index: int) -> UsageError:
        return UsageError(
            f"{self.paths[index]} was changed while it was read: it had {self.sizes[index]} bytes when it was opened, "
            "and has another size or time now; a run needs the same data from start to end; restore the file, "
            "or start a new run with the new one"
        )

    def _read(self, index: int, start: int, stop: int) -> bytes:
        try:
            if self._remote:
                with tf.io.gfile.GFile(self.paths[index], "rb") as file:
                    file.seek(start)
                    content = file.read(stop - start)
            else:
                file = self._file(index)  # held, so that it is not closed meanwhile
                content = os.pread(file.fileno(), stop - start, start)
        except (OSError, tf.errors.OpError) as error:
            raise UsageError(
                f"{self.paths[index]} cannot be read at byte {start} ({gist(error)}); check that it is still there"
            ) from error
        if len(content) < stop - start:
            raise self._changed(index)
        return content

    def _file(self, index: int) -> BinaryIO:
        if (file := self._open.get(index)) is not None:
            return file
        file = open(self.paths[index], "rb", buffering=0)
        with self._lock:
            while len(self._open) >= _MOST_OPEN:
                self._open.pop(next(iter(self._open)))  # closed when no thread reads it any more
            self._open[index] = file
        return file


def _size_and_time(path: str) -> tuple[int, int]:
    try:
        found = tf.io.gfile.stat(path)
    except tf.errors.OpError as error:
        raise UsageError(f"the file of records {path} cannot be found ({gist(error)}); check the path") from error
    return found.length, found.mtime_nsec
