"""Committed checkpoints: the marker written last, what it proves, and what is set aside.

A checkpoint `ckpt-<step>` consists of TensorFlow's files (`.index`, `.data-...`) and of the marker
`ckpt-<step>.commit`, which is written after them and holds their sizes and SHA-256 checksums. A checkpoint without a
whole marker does not count, whatever else is there.

A marker is one JSON object: `format` (1), `step`, `time`, `files`, `scores`, `versions`, and `sha256`, the checksum of
all the others. Fields that are not known here are kept and ignored; a higher `format` is refused by name.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import sys
import time
from typing import Any

import tensorflow as tf
from absl import logging

from looplib.errors import UsageError, gist

SET_ASIDE = "set_aside"
FORMAT = 1
_NAME = re.compile(r"(ckpt-(\d+))(?:\.commit|\.commit\.new|(?:\.index|\.data-\d+-of-\d+)(?:\.tempstate\d+)?|_temp)/?$")
_BLOCK = 1 << 22


@dataclasses.dataclass(frozen=True)
class Commit:
    """A committed checkpoint, as its marker tells of it.

    Attributes:
      path: `<directory>/ckpt-<step>`, what TensorFlow calls the prefix.
      step: the global step.
      time: seconds since the epoch at which it was committed.
      files: dict from file name to {"bytes": int, "sha256": str}.
      scores: dict from metric ("eval/accuracy") to the value that an evaluation gave, or None if it was not finite.
      versions: dict of the versions that wrote it.
    """

    path: str
    step: int
    time: float
    files: dict
    scores: dict
    versions: dict

    @property
    def bytes(self):
        """The size of its files in bytes."""
        return sum(file["bytes"] for file in self.files.values())


def path_of(directory, step):
    """Returns the path of a step's checkpoint in a directory."""
    return os.path.join(directory, f"ckpt-{step}")


def commit(path, step):
    """Commits the files that TensorFlow has written: reads them, makes them durable, writes the marker last.

    Args:
      path: the checkpoint's path.
      step: its global step.

    Returns:
      A `Commit`.

    Raises:
      OSError, tf.errors.OpError: if files are missing or cannot be read or written.
    """
    directory, prefix = os.path.split(path)
    ours = re.compile(re.escape(prefix) + r"\.(index|data-\d+-of-\d+)")  # not a user's ckpt-4.index.bak
    names = [name for name in tf.io.gfile.listdir(directory) if ours.fullmatch(name)]
    if f"{prefix}.index" not in names or len(names) < 2:
        raise OSError(f"only {', '.join(sorted(names)) or 'nothing'} of the files of {prefix} was written")
    tf.train.list_variables(path)  # what TensorFlow itself cannot open is not committed
    files = {name: _measure(os.path.join(directory, name)) for name in sorted(names)}
    for name in names:
        _make_durable(os.path.join(directory, name))
    versions = {"looplib": _version(), "tensorflow": tf.__version__, "python": sys.version.split()[0]}
    marker = {"step": step, "time": time.time(), "files": files, "scores": {}, "versions": versions}
    _write_marker(path, {"format": FORMAT, **marker})
    return Commit(path=path, **marker)


def add_scores(done: Commit, scores: dict[str, float]) -> Commit:
    """Adds the metrics of an evaluation to a marker.

    Args:
      done: the `Commit`.
      scores: dict from metric to number. One that is not finite is kept as None, because JSON has no word for it.

    Returns:
      The new `Commit`.
    """
    marker = _load_marker(done.path)
    finite = {name: score if math.isfinite(score) else None for name, score in scores.items()}
    marker["scores"] = {**marker["scores"], **finite}
    _write_marker(done.path, {**marker, "format": FORMAT})
    return _read_marker(done.path)


