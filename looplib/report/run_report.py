"""The life of `run.json` and of `report.html` of this start of a run."""

import contextlib
import dataclasses
import datetime
import functools
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from absl import logging

from looplib.base import console, files, folders, orders
from looplib.base.messages import gist, shown, with_cure
from looplib.base.numbers import format_size
from looplib.cluster import peers
from looplib.errors import MissingPartError, Preempted, UsageError
from looplib.masks import masked, masked_text
from looplib.report.clock import Clock
from looplib.report.writers.contract import Setting
from looplib.run.directory import DIFF, RUN_JSON
from looplib.run.goodput import as_report as as_goodput
from looplib.run.report import (
    Model,
    Note,
    Point,
    Program,
    RunReport,
    RunWarning,
    StartEntry,
    as_dict,
    as_text,
    changed_settings,
    flattened,
    kept,
    read_report,
    strict_json,
    this_process,
)


class WrittenPage(Protocol):
    """A page that was written. A notebook displays it as the value of a cell."""

    path: str


class Page:
    """`report.html` of a run, written whenever the run ends. If it cannot be written, a warning is logged, once.

    Args:
      directory: the run directory; None for a process that writes no page.
      check: called before each write; raises `UsageError` if another process has taken over the directory.
    """

    def __init__(self, directory: str | None, check: Callable[[], None]) -> None:
        self._page: WrittenPage | None = None
        self._directory, self._check = directory, check
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
        if self._closed or time.monotonic() - self._written >= self._took / _PAGE_SHARE:
            self._write()

    def show(self) -> WrittenPage:
        """Writes the page, and returns it; raises `UsageError` if there is no directory to write it to."""
        self._write()
        if self._directory is None or self._page is None:
            raise MissingPartError(
                "the page of a run needs a directory that can be written; give Controller(model_dir=...)"
            )
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
            from looplib.report.page.html import write_of_run  # here, because a run does not need it before its end

            self._check()
            self._page = write_of_run(self._directory)
        except Exception as error:  # what is only shown never ends a run
            logging.warning("report.html cannot be written: %s", with_cure(error))
            self._directory = None
        self._stale = False
        self._written = time.monotonic()
        self._took = self._written - started


_PAGE_SHARE = 0.01  # maximum share of the time of a run that calls `train` many times
_MOST_POINTS = 100
_FEWEST_SIZES, _LEAST_GROWTH, _LEAST_GROWTH_SHARE = 15, 200e6, 0.25  # points, bytes, and of the first size
_FRESH_SECONDS, _LEAST_SHARE = 60.0, 500  # between two writes, and how many times as long as one takes, of many starts
_MOST_TRACEBACK = 20_000  # characters, of its end
_OF_BOTH = (  # fields of a start that the report of the run repeats
    "status", "verdict", "error", "console", "command", "program", "versions", "restored_from", "num_replicas",
)  # fmt: skip
_FOR_NEW_RUNS = ("warm_start", "continue_from")


class Points:
    """Keeps 50 to 100 points that spread over the reports of a start, however many these are."""

    def __init__(self, clock: Clock) -> None:
        self.points: list[Point] = []  # so far, in the order of their notes
        self._clock = clock
        self._every = 1  # every how many reports one is noted
        self._reports = 0

    def note(self, step: int) -> None:
        """Notes a point at a step."""
        self._reports += 1
        if self._reports % self._every:
            return
        seconds = {name: value for name, value in self._clock.seconds().items() if name != "wall"}
        self.points.append(Point(step, _host_bytes(), _device_bytes(), seconds))
        if len(self.points) >= _MOST_POINTS:
            self.points, self._every = self.points[1::2], 2 * self._every


