"""A lack of this machine is no answer of the store, and no damage of the data."""

import contextlib
import errno
import json
import os
import resource
import shutil
import tempfile
import threading
import time

import copied
import pytest
from clouds import said, wait_for

from looplib.base import files
from looplib.buckets import lease, mirror, upload
from looplib.commands.intervals import DamagedError, verified_copy
from looplib.errors import FileError, StoreError
from looplib.run import commits
from looplib.stores import stores

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def url():
    """The URL of a run in this process's memory."""
    yield "memory://machine/run"
    fsspec.filesystem("memory").rm("/machine", recursive=True)


@contextlib.contextmanager
def no_space(most=4096):
    """Has the kernel refuse to write more than so many bytes into a file of this process, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_writer_without_temporary_files_learns_that_its_run_was_taken(cloud):
    place = cloud.folder / "temporary"
    place.mkdir()
    life = cloud.copied("--steps=1000", "--pause=0.1", environment={"TMPDIR": str(place)})
    wait_for(cloud.steps)
    shutil.rmtree(place)
    known = max(cloud.steps())
    wait_for(lambda: max(cloud.steps()) > known)  # it needs no temporary files
    (name,) = [name for name in cloud.names() if name.startswith(".lease")]
    cloud.write(".lease/00000002", json.dumps({**json.loads(cloud.read(name)), "token": "another"}).encode())
    assert life.code() == 1
    assert said(life)[-1]["error"] == "LockedError", life.output()


def test_a_disk_without_space_is_told_at_once_and_is_no_network(url, tmp_path):
    store = stores.Store(url)
    store.write("large", bytes(100_000))
    begun = time.monotonic()
    with no_space(), pytest.raises(FileError) as refusal:
        store.fetch("large", str(tmp_path / "large"))
    assert time.monotonic() - begun < 1.0
    assert str(tmp_path) in str(refusal.value) and os.strerror(errno.EFBIG) in str(refusal.value)
    assert "network" not in str(refusal.value) and "credentials" not in str(refusal.value)
    (tmp_path / "a file").touch()
    with pytest.raises(FileError, match="a file"):
        store.fetch("large", str(tmp_path / "a file" / "large"))
    with pytest.raises(FileNotFoundError):  # as the store says
        store.fetch("small", str(tmp_path / "small"))


def test_a_lease_is_renewed_once_this_machine_can_open_files_again(url, monkeypatch):
    monkeypatch.setattr(lease, "SECONDS", 0.6)
    held = lease.Lease(stores.Store(url))
    write, failing = stores.Store.write, threading.Event()

    def out_of_files(self, *arguments):
        if failing.is_set():
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        write(self, *arguments)

    monkeypatch.setattr(stores.Store, "write", out_of_files)
    ending = threading.Event()
    thread = threading.Thread(target=held.keep, args=(ending,))
    thread.start()
    failing.set()
    time.sleep(0.5)
    failing.clear()
    before = held._holder(1)
    wait_for(lambda: held._holder(1) != before, 5.0)
    ending.set()
    thread.join()


def test_an_error_that_nobody_expected_ends_the_run_after_a_save(url, tmp_path, monkeypatch):
    run = mirror.open_mirror(url, str(tmp_path / "run"))
    run.begin(True)

    def broken(self):
        raise ZeroDivisionError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(upload.Copier, "missing", broken)
        wait_for(lambda: not run._worker.is_alive())
    copied.save(run.directory, 1)
    run.check()  # before the save is committed
    with pytest.raises(StoreError, match="ZeroDivisionError: planted"):
        run.check(saved=True)
    run.end()  # which copies it
    assert "checkpoints/ckpt-1.commit" in stores.Store(url).listed()


def test_a_copy_without_space_calls_no_checkpoint_damaged(tmp_path):
    copied.save(str(tmp_path), 1, size=100_000)
    done = commits.newest(str(tmp_path / "checkpoints"))
    with tempfile.TemporaryDirectory() as folder:
        with no_space(), pytest.raises(FileError, match="TMPDIR"):
            verified_copy(done, folder)
        assert verified_copy(done, folder).step == 1
    with pytest.raises(FileError, match="TMPDIR"):
        verified_copy(done, folder)  # which is gone
    os.unlink(tmp_path / "checkpoints" / "ckpt-1.index")
    (tmp_path / "copy").mkdir()
    with pytest.raises(DamagedError):
        verified_copy(done, str(tmp_path / "copy"))


def test_an_error_is_of_this_machine_also_below_those_of_libraries():
    try:
        try:
            raise OSError(errno.ENOSPC, "no space")
        except OSError as error:
            raise RuntimeError("a library") from error
    except RuntimeError as error:
        assert files.fails_here(error)
    assert files.fails_here(MemoryError()) and files.fails_here(FileNotFoundError(2, "no", "/tmp/a/b"), "/tmp/a")
    for other in (FileNotFoundError("/tmp/a/b"), FileNotFoundError(2, "no", "/tmp/ab"), OSError(errno.EIO, "store")):
        assert not files.fails_here(other, "/tmp/a")
