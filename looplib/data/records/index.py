"""Where the records of files start: found once, kept in a file, and verified by the sizes and times of the files.

An index is foreign input, as it is beside data of somebody else's or in a cache that others share: no more of it is
read than the data files can need, and one that does not fit them is made again.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from typing import BinaryIO

import google_crc32c
import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base import files as whole_files
from looplib.base import folders
from looplib.base.files import is_remote
from looplib.base.messages import gist, join_names
from looplib.data.records.files import Files, absolute
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
        with concurrent.futures.ThreadPoolExecutor(files.threads) as pool:
            found = list(pool.map(lambda index: layout.scan(files, index), range(len(files.paths))))
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
