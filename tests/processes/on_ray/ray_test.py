"""Workers on a Ray cluster, of several nodes on this machine. Each test with `cluster` needs Ray, which `dev` does not have:

python -m venv --system-site-packages /tmp/ray && /tmp/ray/bin/pip install 'ray>=2.40,<3'
/tmp/ray/bin/python -m pytest --all tests/processes/on_ray
"""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
from ordered import ordered
from paths import PYTHONPATH

from looplib import __main__ as tools
from looplib.commands.compare import compare
from looplib.errors import CommandError, PluginError
from looplib.processes import ray
from looplib.processes.ray import WorkerActor, WorkerPlace
from looplib.run import commits

ROOT = pathlib.Path(__file__).parents[3]


# What needs no Ray: what an actor does on its node, and what is refused.


def all_news(actor, timeout=30.0):
    """Returns the lines of a command, as text, and its code."""
    lines, end = [], time.monotonic() + timeout
    while time.monotonic() < end:
        news = actor.news(0.1)
        lines += [(is_error, line.decode()) for is_error, line in news.lines]
        if news.code is not None:
            return lines, news.code
    raise TimeoutError(lines)


def test_an_actor_starts_a_command_and_passes_on_its_lines_and_its_end(tmp_path):
    actor = WorkerActor("127.0.0.1")
    host, _, port = actor.address().partition(":")
    assert host == "127.0.0.1" and 0 < int(port) < 65536 and WorkerActor("::1").address().startswith("[::1]:")
    script = "echo $TF_CONFIG; pwd; echo wrong >&2; printf 'no end'; exit 3"
    actor.start(["sh", "-c", script], str(tmp_path), {"TF_CONFIG": "it"})
    lines, code = all_news(actor)
    assert code == 3 and sorted(lines) == sorted(
        [(False, "it"), (False, str(tmp_path)), (True, "wrong"), (False, "no end")]
    )


def test_an_actor_passes_signals_on_and_kills_what_does_not_listen(tmp_path):
    actor = WorkerActor("127.0.0.1")
    actor.signal(signal.SIGTERM)  # nothing runs yet
    actor.start(["sh", "-c", "trap 'echo saves; exit 75' TERM; echo ready; while :; do sleep 0.05; done"], "/", {})
    assert actor.news(30).lines == [(False, b"ready")]
    actor.signal(signal.SIGTERM)
    assert all_news(actor) == ([(False, "saves")], 75)
    deaf = WorkerActor("127.0.0.1")
    deaf.start(["sh", "-c", "trap '' TERM; sleep 1000 & echo ready; wait"], "/", {})
    deaf.news(30)
    deaf.kill()
    assert all_news(deaf)[1] == -signal.SIGKILL


def test_what_an_actor_cannot_start_is_refused_in_words():
    with pytest.raises(CommandError, match="on the node 127.0.0.1, '/no/such' cannot be started in .*: No such file"):
        WorkerActor("127.0.0.1").start(["/no/such"], "/", {})
    with pytest.raises(CommandError, match="has no directory /no/folder"):
        WorkerActor("127.0.0.1").start(["true"], "/no/folder", {})


def gone(pid, seconds=20.0):
    end = time.monotonic() + seconds
    while pathlib.Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--workers=2"], "the command is missing"),
        (["--workers=0", "--", "true"], "--workers is 0; expected at least 1"),
        (["--workers=2", "--restarts=-1", "--", "true"], "--restarts is -1; expected at least 0"),
        (["--workers=2", "--grace=nan", "--", "true"], "--grace is nan; expected seconds of at least 0"),
        (["--workers=2", "--cpus=-1", "--", "true"], "--cpus is -1; expected a number of at least 0"),
        (["--workers=2", "--cpus=0", "--", "true"], "--cpus and --gpus are 0"),
        (["--workers=2", "--resource=TPU=0", "--", "true"], "--resource has 'TPU'"),
        (["--workers=2", "--resource=TPU", "--", "true"], "expected NAME=NUMBER, such as TPU=4"),
        (["--workers=2", "--placement=NEAR", "--", "true"], "expected one of SPREAD, PACK"),
        (["--", "true"], "the following arguments are required: --workers"),
    ],
)
def test_what_cannot_be_right_is_refused_before_ray_is_asked(arguments, words, capfd):
    try:
        code = tools.main(["ray", *arguments])
    except SystemExit as error:  # of the parser
        code = error.code
    error = capfd.readouterr().err
    assert code == 2 and words in error and error.count("\n") == 1


def test_without_ray_the_package_to_install_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    with pytest.raises(PluginError, match=r"pip install 'looplib\[ray\]'"):
        ray.run(["true"], 1)


# On a cluster.


