"""Committed checkpoints: markers that prove them, found, verified, set aside and removed.

A checkpoint `ckpt-<step>` consists of TensorFlow's files (`.index`, `.data-...`) and of the marker
`ckpt-<step>.commit`, which is written after them. A checkpoint without an intact marker is invalid, whatever other
files it has. A checkpoint that is proven damaged is set aside; one that cannot be read now, or that a newer looplib
wrote, is not.

A marker is one JSON object: `format`, `step`, `time`, `files` (with sizes and SHA-256 checksums), `scores`, `versions`,
and `sha256`, the checksum of all the others. Unknown fields are kept and ignored; a higher `format` is refused by
name; 2 is for a checkpoint with files of several workers. A marker may come from somebody else, so it may name
only files of its own checkpoint.

`ckpt-<step>.unfinished` is beside files that are being written, moved or deleted. It shows the next start that a part
of them is looplib's own. Files without it and without a marker may be another program's: they stay, and are set aside
only when a checkpoint of their step is to be written.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, TypedDict

from absl import logging

from looplib.base import files, folders
from looplib.base.decoding import parse_json
from looplib.base.messages import gist
from looplib.errors import CheckpointError, RunDirectoryError, UsageError

FORMAT = 2
_LARGEST = sys.float_info.max
SET_ASIDE = "set_aside"
UNFINISHED = ".unfinished"
_NEW = r"(?:\.[0-9a-f]{16}\.new)?"  # see `files.new_name`
_OWN = rf"\.(?:commit|unfinished){_NEW}"  # of names that looplib alone gives
_NAME = re.compile(
    rf"(ckpt-(\d+))(?:({_OWN})|(?:\.index|\.data-\d+-of-\d+)(?:\.tempstate\d+)?|_temp|\.position-\d+-of-\d+{_NEW})/?$"
)


class FileChecksum(TypedDict):
    """The size and the checksum of one file, the objects of a marker's `files`."""

    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Commit:
    """A committed checkpoint, described by its marker.

    Attributes:
      path: `<directory>/ckpt-<step>`, what TensorFlow calls the prefix.
      step: the global step.
      time: when it was committed, in seconds since the epoch.
      files: dict from file name to {"bytes": int, "sha256": str}.
      scores: dict from metric ("eval/accuracy") to the value that an evaluation gave, or None if it was not finite.
      versions: dict of the versions that wrote it.
    """

    path: str
    step: int
    time: float
    files: dict[str, FileChecksum]
    scores: dict[str, float | None]
    versions: dict[str, str]

    @property
    def id(self) -> tuple[int, int]:
        """The step and the time in microseconds, which differ from those of any other checkpoint of the run."""
        return self.step, int(1e6 * self.time)

    @property
    def bytes(self) -> int:
        """The size of its files in bytes."""
        return sum(file["bytes"] for file in self.files.values())


def files_of(prefix: str) -> re.Pattern[str]:
    """Returns the regular expression of the names of a checkpoint's files, without its marker."""
    return re.compile(re.escape(prefix) + r"\.(index|data-\d+-of-\d+)")


def positions_of(prefix: str) -> re.Pattern[str]:
    """Returns the pattern of the names of the files that hold the positions of workers, see `saving.write_position`."""
    return re.compile(re.escape(prefix) + r"\.position-(\d+)-of-(\d+)")


def position_path(path: str, index: int, count: int) -> str:
    """Returns the path of the file with the position of one of several workers."""
    return f"{path}.position-{index}-of-{count}"


def write_marker(done: Commit) -> None:
    """Writes the marker of a new checkpoint; raises `OSError` if it cannot."""
    fields = {key: value for key, value in dataclasses.asdict(done).items() if key != "path"}
    _write(done.path, {"format": _format(done), **fields})


def add_scores(done: Commit, scores: Mapping[str, float]) -> Commit:
    """Adds the metrics of an evaluation to a marker, with None for non-finite ones; returns the new `Commit`."""
    fields = _load(done.path)
    finite = {name: score if math.isfinite(score) else None for name, score in scores.items()}
    _write(done.path, {**fields, "format": _format(done), "scores": {**fields["scores"], **finite}})
    return read_marker(done.path)


def read_marker(path: str) -> Commit:
    """Reads the marker of the checkpoint at a path.

    Raises:
      ValueError, KeyError, TypeError: if it is damaged, or not the marker of this checkpoint.
      OSError: if it cannot be read.
      UsageError: if it has a higher format number.
    """
    fields = _load(path)
    names = [field.name for field in dataclasses.fields(Commit) if field.name != "path"]
    done = Commit(path, **{name: fields[name] for name in names if name in fields})
    _check(done)
    return done


