"""TensorBoardWriter: metrics, media and settings of a run in event files, which are only appended to."""

import contextlib
import hashlib
import json
import os
import platform
import re
import textwrap
import time
from collections.abc import Iterator, Mapping

import numpy as np
import tensorflow as tf
from absl import logging
from google.protobuf.message import DecodeError

from looplib.base import files, folders
from looplib.base.messages import gist
from looplib.report.writers.contract import Histogram, Images, Setting, Shown, Writer

Event = tf.compat.v1.Event
_OF_LOOPLIB = re.compile(r"events\.out\.tfevents\.(\d+\.\d{6})\..+\.\d+\.v2")  # the time has six decimals


class TensorBoardWriter(Writer):
    """Metrics and media for TensorBoard, in `train/` and `eval/` (`eval/<name>/` for a named evaluator).

    The metrics of each (step, split) are one event, and so are its media; TensorBoard shows each once. No file is
    changed: where a run goes back to an earlier step, the start of a session is written, upon which TensorBoard drops
    all that it has read of that step and later ones. The settings are in an event file of `directory` itself.

    Args:
      directory: the run directory.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._files: dict[str, _EventFile] = {}  # by split: the one that is open
        self._newest: dict[str, tuple[int, set[str]]] = {}  # by split: the newest step in its files, and its tags

    def resume(self, step: int, reported: dict[str, int]) -> None:
        """Makes TensorBoard drop the events that the run will write again."""
        self.close()
        splits = {"train", "eval", *reported, *(name.rstrip("/") for name in _names_in(self._folder("eval")))}
        for split in splits:
            if os.path.islink(self._folder(split)):
                continue
            last = reported.get(split, step)
            if any(event.step > last for event in self._events(split)):
                for path in filter(files.is_open_here, self._paths(split)):  # by `tf.summary`
                    logging.warning(
                        "%s is open in this process; TensorBoard drops its events after step %d, also those that will "
                        "be written to it; open a new file for these",
                        path,
                        last,
                    )
                self._open(split, last + 1)
                self._files[split].write()
                self._files[split].sync()

    def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Writes one event."""
        values = {name: ("scalars", np.float32(value), "DATA_CLASS_UNKNOWN") for name, value in metrics.items()}
        self._write(split, _event(step, values))

    def show(self, step: int, split: str, shown: Mapping[str, Shown]) -> None:
        """Writes one event."""
        self._write(split, _event(step, {name: _for_tensorboard(each) for name, each in shown.items()}))

    def settings(self, settings: Mapping[str, Setting]) -> None:
        """Writes the settings for the HParams plugin, in place of earlier ones, into `directory` itself."""
        try:
            from tensorboard.plugins.hparams import plugin_data_pb2  # alone; `api` takes ten times as long to import
        except ImportError:  # TensorFlow is installed without TensorBoard
            return
        # All runs with these settings have this name, and are shown as one group.
        name = hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:16]
        data = plugin_data_pb2.HParamsPluginData(version=0)
        data.session_start_info.group_name, data.session_start_info.start_time_secs = name, time.time()
        for key, setting in sorted(settings.items()):
            kind = "bool" if isinstance(setting, bool) else "string" if isinstance(setting, str) else "number"
            setattr(data.session_start_info.hparams[key], f"{kind}_value", setting)
        for path in filter(_is_regular, _paths_in(self._directory)):
            if not _OF_LOOPLIB.fullmatch(os.path.basename(path)):
                continue
            contents = [value.metadata.plugin_data.content for event in _read(path) for value in event.summary.value]
            if any(name.encode() in content for content in contents):
                return
            folders.delete(path)
            folders.remove(self._directory, os.path.basename(path))  # TensorBoard keeps the first ones that it reads
        file = _EventFile(self._directory)
        kind = tf.compat.v1.SummaryMetadata.PluginData(plugin_name="hparams", content=data.SerializeToString())
        value = tf.compat.v1.Summary.Value(
            tag="_hparams_/session_start_info", tensor=tf.make_tensor_proto(0.0, shape=[1]),
            metadata=tf.compat.v1.SummaryMetadata(plugin_data=kind),
        )  # fmt: skip
        file.write(Event(wall_time=time.time(), summary=tf.compat.v1.Summary(value=[value])))
        file.close()
        file.sync()

    def _write(self, split: str, event: Event) -> None:
        """Writes an event, in place of one of this step with the same tags."""
        if split in self._files and not self._files[split].is_newest():
            self._close(split)
        if split not in self._newest:
            self._note(split, self._events(split, own=True))
        step, tags = self._newest[split]
        new = [event]
        if event.step < step or (event.step == step and not tags.isdisjoint(_tags(event))):
            found = [other for other in self._events(split) if other.step >= event.step]
            same = [other for other in found if _same_record(other, event)]
            # As bytes, so that NaN equals NaN.
            if [other.summary.SerializeToString() for other in same] == [event.summary.SerializeToString()]:
                return
            kept = [other for other in found if not _same_record(other, event)]
            new = sorted([event, *kept], key=lambda other: other.step)
            self._open(split, event.step)
        elif split not in self._files:
            self._open(split)
        try:
            self._files[split].write(*new)
        except (OSError, tf.errors.OpError):
            with contextlib.suppress(OSError, tf.errors.OpError):
                self._close(split)
            raise
        self._note(split, new)

    def _note(self, split: str, events: list[Event]) -> None:
        step, tags = self._newest.get(split, (-1, set()))
        for event in events:
            if event.step > step:
                step, tags = event.step, set()
            if event.step == step:
                tags |= _tags(event)
        self._newest[split] = step, tags

    def sync(self) -> None:
        """See `Writer`."""
        for file in list(self._files.values()):
            with contextlib.suppress(FileNotFoundError):  # somebody has tidied up
                file.sync()

    def close(self) -> None:
        """Closes the event files."""
        for file in self._files.values():
            file.close()
        self._files, self._newest = {}, {}

    def _folder(self, split: str) -> str:
        return os.path.join(self._directory, *_names(split))

    def _open(self, split: str, restart: int | None = None) -> None:
        """Opens a new file of a split, which TensorBoard reads after all others; see `_EventFile`."""
        if split in self._files:
            self._files.pop(split).close()
        self._files[split] = _EventFile(self._directory, *_names(split), restart=restart)

    def _close(self, split: str) -> None:
        del self._newest[split]
        self._files.pop(split).close()

    def _paths(self, split: str) -> list[str]:
        return list(filter(_is_regular, _paths_in(self._folder(split))))

    def _events(self, split: str, own: bool = False) -> list[Event]:
        """Returns the events of a split that TensorBoard shows; they are on the disk then.

        Args:
          split: the split.
          own: whether to read looplib's own files alone.
        """
        found: list[Event] = []
        for path in self._paths(split):
            if own and not _OF_LOOPLIB.fullmatch(os.path.basename(path)):
                continue
            for event in _read(path):
                if event.HasField("session_log"):
                    found = [other for other in found if other.step < event.step]
                elif event.HasField("summary"):
                    found.append(event)
            files.make_durable(path)  # of an earlier process, or closed here since the last `sync`
        return found


