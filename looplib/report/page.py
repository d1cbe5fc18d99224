"""`report.html` of a run, written whenever the run ends, also by a failure."""

import time
from collections.abc import Callable
from typing import Protocol

from absl import logging

from looplib import plugins
from looplib.errors import UsageError, with_cure

_SHARE = 0.01  # maximum share of the time of a run that calls `train` many times


class WrittenPage(Protocol):
    """A page that was written. A notebook displays it as the value of a cell."""

    path: str


class Page:
    """The page of a run. If it cannot be written, one warning is logged, and the run goes on.

    Args:
      directory: the run directory; None writes nothing.
      check: called before each write; raises `UsageError` if another process has taken over the directory.
    """

    def __init__(self, directory: str | None, check: Callable[[], None]) -> None:
        self._page: WrittenPage | None = None
        self._directory = directory
        self._check = check
        self._stale = self._closed = False
        self._written, self._took = float("-inf"), 0.0

    @property
    def path(self) -> str:
        """The path of the file; "" before it is written."""
        return self._page.path if self._page else ""

    def note_news(self) -> None:
        """Notes that the page is out of date."""
        self._stale = True

    def update(self) -> None:
        """Writes the page, unless that would take more than 1% of the time since the last write."""
        self._stale = True
        if self._closed or time.monotonic() - self._written >= self._took / _SHARE:
            self._write()

    def show(self) -> WrittenPage:
        """Writes the page, and returns it.

        Raises:
          UsageError: if there is no directory to write it to.
        """
        self._write()
        if self._directory is None or self._page is None:
            raise UsageError("the page of a run needs a directory that can be written; give Controller(model_dir=...)")
        return self._page

    def close(self) -> None:
        """Writes the page if it is out of date. From then on each `update` writes it."""
        self._closed = True
        if self._stale:
            self._write()

    def _write(self) -> None:
        if self._directory is None:
            return
        started = time.monotonic()
        try:
            write = plugins.find("looplib.parts", "page")
            self._check()
            self._page = write(self._directory) if write else None
        except Exception as error:  # what is only shown never ends a run
            logging.warning("report.html cannot be written: %s", with_cure(error))
            self._directory = None
        self._stale = False
        self._written = time.monotonic()
        self._took = self._written - started
