"""`report.html` of a run while it runs: when it is written."""

import time
from collections.abc import Callable

from absl import logging

from looplib.base.messages import with_cure
from looplib.report.pages import Page, WrittenPage

_SHARE = 0.01  # maximum share of the time of a run that calls `train` many times


class RunPage(Page):
    """The page of a run. If it cannot be written, one warning is logged, and the run continues.

    Args:
      directory: the run directory.
      check: called before each write; raises `UsageError` if another process has taken over the directory.
    """

    def __init__(self, directory: str, check: Callable[[], None]) -> None:
        self._page: WrittenPage | None = None
        self._directory: str | None = directory
        self._check = check
        self._stale = self._closed = False
        self._written, self._took = float("-inf"), 0.0

    @property
    def path(self) -> str:
        """See `Page`."""
        return self._page.path if self._page else ""

    def note_news(self) -> None:
        """See `Page`."""
        self._stale = True

    def update(self) -> None:
        """See `Page`."""
        self._stale = True
        if self._closed or time.monotonic() - self._written >= self._took / _SHARE:
            self._write()

    def show(self) -> WrittenPage:
        """See `Page`."""
        self._write()
        return super().show() if self._directory is None or self._page is None else self._page

    def close(self) -> None:
        """See `Page`."""
        self._closed = True
        if self._stale:
            self._write()

    def _write(self) -> None:
        if self._directory is None:
            return
        started = time.monotonic()
        try:
            from looplib.report.page.html import write_of_run  # here, because a run does not need it before its end

            self._check()
            self._page = write_of_run(self._directory)
        except Exception as error:  # what is only shown never ends a run
            logging.warning("report.html cannot be written: %s", with_cure(error))
            self._directory = None
        self._stale = False
        self._written = time.monotonic()
        self._took = self._written - started
