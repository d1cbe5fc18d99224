"""Child processes: started, signalled, waited for and ended; their temporary folder; the signals that a tool gets."""

import contextlib
import ctypes
import dataclasses
import fcntl
import math
import os
import shlex
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, NoReturn

from looplib.base import files, folders
from looplib.base.messages import gist
from looplib.base.numbers import format_seconds
from looplib.errors import CommandError

PIPE, NOTHING = subprocess.PIPE, subprocess.DEVNULL
_TICK = 0.05
_GRACE = 30.0  # seconds that a process has to save and end
_LAST_BYTES = 8192  # of a log
_NEWS_SECONDS = 10.0  # between two lines about the progress of a process
_PREFIX, _LOCK, _FILES = "looplib-temporary-", "looplib.lock", "tmp"
# A closed terminal sends two, and a cluster manager and a job script one each, which is no second request.
_REPEATED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """A program and its arguments.

    Attributes:
      arguments: the program and what follows it.
      directory: where it runs, if somebody else has said so, such as the report of a run; "" for the current one.
    """

    arguments: Sequence[str]
    directory: str = ""

    def __str__(self) -> str:
        return shlex.join(self.arguments) + f" (in {self.directory})" * bool(self.directory)

    def without(self, *names: str) -> "CommandLine":
        """Returns the command without some flags, see `without`."""
        return CommandLine(without(self.arguments, *names), self.directory)

    def adding(self, *arguments: str) -> "CommandLine":
        """Returns the command with more arguments."""
        return CommandLine([*self.arguments, *arguments], self.directory)


def without(arguments: Sequence[str], *names: str) -> list[str]:
    """Returns the arguments without some flags, whose values follow a "=" or are the next argument."""
    kept, skip = [], False
    for argument in arguments:
        name, equals, _ = argument.lstrip("-").partition("=")
        drops = argument.startswith("-") and name in names
        if not (skip or drops):
            kept.append(argument)
        skip = drops and not equals
    return kept


class Child:
    """A process that this one has started, in a process group of its own.

    When a `with` block of it ends, so does the process.

    Args:
      command: what to start.
      environment: variables to add to those of this process.
      stdin: what it reads; default nothing.
      output: an open file for what it prints, or `PIPE`; default what this process has.
      errors: the same for standard error; default `output`.
      ends_by: the signal that it gets when a `with` block ends, or the thread that started it, however these end. None
        lets it outlive that thread, and should be given in a process with many threads, as TensorFlow's are.
      terminal: whether it has the terminal, and so the group of this process, for a debugger.
      nice: how much lower its priority is.
      held: descriptors that it inherits.

    Attributes:
      pid: its number.
      stdout: the pipe that was asked for, or None.
      stderr: the same for standard error.

    Raises:
      UsageError: if it cannot be started.
    """

    def __init__(
        self,
        command: CommandLine,
        environment: Mapping[str, str] | None = None,
        *,
        stdin: IO[bytes] | int = NOTHING,
        output: IO[bytes] | int | None = None,
        errors: IO[bytes] | int | None = None,
        ends_by: signal.Signals | None = signal.SIGKILL,
        terminal: bool = False,
        nice: int = 0,
        held: Sequence[int] = (),
    ) -> None:
        self._ends_by, self._own_group = ends_by, not terminal
        try:
            self._process = subprocess.Popen(
                command.arguments,
                cwd=command.directory or None,
                env={**os.environ, **(environment or {})},
                stdin=None if terminal else stdin,
                stdout=output,
                stderr=output if errors is None and output != PIPE else errors,
                # To signal it with its children, and so that the terminal's Ctrl-C comes through this process, once.
                start_new_session=self._own_group,
                preexec_fn=None if ends_by is None else _dying_with_parent(ends_by),
                pass_fds=held,
            )
        except (OSError, ValueError) as error:  # of a name with NUL
            where, cure = "", "write the command as you type it"
            if command.directory:
                where, cure = f" in {command.directory}", "check the program and that directory"
            reason = error.strerror if isinstance(error, OSError) and error.strerror else gist(error)
            raise CommandError(f"{command.arguments[0]!r} cannot be started{where}: {reason}; {cure}") from error
        if nice:
            with contextlib.suppress(OSError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, self._process.pid, nice)
        self.pid, self.stdout, self.stderr = self._process.pid, self._process.stdout, self._process.stderr
        self._watcher = _watcher(self.pid, ends_by) if ends_by is not None and _LIBC is None else None

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        if self._ends_by == signal.SIGTERM:
            self.stop()
        self.kill()
        for pipe in filter(None, (self.stdout, self.stderr)):
            pipe.close()

    def poll(self) -> int | None:
        """Returns how it ended, less than 0 for a signal; None while it runs.

        The processes that one which failed has left are killed: they would hold its output, and write while it is
        started again.
        """
        if self._process.returncode is None and self._own_group and self._has_failed():
            self._signal_group(signal.SIGKILL)
        code, watcher = self._process.poll(), self._watcher
        if code is not None and watcher is not None:
            self._watcher = None
            watcher.communicate(b"\n")
        return code

    def _has_failed(self) -> bool:
        """Returns whether it has ended and failed; its number is then not free before it was waited for."""
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return ended is not None and ended.si_status != 0
        except ChildProcessError:  # another thread has waited for it
            return False
        except AttributeError:  # macOS before Python 3.13: its number may be free, but rarely is another group's
            return bool(self._process.poll())

    def wait(self, seconds: float = math.inf, tick: Callable[[], None] = lambda: None) -> int | None:
        """Waits for its end; returns what `poll` does.

        Args:
          seconds: for how long.
          tick: called again and again meanwhile.
        """
        end, pause = time.monotonic() + seconds, 0.001
        while (code := self.poll()) is None and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, _TICK)
            tick()
        return code

    def send(self, number: int) -> None:
        """Sends it a signal, unless it has ended."""
        self._process.send_signal(number)

    def stop(self, grace: float = _GRACE) -> None:
        """Asks it to save and end, and kills it with its children if that takes long."""
        if self.poll() is None:
            self.send(signal.SIGTERM)
            try:
                self.wait(grace)
            finally:  # another signal interrupts the wait
                self.kill()

    def kill(self) -> None:
        """Kills it and its children, also if they are stopped."""
        if self.poll() is None:
            self._signal_group(signal.SIGKILL)
            self._process.wait()

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(OSError):
            (os.killpg if self._own_group else os.kill)(self.pid, number)

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped, by SIGSTOP or a terminal."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] == "T"
        except (OSError, IndexError):  # no Linux, or it has ended
            with contextlib.suppress(OSError):
                told = subprocess.run(["ps", "-o", "state=", "-p", str(self.pid)], capture_output=True)
                return told.stdout.strip().startswith(b"T")
            return False


