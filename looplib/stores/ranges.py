"""Objects of stores, read in ranges: ahead of their use, each once, and kept in a local cache with a size limit.

A range that was read is a block: in memory until it was used, and a file of the cache directory. A file has checksums
of its pages, so that what a crash or somebody else left in the cache is never taken for data, and it belongs to one
version of an object. Several processes share the cache: files are written whole and removed whole, the least recently
used first, and one that has gone is read from the store again.
"""

import bisect
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Sequence

import google_crc32c
import numpy as np
from absl import logging

from looplib.base import files, folders
from looplib.base.messages import gist
from looplib.errors import FileError, StoreError, UsageError
from looplib.stores import stores
from looplib.stores.stores import Store, StoredFile

_THREADS = 32  # that wait for a store
_LEAST, _MOST = 1 << 17, 1 << 23  # bytes of a request: fewer cost as much, and more are divided
_AHEAD = 1 << 24  # bytes that are read after a range that follows another
_RUN = 2  # ranges that follow one another until more is read ahead
_WINDOW = 1 << 20  # bytes of a request that reads ahead, at least
_IN_MEMORY = 1 << 28  # bytes of blocks that are not in the cache, at most
_PAGE = 1 << 16  # bytes that have a checksum
_DEFAULT_GB = 8.0
_LOOKED = 60.0  # seconds after which it is asked again whether objects were replaced
_TRIES = 4  # until an object that was not found is believed to be gone
_LISTED = 32  # objects of one folder that are looked up by listing it
_BLOCK_NAME = re.compile(r"(\d+)-(\d+)")
_FULL, _LEFT = 0.85, 0.75  # of the limit of the cache: where blocks are removed, and what stays
_WAIT = 5.0  # seconds for another process that removes blocks
_USED = 60.0  # seconds within which it is not noted again that a block was used
_SETTING = "LOOPLIB_RECORDS_GB"


def matching(pattern: str) -> tuple[list[str], bool]:
    """Returns the URLs of the objects that a URL with `*`, `?` or `[...]` in its path names; and whether it is one's.

    Raises:
      StoreError: if the store cannot be used.
    """
    place, name = _split(pattern)
    store, is_pattern = Store(place), re.search(r"[*?[]", name)
    found = [f"{place}/{one}" for one in store.matching(name.replace("[^", "[!"))] if is_pattern else []
    try:
        store.look_up(name)
    except FileNotFoundError:
        return found, False
    except IsADirectoryError:
        if is_pattern:
            return found, False
        raise StoreError(f"{pattern} is a folder; expected objects, such as {pattern.rstrip('/')}/*.tfrecord") from None
    return found, True


def _split(url: str) -> tuple[str, str]:
    """Divides a URL into its bucket and the name of an object."""
    match = re.match(r"([^:]+://[^/]*)/?(.*)", url)
    return match[1], match[2]


class ReplacedError(OSError):
    """An object is not the one that was found.

    Args:
      index: its number.
    """

    def __init__(self, index: int) -> None:
        super().__init__("it was replaced or removed")
        self.index = index


@dataclasses.dataclass(eq=False)
class _Block:
    """A range of an object that was read, or is being read.

    Attributes:
      start: its first byte.
      stop: the byte after its last one.
      future: gives its bytes; None if they are in the cache alone.
    """

    start: int
    stop: int
    future: concurrent.futures.Future | None = None


_Part = tuple[_Block, concurrent.futures.Future | None, int, int]  # with the first byte, and that after the last one


class _Object:
    """The blocks of an object; no two have a byte in common."""

    def __init__(self, store: Store, name: str, url: str, found: StoredFile) -> None:
        self.store, self.name, self.url, self.found = store, name, url, found
        self.starts: list[int] = []
        self.blocks: dict[int, _Block] = {}
        self.folder: str | None = None
        self.last_stop = self.run = 0

    def add(self, block: _Block) -> None:
        bisect.insort(self.starts, block.start)
        self.blocks[block.start] = block

    def drop(self, block: _Block) -> None:
        if self.blocks.get(block.start) is block:
            del self.blocks[block.start]
            self.starts.remove(block.start)

    def around(self, at: int) -> tuple[_Block | None, int, int]:
        """Returns the block that has a byte, or the bounds of the gap that has it."""
        place = bisect.bisect_right(self.starts, at)
        before = self.blocks[self.starts[place - 1]] if place else None
        if before is not None and before.stop > at:
            return before, before.start, before.stop
        low = 0 if before is None else before.stop
        return None, low, self.starts[place] if place < len(self.starts) else self.found.bytes


