"""Profile: an action that profiles some steps, and the time of each op in such a profile."""

import collections
import dataclasses
import gzip
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from looplib.base import files, folders
from looplib.base.messages import gist, whole_number
from looplib.compat import tensorflow as _tf
from looplib.errors import ActionError, MissingPartError
from looplib.task.actions import Action

OPS, TRACE = "profile.json", "profile.trace.json.gz"
_MOST_OPS, _MOST_EVENTS = 100, 500_000  # in the files
_OP = re.compile(r"([^:]+):(_?[A-Z]\w*)")  # as TensorFlow names the events of its ops
_NESTING = re.compile(
    r"^(?:(?:\w*PartitionedCall|while|cond|body|then|else|branch|_)(?:_?\d+)?/)+"
)  # of loops and calls


@dataclasses.dataclass(frozen=True)
class OpTime:
    """The time of one op.

    Attributes:
      name: its name in the graph.
      type: its type, such as "MatMul".
      time_ms: milliseconds in all, without the ops inside of it.
      share: share of the time of all ops, which several threads and devices may spend at once.
    """

    name: str
    type: str
    time_ms: float
    share: float


@dataclasses.dataclass(frozen=True)
class OpProfile:
    """The content of a profile.

    Attributes:
      ops: the time of each op, the longest first.
      events: the events, as the format of Chrome's traces has them.
    """

    ops: list[OpTime]
    events: list[dict[str, Any]]


def read_profile(paths: Iterable[str]) -> OpProfile | None:
    """Reads the files of a profile; None if this version of TensorFlow writes them in another way.

    Args:
      paths: the files `*.xplane.pb`.
    """
    spent: collections.Counter[tuple[str, str]] = collections.Counter()
    events: list[dict[str, Any]] = []
    for path in paths:
        with tf.io.gfile.GFile(path, "rb") as file:
            space = _tf.parse_profile(file.read())
        if space is None:
            return None
        for plane in space.planes:
            for line in plane.lines:
                for op, picoseconds in _own_times(_ops_of(plane, line)):
                    spent[op] += picoseconds
        events += _trace(space)
    if not events:
        return None
    total = sum(spent.values()) or 1
    ops = [OpTime(*op, round(time / 1e9, 6), round(time / total, 6)) for op, time in spent.most_common()]
    return OpProfile(ops, events)


def write(profile: OpProfile, start: int, steps: int, model_dir: str) -> None:
    """Writes `profile.json` and the trace.

    Args:
      profile: what was recorded.
      start: the step after which it started.
      steps: how many steps it has.
      model_dir: the run directory.
    """
    content = {"start": start, "steps": steps, "ops": [dataclasses.asdict(op) for op in profile.ops[:_MOST_OPS]]}
    files.write_whole(os.path.join(model_dir, OPS), json.dumps(content, indent=1) + "\n")
    trace = gzip.compress(json.dumps({"traceEvents": profile.events}).encode(), compresslevel=1)
    files.write_whole(os.path.join(model_dir, TRACE), trace)


def table(ops: Sequence[OpTime]) -> str:
    """Returns ops as a table with a line for each, below a head."""
    rows = [("share", "time", "type", "operation")]
    rows += [(f"{op.share:.1%}", f"{op.time_ms:.3f} ms", op.type, op.name[-80:]) for op in ops]
    share, time, kind, _ = (max(map(len, column)) for column in zip(*rows))
    return "\n".join(f"  {row[0]:>{share}}  {row[1]:>{time}}  {row[2]:<{kind}}  {row[3]}" for row in rows)


def _ops_of(plane: Any, line: Any) -> Iterator[tuple[int, int, tuple[str, str]]]:
    """Yields (start, end, (name, type)) of each op in a thread or stream, in picoseconds."""
    for event in line.events:
        name = plane.event_metadata[event.metadata_id].name
        for stat in event.stats:
            kind = plane.stat_metadata[stat.metadata_id].name
            if kind == "tf_op":  # a kernel on a GPU says which op it belongs to
                name = stat.str_value or plane.stat_metadata[stat.ref_value].name
            elif kind == "hlo_op":  # of a program of XLA
                hlo = stat.str_value or plane.stat_metadata[stat.ref_value].name
                name = f"{hlo}:XLA_{re.sub(r'[.][0-9.]+$', '', hlo)}"
        if match := _OP.fullmatch(name):
            op = _NESTING.sub("", match[1]), match[2]
            yield event.offset_ps, event.offset_ps + event.duration_ps, op


def _own_times(events: Iterable[tuple[int, int, tuple[str, str]]]) -> Iterator[tuple[tuple[str, str], int]]:
    """Yields (op, picoseconds) of each event, without the time of the events inside of it."""
    open_events: list[tuple[int, tuple[str, str]]] = []
    for start, end, op in sorted(events, key=lambda event: (event[0], -event[1])):
        while open_events and open_events[-1][0] <= start:
            open_events.pop()
        yield op, end - start
        if open_events:
            yield open_events[-1][1], -(min(end, open_events[-1][0]) - start)
        open_events.append((end, op))


