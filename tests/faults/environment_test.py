"""The surroundings of a run: paths as users write them, the umask, secrets, the locale, another user's files, clocks, limits."""

import json
import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys
import tempfile

import pytest
import tensorflow as tf
from conftest import repetitions
from kill_test import saved_step
from ordered import ordered
from paths import PYTHONPATH

import looplib
from looplib import masks
from looplib.__main__ import main
from looplib.base import files
from looplib.checkpoint import directory as run_directory
from looplib.commands.compare import compare
from looplib.data.records import index
from looplib.errors import FileError, RunDirectoryError, UsageError
from looplib.run import commits
from looplib.weights import loading

ROOT = pathlib.Path(__file__).parents[2]
SHORT = ["--train_steps=10", "--eval_interval=10"]
NOBODY = 12345  # a user that no file of users has


def last_line(life):
    """The line that says what is wrong; a fork as another user may not remove the server's temporary files after it."""
    text = life.output().partition("Exception ignored in atexit")[0]
    return text.strip().splitlines()[-1]


def open_to_all(folder, mode=0o755):
    base = pathlib.Path(tempfile.gettempdir())
    for path in folder.parents:  # all of pytest's, which are one more where several processes run the tests
        if base in path.parents:
            path.chmod(0o755)
    folder.chmod(mode)
    return folder


@pytest.fixture(scope="module")
def trained(nursery, tmp_path_factory):
    """A run directory, which others may read."""
    folder = tmp_path_factory.mktemp("trained")
    open_to_all(folder)
    life = nursery.life(folder / "run", *SHORT)
    assert life.code() == 0, life.output()
    return folder / "run"


