"""The folder of the predictions for one data set: its pieces, how they are written, and the index of those finished."""

import csv
import dataclasses
import hashlib
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import google_crc32c
import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base import files, folders
from looplib.base.decoding import MisfitError, decode, parse_json
from looplib.base.messages import gist, join_names, with_cure
from looplib.config.formats import PREDICTIONS
from looplib.errors import PluginError, PredictionError, UsageError

Row = Any  # what one example has of an output: a numpy array or number, or lists of these where it is ragged
Record = dict[str, Row]  # the rows of one example, by the names of the outputs


def check_kind(kind: str) -> None:
    """Raises `UsageError` for an unknown kind of files, or one whose package is not installed."""
    if kind not in KINDS:
        raise PredictionError(f"the predictions' format is {kind!r}; expected one of {', '.join(KINDS)}")
    if kind == "parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise PluginError(
                "the predictions' format is parquet, and pyarrow is not installed; install it (pip install pyarrow), "
                "or use jsonl or tfrecord"
            ) from error


def encode(kind: str, records: Sequence[Record]) -> bytes:
    """Returns the content of a file with some records.

    Args:
      kind: a name in `KINDS`.
      records: at least one, all with one set of names.

    Raises:
      UsageError: for a value that this kind of file cannot hold.
    """
    return KINDS[kind](records)


def _jsonl(records: Sequence[Record]) -> bytes:
    lines = (json.dumps({name: _plain(name, row) for name, row in record.items()}) for record in records)
    return "".join(f"{line}\n" for line in lines).encode()


def _plain(name: str, row: Row) -> Any:
    """Returns a row as JSON holds it; a number that is not finite becomes None, because JSON has no word for it."""
    if isinstance(row, list):
        return [_plain(name, item) for item in row]
    if isinstance(row, bytes):
        return _text(name, row)
    row = _standard(row)
    if row.dtype.kind == "O" or (row.dtype.kind == "f" and not np.isfinite(row).all()):
        values = row.tolist()
        return _plain(name, values) if isinstance(values, (list, bytes)) else values if math.isfinite(values) else None
    return row.tolist()


def _text(name: str, row: bytes) -> str:
    try:
        return row.decode()
    except UnicodeDecodeError as error:
        raise PredictionError(
            f"the prediction {name!r} has bytes that are not UTF-8, which JSON and CSV cannot hold; write tfrecord or "
            "parquet, or encode them with tf.io.encode_base64"
        ) from error


def _csv(records: Sequence[Record]) -> bytes:
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    header: list[str] = []
    for record in records:
        cells = [cell for name, row in record.items() for cell in _cells(name, row)]
        names = [name for name, _ in cells]
        if not header:
            header = names
            writer.writerow(header)
        if names != header or len(set(names)) < len(names):
            raise PredictionError(
                "the predictions have no columns that each record has once, as CSV needs them: an output has rows of "
                "several lengths, or a name such as 'a[0]' beside 'a'; pad or rename it, or write jsonl or parquet"
            )
        writer.writerow([text for _, text in cells])
    return sink.getvalue().encode()


