"""Child processes: they end with the one that started them, whatever it is killed by; and orders that they read."""

import dataclasses
import fcntl
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from looplib.base import orders
from looplib.base.orders import Order, ReplayOrder
from looplib.errors import CommandError, FlagError
from looplib.processes import child as module
from looplib.processes.child import Child, CommandLine, TemporaryFolder, last_lines, output_of

ROOT = pathlib.Path(__file__).parents[2]
PYTHON = [sys.executable, "-c"]


def is_there(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def number_in(path):
    """The process id that somebody has written into a file, once it is there."""
    return wait_for(lambda: path.exists() and path.read_text().endswith("\n") and int(path.read_text()))


def running(folder):
    """The processes that have noted themselves in a folder, and that are there."""
    return [path.name for path in folder.iterdir() if path.name.isdigit() and is_there(path.name)]


def held(folder):
    """The temporary folders in a folder that a process still holds."""
    found = []
    for lock in folder.glob("*/looplib.lock"):
        with lock.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(lock.parent.name)
    return found


# A parent that starts one child, which notes itself and sleeps; it prints once the child is there.
PARENT = f"""
import os, pathlib, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from looplib.processes import child as module
from looplib.processes.child import Child, CommandLine
if len(sys.argv) > 4:  # as on macOS, where the kernel does not end a child
    module._LIBC = None
folder = pathlib.Path(sys.argv[1])
code = sys.argv[2]
with Child(CommandLine([sys.executable, "-c", code, str(folder)]), ends_by=signal.Signals(int(sys.argv[3]))) as child:
    child.wait()
"""
NOTES = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def note(pid):
    (folder / f"{pid}").touch()
def save(*_):
    (folder / "saved").touch()
    os._exit(75)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, lambda *_: (folder / "interrupted").touch())
"""
SLEEPS = NOTES + "note(os.getpid())\ntime.sleep(1000)\n"


@pytest.mark.parametrize("way", [[], ["watched"]])
@pytest.mark.parametrize("ends_by", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_ends_when_its_parent_is_killed_also_a_stopped_one_by_sigkill(ends_by, way, tmp_path):
    parent = subprocess.Popen([*PYTHON, PARENT, str(tmp_path), SLEEPS, str(int(ends_by)), *way])
    (pid,) = wait_for(lambda: running(tmp_path))
    if ends_by == signal.SIGKILL:
        os.kill(int(pid), signal.SIGSTOP)
    parent.kill()
    parent.wait()
    wait_for(lambda: not running(tmp_path))
    assert (tmp_path / "saved").exists() == (ends_by == signal.SIGTERM)


def test_a_child_that_was_waited_for_is_watched_no_longer(monkeypatch):
    monkeypatch.setattr(module, "_LIBC", None)
    with Child(CommandLine([*PYTHON, "import time; time.sleep(0.5)"])) as child:
        watcher = child._watcher
        assert watcher.poll() is None and child.wait(30) == 0
        assert watcher.poll() == 0


def test_a_ctrl_c_in_the_terminal_reaches_a_child_once_as_a_request_to_save(tmp_path):
    """It goes to the group of the parent, which the child is not in."""
    command = [*PYTHON, PARENT, str(tmp_path), SLEEPS, str(int(signal.SIGTERM))]
    parent = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    wait_for(lambda: running(tmp_path))
    os.killpg(parent.pid, signal.SIGINT)
    parent.wait(30)
    assert not running(tmp_path) and (tmp_path / "saved").exists() and not (tmp_path / "interrupted").exists()


def test_what_a_failed_or_killed_child_has_started_ends_with_it(tmp_path):
    forks = NOTES + "if os.fork() == 0:\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\nnote(os.getpid())\n"
    for number, (ending, end) in enumerate(
        [("time.sleep(1000)", Child.kill), ("time.sleep(1)\nsys.exit(3)", Child.wait)]
    ):
        (folder := tmp_path / f"{number}").mkdir()
        rest = "while len(list(folder.iterdir())) < 2 or os.getpgid(0) != os.getpid():\n    time.sleep(0.01)\n"
        with Child(CommandLine([*PYTHON, forks + rest + ending, str(folder)])) as child:
            wait_for(lambda: len(running(folder)) == 2)
            end(child)
        wait_for(lambda: not running(folder))


def test_a_child_that_does_not_end_when_it_is_asked_is_killed(tmp_path):
    deaf = NOTES + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nnote(os.getpid())\ntime.sleep(1000)\n"
    with Child(CommandLine([*PYTHON, deaf, str(tmp_path)])) as child:
        wait_for(lambda: running(tmp_path))
        child.stop(grace=0.2)
        assert child.poll() == -signal.SIGKILL


def test_what_cannot_be_started_is_a_sentence():
    with pytest.raises(
        CommandError, match="'/no/such' cannot be started: No such file .*; write the command as you type"
    ):
        Child(CommandLine(["/no/such"]))
    with pytest.raises(
        CommandError, match="cannot be started in /no/such: No such file .*; check the program and that"
    ):
        Child(CommandLine(["true"], "/no/such"))
    with pytest.raises(CommandError, match="cannot be started"):
        Child(CommandLine(["tr\0ue"]))


def test_output_is_read_within_limits_of_time_and_size():
    command = lambda code: CommandLine([*PYTHON, code])
    done = output_of(command("import sys; print('out'); sys.exit('why')"), {}, 60.0, 1000)
    assert (done.code, done.output, done.error) == (1, b"out\n", "why")
    assert len(output_of(command("while True: print('x' * 1000)"), {}, 60.0, 5000).output) == 5000
    began = time.monotonic()
    assert output_of(command("import time; print(1, flush=True); time.sleep(1000)"), {}, 1.0, 1000).code is None
    assert time.monotonic() - began < 30


def test_flags_are_taken_out_of_a_command_with_their_values():
    command = CommandLine(["python", "a.py", "--a", "1", "--b=2", "-a=3", "--c"], "/tmp")
    assert command.without("a").adding("--d").arguments == ["python", "a.py", "--b=2", "--c", "--d"]
    assert str(CommandLine(["a b", "c"], "/tmp")) == "'a b' c (in /tmp)"


def test_the_last_lines_of_a_log_are_bounded(tmp_path):
    (tmp_path / "log").write_text("x" * 100_000 + "\n" + "".join(f"{n}\n" for n in range(50)))
    assert last_lines(str(tmp_path / "log"), 3) == ["47", "48", "49"]
    assert last_lines(str(tmp_path / "none")) == []


# Kills of a launch.

LAUNCH = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from looplib.processes import local_workers
sys.exit(local_workers.launch([sys.executable, *sys.argv[1:]], 2, restarts=1000, backoff=0.02, min_workers=1))
"""
# A worker notes itself, leaves a temporary file, and ends after a random time, so that a kill meets each part of a life.
WORKER = """
import json, os, pathlib, random, sys, tempfile, time
(pathlib.Path(sys.argv[1]) / f"{os.getpid()}").touch()
tempfile.mkstemp()
time.sleep(random.random() * 0.4)
sys.exit(random.choice([1, 75]))
"""


