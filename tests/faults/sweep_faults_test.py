"""Sweeps under faults: whatever is in their directory, a kill, a full disk, another sweep: a sentence, and it resumes."""

import contextlib
import csv
import fcntl
import os
import pathlib
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from disk_test import mount
from sweep import sweep_test

from looplib.__main__ import main
from looplib.commands import check
from looplib.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, CheckError, FileError
from looplib.run.records import read_jsonl

DAMAGED = "sweep.db is damaged, or no database of a sweep"
# What a run of a trial does: a program that costs nothing to start. Its score is its rate.
PROGRAM = """
import fcntl, os, signal, subprocess, sys, time
given = dict(argument.lstrip("-").split("=", 1) for argument in sys.argv[1:])
folder, kind = given["model_dir"], given.get("kind", "plain")
os.makedirs(folder + "/checkpoints", exist_ok=True)
lock = open(folder + "/lock", "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit("looplib: error: it is in use (LockedError)")
open(folder + "/started", "a").write("x")
ended = []
signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
for step in range(int(given.get("steps", 0))):
    time.sleep(0.05)
    if ended:
        sys.exit(75)
if kind == "child" and not os.path.exists(folder + "/checkpoints/ckpt-1.commit"):
    open(folder + "/checkpoints/ckpt-1.commit", "w").close()
    child = subprocess.Popen(["sleep", "1000"])
    open(folder + "/child", "w").write(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)
try:
    with open(folder + "/metrics.jsonl", "w") as file:
        file.write('{"step": 1, "split": "eval", "score": %s}\\n' % given.get("value", given["rate"]))
        file.write(" " * int(given.get("more", 0)))
except OSError as error:
    sys.exit(f"looplib: error: it cannot be saved ({error.strerror})")
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of the program."""
    path = tmp_path_factory.mktemp("program") / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def of_a_sweep(folder: pathlib.Path, program: str, *arguments: str, options: tuple[str, ...] = ()) -> list[str]:
    """The arguments of `python -m looplib`."""
    own = ["sweep", f"--dir={folder}", "--metric=eval/score", "--goal=max", *options]
    return [*own, "--", sys.executable, "-IS", program, *(arguments or ("--rate=1,2",))]