def _cells(name: str, row: Row) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of each element of a row, such as `probabilities[0]`."""
    for place, value in np.ndenumerate(_dense(name, row, "CSV")):
        text = _text(name, value) if isinstance(value, bytes) else str(value)
        yield name + "".join(f"[{number}]" for number in place), text


def _dense(name: str, row: Row, kind: str) -> np.ndarray:
    """Returns a row as an array; raises `UsageError` for one of several lengths, which a kind of file cannot hold."""
    if isinstance(row, list):
        raise PredictionError(
            f"the prediction {name!r} is ragged in more than one dimension, which {kind} cannot hold; write jsonl or "
            "parquet"
        )
    return np.asarray(row, object) if isinstance(row, bytes) else _standard(row)


def _standard(row: Any) -> np.ndarray:
    """Returns an array of a type that every reader knows; float16 and bfloat16 become float32."""
    row = np.asarray(row)
    return row if row.dtype.kind in "biuO" or row.dtype in (np.float32, np.float64) else row.astype(np.float32)


def _tfrecord(records: Sequence[Record]) -> bytes:
    parts = []
    for record in records:
        features = {}
        for name, row in record.items():
            for key, feature in _features(name, row).items():
                if key in features or (key != name and key in record):
                    raise PredictionError(
                        f"the predictions have an output {key!r} beside {name!r}, whose shape a tf.train.Example has "
                        "by that name; give it another name, or write jsonl or parquet"
                    )
                features[key] = feature
        example = tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
        length = len(example).to_bytes(8, "little")
        parts += [length, _checksum(length), example, _checksum(example)]
    return b"".join(parts)


def _checksum(content: bytes) -> bytes:
    """Returns what a TFRecord file has after some bytes: their CRC-32C, masked."""
    value = google_crc32c.value(content)
    return (((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


def _features(name: str, row: Row) -> dict[str, tf.train.Feature]:
    """Returns a row's values, and for a row of several dimensions `<name>/shape`."""
    row = _dense(name, row, "a tf.train.Example")
    values = row.reshape(-1)
    if row.dtype.kind == "O":
        feature = tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    elif row.dtype.kind == "f":
        feature = tf.train.Feature(float_list=tf.train.FloatList(value=values))
    else:
        if row.dtype.kind == "u" and values.size and values.max() > np.iinfo(np.int64).max:
            raise PredictionError(
                f"the prediction {name!r} has {values.max()}, which the int64 of a tf.train.Example cannot hold; write "
                "jsonl or parquet"
            )
        feature = tf.train.Feature(int64_list=tf.train.Int64List(value=values.astype(np.int64)))
    shape = tf.train.Feature(int64_list=tf.train.Int64List(value=row.shape))
    return {name: feature, **({f"{name}/shape": shape} if row.ndim > 1 else {})}


