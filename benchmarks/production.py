"""What the features for production cost a training of W1: `python -m benchmarks.production`, about eight minutes.

One process has a training for each feature, and one with none, and they take turns, so that a change in the machine's
load meets all alike. A turn is a call of `train`; what counts is the time between its first and its last report, so
that neither its start nor its final save does. The other sides, on loopback, are a process of their own: a collector of
OTLP, a webhook, a metadata server, and a Prometheus that asks each second. What a feature does in a process of its own
is stopped between its turns.

The cost is the median over rounds of the time of a step with a feature divided by the time without, less 1: once by the
clock, and once by the processor time of the process, which depends less on what else the machine does.
"nothing, again" is a second training without features, which shows the noise.

`--calls` measures the processor time of what each feature does at a report, or beside the training, which can be
measured on a busy machine too. `--workers` measures the comparison of workers instead, with and without, on two workers
that take turns together.
"""

import contextlib
import dataclasses
import http.server
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported
os.environ["LOOPLIB_CACHE"] = os.devnull

import numpy as np
import tensorflow as tf
from absl import app, flags, logging

import looplib
from benchmarks.workloads import WORKLOADS, Task
from looplib.actions import stragglers
from looplib.actions.notices import GcpNotices, NoticeListener
from looplib.actions.timed_saves import TimedSaves
from looplib.base.numbers import Progress
from looplib.report.writers.telemetry import OpenTelemetryWriter, PrometheusWriter
from looplib.run.status import read_status
from looplib.task.actions import Event

_ROUNDS = flags.DEFINE_integer("rounds", 20, "Turns of each training that count.", lower_bound=3)
_MINUTES = flags.DEFINE_float("minutes", 7.0, "Time after which no further round begins.")
_SECONDS = flags.DEFINE_float("seconds", 2.0, "Length of a turn.", lower_bound=0.1)
_ENGINE = flags.DEFINE_string("engine", "graph", "The engine of one process; several workers have graph.")
_WORKERS = flags.DEFINE_bool("workers", False, "Measures the comparison of two workers.")
_CALLS = flags.DEFINE_bool("calls", False, "Measures the processor time of what the features do.")
_SERVE = flags.DEFINE_bool("serve", False, "Is the process with the other sides.")
_LOOP = 100  # steps between two reports
_NONE, _AGAIN = "nothing", "nothing, again"
_FEATURES = ("--metrics_port", "--trackers=opentelemetry", "--alert", "--notices=gcp", "--checkpoint_every=10m",
             "--checkpoint_budget=0.5%")  # fmt: skip


class _W1(looplib.Trainer):
    def __init__(self, task):
        self.model, self.optimizer, self._task = task.model, task.optimizer, task

    def dataset(self, context):
        return self._task.dataset(context.num_replicas).shard(context.num_pipelines, context.pipeline_index)

    def step_fn(self, inputs):
        losses, right = self._task.step(*inputs, mean=self.global_mean)
        return {"loss": losses, "accuracy": right}


@dataclasses.dataclass
class Training:
    """A training that takes turns.

    Attributes:
      begin: called at the first report of a turn.
      end: called at the last one.
      controller: the `looplib.Controller`.
    """

    begin: Callable[[], object] = lambda: None
    end: Callable[[], object] = lambda: None
    controller: looplib.Controller | None = None
    _reports: list[tuple[int, float, float]] = dataclasses.field(default_factory=list)

    def note(self, event):
        """Takes the reports; an action."""
        if not self._reports:
            self.begin()
        if event.ending:
            self.end()
        self._reports.append((event.step, time.perf_counter(), time.process_time()))

    def turn(self, steps):
        """Trains some more steps; returns the seconds of a step, by the clock and of the processors."""
        self._reports.clear()
        self.controller.train(self.controller.global_step + steps)
        first, last = np.array(self._reports[0]), np.array(self._reports[-1])
        steps, seconds, processor = last - first
        return seconds / steps, processor / steps


