"""`python -m looplib launch`: several workers of a run on this machine. A convenience, not a cluster manager."""

import contextlib
import dataclasses
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from looplib import console
from looplib.errors import EXIT_DONE, EXIT_PREEMPTED, CommandError
from looplib.extras.tools.children import Signals, dying_with_parent
from looplib.extras.tools.tasks import Task, TaskLines, cannot_succeed, exit_code, outcome, pause, say

_TICK = 0.1
_LONGEST_LINE = 1 << 20  # bytes; a longer one is printed in parts
_SERVERS_GRACE = 5.0  # seconds that workers and parameter servers have to end once their chief has


def launch(
    command: Sequence[str],
    workers: int,
    *,
    parameter_servers: int = 0,
    restarts: int = 0,
    grace: float = 30.0,
    backoff: float = 1.0,
) -> int:
    """Runs a command as several processes that find each other by TF_CONFIG, and waits for them.

    Without parameter servers, all processes end when one has failed, and all are restarted. With them there is a
    chief too: when it ends all end, while a worker or parameter server that fails is restarted alone.

    Args:
      command: the program and its arguments.
      workers: how many.
      parameter_servers: how many; with any, there is a chief too, which coordinates.
      restarts: how often to start failed processes again.
      grace: seconds that the others have to end after a failure, until they are killed.
      backoff: seconds before the first restart, doubled with each.

    Returns:
      The exit code: `EXIT_DONE`, `EXIT_PREEMPTED` (ended by a signal and saved, to be run again) or `EXIT_FAILED`.

    Raises:
      UsageError: if the command is missing or cannot be started.
    """
    if not command:
        raise CommandError("the command is missing; write it after --, as in: launch --workers=2 -- python train.py")
    for name, value, least in (
        ("workers", workers, 1), ("parameter_servers", parameter_servers, 0), ("restarts", restarts, 0),
    ):  # fmt: skip
        if value < least:
            raise CommandError(f"--{name} is {value}; expected at least {least}")
    for name, value in (("grace", grace), ("backoff", backoff)):
        if not 0 <= value < math.inf:
            raise CommandError(f"--{name} is {value}; expected seconds of at least 0")
    kinds = [("chief", 0)] * bool(parameter_servers)
    kinds += [("worker", i) for i in range(workers)] + [("ps", i) for i in range(parameter_servers)]
    with console.guarded(), hold_ports(len(kinds)) as ports, Signals() as signals:
        spec: dict[str, list[str]] = {}
        for (kind, _), port in zip(kinds, ports):
            spec.setdefault(kind, []).append(f"127.0.0.1:{port}")
        run = _LaunchedRun(command, spec, signals, grace)
        for attempt in range(restarts + 1):
            if attempt:
                seconds = pause(backoff, attempt - 1)
                say(f"restarting in {seconds:g} s from the newest checkpoint (restart {attempt} of {restarts})")
                if signals.wait(seconds):
                    return EXIT_PREEMPTED
            tasks = run.attempt(restarts if parameter_servers else 0, backoff)
            code = exit_code(tasks[:1] if parameter_servers else tasks, signals.came)
            if code == EXIT_DONE or signals.came:
                return code
            final = cannot_succeed(tasks, run.lines) if attempt < restarts else ""
            is_last = attempt == restarts and code != EXIT_PREEMPTED
            say(f"{'error: ' if is_last or final else ''}{outcome(tasks, grace)}{f'; {final}' if final else ''}")
            if final:
                break
        return code


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


@dataclasses.dataclass(eq=False)
class _LaunchedTask(Task):
    process: subprocess.Popen | None = None
    restarts: int = 0
    due: float | None = None  # when it is started again


