"""Writers: the same numbers to TensorBoard, `metrics.jsonl` and the screen."""

import abc
import contextlib
import json
import math
import os
import platform
import re
import sys
import time
from typing import TextIO

import numpy as np
import tensorflow as tf
from absl import logging
from google.protobuf.message import DecodeError

from looplib import console, files
from looplib.errors import UsageError, gist


class Writer(abc.ABC):
    """Takes the metrics of every loop and evaluation."""

    @abc.abstractmethod
    def write(self, step, split, metrics):
        """Records metrics.

        Args:
          step: int, the global step.
          split: "train" or an evaluator's name.
          metrics: dict from name to int or float.
        """

    def progress(self, step, target):
        """Is told after every loop how far the training is; `target` is None where the end is not known."""

    def resume(self, step: int, reported: dict[str, int]) -> None:
        """Takes out the records that a training is about to make again; called when the training starts.

        Args:
          step: the global step that the training continues from.
          reported: dict from split to the last step whose record holds: for "train" the last one that was reported
            when the checkpoint of `step` was saved, because the next window of steps is not whole yet. Later records of
            these splits are void, and records after `step` of any other.
        """

    def note(self, sentence: str) -> None:
        """Shows a sentence about the run, such as where it continues; does nothing by default."""

    def flush(self):
        """Makes sure that what was written can be read by others."""

    def sync(self) -> None:
        """Puts on the disk what was flushed, so that a power cut does not undo it; called from another thread."""

    def close(self):
        """Flushes and lets go of files."""
        self.flush()


class TensorBoardWriter(Writer):
    """Scalars for TensorBoard, in `train/` and `eval/` (`eval/<name>/` for a named evaluator) below `directory`.

    Each (step, split) is one event and stands once in all event files together: a record written again with other
    numbers replaces the first one. A record cut short by a crash is cut off; outside `train/` only in files of this
    host, as another host's job may be about to complete it. Events that are taken out of a file are kept beside it, in
    a file with "voided" in place of "tfevents" in its name.

    Args:
      directory: the run directory.
    """

    def __init__(self, directory):
        self._directory = directory
        self._files = {}  # split: the _EventFile that is open
        self._steps = {}  # split: steps of the records in all its files, once they were read

    def resume(self, step, reported):
        """Takes out the records that the run will make again."""
        self.close()
        named = os.path.join(self._directory, "eval")
        names = [name for name in _names(named) if not os.path.islink(os.path.join(named, name.rstrip("/")))]
        for split in {"train", "eval", *reported, *(name.rstrip("/") for name in names)}:
            self._keep(split, lambda event, last=reported.get(split, step): event.step <= last)

    def write(self, step, split, metrics):
        """Writes one event."""
        if split in self._files and not self._files[split].intact():
            self._files.pop(split).close()
            del self._steps[split]
        if split not in self._steps:
            self._keep(split, lambda event: True)
        event = _event(step, metrics)
        if step in self._steps[split]:
            earlier = [e for path in self._paths(split) for e in _read_events(path)[0] if _same_record(e, event)]
            # As bytes, in which a number that is not one equals itself.
            if [e.summary.SerializeToString() for e in earlier] == [event.summary.SerializeToString()]:
                return
            self._keep(split, lambda other: not _same_record(other, event))
        if split not in self._files:
            self._files[split] = _EventFile(self._folder(split))
        self._files[split].write(event)
        self._steps[split].add(step)

    def sync(self) -> None:
        """See `Writer`."""
        for file in list(self._files.values()):
            with contextlib.suppress(FileNotFoundError):  # another job has rewritten it
                files.make_durable(file.path)
                files.make_durable(os.path.dirname(file.path))

    def close(self):
        """Closes the event files."""
        for file in self._files.values():
            file.close()
        self._files, self._steps = {}, {}

    def _folder(self, split):
        return os.path.join(self._directory, split if split in ("train", "eval") else os.path.join("eval", split))

    def _paths(self, split):
        folder = self._folder(split)
        paths = [os.path.join(folder, name) for name in sorted(_names(folder)) if "tfevents" in name]  # as TensorBoard
        return [path for path in paths if files.is_remote(path) or (os.path.isfile(path) and not os.path.islink(path))]

    def _keep(self, split, condition):
        """Takes the other events out of the split's files; files without any stay as they are."""
        steps = set()
        for path in self._paths(split):
            events, whole = _read_events(path)
            kept, void = _divided(events, condition)
            ours = split == "train" or f".{platform.node()}." in os.path.basename(path)
            if len(kept) < len(events) or (ours and not whole):
                if split in self._files and self._files[split].path == path:
                    self._files.pop(split).close()
                if void:
                    _keep_void_events(path, void)
                _rewrite(path, kept)
            steps.update(event.step for event in kept if event.HasField("summary"))
        self._steps[split] = steps


