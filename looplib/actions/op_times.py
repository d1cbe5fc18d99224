"""The time of each op in a profile of TensorFlow's: `profile.json`, a short table, and a trace for Perfetto."""

import collections
import dataclasses
import gzip
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from looplib.base import files
from looplib.compat import tensorflow as _tf

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
    """What a profile has recorded.

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
