"""The newest records of a `metrics.jsonl`, without reading the whole file."""

import os

from looplib.base import files
from looplib.run.records import Record, parse_line


def read_newest(path: str, most: int = 1 << 16) -> list[Record]:
    """Returns the records in the last bytes of a local `metrics.jsonl`, in file order; [] where none can be read.

    Args:
      path: the file.
      most: how many bytes are read.
    """
    try:
        with files.open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            lines = file.read(most).splitlines()
    except (OSError, files.NotRegularError):
        return []
    return list(filter(None, map(parse_line, lines)))
