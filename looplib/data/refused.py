"""Which record a `dataset` function cannot process, once a run has failed at its batch."""

import itertools
import time
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf
from absl import logging

from looplib.base.messages import gist
from looplib.data.input_context import InputContext

_STEPS = 64  # whose batches are tried: many may be read at once
_SECONDS = 10.0  # that this may take
_RECORDS = 64  # after a bad one; at least one of them has to be good


def find(dataset: Callable[[InputContext], tf.data.Dataset], context: InputContext, step: int) -> str | None:
    """Tries the records of the next batches one by one, and returns which one cannot be processed.

    Args:
      dataset: the `dataset` function of a task, whose stages make each batch of one batch of records.
      context: of the pipeline that failed.
      step: global batches that were consumed before.

    Returns:
      Such as "record 17 of a.tfrecord, at byte 1234"; None if no record is to blame: each one fails, or none does by
      itself, or it cannot be found out.
    """
    if not context.asked.positioned or len(context.asked.calls) != 1 or context.asked.reader is None:
        return None
    try:
        following = context.again(start_step=max(0, step - 1))  # one replica may have counted the step that failed
        dataset(following)
        batches = following.asked.last.positions.unbatch().as_numpy_iterator()
        positions = np.concatenate(list(itertools.islice(batches, _STEPS * following.replicas_per_pipeline)))
        alone = context.again(only=positions)
        found = _first_bad(iter(dataset(alone)), len(positions))
        if found is None:
            return None
        (number,) = next(alone.asked.last.ids.skip(found).as_numpy_iterator())
        return alone.asked.reader.name_of(int(number))
    except Exception as error:  # the run has failed anyway, and its own error is the one to show
        logging.debug("which record the run failed at cannot be found out: %s", gist(error))
        return None


def _first_bad(records: Iterator, count: int) -> int | None:
    """Returns the place of the first record that fails, if another one does not."""
    start, bad, any_good = time.monotonic(), None, False
    for place in range(count):
        try:
            next(records)
            any_good = True
        except tf.errors.OpError:
            bad = place if bad is None else bad
        if bad is not None and (any_good or place - bad >= _RECORDS):
            break
        if time.monotonic() - start > _SECONDS:
            return None
    return bad if any_good else None