def _check(done: Commit) -> None:
    prefix = os.path.basename(done.path)
    if type(done.step) is not int or prefix != f"ckpt-{done.step}":
        raise ValueError(f"its step is {done.step!r:.50}")
    if type(done.time) not in (int, float) or not 0 <= done.time < 1e11 or not isinstance(done.versions, dict):
        raise ValueError("its time or its versions cannot be right")
    own, positions = files_of(prefix), positions_of(prefix)
    for name, file in done.files.items():
        if not own.fullmatch(name) and not positions.fullmatch(name):
            raise ValueError(f"it lists {name!r:.100}, which is not a file of this checkpoint")
        if type(file["bytes"]) is not int or file["bytes"] < 0 or not isinstance(file["sha256"], str):
            raise ValueError(f"the size or checksum of {name} is of another type")
    for name, score in done.scores.items():
        known = score is None or isinstance(score, float) or (isinstance(score, int) and abs(score) <= _LARGEST)
        if not known:
            raise ValueError(f"the score {name!r:.100} is {score!r:.50}")


def _format(done: Commit) -> int:
    """Returns the lowest format that has all that a marker says."""
    positions = positions_of(os.path.basename(done.path))
    return FORMAT if any(positions.fullmatch(name) for name in done.files) else 1


def _write(path: str, fields: dict[str, Any]) -> None:
    # Without a newline at its end, so that a marker that was cut off anywhere is not JSON.
    files.write_whole(path + ".commit", json.dumps({**fields, "sha256": _checksum(fields)}, indent=1))


