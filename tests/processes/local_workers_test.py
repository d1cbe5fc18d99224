"""Several workers on one machine: found, shown, ended and started again together. The commands are small scripts."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from looplib import __main__ as tools
from looplib.processes.group import hold_ports

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = str(ROOT / "tests" / "programs")

# What each script begins with: who it is, how often it was started, and where it notes things.
BEGIN = f"""
import json, os, pathlib, signal, sys, time
sys.path.insert(0, {PROGRAMS!r})
import without_tensorflow
from looplib.cluster.environment import resolve
me = resolve()
kind, index = me.task_type, me.task_index
path = pathlib.Path(__file__).parent / f"{{kind}}{{index}}"
lives = len(path.read_text().splitlines()) if path.exists() else 0
with path.open("a") as file:
    print(os.getpid(), time.time(), file=file)
"""


class Launched:
    """A launch of a script, in a process of its own, which imports no TensorFlow; its second signal counts after 2 s."""

    def __init__(self, folder, script, before="", **settings):
        self.folder = folder
        (folder / "script.py").write_text(BEGIN + script)
        settings = {"workers": 2, "grace": 20.0, "backoff": 0.2, **settings}
        code = (
            f"{before}import sys; sys.path[:0] = [{PROGRAMS!r}, {str(ROOT)!r}]; import without_tensorflow; "
            "from looplib.processes import group, local_workers; "
            "group._SERVERS_GRACE = group._LAST_GRACE = 2.0; "
            f"sys.exit(local_workers.launch([sys.executable, {str(folder / 'script.py')!r}], **{settings!r}))"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    def end(self, timeout=60):
        """Returns (exit code, lines of standard output, lines of standard error) and checks that nobody is left."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        finally:
            self.process.kill()
        for path in self.folder.iterdir():
            if path.name != "script.py":
                for pid, _ in self.lives(path.name):
                    assert not pathlib.Path(f"/proc/{pid}").exists(), f"{path.name}, process {pid}, still runs\n{err}"
        return self.process.returncode, out.splitlines(), err.splitlines()

    def lives(self, name):
        """The starts of a process: [(pid, time)]."""
        path = self.folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(pid), float(when)) for pid, when in map(str.split, lines)]

    def wait_for(self, names, timeout=30):
        """Waits until these have been started."""
        end = time.monotonic() + timeout
        while not all(self.lives(name) for name in names):
            assert time.monotonic() < end
            time.sleep(0.02)


def test_each_worker_knows_all_and_its_lines_bear_its_name(tmp_path):
    script = (
        "print(json.dumps([me.workers, me.index]))\nprint('to stderr', file=sys.stderr)\nprint('no newline', end='')"
    )
    code, out, err = Launched(tmp_path, script, workers=3).end()
    assert code == 0
    assert sorted(err) == [f"[worker {i}] to stderr" for i in range(3)]
    found = [re.fullmatch(r"\[worker (\d)\] (.*)", line).groups() for line in out]
    assert sorted(i for i, text in found if text == "no newline") == ["0", "1", "2"]
    said = {int(i): json.loads(text) for i, text in found if text != "no newline"}
    assert {i: index for i, (_, index) in said.items()} == {0: 0, 1: 1, 2: 2}
    lists = {tuple(workers) for workers, _ in said.values()}
    assert len(lists) == 1 and len(set(*lists)) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in next(iter(lists)))


@pytest.mark.slow
def test_when_one_fails_the_others_are_ended_after_the_grace(tmp_path):
    script = "time.sleep(0.3 if index == 1 else 1000)\nsys.exit(3)"
    code, _, err = Launched(tmp_path, script, workers=3, grace=1.0).end(30)
    assert code == 1
    assert err == [
        "looplib: error: worker 1 exited with code 3; worker 0, worker 2 did not exit within 1 s and had to be killed"
    ]


def test_a_frozen_worker_is_ended_too(tmp_path):
    script = "os.kill(os.getpid(), signal.SIGSTOP) if index == 1 else time.sleep(0.5)\nsys.exit(1)"
    code, _, err = Launched(tmp_path, script, grace=1000.0).end(30)
    assert code == 1
    assert err[-1].endswith("worker 0 exited with code 1; worker 1 was stopped and had to be killed")


