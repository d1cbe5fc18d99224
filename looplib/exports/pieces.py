"""Pieces of predictions: some records encoded as the content of one file, of one of three kinds."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import google_crc32c
import numpy as np
import tensorflow as tf

from looplib.config.formats import PREDICTIONS
from looplib.errors import PluginError, PredictionError

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
        try:
            return row.decode()
        except UnicodeDecodeError as error:
            raise PredictionError(
                f"the prediction {name!r} has bytes that are not UTF-8, which JSON cannot hold; write tfrecord or "
                "parquet, or encode them with tf.io.encode_base64"
            ) from error
    row = _standard(row)
    if row.dtype.kind == "O" or (row.dtype.kind == "f" and not np.isfinite(row).all()):
        values = row.tolist()
        return _plain(name, values) if isinstance(values, (list, bytes)) else values if math.isfinite(values) else None
    return row.tolist()


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
    if isinstance(row, list):
        raise PredictionError(
            f"the prediction {name!r} is ragged in more than one dimension, which a tf.train.Example cannot hold; "
            "write jsonl or parquet"
        )
    row = _standard(row) if not isinstance(row, bytes) else np.asarray(row, object)
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
    row = np.asarray(row, object) if isinstance(row, bytes) else _standard(row)
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
    zip(PREDICTIONS, (_jsonl, _tfrecord, _parquet), strict=True)
)
