"""Writers: the contract, those of `metrics.jsonl` and of a thread, and all writers of a run as one."""

import abc
import collections
import concurrent.futures
import contextlib
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence

from absl import logging

from looplib import plugins
from looplib.errors import UsageError
from looplib.report.progress import Progress
from looplib.report.records import RecordFile, key
from looplib.report.shown import Shown

Setting = bool | int | float | str

_GROUP = "looplib.writers"
_ON_SCREEN = "console"
DEFAULT_WRITERS = (_ON_SCREEN, "tensorboard", "jsonl", "media")
"""The names of the writers that a `Controller` has by default."""
_MOST_WAITING = 20  # calls; media of a slow disk must not fill the memory


class Writer(abc.ABC):
    """Takes the metrics of every loop and evaluation."""

    @abc.abstractmethod
    def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Records metrics.

        Args:
          step: int, the global step.
          split: "train" or an evaluator's name.
          metrics: dict from name to int or float.
        """

    def show(self, step: int, split: str, shown: Mapping[str, Shown]) -> None:
        """Records images, texts and histograms; does nothing by default.

        Args:
          step: the global step.
          split: as of `write`.
          shown: dict from name to what is shown.
        """

    def settings(self, settings: Mapping[str, Setting]) -> None:
        """Takes the settings of the run, when a training starts; does nothing by default.

        Args:
          settings: dict from name to value: `config.<field>` of the program's own, and what the loops are set to.
        """

    def progress(self, progress: Progress | None) -> None:
        """Takes where the training stands: when it starts, before each report and around each evaluation.

        Args:
          progress: the `Progress`; None when the training has ended, however it ended.
        """

    def resume(self, step: int, reported: dict[str, int]) -> None:
        """Takes out the records that a training is about to make again; called when the training starts.

        Args:
          step: the global step that the training continues from.
          reported: dict from split to the last step whose record holds: for "train" the last one that was reported
            when the checkpoint of `step` was saved, because the next window of steps is incomplete. Later records of
            these splits are void, and records after `step` of any other.
        """

    def note(self, sentence: str) -> bool:
        """Shows a sentence about the run, such as where it continues.

        Returns:
          Whether it is shown, which it is not by default. If no writer shows it, it is logged.
        """
        return False

    def flush(self) -> None:
        """Makes sure that what was written can be read by others."""

    def sync(self) -> None:
        """Puts on the disk what was flushed, so that a power cut does not undo it; called from another thread."""

    def close(self) -> None:
        """Flushes and closes files."""
        self.flush()


class JsonlWriter(Writer):
    """One JSON object a line: `{"step": 100, "split": "train", "loss": 0.25}`.

    Each (step, split) stands once, see `RecordFile`. A number that is not finite is written as null, because JSON has
    no other word for it.

    Args:
      path: the file, appended to if it exists.
    """

    def __init__(self, path: str) -> None:
        self._file = RecordFile(path, key)

    def resume(self, step: int, reported: dict[str, int]) -> None:
        """Takes out the records that the run will make again."""
        self._file.resume(step, reported)

    def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Appends one line."""
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write({"step": step, "split": split, **numbers})

    def sync(self) -> None:
        """See `Writer`."""
        self._file.sync()


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


def named_writers(names: Sequence[str], model_dir: str) -> list[Writer]:
    """Returns the writers that --trackers names, besides the default ones.

    Args:
      names: of plug-ins of the group `looplib.writers`.
      model_dir: the run directory.

    Raises:
      UsageError: for another name, or a package that is missing.
    """
    known = [name for name in plugins.names(_GROUP) if name not in DEFAULT_WRITERS]
    for name in names:
        if name not in known:
            raise UsageError(f"--trackers has {name!r}; expected names among {', '.join(known)}")
    return [plugins.load(_GROUP, name)(model_dir) for name in dict.fromkeys(names)]


def make_writers(writers: Sequence[Writer | str] | None, model_dir: str | None, check: Callable[[], None]) -> Writers:
    """Returns the writers of a run as one.

    Args:
      writers: the user's, or names of some; None for `DEFAULT_WRITERS`, of which those that are not installed, and
        without a run directory those of files, are left out.
      model_dir: the run directory, or None.
      check: raises if the run directory is not the run's any more.

    Raises:
      UsageError: for something else among the user's.
    """
    made, in_files, missing = [], [], []
    for writer in DEFAULT_WRITERS if writers is None else writers:
        if isinstance(writer, Writer):
            made.append(writer)
        elif not isinstance(writer, str):
            raise UsageError(f"the writer {writer!r} is not a looplib.Writer; subclass it and pass an instance")
        elif writer == "jsonl":
            in_files += [JsonlWriter(os.path.join(model_dir, "metrics.jsonl"))] if model_dir else []
        elif writer not in DEFAULT_WRITERS:
            if not model_dir:
                raise UsageError(f"the writer {writer!r} needs a run directory; give Controller(model_dir=...)")
            made.append(plugins.load(_GROUP, writer)(model_dir))
        elif model_dir or writer == _ON_SCREEN:
            if make := plugins.find(_GROUP, writer):
                (made if writer == _ON_SCREEN else in_files).append(make(model_dir))
            else:
                missing.append(writer)
    if missing:
        logging.warning("these writers are not installed and are left out: %s", ", ".join(missing))
    if in_files:  # after the others, with which the thread would compete for the interpreter
        made.append(ThreadedWriter(Writers(in_files), check))
    return Writers(made)