def _trace(space: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for process, plane in enumerate(space.planes):
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": plane.name}})
        for thread, line in enumerate(plane.lines):
            name = line.display_name or line.name
            events.append({"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": name}})
            for event in line.events:
                if event.duration_ps and len(events) < _MOST_EVENTS:
                    start, seconds = line.timestamp_ns / 1e3 + event.offset_ps / 1e6, event.duration_ps / 1e6
                    name = plane.event_metadata[event.metadata_id].name
                    events.append({"ph": "X", "pid": process, "tid": thread, "ts": start, "dur": seconds, "name": name})
    return events


_LOGGED = 10  # ops


class Profile(Action):
    """Records a profile of exactly some steps, host and devices.

    It writes `train/plugins/profile` in the run directory, for TensorBoard (`pip install tensorboard-plugin-profile`);
    `profile.trace.json.gz`, for https://ui.perfetto.dev; and `profile.json`, the ops that took the most time. A run
    that resumes after these steps has no profile. Of several workers, the chief's steps are recorded. A profile that
    cannot be taken is a warning and does not end the run.

    Args:
      start: the global step after which it starts; one past the first steps leaves out what these have to prepare.
      steps: the number of steps.

    Raises:
      UsageError: for bad input.

    Example:
        ```python
        looplib.Controller(..., model_dir="/tmp/run", actions=[looplib.Profile(start=200, steps=20)])
        ```
    """

    def __init__(self, start: int, steps: int) -> None:
        self._start = whole_number("start of a Profile", start, least=0)
        self._end = self._start + whole_number("steps of a Profile", steps)
        self._known: set[str] | None = None  # the files of earlier profiles, while this one is recorded
        self._done = False

    def stops(self) -> tuple[int, ...]:
        """See `Action`."""
        return self._start, self._end

    def check_end(self, train_steps: int) -> None:
        """Refuses a profile that begins after the training, and warns of one that the end of the training cuts.

        Args:
          train_steps: the last step of the training; -1 for the end of its data.

        Raises:
          UsageError: if no step would be profiled.
        """
        if 0 <= train_steps <= self._start:
            raise ActionError(
                f"the profile starts after step {self._start}, and the training ends at step {train_steps}; give "
                f"--profile a START below {train_steps}, or train for more steps"
            )
        if 0 <= train_steps < self._end:
            logging.warning(
                "the training ends at step %d, so the profile has %d steps in place of %d",
                train_steps,
                train_steps - self._start,
                self._end - self._start,
            )

    def on_start(self, controller: Any) -> None:
        """Refuses a run without a directory."""
        if not controller.model_dir:
            raise MissingPartError("a profile needs a run directory to be written to; give Controller(model_dir=...)")
        if controller.global_step > self._start and not self._done:
            logging.info("steps %d to %d are past, and are not profiled again", self._start + 1, self._end)

    def on_leaving(self, step: int, controller: Any) -> None:
        """Starts the profile."""
        if step != self._start or self._done or not controller.is_chief:
            return
        folder = os.path.join(controller.model_dir, "train")
        try:
            if self._known is not None:  # a rollback has led to before its start
                tf.profiler.experimental.stop(save=False)
            self._known = _recorded(folder)
            tf.profiler.experimental.start(folder)
        except Exception as error:
            self._known, self._done = None, True
            logging.warning("no profile is taken: %s", gist(error))

    def on_reaching(self, step: int, controller: Any) -> None:
        """Ends the profile."""
        if step == self._end:
            self._finish(step, controller.model_dir)

    def on_end(self, controller: Any) -> None:
        """Ends the profile, if the training has ended before the last of its steps."""
        self._finish(controller.global_step, controller.model_dir)

    def on_exception(self, error: BaseException, controller: Any) -> None:
        """See `on_end`."""
        self.on_end(controller)

    def _finish(self, step: int, model_dir: str) -> None:
        known, self._known = self._known, None
        if known is None:
            return
        self._done = True
        folder = os.path.join(model_dir, "train")
        try:
            tf.profiler.experimental.stop()
            paths = sorted(_recorded(folder) - known)
            steps = step - self._start
            profile = read_profile(paths)
            if profile is None:
                logging.info("profiled steps %d to %d: tensorboard --logdir=%s", self._start + 1, step, model_dir)
                return
            write(profile, self._start, steps, model_dir)
            logging.info(
                "profiled steps %d to %d: tensorboard --logdir=%s, or %s in https://ui.perfetto.dev\n"
                "the most time in all of these steps:\n%s",
                self._start + 1,
                step,
                model_dir,
                os.path.join(model_dir, TRACE),
                table(profile.ops[:_LOGGED]),
            )
        except Exception as error:
            logging.warning("the profile cannot be written: %s", gist(error))


def _recorded(folder: str) -> set[str]:
    """Returns the paths of the profiles in a folder."""
    for name in ("plugins", os.path.join("plugins", "profile")):
        folders.check_folder(os.path.join(folder, name))
    return set(tf.io.gfile.glob(os.path.join(folder, "plugins", "profile", "*", "*.xplane.pb")))
