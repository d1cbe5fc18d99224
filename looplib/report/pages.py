"""`report.html` of a run, which is written whenever the run ends, also by a failure."""

from collections.abc import Callable
from typing import Protocol

from looplib.errors import MissingPartError


class WrittenPage(Protocol):
    """A page that was written. A notebook displays it as the value of a cell."""

    path: str


class Page:
    """The page of a run. This base class writes none.

    Attributes:
      path: the path of the file; "" before it is written.
    """

    path: str = ""

    def note_news(self) -> None:
        """Notes that the page is out of date."""

    def update(self) -> None:
        """Writes the page, unless that would take more than 1% of the time since the last write."""

    def show(self) -> WrittenPage:
        """Writes the page, and returns it; raises `UsageError` if there is no directory to write it to."""
        raise MissingPartError(
            "the page of a run needs a directory that can be written; give Controller(model_dir=...)"
        )

    def close(self) -> None:
        """Writes the page if it is out of date. From then on each `update` writes it."""


def make_page(directory: str | None, check: Callable[[], None]) -> Page:
    """Returns the page of a run; `check` is called before each write, and raises `UsageError` to prevent it."""
    from looplib.report.run_page import RunPage  # here, as it is a Page

    return RunPage(directory, check) if directory else Page()
