"""`run.json`: its types, how it is read, and how it is written.

It may come from somebody else, so `read_report` leaves out each part that is not of its type. What a newer looplib has
added to a start is kept.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol, runtime_checkable

from looplib.base import files
from looplib.base.decoding import READ, Limits, decode, parse_json, text
from looplib.masks import masked

MOST_STARTS = 200  # that are kept: the first one and the newest; each has up to 50 kB
_MOST_WORKERS = 100_000
_VARIABLES = ("OMP_NUM_THREADS", "TF_ENABLE_ONEDNN_OPTS", "XLA_FLAGS")  # of the environment, that change kernels
_MOST_BYTES = 1 << 14  # of /proc/cpuinfo, which has a part for each core

Seconds = Annotated[float, 1e12]  # of a run, in either direction; sums of these are finite
_Word, _Place, _Phrase, _Line = Annotated[str, 40], Annotated[str, 1000], Annotated[str, 200], Annotated[str, 500]
_mapping = functools.partial(dataclasses.field, default_factory=dict)
_list = functools.partial(dataclasses.field, default_factory=list)
_rarely = functools.partial(dataclasses.field, metadata={"rare": True})  # a field that is written if it says something


@dataclasses.dataclass(frozen=True)
class Program:
    """The program of a process.

    Attributes:
      arguments: the arguments of Python before the program's own: ["-m", MODULE], or the path of a file.
      directory: the working directory; "" if it was removed.
      repository: the root of the git repository that contains the program; "" for none.
      commit: its commit; "" for none.
      changes: checksum of `git diff HEAD`; "" for no changes. The text is in the file `code.diff`.
    """

    arguments: list[str] | None = None
    directory: _Place | None = None
    repository: _Place = ""
    commit: _Place = ""
    changes: _Place = ""


@dataclasses.dataclass(frozen=True)
class Process:
    """A process.

    Attributes:
      host: the name of its machine.
      pid: its process id on that machine.
      since: its start in seconds since the epoch, because process ids are reused.
    """

    host: str = ""
    pid: int | None = None
    since: float = 0.0


@dataclasses.dataclass(frozen=True)
class Point:
    """The memory and the times at a report.

    Attributes:
      step: the global step.
      host_bytes: resident memory of this process; None where the system does not say.
      device_bytes: memory in use on the fullest GPU or TPU; None without one.
      seconds: dict from phase to seconds of this start up to here.
    """

    step: int | None = None
    host_bytes: int | None = None
    device_bytes: int | None = None
    seconds: dict[str, Seconds] = _mapping()


@dataclasses.dataclass(frozen=True)
class Rollback:
    """A guard has led the run back.

    Attributes:
      step: at which it has found something.
      to: the step of the checkpoint.
      reason: what it has found.
      seconds: dict from phase to seconds of this start up to here.
    """

    step: int | None = None
    to: int | None = None
    reason: Annotated[str, 300] = ""
    seconds: dict[str, Seconds] = _mapping()


REJECTED = "rejected export"  # the kind of a warning of an export that is not published


@dataclasses.dataclass(frozen=True)
class RunWarning:
    """What was found in a training at a step: see `LearningFinding`, and memory that grows."""

    step: int = 0
    kind: Annotated[str, 100] = ""
    subjects: list[str] = _list()
    since: int = 0
    text: Annotated[str, 1000] = ""
    advice: _Line = ""


@dataclasses.dataclass(frozen=True)
class ReplicaChecks:
    """The replicas are compared every so many steps; `passed` counts comparisons without a difference."""

    every: int
    passed: dict[str, int | None]


@dataclasses.dataclass(frozen=True)
class TerminationNotice:
    """A notice of a cloud or a cluster manager that the machine or the job of a process ends soon.

    Attributes:
      source: who has said it: "gcp", "aws" or "slurm".
      kind: what comes, in its own words, such as "terminate".
      host: the name of the machine.
      time: when it was seen, in ISO 8601.
      deadline: when it comes at the earliest, in ISO 8601; None where that is not known.
    """

    source: Annotated[str, 100]
    kind: Annotated[str, 100]
    host: Annotated[str, 100] = ""
    time: Annotated[str, 100] = ""
    deadline: Annotated[str, 100] | None = None

    def __str__(self) -> str:
        deadline = f", deadline {self.deadline}" if self.deadline else ""
        return f"the notice of {self.source} ({self.kind}, seen {self.time}{deadline})"


@dataclasses.dataclass(frozen=True)
class Straggler:
    """A worker for which the others wait.

    Attributes:
      worker: its index; 0 is the chief.
      step: the global step at which this was found.
      share: of the time of a step, for which the others wait for it; 0 from the step on at which it is slow no more.
      seconds: that it needs for a step by itself.
      others: that the others need, the median.
      cause: "data", if most of the difference is waiting for its data, or "step".
    """

    worker: int
    step: int
    share: float
    seconds: float
    others: float
    cause: Annotated[str, 10] = ""

    def __str__(self) -> str:
        why = "it waits for its data" if self.cause == "data" else "its steps take longer"
        return (
            f"worker {self.worker} is slower than the others, which wait for it {self.share:.0%} of the time: {why} "
            f"({1e3 * self.seconds:.3g} ms a step, the others {1e3 * self.others:.3g} ms)"
        )


@dataclasses.dataclass(frozen=True)
class Machine:
    """A kind of machine: what may decide the last bits of results.

    Attributes:
      cpu: the name of the CPU, and a checksum of what it says that it can do.
      cores: how many of its cores the process may use.
      devices: the names of GPUs and TPUs.
      variables: those of the environment that change how TensorFlow computes, with their values.
    """

    cpu: str
    cores: int
    devices: list[str]
    variables: dict[str, str]

    def differences(self, now: "Machine") -> list[str]:
        """Returns what is another one on a second machine, as clauses."""
        found = [
            f"{what} {before or 'none'} then, and {after or 'none'} now"
            for what, before, after in (
                ("its CPU was", self.cpu, now.cpu),
                ("it had the cores", str(self.cores), str(now.cores)),
                ("it had the devices", ", ".join(self.devices), ", ".join(now.devices)),
            )
            if before != after
        ]
        names = sorted(self.variables.keys() | now.variables.keys())
        pairs = [(name, self.variables.get(name), now.variables.get(name)) for name in names]
        return found + [
            f"{name} was {before!a:.100}, and is {after!a:.100}" for name, before, after in pairs if before != after
        ]


@dataclasses.dataclass
class StartEntry:
    """One start of a run; docs/reference/run_directory.md describes the fields.

    Attributes:
      unknown: fields that a newer looplib has added.
    """

    started: _Word = ""
    note: _Phrase = ""  # of the launcher: how many workers, and why
    num_replicas: int | None = None
    command: list[str] = _list()
    program: Program | None = None
    process: Process = Process()
    versions: dict[str, Annotated[str, 100]] = _mapping()
    restored_from: str | None = None
    changed: dict[str, tuple[Any, Any]] = _mapping()
    rollbacks: list[Rollback] = _rarely(default_factory=list)
    warnings: list[RunWarning] = _rarely(default_factory=list)
    notices: list[TerminationNotice] = _rarely(default_factory=list)
    stragglers: list[Straggler] = _rarely(default_factory=list)
    replica_checks: list[ReplicaChecks] = _rarely(default_factory=list)
    machine: list[Machine] = _rarely(default_factory=list)
    status: _Word = ""
    step: int | None = None
    verdict: _Line = ""
    outcome: _Phrase = _rarely(default="")
    error: str = _rarely(default="")
    console: str = _rarely(default="")
    points: list[Point] = _list()
    seconds: dict[str, Seconds] = _mapping()
    unknown: dict[str, Any] = _rarely(default_factory=dict)

    def note_that(self, what: "Note") -> None:
        """Adds what happened to its list."""
        getattr(self, _LISTS[type(what)]).append(what)

    @property
    def restored_step(self) -> int | None:
        """The step of the checkpoint that it continued from; None for none."""
        found = re.search(r"ckpt-(\d{1,15})$", self.restored_from or "")
        return int(found[1]) if found else None

    @property
    def slow_workers(self) -> list[Straggler]:
        """The workers that were slow at the end of the start, the slowest first."""
        newest = {one.worker: one for one in self.stragglers if 0 <= one.worker < _MOST_WORKERS and one.step >= 0}
        return sorted((one for one in newest.values() if 0 < one.share <= 1), key=lambda one: -one.share)


Note = Rollback | RunWarning | TerminationNotice | Straggler | ReplicaChecks | Machine
_LISTS: Mapping[type, str] = {
    Rollback: "rollbacks",
    RunWarning: "warnings",
    TerminationNotice: "notices",
    Straggler: "stragglers",
    ReplicaChecks: "replica_checks",
    Machine: "machine",
}


@dataclasses.dataclass(frozen=True)
class Variable:
    """A row of the model's table."""

    name: Annotated[str, 300] = ""
    shape: list[int] = _list()
    parameters: int | None = None
    trainable: bool = False


