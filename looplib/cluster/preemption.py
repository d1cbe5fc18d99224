"""Preemption: a signal, a time limit or a notice ends a run after its current step, with a save, and exit code 75.

The signals are SIGTERM, SIGINT, SIGHUP and SIGXCPU, and SIGUSR1 and SIGUSR2, which cluster managers can send before the
time of a job is over, where the program has no handler of its own for them. While a `tf.function` runs, Python's signal
handlers wait. A thread therefore reads the signals from a pipe (`signal.set_wakeup_fd`) and sets a variable that the
loops on the device read between steps.
"""

import contextlib
import ctypes
import dataclasses
import gc
import math
import os
import select
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from looplib.base import console
from looplib.cluster import peers
from looplib.compat import tensorflow as _tf
from looplib.errors import EXIT_PREEMPTED, Preempted

_USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # a program, or a library in C, may have a use of its own for them
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU, *_USER_SIGNALS)
# These come again by themselves (a closed terminal sends two, the limit of CPU time one each second, a cluster manager
# and a job script one each), so a later one means nothing new. A program may be started to ignore them, as by nohup.
_REPEATED = (signal.SIGHUP, signal.SIGXCPU, *_USER_SIGNALS)
GRACE_SECONDS = 15.0
_LIBC = ctypes.CDLL(None)
_TICK = 0.2  # seconds between checks whether a step has ended
# Packages with a frame on the stack of a thread in a debugger, or in a console, which a step may open.
_DEBUGGERS = {"bdb", "pdb", "pydevd", "_pydevd_bundle", "debugpy"}
_CONSOLES = {"code", "IPython"}
_AROUND_STEPS = "looplib.controller"


class RunningTime:
    """Seconds that this process ran, without the time it or its machine was suspended (SIGSTOP, Ctrl-Z).

    Args:
      interval: the planned seconds between two calls. More than twice as many were a suspension.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._seen = time.monotonic(), 0.0  # the last look, and the seconds suspended by then; replaced as one

    def since_last(self) -> float:
        """Returns the seconds since the last call, or since this was made."""
        (before, suspended), now = self._seen, time.monotonic()
        ran = min(now - before, 2 * self._interval)
        self._seen = now, suspended + now - before - ran
        return ran

    @property
    def suspended(self) -> float:
        """The seconds that the process was suspended so far; may be read by another thread."""
        looked, suspended = self._seen
        return suspended + max(0.0, time.monotonic() - looked - 2 * self._interval)


def innermost_frames() -> dict[int, Any]:
    """Returns each thread's innermost frame. Garbage collected meanwhile may wait forever (CPython issue 106883)."""
    collects = gc.isenabled()
    gc.disable()
    frames = sys._current_frames()
    if collects:
        gc.enable()
    return frames


def debugger_holds_a_thread() -> bool:
    """Returns whether a debugger, or a console inside of a step, holds one of this process's threads.

    This recognizes `pdb` and other debuggers built on `bdb`, debugpy and PyCharm's debugger (pydevd), `code.interact`
    and `IPython.embed`. It does not recognize a plain `input()`, which leaves no frame.
    """
    for innermost in innermost_frames().values():
        console = False
        for frame, _ in traceback.walk_stack(innermost):
            module = frame.f_globals.get("__name__") or ""
            root = module.partition(".")[0]
            console = console or root in _CONSOLES
            # The console that a run was started in is further out on the stack than the run, and holds nothing.
            if root in _DEBUGGERS or (console and module == _AROUND_STEPS):
                return True
    return False


@dataclasses.dataclass
class _Listening:
    """The state of one outermost block of `PreemptionNotice.listening`."""

    owns_the_process: bool = False  # whether the process ends with the block
    received: int = 0  # signals that the thread has counted
    handled: int = 0  # signals that Python's handler has counted
    handlers: dict[int, Any] = dataclasses.field(default_factory=dict)  # of the program, by signal
    in_c: dict[int, int | None] = dataclasses.field(default_factory=dict)  # see `_handler_in_c`, with handlers of ours
    wakeup_fd: int = -1  # of the program
    running: RunningTime | None = None  # of the thread, while it listens


