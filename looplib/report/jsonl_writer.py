"""JsonlWriter: the metrics of a run in one file of JSON lines."""

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping

from absl import logging

from looplib import files
from looplib.report.records import Record, cut_short, divided, key, read_jsonl
from looplib.report.writer import Writer


class JsonlWriter(Writer):
    """One JSON object a line: `{"step": 100, "split": "train", "loss": 0.25}`.

    Each (step, split) stands once: a record written again with other numbers replaces the first one. A number that is
    not finite is written as null, because JSON has no other word for it. The file is open only while a line is
    appended, so that a training and an evaluation job may share it. Records that are taken out are kept once in a file
    beside it, `metrics.voided.jsonl`.

    Args:
      path: the file, appended to if it exists.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._written = {key(record) for record in read_jsonl(path)}
        if cut_short(path):
            self._keep(lambda record: True)

    def resume(self, step: int, reported: dict[str, int]) -> None:
        """Takes out the records that the run will make again."""
        if any(r["step"] > reported.get(r["split"], step) for r in read_jsonl(self._path)):  # another job's, too
            self._keep(lambda record: record["step"] <= reported.get(record["split"], step))

    def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Appends one line."""
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        record = {"step": step, "split": split, **numbers}
        if (step, split) in self._written:
            if record in read_jsonl(self._path):
                return
            self._keep(lambda record: key(record) != (step, split))
        if cut_short(self._path):  # by a crash of another job, or by a full disk that the caller has survived
            self._keep(lambda record: True)
        with files.appending(self._path) as file:
            file.write(f"{json.dumps(record)}\n".encode())
        self._written.add((step, split))

    def sync(self) -> None:
        """See `Writer`."""
        with contextlib.suppress(FileNotFoundError):  # nothing was reported yet
            files.make_durable(self._path)
            files.make_durable(os.path.dirname(self._path) or ".")

    def _keep(self, condition: Callable[[Record], bool]) -> None:
        """Takes the other records out of the file, into the one beside it."""
        with files.rewriting(self._path):
            records, void = divided(read_jsonl(self._path), condition)
            if void:
                aside = ".voided".join(os.path.splitext(self._path))
                known = read_jsonl(aside)
                lines = "".join(json.dumps(record) + "\n" for record in void if record not in known)
                with files.appending(aside) as file:
                    file.write(lines.encode())
                logging.info("%d records of %s are void and are kept in %s", len(void), self._path, aside)
            files.write_whole(self._path, "".join(json.dumps(record) + "\n" for record in records))
        self._written = {key(record) for record in records}