def checkpoints(directory: str | os.PathLike[str]) -> list[Commit]:
    """Lists the committed checkpoints of a run, newest first.

    Their files are not read, so a checkpoint may be damaged; `verify`, or `python -m looplib inspect --verify`, reads
    them.

        best = max(looplib.checkpoints("/tmp/run"), key=lambda saved: saved.scores["eval/accuracy"])
        print(best.step, best.path)

    Args:
      directory: a run directory, or the directory that holds the checkpoints.

    Returns:
      list of `Commit`, with `path`, `step`, `time`, `scores` and the sizes of the files.

    Raises:
      UsageError: if there is no such directory, or a newer looplib wrote a checkpoint in it.
    """
    return [done for _, done, _ in listing(place_of(directory)) if done]


def place_of(directory: str | os.PathLike[str]) -> str:
    """Returns the directory that holds the checkpoints of a run directory, which may be that directory itself.

    Raises:
      UsageError: if there is no such directory.
    """
    directory = os.fspath(directory)
    if not tf.io.gfile.isdir(directory):
        raise UsageError(f"{directory} is not a directory; name a run directory, as --model_dir does")
    inner = os.path.join(directory, "checkpoints")
    return inner if tf.io.gfile.isdir(inner) else directory


def listing(directory):
    """Lists the checkpoints of a directory, newest first.

    Args:
      directory: where they are; it need not exist.

    Returns:
      list of `(step, Commit or None, reason)`: without a `Commit` the checkpoint does not count, for the reason.

    Raises:
      UsageError: if a newer looplib wrote a checkpoint in a format that this one cannot read.
    """
    found = {}
    for name in _names(directory):
        match = _NAME.match(name)
        if match:
            found.setdefault(int(match[2]), []).append(name)
    entries = []
    for step in sorted(found, reverse=True):
        if f"ckpt-{step}.commit" not in found[step]:
            entries.append((step, None, "its save, or its deletion, was not finished"))
            continue
        try:
            entries.append((step, _read_marker(path_of(directory, step)), ""))
        except UsageError:  # of a newer looplib: not damaged, and not to be passed over
            raise
        except (ValueError, KeyError, TypeError, OSError, tf.errors.OpError) as error:
            entries.append((step, None, f"its marker cannot be read ({gist(error)})"))
    return entries


def newest(directory):
    """Returns the newest `Commit` in a directory, unverified, or None."""
    return next((done for _, done, _ in listing(directory) if done), None)


def verify(done, thorough=True):
    """Compares a checkpoint's files with its marker.

    Args:
      done: the `Commit`.
      thorough: reads the files through; otherwise only their sizes are compared.

    Returns:
      "" if all is well, else what is wrong, as the end of a sentence.
    """
    for name, expected in done.files.items():
        path = os.path.join(os.path.dirname(done.path), name)
        try:
            found = _measure(path) if thorough else {"bytes": tf.io.gfile.stat(path).length}
        except (OSError, tf.errors.OpError) as error:
            return f"{name} cannot be read: {gist(error)}"
        if found["bytes"] != expected["bytes"]:
            return f"{name} has {found['bytes']} bytes instead of {expected['bytes']}"
        if thorough and found["sha256"] != expected["sha256"]:
            return f"{name} has other content than was saved"
    return ""


def newest_intact(directory, tidy):
    """Finds the newest checkpoint that is committed and reads as it was written.

    Args:
      directory: where the checkpoints are.
      tidy: moves what does not count into `set_aside`, one warning each. Only the process that holds the directory's
        lock may.

    Returns:
      A `Commit`, or None.
    """
    intact, others = None, []
    for step, done, reason in listing(directory):
        reason = reason or (verify(done) if intact is None else "")
        if reason:
            others.append((step, reason))
        elif intact is None:
            intact = done
    if tidy:
        in_the_way = os.path.join(directory, "checkpoint")  # where each save writes TensorFlow's list
        if tf.io.gfile.isdir(in_the_way):
            place = _free_place(directory, "checkpoint")
            tf.io.gfile.rename(in_the_way, place)
            logging.warning("%s is a directory instead of a file; it was moved to %s", in_the_way, place)
        for step, reason in others:
            place = set_aside(directory, step)
            logging.warning("the checkpoint of step %d does not count: %s; it was moved to %s", step, reason, place)
        if others and not intact:
            logging.warning("no checkpoint in %s is whole, so this run starts from the beginning", directory)
    return intact