class _EventFile:
    """A new event file, which others can read up to the last event written.

    Its name sorts after earlier names, also if the clock was set back: TensorBoard reads files in the order of names.

    `tf.summary` would write from a queue, and an event for each metric, so that a crash may part them.

    Args:
      directory: the run directory.
      names: plain names of the folders from there on, made if missing.
      restart: makes TensorBoard drop what it has read of this step and later ones.
    """

    def __init__(self, directory: str, *names: str, restart: int | None = None) -> None:
        self._folder = folders.make_folder(directory, *names)
        begun = max([time.time(), *(float(match[1]) + 1e-6 for match in _own(self._folder))])
        if restart is not None:  # after those of `tf.summary`, too, which have whole seconds
            seconds = (re.match(r"events\.out\.tfevents\.(\d{10})\.", name) for name in _names_in(self._folder))
            begun = max([begun, *(int(match[1]) + 1 for match in seconds if match and int(match[1]) < 9999999999)])
        self._name = f"events.out.tfevents.{begun:.6f}.{platform.node()}.{os.getpid()}.v2"
        self._writer = tf.io.TFRecordWriter(os.path.join(self._folder, self._name))
        begin = [Event(wall_time=time.time(), file_version="brain.Event:2")]
        start = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        if restart is not None:  # twice, because TensorBoard does not take the first start in a folder for another one
            begin += 2 * [Event(wall_time=begin[0].wall_time, step=restart, session_log=start)]
        for event in begin:
            self._writer.write(event.SerializeToString())

    def write(self, *events: Event) -> None:
        """Appends events, with what the file begins with, so that a crash rarely parts them."""
        for event in events:
            self._writer.write(event.SerializeToString())
        self._writer.flush()

    def is_newest(self) -> bool:
        """Returns whether TensorBoard still reads this file: it is there, and no other job has begun a later one."""
        names = [match[0] for match in _own(self._folder)]
        return self._name in names and max(names) == self._name

    def sync(self) -> None:
        """Puts the file on the disk."""
        files.make_durable(os.path.join(self._folder, self._name))
        files.make_durable(self._folder)

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


def _names(split: str) -> tuple[str, ...]:
    return (split,) if split in ("train", "eval") else ("eval", split)


def _names_in(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def _own(folder: str) -> Iterator[re.Match[str]]:
    """Yields the names of looplib's own event files in a folder, as they match."""
    return filter(None, map(_OF_LOOPLIB.fullmatch, _names_in(folder)))


def _paths_in(folder: str) -> list[str]:
    """Returns the paths of the event files in a folder, in the order in which TensorBoard reads them."""
    return [os.path.join(folder, name) for name in sorted(_names_in(folder)) if "tfevents" in name]


def _is_regular(path: str) -> bool:
    return os.path.isfile(path) and not os.path.islink(path)


def _read(path: str) -> Iterator[Event]:
    """Yields the events of a file up to the first damaged one."""
    good = 0
    try:
        for record in tf.data.TFRecordDataset(path).as_numpy_iterator():
            yield Event.FromString(record)
            good += 1
    except (tf.errors.DataLossError, DecodeError):
        logging.warning("%s: event %d is damaged; TensorBoard reads no further in this file", path, good + 1)
    except tf.errors.OpError as error:
        logging.warning("%s cannot be read: %s", path, gist(error))


def _event(step: int, values: Mapping[str, tuple[str, np.ndarray, str]]) -> Event:
    """Returns the event that holds what `tf.summary` would write.

    Args:
      step: the global step.
      values: by tag: (the plugin, its tensor, the class of its data).
    """
    summaries = []
    for tag, (plugin, content, kind) in values.items():
        metadata = tf.compat.v1.SummaryMetadata(plugin_data={"plugin_name": plugin}, data_class=kind)
        summaries.append(tf.compat.v1.Summary.Value(tag=tag, tensor=tf.make_tensor_proto(content), metadata=metadata))
    return Event(wall_time=time.time(), step=step, summary=tf.compat.v1.Summary(value=summaries))


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


def _tags(event: Event) -> set[str]:
    return {value.tag for value in event.summary.value}


def _same_record(event: Event, other: Event) -> bool:
    """Returns whether both are of one step and share a tag; a user's own summaries of that step have other tags."""
    return event.step == other.step and not _tags(event).isdisjoint(_tags(other))
