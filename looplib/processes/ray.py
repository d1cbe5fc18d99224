"""`python -m looplib ray`: the workers of a run as actors of a Ray cluster, which restart together after a failure."""

import contextlib
import dataclasses
import json
import logging
import math
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, BinaryIO

from looplib.base import console
from looplib.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, ClusterError, CommandError, PluginError, UsageError
from looplib.processes.child import PIPE, Child, CommandLine, Signals
from looplib.processes.group import hold_ports
from looplib.processes.restarts import (
    RestartBudget,
    Task,
    TaskLines,
    cannot_succeed,
    check_options,
    exit_code,
    outcome,
    say,
)

_LONGEST_LINE = 1 << 16  # bytes; a longer one is passed on in parts
_MOST_LINES = 1_000  # that wait for the driver; then the command waits too
_DRAIN = 1.0  # seconds that the last lines have once the command has ended
_TICK = 0.1
_LAST_GRACE = 5.0  # seconds after a second signal until all are killed
_LONGEST = 200  # characters of an error of Ray
_PATIENCE = 30.0  # seconds without a place for all workers until it is said
PLACEMENTS = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")  # of Ray's placement groups


@dataclasses.dataclass(frozen=True)
class News:
    """What has happened to a worker since the last look.

    Attributes:
      lines: what it has printed: whether on standard error, and one line without its end.
      code: how it has ended, as `subprocess` has it; None while it runs, or if more lines are to come.
    """

    lines: list[tuple[bool, bytes]]
    code: int | None


class WorkerActor:
    """One worker on its node; Ray makes an actor of it, and calls its methods in several threads.

    Args:
      host: an address of the node at which the other workers reach it.
    """

    def __init__(self, host: str) -> None:
        self._held = contextlib.ExitStack()
        self._host = host
        self._process: Child | None = None
        self._lines: queue.Queue[tuple[bool, bytes]] = queue.Queue(_MOST_LINES)
        self._ended = threading.Event()

    def address(self) -> str:
        """Reserves a port of the node for the worker; returns "host:port"."""
        (port,) = self._held.enter_context(hold_ports(1, self._host))
        return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"

    def start(self, command: Sequence[str], directory: str, environment: Mapping[str, str]) -> None:
        """Starts the command.

        Args:
          command: the program and its arguments.
          directory: where it runs.
          environment: variables to add to those of the node.

        Raises:
          UsageError: if the directory is missing here, or the command cannot be started.
        """
        if not os.path.isdir(directory):
            raise CommandError(
                f"the node {self._host} has no directory {directory}, in which the command is to run; start this tool "
                "in one that all nodes have, or by `ray job submit --working-dir=DIR`"
            )
        started: queue.Queue[CommandError | None] = queue.Queue()
        # In a thread that lives as long as the command, which gets a signal when the thread that started it ends.
        threading.Thread(target=self._run, args=(command, directory, environment, started), daemon=True).start()
        if error := started.get():
            raise CommandError(f"on the node {self._host}, {error}")

    def news(self, seconds: float = 1.0) -> News:
        """Waits for lines, or for the end of the command, and for so many seconds at most."""
        lines = []
        with contextlib.suppress(queue.Empty):
            lines.append(self._lines.get(timeout=seconds))
            while len(lines) < _MOST_LINES:
                lines.append(self._lines.get_nowait())
        over = self._ended.is_set() and self._lines.empty()
        return News(lines, self._process.poll() if over else None)

    def signal(self, number: int) -> None:
        """Sends a signal to the command."""
        if self._process is not None:
            self._process.send(number)

    def kill(self) -> None:
        """Kills the command and its child processes."""
        if self._process is not None:
            self._process.kill()

    def _run(
        self, command: Sequence[str], directory: str, environment: Mapping[str, str], started: queue.Queue
    ) -> None:
        try:
            # It is killed with its actor, without a save: all workers start again then.
            process = Child(CommandLine(command, directory), environment, output=PIPE, errors=PIPE)
        except CommandError as error:
            started.put(error)
            return
        self._process = process
        started.put(None)
        readers = [
            threading.Thread(target=self._read, args=(is_error, pipe), daemon=True)
            for is_error, pipe in ((False, process.stdout), (True, process.stderr))
        ]
        for reader in readers:
            reader.start()
        process.wait()
        for reader in readers:
            reader.join(_DRAIN)  # a grandchild may still hold a pipe
        self._ended.set()

    def _read(self, is_error: bool, pipe: BinaryIO) -> None:
        while line := pipe.readline(_LONGEST_LINE):
            self._lines.put((is_error, line.removesuffix(b"\n")))


