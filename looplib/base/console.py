"""The console: printing never ends a run.

A full disk behind standard output, a pipe whose reader died or stopped reading, a terminal that cannot show a letter:
none of these ends a run, blocks it, or changes its exit code. The text is dropped, and `run.json` has one sentence.
"""

import contextlib
import io
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import absl.logging

from looplib.masks import masked_text

STALL_SECONDS = 5.0  # that a text waits for its reader, once; later texts are dropped until the reader is back
LAST_SECONDS = 2.0  # that the end of a process waits for its last line
_GAP = b"\n(looplib: text is missing here: there was no reader)\n"
_LOGGERS = (None, "absl", "tensorflow")  # whose handlers keep the stream that they were made with
_CLEARED = b"\r\x1b[K"  # takes away the line that the cursor is in
_sentences: list[str] = []
bar_is_drawn = threading.Event()  # in the line of the cursor; the next text of a guarded stream replaces it


def first_fault() -> str:
    """Returns the first thing that went wrong with the console of this process, a sentence; "" for nothing."""
    return _sentences[0] if _sentences else ""


@contextlib.contextmanager
def noting_errors(name: str = "the console") -> Iterator[None]:
    """Notes an error of writing in a `with` block, and continues after the block."""
    try:
        yield
    except (OSError, ValueError) as error:  # a UnicodeEncodeError and a closed file are ValueErrors
        if not _sentences:
            _sentences.append(f"{name} cannot be written ({error}); some of what was printed is lost")


def say(line: str, stream: TextIO | None = None) -> None:
    """Prints a line on a stream, standard error by default, secrets masked; an error of it is noted and not raised."""
    stream = stream or sys.stderr
    if stream is None:  # it was closed before the process started
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    with noting_errors(getattr(stream, "name", "the console")):
        print(masked_text(line).encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def last_line(line: str) -> None:
    """Prints a line on standard error before `os._exit`, from any thread, without waiting long.

    `print` could wait: another thread may hold the lock of the stream, and the reader may have stopped.
    """
    stdout, line = sys.stdout or io.StringIO(), masked_text(line)
    for action in (stdout.flush, lambda: os.write(2, f"{line}\n".encode())):
        thread = threading.Thread(target=_try, args=(action,), daemon=True)
        thread.start()
        thread.join(LAST_SECONDS)


def _try(action: Callable[[], Any]) -> None:
    with noting_errors():
        action()


def guarded() -> contextlib.ExitStack:
    """Makes standard output and error streams that neither raise nor block, also for logging and the user's prints.

    Streams that are not the process's own, such as a notebook's or a redirection, are unchanged. Closing what this
    returns, or leaving it as a `with` block, puts the streams back.
    """
    undo = contextlib.ExitStack()
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            _use(name, undo.enter_context(open(os.devnull, "w")), undo)
        elif _is_own(stream, descriptor):
            _use(name, _guarded(stream, descriptor, undo), undo)
    return undo


def _is_own(stream: object, descriptor: int) -> bool:
    if not isinstance(stream, io.TextIOWrapper) or stream.closed:
        return False
    raw = getattr(stream.buffer, "raw", stream.buffer)
    return isinstance(raw, io.FileIO) and raw.fileno() == descriptor


def _guarded(stream: io.TextIOWrapper, descriptor: int, undo: contextlib.ExitStack) -> io.TextIOWrapper:
    raw = _NonBlockingWriter(descriptor, stream.name)
    undo.callback(raw.release)  # it is not closed: others may have kept the stream
    with noting_errors(stream.name):
        raw.check()  # now, before TensorFlow prints to it
        stream.flush()
    made = io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    undo.callback(made.flush)
    return made


def _use(name: str, stream: TextIO, undo: contextlib.ExitStack) -> None:
    """Replaces `sys.<name>` by a stream, also in the log handlers that print to the old one."""
    before = getattr(sys, name)
    setattr(sys, name, stream)
    undo.callback(setattr, sys, name, before)
    handlers = [handler for logger in map(logging.getLogger, _LOGGERS) for handler in logger.handlers]
    handlers.append(absl.logging.get_absl_handler().python_handler)  # `app.run` gives it to the root logger later
    for handler in handlers:
        if isinstance(handler, logging.StreamHandler) and before is not None and handler.stream is before:
            handler.setStream(stream)
            undo.callback(handler.setStream, before)


class _NonBlockingWriter(io.RawIOBase):
    """Writes to a descriptor, and drops bytes that cannot be written.

    While there is no reader, the descriptor itself leads nowhere, so that TensorFlow's own messages do not block.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        self.name = name
        self._descriptor = self._target = descriptor
        self._stalled = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._target)

    def write(self, data: Any) -> int:
        content = bytes(data)
        with noting_errors(self.name):
            self._write(content)
        return len(content)

    def _write(self, content: bytes) -> None:
        if bar_is_drawn.is_set() and self.isatty():
            bar_is_drawn.clear()
            content = _CLEARED + content
        if self._stalled:
            if not _ready(self._target, 0.0):
                return
            self.release()
            content = _GAP + content
        deadline = time.monotonic() + STALL_SECONDS
        while content:
            self.check()
            try:
                # A pipe with any room takes so few bytes at once, so this does not wait.
                written = os.write(self._target, content[: select.PIPE_BUF])
            except BlockingIOError:  # another process has made it non-blocking
                time.sleep(0.01)
                if time.monotonic() > deadline:
                    raise
                continue
            content, deadline = content[written:], time.monotonic() + STALL_SECONDS

    def check(self) -> None:
        """Waits until the descriptor takes bytes; if that takes too long, sets it aside and raises."""
        if _ready(self._target, STALL_SECONDS):
            return
        self._stalled = True
        self._target = os.dup(self._descriptor)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._descriptor)
        os.close(nowhere)
        raise TimeoutError(f"no reader for {STALL_SECONDS:g} s")

    def release(self) -> None:
        """Connects the descriptor with its original target again."""
        self._stalled = False
        if self._target != self._descriptor:
            os.dup2(self._target, self._descriptor)
            os.close(self._target)
            self._target = self._descriptor


def _ready(descriptor: int, seconds: float) -> bool:
    """Waits some seconds, and returns whether a write would now not block: it succeeds, or fails at once."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(1e3 * seconds))


def printable(text: str) -> str:
    """Masks secrets, and escapes what a terminal would take for a command; a run directory may come from anybody."""
    shown = (char if char.isprintable() else char.encode("unicode_escape").decode() for char in masked_text(text))
    return "".join(shown)
