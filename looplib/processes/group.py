"""The processes of one start of `python -m looplib launch`: started, shown, ended together. Imports no TensorFlow."""

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from looplib.errors import EXIT_DONE, EXIT_PREEMPTED
from looplib.processes import restarts
from looplib.processes.child import PIPE, Child, CommandLine, Signals
from looplib.processes.restarts import RestartBudget, Task, say

_TICK = 0.1
_LONGEST_LINE = 1 << 20  # bytes; a longer one is printed in parts
_SERVERS_GRACE = 5.0  # seconds that workers and parameter servers have to end once their chief has
_LAST_GRACE = 17.0  # seconds between SIGTERM and SIGKILL after a failure; looplib's workers end within 15 s
_LONGEST_SAVE = 600.0  # seconds that workers have to save and end, if there are to be more of them
_AT_ONCE = 1.0  # seconds between the deaths of workers of which none is the consequence of the other


def _passed_on(number: int) -> int:
    """Returns the signal that processes get for one of the launcher's: at SIGINT, Python prints where it is."""
    return signal.SIGTERM if number == signal.SIGINT else number


@contextlib.contextmanager
def hold_ports(count: int, host: str = "127.0.0.1") -> Iterator[list[int]]:
    """Reserves free ports of an address of this machine: no other process gets one by chance while the block runs.

    They are bound but not listened on, so servers that set SO_REUSEADDR can use them, and TensorFlow's do.
    """
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            holder = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((host, 0))
            ports.append(holder.getsockname()[1])
        yield ports


@dataclasses.dataclass(frozen=True)
class LaunchRules:
    """How the processes of a launch are ended and restarted.

    Attributes:
      grace: seconds that the others have to end by themselves after a failure; then they get SIGTERM, and SIGKILL a
        little later.
      backoff: seconds before a restart.
      single_restarts: how often a worker or a parameter server with a chief is restarted alone in an hour.
    """

    grace: float
    backoff: float
    single_restarts: int = 0


@dataclasses.dataclass(eq=False)
class _LaunchedTask(Task):
    budget: RestartBudget = dataclasses.field(kw_only=True)
    process: Child | None = None
    began: float = 0.0
    told: bool = False  # to end, by SIGTERM of the launcher
    froze: bool = False  # it did not end at SIGTERM
    due: float | None = None  # when it is started again

    @property
    def died(self) -> bool:
        """Whether a signal has ended it that is not the launcher's; shells add 128 to the number."""
        return (
            (self.code < 0 or self.code > 128) and not self.killed and not (self.told and self.code == -signal.SIGTERM)
        )


