"""`python -m looplib launch`: several workers of a run on this machine. A convenience, not a cluster manager."""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Sequence

from looplib.base import console, orders
from looplib.errors import EXIT_DONE, EXIT_PREEMPTED, CommandError
from looplib.processes.child import Child, CommandLine, Signals, TemporaryFolder
from looplib.processes.group import LaunchedStart, LaunchRules, hold_ports
from looplib.processes.restarts import RestartBudget, WorkerNumbers, check_options, say

_ELASTIC_RESTARTS = 10  # in an hour, of a launch whose number of workers may change


def launch(
    command: Sequence[str],
    workers: int = 1,
    *,
    data_workers: int = 0,
    min_workers: int | None = None,
    parameter_servers: int = 0,
    restarts: int | None = None,
    grace: float = 10.0,
    backoff: float = 1.0,
    grow_after: float = 60.0,
) -> int:
    """Runs a command as several processes that find each other by TF_CONFIG, and waits for them.

    Without parameter servers, all processes end when one has failed, and all are restarted: with fewer workers if some
    have died and `min_workers` allows it, and with all of them again after `grow_after`. With parameter servers there
    is a chief too: when it ends all end, while a worker or parameter server that fails is restarted alone.

    Args:
      command: the program and its arguments.
      workers: how many.
      data_workers: how many make the batches of the training; the command gets their addresses as --data_service.
      min_workers: how few there may be; default `workers`.
      parameter_servers: how many; with any, there is a chief too, which coordinates.
      restarts: how often to start failed processes again in an hour; default 0, or 10 after the death of a worker if
        there may be fewer.
      grace: seconds that the others have to end by themselves after a failure; then they get SIGTERM, and SIGKILL 17
        seconds later.
      backoff: seconds before a restart, doubled for each that follows a start of less than a minute.
      grow_after: seconds after the death of a worker until another one is tried in its place, doubled by each further
        death within an hour.

    Returns:
      The exit code: `EXIT_DONE`, `EXIT_PREEMPTED` (ended by a signal and saved, to be run again) or `EXIT_FAILED`.

    Raises:
      UsageError: if the command is missing or cannot be started, or no number of workers can share the global batch.
    """
    least = workers if min_workers is None else min_workers
    if not command:
        raise CommandError("the command is missing; write it after --, as in: launch --workers=2 -- python train.py")
    check_options(
        [("workers", workers, 1), ("min_workers", least, 1), ("parameter_servers", parameter_servers, 0),
         ("data_workers", data_workers, 0), ("restarts", restarts or 0, 0)],
        [("grace", grace), ("backoff", backoff), ("grow_after", grow_after)],
    )  # fmt: skip
    if least > workers:
        raise CommandError(f"--min_workers is {least}; expected at most {workers}, which --workers is")
    if parameter_servers and least < workers:
        raise CommandError(
            "--min_workers is for workers that train in step; with --parameter_servers, leave it out and use "
            "--restarts: a worker that fails is restarted alone"
        )
    if parameter_servers and data_workers:
        raise CommandError("--data_workers is for workers that train in step; with --parameter_servers, leave it out")
    rules = LaunchRules(grace, backoff, restarts or 0)
    numbers = WorkerNumbers(least, workers, grow_after)
    with console.guarded(), Signals() as signals, TemporaryFolder() as folder, hold_ports(data_workers) as ports:
        line = CommandLine(command)
        return _Launch(line, parameter_servers, ports, restarts, rules, numbers, signals, folder).run()


