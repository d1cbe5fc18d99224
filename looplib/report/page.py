"""`report.html` of a run: written when the run ends, however it ends."""

import time
from collections.abc import Callable

from absl import logging

_SHARE = 0.01  # of the time of a run that calls `train` many times


class Page:
    """The page of a run. A failure to write it is one warning, and changes nothing for the run.

    Args:
      directory: the run directory; None writes nothing.
      check: called before; raises `UsageError` if the directory is not this process's any more.
    """

    def __init__(self, directory: str | None, check: Callable[[], None]) -> None:
        self._directory = directory
        self._check = check
        self._stale = self._closed = False
        self._written, self._took = float("-inf"), 0.0

    def note_news(self) -> None:
        """Notes that the run has reported something since the page was written."""
        self._stale = True

    def update(self) -> None:
        """Writes the page, unless the last time was so recent that this would take more than 1% of the time."""
        self._stale = True
        if self._closed or time.monotonic() - self._written >= self._took / _SHARE:
            self._write()

    def close(self) -> None:
        """Writes the page if there are news; each later `update` writes it."""
        self._closed = True
        if self._stale:
            self._write()

    def _write(self) -> None:
        if self._directory is None:
            return
        started = time.monotonic()
        try:
            from looplib.extras.page import html  # here, because most of a run does not need it

            self._check()
            html.write_of_run(self._directory)
        except Exception as error:  # what is only shown never ends a run
            logging.warning("report.html cannot be written (%s)", error)
            self._directory = None
        self._stale = False
        self._written = time.monotonic()
        self._took = self._written - started
