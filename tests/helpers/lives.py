"""Starts many lives of a binary at little cost, as forks of a process that has imported TensorFlow.

Each life runs a binary's module as `python -m` does, and ends as a process of its own.
"""

import contextlib
import fcntl
import itertools
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec

import fork_client
from ordered import ordered
from paths import PROGRAMS, PYTHONPATH, ROOT

from looplib.processes.group import hold_ports

NOTE_BYTES = 64  # as `faulty` has it, which imports TensorFlow
SHARED = "LOOPLIB_FORK_SERVER"  # a variable: the folder of the fork server that the processes of a test run share
# What the binaries import is there in each life.
MODULES = (
    "faulty", "toy", "wrong", "divided", "asynchronous", "recorded", "replayed", "repeated", "swept", "unreliable", "keras", "tf_keras",
    "trainers.image_classification", "sklearn.datasets", "sklearn.model_selection", "looplib.sweep.sweep",
    "alembic.command", "alembic.migration", "looplib.report.page.html",
    "looplib.cluster.parameter_servers", "looplib.replay.preflight", "looplib.replay.step_view",
    "tensorboard.plugins.hparams.api", *(["s3fs"] if find_spec("s3fs") else []),
)  # fmt: skip


class Nursery:
    """The process that forks. Use it in a `with` block, which ends it and all lives; a shared one stays for the others.

    Args:
      modules: what it imports.
      python: what runs it; another nursery's for a fork of that one, which has imported its modules already.
      variables: more of its environment.

    Attributes:
      folder: for the lives' output.
      python: path of a program that stands for `python` on a command line, and is one of the forks.
    """

    def __init__(self, modules=MODULES, python=sys.executable, variables=()):
        self._numbers = itertools.count(1)
        self._held = contextlib.ExitStack()
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="faulty-"))
        self.folder.chmod(0o711)  # for lives of another user
        self.environment = {
            **os.environ, "PYTHONPATH": PYTHONPATH, **ordered(example_checksums=True),
            "TF_CPP_MIN_LOG_LEVEL": "2", **dict(variables),
        }  # fmt: skip
        shared = os.environ.get(SHARED) if modules is MODULES else None
        self.address, self._process = f"{shared or self.folder}/socket", None
        if shared is None:
            self._process = self._start_server(python, modules)
        else:
            with open(f"{shared}/lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not os.path.exists(self.address):
                    pathlib.Path(shared, "pid").write_text(str(self._start_server(python, modules).pid))
        self.python = str(self.folder / "python")
        with open(self.python, "w") as file:
            print(f"#!{sys.executable} -IS", "import sys", f"sys.path.insert(0, {str(PROGRAMS)!r})",
                  "import fork_client", f"fork_client.main({self.address!r})", sep="\n", file=file)  # fmt: skip
        os.chmod(self.python, 0o755)

    def _start_server(self, python, modules):
        """Starts a server at the address; returns its process once it is ready."""
        server = subprocess.Popen(
            [python, PROGRAMS / "fork_server.py", self.address, *modules],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=self.environment, start_new_session=True,
        )  # fmt: skip
        assert server.stdout.readline() == b"ready\n"
        return server

    def number(self):
        """A number for a life that no other has."""
        return next(self._numbers)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._process is not None:
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

    def workers(self, count, folder, *arguments, missing=(), namespaces=None, binary="faulty", environments=None):
        """Starts a binary as so many workers; returns a list of their lives, the chief's first.

        Args:
          count: how many the cluster has.
          folder: the run directory.
          *arguments: more of the command line.
          missing: numbers of workers that are not started.
          namespaces: dict from the name of a network namespace to an address in it, one for each worker; without it,
            they are on loopback.
          binary: the name of its module.
          environments: more variables of each.
        """
        hosts = namespaces or dict.fromkeys(range(count), "127.0.0.1")
        places = [
            (f"{address}:{port}", {"namespace": name} if namespaces else {})
            for (name, address), port in zip(hosts.items(), self._ports(count))
        ]
        cluster = {"worker": [address for address, _ in places]}
        return [
            self.life_of(
                binary, f"--model_dir={folder}", "--strategy=multi_worker", *arguments, **place,
                environment={
                    "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}),
                    **(environments[index] if environments else {}),
                },
            )
            for index, (_, place) in enumerate(places) if index not in missing
        ]  # fmt: skip


class Life:
    """One start of a binary.

    Args:
      nursery: the `Nursery` that forks it.
      arguments: its command line.
      order: dict: `binary`, its module, and maybe `environment`, a dict of variables, of which None removes one,
        `directory`, `log`, and what `fork_server.become` takes.

    Attributes:
      pid: its process id.
      log: the file that has its output.
    """

    def __init__(self, nursery, arguments, order):
        self._nursery, self._arguments, self._order = nursery, arguments, dict(order)
        number = nursery.number()
        # Not beside the run, whose disk may be full.
        self.log = pathlib.Path(order.pop("log", nursery.folder / f"{number}.log"))
        self._code = self._notes = None
        binary = order.pop("binary")
        if binary == "faulty":
            notes = nursery.folder / f"{number}.notes"
            notes.write_bytes(b"0 start".ljust(NOTE_BYTES))
            notes.chmod(0o666)
            self._notes = open(notes, "rb", buffering=0)
            arguments = [*arguments, f"--config.notes={notes}"]
        own = ordered(order["user"], example_checksums=True) if "user" in order else {}
        environment = {**nursery.environment, **own, **order.pop("environment", {})}
        environment = {name: value for name, value in environment.items() if value is not None}
        with open(os.devnull) as nothing, open(self.log, "ab") as log:
            self._answers = fork_client.connect(
                nursery.address, [nothing.fileno(), log.fileno(), log.fileno()],
                arguments=["-m", binary, *arguments], folder=str(order.pop("directory", ROOT)), environment=environment, **order,
            )  # fmt: skip
        self.pid = int(self._answers.readline())
        self._handle = os.pidfd_open(self.pid)

    def another(self, *arguments):
        """Starts the same once more beside it, with more arguments, on a good console; returns its `Life`."""
        order = {key: self._order[key] for key in ("binary", "directory", "environment") if key in self._order}
        return Life(self._nursery, [*self._arguments, *arguments], order)

    def note(self):
        """The present action: (number, what)."""
        number, what = os.pread(self._notes.fileno(), NOTE_BYTES, 0).decode().split()
        return int(number), what

    def ended(self, timeout=0.0):
        """Whether it has ended, within some seconds."""
        return self._code is not None or bool(select.select([self._handle], [], [], timeout)[0])

    def kill(self, signum=signal.SIGKILL):
        """Sends a signal; does nothing once the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signum)

    def code(self, timeout=120.0):
        """Waits for its end and returns the exit code, or the signal's number with a minus."""
        if self._code is not None:
            return self._code
        if not self.ended(timeout):
            self.kill()
            raise TimeoutError(f"it did not end within {timeout} s: {self.output()[-2000:]}")
        self._code = os.waitstatus_to_exitcode(int(self._answers.readline()))
        self._answers.close()
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
        """Everything it has printed so far, standard output and error."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""
