"""Where the records of files start: found once, kept in a file, and verified by the sizes and times of the files."""

import concurrent.futures
import contextlib
import hashlib
import json
import os
from collections.abc import Callable

import google_crc32c
import numpy as np
from absl import logging

from looplib import files as whole_files
from looplib.files import is_remote
from looplib.records.files import THREADS, Files

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
    places = _places(files.paths)
    for place in places:
        if (found := _read(place, head, len(files.paths))) is not None:
            return found
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda index: scan(files, index), range(len(files.paths))))
    _write(places, head, found)
    return found


def _places(paths: list[str]) -> list[str]:
    """Returns where the index of files may be: beside the first one, and in the user's cache directory."""
    key = hashlib.sha256("\n".join(os.path.abspath(path) for path in paths).encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    beside = f"{os.path.dirname(paths[0]) or '.'}/.looplib-{key}.index"
    return [beside, os.path.join(cache, "looplib", f"{key}.index")]


def _read(path: str, head: bytes, count: int) -> list[np.ndarray] | None:
    """Returns an index, or None if there is none, or one of other files, or a damaged one."""
    try:
        with whole_files.open_regular(path) as file:
            content = file.read()
    except Exception:
        return None
    start = len(_MAGIC) + 16 + len(head)
    sums = np.frombuffer(content[len(_MAGIC) : len(_MAGIC) + 16], np.int64)
    if not content.startswith(_MAGIC) or content[len(_MAGIC) + 16 : start] != head or len(content) % 8 != start % 8:
        return None
    if google_crc32c.value(content[len(_MAGIC) + 8 :]) != sums[0]:
        return None
    numbers = np.frombuffer(content[start:], np.int64)
    counts, offsets = numbers[:count], numbers[count:]
    return np.split(offsets, np.cumsum(counts)[:-1])


def _write(places: list[str], head: bytes, found: list[np.ndarray]) -> None:
    counts = np.asarray([len(offsets) for offsets in found], np.int64)
    body = np.int64(len(head)).tobytes() + head + counts.tobytes() + np.concatenate(found).tobytes()
    content = _MAGIC + np.int64(google_crc32c.value(body)).tobytes() + body
    for place in places:
        with contextlib.suppress(Exception):
            if not is_remote(place):
                os.makedirs(os.path.dirname(place), exist_ok=True)
            whole_files.write_whole(place, content, durable=False)
            return
    logging.warning(
        "the index of the records cannot be written to %s; each start has to find the records again", places
    )