def memory_growth(points: Sequence[Point]) -> RunWarning | None:
    """Returns a warning if the memory of the process has grown steadily, to much more than it was.

    Args:
      points: of one start. The first quarter does not count, in which buffers and caches are filled.
    """
    known = [one for one in points if one.host_bytes and one.step is not None]
    known = known[len(known) // 4 :]
    if len(known) < _FEWEST_SIZES:
        return None
    places = [round(number * (len(known) - 1) / 4) for number in range(5)]
    sizes = [known[place].host_bytes for place in places]
    grown, steps = sizes[-1] - sizes[0], known[-1].step - known[0].step
    steady = all(after - before > grown / 10 for before, after in zip(sizes, sizes[1:]))
    if not steady or steps <= 0 or grown < max(_LEAST_GROWTH, _LEAST_GROWTH_SHARE * sizes[0]):
        return None
    hours = (sum(known[-1].seconds.values()) - sum(known[0].seconds.values())) / 3600
    an_hour = f", {format_size(grown / hours)} an hour" if hours > 0 else ""
    return RunWarning(
        known[-1].step,
        "growing memory",
        ["memory"],
        known[0].step,
        f"the memory of the process grows steadily, from {format_size(sizes[0])} at step {known[0].step:,} to "
        f"{format_size(sizes[-1])} at step {known[-1].step:,}: {format_size(1000 * grown / steps)} in 1,000 "
        f"steps{an_hour}",
        "look for a list that keeps something of each step or batch, and for cache() of data that is still being read",
    )


def _host_bytes() -> int:
    """Returns the memory of this process; the most so far where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return peak_bytes()


def peak_bytes() -> int:
    """Returns the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _device_bytes() -> int | None:
    import tensorflow as tf

    try:
        return max((tf.config.experimental.get_memory_info(name)["current"] for name in _devices()), default=None)
    except (ValueError, tf.errors.OpError):  # a device whose memory is not counted
        return None


@functools.cache
def _devices() -> list[str]:
    import tensorflow as tf

    return [device.name for kind in ("GPU", "TPU") for device in tf.config.list_logical_devices(kind)]


@dataclasses.dataclass
class RunFacts:
    """Facts about a run: its settings, its model and its devices."""

    strategy: str  # the name of the strategy, such as "MirroredStrategy, 2 replicas"
    num_replicas: int  # replicas that step together
    flags: dict[str, Any]  # the settings that a binary takes as flags
    config: Any = None  # the program's own: a dataclass, a mapping, or an object with `as_dict`; None for none
    defaults: dict[str, Any] | None = None  # `flags` and `config` without any setting; None if they are not known
    model: Model | None = None  # the trainer's number of parameters and its variables; None without a trainer
    speed: Any = None  # how much the training computes, a dataclass; None where that is not known

    def changed(self, earlier: RunReport) -> dict[str, tuple[Any, Any]]:
        """Returns (old, new) of each setting that an earlier report has with another value."""
        return changed_settings(earlier, RunReport(flags=self.flags, config=as_dict(self.config)))

    @property
    def not_default(self) -> dict[str, tuple[Any, Any]] | None:
        """(default, own) of each setting that has another value; None where the defaults are not known."""
        return None if self.defaults is None else self.changed(RunReport(**strict_json(self.defaults)))


@dataclasses.dataclass
class StartReport:
    """Writes the report of a run, replaced atomically whenever its status changes, and each minute of a training.

    docs/reference/run_directory.md describes its fields.
    """

    path: str | None  # the file; None writes nothing
    clock: Clock  # of this start
    points: Points  # memory and seconds at the reports of this start
    facts: RunFacts
    standing: Callable[[], RunReport]  # returns the report with where the run stands
    check: Callable[[], None]  # raises `UsageError` if the run directory is not ours any more; nothing is written then
    page: Page  # of the run, updated when the run has ended in some way
    program: Program | None = None  # of a binary; None for none
    diff: str = ""  # of its code, which is written beside the report
    stopped: str | None = None  # why an action has ended the training, "" without a reason; None if none has
    _earlier: RunReport = dataclasses.field(default_factory=RunReport, init=False)
    _start: StartEntry = dataclasses.field(default_factory=StartEntry, init=False)
    _begun: bool = dataclasses.field(default=False, init=False)
    _traceback: str = dataclasses.field(default="", init=False)
    _grows: bool = dataclasses.field(default=False, init=False)  # whether its memory does, as was warned of
    _next: float = dataclasses.field(default=0.0, init=False)  # when it is old, by a clock that nobody sets

    def __call__(self) -> WrittenPage:
        """Writes the page of the run, `report.html`, as it is now, and returns it for a notebook to show.

        Raises:
          UsageError: if there is no run directory, or it cannot be written.
        """
        return self.page.show()

    @contextlib.contextmanager
    def recording_start(self, restored_from: str | None) -> Iterator[None]:
        """Writes that a training or an evaluation job is running, in the `with` block, and how it ended.

        The first block adds this start to the history, and says in one line which settings differ from those of the
        last start.

        Args:
          restored_from: path of the checkpoint that it continues from, or None.
        """
        if not self._begun:
            self._begin(restored_from)
        self._traceback = ""
        self.write("running")
        peers.current.report_exit_by(self.write)
        try:
            yield
        except Preempted:
            self.write("preempted")
            raise
        except BaseException as error:
            peers.current.exit_with_first_cause(0)  # if another worker is known to have failed first
            self._traceback = masked_text("".join(traceback.format_exception(error)))[-_MOST_TRACEBACK:]
            self.write("failed", gist(error))
            raise
        self.write("done")

    def _begin(self, restored_from: str | None) -> None:
        self._begun = True
        earlier = read_report(self.path) if self.path else None
        if self.path and not earlier and os.path.exists(self.path):
            self._keep_aside(self.path)
        self._earlier = earlier or RunReport()
        changed = self.facts.changed(self._earlier)
        self._start.started = _ago(self.clock.seconds()["wall"])
        self._start.note = orders.current().note  # of the launcher: how many workers, and why
        self._start.num_replicas = self.facts.num_replicas
        self._start.command = sys.argv
        self._start.program = self.program
        self._start.process = this_process()
        self._start.versions = _versions()
        self._start.restored_from = restored_from
        self._start.changed = changed
        if self.program and self.program.commit and os.path.basename(self.path or "") == RUN_JSON:
            self._write_diff(os.path.join(os.path.dirname(self.path), DIFF), self.diff)
        if changed and restored_from and os.path.basename(self.path or "") == RUN_JSON:
            unused = "not used, because the run has a checkpoint"
            texts = [
                f"{name}={shown(new)} ({unused if name in _FOR_NEW_RUNS else f'was {shown(old)}'})"
                for name, (old, new) in sorted(changed.items())
            ]
            logging.warning(
                "settings changed since the last start: %s; the new values apply from step %d. Weights, optimizer "
                "state, step and position in the data always come from the checkpoint",
                ", ".join(texts),
                self.standing().step,
            )

    def note_point(self, step: int) -> None:
        """Notes memory and times at a report, and warns once of memory that grows steadily."""
        self.points.note(step)
        if not self._grows and (warning := memory_growth(self.points.points)):
            self._grows = True
            self.note(warning)
            logging.warning("step %d: %s; %s", warning.step, warning.text, warning.advice)

    def write(self, status: str, error: str = "") -> None:
        """Writes the file. One that cannot be written is a warning and does not end a run.

        Args:
          status: "running", "done", "failed", "preempted" or "restarted". A start that has no end was "killed".
          error: the sentence of a failure.
        """
        if not self.path:
            return
        if not self._begun:
            self._begin(None)
        began = time.monotonic()
        report, facts, start, before = self.standing(), self.facts, self._start, self._earlier
        start.status, start.step, start.verdict = status, report.step, self.clock.summary()[1]
        start.error, start.console, start.outcome = error, console.first_fault(), self.stopped or ""
        start.points, start.seconds = self.points.points, self.clock.seconds()
        for one in before.starts:
            one.status = "killed" if one.status == "running" else one.status
        starts = kept([*before.starts, start])
        report = dataclasses.replace(
            report,
            **{name: getattr(start, name) for name in _OF_BOTH},
            metrics={**(before.metrics if before.step == report.step else {}), **report.metrics},
            flags=facts.flags,
            config=as_dict(facts.config),
            strategy=facts.strategy,
            loop=facts.flags.get("loop"),
            restarts=max(len(starts) - 1, before.restarts + 1 if before.starts else 0),
            started=starts[0].started,
            seconds=_added_up(before.seconds, start.seconds),
            goodput=as_goodput(starts),
            starts=starts,
            model=facts.model,
            speed=facts.speed,
            traceback=self._traceback if status == "failed" else "",
            not_default=facts.not_default,
            objective=before.objective,
        )
        self._write(self.path, as_text(report))
        self._next = time.monotonic() + max(_FRESH_SECONDS, _LEAST_SHARE * (time.monotonic() - began))
        if status != "running":
            self.page.update()

    def keep_fresh(self, early: float = 0.0) -> None:
        """Writes the file if it is a minute old, less some seconds: of a killed start, only later news is unknown."""
        if time.monotonic() >= self._next - early:
            self.write("running")

    def _keep_aside(self, path: str) -> None:
        """Keeps a report that cannot be read, so that what it says of earlier starts is not lost."""
        with contextlib.suppress(OSError):  # it is written nevertheless, or a warning
            place = folders.move_aside(*os.path.split(path))
            logging.warning("%s cannot be read, so that this start is its first one; moved to %s", path, place)

    def _write_diff(self, path: str, diff: str) -> None:
        if diff:
            self._write(path, diff)
            return
        with contextlib.suppress(UsageError, OSError):  # an earlier start may have written one
            self.check()
            folders.delete(path)
            folders.remove(*os.path.split(path))

    def _write(self, path: str, text: str) -> None:
        try:
            self.check()
            files.write_whole(path, text)
        except (UsageError, OSError) as reason:
            logging.warning("%s cannot be written: %s", path, with_cure(reason))

    def note(self, what: Note) -> None:
        """Adds what happened to a list of this start, such as `rollbacks`, for the next `write`; in any thread."""
        self._start.note_that(what)


def settings_of(flags: Mapping[str, Any], config: Any) -> dict[str, Setting]:
    """Returns settings as a flat dict, for writers; values of other types become text.

    Args:
      flags: settings that a binary takes as flags.
      config: see `as_dict`; its fields get "config." before their names.
    """
    flat = {**masked(flags), **flattened(masked(strict_json(as_dict(config))), "config.")}
    return {  # event files and trackers take no lone surrogates
        name: value if isinstance(value, int | float) else str(value).encode(errors="backslashreplace").decode()
        for name, value in flat.items()
    }


def _ago(seconds: float) -> str:
    """Returns the time some seconds ago, in ISO 8601."""
    then = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(seconds=seconds)
    return then.isoformat(timespec="seconds")


def _added_up(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: round(one.get(name, 0.0) + other.get(name, 0.0), 3) for name in {**one, **other}}


def _versions() -> dict[str, str]:
    import looplib

    versions = {"looplib": looplib.__version__, "python": sys.version.split()[0]}
    names = ("tensorflow", "keras", "tf_keras", "numpy")
    return versions | {name: sys.modules[name].__version__ for name in names if name in sys.modules}
