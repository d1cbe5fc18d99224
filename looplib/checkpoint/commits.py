"""Committed checkpoints: found, verified, set aside and removed.

A checkpoint `ckpt-<step>` consists of TensorFlow's files (`.index`, `.data-...`) and of the marker
`ckpt-<step>.commit`, which is written after them, see `marker`. A checkpoint without an intact marker is invalid,
whatever other files it has. A checkpoint that is proven damaged is set aside; one that cannot be read now, or that a
newer looplib wrote, is not.

`ckpt-<step>.unfinished` is beside files that are being written, moved or deleted. It shows the next start that a part
of them is looplib's own. Files without it and without a marker may be another program's: they stay, and are set aside
only when a checkpoint of their step is to be written.
"""

import dataclasses
import os
import re
import sys
import time
from collections.abc import Mapping

from absl import logging

from looplib import files, folders
from looplib.checkpoint import marker
from looplib.checkpoint.marker import Commit, Measured
from looplib.errors import UsageError, gist

SET_ASIDE = "set_aside"
UNFINISHED = ".unfinished"
_NEW = r"(?:(?:\.[0-9a-f]{16})?\.new)?"  # see `files.new_name`; earlier versions had one name
_OWN = rf"\.(?:commit|unfinished){_NEW}"  # of names that looplib alone gives
_NAME = re.compile(
    rf"(ckpt-(\d+))(?:({_OWN})|(?:\.index|\.data-\d+-of-\d+)(?:\.tempstate\d+)?|_temp|\.position-\d+-of-\d+{_NEW})/?$"
)


@dataclasses.dataclass(frozen=True)
class Found:
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


def commit(path: str, step: int, positions: Mapping[str, Measured] = {}) -> Commit:
    """Commits the files that TensorFlow has written: reads them, makes them durable, writes the marker last.

    Args:
      path: the checkpoint's path.
      step: its global step.
      positions: what `worker_positions.write` returned. A file that does not read as it was written is left out.

    Returns:
      A `Commit`.

    Raises:
      OSError, tf.errors.OpError: if files are missing or cannot be read or written.
    """
    import tensorflow as tf

    directory, prefix = os.path.split(path)
    own = marker.files_of(prefix)
    names = [name for name in tf.io.gfile.listdir(directory) if own.fullmatch(name)]
    if f"{prefix}.index" not in names or len(names) < 2:
        raise OSError(f"only {', '.join(sorted(names)) or 'nothing'} of the files of {prefix} was written")
    tf.train.list_variables(path)  # a checkpoint that TensorFlow cannot open is not committed
    measured = {name: _measure(os.path.join(directory, name)) for name in sorted(names)}
    measured |= {name: file for name, file in positions.items() if _is_there(os.path.join(directory, name), file)}
    for name in measured:
        files.make_durable(os.path.join(directory, name))
    versions = {"looplib": marker.version(), "tensorflow": tf.__version__, "python": sys.version.split()[0]}
    done = Commit(path, step, time.time(), measured, {}, versions)
    marker.write(done)
    folders.remove(directory, prefix + UNFINISHED)
    return done


def _is_there(path: str, expected: Measured) -> bool:
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


def begin(path: str) -> None:
    """Notes that the files of a checkpoint are about to be written or moved; `commit` ends it.

    Raises:
      OSError, tf.errors.OpError: if it cannot be written.
    """
    files.write_whole(path + UNFINISHED, "looplib was writing, moving or deleting the files of this checkpoint\n")


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
    return committed(place_of(directory))


def place_of(directory: str | os.PathLike[str]) -> str:
    """Returns the directory that holds the checkpoints of a run directory, which may be that directory itself.

    Raises:
      UsageError: if there is no such directory.
    """
    directory = files.resolve(directory, "the run directory")
    if not files.is_directory(directory):
        raise UsageError(f"{directory} is not a directory; name a run directory, as --model_dir does")
    inner = os.path.join(directory, "checkpoints")
    return inner if files.is_directory(inner) else directory


def listing(directory: str) -> list[Found]:
    """Lists looplib's checkpoints in a directory, newest first, including invalid ones.

    Args:
      directory: where they are; it need not exist.

    Raises:
      UsageError: if a newer looplib wrote a checkpoint in a format that this one cannot read.
    """
    found = _by_step(directory)
    return [_look_at(directory, step, found[step]) for step in sorted(found, reverse=True) if _is_own(found[step])]


def _by_step(directory: str) -> dict[int, list[str]]:
    """Returns the names of the files of each step, also those of other programs."""
    found: dict[int, list[str]] = {}
    for name in _names(directory):
        match = _NAME.match(name)
        if match:
            found.setdefault(int(match[2]), []).append(name.rstrip("/"))
    return found