@dataclasses.dataclass(frozen=True)
class WorkerPlace:
    """What the node of a worker has to have free, and where workers are put.

    Attributes:
      cpus: number of CPUs of each worker.
      gpus: number of GPUs of each; the worker sees no others.
      resources: further resources of each by Ray's names, such as {"TPU": 4}.
      placement: how Ray places them, one of `PLACEMENTS`: on different nodes, or on few.
      wait: seconds until all have to have a place.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    placement: str = "SPREAD"
    wait: float = 600.0

    def __post_init__(self) -> None:
        """Checks the values."""
        for name in ("cpus", "gpus", "wait"):
            if not 0 <= getattr(self, name) < math.inf:
                raise CommandError(f"--{name} is {getattr(self, name):g}; expected a number of at least 0")
        if wrong := [name for name, value in self.resources.items() if not name or not 0 < value < math.inf]:
            raise CommandError(
                f"--resource has {wrong[0]!r}; expected NAME=NUMBER with a number above 0, such as TPU=4"
            )
        if self.placement not in PLACEMENTS:
            raise CommandError(f"--placement is {self.placement!r}; expected one of {', '.join(PLACEMENTS)}")

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one worker, as Ray's placement groups have them."""
        named = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: value for name, value in named.items() if value}


def run(
    command: Sequence[str],
    workers: int,
    *,
    address: str | None = None,
    place: WorkerPlace = WorkerPlace(),
    restarts: int = 3,
    backoff: float = 1.0,
    grace: float = 30.0,
) -> int:
    """Runs a command as workers on a Ray cluster that find each other by TF_CONFIG, and waits for them.

    When a worker, its actor or its node fails, all end and are restarted together, and resume from the newest
    checkpoint. An end by exit code 75 (saved, to be run again) is not counted as a restart. A command that is used
    wrongly is not restarted.

    Args:
      command: the program and its arguments, as it is started on the nodes, in the current directory.
      workers: how many.
      address: of the cluster, such as "auto"; default the one that Ray finds, or else a new one on this machine.
        Without effect if this process is connected to one.
      place: what the node of each worker has to have.
      restarts: how often all are started again after failures in an hour.
      backoff: seconds before a restart, doubled for each that follows a start of less than a minute.
      grace: seconds that the others have to end after a failure, until they are killed.

    Returns:
      The exit code: `EXIT_DONE`, `EXIT_PREEMPTED` (ended by a signal and saved, to be run again) or `EXIT_FAILED`.

    Raises:
      UsageError: if an argument cannot be used, Ray is not installed, the cluster cannot be reached or has no place
        for the workers, or the command cannot be started.
    """
    if not command:
        raise CommandError("the command is missing; write it after --, as in: ray --workers=2 -- python train.py")
    check_options([("workers", workers, 1), ("restarts", restarts, 0)], [("grace", grace), ("backoff", backoff)])
    if not place.bundle:
        raise CommandError("--cpus and --gpus are 0; expected something that a worker needs, such as --cpus=1")
    with console.guarded(), _connected(address) as ray, Signals() as signals:
        group = ray.util.placement_group([place.bundle] * workers, strategy=place.placement)
        try:
            launched = _RayRun(ray, group, place, list(command), workers, signals, grace)
            return _with_restarts(launched, signals, restarts, backoff, grace)
        finally:
            ray.util.remove_placement_group(group)