@dataclasses.dataclass(frozen=True)
class Model:
    """The number of parameters, and the variables."""

    parameters: float | None = None
    trainable_parameters: float | None = None
    variables: list[Variable] = _list()


@dataclasses.dataclass(frozen=True)
class MeasuredSpeed:
    """How much a training computes; see `loop.speed.Speed`."""

    flops_per_step: float | None = None
    dtype: _Word = ""
    peak: float | None = None
    share_of_peak: float | None = None


@dataclasses.dataclass(frozen=True)
class GoodputShare:
    """The share of the time that became kept steps, and the seconds by cause; see `goodput.Goodput`."""

    share: float
    seconds: dict[str, Seconds]


@dataclasses.dataclass
class RunReport:
    """A run: its newest start, and what is known of all of them; docs/reference/run_directory.md has the fields."""

    status: _Word = ""
    step: int | None = None
    verdict: _Line = ""
    error: str = _rarely(default="")
    url: _Line = _rarely(default="")
    objective: _Line = _rarely(default="")
    console: str = _rarely(default="")
    final_step: int | None = None
    end: int | None = None
    metrics: dict[str, dict[str, float | None]] = _mapping()
    rollbacks: int = 0
    engines: dict[str, Any] = _mapping()
    saved_step: int | None = None
    flags: dict[str, Any] = _mapping()
    config: dict[str, Any] = _mapping()
    command: list[str] = _list()
    program: Program | None = None
    versions: dict[str, Annotated[str, 100]] = _mapping()
    restored_from: str | None = None
    num_replicas: int | None = None
    strategy: _Phrase = ""
    loop: str | None = None
    restarts: int = 0
    started: _Word = ""
    seconds: dict[str, Seconds] = _mapping()
    goodput: GoodputShare | None = None
    starts: list[StartEntry] = _list()
    model: Model | None = _rarely(default=None)
    speed: MeasuredSpeed | None = _rarely(default=None)
    traceback: Annotated[str, 20_000] = _rarely(default="")
    not_default: dict[str, tuple[Any, Any]] | None = _rarely(default=None)

    @property
    def newest(self) -> StartEntry:
        """Its newest start."""
        return self.starts[-1] if self.starts else StartEntry()