class LaunchedStart:
    """One start of all processes of a launch.

    Args:
      command: what to start.
      spec: dict from the kind of process, such as "worker", to the addresses of its processes.
      environment: variables to add.
      rules: how they are ended and restarted.
      signals: those that the launcher gets, which are passed on.
      grows_at: when the workers are told to save and end, to make room for a start of more; by `time.monotonic`.
      look: called every tenth of a second.
      may_grow: returns whether the workers have steps to save.
      held: descriptors that the processes inherit.
    """

    def __init__(
        self,
        command: CommandLine,
        spec: Mapping[str, Sequence[str]],
        environment: Mapping[str, str],
        rules: LaunchRules,
        signals: Signals,
        *,
        grows_at: float | None = None,
        look: Callable[[], None] = lambda: None,
        may_grow: Callable[[], bool] = lambda: True,
        held: Sequence[int] = (),
    ) -> None:
        self._command, self._spec, self._environment = command, spec, environment
        self._rules, self._signals, self._held = rules, signals, held
        self._grows_at, self._look, self._may_grow = grows_at, look, may_grow
        self._selector = selectors.DefaultSelector()
        self._unfinished: dict[object, bytes] = {}  # lines, by pipe
        self._lines = restarts.TaskLines()
        self._job = f"{os.getpid()}.{time.time():.6f}"
        self._forwarded, self._last_signal, self._servers_told = 0, 0.0, False
        self._told_at: float | None = None
        self._tasks = [
            _LaunchedTask(kind, i, budget=RestartBudget(rules.backoff))
            for kind, addresses in spec.items() for i in range(len(addresses))
        ]  # fmt: skip

    def run(self) -> None:
        """Starts all processes, and returns once they have ended.

        Raises:
          UsageError: if the command cannot be started.
        """
        try:
            for task in self._tasks:
                self._start(task)
            while any(task.code is None or task.due for task in self._tasks):
                self._show(_TICK)
                self._look_after()
                self._look()
        finally:
            for process in filter(None, (task.process for task in self._tasks)):
                process.kill()
        end = time.monotonic() + 1  # a grandchild may still hold a pipe
        while self._selector.get_map() and time.monotonic() < end:
            self._show(_TICK)
        for key in list(self._selector.get_map().values()):
            self._close(key)
        self._selector.close()

    @property
    def told_to_grow(self) -> bool:
        """Whether the workers were told to save and end, to make room for a start of more."""
        return self._told_at is not None

    @property
    def code(self) -> int:
        """The exit code of the launch, if this is its last start."""
        deciding = self._tasks[:1] if self._tasks[0].kind == "chief" else self._tasks
        return restarts.exit_code(
            deciding, [*map(_passed_on, self._signals.came), *[signal.SIGTERM] * self.told_to_grow]
        )

    @property
    def is_final(self) -> str:
        """Why another start would fail too, as a sentence; "" if it may succeed."""
        return restarts.cannot_succeed(self._tasks, self._lines)

    @property
    def lost(self) -> int:
        """How many workers have died, and did not end because of another failure."""
        return len(self._lost())

    @property
    def outcome(self) -> str:
        """How processes ended; they end almost together, so their own lines have to say which one failed first."""
        return restarts.outcome(self._tasks, self._rules.grace)

    @property
    def cause(self) -> str:
        """How the workers ended that have died, or, if none has, those that have failed."""
        return restarts.outcome(self._lost() or self._tasks, self._rules.grace).partition(";")[0]

    def _lost(self) -> list[_LaunchedTask]:
        failed = [task for task in self._tasks if task.code != EXIT_DONE]
        first = min((task.ended for task in failed), default=0.0)
        died = [task for task in failed if task.died and task.ended <= first + _AT_ONCE]
        frozen = [task for task in failed if task.froze]
        # Where most hang, it is because of another failure.
        return died or (frozen if 2 * len(frozen) <= len(failed) else [])

    def _start(self, task: _LaunchedTask) -> None:
        config = {"cluster": self._spec, "task": {"type": task.kind, "index": task.index}}
        variables = {"TF_CONFIG": json.dumps(config), "LOOPLIB_JOB_ID": self._job, "PYTHONUNBUFFERED": "1"}
        task.process = Child(
            self._command, {**self._environment, **variables},
            output=PIPE, errors=PIPE, held=self._held,
            ends_by=signal.SIGTERM,  # if the launcher is killed, they save and end
        )  # fmt: skip
        task.code, task.killed, task.due, task.began = None, False, None, time.monotonic()
        for pipe, stream in ((task.process.stdout, sys.stdout), (task.process.stderr, sys.stderr)):
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, (task, stream))
            self._unfinished[pipe] = b""

    def _look_after(self) -> None:
        now = time.monotonic()
        for task in self._tasks:
            if task.code is None:
                task.code = task.process.poll()
                task.ended = now
                task.killed |= task.told and task.code == -signal.SIGTERM and not self.told_to_grow
        chief = self._tasks[0] if self._tasks[0].kind == "chief" else None
        for number in self._signals.came[self._forwarded :]:
            self._forwarded, self._last_signal = self._forwarded + 1, now
            if self.told_to_grow and self._forwarded == 1:
                continue  # they save already, and a second signal would end them at once
            # The parameter servers have to stay while a chief saves the weights on them.
            self._send([chief] if chief and chief.code is None else self._tasks, _passed_on(number))
        if self._forwarded > 1 and now > self._last_signal + _SERVERS_GRACE:
            self._end()
        if chief is None:
            self._end_together(now)
        elif chief.code is not None:
            if not self._servers_told:
                self._send(self._tasks, signal.SIGTERM)
                self._servers_told = True
            if now > chief.ended + _SERVERS_GRACE:
                self._end()
            for task in self._tasks:
                task.due = None
        else:
            for task in self._tasks:
                self._restart_alone(task, now)

    def _end_together(self, now: float) -> None:
        """Ends workers of which one has failed, or of which there are to be more."""
        ending = self._signals.came or self.told_to_grow
        fine = (None, EXIT_DONE, EXIT_PREEMPTED) if ending else (None, EXIT_DONE)
        failed = [task.ended for task in self._tasks if task.code not in fine]
        if failed and now > min(failed) + self._rules.grace + _LAST_GRACE:
            for task in self._tasks:
                task.froze |= task.code is None
            self._end()
        elif failed and not ending:
            self._end_stopped()
            if now > min(failed) + self._rules.grace:
                self._tell()
        elif self._told_at is not None and now > self._told_at + _LONGEST_SAVE:
            self._end()
        elif not ending and self._grows_at is not None and now > self._grows_at:
            if all(task.code is None for task in self._tasks) and self._may_grow():
                say("there is room for more workers: these save and end first")
                self._told_at = now
                self._tell()

    def _end_stopped(self) -> None:
        """Kills workers that were stopped, by SIGSTOP: no signal reaches them, and only they have not ended."""
        running = [task for task in self._tasks if task.code is None]
        if all(task.process.is_stopped for task in running):
            for task in running:
                task.froze, task.lost = True, "was stopped and had to be killed"
            self._end()

    def _restart_alone(self, task: _LaunchedTask, now: float) -> None:
        if task.due and now >= task.due:
            self._start(task)
        elif task.code and not task.due and not self._signals.came:
            most = self._rules.single_restarts
            pause = task.budget.pause(most, task.ended - task.began, now)
            if pause is not None:
                task.due = now + pause
                say(f"{task.name} exited with code {task.code}; restarting in {pause:g} s (restart {task.budget.used} "
                    f"of {most})")  # fmt: skip

    def _tell(self) -> None:
        """Asks tasks to end, once."""
        asked = [task for task in self._tasks if task.code is None and not task.told]
        for task in asked:
            task.told = True
        self._send(asked, signal.SIGTERM)

    def _end(self) -> None:
        for task in self._tasks:
            if task.code is None:
                task.killed = True
                task.process.kill()

    def _send(self, tasks: Sequence[_LaunchedTask], number: int) -> None:
        for task in tasks:
            if task.code is None:
                task.process.send(number)

    def _show(self, seconds: float) -> None:
        """Copies the lines that have come, each after the name of its task."""
        for key, _ in self._selector.select(seconds):
            data = os.read(key.fd, 65536)
            *lines, self._unfinished[key.fileobj] = (self._unfinished[key.fileobj] + data).split(b"\n")
            if len(self._unfinished[key.fileobj]) > _LONGEST_LINE:
                lines.append(self._unfinished[key.fileobj])
                self._unfinished[key.fileobj] = b""
            for line in lines:
                self._lines.show(*key.data, line)
            if not data:
                self._close(key)

    def _close(self, key: selectors.SelectorKey) -> None:
        rest = self._unfinished.pop(key.fileobj)
        if rest:
            self._lines.show(*key.data, rest)
        self._selector.unregister(key.fileobj)
        key.fileobj.close()
