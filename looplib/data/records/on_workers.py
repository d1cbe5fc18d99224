"""Records that the workers of a coordinator read (parameter servers).

The coordinator makes the graph of a pipeline, and opens the files for their number and structure. Each worker opens
them by itself, and the pipeline calls the process that it runs in for records by number. So the order, the position and
what happens to damaged records are those of any other strategy. What only the coordinator has, it reads for all.
"""

import dataclasses
import glob
import hashlib
import json
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base.messages import join_names
from looplib.cluster import parameter_servers
from looplib.data.context import BadRecords
from looplib.data.records.files import absolute
from looplib.data.records.index import Numbered, Opening
from looplib.data.records.reader import changes, fingerprint, tolerant
from looplib.data.records.reading import Call, RecordReads, RecordSupply
from looplib.data.records.sources import Chain, Source, Subset, open_records
from looplib.errors import RecordsError, UsageError

_supplies: dict[bytes, RecordSupply] = {}  # of this process, by the key of what was ordered
_opening = threading.Lock()


@dataclasses.dataclass(frozen=True)
class _Order:
    """What a worker reads, sent as JSON. Arrays go beside it: the ids of a `Subset`, and `kept` of each source."""

    openings: list[Opening]
    names: list[str] | None  # of the sources of a `Chain`; None for a single source
    fingerprint: dict[str, str]
    by_pieces: bool
    training: bool
    most: int  # see `BadRecords`
    folder: str | None  # see there

    def sources(self) -> Source:
        """Opens the files."""
        parts = [open_records(list(map(glob.escape, one.paths)), one.format, **one.options) for one in self.openings]
        return parts[0] if self.names is None else Chain(parts, self.names)


def caller(
    source: Source, kept: Sequence[np.ndarray | None], reads: RecordReads, training: bool, bad: BadRecords
) -> Call | None:
    """Opens a source in the process that runs the pipeline; returns how this calls the supply there.

    Returns None for a source that only this process has, such as an object of the user's.

    Args:
      source: the records.
      kept: of each source, see `tolerant`.
      reads: says whether neighbouring records are read at once.
      training: whether others come in place of damaged records.
      bad: the damaged records that may be left out.
    """
    ids, whole = (source.ids, source.source) if isinstance(source, Subset) else (None, source)
    names, parts = (whole.names, whole.sources) if isinstance(whole, Chain) else (None, [whole])
    openings = [part.opening for part in parts if isinstance(part, Numbered) and part.opening is not None]
    if len(openings) < len(parts):
        logging.log_first_n(
            logging.WARNING,
            "context.records was given a %s, which this process alone has, so that it reads the records for all "
            "workers; records in files (looplib.open_records) are read by each worker itself",
            1,
            join_names([type(part).__name__ for part in parts]),
        )
        return None
    folder = absolute([bad.folder])[0] if bad.folder else None
    order = _Order(openings, names, fingerprint([source]), reads.by_pieces, training, bad.most, folder)
    text = json.dumps(dataclasses.asdict(order), default=int).encode()
    arrays = [np.zeros(0, np.int64) if array is None else array for array in (ids, *kept)]
    key = hashlib.sha256(b"".join([text, *(array.tobytes() for array in arrays)])).hexdigest().encode()
    given = parameter_servers.called(_open, [key, text, *arrays], tf.string)
    with tf.control_dependencies([tf.debugging.assert_equal(given, key)]):  # another program has no such function
        given = tf.identity(given)

    def call(method: Callable[..., Any], inputs: list[tf.Tensor], types: Any) -> Any:
        return parameter_servers.called(_METHODS[method], [given, *inputs], types)

    return call


def _open(key: bytes, text: bytes, ids: np.ndarray, *kept: np.ndarray) -> bytes:
    """Opens what was ordered, unless this process has; returns the key."""
    with _opening:
        if key in _supplies:
            return key
        values = json.loads(text)
        order = _Order(**{**values, "openings": [Opening(**one) for one in values["openings"]]})
        try:
            source = order.sources()
            source = Subset(source, ids) if len(ids) else source
            if found := changes(order.fingerprint, fingerprint([source])):
                raise RecordsError(f"they differ from those of the coordinator: {join_names(found)}")
        except UsageError as error:
            raise RecordsError(
                f"the worker on {socket.gethostname()} cannot read the records: {error}; with the strategy "
                "parameter_server all workers must read the same files by the same paths, such as of a shared folder"
            ) from error
        reads = RecordReads(source, order.by_pieces, order.by_pieces)
        if order.most:
            bad, others = BadRecords(order.most, order.folder), [array if len(array) else None for array in kept]
            source = tolerant(source, bad, order.training, others)
        _supplies[key] = RecordSupply(source, reads, may_lack=order.most > 0 and not order.training)
    return key


def _announce(key: bytes, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    return _supplies[key].announce(starts, stops)


def _fetch(key: bytes, *picks: np.ndarray) -> list[np.ndarray]:
    return _supplies[key].fetch(*picks)


_METHODS = {RecordSupply.announce: _announce, RecordSupply.fetch: _fetch}
