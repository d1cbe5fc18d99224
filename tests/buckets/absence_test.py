"""A file that is not here is no order to delete it: a cleaner, a lost disk, a damaged file; what the run deletes is one."""

import json
import os
import shutil

import copied
import pytest
from clouds import said, wait_for

from looplib.base import files
from looplib.buckets import mirror
from looplib.buckets.note import LocalCopy
from looplib.errors import LockedError, RunDirectoryError, StoreError
from looplib.run import commits, lock

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def url():
    """The URL of a run in this process's memory."""
    yield "memory://absence/run"
    fsspec.filesystem("memory").rm("/absence", recursive=True)


def opened(url, folder):
    """A start, and the folder of its checkpoints."""
    found = mirror.open_mirror(url, str(folder))
    found.begin(True)
    return found, os.path.join(found.directory, "checkpoints")


def there(url):
    """{name: content} of what the store has of a run, but its leases."""
    driver, root = fsspec.url_to_fs(url)
    found = {path.removeprefix(f"{root}/"): driver.cat_file(path) for path in driver.find(root)}
    return {name: content for name, content in found.items() if not name.startswith(".lease/")}


def steps(url):
    """The steps of the markers that are whole: fsspec shows a file in memory before it has its content."""
    markers = [name for name, content in there(url).items() if ".commit" in name and content]
    return sorted(int(name[len("checkpoints/ckpt-") : -len(".commit")]) for name in markers)


def train(found, first, last, **more):
    for step in range(first, last + 1):
        copied.report(found.directory, step)
        copied.save(found.directory, step, **more)


def test_a_checkpoint_that_somebody_removes_stays_in_the_store_and_one_that_the_run_deletes_does_not(url, tmp_path):
    run, place = opened(url, tmp_path / "run")
    train(run, 1, 5)
    run.end()
    run, place = opened(url, tmp_path / "run")
    for name in [name for name in os.listdir(place) if name.startswith(("ckpt-1.", "ckpt-2."))]:
        os.unlink(os.path.join(place, name))
    train(run, 6, 6)
    commits.remove(commits.read_marker(os.path.join(place, "ckpt-3")))
    run.end()
    assert steps(url) == [1, 2, 4, 5, 6]
    assert not [name for name in there(url) if "ckpt-3." in name]


def test_what_was_deleted_before_a_kill_is_deleted_by_the_next_start_and_not_fetched_again(url, tmp_path):
    run, place = opened(url, tmp_path / "run")
    train(run, 1, 4)
    run.end()
    commits.remove(commits.read_marker(os.path.join(place, "ckpt-2")))  # and it is killed before the store knows
    assert steps(url) == [1, 2, 3, 4]
    run, place = opened(url, tmp_path / "run")
    train(run, 5, 5)
    run.end()
    assert steps(url) == [1, 3, 4, 5] and not os.path.exists(os.path.join(place, "ckpt-2.commit"))


def test_a_checkpoint_that_is_saved_again_is_not_deleted_when_its_files_vanish_later(url, tmp_path):
    run, place = opened(url, tmp_path / "run")
    train(run, 1, 3)
    run.end()
    for step in (3, 2):
        commits.remove(commits.read_marker(os.path.join(place, f"ckpt-{step}")))
    train(run, 2, 4, seed=1)
    run.end()
    for name in [name for name in os.listdir(place) if name.startswith("ckpt-2.")]:
        os.unlink(os.path.join(place, name))
    train(run, 5, 5)
    run.end()
    assert steps(url) == [1, 2, 3, 4, 5]
    assert there(url)["checkpoints/ckpt-2.index"] == copied.content(2, 1, 1000)


def test_a_checkpoint_that_is_damaged_here_stays_in_the_store(url, tmp_path):
    run, place = opened(url, tmp_path / "run")
    train(run, 1, 3)
    run.end()
    with open(os.path.join(place, "ckpt-3.index"), "r+b") as file:
        file.write(b"damage")
    run, place = opened(url, tmp_path / "run")
    assert commits.newest_intact(place, tidy=True).step == 2
    run.end()
    assert steps(url) == [1, 2, 3] and there(url)["checkpoints/ckpt-3.index"] == copied.content(3, 0, 1000)