def _dying_with_parent(number: int) -> Callable[[], None] | None:
    """Returns a `preexec_fn` with which a child gets a signal when the thread that started it ends, however it ends."""
    if _LIBC is None:
        return None
    parent = os.getpid()

    def ask() -> None:
        _LIBC.prctl(1, int(number))  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it has ended already
            os.kill(os.getpid(), number)

    return ask


def _watcher(pid: int, number: int) -> subprocess.Popen[bytes]:
    """Starts what sends a child a signal when this process ends, where the system cannot; a line of input ends it.

    It waits for its input, a pipe that the system closes with this process, however that ends.
    """
    return subprocess.Popen(
        ["/bin/sh", "-c", 'read -r line || kill -"$1" "$2"', "sh", str(int(number)), str(pid)],
        stdin=PIPE,
        stdout=NOTHING,
        stderr=NOTHING,
        start_new_session=True,
    )


@dataclasses.dataclass(frozen=True)
class Finished:
    """How a command has ended.

    Attributes:
      code: how it ended, as `Child.poll` has it; None if it was killed because it took too long.
      output: what it has printed, up to a limit.
      error: the last line on standard error.
    """

    code: int | None
    output: bytes
    error: str


def output_of(
    command: CommandLine, environment: Mapping[str, str], seconds: float, most: int, stdin: IO[bytes] | int = NOTHING
) -> Finished:
    """Runs a command, with limits; one that prints more is killed, and counts as ended well.

    Args:
      command: what to start.
      environment: variables to add.
      seconds: that it may take.
      most: bytes of its output.
      stdin: see `Child`.

    Raises:
      UsageError: if it cannot be started.
    """
    with (
        tempfile.TemporaryFile() as errors,
        Child(command, environment, stdin=stdin, output=PIPE, errors=errors, ends_by=None) as child,
    ):
        killed = threading.Event()
        timer = threading.Timer(seconds, lambda: (killed.set(), child.kill()))
        timer.start()
        try:
            output = child.stdout.read(most)
            if len(output) == most:
                child.kill()
            code = child.wait()
        finally:
            timer.cancel()
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - _LAST_BYTES))
        lines = errors.read().decode(errors="replace").strip().splitlines() or [""]
        return Finished(None if killed.is_set() else 0 if len(output) == most else code, output, lines[-1])


