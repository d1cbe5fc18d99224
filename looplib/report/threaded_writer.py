"""ThreadedWriter: another writer in a thread of its own, so that the device does not wait for files."""

import collections
import concurrent.futures
import functools
from collections.abc import Callable, Mapping

from looplib.report.shown import Shown
from looplib.report.writer import Setting, Writer

_MOST_WAITING = 20  # calls; media of a slow disk must not fill the memory


class ThreadedWriter(Writer):
    """Calls `write` and `show` of another writer in one thread and in order, while the next steps run.

    What the other writer raises is raised here, by one of the next calls, at the latest by `flush`. All other calls
    wait for the thread.

    Args:
      writer: the other writer.
      check: is called before each write, and raises if the run may not write any more.
    """

    def __init__(self, writer: Writer, check: Callable[[], None]) -> None:
        self._writer, self._check = writer, check
        self._thread = concurrent.futures.ThreadPoolExecutor(1, type(self).__name__)
        self._calls: collections.deque[concurrent.futures.Future[None]] = collections.deque()

    def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Lets the thread record the metrics."""
        self._start(functools.partial(self._writer.write, step, split, dict(metrics)))

    def show(self, step: int, split: str, shown: Mapping[str, Shown]) -> None:
        """Lets the thread record what is shown."""
        self._start(functools.partial(self._writer.show, step, split, dict(shown)))

    def settings(self, settings: Mapping[str, Setting]) -> None:
        """See `Writer`."""
        self._wait()
        self._writer.settings(settings)

    def resume(self, step: int, reported: dict[str, int]) -> None:
        """See `Writer`."""
        self._wait()
        self._writer.resume(step, reported)

    def flush(self) -> None:
        """See `Writer`."""
        self._wait()
        self._writer.flush()

    def sync(self) -> None:
        """See `Writer`; what was not flushed before may be left out."""
        self._writer.sync()

    def close(self) -> None:
        """Ends the thread, and closes the other writer."""
        try:
            self._wait()
        finally:
            self._thread.shutdown()
            self._writer.close()

    def _start(self, call: Callable[[], None]) -> None:
        while self._calls and (self._calls[0].done() or len(self._calls) >= _MOST_WAITING):
            self._calls.popleft().result()
        self._calls.append(self._thread.submit(self._checked, call))

    def _checked(self, call: Callable[[], None]) -> None:
        self._check()  # now, because the caller's own check may be some time ago
        call()

    def _wait(self) -> None:
        """Waits for the calls so far; raises what the first of them raised that failed."""
        calls, self._calls = self._calls, collections.deque()
        for call in calls:
            call.result()