@pytest.fixture(scope="module")
def cluster():
    """Two nodes, with the driver's own, which has no room for workers."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:  # workers have the variables of their nodes
        patch.setenv("PYTHONPATH", PYTHONPATH)
        for name, path in ordered(example_checksums=True).items():
            patch.setenv(name, path)
        found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        for _ in range(2):
            found.add_node(num_cpus=2)
        yield found
        found.shutdown()


# What each script begins with: who it is, how often it was started, and where it notes things.
BEGIN = """
import json, os, pathlib, signal, sys, time
config = json.loads(os.environ["TF_CONFIG"])
index = config["task"]["index"]
path = pathlib.Path(__file__).parent / f"worker{index}"
lives = len(path.read_text().splitlines()) if path.exists() else 0
with path.open("a") as file:
    print(os.getpid(), os.environ["LOOPLIB_JOB_ID"], file=file)
"""


class Launched:
    """`python -m looplib ray` of a script, in a process of its own."""

    def __init__(self, cluster, folder, script, *options, workers=2):
        self.folder = folder
        (folder / "script.py").write_text(BEGIN + script)
        command = [sys.executable, str(folder / "script.py")]
        self.process = start(cluster, workers, command, "--backoff=0.2", *options)

    def end(self, timeout=120):
        """Returns (exit code, lines of standard output, lines of standard error), and checks that nobody is left."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        finally:
            self.process.kill()
        for path in self.folder.glob("worker*"):
            for pid, _ in self.lives(path.name):
                gone(pid)
        return self.process.returncode, out.splitlines(), err.splitlines()

    def lives(self, name):
        """The starts of a worker: [(pid, job id)]."""
        path = self.folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(pid), job) for pid, job in map(str.split, lines)]

    def wait_for(self, names, count=1, timeout=120):
        """Waits until these have been started so often."""
        end = time.monotonic() + timeout
        while not all(len(self.lives(name)) >= count for name in names):
            assert time.monotonic() < end and self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)