def _with_restarts(launched: "_RayRun", signals: Signals, restarts: int, backoff: float, grace: float) -> int:
    failures, preemptions = RestartBudget(backoff), RestartBudget(backoff)
    while True:
        began = time.monotonic()
        tasks = launched.attempt()
        if tasks is None:  # a signal came before all had a place
            return EXIT_PREEMPTED
        code = exit_code(tasks, signals.came)
        if code == EXIT_DONE or signals.came:
            return code
        how, now = outcome(tasks, grace), time.monotonic()
        if code == EXIT_PREEMPTED:
            seconds = preemptions.pause(sys.maxsize, now - began, now)
            say(f"{how}; restarting in {seconds:g} s from the newest checkpoint (not counted: all was saved)")
        else:
            final = cannot_succeed(tasks, launched.lines)
            seconds = None if final else failures.pause(restarts, now - began, now)
            if seconds is None:
                say(f"error: {how}{f'; {final}' if final else ''}")
                return EXIT_FAILED
            say(how)
            say(f"restarting in {seconds:g} s from the newest checkpoint (restart {failures.used} of {restarts})")
        if signals.wait(seconds):
            return EXIT_PREEMPTED


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[ModuleType]:
    """Connects this process to a Ray cluster while the block runs, unless it is connected already."""
    try:
        import ray
        import ray.util
    except ImportError as error:
        raise PluginError(f"Ray is not installed ({error}); pip install 'looplib[ray]'") from error
    if ray.is_initialized():
        yield ray
        return
    try:
        # A cluster that starts here, for this run alone, needs no dashboard.
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"the Ray cluster {address or ''} cannot be used ({error}); check --address and `ray status`"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


@dataclasses.dataclass(eq=False)
class _RayTask(Task):
    actor: Any = None  # Ray's handle of a WorkerActor