@pytest.mark.slow
def test_all_are_started_again_with_growing_pauses_until_they_succeed(tmp_path):
    launched = Launched(tmp_path, "sys.exit(1 if lives < 2 and index == 1 else 0)", restarts=5, backoff=0.2)
    code, _, err = launched.end()
    assert code == 0
    assert [line for line in err if "restarting" in line] == [
        "looplib: restarting in 0.2 s from the newest checkpoint (restart 1 of 5)",
        "looplib: restarting in 0.4 s from the newest checkpoint (restart 2 of 5)",
    ]
    assert not any("error" in line for line in err)
    for name in ("worker0", "worker1"):
        times = [when for _, when in launched.lives(name)]
        assert len(times) == 3 and times[1] - times[0] > 0.2 and times[2] - times[1] > 0.4


SAVES = """
def save(*_):
    time.sleep(0.3)
    print("saved", flush=True)
    os._exit(75)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
signal.signal(signal.SIGHUP, save)
signal.signal(signal.SIGUSR1, save)
path.with_name(f"ready{index}").write_text(f"{os.getpid()} 0")
"""


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_goes_to_all_workers_which_save_and_are_not_started_again(number, tmp_path):
    launched = Launched(tmp_path, SAVES + "time.sleep(1000)", restarts=3)
    launched.wait_for(["ready0", "ready1"])
    launched.process.send_signal(number)
    code, out, err = launched.end(30)
    assert (code, err) == (75, [])
    assert sorted(out) == ["[worker 0] saved", "[worker 1] saved"]
    assert len(launched.lives("worker0")) == 1


def test_a_signal_while_they_start_counts_as_preemption_too(tmp_path):
    launched = Launched(tmp_path, "time.sleep(1000)", restarts=3)
    launched.wait_for(["worker0", "worker1"])
    launched.process.terminate()
    assert launched.end(30)[0] == 75


def test_ctrl_c_while_workers_import_prints_no_traceback(tmp_path):
    launched = Launched(tmp_path, "time.sleep(1000)", restarts=3)  # as long as an import
    launched.wait_for(["worker0", "worker1"])
    launched.process.send_signal(signal.SIGINT)
    assert launched.end(30) == (75, [], [])


def test_a_signal_ends_the_pause_before_a_restart(tmp_path):
    launched = Launched(tmp_path, "sys.exit(1)", restarts=3, backoff=1000.0)
    assert "exited with code 1" in launched.process.stderr.readline()
    time.sleep(0.2)
    launched.process.terminate()
    assert launched.end(10)[0] == 75


@pytest.mark.slow
def test_a_second_signal_ends_workers_that_do_not_listen(tmp_path):
    script = SAVES.replace("time.sleep(0.3)", "return") + "while True: time.sleep(1)"
    launched = Launched(tmp_path, script)
    launched.wait_for(["ready0", "ready1"])
    launched.process.terminate()
    time.sleep(0.5)
    assert launched.process.poll() is None
    launched.process.terminate()
    assert launched.end(30)[0] == 1


@pytest.mark.slow
def test_a_second_hangup_ends_no_worker_that_saves(tmp_path):
    launched = Launched(tmp_path, SAVES.replace("time.sleep(0.3)", "time.sleep(3)") + "time.sleep(1000)")
    launched.wait_for(["ready0", "ready1"])
    for _ in range(2):
        launched.process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
    code, out, _ = launched.end(30)
    assert code == 75 and sorted(out) == ["[worker 0] saved", "[worker 1] saved"]


@pytest.mark.slow
def test_a_hangup_that_the_launcher_was_started_to_ignore_stays_ignored(tmp_path):
    launched = Launched(
        tmp_path, "time.sleep(1.5)", before="import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
    )
    launched.wait_for(["worker0", "worker1"])
    launched.process.send_signal(signal.SIGHUP)
    assert launched.end(30)[0] == 0


@pytest.mark.slow
def test_workers_that_were_preempted_by_somebody_else_are_started_again(tmp_path):
    launched = Launched(tmp_path, "sys.exit(75 if lives == 0 else 0)", restarts=1)
    assert launched.end()[0] == 0
    assert Launched(tmp_path, "sys.exit(75)", restarts=1).end()[0] == 75


