"""What a run in an object store costs: `python -m benchmarks.buckets`.

Requests for each save, report and idle minute; how long a training stands still for a save; start-up. The store is
moto's server behind the proxy of the tests, which counts, and adds latency. `--against=FOLDER` measures plain local
directories with another checkout too, which has to have its `looplib.egg-info`. The kinds take turns, each in a new
process, and medians count.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from absl import app, flags

ROOT = pathlib.Path(__file__).absolute().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "programs")]

_AGAINST = flags.DEFINE_string("against", "", "Another checkout, to compare plain local runs with.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Runs of each kind.")
_IDLE = flags.DEFINE_float("idle", 60.0, "Seconds of the idle time.")
_DELAY = flags.DEFINE_float("delay", 0.02, "Seconds of latency of each request.")
_MEGABYTES = flags.DEFINE_integer("megabytes", 64, "Size of the state.")
_STEPS, _EVERY = 210, 20

_PROGRAM = """
import json, sys, time
begun = time.perf_counter()
import tensorflow as tf
import looplib
from looplib.checkpoint.directory import resolve
imported = time.perf_counter()
place, steps, every, megabytes, idle = sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5])

class Heavy(looplib.Trainer):
    def __init__(self):
        self.state = [tf.Variable(tf.zeros([1 << 18, megabytes // 8])) for _ in range(8)]

    def dataset(self, context):
        return context.indices(1000)

    def step_fn(self, inputs):
        matrix = tf.random.stateless_normal([800, 800], seed=self.step_seed())
        small = tf.reduce_sum(tf.linalg.matmul(matrix, matrix)) * 1e-30
        for variable in self.state:
            variable.assign_add(tf.fill(variable.shape, small + 1e-3))
        return {"rows": looplib.total(tf.size(inputs))}

ended, told = {}, {}
def note(event):
    ended[event.step] = time.perf_counter()

controller = looplib.Controller(
    looplib.RunConfig(global_batch_size=8, steps_per_loop=1, loop="graph"), trainer=Heavy(), model_dir=resolve(place),
    writers=[], checkpoints=looplib.CheckpointPolicy(every_steps=every), actions=[note])
told["start"] = time.perf_counter() - imported
controller.train(steps)
usual = sorted(ended[step] - ended[step - 1] for step in ended if step - 1 in ended)[len(ended) // 2]
# The first save is written while the training waits.
told["stalls"] = [ended[step + 1] - ended[step - 1] - 2 * usual for step in range(2 * every, steps, every)]
saved = range(2 * every, steps - every, every)
told["extra"] = [ended[step + every - 1] - ended[step - 1] - every * usual for step in saved]
if idle:
    time.sleep(5)
    print("idle", flush=True)
    time.sleep(idle)
    print("busy", flush=True)
start = time.perf_counter()
controller.close()
told["close"] = time.perf_counter() - start
print(json.dumps(told))
"""


def measure(place, checkout, environment, idle=0.0, each=lambda line: None):
    """Runs the program; returns what it has told."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, place, str(_STEPS), str(_EVERY), str(_MEGABYTES.value), str(idle)],
        env={**os.environ, "PYTHONPATH": str(checkout), "TF_CPP_MIN_LOG_LEVEL": "3", **environment}, cwd=checkout,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in process.stdout:
        each(line.strip())
    if process.wait():
        raise RuntimeError(f"the program has ended with {process.returncode}")
    return json.loads(line)


def main(argv):
    """Measures, and prints a table."""
    del argv
    from clouds import BUCKET, Cloud
    from proxy import Proxy
    from servers import S3

    found = {}
    with tempfile.TemporaryDirectory() as folder, S3() as server, Proxy("127.0.0.1", server.port) as proxy:
        server.make_bucket(BUCKET)
        proxy.faults.delay = _DELAY.value
        cloud = Cloud(server, proxy, None, pathlib.Path(folder), "bench")
        environment = cloud.environment(PYTHONPATH=str(ROOT))
        kinds = {
            "local": (lambda n: f"{folder}/local{n}", ROOT, {}),
            "store": (lambda n: cloud.url(f"run{n}"), ROOT, environment),
        }
        if _AGAINST.value:
            kinds["local, before"] = (lambda n: f"{folder}/before{n}", pathlib.Path(_AGAINST.value), {})
        for number in range(_ROUNDS.value):
            for name, (place, checkout, variables) in kinds.items():
                told = measure(place(number), checkout, variables)
                print(
                    name,
                    {
                        key: value if isinstance(value, float) else statistics.median(value)
                        for key, value in told.items()
                    },
                    flush=True,
                )
                found.setdefault(name, []).append(told)
        print(f"\n{'':16}{'start s':>10}{'stall ms':>10}{'extra ms':>10}{'close s':>10}   (medians)")
        for name, runs in found.items():
            stall, extra = ([value for run in runs for value in run[key]] for key in ("stalls", "extra"))
            start, close = (statistics.median(run[key] for run in runs) for key in ("start", "close"))
            stall, extra = 1000 * statistics.median(stall), 1000 * statistics.median(extra)
            print(f"{name:16}{start:10.3f}{stall:10.1f}{extra:10.1f}{close:10.3f}")
        proxy.clear()
        proxy.faults.delay = _DELAY.value
        marks = {}
        measure(
            cloud.url("requests"),
            ROOT,
            environment,
            _IDLE.value,
            lambda line: marks.setdefault(line, len(proxy.requests)),
        )
        before, idle = proxy.requests[: marks["idle"]], proxy.requests[marks["idle"] : marks["busy"]]
        tell(
            "start, until the first upload",
            proxy,
            before[: next(i for i, one in enumerate(before) if one.method == "PUT" and ".lease" not in one.path)],
        )
        tell("training", proxy, before)
        markers = [one for one in before if one.method == "PUT" and one.path.endswith(".commit")]
        print(f"  of that for {len(markers)} saves that were copied, each:")
        for what, belongs in {
            "files and marker": lambda one: one.method == "PUT" and "/ckpt-" in one.path,
            "lease": lambda one: ".lease" in one.path,
            "reports": lambda one: one.method == "PUT" and "/ckpt-" not in one.path and ".lease" not in one.path,
            "deletions": lambda one: one.method == "DELETE",
        }.items():
            print(f"    {what}: {sum(map(belongs, before)) / max(1, len(markers)):.1f}")
        tell(f"{_IDLE.value:g} s idle", proxy, idle)
        tell("the end", proxy, proxy.requests[marks["busy"] :])
        count = len(proxy.requests)
        for command in ("status", "report"):
            output = [f"--output={folder}/page.html"] if command == "report" else []
            subprocess.run(
                [sys.executable, "-m", "looplib", command, cloud.url("requests"), *output], check=True, cwd=ROOT,
                env={**os.environ, **environment, "LOOPLIB_CACHE": f"{folder}/{command}"}, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            tell(f"{command}, on a machine that has nothing of it", proxy, proxy.requests[count:])
            count = len(proxy.requests)


def tell(what, proxy, requests):
    """Prints how many requests there were, by kind."""
    kinds = [request.kind for request in requests]
    print(f"{what}: {len(kinds)} requests", {kind: kinds.count(kind) for kind in sorted(set(kinds))}, flush=True)


if __name__ == "__main__":
    app.run(main)