def _checksum(fields: dict[str, Any]) -> str:
    """Returns the SHA-256 of all fields of a marker except `sha256` itself."""
    others = {key: value for key, value in fields.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def _load(path: str) -> dict[str, Any]:
    """Reads a marker as a dict with all its fields."""
    fields = dict(parse_json(files.read_text(path + ".commit")))
    if fields["sha256"] != _checksum(fields):
        raise ValueError("its checksum is another")
    if type(fields["format"]) is not int:
        raise ValueError(f"its format is {fields['format']!r:.50}")
    if fields["format"] > FORMAT:
        by = fields.get("versions")
        raise CheckpointError(
            f"{path}.commit has the format {fields['format']}, written by looplib "
            f"{by.get('looplib') if isinstance(by, dict) else None}, and looplib {version()} reads formats up to "
            f"{FORMAT}; install that version of looplib"
        )
    return fields


def version() -> str:
    """Returns looplib's version."""
    import looplib

    return looplib.__version__


@dataclasses.dataclass(frozen=True)
class FoundCheckpoint:
    """The checkpoint of one step as a directory holds it.

    Attributes:
      step: the global step.
      commit: the `Commit`; None if the checkpoint is invalid.
      reason: why it is invalid, as the end of a sentence; "" if it is valid.
      unread: the error for which its marker could not be read, if that does not prove any damage.
    """

    step: int
    commit: Commit | None
    reason: str = ""
    unread: files.CannotReadError | None = None


def path_of(directory: str, step: int) -> str:
    """Returns the path of a step's checkpoint in a directory."""
    return os.path.join(directory, f"ckpt-{step}")


def commit(path: str, step: int, positions: Mapping[str, FileChecksum] = {}) -> Commit:
    """Commits the files that TensorFlow has written: reads them, makes them durable, writes the marker last.

    Args:
      path: the checkpoint's path.
      step: its global step.
      positions: what `saving.write_position` returned. A file that does not read as it was written is left out.

    Raises:
      OSError: if files are missing or cannot be read or written.
    """
    import tensorflow as tf

    directory, prefix = os.path.split(path)
    own = files_of(prefix)
    names = [name for name in os.listdir(directory) if own.fullmatch(name)]
    if f"{prefix}.index" not in names or len(names) < 2:
        raise OSError(f"only {', '.join(sorted(names)) or 'nothing'} of the files of {prefix} was written")
    tf.train.list_variables(path)  # a checkpoint that TensorFlow cannot open is not committed
    measured = {name: _measure(os.path.join(directory, name)) for name in sorted(names)}
    measured |= {name: file for name, file in positions.items() if _is_there(os.path.join(directory, name), file)}
    for name in measured:
        files.make_durable(os.path.join(directory, name))
    versions = {"looplib": version(), "tensorflow": tf.__version__, "python": sys.version.split()[0]}
    done = Commit(path, step, time.time(), measured, {}, versions)
    write_marker(done)
    folders.remove(directory, prefix + UNFINISHED)
    return done


def _is_there(path: str, expected: FileChecksum) -> bool:
    """Returns whether this process reads what another worker has written; warns if not."""
    try:
        reason = _compare(path, expected, thorough=True)
    except files.CannotReadError as error:
        reason = str(error)
    if reason:
        logging.warning(
            "the chief does not see a position in the data that another worker saved (%s), so that a resumed run will "
            "skip the data already used; use a model_dir on a file system that all workers share",
            reason,
        )
    return not reason


def begin(path: str, where: str = "") -> None:
    """Notes that the files of a checkpoint are about to be written or moved; `commit` ends it."""
    text = "looplib was writing, moving or deleting the files of this checkpoint\n"
    files.write_whole(path + UNFINISHED, text + where)


def checkpoint_folder(directory: str | os.PathLike[str]) -> str:
    """Returns the directory that holds the checkpoints of a run directory, which may be that directory itself."""
    directory = files.resolve(directory, "the run directory")
    if not os.path.isdir(directory):
        raise RunDirectoryError(f"{directory} is not a directory; name a run directory, as --model_dir does")
    inner = os.path.join(directory, "checkpoints")
    return inner if os.path.isdir(inner) else directory


def listing(directory: str) -> list[FoundCheckpoint]:
    """Lists looplib's checkpoints in a directory, which need not exist, newest first, including invalid ones."""
    found = _by_step(directory)
    return [_look_at(directory, step, found[step]) for step in sorted(found, reverse=True) if _is_own(found[step])]


def _by_step(directory: str) -> dict[int, list[str]]:
    """Returns the file names by step, including files of other programs."""
    found: dict[int, list[str]] = {}
    for name in _names(directory):
        match = _NAME.match(name)
        if match:
            found.setdefault(int(match[2]), []).append(name.rstrip("/"))
    return found


def _is_own(names: list[str]) -> bool:
    return any(_NAME.match(name)[3] for name in names)


def foreign(directory: str) -> list[int]:
    """Returns the steps for which a directory holds files of other programs."""
    return sorted(step for step, names in _by_step(directory).items() if not _is_own(names))


def set_foreign_aside(directory: str, step: int) -> None:
    """Moves files of another program, which stand where a step's checkpoint is to be written, into `set_aside`."""
    if step in foreign(directory):
        place = set_aside(directory, step)
        logging.warning("files of ckpt-%d without looplib's marker blocked a save; moved to %s", step, place)


def list_is_foreign(directory: str) -> bool:
    """Returns whether TensorFlow's list `checkpoint` names an existing checkpoint of another program as the newest."""
    try:
        match = re.search(r'model_checkpoint_path: "([^"]+)"', files.read_text(os.path.join(directory, "checkpoint")))
    except (ValueError, OSError):
        return False
    path = os.path.join(directory, match[1]) if match else ""
    own = (os.path.exists(path + ending) for ending in (".commit", UNFINISHED))
    return os.path.exists(f"{path}.index") and not any(own)


def _look_at(directory: str, step: int, names: list[str]) -> FoundCheckpoint:
    path = path_of(directory, step)
    if f"ckpt-{step}.commit" not in names:
        return FoundCheckpoint(step, None, "its save or deletion is incomplete")
    try:
        return FoundCheckpoint(step, read_marker(path))
    except UsageError:  # of a newer looplib: not damaged, and not to be passed over
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        reason = f"its marker cannot be read ({gist(error)})"
        proven = files.proves_damage(error) or isinstance(error, AttributeError)
        return FoundCheckpoint(step, None, reason, None if proven else files.cannot_read(f"{path}.commit", error))


def committed(directory: str) -> list[Commit]:
    """Returns the committed checkpoints of a directory, newest first, unverified."""
    return [found.commit for found in listing(directory) if found.commit]


def newest(directory: str) -> Commit | None:
    """Returns the newest `Commit` in a directory, unverified, or None."""
    return next(iter(committed(directory)), None)


def latest_checkpoint(directory: str) -> str | None:
    """Returns the path of the newest committed checkpoint in a directory, or None."""
    done = newest(directory)
    return done.path if done else None


def verify(done: Commit, thorough: bool = True) -> str:
    """Compares a checkpoint's files with its marker. A file that differs is read a second time.

    Args:
      done: the `Commit`.
      thorough: reads the files through; otherwise only their sizes are compared.

    Returns:
      "" if all is well, else what is proven to be wrong, as the end of a sentence.

    Raises:
      files.CannotReadError: if a file cannot be read now, for a reason that proves no damage.
    """
    for name, expected in done.files.items():
        path = os.path.join(os.path.dirname(done.path), name)
        reason = _compare(path, expected, thorough) and _compare(path, expected, thorough)
        if reason:
            return reason
    return ""


def _compare(path: str, expected: FileChecksum, thorough: bool) -> str:
    return files.difference(path, expected["bytes"], expected["sha256"] if thorough else None)


def newest_intact(directory: str, tidy: bool) -> Commit | None:
    """Returns the newest checkpoint that is committed and reads as it was written, or None.

    Args:
      directory: where the checkpoints are.
      tidy: moves invalid checkpoints into `set_aside`, one warning each; for the holder of the directory's lock.

    Raises:
      files.CannotReadError: if a newer one than that cannot be read now. Nothing is moved then.
      UsageError: if a newer looplib wrote one.
    """
    intact, others = None, []
    for found in listing(directory):
        if found.unread is not None:
            if intact is None:
                raise found.unread
            continue  # older than what the run continues from, so it is left unchanged
        reason = found.reason or (verify(found.commit) if intact is None else "")
        if reason:
            others.append((found.step, reason))
        elif intact is None:
            intact = found.commit
    if tidy:
        in_the_way = os.path.join(directory, "checkpoint")  # where each save writes TensorFlow's list
        if os.path.isdir(in_the_way):
            place = _free_place(directory, "checkpoint")
            folders.move(directory, "checkpoint", *os.path.split(place))
            logging.warning("%s is a directory instead of a file; moved to %s", in_the_way, place)
        for step, reason in others:
            place = set_aside(directory, step)
            logging.warning("the checkpoint of step %d is invalid: %s; moved to %s", step, reason, place)
        if others := foreign(directory):
            logging.warning(
                "%s in %s have no looplib marker; they are ignored and left in place",
                ", ".join(f"ckpt-{step}" for step in others), directory
            )  # fmt: skip
    return intact


def set_aside(directory: str, step: int) -> str:
    """Moves a checkpoint's files into `<directory>/set_aside`, which looplib ignores; returns their new path."""
    prefix = f"ckpt-{step}"
    unfinished = path_of(directory, step) + UNFINISHED
    place = _begun_place(directory, prefix) or _free_place(directory, prefix)
    folders.make_folder(directory, SET_ASIDE, os.path.basename(place))
    if not os.path.isdir(unfinished):
        begin(path_of(directory, step), f"to {os.path.basename(place)}\n")
    # The marker goes first: at no moment is an incomplete checkpoint valid.
    names = sorted(_names(directory), key=lambda name: not name.startswith(f"{prefix}.commit"))
    for name in names:
        match = _NAME.match(name)
        name = name.rstrip("/")
        if match and match[1] == prefix and (match[3] != UNFINISHED or os.path.isdir(unfinished)):
            folders.move(directory, name, place)
    folders.remove(directory, prefix + UNFINISHED)
    return place


def set_aside_before(directory: str) -> list[str]:
    """Returns the folders in `<directory>/set_aside` that hold a checkpoint that was once committed."""
    folder = os.path.join(directory, SET_ASIDE)
    places = [os.path.join(folder, name.rstrip("/")) for name in sorted(_names(folder))]
    return [place for place in places if any(name.endswith(".commit") for name in _names(place))]


def _begun_place(directory: str, prefix: str) -> str:
    """Returns where a process that was killed has begun to set a checkpoint aside; "" for nowhere."""
    with contextlib.suppress(OSError, ValueError):
        *_, last = files.read_text(os.path.join(directory, prefix + UNFINISHED)).splitlines()
        name = last.removeprefix("to ")
        place = os.path.join(directory, SET_ASIDE, name)
        if re.fullmatch(rf"{prefix}(\.\d+)?", name) and os.path.isdir(place) and not os.path.islink(place):
            return place
    return ""


def _free_place(directory: str, name: str) -> str:
    """Makes `<directory>/set_aside`; returns an unused path in it."""
    folder = folders.make_folder(directory, SET_ASIDE)
    return files.free_name(os.path.join(folder, name))


def remove(done: Commit) -> None:
    """Deletes a committed checkpoint: the marker first, then the files that it names, and nothing else."""
    directory, prefix = os.path.split(done.path)
    folders.delete(f"{done.path}.")
    folders.move(directory, f"{prefix}.commit", directory, prefix + UNFINISHED)
    for name in done.files:  # names of this checkpoint's files, in this directory: `read_marker` has looked
        path = folders.inside(directory, name)
        if os.path.islink(path) or not os.path.isdir(path):
            folders.remove(directory, name)
    folders.remove(directory, prefix + UNFINISHED)


def _names(directory: str) -> list[str]:
    return os.listdir(directory) if os.path.isdir(directory) else []


def _measure(path: str) -> FileChecksum:
    size, sha256 = files.measure(path)
    return {"bytes": size, "sha256": sha256}