def start(cluster, workers, command, *options):
    return subprocess.Popen(
        [sys.executable, "-m", "looplib", "ray", f"--workers={workers}", f"--address={cluster.address}", *options, "--",
         *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_each_worker_knows_all_and_its_lines_bear_its_name(cluster, tmp_path):
    script = "print(os.getcwd(), json.dumps(config['cluster']))\nprint('to stderr', file=sys.stderr)"
    code, out, err = Launched(cluster, tmp_path, script, workers=3).end()
    assert code == 0 and sorted(err) == [f"[worker {i}] to stderr" for i in range(3)]
    told = {line.partition("] ")[2] for line in out}
    assert len(out) == 3 and len(told) == 1
    folder, _, text = told.pop().partition(" ")
    assert folder == os.getcwd() and len(set(json.loads(text)["worker"])) == 3


def test_a_failure_restarts_all_75_is_not_counted_and_the_restarts_have_a_limit(cluster, tmp_path):
    script = "codes = [1, 75, 75, 1, 0]\nsys.exit(codes[lives] if index == 1 else 0)"
    launched = Launched(cluster, tmp_path, script, "--restarts=2")
    code, _, err = launched.end()
    assert code == 0, err
    assert len({job for _, job in launched.lives("worker1")}) == len(launched.lives("worker0")) == 5
    told = "looplib: worker 1 exited with code"
    assert err == [
        f"{told} 1", "looplib: restarting in 0.2 s from the newest checkpoint (restart 1 of 2)",
        f"{told} 75; restarting in 0.2 s from the newest checkpoint (not counted: all was saved)",
        f"{told} 75; restarting in 0.4 s from the newest checkpoint (not counted: all was saved)",
        f"{told} 1", "looplib: restarting in 0.4 s from the newest checkpoint (restart 2 of 2)",
    ]  # fmt: skip
    (tmp_path / "limit").mkdir()
    code, _, err = Launched(cluster, tmp_path / "limit", "sys.exit(1)", "--restarts=1").end()
    assert (code, err[-1]) == (1, "looplib: error: worker 0, worker 1 exited with code 1")


def test_a_command_that_is_used_wrongly_is_not_started_again(cluster, tmp_path):
    code, _, err = Launched(cluster, tmp_path, "sys.exit(2)").end()
    text = "looplib: error: worker 0, worker 1 exited with code 2; the command was used wrongly (exit code 2)"
    assert (code, err) == (1, [text])
    (tmp_path / "flag").mkdir()
    script = "print('looplib: error: --loop is 7; expected auto (FlagError)', file=sys.stderr)\nsys.exit(1)"
    code, _, err = Launched(cluster, tmp_path / "flag", script).end()
    assert code == 1 and err[-1].endswith("exited with code 1; a restart would end with the same FlagError")


def test_a_signal_goes_to_all_workers_which_save_and_are_not_started_again(cluster, tmp_path):
    script = """
def save(*_):
    print("saved", flush=True)
    os._exit(75)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(1000)
"""
    launched = Launched(cluster, tmp_path, script)
    assert [launched.process.stdout.readline() for _ in range(2)]  # both are ready
    launched.process.terminate()
    code, out, err = launched.end()
    assert (code, err) == (75, []) and sorted(out) == ["[worker 0] saved", "[worker 1] saved"]
    assert len(launched.lives("worker0")) == 1


@pytest.mark.parametrize("victim", ["driver", "frozen"])
def test_nobody_is_left_when_the_driver_is_killed_or_a_worker_is_frozen(victim, cluster, tmp_path):
    script = "print('ready', flush=True)\ntime.sleep(1000 if lives == 0 and index == 0 else 0)\nsys.exit(lives == 0)"
    launched = Launched(cluster, tmp_path, script, "--grace=2")
    launched.wait_for(["worker0", "worker1"])
    if victim == "driver":
        launched.process.kill()
        launched.process.wait()
    else:
        os.kill(launched.lives("worker0")[0][0], signal.SIGSTOP)
    code, _, err = launched.end()
    if victim == "frozen":
        assert code == 0, err
        assert "worker 1 exited with code 1; worker 0 did not exit within 2 s and had to be killed" in err[0]


def test_what_has_no_place_is_said_in_words(cluster, tmp_path):
    code, _, err = Launched(cluster, tmp_path, "", "--cpus=3", "--wait=1").end()
    assert code == 2 and "2 of 2 workers have no place yet; each needs CPU 3, and the cluster has CPU 4" in err[-1]


def test_the_workers_of_a_node_that_goes_away_move_to_another(cluster, tmp_path):
    node = cluster.add_node(num_cpus=1, resources={"extra": 1})
    script = "print('ready', flush=True)\ntime.sleep(1000 if lives == 0 else 0)"
    launched = Launched(cluster, tmp_path, script, "--resource=extra=1", "--grace=1", workers=1)
    launched.wait_for(["worker0"])
    time.sleep(1)
    cluster.remove_node(node, allow_graceful=False)
    another = cluster.add_node(num_cpus=1, resources={"extra": 1})
    try:
        code, _, err = launched.end()
    finally:
        cluster.remove_node(another)
    assert code == 0 and "worker 0 was lost with its actor" in err[0], err


# A real training.

STEPS = 80
ARGUMENTS = [
    "-m", "faulty", "--mode=train", "--config.slow_step=0.02", f"--train_steps={STEPS}", "--config.state_mb=0.01",
    "--verbosity=0", "--strategy=multi_worker", "--checkpoint_interval=5", "--steps_per_loop=5",
]  # fmt: skip


def parents(pid):
    """The processes above one, nearest first."""
    while pid > 1:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
        pid = int(stat.rpartition(")")[2].split()[1])
        yield pid


def workers_of(run):
    """The processes of the command whose run directory this is."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if f"--model_dir={run}".encode() in (path / "cmdline").read_bytes().split(b"\0"):
                if (path / "environ").read_bytes().find(b"TF_CONFIG=") >= 0:
                    found.append(int(path.name))
        except OSError:
            continue
    return found


def saved_step(run):
    done = commits.newest(os.path.join(run, "checkpoints"))
    return done.step if done else 0


def strike(run, process, log):
    """Kills workers and actors of a run, in turns, at random moments, five times."""
    chance, kinds = random.Random(51), ["worker", "actor", "worker", "actor", "worker"]
    for kind in kinds:
        before = saved_step(run)
        while saved_step(run) < min(before + 5, STEPS - 10):
            if process.poll() is not None:
                return
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.3))
        alive = workers_of(run)
        if not alive or saved_step(run) >= STEPS - 10:
            return
        victim = chance.choice(alive)
        log.append((kind, saved_step(run)))
        os.kill(victim if kind == "worker" else next(parents(victim)), signal.SIGKILL)
        while victim in workers_of(run):
            time.sleep(0.02)


@pytest.mark.slow
def test_a_run_whose_workers_and_actors_are_killed_ends_with_the_weights_of_an_undisturbed_one(cluster, tmp_path):
    for name in ("whole", "struck"):
        run, log = tmp_path / name, []
        process = start(cluster, 2, [sys.executable, *ARGUMENTS, f"--model_dir={run}"], "--restarts=8", "--backoff=0.2")
        if name == "struck":
            threading.Thread(target=strike, args=(run, process, log), daemon=True).start()
        out, err = process.communicate(timeout=900)
        assert process.returncode == 0, out + err
    assert {kind for kind, _ in log} == {"worker", "actor"} and len(log) >= 3, (log, err)
    assert err.count("restarting in") == len(log) and "was ended by SIGKILL" in err and "lost with its actor" in err
    result = compare(tmp_path / "whole", tmp_path / "struck")
    assert result.differences == [] and result.examples


def test_a_place_asks_for_what_a_worker_needs():
    assert WorkerPlace(cpus=4, gpus=1, resources={"TPU": 2}).bundle == {"CPU": 4, "GPU": 1, "TPU": 2}
    assert WorkerPlace(cpus=0, gpus=0.5).bundle == {"GPU": 0.5}