def test_a_cause_is_printed_once(tmp_path):
    script = """
if index != 1:
    time.sleep(0.5)
    print("looplib: error: worker 1 (127.0.0.1:1) failed: ValueError: bad; run again", file=sys.stderr)
else:
    print("looplib: error: ValueError: bad; fix it", file=sys.stderr)
sys.exit(1)
"""
    code, _, err = Launched(tmp_path, script, workers=3).end()
    assert code == 1
    assert err == [
        "[worker 1] looplib: error: ValueError: bad; fix it",
        "looplib: error: worker 0, worker 1, worker 2 exited with code 1",
    ]
    script = script.replace(
        'print("looplib: error: ValueError: bad; fix it", file=sys.stderr)', "os.kill(os.getpid(), 9)"
    )
    code, _, err = Launched(tmp_path, script, workers=3).end()
    assert [line.partition("] ")[2] for line in err[:-1]] == [
        "looplib: error: worker 1 (127.0.0.1:1) failed: ValueError: bad; run again"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("what", [".", "looplib-temporary-*", "looplib-temporary-*/tmp"])
def test_a_temporary_folder_that_somebody_removes_is_there_again_for_the_next_start(tmp_path, tmp_path_factory, what):
    place = tmp_path_factory.mktemp("temporary") / "folder"
    place.mkdir()
    remove = f"import glob, shutil; [shutil.rmtree(path) for path in glob.glob({str(place / what)!r})]; sys.exit(1)"
    script = f"if lives == 0 and index == 0:\n    {remove}\nif lives == 0:\n    time.sleep(1000)\n"
    launched = Launched(
        tmp_path, script + 'open(os.path.join(os.environ["TMPDIR"], f"here{index}"), "x")',
        before=f"import os; os.environ['TMPDIR'] = {str(place)!r}; ", restarts=1, grace=0.2, backoff=0.1,
    )  # fmt: skip
    code, _, err = launched.end()
    assert code == 0, err
    assert os.listdir(place) == []


WATCHED = """
from looplib.cluster.peers import WatchedPeers
peers = WatchedPeers(me, silence_limit=3.0)
if lives == 0 and index == 1:
    time.sleep(0.3)
    os.kill(os.getpid(), {signal})
if lives == 0:
    time.sleep(1000)
peers.leave()
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_workers_that_watch_each_other_end_by_themselves_and_succeed_after_a_restart(number, tmp_path):
    launched = Launched(tmp_path, WATCHED.format(signal=int(number)), workers=3, restarts=1, grace=2.0)
    code, out, err = launched.end()
    assert code == 0, err
    assert sorted(out) == [f"[worker {i}] done" for i in range(3)]
    causes = [line for line in err if "looplib: error: worker 1 (127.0.0.1:" in line]
    assert len(causes) == 1 and ("died" if number == signal.SIGKILL else "sent nothing for") in causes[0]
    assert [len(launched.lives(f"worker{i}")) for i in range(3)] == [2, 2, 2]


# With parameter servers.


@pytest.mark.slow
def test_a_chief_with_workers_and_parameter_servers_ends_them_all(tmp_path):
    script = (
        "print(kind, index, len(me.workers), len(me.parameter_servers))\ntime.sleep(1 if kind == 'chief' else 1000)"
    )
    code, out, _ = Launched(tmp_path, script, parameter_servers=2).end(30)
    assert code == 0
    assert sorted(out) == [
        "[chief] chief 0 2 2",
        *(f"[{k} {i}] {k} {i} 2 2" for k in ("ps", "worker") for i in range(2)),
    ]


@pytest.mark.slow
def test_a_worker_of_a_chief_is_started_again_alone(tmp_path):
    script = """
if kind == "worker" and index == 1 and lives < 2:
    sys.exit(1)
end = time.time() + 30
while kind != "chief" or not path.with_name("worker1").exists() or path.with_name("worker1").read_text().count("\\n") < 3:
    time.sleep(0.05)
    if kind == "chief" and time.time() > end:
        sys.exit("worker 1 was not started three times")
"""
    launched = Launched(tmp_path, script, parameter_servers=1, restarts=2)
    code, _, err = launched.end(60)
    assert code == 0, err
    assert [len(launched.lives(name)) for name in ("chief0", "worker0", "worker1", "ps0")] == [1, 1, 3, 1]
    assert len([line for line in err if "worker 1 exited with code 1; restarting" in line]) == 2


@pytest.mark.slow
def test_a_chief_that_fails_takes_all_into_the_restart(tmp_path):
    script = """
def as_often(name):
    other = path.with_name(name)
    return other.exists() and other.read_text().count("\\n") > lives
while kind != "chief" or not all(map(as_often, ("worker0", "worker1", "ps0"))):
    time.sleep(0.05)
sys.exit(lives == 0)
"""
    launched = Launched(tmp_path, script, parameter_servers=1, restarts=1)
    code, _, err = launched.end(60)
    assert code == 0, err
    assert [len(launched.lives(name)) for name in ("chief0", "worker0", "worker1", "ps0")] == [2, 2, 2, 2]


@pytest.mark.slow
def test_a_signal_goes_to_the_chief_first_which_saves_with_its_servers(tmp_path):
    script = SAVES.replace(
        "def save(*_):", "def save(*_):\n    assert kind == 'chief' or pathlib.Path(path.with_name('over')).exists()"
    )
    script = script.replace(
        "    os._exit(75)", "    path.with_name('over').write_text('') if kind == 'chief' else None\n    os._exit(75)"
    )
    launched = Launched(
        tmp_path, script.replace("ready{index}", "ready{kind}{index}") + "time.sleep(1000)", parameter_servers=1
    )
    launched.wait_for(["readychief0", "readyworker0", "readyworker1", "readyps0"])
    launched.process.terminate()
    (code, out, err) = launched.end(30)
    assert code == 75, err
    assert out[0] == "[chief] saved" and not any("AssertionError" in line for line in err)


# The ports.


def test_ports_that_are_held_are_given_to_nobody_else_and_can_be_served(tmp_path):
    with hold_ports(300) as ports, hold_ports(300) as others:
        assert len({*ports, *others}) == 600
        with socket.create_server(("127.0.0.1", ports[0])) as server:  # as TensorFlow does, with SO_REUSEADDR
            taken = set()
            for _ in range(300):  # connections of other programs, each with a local port
                with socket.create_connection(("127.0.0.1", ports[0])) as connection:
                    server.accept()[0].close()
                    taken.add(connection.getsockname()[1])
        assert not taken & {*ports, *others}


# The command line.


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--workers=2"], "the command is missing"),
        (["--workers=0", "--", "true"], "--workers is 0; expected at least 1"),
        (["--workers=2", "--restarts=-1", "--", "true"], "--restarts is -1; expected at least 0"),
        (["--workers=2", "--", "/no/such/program"], "'/no/such/program' cannot be started: No such file or directory"),
    ],
)
def test_what_cannot_be_right_is_refused_in_words(arguments, words, capfd):
    try:
        code = tools.main(["launch", *arguments])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert words in capfd.readouterr().err


def test_the_tool_runs_a_command_and_its_help_says_what_it_is_not(capfd):
    code = tools.main(
        ["launch", "--workers=2", "--", sys.executable, "-c", "import os; print(os.environ['TF_CONFIG'])"]
    )
    out = capfd.readouterr().out.splitlines()
    assert code == 0 and len(out) == 2
    assert {json.loads(line.partition("] ")[2])["task"]["index"] for line in out} == {0, 1}
    with pytest.raises(SystemExit):
        tools.main(["launch", "--help"])
    assert "not a cluster manager" in " ".join(capfd.readouterr().out.split())


def test_a_signal_without_a_name_and_a_line_without_an_end_are_shown(tmp_path):
    script = "sys.stdout.write('x' * (3 << 20)); sys.stdout.flush(); os.kill(os.getpid(), signal.SIGRTMIN + 1)"
    launched = Launched(tmp_path, script, workers=1)
    code, out, err = launched.end()
    assert code == 1 and f"was ended by signal {signal.SIGRTMIN + 1}" in err[-1]
    assert sum(line.count("x") for line in out) == 3 << 20 and max(map(len, out)) < 2 << 20


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("flag", ["--grace=nan", "--backoff=inf", "--grace=-1"])
def test_times_that_are_none_are_refused(flag, capsys):
    assert tools.main(["launch", "--workers=1", flag, "--", "true"]) == 2
    assert "expected seconds of at least 0" in capsys.readouterr().err