class PreemptionNotice:
    """The request to end this process, if one has come. There is one notice in a process: the module's `notice`.

    Attributes:
      requested: the name of the signal that came, such as "SIGTERM", or what else asks the run to end; "" for nothing.
      describe: returns what messages say of a signal, with its name in it, from the name.
      step_seconds: how long the slowest step took; three times as long is given to the current one, and at least 15 s.
    """

    def __init__(self) -> None:
        self.requested = ""
        self.step_seconds = 0.0
        self.describe: Callable[[str], str] = str
        self._depth = 0
        self._deferred = 0
        self._flag: tf.Variable | None = None
        self._busy: Callable[[], bool] = lambda: False
        self._block = _Listening()  # the newest
        self._read: int | None = None  # the ends of the pipe of signals, once it is open
        self._write: int | None = None
        self._masks: dict[int, set] = {}  # of signals before a fork, by thread
        self._thread: threading.Thread | None = None  # which stays for later blocks, because a start takes time

    @property
    def suspended(self) -> float:
        """Seconds that the process was suspended since it listens; they are no part of a step's time."""
        return self._block.running.suspended if self._block.running else 0.0

    @property
    def flag(self) -> tf.Variable:
        """The boolean variable on the host that the loops read between steps; made at the first use."""
        if self._flag is None:

            def make() -> tf.Variable:
                with tf.device("/cpu:0"):
                    return tf.Variable(False, trainable=False, name="stop")

            self._flag = _tf.outside(make)
        return self._flag

    @contextlib.contextmanager
    def listening(self, to_the_end: bool = False) -> Iterator[None]:
        """Listens for signals inside a `with` block; in the main thread, and once if blocks are nested.

        Outside of `deferred` a signal raises `Preempted` at once, because there is nothing to save. A second signal
        ends the process at once, except for a SIGINT in a process that does not end with the block, such as a notebook:
        that one raises `KeyboardInterrupt`, as soon as the op that the main thread runs has ended.

        Args:
          to_the_end: the process ends with the block, so that signals are ignored after it.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._depth += 1
        if self._depth == 1:
            self._start(to_the_end)
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._end(to_the_end)

    @contextlib.contextmanager
    def deferred(self, busy: Callable[[], bool]) -> Iterator[None]:
        """Inside this `with` block a signal only sets `requested` and `flag`: a save is needed before the run ends.

        While `busy()` is true, as a save is under way, no time is counted: the process does not end for a slow step.
        """
        previous, self._busy = self._busy, busy
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1
            self._busy = previous if not self.requested else lambda: True  # the step has ended; the process closes

    @contextlib.contextmanager
    def limited(self, seconds: float | None, limit: str) -> Iterator[None]:
        """Ends the run as a signal does, if this `with` block inside `deferred` takes longer than some seconds.

        None is no limit; `requested` is then `limit`, its name.
        """
        if seconds is None:
            yield
            return
        timer = threading.Timer(max(0.0, seconds), self.request, [limit])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            if self.requested == limit and not self._block.owns_the_process:  # so that a later training continues
                self.requested = ""
                self.flag.assign(False)

    def request(self, cause: str) -> None:
        """Asks the run to end as a signal does, unless there was a request before; called in any thread."""
        if not self.requested:
            self.requested = cause
            logging.info("%s: the run ends after the current step", cause)
        self.flag.assign(True)

    def _start(self, owns_the_process: bool) -> None:
        self.requested, self._busy = "", lambda: False
        block = self._block = _Listening(owns_the_process)
        if self._flag is not None:
            self._flag.assign(False)
        if self._read is None:
            self._open_pipe()
        if self._thread is None or not self._thread.is_alive():  # a fork of the process has none
            self._thread = threading.Thread(target=self._listen, name="looplib-signals", daemon=True)
            self._thread.start()
        heard = [signum for signum in SIGNALS if signum not in _REPEATED or signal.getsignal(signum) != signal.SIG_IGN]
        heard = [signum for signum in heard if signum not in _USER_SIGNALS or _handler_in_c(signum) is None]
        block.handlers = {signum: signal.signal(signum, self._handle) for signum in heard}
        block.in_c = {signum: _handler_in_c(signum) for signum in heard}
        block.running = RunningTime(_TICK)
        block.wakeup_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        os.write(self._write, b"\0")  # no signal; the thread looks up

    def _open_pipe(self) -> None:
        self._lock = threading.Lock()
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)

    def before_a_fork(self) -> None:
        """Blocks signals in this thread until a forked child has installed its handlers."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS if self._depth else ())
        self._masks[threading.get_ident()] = before

    def after_a_fork(self) -> None:
        """Lets signals through again, in the parent and in the fork."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.pop(threading.get_ident()))

    def in_a_fork(self) -> None:
        """Gives a forked child signal handling of its own, without the parent's pipe and handlers."""
        if self._read is not None:
            os.close(self._read)
            os.close(self._write)
            self._open_pipe()  # with another lock, because the thread, which may hold it, is not in the fork
        if self._depth:
            signal.set_wakeup_fd(-1)
            self._leave_what_the_program_has_taken()
            for signum, handler in self._block.handlers.items():
                signal.signal(signum, handler)
        self.after_a_fork()

    def _leave_what_the_program_has_taken(self) -> None:
        """Forgets the signals that the program has installed its own handler for since the start."""
        for signum in _USER_SIGNALS:
            if (signal.getsignal(signum), _handler_in_c(signum)) != (self._handle, self._block.in_c.get(signum)):
                self._block.handlers.pop(signum, None)

    def _end(self, to_the_end: bool) -> None:
        self._leave_what_the_program_has_taken()
        for signum in self._block.handlers:
            signal.signal(signum, signal.SIG_IGN)
        signal.set_wakeup_fd(self._block.wakeup_fd)
        with self._lock:
            self._received_now()  # so that the next block does not count them
            self._block.running = None
        if not to_the_end:
            for signum, handler in self._block.handlers.items():
                signal.signal(signum, handler)

    def _handle(self, signum: int, frame: types.FrameType | None) -> None:
        """Python's handler, in the main thread, once no op runs there."""
        # Signals that come while an op runs lead to one call of this; those that come outside of one may lead to it
        # before the thread has seen them. Each alone may miss one, so the larger count holds.
        block = self._block
        if signum in _REPEATED and block.handled:
            return
        block.handled += 1
        if signum == signal.SIGINT and not block.owns_the_process and max(block.handled, block.received) > 1:
            raise KeyboardInterrupt
        self.requested = self.requested or self.describe(signal.Signals(signum).name)
        if not self._deferred:
            what = f"ended by {self.requested} during start-up or while waiting"
            raise Preempted(f"{what}; no progress is lost; run the same command again", alone=True)

    def _received_now(self) -> bytes:
        try:
            return os.read(self._read, 64)
        except BlockingIOError:  # nothing
            return b""

    def _listen(self) -> None:
        running = None  # of the block that `left` and `asked` belong to
        while True:
            select.select([self._read], [], [], None if self._block.running is None else _TICK)
            with self._lock:
                received = self._received_now()
                if self._block.running is not running:
                    running = self._block.running
                    left, asked = math.inf, False  # left: seconds that the current step has to end
                if running is None:
                    continue
                left -= running.since_last()
                for signum in received:
                    self._count(signum)
                if bool(self.requested) != asked or self._busy():  # what follows a save has all of the time again
                    asked = bool(self.requested)
                    left = max(GRACE_SECONDS, 3 * self.step_seconds) if asked else math.inf
                if left < 0:
                    self._end_the_step()
                    left = math.inf

    def _count(self, signum: int) -> None:
        """Counts a signal, and asks the run to end if it is the first."""
        if signum not in SIGNALS or signal.getsignal(signum) != self._handle:
            return  # a debugger, say, has taken it for itself
        block = self._block
        if signum in _REPEATED and block.received:
            return
        block.received += 1
        name = signal.Signals(signum).name
        raises = signum == signal.SIGINT and not block.owns_the_process
        if block.received > 1:
            if not raises:
                _leave(128 + signum, f"received a second signal ({name}): exiting without a save")
            return
        self.requested = self.describe(name)
        self.flag.assign(True)
        logging.warning(
            "received %s: the run ends after the current step (a second one %s)",
            name,
            "raises KeyboardInterrupt" if raises else "has no effect" if signum in _REPEATED else "ends it immediately",
        )

    def _end_the_step(self) -> None:
        """Ends the process because the current step has not ended in time; in a session or a debugger it only warns."""
        signals = [signum.name for signum in SIGNALS if signum != signal.SIGINT]
        # A notebook's or a console's state is worth more than the run.
        interactive = getattr(sys, "ps1", None) is not None or sys.flags.interactive
        in_session = interactive and not self._block.owns_the_process
        if not any(name in self.requested for name in signals) and (debugger_holds_a_thread() or in_session):
            logging.warning(
                "the current step has not ended yet: a debugger may hold it, or its input may have stalled. "
                "SIGTERM ends the process at once"
            )
            return
        _leave(
            EXIT_PREEMPTED,
            "the current step did not end in time (its input may have stalled), so the run ends "
            "without another save; run the same command to resume from the newest checkpoint and "
            "repeat the steps since then",
        )


def _handler_in_c(signum: int) -> int | None:
    """Returns the address of what the process calls for a signal; None for the default.

    Python's `signal.getsignal` does not see what a library installs, such as `faulthandler.register`.
    """
    action = (ctypes.c_void_p * 64)()  # a `struct sigaction`, which begins with the address
    _LIBC.sigaction(int(signum), None, action)
    return action[0]


def _leave(code: int, sentence: str) -> None:
    console.last_line(f"looplib: {sentence}")
    peers.current.announce_exit(code, sentence)
    os._exit(code)


notice = PreemptionNotice()
os.register_at_fork(before=notice.before_a_fork, after_in_parent=notice.after_a_fork, after_in_child=notice.in_a_fork)