class Ranges:
    """Objects, read in ranges of bytes from several threads.

    Args:
      urls: of the objects.

    Attributes:
      sizes: bytes of each.
      versions: of each, a text that differs after it was written again.

    Raises:
      FileNotFoundError: if one is not there; its argument is the URL.
      StoreError: if the store cannot be used.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS, "looplib-store")
        self._stores: dict[str, Store] = {}
        places = [_split(url) for url in urls]
        for place, _ in places:
            self._stores.setdefault(place, Store(place, _is_ending))
        self._objects = [
            _Object(self._stores[place], name, url, found)
            for (place, name), url, found in zip(places, urls, self._look_up(places))
        ]
        for one in self._objects:
            if one.found is None:
                raise FileNotFoundError(one.url)
        self.sizes = [one.found.bytes for one in self._objects]
        self.versions = [one.found.version for one in self._objects]
        self._lock = threading.Lock()
        self._cache = _opened_cache()
        self._fits = self._cache is not None and sum(self.sizes) <= _LEFT * self._cache.most
        self._in_memory: dict[_Block, _Object] = {}
        self._looked = time.monotonic()
        self._look: concurrent.futures.Future | None = None
        self._replaced: set[int] = set()

    @property
    def requests(self) -> int:
        """The number of requests until now, without those that a driver has tried again by itself."""
        return sum(store.requests for store in self._stores.values())

    def _look_up(self, places: Sequence[tuple[str, str]], patience: float = stores.PATIENCE) -> list[StoredFile | None]:
        """Returns what stores say of objects; None for those that are not there."""
        by_folder: dict[tuple[str, str], list[str]] = {}
        for place, name in places:
            by_folder.setdefault((place, name.rpartition("/")[0]), []).append(name)
        known: dict[tuple[str, str], StoredFile] = {}
        for (place, folder), names in by_folder.items():
            if len(names) > _LISTED:
                pattern = f"{_escaped(folder)}/*" if folder else "*"
                listed = self._stores[place].matching(pattern, patience)
                known.update({(place, name): listed[name] for name in names if name in listed})

        def look(place: tuple[str, str]) -> StoredFile | None:
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                return known.get(place) or self._stores[place[0]].look_up(place[1], patience)

        return list(self._pool.map(look, places))

    def read(self, spans: Sequence[tuple[int, int, int]]) -> list[bytes]:
        """Returns the bytes of spans.

        Args:
          spans: of each, the number of the object, its first byte, and the byte after its last one.

        Raises:
          ReplacedError: if an object is another one now.
          StoreError: if a store does not answer in time.
        """
        planned = []
        for index, start, stop in spans:
            stop = min(stop, self.sizes[index])
            with self._lock:
                one = self._objects[index]
                one.run = one.run + 1 if 0 < start == one.last_stop else 0
                one.last_stop = stop
                planned.append(self._parts(index, start, stop))
                if one.run >= _RUN:
                    self._read_ahead(index, start, stop)
        return [self._joined(index, parts) for (index, _, _), parts in zip(spans, planned)]

    def _read_ahead(self, index: int, start: int, stop: int) -> None:
        size, window = self.sizes[index], min(_MOST, max(_WINDOW, stop - start))
        ahead = min(_AHEAD, max(4 * (stop - start), 4 * _WINDOW))
        for at in range(stop, min(size, stop + ahead), window):
            self._parts(index, at, min(size, at + window))

    def _parts(self, index: int, start: int, stop: int) -> list[_Part]:
        """Returns blocks that hold a range, with the part of each; begins to read those that are not there."""
        one, found, at = self._objects[index], [], start
        if one.folder is None:
            self._find_blocks(one)
        while at < stop:
            block, low, high = one.around(at)
            if block is None:
                begin, end = at, min(stop, high)
                if end - begin < _LEAST and self._cache is not None:
                    begin, end = max(low, begin // _LEAST * _LEAST), min(high, -(-end // _LEAST) * _LEAST)
                block = _Block(begin, min(end, begin + _MOST))
                block.future = self._pool.submit(self._fetch, index, block, self._fits or one.run < _RUN)
                one.add(block)
            end = min(stop, block.stop)
            found.append((block, block.future, at, end))
            at = end
        return found

    def _joined(self, index: int, parts: list[_Part]) -> bytes:
        one, found = self._objects[index], []
        for block, future, start, stop in parts:
            if future is not None:
                content = future.result()
                found.append(
                    content if len(content) == stop - start else content[start - block.start : stop - block.start]
                )
                if stop == block.stop and block in self._in_memory:
                    self._forget(one, block)
                continue
            content = self._cache.read(one.folder, block.start, block.stop, start, stop)
            if content is None:  # another process has removed it
                with self._lock:
                    one.drop(block)
                    again = self._parts(index, start, stop)
                content = self._joined(index, again)
            found.append(content)
        return found[0] if len(found) == 1 else b"".join(found)

    def _forget(self, one: _Object, block: _Block) -> None:
        with self._lock:
            self._in_memory.pop(block, None)
            one.drop(block)

    def _find_blocks(self, one: _Object) -> None:
        """Notes the blocks of an object that the cache has."""
        one.folder = ""
        if self._cache is None or not one.found.version:
            return
        one.folder = self._cache.folder_of(f"{one.url}\n{one.found.bytes}\n{one.found.version}")
        end = 0
        for start, stop in self._cache.blocks(one.folder):
            if end <= start < stop <= one.found.bytes:
                one.add(_Block(start, stop))
                end = stop

    def _fetch(self, index: int, block: _Block, keep: bool) -> bytes:
        """Reads a block from the store, and keeps it in the cache or, until it was used, in memory."""
        one = self._objects[index]
        try:
            content = self._read_object(index, block.start, block.stop)
        except BaseException:
            with self._lock:
                one.drop(block)
            raise
        kept = keep and one.folder and self._cache.write(one.folder, block.start, content)
        with self._lock:
            if kept:
                block.future = None
                return content
            self._in_memory[block] = one
            held = sum(block.stop - block.start for block in self._in_memory)
            while held > _IN_MEMORY:
                oldest = next(iter(self._in_memory))
                self._in_memory.pop(oldest).drop(oldest)
                held -= oldest.stop - oldest.start
        return content

    def _read_object(self, index: int, start: int, stop: int) -> bytes:
        one = self._objects[index]
        for number in range(_TRIES):
            try:
                return one.store.read_range(one.name, start, stop, one.found.version)
            except FileNotFoundError:
                if self._is_replaced_now(one):
                    break
            time.sleep(2**number / 2)
        raise ReplacedError(index)

    def is_replaced(self, index: int, at_once: bool = False) -> bool:
        """Returns whether an object is another one now, as found out up to a minute ago, or at once."""
        one = self._objects[index]
        if at_once or not one.store.conditional:
            return self._is_replaced_now(one)
        with self._lock:
            if time.monotonic() - self._looked > _LOOKED and (self._look is None or self._look.done()):
                self._looked = time.monotonic()
                self._look = self._pool.submit(self._look_at_all)
        return index in self._replaced

    def _is_replaced_now(self, one: _Object) -> bool:
        """Asks for one object; a store that does not answer says nothing, and some say for a moment that it is gone."""
        for number in range(_TRIES):
            try:
                return one.store.look_up(one.name, 0.0) != one.found
            except IsADirectoryError:
                return True
            except (StoreError, FileError):
                return False
            except FileNotFoundError:
                if number == _TRIES - 1 or _is_ending():
                    return True
            time.sleep(2**number / 2)
        raise AssertionError

    def _look_at_all(self) -> None:
        """Asks whether objects were replaced: of many by a listing, and of those that differ there by themselves."""
        with contextlib.suppress(StoreError):
            now = self._look_up([_split(one.url) for one in self._objects], 0.0)
            for number, (one, found) in enumerate(zip(self._objects, now)):
                if found != one.found and self._is_replaced_now(one):
                    self._replaced.add(number)


def _is_ending() -> bool:
    """Returns whether the process ends, and waits for threads that wait for a store."""
    return getattr(concurrent.futures.thread, "_shutdown", False)


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


class _Cache:
    """Blocks of objects on a local disk, in a folder for each version of an object.

    Args:
      folder: where they are.
      most: bytes that they take at most; less if the disk has less.
    """

    def __init__(self, folder: str, most: int) -> None:
        self._folder, self._limit = folders.make_folder(folder), most
        self._lock, self._new = threading.Lock(), 0
        used = sum(size for _, size, _ in self._found())
        self.most = self._bound(used)

    def _bound(self, used: int) -> int:
        """Returns how many bytes there may be: no more than half of what the disk would have without them."""
        return min(self._limit, (shutil.disk_usage(self._folder).free + used) // 2)

    def _found(self) -> list[tuple[float, int, str]]:
        """Returns the files: when each was used, its bytes and its path."""
        found = []
        for place in os.scandir(self._folder):
            with contextlib.suppress(OSError):
                if place.is_dir(follow_symlinks=False):
                    for file in os.scandir(place.path):
                        with contextlib.suppress(OSError):
                            status = file.stat(follow_symlinks=False)
                            found.append((status.st_mtime, status.st_size, file.path))
        return found

    def folder_of(self, key: str) -> str:
        """Returns the folder for a version of an object."""
        return os.path.join(self._folder, hashlib.sha256(key.encode()).hexdigest()[:24])

    def blocks(self, folder: str) -> list[tuple[int, int]]:
        """Returns the starts and stops of the blocks in a folder, in order."""
        with contextlib.suppress(OSError):
            matches = map(_BLOCK_NAME.fullmatch, os.listdir(folder))
            return sorted((int(match[1]), int(match[2])) for match in matches if match)
        return []

    def write(self, folder: str, start: int, content: bytes) -> bool:
        """Keeps a block; returns whether it is there now."""
        pages = range(0, len(content), _PAGE)
        sums = np.asarray([google_crc32c.value(content[at : at + _PAGE]) for at in pages], "<u4")
        try:
            folders.make_folder(self._folder, os.path.basename(folder))
            path = os.path.join(folder, f"{start}-{start + len(content)}")
            with self._lock:
                files.write_whole(path, sums.tobytes() + content, durable=False)
                self._new += len(content)
                if self._new > self.most // 64:
                    self._new = 0
                    self._shrink()
        except (OSError, ValueError, UsageError) as error:
            logging.log_every_n_seconds(
                logging.WARNING, "blocks of records cannot be kept in %s: %s", 600, self._folder, gist(error)
            )
            return False
        return True

    def read(self, folder: str, first: int, last: int, start: int, stop: int) -> bytes | None:
        """Returns a part of the block from `first` to `last`; None if it is not there, or not as it was written."""
        path = os.path.join(folder, f"{first}-{last}")
        head = 4 * -(-(last - first) // _PAGE)
        low, high = (start - first) // _PAGE, -(-(stop - first) // _PAGE)
        try:
            with files.open_regular(path) as file:
                status = os.fstat(file.fileno())
                if status.st_size != head + last - first:
                    return None
                file.seek(4 * low)
                sums = np.frombuffer(file.read(4 * (high - low)), "<u4")
                file.seek(head + low * _PAGE)
                content = file.read(min(high * _PAGE, last - first) - low * _PAGE)
                if time.time() - status.st_mtime > _USED:
                    os.utime(path)
        except (OSError, ValueError):
            return None
        view = memoryview(content)
        if any(
            google_crc32c.value(bytes(view[at : at + _PAGE])) != sums[at // _PAGE]
            for at in range(0, len(content), _PAGE)
        ):
            return None
        at = first + low * _PAGE
        return content[start - at : stop - at]

    def _shrink(self) -> None:
        """Removes the blocks that were not used for longest, if there are too many; one process at a time does."""
        with contextlib.suppress(OSError, ValueError, TimeoutError), files.appending(self._folder + ".lock", _WAIT):
            found = sorted(self._found())
            used = sum(size for _, size, _ in found)
            self.most = self._bound(used)
            if used <= _FULL * self.most:
                return
            places = set()
            for _, size, path in found:
                if used <= _LEFT * self.most:
                    break
                place, name = os.path.split(path)
                with contextlib.suppress(OSError, ValueError):
                    folders.remove(place, name)
                    places.add(place)
                    used -= size
            for place in places:
                with contextlib.suppress(OSError, ValueError):
                    if not os.listdir(place):
                        folders.remove(*os.path.split(place))


def _opened_cache() -> _Cache | None:
    """Returns the cache that the environment asks for; None for none, and where there can be no files."""
    text = os.environ.get(_SETTING, "")
    try:
        most = float(text or _DEFAULT_GB)
        if not 0 <= most < math.inf:
            raise ValueError
    except ValueError:
        raise StoreError(
            f"{_SETTING} is {text!r}; expected the gigabytes of the cache, such as 8, or 0 for none"
        ) from None
    place = os.path.dirname(os.path.dirname(stores.cache("blocks", "")))
    try:
        return _Cache(place, int(most * 1e9)) if most else None
    except (OSError, UsageError) as error:
        logging.warning("blocks of records are not kept, as %s cannot be used: %s", place, gist(error))
        return None