def build(training, arrays, folder, engine, strategy=None, writers=(), actions=()):
    """Gives a training its controller."""
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        trainer = _W1(Task(WORKLOADS["W1"], arrays))
    training.controller = looplib.Controller(
        looplib.RunConfig(global_batch_size=WORKLOADS["W1"].batch, steps_per_loop=_LOOP, loop=engine),
        trainer=trainer,
        strategy=strategy,
        model_dir=folder,
        checkpoints=looplib.CheckpointPolicy(10**9, (looplib.KeepLast(1),)),
        writers=["jsonl", "tensorboard", *writers],
        actions=[*actions, training.note],
    )
    return training


def measure(trainings, rounds, seconds):
    """Lets trainings take turns; returns a dict from name to a float array `[rounds, 2]`, see `turn`."""
    end = time.monotonic() + 60 * _MINUTES.value
    first, _ = next(iter(trainings.values())).turn(10 * _LOOP)
    for training in trainings.values():
        training.turn(10 * _LOOP)
    steps = int(next(iter(trainings.values())).controller.gather(_LOOP * max(3, round(seconds / first / _LOOP)))[0])
    names, times = list(trainings), {name: [] for name in trainings}
    chief = next(iter(trainings.values())).controller
    for _ in range(rounds):
        if chief.gather(time.monotonic() > end)[0]:
            break
        names.append(names.pop(0))
        for name in names:
            times[name].append(trainings[name].turn(steps))
    return {name: np.array(values) for name, values in times.items()}


def show(times, without):
    """Prints the cost of each."""
    rounds = len(times[without])
    print(f"\n{rounds} rounds{'':<20}{'steps/s':>9}{'cost':>8}   quartiles{'processor':>19}   quartiles", flush=True)
    for name, values in times.items():
        low, cost, high = np.quantile(values / times[without] - 1, [0.25, 0.5, 0.75], axis=0)
        texts = [f"{c:>8.2%}   {a:>6.2%} to {b:>6.2%}" for a, c, b in zip(low, cost, high)]
        print(f"{name:<28}{1 / statistics.median(values[:, 0]):>9.0f}{texts[0]}  {texts[1]}", flush=True)


class OtherSides:
    """The process with the other sides, and those that stop between turns. Use it in a `with` block."""

    def __enter__(self):
        command = [sys.executable, "-m", "benchmarks.production", "--serve"]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = f"127.0.0.1:{int(self._server.stdout.readline())}"
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://{self.address}"
        os.environ["GCE_METADATA_HOST"] = self.address
        self._processes = [self._server]
        return self

    def __exit__(self, *_):
        for process in self._processes:
            process.kill()
            process.wait()

    def scrape(self, port):
        """Asks for metrics each second from now on; 0 ends that."""
        self._server.stdin.write(f"{port}\n")
        self._server.stdin.flush()

    def watch(self, folder):
        """Starts what `--alert` starts; returns the process, stopped."""
        command = [sys.executable, "-m", "looplib", "status", folder, "--watch", "--until_end", "--interval=2"]
        process = subprocess.Popen([*command, f"--alert=http://{self.address}/"])
        self._processes.append(process)
        time.sleep(3.0)
        process.send_signal(signal.SIGSTOP)
        return process

    def training(self, name, arrays, folder):
        """Builds the training with a feature, or with none."""
        os.makedirs(folder)
        if name == "--metrics_port":
            writer = PrometheusWriter(folder, 0, "127.0.0.1")
            training = Training(lambda: self.scrape(writer.port), lambda: self.scrape(0))
            return build(training, arrays, folder, _ENGINE.value, writers=[writer])
        if name == "--alert":
            process = self.watch(folder)
            training = Training(
                lambda: process.send_signal(signal.SIGCONT), lambda: process.send_signal(signal.SIGSTOP)
            )
            return build(training, arrays, folder, _ENGINE.value)
        writers = ["opentelemetry"] if "opentelemetry" in name else []
        actions = [NoticeListener(["gcp"])] if "notices" in name else []
        actions += [TimedSaves(every="10m")] if "every" in name else []
        actions += [TimedSaves(budget=0.005)] if "budget" in name else []
        return build(Training(), arrays, folder, _ENGINE.value, writers=writers, actions=actions)


