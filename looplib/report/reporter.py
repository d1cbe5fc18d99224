"""The reporter of a run: to its writers, in `run.json`, on its page and on the console."""

import abc
import collections
import concurrent.futures
import contextlib
import functools
import importlib.util
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import logging

from looplib.base import plugins
from looplib.base.messages import gist
from looplib.base.numbers import Progress
from looplib.errors import MissingPartError, PluginError, SettingError, WriterError
from looplib.report.clock import Clock, SpeedMeter, observers
from looplib.report.run_report import Page, Points, StartReport, settings_of
from looplib.report.writers.console_writer import ConsoleWriter
from looplib.report.writers.contract import DEFAULT_WRITERS, GROUP, Setting, Shown, Writer
from looplib.report.writers.files import CsvWriter, JsonlWriter, MediaWriter
from looplib.report.writers.telemetry import OpenTelemetryWriter
from looplib.report.writers.tensorboard_writer import TensorBoardWriter
from looplib.report.writers.trackers import MlflowWriter, WandbWriter
from looplib.run.directory import METRICS, RunDir
from looplib.run.report import Rollback

_SYNC_SECONDS, _SYNC_SHARE = 2.0, 0.02  # that `sync` may wait: the shorter of the two, a share of the time between them


class _InThread(Writer):
    """Passes what it gets on to another writer, in a thread and in order."""

    _writer: Writer

    @abc.abstractmethod
    def _call(self, call: Callable[[], None], at_once: bool = False) -> None:
        """Lets the thread call a function; `at_once` if the caller should know whether it works."""

    def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """See `Writer`."""
        self._call(functools.partial(self._writer.write, step, split, dict(metrics)))

    def show(self, step: int, split: str, shown: Mapping[str, Shown]) -> None:
        """See `Writer`."""
        self._call(functools.partial(self._writer.show, step, split, dict(shown)))

    def settings(self, settings: Mapping[str, Setting]) -> None:
        """See `Writer`."""
        self._call(functools.partial(self._writer.settings, dict(settings)), at_once=True)

    def resume(self, step: int, reported: dict[str, int]) -> None:
        """See `Writer`."""
        self._call(functools.partial(self._writer.resume, step, dict(reported)), at_once=True)


