"""RunReport: writes `run.json`, with what each start of a run has come to."""

import contextlib
import dataclasses
import datetime
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from absl import logging

from looplib.base import console, files, folders
from looplib.base.messages import gist, shown, with_cure
from looplib.cluster import peers
from looplib.errors import Preempted, UsageError
from looplib.masks import masked, masked_text
from looplib.report.clock import Clock
from looplib.report.pages import Page, WrittenPage
from looplib.report.writers.contract import Setting
from looplib.run.goodput import as_report as as_goodput
from looplib.run.program import DIFF, Program, this_process
from looplib.run.run_json import (
    TRAINING_REPORT,
    Report,
    as_dict,
    changed_settings,
    flattened,
    kept,
    read_report,
    strict,
)

_MOST_POINTS = 100
_FRESH_SECONDS, _LEAST_SHARE = 60.0, 500  # between two writes, and how many times as long as one takes, of many starts
_MOST_TRACEBACK = 20_000  # characters, of its end
_FOR_NEW_RUNS = ("warm_start", "continue_from")


@dataclasses.dataclass(frozen=True)
class Point:
    """What is noted at a report."""

    step: int  # the global step
    host_bytes: int | None  # resident memory of this process; None where the system does not say
    device_bytes: int | None  # memory in use on the fullest GPU or TPU; None without one
    seconds: dict[str, float]  # by phase, of this start up to here


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


def _host_bytes() -> int | None:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


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


@dataclasses.dataclass(frozen=True)
class RunProgress:
    """Where a run stands."""

    # the global step; the one that the error names if a guard has ended the run, whose loop may have gone on; after a
    # training, the one that it has reached
    step: int
    final_step: int | None  # of an earlier checkpoint, which was restored after the training; None if there was none
    end: int | None  # the step that the newest training goes to; None where it is not known
    metrics: dict[str, dict[str, float]]  # the last ones, by split
    rollbacks: int  # how often the run went back to a checkpoint
    engines: dict[str, Any]  # what `loop="auto"` has chosen, by split
    saved_step: int | None  # of the newest committed checkpoint