# The fields of a report in words; docs/reference/run_directory.md is made of it.
FIELDS = {
    "status": "`running`, `done`, `failed`, `preempted` or `restarted`; of an earlier start also `killed`.",
    "step, end": "The step that the run has reached, and the one that it trains to.",
    "saved_step, final_step": "The steps of the newest checkpoint, and of the one that `EarlyStopping` has restored.",
    "metrics": "The last metrics of each split.",
    "verdict": "What limits the speed.",
    "seconds": "The seconds of each phase, over all starts.",
    "speed": "The floating-point operations of a step, and the measured peak of the device.",
    "model": "The number of parameters, and the variables.",
    "command, program, versions": "The command; its directory and git commit; the versions of Python and packages.",
    "flags, config, not_default": "The settings; and those that differ from their defaults, as (default, value).",
    "strategy, num_replicas": "The devices.",
    "loop, engines": "The value of `--loop`, and what `auto` has chosen.",
    "started, restarts, rollbacks": "When the first start was, and how many restarts and rollbacks there were.",
    "restored_from": "The checkpoint that the newest start began with.",
    "starts": "Each start, with these fields; `changed` has the settings that differ from the start before, `note` "
    "what the launcher says (how many workers, and why), `outcome` why an action has ended the training or what a "
    "sweep has noted, `rollbacks`, `notices`, `warnings`, `stragglers` (slow workers), `replica_checks` what happened "
    "in it, `machine` the kind of machine.",
    "goodput": "What share of the time since the first start became kept steps, and the seconds by cause.",
    "error, traceback": "Of a start that failed.",
    "objective": "Of a trial, by which metric its sweep compares it, such as `max:eval/accuracy`.",
    "url": "Where the run is in an object store; this directory is its local copy.",
    "console": "Why something that was printed is lost.",
}


def read_report(path: str, limits: Limits = READ, mask: bool = False) -> RunReport | None:
    """Returns the content of a report, without values of wrong types; None if none can be read."""
    try:
        content = parse_json(files.read_text(path))
        content = masked(content) if mask else content
        found = decode(RunReport, content, limits, strict=False)
        if "started" in content and not isinstance(content.get("starts"), list):  # of an older version
            found.starts = [decode(StartEntry, content, limits, strict=False)]
    except (OSError, ValueError):
        return None
    found.starts = kept(found.starts)
    return found if content else None


def kept(starts: Sequence[StartEntry]) -> list[StartEntry]:
    """Returns the starts that a report has room for."""
    return [*starts[:1], *starts[1:][1 - MOST_STARTS :]]


