"""The run directory: its name, and what may stand in it."""

import os

from absl import logging

from looplib import files
from looplib.errors import UsageError

# TensorFlow takes these in the name of a checkpoint for a pattern.
_PATTERN = set("[]\\*?")
_FOLDERS = ("checkpoints", os.path.join("checkpoints", "set_aside"), "train", "eval")
_FILES = ("lock", "metrics.jsonl", "metrics.voided.jsonl", "run.json", "run_eval.json")


def resolve(model_dir: str | os.PathLike[str]) -> str:
    """Returns the one name of a run directory: absolute, so that a later `chdir` does not split the run.

    Args:
      model_dir: the directory; "file://" before it is left out.

    Raises:
      UsageError: for a name that TensorFlow would take for a pattern.
    """
    path = os.fspath(model_dir)
    path = path.removeprefix("file://") if path.startswith("file:///") else path
    path = path if files.is_remote(path) else os.path.abspath(path)
    if found := sorted(_PATTERN & set(path)):
        raise UsageError(
            f"model_dir {path} has {' and '.join(found)} in its name, which TensorFlow takes for a pattern of file "
            "names; name a directory without"
        )
    return path


def check_inside(model_dir: str, writes: bool) -> None:
    """Checks that what a run writes stays inside of its directory, which may come from somebody else.

    Args:
      model_dir: the run directory.
      writes: whether this process writes there; it then moves something else that stands where a file of the run
        belongs, such as a directory or a FIFO, out of the way, with a line for each.

    Raises:
      UsageError: if a folder of the run is a symbolic link or not a directory.
    """
    if files.is_remote(model_dir):
        return
    for name in _FOLDERS:
        path = os.path.join(model_dir, name)
        if os.path.islink(path):
            raise UsageError(
                f"{path} is a symbolic link, and looplib writes and deletes nothing outside of a run directory; put a "
                "directory there, or let model_dir itself be the link"
            )
        if os.path.lexists(path) and not os.path.isdir(path):
            raise UsageError(f"{path} is not a directory, as a run directory has there; move it away")
    for name in _FILES if writes else ():
        path = os.path.join(model_dir, name)
        if os.path.lexists(path) and (os.path.islink(path) or not os.path.isfile(path)):
            place = files.free_name(f"{path}.aside")
            os.rename(path, place)
            logging.warning("%s is not a file; it was moved to %s", path, place)