@dataclasses.dataclass
class RunSettings:
    """The settings of a run."""

    flags: dict[str, Any]  # those that a binary takes as flags
    config: Any = None  # the program's own: a dataclass, a mapping, or an object with `as_dict`; None for none
    defaults: dict[str, Any] | None = None  # `flags` and `config` without any setting; None if they are not known

    def changed(self, earlier: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Returns (old, new) of each setting that an earlier report has with another value."""
        return changed_settings(earlier, {"flags": self.flags, "config": as_dict(self.config)})


@dataclasses.dataclass
class Computation:
    """What a run computes, and on what."""

    strategy: str  # the name of the strategy, such as "MirroredStrategy, 2 replicas"
    num_replicas: int  # replicas that step together
    model: dict[str, Any] | None = None  # the trainer's number of parameters and its variables; None without a trainer
    speed: Any = None  # how much the training computes, a dataclass; None where that is not known


@dataclasses.dataclass
class RunReport:
    """The report of a run directory, replaced atomically whenever its status changes, and each minute of a training.

    docs/reference/run_directory.md describes its fields.
    """

    path: str | None  # the file; None writes nothing
    clock: Clock  # of this start
    points: Points  # memory and seconds at the reports of this start
    settings: RunSettings
    computation: Computation
    standing: Callable[[], RunProgress]  # returns where the run stands
    check: Callable[[], None]  # raises `UsageError` if the run directory is not ours any more; nothing is written then
    program: Program | None = None  # of a binary, whose changed code is written beside the report; None for none
    page: Page = dataclasses.field(default_factory=Page)  # of the run, updated when the run has ended in some way
    _earlier: Report = dataclasses.field(default_factory=dict, init=False)
    _start: dict[str, Any] = dataclasses.field(default_factory=dict, init=False)
    _noted: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict, init=False)
    _traceback: str = dataclasses.field(default="", init=False)
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
        if not self._start:
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
        self._earlier = read_report(self.path) if self.path else {}
        if self.path and not self._earlier and os.path.exists(self.path):
            self._keep_aside(self.path)
        changed = self.settings.changed(self._earlier)
        self._start = {
            "started": _ago(self.clock.seconds()["wall"]),
            "note": os.environ.get("LOOPLIB_START_NOTE", ""),  # of the launcher: how many workers, and why
            "num_replicas": self.computation.num_replicas,
            "command": sys.argv,
            "program": self.program.as_dict() if self.program else None,
            "process": dataclasses.asdict(this_process()),
            "versions": _versions(),
            "restored_from": restored_from,
            "changed": {name: list(values) for name, values in changed.items()},
        }
        if self.program and self.program.commit and os.path.basename(self.path or "") == TRAINING_REPORT:
            self._write_diff(os.path.join(os.path.dirname(self.path), DIFF), self.program.diff)
        if changed and restored_from and os.path.basename(self.path or "") == TRAINING_REPORT:
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

    def write(self, status: str, error: str = "") -> None:
        """Writes the file. One that cannot be written is a warning and does not end a run.

        Args:
          status: "running", "done", "failed", "preempted" or "restarted". A start that has no end was "killed".
          error: the sentence of a failure.
        """
        if not self.path:
            return
        if not self._start:
            self._begin(None)
        began = time.monotonic()
        standing, settings, computation = self.standing(), self.settings, self.computation
        ends = {"status": status, "step": standing.step, "verdict": self.clock.summary()[1]}
        ends |= {"error": error} if error else {}
        ends |= {"console": console.first_fault()} if console.first_fault() else {}
        points = [dataclasses.asdict(point) for point in self.points.points]
        own = {**self._start, **self._noted, **ends, "points": points, "seconds": self.clock.seconds()}
        starts = kept([
            *({**start, "status": "killed"} if start.get("status") == "running" else start
              for start in self._earlier.get("starts", [])),
            own,
        ])  # fmt: skip
        earlier = self._earlier.get("metrics", {}) if self._earlier.get("step") == standing.step else {}
        content = {
            **ends,
            **dataclasses.asdict(standing),
            "metrics": {**earlier, **standing.metrics},
            "flags": settings.flags,
            "config": as_dict(settings.config),
            **{name: self._start[name] for name in ("command", "program", "versions", "restored_from", "num_replicas")},
            "strategy": computation.strategy,
            "loop": settings.flags.get("loop"),
            "restarts": max(len(starts) - 1, self._earlier.get("restarts", -1) + 1),
            "started": starts[0].get("started"),
            "seconds": _added_up(self._earlier.get("seconds", {}), own["seconds"]),
            "goodput": as_goodput(starts),
            "starts": starts,
            **({"model": computation.model} if computation.model else {}),
            **({"speed": dataclasses.asdict(computation.speed)} if computation.speed else {}),
            **({"traceback": self._traceback} if status == "failed" and self._traceback else {}),
        }
        if settings.defaults is not None:
            changed = settings.changed(strict(settings.defaults))
            content["not_default"] = {name: list(values) for name, values in changed.items()}
        self._write(self.path, json.dumps(masked(strict(content)), indent=2, allow_nan=False) + "\n")
        self._next = time.monotonic() + max(_FRESH_SECONDS, _LEAST_SHARE * (time.monotonic() - began))
        if status != "running":
            self.page.update()

    def keep_fresh(self) -> None:
        """Writes the file if it is a minute old: of a start that is killed, only what came later is unknown."""
        if time.monotonic() >= self._next:
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

    def note(self, kind: str, /, **what: Any) -> None:
        """Adds what happened to a list of this start, such as `rollbacks`, for the next `write`; in any thread."""
        self._noted.setdefault(kind, []).append(what)


def settings_of(flags: Mapping[str, Any], config: Any) -> dict[str, Setting]:
    """Returns settings as a flat dict, for writers; values of other types become text.

    Args:
      flags: settings that a binary takes as flags.
      config: see `as_dict`; its fields get "config." before their names.
    """
    flat = {**masked(flags), **flattened(masked(strict(as_dict(config))), "config.")}
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