class BackgroundWriter(_InThread):
    """Passes everything on to another writer, in one thread and in order.

    If the other one raises, or lets too many calls wait, a warning says so, and it is not called again. The thread
    starts with the first call.

    Args:
      writer: the other writer.
      most_waiting: number of calls that may wait for it.
      patience: seconds that `close` waits for it.
    """

    def __init__(self, writer: Writer, most_waiting: int = 10_000, patience: float = 30.0) -> None:
        self._writer, self._name, self._patience = writer, type(writer).__name__, patience
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(most_waiting)
        self._thread: threading.Thread | None = None
        self._given_up = False
        self._synced = time.monotonic()

    def sync(self) -> None:
        """Waits a moment for the calls so far, so that a checkpoint is rarely newer than what was written.

        A tracker that hangs makes a run slower by 2% at most.
        """
        done, before, self._synced = threading.Event(), self._synced, time.monotonic()
        if self._thread is not None:
            self._call(done.set)
            done.wait(0 if self._given_up else min(_SYNC_SECONDS, _SYNC_SHARE * (self._synced - before)))

    def close(self) -> None:
        """Lets the other writer close, and waits for it, at most for the time of `patience`."""
        thread, self._thread = self._thread, None
        if thread is None or self._given_up:
            return
        self._put(self._writer.close)
        self._put(None)
        thread.join(self._patience)
        if thread.is_alive():
            self._give_up(f"did not end within {self._patience:g} s")

    def _call(self, call: Callable[[], None], at_once: bool = False) -> None:
        if self._thread is None:
            # A daemon, because a process must be able to end while it hangs.
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._put(call)

    def _put(self, call: Callable[[], None] | None) -> None:
        try:
            if not self._given_up:
                self._calls.put_nowait(call)
        except queue.Full:
            self._give_up(f"does not keep up: {self._calls.maxsize} records are waiting")

    def _work(self) -> None:
        while not self._given_up and (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:  # a library may call sys.exit
                self._give_up(gist(error) if isinstance(error, Exception) else repr(error))

    def _give_up(self, reason: str) -> None:
        if not self._given_up:
            self._given_up = True
            reason = re.sub(r"://[^/@\s]*@", "://", reason)  # a password in an address
            logging.warning("%s is left out from here on, and the training continues: %s", self._name, reason)


def is_installed(package: str) -> bool:
    """Returns whether a package that a tracker needs is there."""
    return importlib.util.find_spec(package) is not None


def _tracker(name: str, kind: type[Writer], directory: str) -> Writer:
    """Returns the tracker of a package, in a thread of its own."""
    if not is_installed(name):
        raise PluginError(f"the writer {name} needs the package {name}: pip install 'looplib[{name}]'")
    return BackgroundWriter(kind(directory))


def _opentelemetry(directory: str) -> Writer:
    if not all(map(is_installed, ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter"))):
        raise PluginError("the writer opentelemetry needs its SDK and exporter: pip install 'looplib[opentelemetry]'")
    return OpenTelemetryWriter(directory)  # whose SDK has the threads


WRITERS: Mapping[str, Callable[[str], Writer]] = {
    "console": lambda directory: ConsoleWriter(),
    "csv": lambda directory: BackgroundWriter(CsvWriter(directory)),
    "media": MediaWriter,
    "mlflow": functools.partial(_tracker, "mlflow", MlflowWriter),
    "opentelemetry": _opentelemetry,
    "tensorboard": TensorBoardWriter,
    "wandb": functools.partial(_tracker, "wandb", WandbWriter),
}
"""looplib's own writers by name, of a run directory. Other packages add theirs to the group `looplib.writers`."""


def names() -> list[str]:
    """Returns the names of all writers, also of other packages."""
    return sorted({*WRITERS, *plugins.names(GROUP)})


def named(name: str) -> Callable[[str], Writer]:
    """Returns what makes the writer of a name, of looplib or another package, for a run directory.

    Raises:
      UsageError: if there is none, or it cannot be imported.
    """
    return plugins.load(GROUP, name, WRITERS)


Metrics = dict[str, float]
_MOST_WAITING = 20  # calls; media of a slow disk must not fill the memory
_EARLY = 40.0  # seconds by which a wait for data is reported before others are, so that `status` has news
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
      facts: further fields of `StartReport`.

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
        self.report = StartReport(
            path=RunDir(place).report_path(trains) if place else None,
            clock=clock,
            points=Points(clock),
            check=check,
            page=Page(place if trains else None, self._flush_for_page),
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
        observers.append(self._while_waiting)
        try:
            with self.report.recording_start(restored_from):
                self.writers.settings(settings_of(flags, self.report.facts.config))
                try:
                    yield
                finally:
                    self.ended_at = step() if self.ended_at is None else self.ended_at
        finally:
            observers.remove(self._while_waiting)
            self.writers.progress(None)

    def _while_waiting(self, clock: Clock, phase: str, *_: float) -> None:
        """Has the report be news for `status` while a training waits for its data."""
        if phase == "waiting" and clock is self.clock:
            self.report.keep_fresh(_EARLY)

    def say(self, sentence: str) -> None:
        """Shows the user a sentence about the run, on the console, or in the log where there is no console."""
        if not self.writers.note(sentence):
            logging.info("%s", sentence)

    def write(self, split: str, step: int, metrics: Metrics) -> None:
        """Gives metrics to the writers."""
        self._check()
        if split == "train":
            self.report.note_point(step)
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
        self.report.note(Rollback(from_step, to_step, reason, self.clock.seconds()))
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
        facts = self.report.facts
        if facts.speed and self._is_chief and self.trained:
            with self.clock.phase("report"):
                facts.speed = with_share(facts.speed, self.trained, seconds)

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


class ThreadedWriter(_InThread):
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

    def _call(self, call: Callable[[], None], at_once: bool = False) -> None:
        while self._calls and (self._calls[0].done() or len(self._calls) >= _MOST_WAITING):
            self._calls.popleft().result()
        self._calls.append(self._thread.submit(self._checked, call))
        if at_once:
            self._wait()

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
    made, in_files = [], []
    for writer in writers:
        if isinstance(writer, Writer):
            made.append(writer)
        elif not isinstance(writer, str):
            raise WriterError(f"the writer {writer!r} is not a looplib.Writer; subclass it and pass an instance")
        elif writer == "jsonl":
            in_files += [JsonlWriter(os.path.join(model_dir, METRICS))] if model_dir else []
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
