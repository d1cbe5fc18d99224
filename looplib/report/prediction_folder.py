"""The folder of the predictions for one data set: its pieces, and the index that says which of them are finished."""

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from looplib import files
from looplib.errors import UsageError, gist
from looplib.report.pieces import Record, encode

_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Source:
    """What the predictions of a folder are made from, and how they are written. All pieces have the one source.

    Attributes:
      step: the global step of the weights.
      weights: a checksum of the weights.
      examples: the number of examples, where it is known before.
      outputs: the structure of what is predicted.
      global_batch_size: examples of a step.
      replicas: where the batches of the data set, and so its position, depend on their number; else None.
      format: the kind of files, a name in `pieces.KINDS`.
      piece: records of a piece.
    """

    step: int
    weights: str
    examples: int | None
    outputs: str
    global_batch_size: int
    replicas: int | None
    format: str
    piece: int


@dataclasses.dataclass(frozen=True)
class Finished:
    """How far the pieces on disk reach.

    Attributes:
      pieces: their number.
      records: the records in them.
      step: the step of the data set that the last of these records comes from.
      within: the number of records of this step up to it.
      last_example: a checksum of the example that it was predicted for.
      complete: whether the data has ended.
    """

    pieces: int = 0
    records: int = 0
    step: int = 0
    within: int = 0
    last_example: int = 0
    complete: bool = False


class PredictionFolder:
    """Takes the records of the steps in order, and writes them in pieces of one size.

    A piece is a file that appears whole. Only then does the index count it, so a process that is killed at any moment
    leaves finished pieces, which the next one does not repeat.

    Args:
      path: the folder, made if missing.

    Attributes:
      path: the folder.
      finished: how far the pieces reach. The next start continues with the step `finished.step`.

    Raises:
      UsageError: for a folder of other files.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._index = os.path.join(path, "_index.json")
        self._buffer: list[Record] = []
        self._source: Source | None = None
        self._earlier, self.finished = self._read()
        self._step, self._resumes = self.finished.step, self.finished.records > 0
        self._newest = self.finished

    def _read(self) -> tuple[dict[str, Any], Finished]:
        if not tf.io.gfile.exists(self._index):
            if tf.io.gfile.isdir(self.path) and any(n.startswith("piece-") for n in tf.io.gfile.listdir(self.path)):
                raise UsageError(f"{self.path} has pieces and no _index.json; remove it, or name another --predictions")
            return {}, Finished()
        try:
            index = files.parse_json(files.read_text(self._index))
            if index["version"] != _VERSION:
                raise ValueError(f"its version is {index['version']!r:.50}")
            return dict(index["source"]), Finished(**index["finished"])
        except (OSError, tf.errors.OpError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{self._index} cannot be read ({gist(error)}); remove {self.path}, or name another --predictions"
            ) from error

    def begin(self, source: Source) -> None:
        """Starts to write, or continues.

        Raises:
          UsageError: if the pieces that are there have another source, or nothing can be written.
        """
        now = dataclasses.asdict(source)
        if different := [name for name in now if self._earlier and self._earlier.get(name) != now[name]]:
            changes = ", ".join(
                f"{name} was {self._earlier.get(name)!r:.80} and is {now[name]!r:.80}" for name in different
            )
            raise UsageError(
                f"the predictions in {self.path} were begun with another source ({changes}); remove the directory, or "
                "name another --predictions"
            )
        self._source = source
        try:
            tf.io.gfile.makedirs(self.path)
            self._write_index()
        except (OSError, tf.errors.OpError) as error:
            raise UsageError(
                f"the predictions cannot be written to {self.path} ({gist(error)}); name another --predictions"
            ) from error

    def take(self, records: Sequence[Record], examples: np.ndarray) -> None:
        """Takes the records of the next step, and writes the pieces that are full.

        Args:
          records: a record for each example.
          examples: int64 `[n]`, a checksum of each example.

        Raises:
          UsageError: if these are not the examples that the pieces on disk end with.
        """
        first = 0
        if self._resumes:
            first = self.finished.within
            if len(records) < first or examples[first - 1] != self.finished.last_example:
                self._refuse()
            self._resumes = False
        if self.finished.complete and len(records) > first:
            self._refuse()
        for number in range(first, len(records)):
            self._buffer.append(records[number])
            self._newest = dataclasses.replace(
                self._newest,
                records=self._newest.records + 1,
                step=self._step,
                within=number + 1,
                last_example=int(examples[number]),
            )
            if len(self._buffer) == self._source.piece:
                self._write_piece()
        self._step += 1

    def end(self) -> None:
        """Writes the last piece, once the data has ended."""
        if self._resumes:
            self._refuse()
        if self._buffer:
            self._write_piece()
        self.finished = dataclasses.replace(self.finished, complete=True)
        self._write_index()

    def _refuse(self) -> None:
        raise UsageError(
            f"the data set is not the one that the predictions in {self.path} were begun with: its examples differ "
            f"at record {self.finished.records}; remove the directory, or name another --predictions"
        )

    def _write_piece(self) -> None:
        kind, number = self._source.format, self._newest.pieces
        path = os.path.join(self.path, f"piece-{number:05d}.{kind}")
        files.write_whole(path, encode(kind, self._buffer))
        self._buffer = []
        self.finished = self._newest = dataclasses.replace(self._newest, pieces=number + 1)
        self._write_index()

    def _write_index(self) -> None:
        index = {
            "version": _VERSION,
            "source": dataclasses.asdict(self._source),
            "finished": dataclasses.asdict(self.finished),
        }
        files.write_whole(self._index, json.dumps(index, indent=1) + "\n")
