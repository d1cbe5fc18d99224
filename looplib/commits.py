"""Committed checkpoints: the marker written last, what it proves, and what is set aside.

A checkpoint `ckpt-<step>` consists of TensorFlow's files (`.index`, `.data-...`) and of the marker
`ckpt-<step>.commit`, which is written after them and holds their sizes and SHA-256 checksums. A checkpoint without a
whole marker does not count, whatever else is there.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import re
import sys
import time

import tensorflow as tf
from absl import logging

from looplib.errors import gist

SET_ASIDE = "set_aside"
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
      scores: dict from metric ("eval/accuracy") to the value that an evaluation of it gave.
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
    done = Commit(path, step, time.time(), files, {}, versions)
    _write_marker(done)
    return done


def add_scores(done, scores):
    """Notes the metrics of an evaluation in a marker; returns the new `Commit`.

    Args:
      done: the `Commit`.
      scores: dict from metric to number.
    """
    done = dataclasses.replace(done, scores={**done.scores, **scores})
    _write_marker(done)
    return done


def listing(directory):
    """Lists the checkpoints of a directory, newest first.

    Args:
      directory: where they are; it need not exist.

    Returns:
      list of `(step, Commit or None, reason)`: without a `Commit` the checkpoint does not count, for the reason.
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


def _write_marker(done):
    body = json.dumps({key: value for key, value in dataclasses.asdict(done).items() if key != "path"})
    write_whole(done.path + ".commit", f"{body}\n{hashlib.sha256(body.encode()).hexdigest()}\n")


def _read_marker(path):
    with tf.io.gfile.GFile(path + ".commit", "rb") as file:
        body, _, checksum = file.read().decode().partition("\n")
    if checksum != hashlib.sha256(body.encode()).hexdigest() + "\n":
        raise ValueError("its checksum is another")
    return Commit(path=path, **json.loads(body))


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