def test_a_launch_that_is_killed_at_any_moment_leaves_no_process_and_its_folder_to_the_next(tmp_path):
    chance, places = random.Random(0), [tmp_path / "temporary", tmp_path / "noted"]
    for place in places:
        place.mkdir()
    temporary, noted = places
    (temporary / "looplib-temporary-other").mkdir()  # without a lock
    (temporary / "looplib-temporary-link").symlink_to(noted)
    environment = {**os.environ, "TMPDIR": str(temporary)}
    until_a_worker = 0.0  # seconds
    for _ in range(11):
        command, began = [*PYTHON, LAUNCH, "-c", WORKER, str(noted)], time.monotonic()
        launched = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if not until_a_worker:
            wait_for(lambda: any(noted.iterdir()))
            until_a_worker = time.monotonic() - began
        else:
            time.sleep(chance.random() * 2 * until_a_worker)
        launched.kill()
        launched.wait()
        wait_for(lambda: not running(noted) and not held(temporary))  # also by workers that have not noted themselves
        assert len(list(temporary.glob("looplib-temporary-*"))) <= 3  # with that of the newest
    done = subprocess.run([*PYTHON, LAUNCH, "-c", "pass"], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    left = sorted(path.name for path in temporary.glob("looplib-temporary-*"))
    assert left == ["looplib-temporary-link", "looplib-temporary-other"]


def test_a_temporary_folder_stays_while_a_child_that_holds_it_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with (
        TemporaryFolder() as folder,
        Child(CommandLine([*PYTHON, "import time; time.sleep(1000)"]), held=(folder.lock,)),
    ):
        os.close(folder.lock)  # as if this process had been killed
        with TemporaryFolder():
            assert os.path.exists(folder.path)
        folder.lock = os.open(os.devnull, os.O_RDONLY)


# Orders.


def test_an_order_is_read_as_it_was_given(tmp_path, monkeypatch):
    order = Order(
        example_checksums=True, until=7, note="two", replay=ReplayOrder("/run", 3, batch_size=8, save="a.npz")
    )
    path = str(tmp_path / "order.json")
    given = order.give(path)
    assert os.stat(path).st_mode & 0o777 == 0o600
    monkeypatch.setenv(*next(iter(given.items())))
    assert orders.current() == order
    monkeypatch.delenv(orders.VARIABLE)
    assert orders.current() == Order()
    with pytest.raises(FileExistsError):
        order.give(path)


WRONG = {
    "no file": lambda path: path.unlink(),
    "a link": lambda path: (path.rename(path.with_name("other")), path.symlink_to(path.with_name("other"))),
    "others may read it": lambda path: path.chmod(0o640),
    "no JSON": lambda path: path.write_text("until 7"),
    "another kind": lambda path: path.write_text('{"until": "7"}'),
    "no part of an order": lambda path: path.write_text('{"untill": 7}'),
    "a list": lambda path: path.write_text("[7]"),
    "nested": lambda path: path.write_text("[" * 200),
    "long": lambda path: path.write_text(json.dumps({"note": "x" * 100_000})),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_is_no_order_of_this_user_is_refused(what, tmp_path, monkeypatch):
    path = tmp_path / "order.json"
    monkeypatch.setenv(*next(iter(Order(until=7).give(str(path)).items())))
    WRONG[what](path)
    with pytest.raises(FlagError, match="LOOPLIB_ORDER is .*order.json.*unset the variable"):
        orders.current()


def test_an_order_may_leave_out_what_it_does_not_order_and_is_given_again_to_a_process_that_replaces_this_one(
    tmp_path, monkeypatch
):
    path = tmp_path / "order.json"
    path.write_text('{"example_checksums": true}')
    path.chmod(0o600)
    monkeypatch.setenv(orders.VARIABLE, str(path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert orders.current() == Order(example_checksums=True)
    for count in (1, 2):
        orders.renew(dataclasses.replace(orders.current(), tpu_starts=count))
        assert orders.current() == Order(example_checksums=True, tpu_starts=count)
    assert len(list(tmp_path.iterdir())) == 2  # the first, which is somebody else's, and the newest