def set_aside(directory, step):
    """Moves a checkpoint's files into `<directory>/set_aside`, where nothing looks for them; returns the place."""
    prefix = f"ckpt-{step}"
    place = _free_place(directory, prefix)
    tf.io.gfile.makedirs(place)
    # The marker goes first: at no moment does a checkpoint count that is not whole.
    names = sorted(_names(directory), key=lambda name: not name.startswith(f"{prefix}.commit"))
    for name in names:
        match = _NAME.match(name)
        if match and match[1] == prefix:
            name = name.rstrip("/")
            tf.io.gfile.rename(os.path.join(directory, name), os.path.join(place, name), overwrite=True)
    return place


def _free_place(directory, name):
    """Returns a path in `<directory>/set_aside`, which is made, where nothing is yet."""
    folder = os.path.join(directory, SET_ASIDE)
    tf.io.gfile.makedirs(folder)
    paths = (os.path.join(folder, f"{name}.{number}" if number else name) for number in itertools.count())
    return next(path for path in paths if not tf.io.gfile.exists(path))


def remove(done):
    """Deletes a committed checkpoint: the marker first, then the files that it names, and nothing else."""
    tf.io.gfile.remove(done.path + ".commit")
    for name in done.files:
        path = os.path.join(os.path.dirname(done.path), name)
        if tf.io.gfile.exists(path) and not tf.io.gfile.isdir(path):
            tf.io.gfile.remove(path)


def write_whole(path, text):
    """Writes a small file so that a reader, or the next start after a crash, sees all of it or the old one."""
    with tf.io.gfile.GFile(path + ".new", "w") as file:
        file.write(text)
    _make_durable(path + ".new")
    tf.io.gfile.rename(path + ".new", path, overwrite=True)
    _make_durable(os.path.dirname(path) or ".")


def _write_marker(path: str, marker: dict[str, Any]) -> None:
    # Without a newline at its end, so that whatever is cut off makes it no JSON.
    write_whole(path + ".commit", json.dumps({**marker, "sha256": _checksum(marker)}, indent=1))


def _checksum(marker: dict[str, Any]) -> str:
    """The SHA-256 of all fields of a marker except `sha256` itself."""
    fields = {key: value for key, value in marker.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _load_marker(path: str) -> dict[str, Any]:
    """Reads the marker of a checkpoint as a dict with all its fields.

    Raises:
      ValueError: if it is damaged.
      UsageError: if it has a higher format number.
    """
    with tf.io.gfile.GFile(path + ".commit", "rb") as file:
        text = file.read().decode()
    first, _, second = text.partition("\n")
    if second == hashlib.sha256(first.encode()).hexdigest() + "\n":  # format 0: the fields, and their checksum below
        return {"format": 0, **json.loads(first)}
    marker = dict(json.loads(text))
    if marker["sha256"] != _checksum(marker):
        raise ValueError("its checksum is another")
    if marker["format"] > FORMAT:
        raise UsageError(
            f"{path}.commit has the format {marker['format']}, written by looplib "
            f"{marker.get('versions', {}).get('looplib', 'of an unknown version')}, and looplib {_version()} reads "
            f"formats up to {FORMAT}; install that version of looplib"
        )
    return marker


def _read_marker(path: str) -> Commit:
    marker = _load_marker(path)
    return Commit(path, *(marker[field.name] for field in dataclasses.fields(Commit) if field.name != "path"))


def _names(directory):
    return tf.io.gfile.listdir(directory) if tf.io.gfile.isdir(directory) else []


def _measure(path):
    digest, size = hashlib.sha256(), 0
    with tf.io.gfile.GFile(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _make_durable(path):
    """Asks the operating system to put a local file or directory on the disk, so that a power cut does not undo it."""
    if "://" in path:
        return  # an object store keeps what it has acknowledged
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _version():
    import looplib

    return looplib.__version__
