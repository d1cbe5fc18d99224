"""What trackers keep in the run directory, so that a run that resumes continues its tracked run, and read there."""

import os
import re

from looplib.base import files
from looplib.run import run_json


def read_id(directory: str, tracker: str) -> str | None:
    """Returns the id of the tracked run; None if there is none, or the file is damaged.

    Args:
      directory: the run directory.
      tracker: the tracker's name.

    Raises:
      OSError: if the file cannot be read, which does not mean that there is none.
    """
    try:
        text = files.read_text(_path(directory, tracker), most=100).strip()
    except (FileNotFoundError, ValueError):
        return None
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else None


def keep_id(directory: str, tracker: str, value: str) -> None:
    """Keeps the id of the tracked run."""
    files.write_whole(_path(directory, tracker), value + "\n")


def how_it_ended(directory: str) -> str:
    """Returns the `status` that `run.json` has: "done", "failed" or "preempted"; "running" if it was killed."""
    return str(run_json.read_report(run_json.path_of(directory, trains=True)).get("status"))


def name_of(directory: str) -> str:
    """Returns the name of a run, which its directory has."""
    return os.path.basename(os.path.normpath(directory))


def _path(directory: str, tracker: str) -> str:
    return os.path.join(directory, f"{tracker}.id")