def as_text(report: RunReport) -> str:
    """Returns a report as its file has it, with secrets masked."""
    return json.dumps(masked(strict_json(report)), indent=2, allow_nan=False) + "\n"


def strict_json(value: Any) -> Any:
    """Returns a value for strict JSON: NaN and infinity become None, dataclasses dicts, and other objects text."""
    if isinstance(value, dict):
        return {str(key): strict_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_json(item) for item in value]
    if isinstance(value, (set, frozenset)):  # whose order differs between processes
        return sorted(map(strict_json, value), key=repr)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        rare = _rare_fields(type(value)) if isinstance(value, StartEntry | RunReport) else {}
        fields = {name: item for name, item in vars(value).items() if name not in rare or item != rare[name]}
        return strict_json({**fields.pop("unknown", {}), **fields})
    numpy = sys.modules.get("numpy")  # which `status` does without
    if numpy and isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (str, int, bool, type(None))) else str(value)


@functools.cache
def _rare_fields(kind: type) -> dict[str, Any]:
    """Returns the fields that are written only with another value than this one."""
    defaults = kind()
    return {field.name: getattr(defaults, field.name) for field in dataclasses.fields(kind) if field.metadata}


# Settings.


@runtime_checkable
class _AsDict(Protocol):
    def as_dict(self) -> dict[str, Any]: ...


def as_dict(config: Any) -> dict[str, Any]:
    """Returns a program's own settings as a dict.

    Args:
      config: a dataclass, a mapping, or an object with `as_dict`; None for none.
    """
    if config is None:
        return {}
    if isinstance(config, _AsDict):  # Model Garden's are dataclasses too, of more than counts
        return config.as_dict()
    return dict(config) if isinstance(config, Mapping) else dataclasses.asdict(config)


def changed_settings(earlier: RunReport, now: RunReport) -> dict[str, tuple[Any, Any]]:
    """Returns (old, new) of each setting that two reports have with different values, by its name on the command line.

    Args:
      earlier: a report.
      now: another one, of which `flags` and `config` count.
    """
    found = {}
    for old, new, prefix in ((earlier.flags, now.flags, ""), (earlier.config, now.config, "config.")):
        before, after = flattened(masked(old), prefix), flattened(masked(strict_json(new)), prefix)
        for name in before.keys() & after.keys():
            if before[name] != after[name] and name not in ("model_dir", "local_dir"):  # which may be moved
                found[name] = before[name], after[name]
    return found


def flattened(tree: Any, prefix: str = "", limits: Limits = READ) -> dict[str, Any]:
    """Returns the leaves of nested dicts by their joined names, each with a prefix."""
    flat: dict[str, Any] = {}
    for name, value in (decode(dict[str, Any], tree, limits, strict=False) if isinstance(tree, dict) else {}).items():
        inner = isinstance(value, dict) and value
        flat.update(flattened(value, f"{prefix}{name}.", limits) if inner else {f"{prefix}{name}": value})
        if len(flat) > limits.items:
            break
    return flat


def shown(value: Any) -> str:
    """Returns a setting as a person would write it: a text as it is, anything else as JSON; of bounded length."""
    return text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


# This process and this machine.


def this_process() -> Process:
    """Returns this process."""
    return Process(platform.node(), os.getpid(), _began(os.getpid()))


@functools.cache  # by process id, so that a forked child asks for itself
def _began(pid: int) -> float:
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):  # a system without /proc
        with open(f"/proc/{pid}/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    return time.time()


def this_machine() -> Machine:
    """Returns the kind of this machine."""
    import tensorflow as tf  # here, because every start of a binary imports this file

    devices = []
    for kind in ("GPU", "TPU"):
        for device in tf.config.list_physical_devices(kind):
            details = tf.config.experimental.get_device_details(device) if kind == "GPU" else {}
            devices.append(str(details.get("device_name", kind)))
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return Machine(_cpu(), cores, devices, variables)


def _cpu() -> str:
    """Returns the name of the CPU, with a checksum of its features: a virtual machine may hide some of them."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = [line.partition(":") for line in file.read(_MOST_BYTES).splitlines()]
    except OSError:
        return platform.processor() or platform.machine()
    first: dict[str, str] = {}
    for name, _, value in lines:
        first.setdefault(name.strip(), value.strip())
    name = first.get("model name") or f"{platform.machine()} {first.get('CPU part', '')}".strip()
    features = first.get("flags") or first.get("Features", "")
    return f"{name} ({hashlib.sha256(features.encode()).hexdigest()[:8]})"