def serve():
    """Answers as a collector, a webhook and the metadata server of GCP do, and asks for metrics when it is told to."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer(b"")

        def do_GET(self):
            self._answer(b"FALSE" if "preempted" in self.path else b"NONE")

        def _answer(self, text):
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    server, port = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler), [0]
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def scrape():
        while True:
            time.sleep(1.0)
            with contextlib.suppress(OSError):
                if port[0]:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port[0]}/metrics") as answer:
                        answer.read()

    threading.Thread(target=scrape, daemon=True).start()
    print(server.server_port, flush=True)
    for line in sys.stdin:
        port[0] = int(line)


def calls(folder):
    """Prints the processor time of what each feature adds to a report, or does beside the training."""
    metrics = {"loss": 0.3, "accuracy": 0.9, "steps_per_second": 1000.0}
    prometheus, telemetry, saves = (
        PrometheusWriter(folder, 0, "127.0.0.1"),
        OpenTelemetryWriter(folder),
        TimedSaves("10m"),
    )
    controller = build(Training(), tuple(map(tf.constant, WORKLOADS["W1"].arrays())), folder, "graph").controller
    controller.train(10 * _LOOP)
    saves.on_start(controller)
    telemetry.settings({})

    def report(writer):
        writer.write(1, "train", metrics)
        writer.progress(Progress(1, 10**6, False, rate=1000.0, left=5.0, waiting=0.1))

    def scrape():
        with urllib.request.urlopen(f"http://127.0.0.1:{prometheus.port}/metrics") as answer:
            answer.read()

    source = GcpNotices()
    for name, call in {
        "--metrics_port, a report": lambda: report(prometheus),
        "--metrics_port, a scrape, both sides": scrape,
        "--trackers=opentelemetry, a report": lambda: report(telemetry),
        "--checkpoint_every, a report": lambda: saves(Event(1, "train", metrics, controller)),
        "--notices=gcp, a look each second": lambda: list(source.look()),
        "--alert, a look each 2 s": lambda: read_status(folder),
    }.items():
        call()
        spent = []
        for _ in range(9):
            began = time.process_time()
            for _ in range(30):
                call()
            spent.append((time.process_time() - began) / 30)
        print(f"{name:<40}{1e6 * statistics.median(spent):>8.0f} µs", flush=True)
    for each in (prometheus, telemetry, controller):
        each.close()


def of_workers(folder, arrays):
    """Measures the comparison of workers, in one of them."""
    strategy = looplib.runtime.setup(strategy="multi_worker")
    with_it = build(Training(), arrays, f"{folder}/with", "graph", strategy)
    action, stragglers.Stragglers = stragglers.Stragglers, lambda strategy: looplib.Action()
    trainings = {
        name: build(Training(), arrays, f"{folder}/{i}", "graph", strategy) for i, name in enumerate((_NONE, _AGAIN))
    }
    stragglers.Stragglers = action
    trainings["workers compared"] = with_it
    times = measure(trainings, _ROUNDS.value, _SECONDS.value)
    if with_it.controller.is_chief:
        show(times, _NONE)
    with_it.controller.gather(0)  # the chief ends with the others
    for training in trainings.values():
        training.controller.close()


def main(argv):
    """Measures and prints a table."""
    del argv
    if _SERVE.value:
        return serve()
    logging.set_verbosity(logging.ERROR)
    if "TF_CONFIG" in os.environ:
        return of_workers(os.environ["LOOPLIB_PRODUCTION"], WORKLOADS["W1"].arrays())
    with tempfile.TemporaryDirectory() as folder:
        if _WORKERS.value:
            names = ("rounds", "minutes", "seconds", "workers")
            flags_of_all = [f"--{name}={flags.FLAGS[name].value}" for name in names]
            program = [sys.executable, "-m", "benchmarks.production", *flags_of_all]
            command = [sys.executable, "-m", "looplib", "launch", "--workers=2", "--", *program]
            subprocess.run(command, env={**os.environ, "LOOPLIB_PRODUCTION": folder}, check=True)
            return None
        arrays = tuple(map(tf.constant, WORKLOADS["W1"].arrays()))
        if _CALLS.value:
            with OtherSides() as others:
                return calls(folder)
        with OtherSides() as others:
            names = (_NONE, _AGAIN, *_FEATURES)
            trainings = {name: others.training(name, arrays, f"{folder}/{i}") for i, name in enumerate(names)}
            show(measure(trainings, _ROUNDS.value, _SECONDS.value), _NONE)
    return None


if __name__ == "__main__":
    app.run(main)