class _EventFile:
    """A new event file, which others can read up to the last event written. Its name sorts after earlier ones.

    `tf.summary` would write from a queue, and an event for each metric, so that a crash may part them.
    """

    def __init__(self, folder):
        tf.io.gfile.makedirs(folder)
        name = f"events.out.tfevents.{time.time():.6f}.{platform.node()}.{os.getpid()}.v2"
        self.path = os.path.join(folder, name)
        self._writer = tf.io.TFRecordWriter(self.path)
        self.write(tf.compat.v1.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, event):
        self._writer.write(event.SerializeToString())
        self._writer.flush()
        self._length = tf.io.gfile.stat(self.path).length

    def intact(self):
        """Whether no other job rewrote or removed the file, which would lose what is appended, and no append failed."""
        return tf.io.gfile.exists(self.path) and tf.io.gfile.stat(self.path).length == self._length

    def close(self):
        self._writer.close()


def _event(step, metrics):
    """The event that holds what `tf.summary.scalar` would write for each metric."""
    metadata = tf.compat.v1.SummaryMetadata(plugin_data={"plugin_name": "scalars"})
    values = [
        tf.compat.v1.Summary.Value(tag=name, tensor=tf.make_tensor_proto(np.float32(value)), metadata=metadata)
        for name, value in metrics.items()
    ]
    return tf.compat.v1.Event(wall_time=time.time(), step=step, summary=tf.compat.v1.Summary(value=values))


def _same_record(event, other):
    """Whether both are of one step with a metric in common; a user's own summaries of that step have other tags."""
    tags = {value.tag for value in other.summary.value}
    return event.step == other.step and any(value.tag in tags for value in event.summary.value)


def _read_events(path):
    """Returns (the file's events up to the first damaged one, whether there was none)."""
    events = []
    try:
        for record in tf.data.TFRecordDataset(path).as_numpy_iterator():
            events.append(tf.compat.v1.Event.FromString(record))
    except (tf.errors.DataLossError, DecodeError):
        logging.warning("%s: event %d is damaged and is left out, with what follows it", path, len(events) + 1)
        return events, False
    except tf.errors.OpError as error:
        logging.warning("%s cannot be read (%s), and stays as it is", path, gist(error))
        return [], True
    return events, True


def _names(folder: str) -> list[str]:
    return tf.io.gfile.listdir(folder) if tf.io.gfile.isdir(folder) else []


def _divided(records, condition):
    """Returns (the records that meet a condition, the others)."""
    kept, void = [], []
    for record in records:
        (kept if condition(record) else void).append(record)
    return kept, void


def _keep_void_events(path, void):
    aside = os.path.join(os.path.dirname(path), os.path.basename(path).replace("tfevents", "voided"))
    earlier = _read_events(aside)[0] if tf.io.gfile.exists(aside) else []
    known = {event.SerializeToString() for event in earlier}
    _rewrite(aside, [*earlier, *(event for event in void if event.SerializeToString() not in known)])
    logging.info("%d events of %s are kept in %s", len(void), path, aside)


def _rewrite(path, events):
    """Replaces the file in one move, by one that TensorBoard does not take for an event file."""
    new = os.path.join(os.path.dirname(path), re.sub("tfevents|voided", "rewritten", os.path.basename(path)))
    with tf.io.TFRecordWriter(new) as writer:
        for event in events:
            writer.write(event.SerializeToString())
    tf.io.gfile.rename(new, path, overwrite=True)


class JsonlWriter(Writer):
    """One JSON object a line: `{"step": 100, "split": "train", "loss": 0.25}`.

    Each (step, split) stands once: a record written again with other numbers replaces the first one. A number that is
    not finite is written as null, as JSON has no other word for it. The file is open only while a line is appended, so
    that a training and an evaluation job may share it. Records that are taken out are kept once in a file beside it,
    `metrics.voided.jsonl`.

    Args:
      path: the file, appended to if it exists.
    """

    def __init__(self, path):
        self._path = path
        self._written, self._size = set(), -1  # the records in the file, and its size when they were read
        if _cut_short(path):
            self._keep(lambda record: True)

    def resume(self, step, reported):
        """Takes out the records that the run will make again."""
        if any(r["step"] > reported.get(r["split"], step) for r in read_jsonl(self._path)):  # another job's, too
            self._keep(lambda record: record["step"] <= reported.get(record["split"], step))

    def write(self, step, split, metrics):
        """Appends one line."""
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        record = {"step": step, "split": split, **numbers}
        while not self._append(record):
            if record in read_jsonl(self._path):
                return
            self._keep(lambda other: _key(other) != (step, split))

    def _append(self, record):
        """Appends a record; returns False if its place is taken, or a crash or a full disk has cut the file short."""
        line = f"{json.dumps(record)}\n".encode()
        with files.appending(self._path) as file:  # alone, so that no other job writes this record meanwhile
            size = tf.io.gfile.stat(self._path).length if tf.io.gfile.exists(self._path) else 0
            if size != self._size:
                self._written = {_key(other) for other in read_jsonl(self._path)}
            if _key(record) in self._written or _cut_short(self._path):
                return False
            file.write(line)
        self._size = size + len(line)
        self._written.add(_key(record))
        return True

    def sync(self) -> None:
        """See `Writer`."""
        with contextlib.suppress(FileNotFoundError):  # nothing was reported yet
            files.make_durable(self._path)
            files.make_durable(os.path.dirname(self._path) or ".")

    def _keep(self, condition):
        with files.rewriting(self._path):
            records, void = _divided(read_jsonl(self._path), condition)
            if void:
                aside = ".voided".join(os.path.splitext(self._path))
                known = read_jsonl(aside)
                lines = "".join(json.dumps(record) + "\n" for record in void if record not in known)
                with files.appending(aside) as file:
                    file.write(lines.encode())
                logging.info("%d records of %s are void and are kept in %s", len(void), self._path, aside)
            files.write_whole(self._path, "".join(json.dumps(record) + "\n" for record in records))
        self._size = -1


