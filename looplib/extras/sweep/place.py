"""Where a sweep is: a local directory, which `stored` copies if the sweep is in an object store."""

from types import TracebackType

from looplib.checkpoint.lock import LockKind

LOCKED = LockKind("directory of a sweep", "use another --dir", "sweep.lock")


class Place:
    """A local directory of a sweep, which is nowhere else. A `with` block has what the sweep does there.

    Args:
      directory: the local directory.

    Attributes:
      directory: the same.
      shown: what a user calls it.
      stored: whether it is the copy of one in an object store.
    """

    stored = False

    def __init__(self, directory: str) -> None:
        self.directory = self.shown = directory

    def prepare(self) -> None:
        """Notes whose copy the directory is, before anything else is written there."""

    def __enter__(self) -> "Place":
        """Keeps other sweeps away, and fetches what a start needs."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Copies what is missing, and lets other sweeps in."""

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