def _parquet(records: Sequence[Record]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    columns = {}
    for name in records[0]:
        rows = [record[name] for record in records]
        columns[name] = pyarrow.array([_nested(row) for row in rows], _arrow_type(rows[0]))
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue().to_pybytes()


def _nested(row: Row) -> Any:
    if isinstance(row, list):
        return [_nested(item) for item in row]
    return row if isinstance(row, bytes) else _standard(row).tolist()


def _arrow_type(row: Row) -> Any:
    """Returns the type of a column, which does not depend on its values."""
    import pyarrow

    if isinstance(row, RaggedRow):
        return pyarrow.list_(_arrow_type(row.example))
    row = _dense("", row, "parquet")
    kind = pyarrow.binary() if row.dtype.kind == "O" else pyarrow.from_numpy_dtype(row.dtype)
    for _ in range(row.ndim):
        kind = pyarrow.list_(kind)
    return kind


class RaggedRow(list):
    """The rows of a row that is ragged in more than one dimension.

    Attributes:
      example: an empty row of the inner dimensions, which has their type.
    """

    def __init__(self, rows: Sequence[Row], example: Row) -> None:
        super().__init__(rows)
        self.example = example


def rows_of(values: np.ndarray, splits: Sequence[np.ndarray]) -> list[Row]:
    """Divides the values of an output into the rows of its examples.

    Args:
      values: `[batch, ...]`, or the flat values of a ragged tensor.
      splits: the row splits of a ragged tensor, the outermost first; none for a dense one.
    """
    if not splits:
        return list(values)
    outer, *inner = splits
    rows = rows_of(values, inner) if inner else values
    parts = [rows[start:stop] for start, stop in zip(outer[:-1], outer[1:])]
    if not inner:
        return parts
    example = rows_of(values[:0], [np.zeros(2, np.int64)] * len(inner))[0]
    return [RaggedRow(part, example) for part in parts]


KINDS: dict[str, Callable[[Sequence[Record]], bytes]] = dict(
    zip(PREDICTIONS, (_jsonl, _tfrecord, _parquet, _csv), strict=True)
)


_VERSION, _INDEX = 2, "_index.json"
_MOST_BYTES = 1 << 27  # of an index, which has about 200 for a piece
_MOST_STEPS = 1 << 40


@dataclasses.dataclass(frozen=True)
class PredictionSource:
    """The source of the predictions of a folder, and how they are written. All pieces have the one source.

    Attributes:
      step: the global step of the weights.
      weights: a checksum of the weights.
      data: a checksum of the data, or "" if it is not known; see `Evaluator.predict_checksum`.
      examples: the number of examples, where it is known before.
      outputs: the structure of what is predicted.
      global_batch_size: examples of a step.
      replicas: where the batches of the data set, and so its position, depend on their number; else None.
      format: the kind of files, a name in `formats.PREDICTIONS`.
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
    data: str = ""


@dataclasses.dataclass(frozen=True)
class PredictionPosition:
    """A place in the predictions.

    Attributes:
      records: the records up to it.
      step: the step of the data set that the last of these records comes from.
      within: the number of records of this step up to it.
      last_example: a checksum of the example that the last record was predicted for.
    """

    records: int = 0
    step: int = 0
    within: int = 0
    last_example: int = 0


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece on disk.

    Attributes:
      bytes: its size.
      sha256: its checksum.
      end: the place that it reaches.
    """

    bytes: int
    sha256: str
    end: PredictionPosition


@dataclasses.dataclass(frozen=True)
class Index:
    """The content of `_index.json`.

    Attributes:
      source: see `PredictionSource`.
      pieces: the finished ones.
      complete: whether the data has ended.
    """

    source: PredictionSource
    pieces: list[Piece]
    complete: bool

    def __post_init__(self) -> None:
        before, last = PredictionPosition(), len(self.pieces) if self.complete else 0
        for number, piece in enumerate(self.pieces, 1):
            end, full = piece.end, number * self.source.piece
            fits = (
                piece.bytes >= 0
                and re.fullmatch("[0-9a-f]{64}", piece.sha256)
                and (end.records == full or (number == last and before.records < end.records < full))
                and (before.step, before.within) < (end.step, end.within)
                and end.step < _MOST_STEPS
                and 0 < end.within <= end.records
                and abs(end.last_example) <= 2**63
            )
            if not fits:
                raise MisfitError(f"what it says of piece {number - 1} cannot be")
            before = end
        if self.source.format not in KINDS:
            raise MisfitError(f"its format is {self.source.format!r:.50}")


class PredictionFolder:
    """Takes the records of the steps in order, and writes them in pieces of one size.

    A piece is a file that appears whole. Only then does the index count it, so a process that is killed at any moment
    leaves finished pieces, which the next one does not repeat. Their sizes and checksums are in the index: a finished
    piece that is damaged, and those after it, are predicted again.

    Args:
      path: the folder, which this process alone writes.
      check: called before something is written; raises `UsageError` if another process may write there.
      shown: what to remove to begin anew, such as its URL in a store.

    Attributes:
      path: the folder.
      finished: how far the intact pieces reach. The next start continues with the step `finished.step`.

    Raises:
      UsageError: for a folder of other files.
    """

    def __init__(self, path: str, check: Callable[[], None], shown: str) -> None:
        self.path, self._check, self._shown = path, check, shown
        self._index = os.path.join(path, _INDEX)
        self._buffer: list[Record] = []
        self._source: PredictionSource | None = None
        earlier = self._read()
        self._earlier = earlier and earlier.source
        self._pieces = pieces = self._intact(earlier) if earlier else []
        self._complete = earlier is not None and earlier.complete and len(pieces) == len(earlier.pieces)
        self.finished = self._newest = pieces[-1].end if pieces else PredictionPosition()
        self._step, self._resumes = self.finished.step, self.finished.records > 0

    def _read(self) -> Index | None:
        try:
            if not os.path.lexists(self._index) and not os.path.exists(self._index):
                if self._others():
                    raise ValueError("there are pieces, and no _index.json")
                return None
            index = parse_json(files.read_text(self._index, _MOST_BYTES))
            if index["version"] != _VERSION:
                raise ValueError(f"its version is {index['version']!r:.50}, expected {_VERSION}")
            return decode(Index, index, strict=True)
        except (OSError, tf.errors.OpError, ValueError, KeyError, TypeError) as error:
            raise PredictionError(
                f"{self._index} cannot be read ({gist(error)}); remove {self._shown}, or name another directory "
                "(--predictions)"
            ) from error

    def _others(self) -> list[str]:
        """Returns the names of files that look like pieces and are not finished ones."""
        known = {_name(number, self._source.format) for number in range(len(self._pieces))} if self._source else ()
        return sorted(name for name in os.listdir(self.path) if name.startswith("piece-") and name not in known)

    def _intact(self, index: Index) -> list[Piece]:
        """Returns the finished pieces up to the first damaged one."""
        for number, piece in enumerate(index.pieces):
            path = folders.inside(self.path, _name(number, index.source.format))
            if reason := files.difference(path, piece.bytes, piece.sha256):
                logging.warning("%s is damaged (%s); it and the pieces after it are predicted again", path, reason)
                return index.pieces[:number]
        return index.pieces

    def begin(self, source: PredictionSource) -> None:
        """Starts to write, or continues.

        Raises:
          UsageError: if the pieces that are there have another source, or nothing can be written.
        """
        now, earlier = dataclasses.asdict(source), self._earlier and dataclasses.asdict(self._earlier)
        # "" is what an older version did not note.
        if different := [name for name in now if earlier and earlier[name] not in ("", now[name])]:
            changes = ", ".join(f"{name} was {earlier[name]!r:.80} and is {now[name]!r:.80}" for name in different)
            raise PredictionError(
                f"the predictions in {self.path} were begun with another source ({changes}); remove "
                f"{self._shown}, or name another directory (--predictions)"
            )
        self._source = source
        folders.remove_unfinished(self.path, 0.0)  # of processes that are gone, as this one has the folder
        self._write_index()

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
        if self._complete and len(records) > first:
            self._refuse()
        for number in range(first, len(records)):
            self._buffer.append(records[number])
            self._newest = PredictionPosition(self._newest.records + 1, self._step, number + 1, int(examples[number]))
            if len(self._buffer) == self._source.piece:
                self._write_piece()
        self._step += 1

    def end(self) -> None:
        """Writes the last piece, once the data has ended.

        Raises:
          UsageError: if there are other pieces, which a reader would take for predictions.
        """
        if self._resumes:
            self._refuse()
        self._complete = True  # in one with the last piece, which may be smaller
        self._write_piece() if self._buffer else self._write_index()
        if others := self._others():
            raise PredictionError(
                f"{self.path} has {ascii(join_names(others))} besides the {len(self._pieces)} pieces of the "
                "predictions; move away what is not a piece, and run the same command again"
            )

    def _refuse(self) -> None:
        raise PredictionError(
            f"the data set is not the one that the predictions in {self.path} were begun with: its examples differ "
            f"at record {self.finished.records}; remove {self._shown}, or name another directory (--predictions)"
        )

    def _write_piece(self) -> None:
        content = encode(self._source.format, self._buffer)
        self._write(_name(len(self._pieces), self._source.format), content)
        self._buffer = []
        self.finished = self._newest
        self._pieces.append(Piece(len(content), hashlib.sha256(content).hexdigest(), self.finished))
        self._write_index()

    def _write_index(self) -> None:
        index = dataclasses.asdict(Index(self._source, self._pieces, self._complete))
        self._write(_INDEX, json.dumps({"version": _VERSION, **index}) + "\n")

    def _write(self, name: str, content: str | bytes) -> None:
        self._check()
        path = os.path.join(self.path, name)
        try:
            if os.path.isdir(path):  # of somebody else's, which no file can replace
                logging.warning("%s is a directory; moved to %s", path, folders.move_aside(self.path, name, "_"))
            files.write_whole(path, content)
        except (OSError, tf.errors.OpError) as error:
            self._check()  # the folder may have been moved just now
            raise unwritable(self.path, error) from error


def _name(number: int, kind: str) -> str:
    return f"piece-{number:05d}.{kind}"


def unwritable(path: str, error: Exception) -> UsageError:
    """Returns the error of a folder of predictions that cannot be written."""
    what = with_cure(error, "name another directory (--predictions)")
    return PredictionError(f"the predictions cannot be written to {path}: {what}; then run the same command again")