@pytest.fixture(scope="module")
def begun(program: str, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The directory of a sweep that was ended after its first trial: the second is begun."""
    folder = tmp_path_factory.mktemp("begun") / "sweep"
    assert main(of_a_sweep(folder, program)) == EXIT_DONE
    database = sqlite3.connect(folder / "sweep.db")
    (trial,) = database.execute("SELECT trial_id FROM trials WHERE number = 1").fetchone()
    database.execute("UPDATE trials SET state = 'RUNNING' WHERE number = 1")
    database.execute(f"DELETE FROM trial_values WHERE trial_id = {trial}")
    database.execute(f"DELETE FROM trial_user_attributes WHERE trial_id = {trial} AND key != 'trial'")
    database.commit()
    database.close()
    shutil.rmtree(folder / "trial-0001")
    for name in ("results.csv", "results.txt", "trial-0001.log"):
        os.remove(folder / name)
    return folder


@pytest.fixture
def folder(begun: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of that directory."""
    return pathlib.Path(shutil.copytree(begun, tmp_path / "sweep"))


@pytest.fixture
def victim(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder outside, with a file in it."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_text("precious")
    return tmp_path / "victim"


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """The files below a folder."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def table(folder: pathlib.Path) -> list[tuple[str, ...]]:
    """Trial, state, score and rate of each row of results.csv."""
    with open(folder / "results.csv", newline="") as file:
        return [tuple(row[key] for key in ("trial", "state", "eval/score", "rate")) for row in csv.DictReader(file)]


WHOLE = [("trial-0001", "done", "2.0", "2"), ("trial-0000", "done", "1.0", "1")]


def cut(path: pathlib.Path, size: int) -> None:
    """Cuts a file short."""
    with open(path, "r+b") as file:
        file.truncate(size)


def scramble(path: pathlib.Path) -> None:
    """Overwrites pages in the middle of a file."""
    with open(path, "r+b") as file:
        file.seek(6000)
        file.write(bytes(range(256)) * 60)


def other_database(path: pathlib.Path) -> None:
    """Puts a database of another program there."""
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE people (name)")


def replaced(make: Callable[[pathlib.Path], None]) -> Callable[[pathlib.Path], None]:
    """Returns a function that replaces a file by what another function makes."""

    def replace(path: pathlib.Path) -> None:
        path.unlink(missing_ok=True)
        make(path)

    return replace


def link_outside(path: pathlib.Path) -> None:
    """Makes a link to a file outside."""
    path.symlink_to(path.parents[1] / "victim" / "file")


DATABASES = {
    "50 bytes": lambda path: cut(path, 50),
    "half": lambda path: cut(path, path.stat().st_size // 2),
    "scrambled": scramble,
    "text": replaced(lambda path: path.write_text("hello\n" * 100)),
    "of another program": other_database,
    "a directory": replaced(pathlib.Path.mkdir),
    "a FIFO": replaced(os.mkfifo),
    "a link": replaced(link_outside),
    "a link to nothing": replaced(lambda path: path.symlink_to(path.parents[1] / "victim" / "new")),
    "60 GB": lambda path: cut(path, 60 << 30),
}


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("case", DATABASES)
def test_a_damaged_database_is_a_sentence(
    case: str, folder: pathlib.Path, victim: pathlib.Path, program: str, capsys: pytest.CaptureFixture
) -> None:
    DATABASES[case](folder / "sweep.db")
    before = contents(victim)
    assert main(of_a_sweep(folder, program)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"looplib: error: {folder}/{DAMAGED} (") and "restore a copy, or use another --dir" in last
    assert contents(victim) == before and not (folder / "results.csv").exists()


@pytest.mark.parametrize("make", [pathlib.Path.unlink, lambda path: cut(path, 0)])
def test_runs_whose_database_is_gone_are_never_taken_for_those_of_a_new_sweep(
    make: Callable[[pathlib.Path], None], folder: pathlib.Path, program: str, capsys: pytest.CaptureFixture
) -> None:
    (folder / "sweep.db").rename(folder / "aside")
    shutil.copy(folder / "aside", folder / "sweep.db")
    make(folder / "sweep.db")
    assert main(of_a_sweep(folder, program)) == 2
    assert "has runs of another sweep, of which" in capsys.readouterr().err.splitlines()[-1]
    (folder / "aside").rename(folder / "sweep.db")
    assert main(of_a_sweep(folder, program)) == EXIT_DONE
    assert table(folder) == WHOLE


SECOND = "(SELECT trial_id FROM trials WHERE number = 1)"
ATTRIBUTE = f"INSERT INTO trial_user_attributes (trial_id, key, value_json) VALUES ({SECOND}, "
FORGED = {
    "plan: a list": ["UPDATE study_user_attributes SET value_json = '[1]'"],
    "plan: a number": ["UPDATE study_user_attributes SET value_json = '\"3\"'"],
    "plan: nested deep": [f"UPDATE study_user_attributes SET value_json = '\"{'[' * 100_000}\"'"],
    "plan: gone": ["DELETE FROM study_user_attributes"],
    "no study": ["DELETE FROM studies"],
    "seed: text": [f"{ATTRIBUTE}'value of seed 0', '\"x\"')"],
    "seed: NaN": [f"{ATTRIBUTE}'value of seed 0', 'NaN')"],
    "seed: 400 digits": [f"{ATTRIBUTE}'value of seed 0', '{'9' * 400}')"],
    "seed: no number": [f"{ATTRIBUTE}'value of seed x', '1.0')"],
    "seed: another": [f"{ATTRIBUTE}'value of seed 7', '1.0')"],
    "flag: --model_dir": [f"UPDATE trial_params SET param_name = '--model_dir' WHERE trial_id = {SECOND}"],
    "choice: 99": [f"UPDATE trial_params SET param_value = 99 WHERE trial_id = {SECOND}"],
    "choices: others": ["UPDATE trial_params SET distribution_json = replace(distribution_json, '\"1\"', '\"/etc\"')"],
    "value: text": ["UPDATE trial_values SET value = 'x'"],
    "value: gone": ["DELETE FROM trial_values"],
    "number: 77": ["UPDATE trials SET number = 77 WHERE number = 1"],
    "state: unknown": ["UPDATE trials SET state = 'LOST' WHERE number = 1"],
    "trial: text": [f"DELETE FROM trial_user_attributes WHERE trial_id = {SECOND}", f"{ATTRIBUTE}'trial', '\"x\"')"],
    "trial: another": [f"DELETE FROM trial_user_attributes WHERE trial_id = {SECOND}", f"{ATTRIBUTE}'trial', '7')"],
    "version: unknown": ["UPDATE alembic_version SET version_num = 'v9.9.9'"],
    "trials: without end": [
        "ALTER TABLE trials RENAME TO others",
        "CREATE VIEW trials AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x AS trial_id, x AS "
        "number, 1 AS study_id, 'RUNNING' AS state, NULL AS datetime_start, NULL AS datetime_complete FROM c",
    ],
    "trials: a million": [
        "WITH RECURSIVE c(x) AS (SELECT 2 UNION ALL SELECT x + 1 FROM c WHERE x < 1000000) "
        "INSERT INTO trials (number, study_id, state) SELECT x, 1, 'FAIL' FROM c"
    ],
}  # fmt: skip


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("case", FORGED)
def test_a_database_with_what_no_sweep_writes_is_a_sentence(
    case: str, folder: pathlib.Path, program: str, capsys: pytest.CaptureFixture
) -> None:
    with contextlib.closing(sqlite3.connect(folder / "sweep.db")) as database, database:
        for statement in FORGED[case]:
            database.execute(statement)
    assert main(of_a_sweep(folder, program)) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"looplib: error: {folder}/{DAMAGED} (")
    assert not (folder / "trial-0001").exists()


def test_a_plan_of_somebody_else_is_shown_short_and_without_commands_for_the_terminal(
    folder: pathlib.Path, program: str, capsys: pytest.CaptureFixture
) -> None:
    with contextlib.closing(sqlite3.connect(folder / "sweep.db")) as database, database:
        database.execute(
            "UPDATE study_user_attributes SET value_json = replace(value_json, '--rate', char(92, 92) || 'u001b[2J' || ?)",
            ["y" * 5000],
        )
    assert main(of_a_sweep(folder, program)) == 2
    error = capsys.readouterr().err
    assert "holds a sweep whose command is" in error and len(error) < 1500 and "\x1b" not in error


def journal_of_another_file(path: pathlib.Path) -> None:
    """Makes a journal that SQLite would roll back, and remove the file which it names."""
    name = os.fsencode(path.parents[1] / "victim" / "file")
    (path.parents[1] / "victim" / "file").write_bytes(b"/other-journal\0")
    pages = (path.parent / "sweep.db").stat().st_size // 4096
    header = bytes.fromhex("d9d505f920a163d7") + b"".join(
        number.to_bytes(4, "big") for number in (0, 1, pages, 512, 4096)
    )
    at = (2**30 // 4096 + 1).to_bytes(4, "big")
    path.write_bytes(
        header.ljust(512, b"\0") + at + name + len(name).to_bytes(4, "big") + sum(name).to_bytes(4, "big") + header[:8]
    )


BESIDE = {
    "lock: a link": ("sweep.lock", link_outside, "cannot be locked"),
    "lock: a FIFO": ("sweep.lock", os.mkfifo, "sweep.lock is not a file"),
    "lock: a directory": ("sweep.lock", pathlib.Path.mkdir, "cannot be locked"),
    "journal: a link": ("sweep.db-journal", link_outside, "sweep.db-journal is a symbolic link"),
    "journal: a FIFO": ("sweep.db-journal", os.mkfifo, "sweep.db-journal is a directory or a device"),
    "journal: of another file": ("sweep.db-journal", journal_of_another_file, "names a file to be removed"),
    "wal: a link": ("sweep.db-wal", link_outside, "sweep.db-wal is a symbolic link"),
    "trial: a link": ("trial-0001", lambda path: path.symlink_to(path.parents[1] / "victim"), "is a symbolic link"),
    "trial: a file": ("trial-0001", pathlib.Path.touch, "must be a directory"),
    "trial: a FIFO": ("trial-0001", os.mkfifo, "must be a directory"),
    "log: a link": ("trial-0001.log", link_outside, "trial-0001.log is a symbolic link"),
    "log: a FIFO": ("trial-0001.log", os.mkfifo, "trial-0001.log is a device"),
    "log: a directory": ("trial-0001.log", pathlib.Path.mkdir, "trial-0001.log is a symbolic link, a directory"),
    "results.csv: a directory": ("results.csv", pathlib.Path.mkdir, "then the same command resumes the sweep"),
}  # fmt: skip


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("case", BESIDE)
def test_what_stands_in_the_place_of_a_file_is_named_and_the_sweep_resumes_without_it(
    case: str, folder: pathlib.Path, victim: pathlib.Path, program: str, capsys: pytest.CaptureFixture
) -> None:
    name, make, sentence = BESIDE[case]
    replaced(make)(folder / name)
    before = contents(victim)
    assert main(of_a_sweep(folder, program)) == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]
    assert contents(victim) == before
    (folder / name).rename(folder.parent / "aside")
    assert main(of_a_sweep(folder, program)) == EXIT_DONE
    assert table(folder) == WHOLE


def test_links_and_fifos_in_place_of_results_and_garbage_beside_the_database_are_replaced(
    folder: pathlib.Path, victim: pathlib.Path, program: str
) -> None:
    link_outside(folder / "results.csv")
    os.mkfifo(folder / "results.txt")
    for name in ("sweep.db-journal", "sweep.db-wal", "sweep.db-shm"):
        (folder / name).write_bytes(bytes(range(256)) * 20)
    before = contents(victim)
    shutil.rmtree(folder / "trial-0000")  # of a trial that has ended
    assert main(of_a_sweep(folder, program)) == EXIT_DONE
    assert table(folder) == WHOLE and contents(victim) == before


METRICS = {
    '"text"': EXIT_FAILED, "null": EXIT_FAILED, "NaN": EXIT_FAILED, "9" * 400: EXIT_FAILED, "true": EXIT_FAILED,
    '{"a":[1]}': EXIT_FAILED, "-1e400": EXIT_FAILED, "1.7e308": EXIT_DONE, "7": EXIT_DONE,
}  # fmt: skip


@pytest.mark.slow
def test_a_metric_that_is_no_finite_number_fails_its_trial_alone(tmp_path: pathlib.Path, program: str) -> None:
    values = ",".join(METRICS)
    assert main(of_a_sweep(tmp_path / "all", program, "--rate=1", f"--value={values}")) == EXIT_DONE
    with open(tmp_path / "all" / "results.csv", newline="") as file:
        rows = {row["value"]: row for row in csv.DictReader(file)}
    for value, code in METRICS.items():
        assert rows[value]["state"] == ("done" if code == EXIT_DONE else "failed")
        assert code == EXIT_DONE or rows[value]["error"] == "eval/score is not a finite number at the end"


@pytest.mark.slow
def test_steps_that_are_none_stop_no_rule_that_compares_them(tmp_path: pathlib.Path, program: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(pathlib.Path(program).read_text().replace('"step": 1', '"step": %s').replace(
        'given.get("value", given["rate"])', '(given["step"], given["rate"])'))  # fmt: skip
    steps = f"--step=-1,{'9' * 400},{2**53},true"
    assert (
        main(of_a_sweep(tmp_path / "sweep", str(script), "--rate=1", steps, options=("--prune=median",))) == EXIT_DONE
    )
    with open(tmp_path / "sweep" / "results.csv", newline="") as file:
        assert sorted(row["state"] for row in csv.DictReader(file)) == ["done", "done", "failed", "failed"]


@pytest.mark.slow
@pytest.mark.parametrize("make", ["os.mkfifo(path)", "os.mkdir(path)", "os.symlink(folder + '/started', path)"])
def test_metrics_that_cannot_be_read_fail_their_trial_by_name(
    make: str, tmp_path: pathlib.Path, program: str, capsys: pytest.CaptureFixture
) -> None:
    script = tmp_path / "script.py"
    made = f"path = folder + '/metrics.jsonl'\nif given['rate'] == '1':\n    {make}\n    sys.exit(0)\ntry:\n"
    head, _, tail = pathlib.Path(program).read_text().rpartition("try:\n")
    script.write_text(head + made + tail)
    assert main(of_a_sweep(tmp_path / "sweep", str(script))) == EXIT_DONE
    sentence = f"trial-0000: failed: {tmp_path}/sweep/trial-0000/metrics.jsonl cannot be read"
    assert sentence in capsys.readouterr().out


def test_two_sweeps_in_one_directory_the_second_is_refused_and_harms_nothing(
    folder: pathlib.Path, program: str, capsys: pytest.CaptureFixture
) -> None:
    before = contents(folder)
    with open(folder / "sweep.lock", "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main(of_a_sweep(folder, program)) == 2
    assert f"the directory of a sweep {folder} is in use by process {os.getpid()}" in capsys.readouterr().err
    assert contents(folder) == before


def test_two_checks_in_one_directory_the_second_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_LAST_SECONDS", 0.3)
    with open(tmp_path / "run.log", "a") as held:
        first = subprocess.Popen(["sleep", "100"], stdout=held)
        fcntl.flock(held, fcntl.LOCK_EX)
    try:
        with pytest.raises(CheckError, match="run.log"):
            check.run(["true"], str(tmp_path / "run"), 10)
    finally:
        first.kill()
        first.wait()
    assert not check.run(["true"], str(tmp_path / "run"), 10).killed


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("make", [link_outside, os.mkfifo, pathlib.Path.mkdir])
def test_a_log_of_a_check_that_leads_elsewhere_is_refused(
    make: Callable[[pathlib.Path], None], tmp_path: pathlib.Path, victim: pathlib.Path
) -> None:
    (tmp_path / "check").mkdir()
    make(tmp_path / "check" / "run.log")
    with pytest.raises(FileError):
        check.run(["true"], str(tmp_path / "check" / "run"), 10)
    assert (victim / "file").read_text() == "precious"


def in_background(python: str, arguments: list[str], log: pathlib.Path) -> subprocess.Popen:
    """Starts `python -m looplib`."""
    with open(log, "ab") as file:
        return subprocess.Popen([python, "-m", "looplib", *arguments], stdout=file, stderr=file)


def is_held(path: pathlib.Path) -> bool:
    """Whether a process holds the lock on a file."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Waits for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_a_directory_that_is_moved_in_the_middle_ends_the_sweep_and_its_runs_and_it_resumes(
    tmp_path: pathlib.Path, program: str, python: str
) -> None:
    folder, log = tmp_path / "sweep", tmp_path / "log"
    arguments = of_a_sweep(folder, program, "--rate=1,2", "--steps=8000", options=("--parallel=2",))
    process = in_background(python, arguments, log)
    until(lambda: len(list(folder.glob("trial-*/started"))) == 2)
    folder.rename(tmp_path / "moved")
    assert process.wait(60) == 2
    last = log.read_text().splitlines()[-1]
    assert f"the directory of a sweep {folder} was moved or removed" in last and not folder.exists()
    assert "Traceback" not in log.read_text()
    (tmp_path / "moved").rename(folder)
    process = in_background(python, arguments, log)
    until(lambda: "that resume: 2" in log.read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == EXIT_PREEMPTED


def test_children_of_a_run_that_was_killed_hold_up_no_restart(
    tmp_path: pathlib.Path, program: str, capsys: pytest.CaptureFixture
) -> None:
    """The run is killed, and leaves a process that has its output; it is started again in the same sweep, and ends."""
    started = time.monotonic()
    assert main(of_a_sweep(tmp_path / "sweep", program, "--rate=1", "--kind=child,plain")) == EXIT_DONE
    assert time.monotonic() - started < 25  # not the grace of 30 s
    assert [row["state"] for row in sweep_test.table(tmp_path / "sweep")] == ["done"] * 2
    (child,) = (tmp_path / "sweep").glob("trial-*/child")
    status = pathlib.Path("/proc", child.read_text(), "status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_a_run_that_a_killed_sweep_has_left_is_waited_for_while_others_run(
    tmp_path: pathlib.Path, program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("looplib.sweep.jobs._PAUSE", 0.5)
    new = tmp_path / "sweep"
    arguments = of_a_sweep(new, program)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("looplib.sweep.sweep.Job.start", lambda job: 1 / 0)
        main(arguments)
    (new / "trial-0000").mkdir()
    with open(new / "trial-0000" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        left = subprocess.Popen(["sleep", "100"], pass_fds=[lock.fileno()])

    def end_it() -> None:
        until((new / "trial-0001" / "metrics.jsonl").exists)
        left.kill()

    watching = threading.Thread(target=end_it)
    watching.start()
    try:
        assert main(arguments) == EXIT_DONE
    finally:
        left.kill()
        left.wait()
        watching.join()
    assert "trial-0000: waits: looplib: error: it is in use (LockedError)" in capsys.readouterr().out
    assert table(new) == WHOLE


@pytest.fixture
def disk(tmp_path: pathlib.Path):
    """A small file system of its own, of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    result = mount(folder, "-t", "tmpfs", "-o", "size=4m", "tmpfs")
    if result.returncode:
        pytest.skip(f"a file system cannot be mounted here: {result.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: pathlib.Path, leave: int) -> pathlib.Path:
    """Fills a disk but for some bytes."""
    path = folder / "somebody_elses"
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        free = os.statvfs(folder)
        file.write(bytes(max(0, free.f_bavail * free.f_frsize - leave)))
    return path


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("moment", ["before the first start", "in a trial", "between two starts", "in the results"])
def test_a_full_disk_ends_a_sweep_with_a_sentence_and_it_resumes_once_there_is_space(
    moment: str, disk: pathlib.Path, begun: pathlib.Path, program: str, capsys: pytest.CaptureFixture
) -> None:
    folder, arguments = disk / "sweep", []
    if moment == "before the first start":
        other = fill(disk, 0)
    elif moment == "in a trial":
        other, arguments = fill(disk, 2 << 20), ["--rate=1,2", f"--more={8 << 20}"]
    elif moment == "between two starts":
        shutil.copytree(begun, folder)
        other = fill(disk, 0)
    else:
        shutil.copytree(begun, folder)
        assert main(of_a_sweep(folder, program)) == EXIT_DONE
        other = fill(disk, 0)
    capsys.readouterr()
    assert main(of_a_sweep(folder, program, *arguments)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("looplib: error: ") and ("No space left" in last or "disk is full" in last), last
    assert "the same command" in last
    other.unlink()
    if moment == "in a trial":  # what it writes never fits: a larger disk
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    assert main(of_a_sweep(folder, program, *arguments)) == EXIT_DONE
    assert table(folder) == WHOLE


@pytest.mark.slow
def test_runs_that_train_on_a_disk_that_gets_full_resume_once_there_is_space(
    disk: pathlib.Path, tmp_path: pathlib.Path, python: str
) -> None:
    options = ("--parallel=2",)
    of = ["--config.rate=0.1,0.4", "--config.pause=0.1", "--config.noise=0.01"]
    folder, log = disk / "sweep", tmp_path / "log"
    with open(log, "ab") as file:
        process = subprocess.Popen(
            sweep_test.command(python, folder, *options, of=of), env=sweep_test.ENVIRONMENT, stdout=file, stderr=file
        )
    until(lambda: list(folder.glob("trial-*/checkpoints/*.commit")) or process.poll() is not None)
    other = fill(disk, 0)
    assert process.wait(120) == 2, log.read_text()
    last = log.read_text().splitlines()[-1]
    assert last.startswith("looplib: error: ") and "run the same command" in last, last
    other.unlink()
    for place in (folder, tmp_path / "whole"):
        done = sweep_test.sweep(python, place, *options, of=of)
        assert done.returncode == EXIT_DONE, done.stderr
    assert (folder / "results.csv").read_bytes() == (tmp_path / "whole" / "results.csv").read_bytes()


def test_a_directory_that_cannot_be_written_is_a_sentence(
    folder: pathlib.Path, program: str, capsys: pytest.CaptureFixture
) -> None:
    if mount(folder, "--bind", str(folder)).returncode:
        pytest.skip("a directory cannot be made read-only here")
    try:
        assert mount(folder, "-o", "remount,bind,ro").returncode == 0
        assert main(of_a_sweep(folder, program)) == 2
        assert "Read-only file system" in capsys.readouterr().err.splitlines()[-1]
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_sweep_in_a_directory_with_signs_of_a_url_stays_there(tmp_path: pathlib.Path, program: str) -> None:
    folder = tmp_path / "a?b#c%41"
    assert main(of_a_sweep(folder, program)) == EXIT_DONE
    assert table(folder) == WHOLE and (folder / "sweep.db").stat().st_size and os.listdir(tmp_path) == [folder.name]


@pytest.mark.slow
def test_kills_of_the_sweep_at_any_moment_change_no_result(tmp_path: pathlib.Path, program: str, python: str) -> None:
    """Kills the sweep again and again, each time a little later, until one start has ended."""
    folder, log = tmp_path / "sweep", tmp_path / "log"
    folder.mkdir()
    (folder / f"sweep.db.{16 * '0'}.new").write_text("begun")  # as a kill leaves it while the database is made
    arguments = of_a_sweep(folder, program, "--rate=1,2,3", "--steps=8", options=("--parallel=2", "--seeds=2"))
    seconds = 0.3
    while True:
        process = in_background(python, arguments, log)
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert process.wait(seconds) == EXIT_DONE, log.read_text()
            break
        process.kill()
        process.wait()
        until(lambda: not is_held(folder / "sweep.lock"))  # the stand-in for Python dies before its process
        seconds += 0.35
    assert "Traceback" not in log.read_text()
    rates = [("trial-0000", "done", "3.0", "3"), ("trial-0001", "done", "2.0", "2"), ("trial-0002", "done", "1.0", "1")]
    assert sorted(row[1:] for row in table(folder)) == sorted(row[1:] for row in rates)
    assert main(of_a_sweep(tmp_path / "whole", program, "--rate=1,2,3", "--steps=8", options=("--seeds=2",))) == 0
    assert (tmp_path / "whole" / "results.csv").read_bytes() == (folder / "results.csv").read_bytes()
    assert len(read_jsonl(str(folder / "trial-0000" / "seed-1" / "metrics.jsonl"))) == 1
    assert not [path.name for path in folder.iterdir() if path.name.endswith(".new")]