@dataclasses.dataclass
class _Launch:
    """A launch, from its first start to its end."""

    command: CommandLine
    parameter_servers: int
    data_ports: Sequence[int]  # of the data workers
    restarts: int | None
    rules: LaunchRules
    numbers: WorkerNumbers
    signals: Signals
    folder: TemporaryFolder
    order: str = ""  # the file of the newest start's, in that folder

    def run(self) -> int:
        """Starts the processes until they are done, and returns the exit code.

        Raises:
          UsageError: if the command cannot be started, or no number of workers can share the global batch.
        """
        budget, why = RestartBudget(self.rules.backoff), ""
        while True:
            began = time.monotonic()
            count = self._choose(began)
            start = self._start(count, why)
            now = time.monotonic()
            if start.code == EXIT_DONE or self.signals.came:
                return start.code
            if count not in self.numbers.possible:  # it has not begun to train
                say(f"starting {self._named(self._choose(now))}")
                continue
            lost = start.lost if self._is_elastic else 0
            if lost:
                self.numbers.lose(lost, now)
            if start.told_to_grow and start.code == EXIT_PREEMPTED:
                why = f"after a start of {count}"
                continue
            by_default = _ELASTIC_RESTARTS if lost or start.told_to_grow else 0
            most = by_default if self.restarts is None else self.restarts
            final = start.is_final if most and not lost else ""
            pause = None if final else budget.pause(most, now - began, now)
            if pause is None:
                sentence = "; ".join(filter(None, [start.outcome, final]))
                say(f"{'' if start.code == EXIT_PREEMPTED else 'error: '}{sentence}")
                return start.code
            say(start.outcome)
            again = f"{self._named(self._choose(now + pause))} " if self._is_elastic else ""
            say(f"restarting {again}in {pause:g} s from the newest checkpoint (restart {budget.used} of {most})")
            why = f"because {start.cause}"
            if self.signals.wait(pause):
                return EXIT_PREEMPTED

    def _start(self, count: int, why: str) -> LaunchedStart:
        """Starts some workers, and returns the start once they have ended."""
        servers = self.parameter_servers
        kinds = ["chief"] * bool(servers) + ["worker"] * count + ["ps"] * servers
        self.folder.restore()
        self.order = os.path.join(self.folder.path, f"order-{time.monotonic_ns()}.json")
        note = " ".join(filter(None, [self._named(count), why]))
        order = dataclasses.replace(orders.current(), note=note, tells_batch=self._is_elastic)
        environment = {"TMPDIR": self.folder.files, **order.give(self.order)}
        # Others for each start: a worker that hangs may still have its own.
        with hold_ports(len(kinds)) as ports, self._serving() as command:
            spec: dict[str, list[str]] = {}
            for kind, port in zip(kinds, ports):
                spec.setdefault(kind, []).append(f"127.0.0.1:{port}")
            start = LaunchedStart(
                command, spec, environment, self.rules, self.signals,
                grows_at=self.numbers.grows_at(count), look=self._read_batch,
                may_grow=self._may_grow, held=(self.folder.lock,),
            )  # fmt: skip
            start.run()
        self._read_batch()
        return start

    @contextlib.contextmanager
    def _serving(self) -> Iterator[CommandLine]:
        """Runs data workers while the `with` block of a start runs, and gives the command that reads from them."""
        with contextlib.ExitStack() as stack:
            for port in self.data_ports:
                serve = [sys.executable, "-m", "looplib", "data_worker", f"--port={port}", "--host=127.0.0.1"]
                line, variables = CommandLine(serve), {"TMPDIR": self.folder.files}
                stack.enter_context(Child(line, variables, held=(self.folder.lock,)))
            addresses = ",".join(f"127.0.0.1:{port}" for port in self.data_ports)
            yield self.command.adding(f"--data_service={addresses}") if addresses else self.command

    def _choose(self, now: float) -> int:
        count = self.numbers.choose(now)
        if count is None:
            size = self.numbers.global_batch_size
            raise CommandError(
                f"a global batch of {size:,} examples cannot be divided among {self.numbers.least} to "
                f"{self.numbers.most} workers; change --global_batch_size, --workers or --min_workers"
            )
        return count

    def _read_batch(self) -> None:
        """Reads the size of the global batch, once it is there, and says which numbers of workers can share it."""
        numbers = self.numbers
        if not self._is_elastic or numbers.global_batch_size is not None:
            return
        numbers.global_batch_size = orders.batch(self.order)
        if 0 < len(numbers.possible) <= numbers.most - numbers.least:
            possible = " or ".join(map(str, numbers.possible))
            say(
                f"a global batch of {numbers.global_batch_size:,} examples can be divided among {possible} workers "
                f"(of {numbers.least} to {numbers.most})"
            )

    def _may_grow(self) -> bool:
        """Returns whether a program has steps to save; True also for one that has told nothing about itself."""
        return orders.has_reported(self.order) or orders.batch(self.order) is None

    @property
    def _is_elastic(self) -> bool:
        return self.numbers.least < self.numbers.most

    def _named(self, count: int) -> str:
        most = self.numbers.most
        return f"{count} of {most} workers" if count < most else f"{count} worker{'s' if count > 1 else ''}"
