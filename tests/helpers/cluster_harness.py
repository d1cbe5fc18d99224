"""Starts the workers of a cluster as processes, on loopback or each in a network namespace, and strikes them.

with Namespaces(3) as network, Workers([sys.executable, "train.py"], network, tmp_path) as workers:
    workers.wait_for(0, "step 10")
    network.cut(2)
    assert workers.codes(60) == [1, 1, 1]
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import threading
import time

from looplib.cluster.environment import Cluster
from looplib.processes.group import hold_ports

ROOT = pathlib.Path(__file__).parents[2]


class Loopback:
    """Addresses on this machine's loopback interface. Use it in a `with` block, which holds the ports."""

    def __init__(self, count):
        self._count = count

    def __enter__(self):
        self._stack = contextlib.ExitStack()
        self.addresses = tuple(f"127.0.0.1:{port}" for port in self._stack.enter_context(hold_ports(self._count)))
        return self

    def __exit__(self, *_):
        self._stack.close()

    def prefix(self, index):
        """Returns the words before the command of a worker."""
        return []


class Namespaces:
    """A network namespace with an address of its own for each worker, joined by a bridge in another one."""

    def __init__(self, count, port=2222):
        self._name = f"looplib{os.getpid()}"
        self.spaces = [f"{self._name}w{i}" for i in range(count)]
        self.addresses = tuple(f"10.91.0.{i + 1}:{port}" for i in range(count))

    @staticmethod
    def missing():
        """Why namespaces cannot be had here; empty if they can."""
        if not shutil.which("ip"):
            return "the command ip (iproute2) is not installed"
        name = f"looplib{os.getpid()}try"
        tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
        if tried.returncode:
            return f"ip netns add: {tried.stderr.strip()}"
        subprocess.run(["ip", "netns", "delete", name], check=True)
        return ""

    def __enter__(self):
        hub = self._name
        try:
            for space in (hub, *self.spaces):
                _ip("netns", "add", space)
                _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
            _ip("-n", hub, "link", "set", "bridge", "up")
            for i, space in enumerate(self.spaces):
                _ip("-n", hub, "link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", space)
                _ip("-n", hub, "link", "set", f"port{i}", "master", "bridge", "up")
                _ip("-n", space, "address", "add", f"10.91.0.{i + 1}/24", "dev", "eth0")
                _ip("-n", space, "link", "set", "eth0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for space in (self._name, *self.spaces):
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)

    def prefix(self, index):
        """Returns the words before the command of a worker."""
        return ["ip", "netns", "exec", self.spaces[index]]

    def cut(self, index):
        """From now on the packets from and to a worker vanish; no end learns of it."""
        _ip("-n", self._name, "link", "set", f"port{index}", "nomaster")

    def mend(self, index):
        """Joins it again."""
        _ip("-n", self._name, "link", "set", f"port{index}", "master", "bridge")


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Workers:
    """The processes, each with TF_CONFIG. Use it in a `with` block, which kills what still runs.

    Args:
      command: list of str, or a function that returns it for a worker's index.
      network: `Loopback` or `Namespaces`, entered.
      folder: for their output, a `pathlib.Path`.
      environ: more variables.
      late: indices of workers that `start` starts later.
    """

    def __init__(self, command, network, folder, *, environ=(), late=()):
        self._command = command if callable(command) else lambda index: command
        self._network, self._folder = network, folder
        self._environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **dict(environ)}
        self._late = late
        self.processes = {}  # index -> subprocess.Popen, of its newest start
        self.ended = {}  # index -> when it ended, by time.monotonic
        self._all = []

    def __enter__(self):
        for index in range(len(self._network.addresses)):
            if index not in self._late:
                self.start(index)
        return self

    def __exit__(self, *_):
        for process in self._all:
            if process.poll() is None:
                process.kill()
            process.wait()
            process.stdin.close()

    def start(self, index, environ=()):
        """Starts a worker, once more or late; returns its `subprocess.Popen`."""
        config = Cluster(self._network.addresses, task_index=index).tf_config
        with open(self._path(index, "out"), "ab") as out, open(self._path(index, "err"), "ab") as err:
            process = subprocess.Popen(
                [*self._network.prefix(index), *self._command(index)], stdin=subprocess.PIPE, stdout=out, stderr=err,
                env={**self._environ, "TF_CONFIG": config, **dict(environ)},
            )  # fmt: skip
        self.processes[index] = process
        self.ended.pop(index, None)
        self._all.append(process)
        threading.Thread(target=self._note_end, args=(index, process), daemon=True).start()
        return process

    def _note_end(self, index, process):
        process.wait()
        if self.processes[index] is process:
            self.ended[index] = time.monotonic()

    def _path(self, index, stream):
        return self._folder / f"worker{index}.{stream}"

    def out(self, index):
        """Returns the standard output of a worker, over all its starts."""
        return self._path(index, "out").read_text(errors="replace")

    def err(self, index):
        """The same of standard error."""
        return self._path(index, "err").read_text(errors="replace")

    def tell(self, index, line):
        """Writes a line to its standard input."""
        self.processes[index].stdin.write(f"{line}\n".encode())
        self.processes[index].stdin.flush()

    def signal(self, index, number):
        """Sends a signal, such as signal.SIGSTOP; returns when, by time.monotonic."""
        self.processes[index].send_signal(number)
        return time.monotonic()

    def kill(self, index):
        """SIGKILL; returns when."""
        return self.signal(index, signal.SIGKILL)

    def wait_for(self, index, text, seconds=60.0):
        """Waits until its output has a text."""
        end = time.monotonic() + seconds
        while text not in self.out(index) + self.err(index):
            if time.monotonic() > end or index in self.ended:
                raise TimeoutError(f"worker {index} did not write {text!r}; {self._outputs()}")
            time.sleep(0.02)

    def codes(self, seconds, indices=None):
        """Waits until all, or those of `indices`, have ended; returns a list of their exit codes.

        Raises:
          TimeoutError: with their output, if one still runs.
        """
        indices = sorted(self.processes) if indices is None else indices
        end = time.monotonic() + seconds
        while not all(index in self.ended for index in indices):
            if time.monotonic() > end:
                running = [index for index in indices if index not in self.ended]
                raise TimeoutError(f"workers {running} still run after {seconds} s; {self._outputs()}")
            time.sleep(0.02)
        return [self.processes[index].returncode for index in indices]

    def _outputs(self):
        return "\n".join(f"--- worker {i}:\n{self.out(i)[-1500:]}{self.err(i)[-3000:]}" for i in sorted(self.processes))
