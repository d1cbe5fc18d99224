"""Where the records of files start: found once, kept in a file, and verified by the sizes and times of the files.

An index is foreign input, as it is beside data of somebody else's or in a cache that others share: no more of it is
read than the data files can need, and one that does not fit them is made again.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from typing import BinaryIO

import google_crc32c
import numpy as np
import tensorflow as tf
from absl import logging

from looplib import files as whole_files
from looplib import folders
from looplib.errors import gist
from looplib.files import is_remote
from looplib.records.files import Files

_MAGIC = b"looplib index of records 1\n"
_PIECE = 1 << 20  # offsets that are read at once
_WAIT = 120.0  # seconds for another process that finds the records, and may be stopped


def offsets_of(files: Files, kind: str, scan: Callable[[Files, int], np.ndarray], least: int) -> list[np.ndarray]:
    """Returns where the records of files start.

    Args:
      files: the files.
      kind: the name of the format.
      scan: finds the records of a file, given by its number.
      least: bytes that a record has at least.

    Returns:
      For each file, int64 `[records + 1]`: where each record starts, and where the last one ends.
    """
    head = json.dumps([kind, [os.path.basename(path) for path in files.paths], files.sizes, files.times]).encode()
    places = _places(files.paths)
    if (found := _first(places, head, files.sizes, least)) is not None:
        return found
    with _one_process_at_a_time(places):
        if (found := _first(places, head, files.sizes, least, says=True)) is not None:
            return found
        with concurrent.futures.ThreadPoolExecutor(files.threads) as pool:
            found = list(pool.map(lambda index: scan(files, index), range(len(files.paths))))
        _write(places, head, found)
    return found


def _first(places: list[str], head: bytes, sizes: list[int], least: int, says: bool = False) -> list[np.ndarray] | None:
    """Returns the first index that fits, or None; says of others why they do not."""
    for place in places:
        try:
            with whole_files.open_regular(place) as file:
                return _read(file, head, sizes, least)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError, MemoryError, tf.errors.OpError) as error:
            if says and not isinstance(error, tf.errors.NotFoundError):
                logging.warning("the index of records %s is not used, and made again: %s", place, gist(error))
    return None


@contextlib.contextmanager
def _one_process_at_a_time(places: list[str]) -> Iterator[None]:
    """Keeps the other workers from finding the same records, where a lock can be had."""
    with contextlib.ExitStack() as stack:
        for lock in (place + ".lock" for place in places if not is_remote(place)):
            try:
                folders.make_folder(os.path.dirname(lock))
                stack.enter_context(whole_files.appending(lock, _WAIT))
            except TimeoutError:
                logging.warning("%s is held by another process, which may be stopped; not waiting for it", lock)
                break
            except (OSError, ValueError):
                continue
            stack.callback(_remove, lock)
            break
        yield


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        folders.remove(*os.path.split(path))


def _places(paths: list[str]) -> list[str]:
    """Returns where the index of files may be: beside the first one, and in the user's cache directory."""
    names = [path if is_remote(path) else os.path.abspath(path) for path in paths]
    key = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
    beside = f"{os.path.dirname(paths[0]) or '.'}/.looplib-{key}.index"
    return [beside, os.path.join(whole_files.cache_directory(), f"{key}.index")]


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
            if not is_remote(place):
                folders.make_folder(os.path.dirname(place))
            whole_files.write_whole(place, content, durable=False)
            return
    logging.warning(
        "the index of the records cannot be written to %s; each start has to find the records again", places
    )
