"""Child processes of a tool, which end with it, and the signals that it passes on to them."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import BinaryIO, NoReturn

from looplib.base import folders
from looplib.errors import CommandError

_TICK = 0.1
# A closed terminal sends two, and a cluster manager and a job script one each, which is no second request.
_REPEATED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_temporary: list[str] = []
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def dying_with_parent(number: int) -> Callable[[], None] | None:
    """Returns a `preexec_fn` with which a child gets a signal when the thread that started it ends, however it ends.

    Args:
      number: the signal.
    """
    if _LIBC is None:
        return None
    parent = os.getpid()

    def ask() -> None:
        _LIBC.prctl(1, int(number))  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it has ended already
            os.kill(os.getpid(), number)

    return ask


def start(command: Sequence[str], output: BinaryIO, environment: Mapping[str, str] | None = None) -> subprocess.Popen:
    """Starts a command as a process group of its own, which is killed if this process is.

    Args:
      command: the program and its arguments.
      output: open file for what it prints.
      environment: variables to add.

    Raises:
      UsageError: if it cannot be started.
    """
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # to signal it with its children, and to keep the terminal's Ctrl-C from it
            env={**os.environ, **(environment or {})},
            preexec_fn=dying_with_parent(signal.SIGKILL),
        )
    except OSError as error:
        raise CommandError(
            f"{command[0]!r} cannot be started: {error.strerror}; write the command as you type it"
        ) from error


def poll(process: subprocess.Popen) -> int | None:
    """Returns how a process ended; None while it runs.

    The processes that one which failed has left are killed: they would hold its output, and write while it is started
    again.

    Args:
      process: of `start`.
    """
    if process.returncode is None:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None and ended.si_status:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)  # its number is not free before it was waited for
    return process.poll()


def is_stopped(pid: int) -> bool:
    """Returns whether a process was stopped, by SIGSTOP or a terminal; False where the system does not say."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Ends the `with` block at a signal by an exception, as at SIGINT, and removes its temporary folders.

    The signals are SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2.

    The exit code is as in a shell: 128 plus the number of the signal.
    """

    def end(number: int, _: object) -> NoReturn:
        for one in heard:  # a second signal does not interrupt what removes the folders
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    heard = [one for one in (signal.SIGTERM, *_REPEATED) if signal.getsignal(one) == signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():  # only there can signals be handled
        heard = []
    for one in heard:
        signal.signal(one, end)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        for folder in _temporary:
            with contextlib.suppress(OSError):
                folders.remove(*os.path.split(folder))
        raise
    finally:
        _temporary.clear()
        for one in heard:
            signal.signal(one, signal.SIG_DFL)


def temporary_folder(prefix: str) -> str:
    """Makes a temporary folder, which stays unless a signal ends `ended_by_signals`; returns its path."""
    _temporary.append(tempfile.mkdtemp(prefix=prefix))
    return _temporary[-1]


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
