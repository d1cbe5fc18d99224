"""The copy of a run directory in an object store, as its writers see it; `buckets.mirror` makes one for a URL."""

import os


class Mirror:
    """Mirrors a run directory in an object store. This base class is for a local directory, and copies nothing."""

    directory = ""  # the local run directory
    url = ""  # of the run in the store, for messages

    def begin(self, trains: bool) -> None:
        """Fetches what the chief needs. For a training, takes the run in the store, and begins to copy what is new."""

    def refresh(self) -> None:
        """Fetches what is new, for a process that does not write checkpoints."""

    def check(self, saved: bool = False) -> None:
        """Raises `UsageError` if nothing may be written any more, such as where another process has taken the run.

        After a save, `saved`, also if the copy has ended by an error that nobody expected.
        """

    def share(self, path: str) -> None:
        """Copies a file of a checkpoint that a worker other than the chief has written."""

    def take(self, path: str) -> bool:
        """Fetches a file that another worker has shared, unless it exists here; returns whether it does now."""
        return True

    def wait_for(self, checkpoint: tuple[int, int]) -> None:
        """Waits for a checkpoint of the chief, by `Commit.id`, and fetches it, unless it exists here."""

    def take_folder(self, name: str, as_it_is: bool) -> str:
        """Keeps other processes from a folder of the run directory to which this one writes, until `end`.

        Args:
          name: of the folder.
          as_it_is: whether it is continued, and so fetched; else it is replaced as a whole.

        Returns:
          Where it is, for messages.

        Raises:
          UsageError: if another process writes it.
        """
        return os.path.join(self.directory, name)

    def fetch_older(self) -> None:
        """Waits until the older checkpoints are here that a start fetches while it trains, or cannot be fetched."""

    def end(self) -> None:
        """Copies what the store lacks; may be called again after further writes."""