@pytest.mark.parametrize("how", ["removed", "moved", "made again"])
def test_a_run_whose_local_directory_goes_ends_and_leaves_the_store_as_it_is(url, tmp_path, how):
    run, place = opened(url, tmp_path / "run")
    train(run, 1, 3)
    wait_for(lambda: steps(url) == [1, 2, 3])
    before = there(url)
    if how == "moved":
        os.rename(run.directory, tmp_path / "away")
    else:
        shutil.rmtree(run.directory)
    if how == "made again":
        os.makedirs(run.directory)
        train(run, 4, 4)
    with pytest.raises(RunDirectoryError, match="moved or removed"):
        run.check()
    run._copier._next_reports = 0.0
    with pytest.raises(RunDirectoryError, match="moved or removed"):
        run._copier.copy(everything=True, patience=1.0)
    assert there(url) == before


@pytest.mark.slow
def test_a_run_whose_local_directory_is_removed_continues_from_the_store(cloud):
    life = cloud.copied("--steps=1000", "--pause=0.4", "--keep=5")
    wait_for(lambda: len(cloud.steps()) >= 3)
    shutil.rmtree(cloud.local())
    assert life.code() == 1, life.output()
    kept = cloud.steps()
    assert len(kept) >= 3
    life = cloud.copied(f"--steps={kept[-1] + 1}", "--keep=5")
    assert life.code() == 0, life.output()
    assert said(life)[0]["start"] == kept[-1]
    lines = [json.loads(line)["step"] for line in cloud.read("metrics.jsonl").splitlines()]
    assert lines == list(range(1, kept[-1] + 2))


@pytest.mark.parametrize("later", [False, True])
def test_a_checkpoint_whose_copy_was_not_noted_before_a_kill_is_deleted_when_the_run_deletes_it(url, tmp_path, later):
    run, place = opened(url, tmp_path / "run")
    train(run, 1, 4)
    run.end()
    if not later:
        commits.remove(commits.read_marker(os.path.join(place, "ckpt-2")))
    for name in [name for name in run._copy.note.known if "ckpt-2." in name]:
        del run._copy.note.known[name]
    run._copy.write_note()
    run._lease.steps.remove(2)
    run._lease.release(0.0)
    assert steps(url) == [1, 2, 3, 4]
    run, place = opened(url, tmp_path / "run")
    if later:
        commits.remove(commits.read_marker(os.path.join(place, "ckpt-2")))
    train(run, 5, 5)
    run.end()
    assert steps(url) == [1, 3, 4, 5] and not [name for name in there(url) if "ckpt-2." in name]


def test_a_run_whose_directory_is_emptied_while_it_writes_there_ends_and_leaves_the_store_as_it_is(url, tmp_path):
    """As by `rm -rf`, which cannot remove a directory in which there is a new file."""
    (tmp_path / "run").mkdir()
    held = lock.acquire(str(tmp_path / "run"), lambda: None)
    run, place = opened(url, tmp_path / "run")
    train(run, 1, 3)
    wait_for(lambda: steps(url) == [1, 2, 3])
    before = there(url)
    for name in ("lock", "metrics.jsonl"):
        os.unlink(tmp_path / "run" / name)
    train(run, 4, 4)
    with pytest.raises(RunDirectoryError, match="moved or removed"):
        run.check()
    with pytest.raises(RunDirectoryError, match="moved or removed"):
        run._copier.copy(everything=True, patience=1.0)
    assert there(url) == before
    held.release()


def test_a_writer_ends_once_somebody_has_removed_the_run_from_the_store_and_begun_another_there(url, tmp_path):
    run, place = opened(url, tmp_path / "run")
    train(run, 1, 3)
    wait_for(lambda: steps(url) == [1, 2, 3])
    driver, root = fsspec.url_to_fs(url)
    driver.rm(root, recursive=True)
    other, _ = opened(url, tmp_path / "other")
    copied.save(run.directory, 4)
    wait_for(lambda: not run._worker.is_alive())
    with pytest.raises(LockedError, match="lease of this one was removed"):
        run.check()
    train(other, 1, 2, seed=1)
    other.end()
    assert steps(url) == [1, 2] and there(url)["checkpoints/ckpt-2.index"] == copied.content(2, 1, 1000)


