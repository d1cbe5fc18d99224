"""The reporter of a run: to its writers, in `run.json`, on its page and on the console."""

import collections
import concurrent.futures
import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import logging

from looplib.base.numbers import Progress
from looplib.errors import MissingPartError, SettingError, WriterError
from looplib.report.clock import Clock, SpeedMeter
from looplib.report.pages import make_page
from looplib.report.run_report import Points, RunReport, settings_of
from looplib.report.writers.contract import DEFAULT_WRITERS, Setting, Writer
from looplib.report.writers.jsonl_writer import JsonlWriter
from looplib.report.writers.shown import Shown
from looplib.run.run_json import path_of

Metrics = dict[str, float]
_MOST_WAITING = 20  # calls; media of a slow disk must not fill the memory
_ON_SCREEN = "console"  # the default writer that needs no run directory


class Reporter:
    """Reports a run: to its writers, in `run.json`, on its page and on the console.

    Args:
      model_dir: the run directory, if it can be written; None reports on the console only.
      writers: the user's writers, or their names; None for the defaults.
      is_chief: whether this process reports for all workers.
      trains: whether the run trains; an evaluation job has a report of its own, and no page.
      check: raises `UsageError` if the run directory is not this process's any more.
      clock: adds up the time of the run by phase.
      facts: further fields of `RunReport`.

    Attributes:
      report: `run.json`, with the page of the run.
      writers: all writers as one.
      speed_meter: measures the speed of the training.
      last_evaluation: the metrics of the last evaluation, by evaluator.
      end: the step that the newest training goes to; None before it starts, and where it is not known.
      ended_at: the step at which the newest training has ended; None while one trains.
      trained: steps of this start.
    """

    def __init__(
        self,
        model_dir: str | None,
        *,
        writers: Sequence[Writer | str] | None,
        is_chief: bool,
        trains: bool,
        check: Callable[[], None],
        clock: Clock,
        **facts: Any,
    ) -> None:
        place = model_dir if is_chief else None
        self.clock, self._check, self._is_chief, self._save_noted = clock, check, is_chief, False
        self.writers = make_writers(writers, place, check) if is_chief else Writers([])
        self.report = RunReport(
            path=path_of(place, trains) if place else None,
            clock=clock,
            points=Points(clock),
            check=check,
            page=make_page(place if trains else None, self._flush_for_page),
            **facts,
        )
        self.speed_meter = SpeedMeter(clock)
        self.last_evaluation: dict[str, Metrics] = {}
        self.end: int | None = None
        self.ended_at: int | None = None
        self.trained = 0

    def _flush_for_page(self) -> None:
        self.writers.flush()  # the page is made of what they have written
        self._check()

    @contextlib.contextmanager
    def training(self, restored_from: str | None, flags: Mapping[str, Any], step: Callable[[], int]) -> Iterator[None]:
        """Reports a training, the `with` block, in `run.json`, and gives the writers its settings.

        Args:
          restored_from: path of the checkpoint that it continues from, or None.
          flags: its settings by the names of flags.
          step: returns the global step.
        """
        self.ended_at = None
        try:
            with self.report.recording_start(restored_from):
                self.writers.settings(settings_of(flags, self.report.settings.config))
                try:
                    yield
                finally:
                    self.ended_at = step() if self.ended_at is None else self.ended_at
        finally:
            self.writers.progress(None)

    def say(self, sentence: str) -> None:
        """Shows the user a sentence about the run, on the console, or in the log where there is no console."""
        if not self.writers.note(sentence):
            logging.info("%s", sentence)

    def write(self, split: str, step: int, metrics: Metrics) -> None:
        """Gives metrics to the writers."""
        self._check()
        if split == "train":
            self.report.points.note(step)
            self.report.keep_fresh()
        self.writers.write(step, split, metrics)
        self.report.page.note_news()

    def show(self, split: str, step: int, shown: Mapping[str, Shown]) -> None:
        """Gives media to the writers, if there are any."""
        if shown:
            self._check()
            with self.clock.phase("report"):
                self.writers.show(step, split, shown)

    def show_progress(self, step: int, evaluation: int | None, evaluating: bool = False) -> None:
        """Gives the writers the position of the training.

        Args:
          step: the global step.
          evaluation: the step of the next evaluation, or None.
          evaluating: whether the evaluation of this step comes now.
        """
        self.writers.progress(self.speed_meter.at(step, self.end, evaluation, evaluating))

    def note_first_save(self) -> None:
        """Writes in `run.json`, once, that the run has a checkpoint, so that it does not start over unasked."""
        if not self._save_noted:
            self._save_noted = True
            self.report.write("running")

    def note_rollback(self, from_step: int, to_step: int, reason: str) -> None:
        """Writes that the run has gone back from the step at which a guard found something, the reason."""
        self.ended_at = None
        self.report.note("rollbacks", step=from_step, to=to_step, reason=reason, seconds=self.clock.seconds())
        self.report.write("running")

    def note_end(self, step: int) -> None:
        """Notes in `run.json` that an action has restored another checkpoint at the end of a training."""
        if step != self.ended_at:
            self.report.write("done")

    def note_speed(self, with_share: Callable[[Any, int, float], Any]) -> None:
        """Notes the share of the devices' peak that the steps of this start have reached.

        `with_share` is a function of the computation per step, the number of steps and their seconds, which returns the
        first with that share.
        """
        seconds = self.clock.of("train") + self.clock.of("input")
        computation = self.report.computation
        if computation.speed and self._is_chief and self.trained:
            with self.clock.phase("report"):
                computation.speed = with_share(computation.speed, self.trained, seconds)

    def close(self) -> None:
        """Closes the writers, and then writes the page, also where a writer fails."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.report.page.close)
            stack.callback(self.writers.close)


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


def make_writers(writers: Sequence[Writer | str] | None, model_dir: str | None, check: Callable[[], None]) -> Writers:
    """Returns the writers of a run as one.

    Args:
      writers: the user's, or names of some; None for `DEFAULT_WRITERS`. Of these, those of files are left out without
        a run directory, and those that are not installed if the writers have all of them.
      model_dir: the run directory, or None.
      check: raises if the run directory is not the run's any more.

    Raises:
      UsageError: for something else among the user's, or a writer that the user names and that is not installed.
    """
    if isinstance(writers, str | Writer):
        raise SettingError(f"writers is {writers!r}; expected a list of writers and of names, such as ['csv']")
    writers = DEFAULT_WRITERS if writers is None else list(writers)
    from looplib.report.writers.registered import named  # here, as it imports packages that take time

    made, in_files = [], []
    for writer in writers:
        if isinstance(writer, Writer):
            made.append(writer)
        elif not isinstance(writer, str):
            raise WriterError(f"the writer {writer!r} is not a looplib.Writer; subclass it and pass an instance")
        elif writer == "jsonl":
            in_files += [JsonlWriter(os.path.join(model_dir, "metrics.jsonl"))] if model_dir else []
        elif writer not in DEFAULT_WRITERS:
            make = named(writer)
            if not model_dir:
                raise MissingPartError(f"the writer {writer!r} needs a run directory; give Controller(model_dir=...)")
            made.append(make(model_dir))
        elif model_dir or writer == _ON_SCREEN:
            (made if writer == _ON_SCREEN else in_files).append(named(writer)(model_dir))
    if in_files:  # after the others, with which the thread would compete for the interpreter
        made.append(ThreadedWriter(Writers(in_files), check))
    return Writers(made)
