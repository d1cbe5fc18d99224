"""BatchReport: a program that `python -m looplib launch` has started tells it the size of its global batch."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from looplib.base import files
from looplib.binary.command_line import FlagPlugin
from looplib.cluster import environment
from looplib.errors import EXIT_PREEMPTED
from looplib.processes.worker_numbers import BATCH_FILE, REPORTED
from looplib.task.actions import Action, Event


class BatchReport(FlagPlugin):
    """No flag: what the launcher of a run has to know if the number of its workers may change."""

    flags = ()

    def check(self, values: Mapping[str, Any]) -> None:
        """Writes the size of the global batch, and ends the process if the workers cannot share it.

        The launcher then starts another number of workers, and says so.
        """
        path = os.environ.get(BATCH_FILE)
        cluster = environment.resolve() if path else None
        size = values["global_batch_size"]
        if cluster is None or cluster.index is None or not size or size < 1:
            return
        if cluster.is_chief:
            files.write_whole(path, f"{size}", durable=False)
        if size % len(cluster.workers):
            sys.exit(EXIT_PREEMPTED)

    def actions(self, values: Mapping[str, Any]) -> Sequence[Action]:
        """Returns the action that tells the launcher of the first report."""
        path = os.environ.get(BATCH_FILE)
        return (FirstReport(path),) if path and not values["dry_run"] else ()


class FirstReport(Action):
    """Tells the launcher of the first report: only after that are workers ended so that there can be more.

    Args:
      path: the file with the size of the global batch.
    """

    def __init__(self, path: str) -> None:
        self._path, self._is_told = path, False

    def __call__(self, event: Event) -> None:
        """Makes the file, once."""
        if not self._is_told and event.controller.is_chief:
            files.write_whole(self._path + REPORTED, "", durable=False)
        self._is_told = True
