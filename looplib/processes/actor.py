"""What runs on a node of a Ray cluster: a process with the command of a worker. Imports neither Ray nor TensorFlow."""

import contextlib
import dataclasses
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from looplib.errors import CommandError
from looplib.processes.children import dying_with_parent
from looplib.processes.worker_processes import hold_ports

_LONGEST_LINE = 1 << 16  # bytes; a longer one is passed on in parts
_MOST_LINES = 1_000  # that wait for the driver; then the command waits too
_DRAIN = 1.0  # seconds that the last lines have once the command has ended


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
        self._process: subprocess.Popen | None = None
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
        started: queue.Queue[OSError | None] = queue.Queue()
        # In a thread that lives as long as the command, which gets a signal when the thread that started it ends.
        threading.Thread(target=self._run, args=(command, directory, environment, started), daemon=True).start()
        if error := started.get():
            raise CommandError(
                f"{command[0]!r} cannot be started on the node {self._host}: {error.strerror}; write the command as "
                "you type it there"
            )

    def news(self, seconds: float = 1.0) -> News:
        """Waits for lines, or for the end of the command, and for so many seconds at most."""
        lines = []
        with contextlib.suppress(queue.Empty):
            lines.append(self._lines.get(timeout=seconds))
            while len(lines) < _MOST_LINES:
                lines.append(self._lines.get_nowait())
        over = self._ended.is_set() and self._lines.empty()
        return News(lines, self._process.returncode if over else None)

    def signal(self, number: int) -> None:
        """Sends a signal to the command."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kills the command and its child processes."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _run(
        self, command: Sequence[str], directory: str, environment: Mapping[str, str], started: queue.Queue
    ) -> None:
        try:
            self._process = process = subprocess.Popen(
                command,
                cwd=directory,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # to kill it with its children
                # Not SIGTERM: it would still save while all workers start again.
                preexec_fn=dying_with_parent(signal.SIGKILL),
            )
        except OSError as error:
            started.put(error)
            return
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