class _RayRun:
    """The workers of one command in a placement group, started any number of times.

    Attributes:
      lines: what the workers of the newest attempt have printed.
    """

    def __init__(
        self,
        ray: ModuleType,
        group: Any,
        place: WorkerPlace,
        command: list[str],
        workers: int,
        signals: Signals,
        grace: float,
    ) -> None:
        self._ray, self._group, self._place = ray, group, place
        self._command, self._workers, self._signals, self._grace = command, workers, signals, grace
        self._directory = os.getcwd()
        self.lines = TaskLines()

    def attempt(self) -> list[_RayTask] | None:
        """Starts all workers and returns them once they have ended; None if a signal came before they started."""
        self.lines = TaskLines()
        self._forwarded, self._last_signal = 0, 0.0
        tasks = [_RayTask("worker", i) for i in range(self._workers)]
        try:
            for task in tasks:
                task.actor = self._make_actor(task.index)
            addresses = self._addresses(tasks)
            if addresses is None:
                return None
            if lost := [task for task in tasks if task.lost]:  # before there was anything for the others to do
                return lost
            self._start(tasks, addresses)
            waiting = {task.actor.news.remote(): task for task in tasks if task.code is None}
            while waiting:
                for ready in self._ray.wait(list(waiting), num_returns=1, timeout=_TICK)[0]:
                    task = waiting.pop(ready)
                    self._take(task, ready)
                    if task.code is None:
                        waiting[task.actor.news.remote()] = task
                self._look_after(tasks)
                waiting = {ref: task for ref, task in waiting.items() if not task.killed}  # a frozen one never answers
            return tasks
        finally:
            for task in tasks:
                if task.actor is not None:
                    self._ray.kill(task.actor)  # also one that is frozen; its command ends with it

    def _make_actor(self, index: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        options = {"num_cpus": self._place.cpus, "num_gpus": self._place.gpus, "resources": dict(self._place.resources)}
        kind = self._ray.remote(_NodeWorker).options(
            **options, max_restarts=0, max_concurrency=4, scheduling_strategy=place
        )
        return kind.remote()

    def _addresses(self, tasks: list[_RayTask]) -> list[str] | None:
        """Waits until all have a place; returns their addresses, or None if a signal has come."""
        asked = [task.actor.address.remote() for task in tasks]
        began, told = time.monotonic(), False
        while waiting := self._ray.wait(asked, num_returns=len(asked), timeout=_TICK)[1]:
            passed = time.monotonic() - began
            if self._signals.came:
                return None
            if passed > self._place.wait:
                raise ClusterError(f"{self._missing(len(waiting))}; add nodes, ask for less, or wait longer (--wait)")
            if passed > _PATIENCE and not told:
                told = True
                say(f"waiting up to {self._place.wait:g} s: {self._missing(len(waiting))}")
        return [self._answer(task, one) or "" for task, one in zip(tasks, asked)]

    def _missing(self, count: int) -> str:
        return (
            f"{count} of {self._workers} workers have no place yet; each needs {_amounts(self._place.bundle)}, and the "
            f"cluster has {_amounts(self._ray.cluster_resources())}"
        )

    def _start(self, tasks: list[_RayTask], addresses: list[str]) -> None:
        job = f"{os.getpid()}.{time.time():.6f}"
        asked = []
        for task in tasks:
            config = {"cluster": {"worker": addresses}, "task": {"type": task.kind, "index": task.index}}
            environment = {"TF_CONFIG": json.dumps(config), "LOOPLIB_JOB_ID": job, "PYTHONUNBUFFERED": "1"}
            asked.append(task.actor.start.remote(self._command, self._directory, environment))
        for task, one in zip(tasks, asked):
            self._answer(task, one)

    def _answer(self, task: _RayTask, asked: Any) -> Any:
        """Returns what an actor has answered; None if it has died, which is noted."""
        from ray.exceptions import RayError, RayTaskError

        try:
            return self._ray.get(asked)
        except RayTaskError as error:
            if isinstance(error.cause, UsageError):
                raise error.cause from None
            raise
        except RayError as error:
            if task.code is None:
                task.code, task.ended = -signal.SIGKILL, time.monotonic()
                task.lost = f"was lost with its actor ({_gist(error)})"
            return None

    def _take(self, task: _RayTask, asked: Any) -> None:
        news: News | None = self._answer(task, asked)
        if news is None:
            return
        for is_error, line in news.lines:
            self.lines.show(task, sys.stderr if is_error else sys.stdout, line)
        if news.code is not None:
            task.code, task.ended = news.code, time.monotonic()

    def _look_after(self, tasks: list[_RayTask]) -> None:
        now = time.monotonic()
        running = [task for task in tasks if task.code is None]
        for number in self._signals.came[self._forwarded :]:
            self._forwarded, self._last_signal = self._forwarded + 1, now
            for task in running:
                task.actor.signal.remote(int(number))
        fine = (EXIT_DONE, EXIT_PREEMPTED) if self._signals.came else (EXIT_DONE,)
        failed = [task.ended for task in tasks if task.code is not None and (task.lost or task.code not in fine)]
        is_due = self._forwarded > 1 and now > self._last_signal + _LAST_GRACE
        if is_due or (failed and now > min(failed) + self._grace):
            for task in running:
                task.killed, task.code = True, -signal.SIGKILL
                task.actor.kill.remote()


class _NodeWorker(WorkerActor):
    """A `WorkerActor` at the address by which Ray knows its node."""

    def __init__(self) -> None:
        from ray.util import get_node_ip_address

        super().__init__(get_node_ip_address())


def _gist(error: Exception) -> str:
    """Returns the last line of an error of Ray, which has the cause, shortened for a sentence."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


def _amounts(resources: Mapping[str, float]) -> str:
    """Writes resources for a message, without those that Ray itself names."""
    own = re.compile(r"node:|memory|object_store_memory|.*_group_|bundle")
    return (
        ", ".join(f"{name} {value:g}" for name, value in sorted(resources.items()) if not own.match(name)) or "nothing"
    )
