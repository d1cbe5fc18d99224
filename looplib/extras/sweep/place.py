"""Where a sweep is: a local directory, which `stored` copies if the sweep is in an object store."""

import os
import re
import secrets
from types import TracebackType

from looplib import files
from looplib.checkpoint.lock import LockKind
from looplib.errors import SweepError
from looplib.messages import with_cure

LOCKED = LockKind("directory of a sweep", "use another --dir", "sweep.lock")
FILE = "sweep.db"  # of a sweep on one machine
_MARK = "sweep.shared"  # in the directory of a sweep on several machines


def has_runs(directory: str) -> bool:
    """Returns whether a directory has runs of trials."""
    return any(re.fullmatch(r"trial-\d{4,}", name) for name in os.listdir(directory))


class Place:
    """A local directory of a sweep, which is nowhere else. A `with` block has what the sweep does there.

    Args:
      directory: the local directory.

    Attributes:
      directory: the same.
      shown: what a user calls it.
      stored: whether it is the copy of one in an object store.
      shared: whether other machines run trials of the sweep too.
      is_alone: whether no other process writes to the local directory.
    """

    stored, shared, is_alone = False, False, True

    def __init__(self, directory: str) -> None:
        self.directory = self.shown = directory

    def prepare(self) -> None:
        """Notes whose copy the directory is, before anything else is written there."""

    def __enter__(self) -> "Place":
        """Keeps other sweeps away, and fetches what a start needs.

        Raises:
          UsageError: if the place is that of another sweep.
        """
        if os.path.lexists(os.path.join(self.directory, _MARK)):
            raise SweepError(
                f"{self.directory} has a sweep on several machines; give its --storage, or use another --dir"
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Copies what is missing, and lets other sweeps in."""

    def mark(self, make: bool = False) -> str:
        """Returns what tells a place of several machines from any other, by whatever path they have it; "" for nothing.

        Args:
          make: whether to mark it, if it is not yet.
        """
        return ""

    def has_runs(self) -> bool:
        """Returns whether there are runs of an earlier sweep, when the study of a new one is made."""
        return has_runs(self.directory)

    def gather(self) -> None:
        """Fetches what the results of a sweep need of runs on other machines."""

    def flags(self, folder: str) -> list[str]:
        """Returns the flags by which a run has its run directory."""
        return [f"--model_dir={folder}"]

    def take(self, folder: str) -> int:
        """Fetches what is beside a run that continues; returns the step of its newest checkpoint elsewhere."""
        return 0

    def note(self) -> int:
        """Notes that a trial was begun, or has ended, so that the database has changed; returns a number for `has`."""
        return 0

    def has(self, noted: int) -> bool:
        """Returns whether what was noted is safe, so that a run may be started which the next start has to know of."""
        return True

    def check(self) -> None:
        """Raises `UsageError` if another sweep has taken the place."""


class SharedPlace(Place):
    """A directory that several machines run one sweep in, such as one in a file system that they share."""

    shared, is_alone = True, False

    def __enter__(self) -> Place:
        """Refuses the directory of a sweep on one machine."""
        if os.path.lexists(os.path.join(self.directory, FILE)):
            raise SweepError(
                f"{self.directory} has the {FILE} of a sweep on one machine; leave out --storage to continue that, "
                "or use another --dir"
            )
        return self

    def mark(self, make: bool = False) -> str:
        """Returns the mark of the directory, as `Place` does.

        Raises:
          SweepError: if it cannot be read or written.
        """
        path = os.path.join(self.directory, _MARK)
        try:
            if make and not os.path.lexists(path):
                files.write_whole(path, secrets.token_hex(16))
            found = files.read_text(path, most=100)
        except FileNotFoundError:
            return ""
        except (OSError, ValueError) as error:
            raise SweepError(f"{path} cannot be read or written ({with_cure(error, 'move it away')})") from error
        if not re.fullmatch("[0-9a-f]{32}", found):
            raise SweepError(f"{path} is not what a sweep has written there; move it away, or use another --dir")
        return found
