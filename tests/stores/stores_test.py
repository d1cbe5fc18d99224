"""The same on other stores: Google's emulator as a process, and fsspec's store in memory."""

import json
import os
import pathlib
import threading

import copied
import pytest
from servers import Gcs

from looplib.buckets import lease, mirror
from looplib.buckets.mirror import fetched
from looplib.errors import LockedError, StoreError
from looplib.run import commits
from looplib.stores import stores

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def gcs(monkeypatch):
    """The URL of a bucket in the emulator."""
    pytest.importorskip("gcsfs")
    pytest.importorskip("gcp_storage_emulator")
    with Gcs("bucket") as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "tests")
        yield "gs://bucket"


@pytest.fixture
def memory():
    """The URL of a folder in this process's memory."""
    yield "memory://tests"
    fsspec.filesystem("memory").rm("/tests", recursive=True)


@pytest.fixture(params=["memory", "gcs"])
def url(request, monkeypatch, tmp_path):
    monkeypatch.setattr(lease, "SECONDS", 1.0)
    monkeypatch.setenv("LOOPLIB_CACHE", str(tmp_path / "cache"))
    return request.getfixturevalue(request.param) + "/run"


def train(url, folder, steps):
    """Starts, saves so many steps, and ends; returns the step that it has started from."""
    opened = mirror.open_mirror(url, str(folder))
    opened.begin(True)
    place = os.path.join(opened.directory, "checkpoints")
    start = commits.newest_intact(place, tidy=True) if os.path.isdir(place) else None
    first = start.step if start else 0
    for step in range(first + 1, first + steps + 1):
        copied.report(opened.directory, step)
        copied.save(opened.directory, step)
        opened.check()
    opened.end()
    return first


def test_a_run_continues_in_another_directory_and_tools_find_it(url, tmp_path):
    assert train(url, tmp_path / "one", 2) == 0
    assert train(url, tmp_path / "two", 2) == 2
    assert train(url, tmp_path / "one", 1) == 4  # whose copy is older than the store
    files, root = fsspec.url_to_fs(url)
    assert [json.loads(line)["step"] for line in files.cat_file(f"{root}/metrics.jsonl").splitlines()] == [
        1,
        2,
        3,
        4,
        5,
    ]
    found = fetched(url)
    assert [done.step for done in commits.committed(commits.checkpoint_folder(found))] == [5, 4, 3, 2, 1]
    assert not any(map(commits.verify, commits.committed(commits.checkpoint_folder(found))))


def test_each_deletion_asks_whether_it_may(memory):
    store, asked = stores.Store(memory), []
    for name in "abc":
        store.write(name, b"")

    def ask():
        asked.append(sorted(store.listed()))
        if len(asked) == 2:
            raise LockedError("another process has taken the run")

    with pytest.raises(LockedError):
        store.delete("abc", 1.0, ask)
    assert asked == [["a", "b", "c"], ["b", "c"]] and sorted(store.listed()) == ["b", "c"]


def test_a_second_writer_is_refused_and_an_expired_one_is_followed(url, tmp_path, monkeypatch):
    first = lease.Lease(stores.Store(url))
    monkeypatch.setattr(lease, "_boot", lambda: "another machine")
    end = lease.time.monotonic() + 0.5

    def renew():
        while lease.time.monotonic() < end:
            first.renew(1.0)
            lease.time.sleep(0.05)

    thread = threading.Thread(target=renew)
    thread.start()
    with pytest.raises(LockedError, match="in use"):
        lease.Lease(stores.Store(url))
    thread.join()
    second = lease.Lease(stores.Store(url))  # waits for a second
    second.check(1.0, surely=True)
    with pytest.raises(LockedError, match="taken"):
        first.check(1.0, surely=True)


def test_of_a_folder_without_runs_nothing_is_fetched_but_files_of_weights(memory, tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPLIB_CACHE", str(tmp_path / "cache"))
    files = fsspec.filesystem("memory")
    photos = [f"{folder}/{number}.png" for folder in ("assets", "photos/a", "photos/b") for number in range(3)]
    for name in photos:
        files.pipe_file(f"/tests/data/{name}", b"photo")
    for more in ({}, {"checkpoints": False}, {"unchecked": True}):
        with pytest.raises(StoreError, match="memory://tests/data (is neither a run nor weights|holds no run)"):
            fetched(f"{memory}/data", **more)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    of_weights = ["saved_model.pb", "variables/variables.index", "variables/variables.data-00000-of-00001"]
    for name in of_weights:
        files.pipe_file(f"/tests/data/{name}", b"weights")
    found = pathlib.Path(fetched(f"{memory}/data"))
    names = {str(path.relative_to(found)) for path in found.rglob("*") if path.is_file()}
    assert names == {*of_weights, *(name for name in photos if name.startswith("assets"))}
    with pytest.raises(StoreError, match="holds no run, up to 3 folders deep"):
        fetched(f"{memory}/data", checkpoints=False)
    files.pipe_file("/tests/data/a/b/c/run.json", b"{}")
    assert os.path.exists(os.path.join(fetched(f"{memory}/data", checkpoints=False), "a/b/c/run.json"))


def test_one_run_that_no_directory_can_hold_hides_no_other(memory, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("LOOPLIB_CACHE", str(tmp_path / "cache"))
    for name in ("bad", "good"):
        fsspec.filesystem("memory").pipe_file(f"/tests/runs/{name}/run.json", b"{}")
    found = pathlib.Path(fetched(f"{memory}/runs", checkpoints=False))
    (found / "bad" / "run.json").unlink()
    (found / "bad" / "run.json").mkdir()  # as where the store has run.json and run.json/something
    for name in ("bad", "good"):
        fsspec.filesystem("memory").pipe_file(f"/tests/runs/{name}/run.json", b"[]")
    fetched(f"{memory}/runs", checkpoints=False)
    assert (found / "good" / "run.json").read_text() == "[]" and "runs/bad is left out" in caplog.text


def test_brackets_in_the_name_of_a_folder_are_no_pattern(memory):
    files, names = fsspec.filesystem("memory"), ["a-1", "a-2", "b[1]"]
    for name in names:
        files.pipe_file(f"/tests/d[1]/{name}", b"x")
    store = stores.Store(f"{memory}/d[1]")
    assert [*store.matching("a-[12]")] == ["a-1", "a-2"] and [*store.matching("*")] == names
    assert [*store.matching("b[[]1]")] == ["b[1]"] and [*store.matching("a-[1")] == []
    with pytest.raises(StoreError, match="beside other characters"):
        store.matching("**a")


def test_one_file_is_fetched_by_its_url(memory, tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPLIB_CACHE", str(tmp_path / "cache"))
    fsspec.filesystem("memory").pipe_file("/tests/weights.h5", b"weights")
    with open(fetched(f"{memory}/weights.h5"), "rb") as file:
        assert file.read() == b"weights"
    with pytest.raises(StoreError, match="nothing at"):
        fetched(f"{memory}/other.h5")
