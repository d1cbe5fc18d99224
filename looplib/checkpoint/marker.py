"""The marker of a checkpoint, which lists the committed files and the checksums that prove them.

A marker, `ckpt-<step>.commit`, is one JSON object: `format`, `step`, `time`, `files` (with sizes and SHA-256
checksums), `scores`, `versions`, and `sha256`, the checksum of all the others. Fields that are not known here are kept
and ignored; a higher `format` is refused by name; 2 is that of a checkpoint with files of several workers. A marker may
come from somebody else, so it may name only files of its own checkpoint.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
import sys
from typing import Any, TypedDict

from looplib import files
from looplib.errors import UsageError

FORMAT = 2


class Measured(TypedDict):
    """The size and the checksum of one file, the objects of a marker's `files`."""

    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Commit:
    """A committed checkpoint, described by its marker.

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
    files: dict[str, Measured]
    scores: dict[str, float | None]
    versions: dict[str, str]

    @property
    def bytes(self) -> int:
        """The size of its files in bytes."""
        return sum(file["bytes"] for file in self.files.values())


def files_of(prefix: str) -> re.Pattern[str]:
    """Returns the pattern of the names of a checkpoint's files, without its marker; not a user's ckpt-4.index.bak."""
    return re.compile(re.escape(prefix) + r"\.(index|data-\d+-of-\d+)")


def positions_of(prefix: str) -> re.Pattern[str]:
    """Returns the pattern of the names of the files that hold the positions of workers, see `worker_positions`."""
    return re.compile(re.escape(prefix) + r"\.position-(\d+)-of-(\d+)")


def write(done: Commit) -> None:
    """Writes the marker of a new checkpoint.

    Raises:
      OSError, tf.errors.OpError: if it cannot be written.
    """
    fields = {key: value for key, value in dataclasses.asdict(done).items() if key != "path"}
    _write(done.path, {"format": _format(done), **fields})


def add_scores(done: Commit, scores: dict[str, float]) -> Commit:
    """Adds the metrics of an evaluation to a marker.

    Args:
      done: the `Commit`.
      scores: dict from metric to number. One that is not finite is kept as None, because JSON has no word for it.

    Returns:
      The new `Commit`.
    """
    from looplib.task.plain import as_number  # imports TensorFlow, which tools that list checkpoints do without

    fields = _load(done.path)
    scores = {name: as_number(f"the score {name!r}", score) for name, score in scores.items()}
    finite = {name: score if math.isfinite(score) else None for name, score in scores.items()}
    _write(done.path, {**fields, "format": _format(done), "scores": {**fields["scores"], **finite}})
    return read(done.path)


def read(path: str) -> Commit:
    """Reads the marker of a checkpoint.

    Args:
      path: the checkpoint's path, without ".commit".

    Raises:
      ValueError, KeyError, TypeError: if it is damaged, or not the marker of this checkpoint.
      OSError, tf.errors.OpError: if it cannot be read.
      UsageError: if it has a higher format number.
    """
    fields = _load(path)
    known = [field for field in dataclasses.fields(Commit) if field.name != "path"]
    # A field that was added later has a default, which markers of before are read with.
    needed = [field.name for field in known if field.default is field.default_factory is dataclasses.MISSING]
    values = {field.name: fields[field.name] for field in known if field.name in needed or field.name in fields}
    done = Commit(path, **values)
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
        if score is not None and not _is_score(score):
            raise ValueError(f"the score {name!r:.100} is {score!r:.50}")


def _is_score(value: object) -> bool:
    if isinstance(value, int):  # older versions wrote Boolean scores as they were
        return abs(value) <= sys.float_info.max
    return isinstance(value, float)


def _format(done: Commit) -> int:
    """Returns the lowest format that has all that a marker says, so that older versions of looplib can read it."""
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
    text = files.read_text(path + ".commit")
    first, _, second = text.partition("\n")
    if second == hashlib.sha256(first.encode()).hexdigest() + "\n":  # format 0: the fields, and their checksum below
        return {"format": 0, **files.parse_json(first)}
    fields = dict(files.parse_json(text))
    if fields["sha256"] != _checksum(fields):
        raise ValueError("its checksum is another")
    if type(fields["format"]) is not int:
        raise ValueError(f"its format is {fields['format']!r:.50}")
    if fields["format"] > FORMAT:
        by = fields.get("versions")
        raise UsageError(
            f"{path}.commit has the format {fields['format']}, written by looplib "
            f"{by.get('looplib') if isinstance(by, dict) else None}, and looplib {version()} reads formats up to "
            f"{FORMAT}; install that version of looplib"
        )
    return fields


def version() -> str:
    """Returns looplib's version."""
    import looplib

    return looplib.__version__