def _is_own(names: list[str]) -> bool:
    return any(_NAME.match(name)[3] for name in names)


def foreign(directory: str) -> list[int]:
    """Returns the steps of which a directory holds files that are not looplib's."""
    return sorted(step for step, names in _by_step(directory).items() if not _is_own(names))


def make_way(directory: str, step: int) -> None:
    """Moves files of another program, which stand where a step's checkpoint is to be written, into `set_aside`."""
    if step in foreign(directory):
        place = set_aside(directory, step)
        logging.warning("files of ckpt-%d without looplib's marker blocked a save; moved to %s", step, place)


def list_is_foreign(directory: str) -> bool:
    """Returns whether TensorFlow's list `checkpoint` names an existing checkpoint of another program as the newest."""
    try:
        match = re.search(r'model_checkpoint_path: "([^"]+)"', files.read_text(os.path.join(directory, "checkpoint")))
    except (ValueError, *files.failures(directory)):
        return False
    path = os.path.join(directory, match[1]) if match else ""
    return files.exists(f"{path}.index") and not any(files.exists(path + ending) for ending in (".commit", UNFINISHED))


def _look_at(directory: str, step: int, names: list[str]) -> Found:
    path = path_of(directory, step)
    if f"ckpt-{step}.commit" not in names:
        return Found(step, None, "its save or deletion is incomplete")
    try:
        return Found(step, marker.read(path))
    except UsageError:  # of a newer looplib: not damaged, and not to be passed over
        raise
    except (ValueError, KeyError, TypeError, AttributeError, *files.failures(path)) as error:
        reason = f"its marker cannot be read ({gist(error)})"
        proven = files.proves_damage(error) or isinstance(error, AttributeError)
        return Found(step, None, reason, None if proven else files.cannot_read(f"{path}.commit", error))


def committed(directory: str) -> list[Commit]:
    """Returns the committed checkpoints of a directory, newest first, unverified."""
    return [found.commit for found in listing(directory) if found.commit]


def newest(directory: str) -> Commit | None:
    """Returns the newest `Commit` in a directory, unverified, or None."""
    return next(iter(committed(directory)), None)


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


def _compare(path: str, expected: Measured, thorough: bool) -> str:
    return files.difference(path, expected["bytes"], expected["sha256"] if thorough else None)


def newest_intact(directory: str, tidy: bool) -> Commit | None:
    """Finds the newest checkpoint that is committed and reads as it was written.

    Args:
      directory: where the checkpoints are.
      tidy: moves invalid checkpoints into `set_aside`, one warning each. Only the process that holds the directory's
        lock may.

    Returns:
      A `Commit`, or None.

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
        if files.is_directory(in_the_way):
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
    place = _free_place(directory, prefix)
    folders.make_folder(directory, SET_ASIDE, os.path.basename(place))
    unfinished = path_of(directory, step) + UNFINISHED
    if not files.exists(unfinished):
        begin(path_of(directory, step))
    # The marker goes first: at no moment is an incomplete checkpoint valid.
    names = sorted(_names(directory), key=lambda name: not name.startswith(f"{prefix}.commit"))
    for name in names:
        match = _NAME.match(name)
        name = name.rstrip("/")
        if match and match[1] == prefix and (match[3] != UNFINISHED or files.is_directory(unfinished)):
            folders.move(directory, name, place)
    folders.remove(directory, prefix + UNFINISHED)
    return place


def set_aside_before(directory: str) -> list[str]:
    """Returns the places in `<directory>/set_aside` that hold a checkpoint which was once committed."""
    folder = os.path.join(directory, SET_ASIDE)
    places = [os.path.join(folder, name.rstrip("/")) for name in sorted(_names(folder))]
    return [place for place in places if any(name.endswith(".commit") for name in _names(place))]


def _free_place(directory: str, name: str) -> str:
    """Makes `<directory>/set_aside`; returns an unused path in it."""
    folder = folders.make_folder(directory, SET_ASIDE)
    return files.free_name(os.path.join(folder, name))


def remove(done: Commit) -> None:
    """Deletes a committed checkpoint: the marker first, then the files that it names, and nothing else."""
    directory, prefix = os.path.split(done.path)
    folders.move(directory, f"{prefix}.commit", directory, prefix + UNFINISHED)
    for name in done.files:  # names of this checkpoint's files, in this directory: `marker.read` has looked
        path = folders.inside(directory, name)
        if os.path.islink(path) or not files.is_directory(path):
            folders.remove(directory, name)
    folders.remove(directory, prefix + UNFINISHED)


def _names(directory: str) -> list[str]:
    return files.names_in(directory) if files.is_directory(directory) else []


def _measure(path: str) -> Measured:
    size, sha256 = files.measure(path)
    return {"bytes": size, "sha256": sha256}
