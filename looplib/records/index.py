"""Where the records of files start: found once, kept in a file, and verified by the sizes and times of the files."""

import concurrent.futures
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator

import google_crc32c
import numpy as np
import tensorflow as tf
from absl import logging

from looplib import files as whole_files
from looplib.files import is_remote
from looplib.records.files import Files

_MAGIC = b"looplib index of records 1\n"


def offsets_of(files: Files, kind: str, scan: Callable[[Files, int], np.ndarray]) -> list[np.ndarray]:
    """Returns where the records of files start.

    Args:
      files: the files.
      kind: the name of the format.
      scan: finds the records of a file, given by its number.

    Returns:
      For each file, int64 `[records + 1]`: where each record starts, and where the last one ends.
    """
    head = json.dumps([kind, [os.path.basename(path) for path in files.paths], files.sizes, files.times]).encode()
    places, count = _places(files.paths), len(files.paths)
    if (found := _first(places, head, count)) is not None:
        return found
    with _one_process_at_a_time(places):
        if (found := _first(places, head, count)) is not None:
            return found
        with concurrent.futures.ThreadPoolExecutor(files.threads) as pool:
            found = list(pool.map(lambda index: scan(files, index), range(count)))
        _write(places, head, found)
    return found


def _first(places: list[str], head: bytes, count: int) -> list[np.ndarray] | None:
    return next((found for place in places if (found := _read(place, head, count)) is not None), None)


@contextlib.contextmanager
def _one_process_at_a_time(places: list[str]) -> Iterator[None]:
    """Keeps the other workers from finding the same records, where a lock can be had."""
    with contextlib.ExitStack() as stack:
        for lock in (place + ".lock" for place in places if not is_remote(place)):
            with contextlib.suppress(OSError, ValueError):
                os.makedirs(os.path.dirname(lock), exist_ok=True)
                stack.enter_context(whole_files.appending(lock))
                stack.callback(_remove, lock)
                break
        yield


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _places(paths: list[str]) -> list[str]:
    """Returns where the index of files may be: beside the first one, and in the user's cache directory."""
    names = [path if is_remote(path) else os.path.abspath(path) for path in paths]
    key = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
    beside = f"{os.path.dirname(paths[0]) or '.'}/.looplib-{key}.index"
    return [beside, os.path.join(whole_files.cache_directory(), f"{key}.index")]


def _read(path: str, head: bytes, count: int) -> list[np.ndarray] | None:
    """Returns an index, or None if there is none, or one of other files, or a damaged one."""
    try:
        with whole_files.open_regular(path) as file:
            content = file.read()
    except (OSError, ValueError, tf.errors.OpError):
        return None
    before = len(_MAGIC) + 8
    start = before + 8 + len(head)
    if not content.startswith(_MAGIC) or content[before + 8 : start] != head or (len(content) - start) % 8:
        return None
    if google_crc32c.value(content[before:]) != int.from_bytes(content[len(_MAGIC) : before], "little"):
        return None
    numbers = np.frombuffer(content[start:], np.int64)
    counts, offsets = numbers[:count], numbers[count:]
    return np.split(offsets, np.cumsum(counts)[:-1])


def _write(places: list[str], head: bytes, found: list[np.ndarray]) -> None:
    counts = np.asarray([len(offsets) for offsets in found], np.int64)
    body = len(head).to_bytes(8, "little") + head + counts.tobytes() + np.concatenate(found).tobytes()
    content = _MAGIC + google_crc32c.value(body).to_bytes(8, "little") + body
    for place in places:
        with contextlib.suppress(OSError, ValueError, tf.errors.OpError):
            if not is_remote(place):
                os.makedirs(os.path.dirname(place), exist_ok=True)
            whole_files.write_whole(place, content, durable=False)
            return
    logging.warning(
        "the index of the records cannot be written to %s; each start has to find the records again", places
    )
