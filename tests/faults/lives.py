"""Starts many lives of a binary at little cost: a process that has imported TensorFlow, but not started it.

TensorFlow's runtime starts with the first op or device; before that, a process may fork. Each life is a fork that runs
a binary's module as `python -m` does, and ends as a process of its own: to import TensorFlow costs 4 s, to fork nothing.
"""

import contextlib
import ctypes
import itertools
import json
import os
import pathlib
import resource
import runpy
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

from looplib.extras.tools.local_launch import hold_ports

ROOT = pathlib.Path(__file__).parents[2]
_CLONE_NEWNET = 0x40000000
NOTE_BYTES = 64  # as `faulty` has it, which imports TensorFlow


class Nursery:
    """The process that forks. Use it in a `with` block, which ends it and all lives."""

    def __init__(self):
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._held = contextlib.ExitStack()
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="faulty-"))
        self.folder.chmod(0o711)  # for lives of another user
        paths = [ROOT, ROOT / "tests", ROOT / "tests" / "faults", ROOT / "tests" / "workers"]
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "LOOPLIB_EXAMPLE_CHECKSUMS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip

    def ask(self, **order):
        """Sends an order and returns the answer; from any thread."""
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def number(self):
        """A number for a life that no other has."""
        return next(self._numbers)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._held.close()
        shutil.rmtree(self.folder)

    def life(self, folder, *arguments, **order):
        """Starts `faulty` on a run directory; returns its `Life`."""
        return Life(self, [f"--model_dir={folder}", *arguments], {"binary": "faulty", **order})

    def life_of(self, binary, *arguments, **order):
        """Starts any binary, by the name of its module; returns its `Life`."""
        return Life(self, list(arguments), {"binary": binary, **order})

    def _ports(self, count):
        """Ports that are held until this nursery ends."""
        return self._held.enter_context(hold_ports(count))

    def workers(self, count, folder, *arguments, missing=(), namespaces=None):
        """Starts `faulty` as so many workers; returns a list of their lives, the chief's first.

        Args:
          count: how many the cluster has.
          folder: the run directory.
          *arguments: more of the command line.
          missing: numbers of workers that are not started.
          namespaces: dict from the name of a network namespace to an address in it, one for each worker; without it,
            they are on loopback.
        """
        hosts = namespaces or dict.fromkeys(range(count), "127.0.0.1")
        places = [
            (f"{address}:{port}", {"namespace": name} if namespaces else {})
            for (name, address), port in zip(hosts.items(), self._ports(count))
        ]
        cluster = {"worker": [address for address, _ in places]}
        return [
            self.life(
                folder, "--strategy=multi_worker", *arguments, **place,
                environment={"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})},
            )
            for index, (_, place) in enumerate(places) if index not in missing
        ]  # fmt: skip


class Life:
    """One start of a binary.

    Args:
      nursery: the `Nursery` that forks it.
      arguments: its command line.
      order: dict: `binary`, its module, and maybe `environment`, a dict of variables, `namespace`, of a network, `log`,
        `console`, a file to print to in place of the log, `closed`, to have none, and `encoding`, of what it prints.

    Attributes:
      pid: its process id.
      log: the file that has its output.
    """

    def __init__(self, nursery, arguments, order):
        self._nursery, self._arguments, self._order = nursery, arguments, order
        number = nursery.number()
        # Not beside the run, whose disk may be full.
        self.log = pathlib.Path(order.get("log", nursery.folder / f"{number}.log"))
        self._code = self._notes = None
        if order["binary"] == "faulty":
            notes = nursery.folder / f"{number}.notes"
            notes.write_bytes(b"0 start".ljust(NOTE_BYTES))
            notes.chmod(0o666)
            self._notes = open(notes, "rb", buffering=0)
            arguments = [*arguments, f"--config.notes={notes}"]
        self.pid = nursery.ask(**{**order, "arguments": arguments, "log": str(self.log)})["pid"]
        self._handle = os.pidfd_open(self.pid)

    def another(self, *arguments):
        """Starts the same once more beside it, with more arguments, on a good console; returns its `Life`."""
        order = {key: self._order[key] for key in ("binary", "directory", "environment") if key in self._order}
        return Life(self._nursery, [*self._arguments, *arguments], order)

    def note(self):
        """What it does: (number, what)."""
        number, what = os.pread(self._notes.fileno(), NOTE_BYTES, 0).decode().split()
        return int(number), what

    def ended(self, timeout=0.0):
        """Whether it has ended, within some seconds."""
        return self._code is not None or bool(select.select([self._handle], [], [], timeout)[0])

    def kill(self, signum=signal.SIGKILL):
        """Sends a signal; the process is not waited for yet, so that the number is still its own."""
        os.kill(self.pid, signum)

    def code(self, timeout=120.0):
        """Waits for its end and returns the exit code, or the signal's number with a minus."""
        if self._code is not None:
            return self._code
        if not self.ended(timeout):
            self.kill()
            raise TimeoutError(f"it did not end within {timeout} s: {self.output()[-2000:]}")
        self._code = self._nursery.ask(wait=self.pid)["code"]
        os.close(self._handle)
        if self._notes:
            self._notes.close()
        return self._code

    def end(self):
        """Kills it if it has not ended."""
        if not self.ended():
            self.kill()
        self.code()

    def output(self):
        """What it has printed so far, standard output and error."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def _serve():
    import faulty  # noqa: F401  so that what the binaries import is there in each life
    import keras  # noqa: F401
    import tf_keras  # noqa: F401

    import trainers.image_classification  # noqa: F401

    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            answer = {"code": os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])}
        else:
            pid = os.fork()
            if pid == 0:
                _live(order)
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)


def _live(order):
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(number, target)
    if order.get("console"):
        console = os.open(order["console"], os.O_WRONLY)
        for target in order.get("streams", (1, 2)):
            os.dup2(console, target)
    if order.get("closed"):
        for target in (1, 2):
            os.close(target)
        sys.stdout = sys.stderr = None  # as Python has them where it was started so
    if "encoding" in order:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(encoding=order["encoding"], errors="strict")
    os.environ.update(order.get("environment", {}))
    if "namespace" in order:
        with open(f"/run/netns/{order['namespace']}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
    if "directory" in order:
        os.chdir(order["directory"])
    if "most_bytes" in order:  # of a file
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["most_bytes"],) * 2)
    if "user" in order:
        os.setgroups([])
        os.setresgid(*[order["user"]] * 3)
        os.setresuid(*[order["user"]] * 3)
    sys.argv[1:] = order["arguments"]
    runpy.run_module(order["binary"], run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    _serve()
