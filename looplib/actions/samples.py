"""Batches of a loop's data for a check, read so that neither the position in the data nor a random state changes."""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from looplib.cluster.replicas import Share
from looplib.compat.pipelines import leaves_no_trace
from looplib.data.host_stream import HostStream
from looplib.loop.base import Loop
from looplib.loop.task_loop import TaskLoop


def stream_of(loop: Loop) -> HostStream | None:
    """Returns the stream of a loop that reads its data by a plain iterator of this process; None for any other."""
    stream = loop.data.stream if isinstance(loop, TaskLoop) else None
    return stream if isinstance(stream, HostStream) else None


def batches(loop: Loop) -> Iterator[Any] | None:
    """Returns the batches of a replica, as `step_fn` gets them, from where the loop's data was built to begin.

    An iterator of its own reads them. None where that could change what the loop reads: where the pipeline has a
    state that its iterators share, such as the seeds of a shuffle or a Python function.
    """
    stream = stream_of(loop)
    if stream is None:
        return None
    context = stream.context()
    known = [call.batches for call in context.asked.calls if call.batches is not None] if context else []
    if not leaves_no_trace(stream.dataset, known):
        return None
    reads = context is not None and context.asked.reader is not None
    return _read(stream.dataset, stream.arrays, reads)


def first_rows(batch: Any, most: int) -> Any:
    """Returns the first examples of a batch; all, where not every part of it can be cut."""
    leaves = tf.nest.flatten(batch)
    if not all(isinstance(leaf, (tf.Tensor, tf.RaggedTensor)) for leaf in leaves):
        return batch
    return tf.nest.map_structure(lambda leaf: leaf[:most] if leaf.shape.rank else leaf, batch)


def _read(dataset: tf.data.Dataset, arrays: Any, calls_python: bool) -> Iterator[Any]:
    """Yields the batches of a data set, whose functions may call Python."""
    options = tf.data.Options()
    options.autotune.enabled = False  # the end of an iterator that tunes itself may take long, see `HostStream.end`
    dataset = dataset.with_options(options)
    iterator = iter(dataset)
    try:
        while (batch := iterator.get_next_as_optional()).has_value():  # the end of a loop over it would be logged
            yield _rows(batch.get_value(), arrays)
    finally:
        if calls_python:  # in an op, which lets other threads run Python; the end of a Python object would not
            handle, *_ = tf.nest.flatten(iterator, expand_composites=True)
            nothing = tf.data.experimental.to_variant(dataset.take(0))
            with tf.device("/cpu:0"):
                tf.raw_ops.MakeIterator(dataset=nothing, iterator=handle)


def _rows(batch: Any, arrays: Any) -> Any:
    """Returns a batch without what tells a replica its share, and with rows in place of their numbers."""
    batch = batch.inputs if isinstance(batch, Share) else batch
    return batch if arrays is None else tf.nest.map_structure(lambda array: tf.gather(array, batch), arrays)
