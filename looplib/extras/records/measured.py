"""Numbers of records, computed once for all: lengths, and whether a filter keeps a record."""

import contextlib
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from looplib import files
from looplib.errors import UsageError, with_cure
from looplib.extras.records import reading
from looplib.extras.records.order import Picks
from looplib.extras.records.sources import Source, opened

_BATCH = 256  # records that the function is given at once
_HEAD = 1 << 12  # bytes in front of the numbers in a file, at most
_SAMPLE = 256  # records for which what is kept is computed again


def measure(source: Source | str, function: Callable[[Any], tf.Tensor], *, cache: str | None = None) -> np.ndarray:
    """Computes a number for each record of a source, in one parallel pass.

    Plans need such numbers before a run starts, so that each position of the run holds an example.

        lengths = looplib.measure(records, lambda record: tf.strings.length(record), cache="/data/lengths.npy")
        context.records(looplib.Kept(lengths < 512, records))

    What is kept in `cache` is used again if it has as many numbers as there are records, and if the function still
    gives the same for 256 records spread over the source. Otherwise all are computed again, with a warning. A change
    of the function that makes a difference for few records may be missed: give each version a file of its own.

    Args:
      source: records as `looplib.open_records` returns them, or the names of their files.
      function: from a batch of records, as `context.records` gives them, to a number or bool for each, `[b]`; of
        TensorFlow ops.
      cache: the file to keep the numbers in, as `numpy.save` writes it; None keeps nothing.

    Returns:
      `[n]`, in the order of the records.

    Raises:
      UsageError: if there is no record, or the function gives something else than one number for each.
    """
    source = opened(source)
    if not len(source):
        raise UsageError("looplib.measure was given a source without records; check where the data is read from")
    kept = _load(cache, _HEAD + len(source) * np.dtype(complex).itemsize) if cache else None
    if kept is not None:
        sample = np.unique(np.linspace(0, len(source) - 1, _SAMPLE).astype(np.int64))
        if kept.shape == (len(source),) and np.array_equal(_computed(source, function, sample), kept[sample]):
            return kept
        logging.warning("the numbers in %s are of other records, or of another function; computing them again", cache)
    found = _computed(source, function, np.arange(len(source)))
    if cache:
        content = io.BytesIO()
        np.save(content, found, allow_pickle=False)
        try:
            files.write_whole(cache, content.getvalue(), durable=False)
        except (OSError, tf.errors.OpError) as error:
            logging.warning("the numbers of records cannot be kept in %s: %s", cache, with_cure(error))
    return found


def _load(path: str, most: int) -> np.ndarray | None:
    with contextlib.suppress(Exception), files.open_regular(path) as file:  # numpy's of a damaged head have many types
        return np.lib.format.read_array(io.BytesIO(file.read(most)), allow_pickle=False)
    return None


def _computed(source: Source, function: Callable[[Any], tf.Tensor], numbers: np.ndarray) -> np.ndarray:
    picks = (
        tf.data.Dataset.from_tensor_slices(numbers)
        .batch(_BATCH)
        .map(lambda ids: (Picks(ids[None], ids[None], ids[None] + 1),))
    )
    batches = reading.read(
        source, picks, reading.RecordReads(source, by_pieces=False, may_be_by_pieces=False)
    ).unbatch()
    measured = batches.map(function, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).prefetch(tf.data.AUTOTUNE)
    spec = measured.element_spec
    found = [] if tf.nest.is_nested(spec) else list(measured.as_numpy_iterator())
    if not found or any(part.ndim != 1 for part in found) or sum(map(len, found)) != len(numbers):
        raise UsageError(
            f"the function of looplib.measure gives {spec} for a batch; expected one number for each record, [b]"
        )
    return np.concatenate(found)