def last_lines(path: str, most: int = 20) -> list[str]:
    """Returns the last lines of the log of a process; [] if they cannot be read."""
    try:
        with files.open_regular(path) as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _LAST_BYTES))
            return log.read(_LAST_BYTES).decode(errors="replace").splitlines()[-most:]
    except (OSError, files.NotRegularError):
        return []


def news_of(look: Callable[[], str], say: Callable[[str], None]) -> Callable[[], None]:
    """Returns a `tick` for `Child.wait` that says from time to time what a process is doing, and for how long.

    Args:
      look: returns what it is doing.
      say: prints a line.
    """
    started = said = time.monotonic()

    def tick() -> None:
        nonlocal said
        if (now := time.monotonic()) > said + _NEWS_SECONDS:
            said = now
            say(f"  {look()} ({format_seconds(now - started)})")

    return tick


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Ends the `with` block at SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 by an exception, as at SIGINT.

    The exit code is as in a shell: 128 plus the number of the signal.
    """

    def end(number: int, _: object) -> NoReturn:
        for one in heard:  # a second signal does not interrupt what ends processes and removes folders
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    heard = [one for one in (signal.SIGTERM, *_REPEATED) if signal.getsignal(one) == signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():  # only there can signals be handled
        heard = []
    for one in heard:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one in heard:
            signal.signal(one, signal.SIG_DFL)


class Signals:
    """Notes SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 while the `with` block runs.

    Attributes:
      came: their numbers, in order.
    """

    def __enter__(self) -> "Signals":
        self.came: list[int] = []
        heard = [signal.SIGTERM, signal.SIGINT]
        heard += [one for one in _REPEATED if signal.getsignal(one) != signal.SIG_IGN]  # as nohup has it
        self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def _note(self, number: int, _: object) -> None:
        if number not in _REPEATED or not self.came:
            self.came.append(number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> bool:
        """Waits some seconds, or until a signal comes; returns whether one has."""
        end = time.monotonic() + seconds
        while not self.came and time.monotonic() < end:
            time.sleep(min(_TICK, max(0.0, end - time.monotonic())))
        return bool(self.came)


class TemporaryFolder:
    """A temporary folder, made and removed by a `with` block, which also removes those of processes that were killed.

    A process holds a lock on a file in its folder, and so does each of its children that inherits `lock`: a folder is
    left over once all of them have ended.

    Attributes:
      path: the folder.
      files: a folder in it, for the temporary files of the children. What they leave when they are killed, such as the
        files of AutoGraph, is removed with it.
      lock: the descriptor of the lock.
    """

    def __enter__(self) -> "TemporaryFolder":
        _remove_left_over(tempfile.gettempdir())
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        self._fill()
        return self

    def restore(self) -> None:
        """Makes again what somebody has removed, such as a cleaner of temporary files; `OSError` if that fails."""
        if not files.is_at(self.lock, os.path.join(self.path, _LOCK)) or not os.path.isdir(self.files):
            before = self.lock
            folders.remove(*os.path.split(self.path))
            self._fill()
            os.close(before)

    def _fill(self) -> None:
        self.files = folders.make_folder(self.path, _FILES)
        path = os.path.join(self.path, _LOCK)
        self.lock = os.open(f"{path}.new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        folders.move(self.path, f"{_LOCK}.new", self.path, _LOCK)  # nobody finds the file before it is locked

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            _remove(self.path)
        os.close(self.lock)


def _remove(path: str) -> None:
    """Removes a temporary folder with its lock last: a process that is killed here leaves it to the next one."""
    for name in os.listdir(path):
        if name != _LOCK:
            folders.remove(path, name)
    folders.remove(*os.path.split(path))


def _remove_left_over(top: str) -> None:
    """Removes the temporary folders of this user's processes that have ended without removing them."""
    names: list[str] = []
    with contextlib.suppress(OSError):  # it may be writable only
        names = [name for name in os.listdir(top) if name.startswith(_PREFIX)]
    for name in names:
        with contextlib.suppress(OSError):  # locked, without a lock, or removed meanwhile
            found = os.lstat(os.path.join(top, name))
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            lock = os.open(os.path.join(top, name, _LOCK), os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(os.path.join(top, name))
            finally:
                os.close(lock)
