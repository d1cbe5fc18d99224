"""Local paths of paths and URLs, for those who only read them; binaries import this, and not what reads stores."""

import os

from looplib.base import files
from looplib.run import commits
from looplib.run.commits import Commit


def local_path(path: str | os.PathLike[str], what: str) -> str:
    """Returns `files.resolve` of a path, or the path of a local copy of what is at a URL; see `mirror.fetched`."""
    if isinstance(path, str) and files.is_remote(path):
        from looplib.buckets.mirror import fetched  # here, as it imports packages that take time

        return fetched(path)
    return files.resolve(path, what)


def list_checkpoints(directory: str | os.PathLike[str]) -> list[Commit]:
    """Lists the committed checkpoints of a run, newest first.

    Their files are not read, so a checkpoint may be damaged; `python -m looplib inspect --verify` reads them.

        best = max(looplib.list_checkpoints("/tmp/run"), key=lambda saved: saved.scores["eval/accuracy"])
        print(best.step, best.path)

    Args:
      directory: a run directory, or the directory that holds the checkpoints.

    Returns:
      list of `Commit`, with `path`, `step`, `time`, `scores` and the sizes of the files.

    Raises:
      UsageError: if there is no such directory, or a newer looplib wrote a checkpoint in it.
    """
    return commits.committed(commits.checkpoint_folder(local_path(directory, "the run directory")))
