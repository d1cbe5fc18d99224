"""Event files, which TensorBoard reads: appended to, read up to a damaged event, and rewritten completely."""

import os
import platform
import re
import textwrap
import time
from collections.abc import Iterable, Mapping

import numpy as np
import tensorflow as tf
from absl import logging
from google.protobuf.message import DecodeError

from looplib import files, folders
from looplib.errors import gist
from looplib.report.shown import Histogram, Images, Shown

Event = tf.compat.v1.Event


class EventFile:
    """A new event file, which others can read up to the last event written.

    Its name sorts after earlier names, also if the clock was set back: TensorBoard reads files in the order of names.

    `tf.summary` would write from a queue, and an event for each metric, so that a crash may part them.

    Args:
      directory: the run directory.
      names: plain names of the folders from there on, made if missing.

    Attributes:
      path: the file.
    """

    def __init__(self, directory: str, *names: str) -> None:
        folder = folders.make_folder(directory, *names)
        found = (re.match(r"events\.out\.tfevents\.(\d{10}\.\d{6})\.", name) for name in files.names_in(folder))
        begun = max([time.time(), *(float(match[1]) + 1e-6 for match in found if match)])
        name = f"events.out.tfevents.{begun:.6f}.{platform.node()}.{os.getpid()}.v2"
        self.path = os.path.join(folder, name)
        self._writer = tf.io.TFRecordWriter(self.path)
        self.write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, event: Event) -> None:
        """Appends an event."""
        self._writer.write(event.SerializeToString())
        self._writer.flush()
        self._length = tf.io.gfile.stat(self.path).length

    def intact(self) -> bool:
        """Returns whether no append failed and no other job rewrote or removed the file, losing new events."""
        return tf.io.gfile.exists(self.path) and tf.io.gfile.stat(self.path).length == self._length

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


def event_of(step: int, metrics: Mapping[str, float]) -> Event:
    """Returns the event that holds what `tf.summary.scalar` would write for each metric."""
    metadata = tf.compat.v1.SummaryMetadata(plugin_data={"plugin_name": "scalars"})
    values = [
        tf.compat.v1.Summary.Value(tag=name, tensor=tf.make_tensor_proto(np.float32(value)), metadata=metadata)
        for name, value in metrics.items()
    ]
    return Event(wall_time=time.time(), step=step, summary=tf.compat.v1.Summary(value=values))


def event_of_media(step: int, shown: Mapping[str, Shown]) -> Event:
    """Returns the event that holds what `tf.summary.image`, `text` and `histogram` would write for each name."""
    values = []
    for name, each in shown.items():
        plugin, content, kind = _for_tensorboard(each)
        metadata = tf.compat.v1.SummaryMetadata(plugin_data={"plugin_name": plugin}, data_class=kind)
        values.append(tf.compat.v1.Summary.Value(tag=name, tensor=tf.make_tensor_proto(content), metadata=metadata))
    return Event(wall_time=time.time(), step=step, summary=tf.compat.v1.Summary(value=values))


def _for_tensorboard(shown: Shown) -> tuple[str, np.ndarray, str]:
    """Returns (the plugin, its tensor, the class of its data)."""
    if isinstance(shown, Images):
        height, width = shown.pixels.shape[1:3]
        sizes = [str(width).encode(), str(height).encode()]
        return "images", np.array([*sizes, *shown.files], object), "DATA_CLASS_BLOB_SEQUENCE"
    if isinstance(shown, Histogram):
        rows = np.stack([shown.edges[:-1], shown.edges[1:], shown.counts], axis=1)
        return "histograms", rows, "DATA_CLASS_TENSOR"
    # TensorBoard takes text for Markdown, in which indented lines are shown as they are.
    texts = [textwrap.indent(text, "    ", lambda line: True).encode() for text in shown.texts]
    return "text", np.array(texts, object), "DATA_CLASS_TENSOR"


def has_metrics(event: Event) -> bool:
    """Returns whether an event is one of metrics, and not of media or of a user's own kind."""
    return any(value.metadata.plugin_data.plugin_name == "scalars" for value in event.summary.value)


def same_record(event: Event, other: Event) -> bool:
    """Returns whether both are of one step and share a metric; a user's own summaries of that step have other tags."""
    tags = {value.tag for value in other.summary.value}
    return event.step == other.step and any(value.tag in tags for value in event.summary.value)


def read_events(path: str) -> tuple[list[Event], bool]:
    """Returns (the file's events up to the first damaged one, whether there was none)."""
    events = []
    try:
        for record in tf.data.TFRecordDataset(path).as_numpy_iterator():
            events.append(Event.FromString(record))
    except (tf.errors.DataLossError, DecodeError):
        logging.warning("%s: event %d is damaged; it and all later events are dropped", path, len(events) + 1)
        return events, False
    except tf.errors.OpError as error:
        logging.warning("%s cannot be read (%s) and is left unchanged", path, gist(error))
        return [], True
    return events, True


def names_in(folder: str) -> list[str]:
    """Returns the names in a folder; [] if the folder does not exist."""
    return tf.io.gfile.listdir(folder) if tf.io.gfile.isdir(folder) else []


def keep_void_events(path: str, void: list[Event]) -> None:
    """Keeps events that are taken out of a file in one beside it, each once."""
    aside = os.path.join(os.path.dirname(path), os.path.basename(path).replace("tfevents", "voided"))
    earlier = read_events(aside)[0] if tf.io.gfile.exists(aside) else []
    known = {event.SerializeToString() for event in earlier}
    rewrite(aside, [*earlier, *(event for event in void if event.SerializeToString() not in known)])
    logging.info("%d events of %s are kept in %s", len(void), path, aside)


def rewrite(path: str, events: Iterable[Event]) -> None:
    """Replaces the file in one move; before that, TensorBoard does not take it for an event file."""
    new = files.new_name(os.path.join(os.path.dirname(path), "rewritten"))
    with tf.io.TFRecordWriter(new) as writer:
        for event in events:
            writer.write(event.SerializeToString())
    files.make_durable(new)
    files.replace(new, path)
    files.make_durable(os.path.dirname(path))
