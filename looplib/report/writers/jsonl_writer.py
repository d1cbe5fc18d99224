"""JsonlWriter: metrics as lines of JSON, in `metrics.jsonl`."""

import math
from collections.abc import Mapping

from looplib.report.writers.contract import Writer
from looplib.run.records import RecordFile, key


class JsonlWriter(Writer):
    """One JSON object a line: `{"step": 100, "split": "train", "loss": 0.25}`.

    Each (step, split) stands once, see `RecordFile`. A number that is not finite is written as null, because JSON has
    no other word for it.

    Args:
      path: the file, appended to if it exists.
    """

    def __init__(self, path: str) -> None:
        self._file = RecordFile(path, key)

    def resume(self, step: int, reported: dict[str, int]) -> None:
        """Takes out the records that the run will make again."""
        self._file.resume(step, reported)

    def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Appends one line."""
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write({"step": step, "split": split, **numbers})

    def sync(self) -> None:
        """See `Writer`."""
        self._file.sync()
