"""Writers: the same numbers to TensorBoard, `metrics.jsonl` and the screen."""

import abc
import json
import math
import os
import sys

import numpy as np
import tensorflow as tf
from absl import logging


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

    def resume(self, step, reported):
        """Is told where the run goes on, as records that it will make again are void.

        Args:
          step: int, the global step that was restored.
          reported: dict from split to the last step that was reported when that checkpoint was made. Later records of
            these splits are void, and records after `step` of any other.
        """

    def flush(self):
        """Makes sure that what was written can be read by others."""

    def close(self):
        """Flushes and lets go of files."""
        self.flush()


class TensorBoardWriter(Writer):
    """Scalars for TensorBoard, in `train/` and `eval/` (`eval/<name>/` for a named evaluator) below `directory`."""

    def __init__(self, directory):
        self._directory = directory
        self._writers = {}

    def write(self, step, split, metrics):
        """Writes one scalar a metric."""
        if split not in self._writers:
            folder = split if split in ("train", "eval") else os.path.join("eval", split)
            self._writers[split] = tf.summary.create_file_writer(os.path.join(self._directory, folder))
        # As arrays: TensorFlow keeps every Python number that it makes a tensor of, for ever.
        with self._writers[split].as_default(np.asarray(step, np.int64)):
            for name, value in metrics.items():
                tf.summary.scalar(name, np.asarray(value, np.float32))

    def flush(self):
        """Flushes the event files."""
        for writer in self._writers.values():
            writer.flush()

    def close(self):
        """Closes the event files."""
        for writer in self._writers.values():
            writer.close()
        self._writers = {}


class JsonlWriter(Writer):
    """One JSON object a line: `{"step": 100, "split": "train", "loss": 0.25}`.

    Each (step, split) stands once: a record written again with other numbers replaces the first one. A number that is
    not finite is written as null, as JSON has no other word for it. The file is open only while a line is appended, so
    that a training and an evaluation job may share it.

    Args:
      path: the file, appended to if it exists.
    """

    def __init__(self, path):
        self._path = path
        self._written = {_key(record) for record in read_jsonl(path)}
        if _cut_short(path):
            self._keep(lambda record: True)

    def resume(self, step, reported):
        """Takes out the records that the run will make again."""
        if any(written > reported.get(split, step) for written, split in self._written):
            self._keep(lambda record: record["step"] <= reported.get(record["split"], step))

    def write(self, step, split, metrics):
        """Appends one line."""
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        record = {"step": step, "split": split, **numbers}
        if (step, split) in self._written:
            if record in read_jsonl(self._path):
                return
            self._keep(lambda record: _key(record) != (step, split))
        with tf.io.gfile.GFile(self._path, "a") as file:
            file.write(json.dumps(record) + "\n")
        self._written.add((step, split))

    def _keep(self, condition):
        records = [record for record in read_jsonl(self._path) if condition(record)]
        with tf.io.gfile.GFile(self._path + ".new", "w") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))
        tf.io.gfile.rename(self._path + ".new", self._path, overwrite=True)
        self._written = {_key(record) for record in records}


def _key(record):
    return record["step"], record["split"]


def _cut_short(path):
    """Whether a crash left the last line without its end, so that the next one would be lost with it."""
    if not tf.io.gfile.exists(path):
        return False
    with tf.io.gfile.GFile(path, "rb") as file:
        content = file.read()
    return bool(content) and not content.endswith(b"\n")


def read_jsonl(path):
    """Reads a `metrics.jsonl`; returns its records, [] where there is no file. A line cut short by a crash is left out.

    Args:
      path: the file.

    Returns:
      list of dicts in file order.
    """
    if not tf.io.gfile.exists(path):
        return []
    records = []
    with tf.io.gfile.GFile(path) as file:
        for number, line in enumerate(file.read().splitlines(), 1):
            try:
                record = json.loads(line)
                record["step"], record["split"]
            except (ValueError, KeyError, TypeError):
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
        self._stream = stream or sys.stdout
        self._bar = None
        self._target = None

    def write(self, step, split, metrics):
        """Prints one line."""
        numbers = "  ".join(f"{name} {format_number(value)}" for name, value in metrics.items())
        line = f"step {step:>7}  {split:<5}  {numbers}"
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            print(line, file=self._stream, flush=True)

    def progress(self, step, target):
        """Moves the bar, on a terminal."""
        if not self._stream.isatty():
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
        self._stream.flush()

    def close(self):
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def default_writers(model_dir):
    """Returns the console's writer, and with a run directory TensorBoard's and that of `metrics.jsonl`."""
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
