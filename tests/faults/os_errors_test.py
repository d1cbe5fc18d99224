"""Errors of the file system, each made by the system itself: a sentence that has the path and what to do."""

import os
import subprocess
import sys
import time

import pytest
import tensorflow as tf
from disk_test import disk  # noqa: F401

from looplib.base import files
from looplib.base.messages import cure_of, with_cure
from looplib.errors import UsageError


def raised(do):
    with pytest.raises((OSError, tf.errors.OpError)) as found:
        do()
    return found.value


def check(error, path, cure):
    """That an error names a path, and that its cure is known."""
    assert str(path) in with_cure(error) and with_cure(error).endswith(f"; {cure}"), (error, with_cure(error))
    assert ".new" not in with_cure(error)  # a name that the user has not seen


def fill(disk):  # noqa: F811
    with pytest.raises(OSError), open(disk / "somebody_elses", "wb") as file:
        while True:
            file.write(bytes(4096))


def append(path):
    with files.appending(str(path)) as file:
        file.write(bytes(100_000))


def write_by_tensorflow(path):
    with tf.io.gfile.GFile(str(path), "w") as file:
        file.write("x" * 100_000)


def save(path):
    tf.train.Checkpoint(variable=tf.Variable(tf.zeros([100_000]))).write(str(path))


WRITERS = {
    "whole": lambda path: files.write_whole(str(path), bytes(100_000)),
    "appended": append,
    "by TensorFlow": write_by_tensorflow,
    "a checkpoint": save,
}


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk(writer, disk):  # noqa: F811
    fill(disk)
    check(raised(lambda: WRITERS[writer](disk / "file")), disk / "file", "free space on that disk")


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_read_only_file_system(writer, disk):  # noqa: F811
    if subprocess.run(["mount", "-o", "remount,ro", str(disk)]).returncode:
        pytest.skip("it cannot be mounted here")
    cure = "make that file system writable, or use another directory"
    check(raised(lambda: WRITERS[writer](disk / "file")), disk / "file", cure)


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize("writer", ["whole", "by TensorFlow"])
@pytest.mark.parametrize(
    "make, cure",
    [
        (lambda path: path.with_name("nowhere") / "x", "restore it, or check the path"),
        (lambda path: path.with_name("x" * 300), "use a shorter name"),
        (lambda path: (path.symlink_to(path), path / "x")[1], "remove the symbolic link there"),
        (lambda path: (path.write_text(""), path / "x")[1], "a part of that path is a file; move it away"),
        (lambda path: (path.mkdir(), path)[1], "move away what has that name"),
    ],
)
def test_a_path_that_cannot_be(make, cure, writer, tmp_path):
    path = make(tmp_path / "file")
    error = raised(lambda: WRITERS[writer](path))
    assert cure_of(error) == cure, error


def in_a_process(code, *arguments, **settings):
    """Returns the output of a process that runs some code with looplib's files, which takes no TensorFlow."""
    code = (
        f"import os, sys, resource\nfrom looplib.base import files\nfrom looplib.base.messages import with_cure\n{code}"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, **settings
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


TRY = """
try:
    {}
except OSError as error:
    os.write(1, with_cure(error).encode())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_a_directory_of_another_user(tmp_path):
    for parent in tmp_path.parents:
        parent.chmod(parent.stat().st_mode | 0o001)
    tmp_path.chmod(0o755)
    said = in_a_process(
        "os.setresuid(65534, 65534, 65534)" + TRY.format("files.write_whole(sys.argv[1], b'')"), tmp_path / "file"
    )
    assert said == f"[Errno 13] Permission denied: '{tmp_path}/file'; fix the permissions, or use another directory"


def test_too_many_open_files(tmp_path):
    limit = "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))"
    said = in_a_process(limit + TRY.format("files.write_whole(sys.argv[1], b'')"), tmp_path / "file")
    assert said == f"[Errno 24] Too many open files: '{tmp_path}/file'; raise the number of open files (ulimit -n)"


def test_a_file_that_may_not_grow(tmp_path):
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))"
    said = in_a_process(limit + TRY.format("files.write_whole(sys.argv[1], bytes(100))"), tmp_path / "file")
    assert said == f"[Errno 27] File too large: '{tmp_path}/file'; raise the largest size of a file (ulimit -f)"
    assert not list(tmp_path.iterdir())


def test_a_disk_that_cannot_be_read():
    def read():
        with open("/proc/self/mem", "rb", 0) as file:
            file.read(1)

    assert with_cure(raised(read)).endswith("Input/output error; check the disk, or the connection to it")


def test_a_program_that_runs(tmp_path):
    path = tmp_path / "sleep"
    path.write_bytes(open("/bin/sleep", "rb").read())
    path.chmod(0o755)
    process = subprocess.Popen([path, "60"])
    try:
        time.sleep(0.2)
        assert with_cure(raised(lambda: open(path, "ab"))).endswith(f"'{path}'; end the program that uses it")
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow(spread=2)
@pytest.mark.parametrize(
    "error",
    [
        ValueError("No space left on device"),
        tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor with shape [2, 3]"),
        tf.errors.NotFoundError(None, None, "Key x not found in checkpoint"),
        ConnectionRefusedError(111, "Connection refused"),
        UsageError("Permission denied"),
    ],
)
def test_what_is_no_error_of_a_file_system_has_no_cure(error):
    assert cure_of(error) == "" and with_cure(error, "do this").endswith("; do this")


def test_a_tool_whose_output_cannot_be_written_ends_with_a_sentence(python, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "split": "train", "loss": 1.0}\n')
    file = tmp_path / "file"
    file.write_text("")
    done = subprocess.run(
        [python, "-m", "looplib", "report", run, f"--output={file}/page.html"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"Not a directory: '{file}/page.html'; a part of that path is a file; move it away" in done.stderr