def _key(record):
    return record["step"], record["split"]


def _cut_short(path):
    """Whether a crash left the last line without its end, so that the next one would be lost with it."""
    if not tf.io.gfile.exists(path):
        return False
    with tf.io.gfile.GFile(path, "rb") as file:
        file.seek(max(file.size() - 1, 0))
        return file.read(1) not in (b"", b"\n")


def read_jsonl(path):
    """Reads a `metrics.jsonl`; returns its records, [] where there is no file. A line cut short by a crash is left out.

    Args:
      path: the file.

    Returns:
      list of dicts in file order.
    """
    if not tf.io.gfile.exists(path):
        return []
    try:
        with files.open_regular(path) as file:
            lines = file.read().splitlines()
    except files.NotRegularError as error:
        logging.warning("%s", error)
        return []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = files.parse_json(line.decode())
            if type(record["step"]) is not int or not isinstance(record["split"], str):
                raise ValueError("its step or split is of another type")
        except (ValueError, KeyError, TypeError):
            if line:
                logging.warning("%s: line %d is not a record and is left out: %.80r", path, number, line)
            continue
        records.append(record)
    return records


class ConsoleWriter(Writer):
    """One line for each loop and evaluation on standard output, and on a terminal a progress bar below them.

    Args:
      stream: where to write; default `sys.stdout`.
    """

    def __init__(self, stream=None):
        self._given = stream
        self._bar = None
        self._target = None

    def write(self, step, split, metrics):
        """Prints one line."""
        numbers = "  ".join(f"{name} {format_number(value)}" for name, value in metrics.items())
        self._print(f"step {step:>7}  {split:<5}  {numbers}")

    def note(self, sentence: str) -> None:
        """Prints the sentence."""
        self._print(sentence)

    @property
    def _stream(self) -> TextIO | None:
        return self._given or sys.stdout  # of this moment: it is replaced while a run trains

    def _print(self, line: str) -> None:
        if self._bar is None:
            console.say(line, self._stream)
            return
        with console.swallowing():
            self._bar.write(line, file=self._stream)

    def progress(self, step, target):
        """Moves the bar, on a terminal."""
        with console.swallowing():
            if self._stream is None or not self._stream.isatty():
                return
            if self._bar is None or self._target != target:
                import tqdm  # costs start-up time, and only a terminal needs it

                self.close()
                self._target = target
                self._bar = tqdm.tqdm(total=target, initial=step, unit="step", file=self._stream, leave=False)
            self._bar.update(step - self._bar.n)
            self._bar.refresh()

    def flush(self):
        """Flushes the stream."""
        with console.swallowing():
            if self._stream is not None:
                self._stream.flush()

    def close(self):
        """Takes the bar away."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with console.swallowing():
                bar.close()


def make_writers(writers, model_dir):
    """Returns what is to take the metrics.

    Args:
      writers: list of `Writer`, or None for the console's and, with a run directory, TensorBoard's and that of
        `metrics.jsonl`.
      model_dir: the run directory, or None.

    Raises:
      UsageError: for something else in the list.
    """
    if writers is not None:
        for writer in writers:
            if not isinstance(writer, Writer):
                raise UsageError(f"the writer {writer!r} is not a looplib.Writer; subclass it and pass an instance")
        return list(writers)
    if not model_dir:
        return [ConsoleWriter()]
    jsonl = JsonlWriter(os.path.join(model_dir, "metrics.jsonl"))
    return [TensorBoardWriter(model_dir), jsonl, ConsoleWriter()]


def format_number(value):
    """A number for a person: whole numbers as they are, others with four significant digits.

    Args:
      value: int or float.

    Returns:
      str, such as `1797`, `0.9833`, `1.2e-05`.
    """
    if isinstance(value, int) or (abs(value) >= 1000 and math.isfinite(value)):
        return f"{value:.0f}"
    return f"{value:.4g}"
