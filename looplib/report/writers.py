"""Writers: all writers of a run as one, so that the same numbers are in TensorBoard, `metrics.jsonl` and on screen."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence

from looplib.errors import UsageError
from looplib.report.console_writer import ConsoleWriter
from looplib.report.jsonl_writer import JsonlWriter
from looplib.report.media_writer import MediaWriter
from looplib.report.progress import Progress
from looplib.report.shown import Shown
from looplib.report.tensorboard_writer import TensorBoardWriter
from looplib.report.threaded_writer import ThreadedWriter
from looplib.report.writer import Setting, Writer


class Writers(Writer):
    """Passes everything on to each of some writers, in order. After `close` it has none, and does nothing.

    Args:
      writers: the writers; may be empty.
    """

    def __init__(self, writers: Sequence[Writer]) -> None:
        self._writers = list(writers)

    def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Lets each writer record the metrics."""
        for writer in self._writers:
            writer.write(step, split, metrics)

    def show(self, step: int, split: str, shown: Mapping[str, Shown]) -> None:
        """Lets each writer record what is shown."""
        for writer in self._writers:
            writer.show(step, split, shown)

    def settings(self, settings: Mapping[str, Setting]) -> None:
        """Gives each writer the settings."""
        for writer in self._writers:
            writer.settings(settings)

    def progress(self, progress: Progress | None) -> None:
        """Gives each writer the position of the training."""
        for writer in self._writers:
            writer.progress(progress)

    def resume(self, step: int, reported: dict[str, int]) -> None:
        """Lets each writer take out the records that the training is about to make again."""
        for writer in self._writers:
            writer.resume(step, reported)

    def note(self, sentence: str) -> bool:
        """Lets each writer show the sentence; returns whether one has."""
        return any([writer.note(sentence) for writer in self._writers])

    def flush(self) -> None:
        """Flushes each writer."""
        for writer in self._writers:
            writer.flush()

    def sync(self) -> None:
        """Puts on the disk what each writer flushed."""
        for writer in self._writers:
            writer.sync()

    def close(self) -> None:
        """Closes each writer, also where another one fails, in reverse order."""
        writers, self._writers = self._writers, []
        with contextlib.ExitStack() as stack:
            for writer in writers:
                stack.callback(writer.close)


def make_writers(
    writers: Sequence[Writer] | None, trackers: Sequence[Writer], model_dir: str | None, check: Callable[[], None]
) -> Writers:
    """Returns the writers of a run as one.

    Args:
      writers: the user's, or None for the console's and, with a run directory, TensorBoard's and those of
        `metrics.jsonl` and `media.jsonl`.
      trackers: the user's further writers.
      model_dir: the run directory, or None.
      check: raises if the run directory is not the run's any more.

    Raises:
      UsageError: for something else among the user's.
    """
    for writer in [*(writers or ()), *trackers]:
        if not isinstance(writer, Writer):
            raise UsageError(f"the writer {writer!r} is not a looplib.Writer; subclass it and pass an instance")
    in_a_thread: list[Writer] = []  # after the others, with which the thread would compete for the interpreter
    if writers is None:
        writers = [ConsoleWriter()]
        if model_dir:
            jsonl = JsonlWriter(os.path.join(model_dir, "metrics.jsonl"))
            in_files = Writers([TensorBoardWriter(model_dir), jsonl, MediaWriter(model_dir)])
            in_a_thread = [ThreadedWriter(in_files, check)]
    return Writers([*writers, *trackers, *in_a_thread])
