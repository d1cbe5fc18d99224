"""`report.html` of a run: written when the run ends, however it ends."""

import dataclasses
import html
import time
from collections.abc import Callable

from absl import logging

from looplib import files, plugins
from looplib.errors import UsageError, with_cure

_SHARE = 0.01  # of the time of a run that calls `train` many times


@dataclasses.dataclass(frozen=True)
class WrittenPage:
    """A page that was written; a notebook shows it below the cell that ends with it.

    Attributes:
      path: the file.
    """

    path: str

    def _repr_html_(self) -> str:
        # As an attribute, because no address of the file works in all notebooks.
        page = html.escape(files.read_text(self.path, most=1 << 28))
        return f'<iframe srcdoc="{page}" sandbox="allow-scripts" width="100%" height="600" style="border: 0"></iframe>'


class Page:
    """The page of a run. A failure to write it is one warning, and changes nothing for the run.

    Args:
      directory: the run directory; None writes nothing.
      check: called before; raises `UsageError` if the directory is not this process's any more.

    Attributes:
      path: the file, once it was written; "" before.
    """

    def __init__(self, directory: str | None, check: Callable[[], None]) -> None:
        self.path = ""
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

    def show(self) -> WrittenPage:
        """Writes the page, and returns it.

        Raises:
          UsageError: if there is no place for it.
        """
        self._write()
        if self._directory is None:
            raise UsageError("the page of a run needs a directory that can be written; give Controller(model_dir=...)")
        return WrittenPage(self.path)

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
            write = plugins.find("looplib.parts", "page")
            if write is None:
                self._directory = None
                return
            self._check()
            self.path = write(self._directory)
        except Exception as error:  # what is only shown never ends a run
            logging.warning("report.html cannot be written: %s", with_cure(error))
            self._directory = None
        self._stale = False
        self._written = time.monotonic()
        self._took = self._written - started
