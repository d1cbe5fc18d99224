"""The positions of several workers in their data: a file of each worker beside the files of a checkpoint.

A position may hold a shuffle buffer of many megabytes, so it is not sent to the chief: each worker writes its own file
`ckpt-<step>.position-<worker>-of-<workers>`, and the chief lists all of them, with sizes and checksums, in the marker.
"""

import hashlib
import os

import numpy as np
import tensorflow as tf
from absl import logging

from looplib import files
from looplib.checkpoint import marker
from looplib.checkpoint.marker import Measured
from looplib.cluster.collectives import Workers
from looplib.errors import gist

_ABSENT = bytes(hashlib.sha256().digest_size)


def write(path: str, position: bytes, workers: Workers) -> dict[str, Measured]:
    """Writes this worker's position, and waits until all workers have written theirs.

    A worker that cannot write its file logs a warning: the run is worth more than a quick resume.

    Args:
      path: the checkpoint's path. The chief has made room for its files before it calls this.
      position: what `TaskLoop.position` returned; b"" for none.
      workers: the workers.

    Returns:
      The files that were written, by name, for `commits.commit`; {} for one worker.
    """
    if workers.count == 1 or not (sizes := workers.gather(np.int64(len(position)))).any():
        return {}
    digest = _ABSENT
    if position:
        try:
            files.write_whole(_path_of(path, workers.index, workers.count), position, durable=False)
            digest = hashlib.sha256(position).digest()
        except (OSError, tf.errors.OpError) as error:
            logging.warning(
                "worker %d cannot write its position in the data beside %s (%s), so that a resumed run will skip the "
                "data already used; model_dir has to be writable by all workers",
                workers.index,
                path,
                gist(error),
            )
    digests = [row.tobytes() for row in workers.gather(np.frombuffer(digest, np.uint8))]
    return {
        os.path.basename(_path_of(path, index, workers.count)): {"bytes": int(size), "sha256": digest.hex()}
        for index, (size, digest) in enumerate(zip(sizes, digests))
        if digest != _ABSENT
    }


def read(path: str, workers: Workers) -> tuple[bytes, int]:
    """Returns the position that this worker has saved with a checkpoint; b"" if it has not.

    Args:
      path: the path of a verified checkpoint.
      workers: the workers.

    Returns:
      (position, the number of workers that saved positions in files of their own, or 0).
    """
    names, pattern = list(marker.read(path).files), marker.positions_of(os.path.basename(path))
    counts = [int(match[2]) for match in map(pattern.fullmatch, names) if match]
    own = _path_of(path, workers.index, workers.count)
    if os.path.basename(own) not in names:
        return b"", max(counts, default=0)
    with files.open_regular(own) as file:
        return file.read(), workers.count


def _path_of(path: str, index: int, count: int) -> str:
    return f"{path}.position-{index}-of-{count}"