def tool(python, *arguments, **options):
    """The end of a tool: (exit code, what it has printed)."""
    done = subprocess.run(
        [python, "-m", "looplib", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=120, **options,
    )  # fmt: skip
    return done.returncode, done.stdout


# Paths.


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize(
    "path, environment, line",
    [
        ("~/run", {"HOME": ""}, "no such home directory; set HOME"),
        ("~/run", {"HOME": None}, "no such home directory; set HOME"),
        ("~nobody_of_that_name/run", {}, "no such home directory"),
        ("file://run", {}, "it looks like a URL"),
        ("a" * 256, {}, "a name in it more than 255"),
        ("a/" * 2000, {}, "it has more than 3,500 bytes"),
        ("file/run", {}, "Not a directory"),
        ("loop/run", {}, "Too many levels of symbolic links"),
        ("run\udcff", {}, "is not UTF-8, or the locale is not; set PYTHONUTF8=1"),
    ],
)
def test_a_path_that_cannot_be_is_refused_in_a_sentence_and_nothing_is_made(path, environment, line, nursery, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    open_to_all(tmp_path, 0o777)
    found = sorted(os.listdir(tmp_path))
    life = nursery.life(path, *SHORT, directory=tmp_path, environment=environment, user=NOBODY)
    assert life.code() == 1
    assert line in last_line(life) and last_line(life) == life.output().splitlines()[0]
    assert sorted(os.listdir(tmp_path)) == found


@pytest.mark.slow
def test_a_tilde_is_the_home_directory_in_every_flag_and_argument(nursery, python, tmp_path):
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    order = {"directory": work, "environment": {"HOME": str(home)}}
    for arguments in (
        ["--model_dir=~/run/", *SHORT],
        ["--model_dir=~/run", "--mode=predict", "--predictions=~/predicted/"],
        ["--model_dir=file:///" + str(home / "run"), "--mode=export", "--export=~/exported"],
        ["--model_dir=~/second", *SHORT, "--warm_start=~/run@8", "--config_file=~/run/config.yaml", "--mode=train"],
    ):
        life = nursery.life_of("faulty", *arguments, **order)
        assert life.code() == 0, life.output()
    assert "took 4 values from " + str(home / "run" / "checkpoints" / "ckpt-8") in life.output()
    options = {"cwd": work, "env": {**nursery.environment, "HOME": str(home)}}
    for arguments in (["status", "~/run"], ["inspect", "~/run/"], ["report", "~/run", "--output=~/page.html"]):
        code, output = tool(python, *arguments, **options)
        assert code == 0, output
    assert {"run", "predicted", "exported", "second", "page.html"} <= set(os.listdir(home)) and not os.listdir(work)


@pytest.mark.slow
def test_no_home_directory_is_no_cache_and_no_folder_named_tilde(nursery, monkeypatch, tmp_path):
    open_to_all(tmp_path, 0o777)
    environment = {"HOME": None, "LOOPLIB_CACHE": None, "XDG_CACHE_HOME": None}
    order = {"directory": tmp_path, "environment": environment, "user": NOBODY}
    life = nursery.life(tmp_path / "run", *SHORT, "--loop=auto", **order)
    assert life.code() == 0, life.output()
    assert os.listdir(tmp_path) == ["run"]
    for name in environment:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "")
    assert index.cache_directory() == os.devnull
    monkeypatch.setenv("LOOPLIB_CACHE", "relative/")
    assert index.cache_directory() == os.path.abspath("relative")


def test_paths_in_programs_are_resolved_alike(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for start in (looplib.warm_start, lambda objects, path: loading.continue_from(objects, tf.Variable(0), path)):
        with pytest.raises(UsageError, match=f"{tmp_path}/ckpt-1"):
            start({"model": tf.Module()}, "~/ckpt-1")
    with pytest.raises(FileError, match=f"model_dir '{tmp_path}/r\\?un' has"):
        run_directory.resolve(pathlib.Path("~/r?un"))
    with pytest.raises(RunDirectoryError, match=f"{tmp_path}/run"):
        looplib.list_checkpoints("~/run")
    with pytest.raises(FileError, match="x is 'gs://bucket/run//', .* URL"):
        files.resolve("gs://bucket/run//", "x")
    assert files.resolve("/a://b", "x") == "/a:/b"
    assert files.resolve("./~x", "x") == f"{tmp_path}/~x"
    for path in ("", "a\0b", b"bytes", 5, None):
        with pytest.raises(FileError, match="model_dir"):
            files.resolve(path, "model_dir")


# The umask, and secrets.


@pytest.mark.slow
@pytest.mark.parametrize("umask", [0o077, 0o027, 0o000], ids=oct)
def test_files_are_no_wider_than_the_umask_says(umask, nursery, tmp_path):
    folder = tmp_path / "run"
    for arguments in (
        ["--trackers=csv", *SHORT],
        *[["--mode=predict"], ["--mode=export"]] * (umask == 0o077),
    ):
        life = nursery.life(folder, *arguments, umask=umask)
        assert life.code() == 0, life.output()
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}
    assert len(found) > 20 and not {path: oct(mode) for path, mode in found.items() if mode & umask}
    assert not umask or all(mode & 0o600 == 0o600 for mode in found.values())


SECRETS = {"sk-QXZQ'JQX@9Z", 'QZ/22 ZX"JQ7', "9Q@ZX/5QJ'X7", "ZQX12J45", "QXJ-ZQX-Z9"}
PARTS = {secret[start : start + 4] for secret in SECRETS for start in range(len(secret) - 3)}
FLAGS = [
    "--config.api_key=sk-QXZQ'JQX@9Z", "--config.database.password", 'QZ/22 ZX"JQ7',
    "--config.database.url=pg://me:9Q@ZX/5QJ'X7@host/db?token=ZQX12J45",
]  # fmt: skip


def shown(text):
    return {part for part in PARTS if part in text}


@pytest.fixture(scope="module")
def secret(nursery, tmp_path_factory):
    """A run with secrets, with --all resumed; (run directory, output of all starts)."""
    folder, output = tmp_path_factory.mktemp("secret") / "run", ""
    for steps in repetitions([20], [10, 20]):
        life = nursery.life_of(
            "secretive", f"--model_dir={folder}", *FLAGS, f"--train_steps={steps}", "--trackers=csv",
            environment={"MY_VARIABLE": "QXJ-ZQX-Z9"},
        )  # fmt: skip
        assert life.code() == 0 and "got 14 12 43 characters" in life.output(), life.output()
        output += life.output()
    return folder, output


def test_secrets_are_in_no_file_of_a_run_and_on_no_console(secret):
    folder, output = secret
    assert not shown(output)
    for path in filter(pathlib.Path.is_file, folder.rglob("*")):
        assert not shown(path.read_bytes().decode(errors="replace")), path
    report = json.loads((folder / "run.json").read_text())
    masked = {"url": f"pg://{masks.MASK}@host/db?{masks.MASK}", "password": masks.MASK}
    assert report["config"] == {
        "api_key": masks.MASK, "max_tokens": 3, "pad_token": "<pad>", "database": masked, "fails": False
    }  # fmt: skip
    assert [start["changed"] for start in report["starts"]] == [{}, *repetitions([], [{"train_steps": [10, 20]}])]
    assert report["command"][2:5] == [f"--config.api_key={masks.MASK}", "--config.database.password", masks.MASK]


@pytest.mark.slow
def test_a_masked_configuration_is_refused_until_the_secrets_are_given_again(secret, nursery, python, tmp_path):
    folder, _ = secret
    life = nursery.life_of("secretive", f"--model_dir={tmp_path}/a", f"--config_file={folder}/config.yaml")
    assert life.code() == 1 and "a file has api_key as <masked>" in last_line(life)
    life = nursery.life_of("secretive", f"--model_dir={tmp_path}/a", f"--config_file={folder}/config.yaml", *FLAGS)
    assert life.code() == 0, life.output()
    for name in ("export", "rerun"):
        code, output = tool(python, name, folder)
        assert code == 2 and "has a secret, which run.json masks; repeat it by hand" in output


def test_an_error_with_secrets_in_it_is_masked(nursery, tmp_path):
    life = nursery.life_of("secretive", f"--model_dir={tmp_path}/run", *FLAGS, "--config.fails")
    assert life.code() == 1
    assert not shown(life.output())
    assert f"{masks.MASK} is wrong at pg://{masks.MASK}@host" in last_line(life)


def test_the_password_of_a_mistyped_option_is_masked(capsys):
    with pytest.raises(SystemExit):
        main(["sweep", "--dir=runs", "--metric=loss", "--storge=postgresql://me:hunter2hunter2@host/db"])
    printed = capsys.readouterr().err
    assert "hunter2" not in printed and masks.MASK in printed


# Python's options and the locale.


@pytest.mark.slow
def test_optimized_python_in_an_ascii_locale_trains_the_same(trained, tmp_path):
    settings = tmp_path / "settings.yaml"
    settings.write_text("letter: ünï→日本\n", encoding="utf-8")
    environment = {
        **os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii",
        "PYTHONPATH": PYTHONPATH, **ordered(example_checksums=True),
    }  # fmt: skip
    command = [sys.executable, "-O", "-m", "faulty", f"--model_dir={tmp_path}/run", *SHORT, f"--config_file={settings}"]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).isascii() and b"\\u65e5" in done.stdout
    found = compare(str(trained), str(tmp_path / "run"))
    assert found.tensors and all("日本" in each.where for each in found.differences), found.differences
    assert "ünï→日本" in (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")


def test_python_without_docstrings_is_refused_in_a_sentence(tmp_path):
    done = subprocess.run(
        [sys.executable, "-OO", "-m", "looplib", "inspect", tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.endswith(
        "cannot be imported under python -OO, which leaves out docstrings; use -O (DeviceError)\n"
    ), done.stderr


# Another user's files.


@pytest.mark.slow
@pytest.mark.parametrize("which", ["run directory", "files"])
def test_the_files_of_another_user_that_may_not_be_read_are_named(which, trained, nursery, tmp_path):
    open_to_all(tmp_path)
    run = shutil.copytree(trained, tmp_path / "run")
    for path in [run] if which == "run directory" else filter(pathlib.Path.is_file, run.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o077)
    before = {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]}
    for binary, *arguments in (
        ("faulty", f"--model_dir={run}", "--train_steps=20"),
        ("faulty", f"--model_dir={run}", "--mode=eval"),
        ("faulty", f"--model_dir={run}", "--mode=predict"),
        ("looplib", "report", run),
        ("looplib", "export", run),
        ("looplib", "rerun", run),
        *[("looplib", name, run) for name in ("inspect", "status")] * (which == "run directory"),
    ):
        life = nursery.life_of(binary, *map(str, arguments), user=NOBODY)
        assert life.code() == (1 if binary == "faulty" else 2), life.output()
        assert re.search("(cannot|may not) (be )?(read|written|used)", last_line(life)), (binary, arguments)
        assert "Traceback" not in life.output().partition("Exception ignored in atexit")[0], life.output()
    assert before == {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]}


def test_another_user_predicts_and_exports_from_a_readable_run_into_a_folder_of_its_own(trained, nursery, tmp_path):
    open_to_all(tmp_path, 0o777)
    for arguments in (["--mode=predict", f"--predictions={tmp_path}/p"], ["--mode=export", f"--export={tmp_path}/e"]):
        life = nursery.life(trained, *arguments, user=NOBODY)
        assert life.code() == 0, life.output()
    assert sorted(os.listdir(tmp_path)) == ["e", "p"]


# Clocks.


@pytest.mark.slow
@pytest.mark.parametrize("time", [1.0, 4102444800.0], ids=["1970", "2100"])
def test_a_run_of_a_clock_that_was_wrong_is_resumed_and_its_events_stay_in_order(
    time, trained, nursery, python, tmp_path
):
    run = shutil.copytree(trained, tmp_path / "run")
    moved = []
    for path in sorted(run.rglob("*tfevents*")):
        name = re.sub(r"\d+\.\d{6}", f"{time:017.6f}", path.name, count=1)
        moved.append(path.rename(path.with_name(name)))
    for path in run.rglob("*"):
        os.utime(path, (time, time))
    report = json.loads((run / "run.json").read_text())
    report["started"] = report["starts"][0]["started"] = "2100-01-01T00:00:00+00:00"
    (run / "run.json").write_text(json.dumps(report))
    life = nursery.life(run, "--train_steps=20", "--eval_interval=10")
    assert life.code() == 0, life.output()
    assert saved_step(run) == 20
    for folder in ("train", "eval"):
        first, second = sorted(path.name for path in (run / folder).iterdir())
        assert run / folder / first in moved and second != first
    code, output = tool(python, "inspect", run)
    assert code == 0 and not re.search(r"-\d+ s|-\d+ days", output)
    assert tool(python, "status", run)[0] == tool(python, "report", run)[0] == 0


JUMPS = """
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long jump(void) { /* a year ahead and a year behind, in turns of 0.05 s */
  struct timespec now;
  syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
  return now.tv_nsec / 50000000 % 2 ? 31536000L : -31536000L;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
  int result = syscall(SYS_clock_gettime, clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec += jump();
  return result;
}
int gettimeofday(struct timeval *now, void *zone) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  now->tv_sec = found.tv_sec, now->tv_usec = found.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *now) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (now) *now = found.tv_sec;
  return found.tv_sec;
}
"""


@pytest.mark.slow
def test_a_clock_that_jumps_by_years_while_a_run_trains_changes_no_duration_and_no_limit(trained, tmp_path):
    if not shutil.which("gcc"):
        pytest.skip("there is no gcc")
    (tmp_path / "jumps.c").write_text(JUMPS)
    library = tmp_path / "jumps.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "jumps.c"], check=True)
    environment = {"PYTHONPATH": PYTHONPATH, **ordered(example_checksums=True)}
    command = [sys.executable, "-m", "faulty", f"--model_dir={tmp_path}/run", *SHORT, "--config.slow_step=0.05"]
    done = subprocess.run(
        [*command, "--max_time=150"], env={**os.environ, **environment, "LD_PRELOAD": str(library)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seconds = json.loads((tmp_path / "run" / "run.json").read_text())["seconds"]
    assert 0 < seconds["train"] < 60 and seconds["wall"] < 300
    assert not compare(str(trained), str(tmp_path / "run")).differences


def test_the_time_of_a_marker_that_cannot_be_is_damage(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    done = commits.newest(str(run / "checkpoints"))
    for time in (10**400, -1.0, float("nan"), 1e300):
        commits.write_marker(commits.dataclasses.replace(done, time=time))
        found = commits.listing(str(run / "checkpoints"))[0]
        assert found.step == 10 and found.commit is None and "its time or its versions cannot be right" in found.reason


# Limits, and what a process may lack.


@pytest.mark.slow
def test_a_run_without_current_directory_and_standard_input_and_with_few_open_files_is_equal(
    trained, nursery, tmp_path
):
    work = tmp_path / "work"
    work.mkdir()
    order = {"directory": work, "gone": True, "no_input": True, "limits": {"NOFILE": 48}}
    life = nursery.life(tmp_path / "run", *SHORT, **order)
    assert life.code() == 0, life.output()
    assert not work.exists() and not compare(str(trained), str(tmp_path / "run")).differences
    work.mkdir()
    life = nursery.life("run", *SHORT, **order)
    assert life.code() == 1 and "the current directory was removed" in last_line(life)
    life = nursery.life_of("looplib", "rerun", str(tmp_path / "run"))
    assert life.code() == 2 and "its folder was removed; repeat it by hand" in last_line(life)


@pytest.mark.slow
def test_a_run_in_a_read_only_current_directory_is_equal(trained, nursery, tmp_path):
    work, run = tmp_path / "work", tmp_path / "run"
    work.mkdir(mode=0o555)
    run.mkdir()
    os.chown(run, NOBODY, NOBODY)
    open_to_all(tmp_path)
    life = nursery.life(run, *SHORT, directory=work, user=NOBODY)
    assert life.code() == 0, life.output()
    assert not compare(str(trained), str(run)).differences and not os.listdir(work)


def test_a_full_folder_of_temporary_files_is_named_before_the_steps_are_traced(nursery, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    result = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", disk], capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"a file system cannot be mounted here: {result.stderr.strip()}")
    try:
        life = nursery.life(tmp_path / "run", *SHORT, temporary=str(disk))
        assert life.code() == 1
        assert re.search(
            "temporary files cannot be written .*No space left.*; free space there, or set TMPDIR", last_line(life)
        )
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
    assert not (tmp_path / "run" / "checkpoints").exists()