class _LaunchedRun:
    """The processes of one command on given addresses, started any number of times."""

    def __init__(self, command: Sequence[str], spec: dict[str, list[str]], signals: Signals, grace: float) -> None:
        self._command, self._spec, self._signals, self._grace = command, spec, signals, grace

    def attempt(self, single_restarts: int, backoff: float) -> list[_LaunchedTask]:
        """Starts all tasks and returns them once they have ended."""
        self._selector, self._unfinished = selectors.DefaultSelector(), {}
        self.lines = TaskLines()
        self._job = f"{os.getpid()}.{time.time():.6f}"
        self._forwarded, self._last_signal, self._servers_told = 0, 0.0, False
        tasks = [_LaunchedTask(kind, i) for kind, addresses in self._spec.items() for i in range(len(addresses))]
        try:
            for task in tasks:
                self._start(task)
            while any(task.code is None or task.due for task in tasks):
                self._show(_TICK)
                self._look_after(tasks, single_restarts, backoff)
        finally:
            for task in tasks:
                self._kill(task)
        end = time.monotonic() + 1  # a grandchild may still hold a pipe
        while self._selector.get_map() and time.monotonic() < end:
            self._show(_TICK)
        for key in list(self._selector.get_map().values()):
            self._close(key)
        self._selector.close()
        return tasks

    def _start(self, task: _LaunchedTask) -> None:
        config = {"cluster": self._spec, "task": {"type": task.kind, "index": task.index}}
        environment = {
            **os.environ, "TF_CONFIG": json.dumps(config), "LOOPLIB_JOB_ID": self._job, "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        try:
            task.process = subprocess.Popen(
                self._command, env=environment,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,  # so that the terminal's Ctrl-C comes through this process, once
                preexec_fn=dying_with_parent(signal.SIGTERM),  # if the launcher is killed, they save and end
            )  # fmt: skip
        except OSError as error:
            raise CommandError(
                f"{self._command[0]!r} cannot be started: {error.strerror}; write the command as you type it"
            ) from error
        task.code, task.killed, task.due = None, False, None
        for pipe, stream in ((task.process.stdout, sys.stdout), (task.process.stderr, sys.stderr)):
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, (task, stream))
            self._unfinished[pipe] = b""

    def _look_after(self, tasks: list[_LaunchedTask], single_restarts: int, backoff: float) -> None:
        now = time.monotonic()
        for task in tasks:
            if task.code is None:
                task.code = task.process.poll()
                task.ended = now
        chief = tasks[0] if tasks[0].kind == "chief" else None
        for number in self._signals.came[self._forwarded :]:
            self._forwarded, self._last_signal = self._forwarded + 1, now
            # The parameter servers have to stay while a chief saves the weights on them.
            self._send([chief] if chief and chief.code is None else tasks, number)
        if self._forwarded > 1 and now > self._last_signal + _SERVERS_GRACE:
            self._end(tasks)
        if chief is None:
            fine = (None, EXIT_DONE, EXIT_PREEMPTED) if self._signals.came else (None, EXIT_DONE)
            failed = [task.ended for task in tasks if task.code not in fine]
            if failed and now > min(failed) + self._grace:
                self._end(tasks)
        elif chief.code is not None:
            if not self._servers_told:
                self._send(tasks, signal.SIGTERM)
                self._servers_told = True
            if now > chief.ended + _SERVERS_GRACE:
                self._end(tasks)
            for task in tasks:
                task.due = None
        else:
            for task in tasks:
                self._restart_alone(task, now, single_restarts, backoff)

    def _restart_alone(self, task: _LaunchedTask, now: float, single_restarts: int, backoff: float) -> None:
        if task.due and now >= task.due:
            self._start(task)
        elif task.code and not task.due and task.restarts < single_restarts and not self._signals.came:
            seconds = pause(backoff, task.restarts)
            task.restarts += 1
            task.due = now + seconds
            say(f"{task.name} exited with code {task.code}; restarting in {seconds:g} s (restart {task.restarts} of "
                f"{single_restarts})")  # fmt: skip

    def _end(self, tasks: list[_LaunchedTask]) -> None:
        for task in tasks:
            if task.code is None:
                task.killed = True
                self._kill(task)

    def _send(self, tasks: list[_LaunchedTask], number: int) -> None:
        for task in tasks:
            if task.code is None:
                task.process.send_signal(number)

    def _kill(self, task: _LaunchedTask) -> None:
        """Kills a task and its child processes, also if it is frozen."""
        if task.process is not None and task.process.poll() is None:
            os.killpg(task.process.pid, signal.SIGKILL)
            task.process.wait()

    def _show(self, seconds: float) -> None:
        """Copies the lines that have come, each after the name of its task."""
        for key, _ in self._selector.select(seconds):
            data = os.read(key.fd, 65536)
            *lines, self._unfinished[key.fileobj] = (self._unfinished[key.fileobj] + data).split(b"\n")
            if len(self._unfinished[key.fileobj]) > _LONGEST_LINE:
                lines.append(self._unfinished[key.fileobj])
                self._unfinished[key.fileobj] = b""
            for line in lines:
                self.lines.show(*key.data, line)
            if not data:
                self._close(key)

    def _close(self, key: selectors.SelectorKey) -> None:
        rest = self._unfinished.pop(key.fileobj)
        if rest:
            self.lines.show(*key.data, rest)
        self._selector.unregister(key.fileobj)
        key.fileobj.close()