@pytest.mark.parametrize("known", [{"metrics.jsonl": []}, {"../other/metrics.jsonl": [1, 2]}, {"/etc": [1, 2]}])
def test_notes_that_cannot_be_of_a_run_are_refused(url, tmp_path, known):
    run, place = opened(url, tmp_path / "run")
    train(run, 1, 2)
    run.end()
    path = tmp_path / "run.mirror" / "mirror.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "known": known}))
    with pytest.raises(StoreError, match="holds something else"):
        opened(url, tmp_path / "run")
    assert steps(url) == [1, 2]


def test_records_that_have_lost_their_beginning_are_not_copied(url, tmp_path):
    """As by a slow `rm -rf`, which has removed this file and not the others yet."""
    run, _ = opened(url, tmp_path / "run")
    train(run, 1, 3)
    wait_for(lambda: steps(url) == [1, 2, 3])
    run._copier.copy(everything=True, patience=1.0)
    before = there(url)["metrics.jsonl"]
    os.unlink(tmp_path / "run" / "metrics.jsonl")
    train(run, 4, 4)
    with pytest.raises(RunDirectoryError, match="begins with step 4, and with step 1 in the store"):
        run._copier.copy(everything=True, patience=1.0)
    assert there(url)["metrics.jsonl"] == before
    with pytest.raises(RunDirectoryError):
        run.end()


def test_records_that_a_rollback_removes_are_removed_in_the_store_too(url, tmp_path):
    run, _ = opened(url, tmp_path / "run")
    train(run, 1, 3)
    run._copier.copy(everything=True, patience=1.0)
    for step in (1, 2):
        copied.report(run.directory, step, seed=1)
    run.end()
    assert there(url)["metrics.jsonl"].decode() == "".join(copied.line(step, 1) for step in (1, 2))


def test_what_a_run_adds_to_is_fetched_by_a_start_elsewhere_and_not_begun_anew(url, tmp_path):
    added_to = ["csv/train.csv", "alerts.log", "mlflow.id", "of_the_user/log.txt"]
    run, _ = opened(url, tmp_path / "one")
    for name in [*added_to, "train/events.1"]:
        os.makedirs(os.path.dirname(os.path.join(run.directory, name)), exist_ok=True)
        files.write_whole(os.path.join(run.directory, name), "one\n")
    train(run, 1, 2)
    run.end()
    job = mirror.open_mirror(url, str(tmp_path / "job"))
    job.begin(False)
    assert open(os.path.join(job.directory, "mlflow.id")).read() == "one\n"  # it adds to the same tracked run
    for name in added_to[:3]:
        os.makedirs(os.path.dirname(os.path.join(job.directory, name)), exist_ok=True)
        files.write_whole(os.path.join(job.directory, name), "job\n")
    job.end()
    run, _ = opened(url, tmp_path / "two")
    for name in added_to:
        with open(os.path.join(run.directory, name), "a") as file:
            file.write("two\n")
    train(run, 3, 3)
    run.end()
    assert [there(url)[name] for name in added_to] == [b"one\ntwo\n"] * len(added_to)
    assert there(url)["train/events.1"] == b"one\n" and not os.path.exists(os.path.join(run.directory, "train"))


def test_copies_are_told_apart_by_the_whole_url_also_where_its_text_is_masked(tmp_path):
    url = "s3://bucket/run?key=secret-one"
    LocalCopy(url, str(tmp_path / "run"))
    files.write_whole(str(tmp_path / "run" / "metrics.jsonl"), "")
    LocalCopy(url, str(tmp_path / "run"))
    assert "secret-one" not in (tmp_path / "run.mirror" / "mirror.json").read_text()
    with pytest.raises(StoreError, match="holds something else"):
        LocalCopy("s3://bucket/run?key=secret-two", str(tmp_path / "run"))


@pytest.mark.parametrize("start", ["", "c", "checkpoints", "checkpoints/", "checkpoints/ckpt-", "checkpoints/ckpt-2"])
def test_a_list_of_deletions_that_no_run_writes_deletes_nothing(url, tmp_path, start):
    run, place = opened(url, tmp_path / "run")
    train(run, 1, 4)
    run.end()
    (tmp_path / "run.mirror" / "deletions.json").write_text(json.dumps([start]))
    for name in [name for name in os.listdir(place) if name.startswith("ckpt-2.")]:
        os.unlink(os.path.join(place, name))
    run, _ = opened(url, tmp_path / "run")
    train(run, 5, 5)
    run.end()
    assert steps(url) == [1, 2, 3, 4, 5]
