"""The copy of a run directory in an object store, as the core sees it: a plug-in makes one for a URL."""


class Mirror:
    """Copies a run directory to where it belongs and back; this one is of a directory that is nowhere else."""

    directory = ""  # the local run directory

    def begin(self, trains: bool) -> None:
        """Fetches what the chief needs; keeps other trainings away from one, and copies what is new from now on."""

    def refresh(self) -> None:
        """Fetches what is new, for a process that does not write checkpoints."""

    def check(self) -> None:
        """Raises `UsageError` if another process has taken the run."""

    def share(self, path: str) -> None:
        """Copies a file of a checkpoint that a worker other than the chief has written."""

    def take(self, path: str) -> bool:
        """Fetches a file that another worker has shared, unless it is here; returns whether that was possible."""
        return True

    def wait_for(self, checkpoint: tuple[int, int]) -> None:
        """Fetches a checkpoint of the chief's, by `Commit.id`, once it is there, unless it is here."""

    def take_folder(self, name: str) -> None:
        """Fetches the files of a folder of the run directory that this job writes, unless it is here."""

    def end(self) -> None:
        """Copies what is missing; called again, what was written since."""
