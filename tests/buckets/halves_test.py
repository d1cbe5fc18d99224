"""The content of a store is not always what was to be there: halves of uploads, damage, old listings."""

import json
import random

import copied
import pytest
from clouds import said, wait_for
from conftest import repetitions

from looplib.errors import EXIT_FAILED


def ready(cloud, steps=5, pause=0.0, **more):
    """Runs `copied` to its end."""
    life = cloud.copied(f"--steps={steps}", f"--pause={pause}", **more)
    assert life.code() == 0, life.output()
    return life


def start_of(cloud, steps, pause=0.0):
    """The step from which a start on a bare machine continues to the end."""
    cloud.lose()
    return said(ready(cloud, steps, pause))[0]["start"]


def test_a_run_killed_again_and_again_without_its_directory_has_what_one_that_was_not_killed_has(cloud):
    """At any moment, so also between the files of a checkpoint and in the middle of one."""
    chance, steps = random.Random(3), 60
    cloud.proxy.faults.delay = 0.01
    known = 0
    for _ in range(repetitions(2, 10)):
        life = cloud.copied(f"--steps={steps}", "--pause=0.02", "--size=300000")
        life.ended(0.8 + 1.2 * chance.random())
        life.kill()
        life.code()
        cloud.lose()
        start = [one["start"] for one in said(life) if "start" in one]
        assert not start or start[0] >= known  # nothing that was in the store is lost
        known = max(cloud.steps(), default=0)
    ready(cloud, steps, environment={})
    folder = cloud.download("found")
    assert (folder / "metrics.jsonl").read_text() == "".join(copied.line(step, 0) for step in range(1, steps + 1))
    assert cloud.steps()[-1] == 60  # others may be any that a life has come to upload
    data = (folder / "checkpoints" / "ckpt-60.data-00000-of-00001").read_bytes()
    assert data == copied.content(60, 0, len(data))


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["no data", "other data", "half of the marker", "no marker", "half of the data"])
def test_half_of_an_upload_is_never_a_checkpoint(cloud, damage):
    ready(cloud)
    key = "checkpoints/ckpt-5.commit" if "marker" in damage else "checkpoints/ckpt-5.data-00000-of-00001"
    content = cloud.read(key)
    if damage.startswith("no "):
        cloud.delete(key)
    elif damage == "other data":
        cloud.write(key, content[:-1] + bytes([content[-1] ^ 1]))
    else:
        cloud.write(key, content[: len(content) // 2])
    assert start_of(cloud, 6) == 4
    assert cloud.steps()[-3:] == [4, 5, 6]
    assert cloud.read("checkpoints/ckpt-5.data-00000-of-00001") == copied.content(5, 0, 1000)


def test_what_a_store_has_lost_is_copied_again_by_the_next_start(cloud):
    ready(cloud)
    there = cloud.names()
    lost = ["checkpoints/ckpt-4.index", "metrics.jsonl", "checkpoints/ckpt-3.commit"]
    for name in lost:
        cloud.delete(name)
    cloud.write("checkpoints/ckpt-5.data-00000-of-00001", b"half")
    ready(cloud)
    assert {name: size for name, size in cloud.names().items() if ".lease" not in name} == {
        name: size for name, size in there.items() if ".lease" not in name
    }


def test_a_store_that_is_empty_does_not_empty_the_local_directory(cloud):
    ready(cloud)
    for name in cloud.names():
        cloud.delete(name)
    for _ in range(2):
        life = cloud.copied("--steps=6")
        assert life.code() == 1 and said(life)[-1]["error"] == "StoreError", life.output()
        assert cloud.url() in said(life)[-1]["text"] and str(cloud.local()) in said(life)[-1]["text"]
        assert not cloud.names()
    assert (cloud.local() / "checkpoints" / "ckpt-5.commit").exists()
    assert start_of(cloud, 6) == 0  # without the copy


@pytest.mark.slow
def test_a_store_that_has_lost_its_lease_or_all_that_is_intact_does_not_empty_the_local_directory(cloud):
    ready(cloud)
    for name in cloud.names():
        if name.startswith((".lease/", "checkpoints/ckpt-4.", "checkpoints/ckpt-5.")):
            cloud.delete(name)
    assert said(ready(cloud, 6))[0]["start"] == 5
    assert cloud.steps() == [4, 5, 6]
    ready(cloud, 7, machine="two")
    for name in cloud.names():
        if name.endswith(".index"):
            cloud.write(name, b"damaged")
    life = cloud.copied("--steps=8")
    assert life.code() == 1 and said(life)[-1]["error"] == "StoreError", life.output()
    assert (cloud.local() / "checkpoints" / "ckpt-6.commit").exists()


@pytest.mark.slow
def test_a_start_that_may_not_read_the_newest_checkpoint_ends_and_takes_no_older_one(cloud):
    ready(cloud)
    cloud.lose()
    cloud.proxy.faults.share, cloud.proxy.faults.status = 1.0, 403
    cloud.proxy.faults.only = lambda request: "/ckpt-5.data" in request.path
    life = cloud.copied("--steps=6")
    assert life.code() == 1, life.output()
    assert said(life)[-1]["error"] == "StoreError" and not [one for one in said(life) if "start" in one]
    cloud.proxy.clear()
    assert start_of(cloud, 6) == 5


@pytest.mark.slow
def test_a_checkpoint_whose_deletion_was_cut_short_is_none(cloud):
    ready(cloud)
    cloud.delete("checkpoints/ckpt-4.commit")
    cloud.delete("checkpoints/ckpt-4.index")
    assert start_of(cloud, 6) == 5
    assert cloud.steps()[-3:] == [3, 5, 6]


@pytest.mark.slow
def test_a_start_with_an_old_listing_finds_the_newest_checkpoint_and_all_reports(cloud):
    ready(cloud, 3)
    first = cloud.copied("--steps=9", machine="other")
    assert first.code() == 0, first.output()
    cloud.proxy.faults.old = 100.0  # from before the first start
    life = ready(cloud, 12, machine="third")
    assert said(life)[0]["start"] == 9
    assert cloud.steps()[-3:] == [10, 11, 12]
    lines = [json.loads(one)["step"] for one in cloud.read("metrics.jsonl").splitlines()]
    assert lines == list(range(1, 13))
    assert len([name for name in cloud.names() if name.startswith(".lease")]) == 3


@pytest.mark.slow
def test_two_writers_with_old_listings_do_not_both_get_the_run(cloud):
    for number in range(3):
        ready(cloud, number + 1, machine=f"m{number}")
    cloud.proxy.faults.old = 100.0
    first = cloud.copied("--steps=1000", "--pause=0.1", machine="one")
    wait_for(lambda: max(cloud.steps()) > 3)
    second = cloud.copied("--steps=1000", machine="two")
    assert second.code() == EXIT_FAILED
    assert said(second)[-1]["error"] == "LockedError"
    first.end()


@pytest.mark.slow
def test_retention_deletes_what_the_run_has_deleted_and_nothing_else(cloud):
    """Files of somebody else stay, also what looks like a checkpoint."""
    strange = {
        "notes.txt": b"mine", "checkpoints/ckpt-1.data-00000-of-00001": b"mine", "checkpoints/best.index": b"mine",
        "export/model.pb": b"mine",
    }  # fmt: skip
    ready(cloud, 4)
    for key, content in strange.items():
        cloud.write(key, content)
    assert start_of(cloud, 9, pause=0.5) == 4
    assert cloud.steps() == [7, 8, 9]
    names = cloud.names()
    assert {name for name in names if "ckpt-" in name and "ckpt-1." not in name} == {
        f"checkpoints/ckpt-{step}{end}" for step in (7, 8, 9) for end in (".index", ".data-00000-of-00001", ".commit")
    }
    assert {key: cloud.read(key) for key in strange} == strange


@pytest.mark.slow
def test_a_start_in_the_cache_of_the_same_machine_downloads_nothing(cloud):
    ready(cloud, 4)
    before = len(cloud.proxy.requests)
    assert said(ready(cloud, 6))[0]["start"] == 4
    read = [request for request in cloud.proxy.requests[before:] if request.kind == "get"]
    assert not [request for request in read if ".lease" not in request.path]


@pytest.mark.slow
def test_a_start_whose_cache_lost_files_or_is_older_than_the_store_takes_the_store(cloud):
    ready(cloud, 4)
    for path in (cloud.local() / "checkpoints").iterdir():
        path.unlink()
    assert said(ready(cloud, 5))[0]["start"] == 4
    assert cloud.steps()[-3:] == [3, 4, 5]
    ready(cloud, 7, machine="other")
    assert said(ready(cloud, 8))[0]["start"] == 7
    assert cloud.steps()[-3:] == [6, 7, 8]


@pytest.mark.slow
def test_another_local_dir_is_filled_from_the_store_and_one_with_something_else_is_refused(cloud):
    ready(cloud, 4)
    life = cloud.copied("--steps=6", f"--local_dir={cloud.folder / 'here'}")
    assert life.code() == 0 and said(life)[0]["start"] == 4
    assert (cloud.folder / "here" / "checkpoints" / "ckpt-6.commit").exists()
    (cloud.folder / "mine").mkdir()
    (cloud.folder / "mine" / "thesis.txt").write_text("years of work")
    life = cloud.copied("--steps=6", f"--local_dir={cloud.folder / 'mine'}")
    assert life.code() == 1 and "--local_dir" in said(life)[-1]["text"]
    life = cloud.copied("--steps=6", f"--local_dir={cloud.folder / 'here'}", name="another")
    assert life.code() == 1 and "--local_dir" in said(life)[-1]["text"]
    assert (cloud.folder / "mine" / "thesis.txt").read_text() == "years of work"


@pytest.mark.slow
def test_a_start_that_is_killed_while_it_downloads_leaves_nothing_that_the_next_one_trips_over(cloud):
    life = cloud.copied("--steps=4", "--size=3000000")
    assert life.code() == 0
    cloud.lose()
    cloud.proxy.faults.delay = 0.2
    for seconds in (0.5, 1.3, 2.1):
        life = cloud.copied("--steps=4", "--size=3000000")
        life.ended(seconds)
        life.kill()
        life.code()
    cloud.proxy.faults.delay = 0.0
    life = cloud.copied("--steps=6", "--size=3000000")
    assert life.code() == 0, life.output()
    assert said(life)[0]["start"] == 4
    assert cloud.steps()[-3:] == [4, 5, 6]
