"""Files that are moved aside are moved back, or are elsewhere: a start that is killed at any moment loses nothing."""

import json
import os
import shutil

import copied
import pytest
from clouds import said, wait_for

from looplib.base import files, folders
from looplib.buckets import mirror
from looplib.buckets.note import LocalCopy
from looplib.errors import StoreError
from looplib.exports.new_folder import new_folder, put_in_place
from looplib.run import commits
from looplib.stores.stores import Store

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def url():
    """The URL of a run in this process's memory."""
    yield "memory://moves/run"
    fsspec.filesystem("memory").rm("/moves", recursive=True)


def killed(work, after):
    """Does some work in a child, which dies before a change of a name on the disk; returns whether it came so far."""
    if not (child := os.fork()):
        left = [after]

        def counted(function):
            def call(*arguments, **more):
                if not left[0]:
                    os._exit(9)
                left[0] -= 1
                return function(*arguments, **more)

            return call

        for module, name in ((os, "rename"), (os, "unlink"), (os, "mkdir"), (os, "rmdir"), (shutil, "rmtree")):
            setattr(module, name, counted(getattr(module, name)))
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def contents(folder):
    return {path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_start_that_is_killed_at_any_moment_leaves_what_was_here_and_no_mixture(tmp_path):
    url = "memory://bucket/run"
    after, kills = 0, 0
    while True:
        place = tmp_path / f"{after}"
        directory = str(place / "run")
        copy = LocalCopy(url, directory)
        for step in (1, 2):
            copied.report(directory, step)
            copied.save(directory, step)
        for name in ("ckpt-1.index", "ckpt-1.data-00000-of-00001", "ckpt-1.commit"):
            copy.remember(f"checkpoints/{name}")  # step 2 was never copied
        copy.note.token = "mine"
        copy.write_note()

        def replace():
            with copy.alone():
                with copy.replaced() as before:
                    copied.report(directory, 9, seed=1)
                    copied.save(directory, 9, seed=1)
                    copy.remember("checkpoints/ckpt-9.commit")
                    copy.note.token = "new"
                copy.settle(before, lambda name: True)

        died = killed(replace, after)
        found = LocalCopy(url, directory)
        with found.alone():
            steps, is_new = found.steps(), found.note.token == "new"
        assert steps == ([9] if is_new else [2, 1]), after
        assert found.note.token == ("new" if is_new else "mine")
        assert {copied.content(2, 0, 1000), (copied.line(1, 0) + copied.line(2, 0)).encode()} <= contents(place)
        if not is_new:
            assert (place / "run" / "metrics.jsonl").read_text() == copied.line(1, 0) + copied.line(2, 0)
            assert not any(map(commits.verify, commits.committed(found.checkpoints)))
        if not died:
            break
        kills, after = kills + 1, after + 1
    assert kills > 10 and is_new and copied.content(1, 0, 1000) not in contents(place)


@pytest.mark.parametrize("what", ["", "{", "\0", '{"note": 3, "done": true}', "another run"])
def test_a_note_of_a_move_that_cannot_be_right_is_refused_and_nothing_is_moved(tmp_path, what):
    directory = str(tmp_path / "run")
    copy = LocalCopy("memory://bucket/run", directory)
    copied.save(directory, 1)
    if what == "another run":
        what = json.dumps(
            {
                "note": {"url": "memory://bucket/run", "key": "other", "token": "", "known": {}, "versions": {}},
                "done": True,
            }
        )
    (tmp_path / "run.mirror" / "move.json").write_text(what)
    with pytest.raises(StoreError, match=r"move\.json does not say .*; move .* away"), copy.alone():
        pass
    assert copy.steps() == [1]


def test_an_export_is_copied_once_it_is_in_its_place(tmp_path):
    copy = LocalCopy("memory://bucket/run", str(tmp_path / "run"))
    place = tmp_path / "run" / "export" / "step-1"
    with new_folder(str(place)) as aside:
        made = folders.make_folder(os.path.join(aside, "content"))
        files.write_whole(os.path.join(made, "weights"), "new")
        assert list(copy.changed()) == []
        put_in_place(made, str(place), aside)
        assert list(copy.changed()) == ["export/step-1/weights"]


def test_what_the_store_never_had_is_kept_when_another_machine_has_continued_the_run(url, tmp_path):
    def train(folder, first, last, seed=0):
        run = mirror.open_mirror(url, str(tmp_path / folder))
        run.begin(True)
        assert commits.newest(run._copy.checkpoints) is None or commits.newest(run._copy.checkpoints).step == first - 1
        for step in range(first, last + 1):
            copied.report(run.directory, step, seed)
            copied.save(run.directory, step, seed)
        run.end()
        return run

    run = train("one", 1, 3)
    copied.save(run.directory, 4)  # before the machine was lost
    train("two", 4, 5, seed=1)
    reader = mirror.open_mirror(url, str(tmp_path / "one"))
    reader.update(Store(url).listed())  # as an evaluation does, which takes the weights of the store
    path = os.path.join(reader.directory, "checkpoints", "ckpt-4")
    with open(f"{path}.index", "rb") as file:
        assert file.read() == copied.content(4, 1, 1000)
    train("one", 6, 6)
    (kept,) = (tmp_path / "one.mirror").glob("kept*")
    assert sorted(path.name for path in kept.rglob("ckpt-*")) == [
        "ckpt-4.commit", "ckpt-4.data-00000-of-00001", "ckpt-4.index",
    ]  # fmt: skip
    assert not commits.verify(commits.read_marker(str(kept / "checkpoints" / "ckpt-4")))


def test_a_start_that_is_killed_while_it_fetches_loses_no_local_checkpoint(cloud):
    assert cloud.copied("--steps=4", machine="one").code() == 0
    assert cloud.copied("--steps=6", machine="two").code() == 0
    for name in cloud.names():
        if name.endswith(".index"):
            cloud.write(name, b"damage")
    cloud.proxy.faults.delay, cloud.proxy.faults.only = 1.0, lambda request: "ckpt-" in request.path
    life = cloud.copied("--steps=8", machine="one")
    wait_for(lambda: list(cloud.local("one").parent.glob("run.mirror/earlier/checkpoints/*.commit")))
    life.kill()
    life.code()
    cloud.proxy.clear()
    life = cloud.copied("--steps=8", machine="one")
    assert life.code() == 1
    assert said(life)[-1]["error"] == "StoreError" and "has step 4" in said(life)[-1]["text"], life.output()
    here = commits.committed(str(cloud.local("one") / "checkpoints"))
    assert [done.step for done in here] == [4, 3, 2] and not any(map(commits.verify, here))


def test_a_checkpoint_that_is_set_aside_is_in_one_folder_also_after_a_kill(tmp_path):
    for after in range(20):
        folder = tmp_path / f"{after}"
        copied.save(str(folder), 7)
        place = str(folder / "checkpoints")
        if not killed(lambda: commits.set_aside(place, 7), after):
            break
        commits.newest_intact(place, tidy=True)
        if commits.newest(place) is not None:  # it had not begun
            continue
        (aside,) = (folder / "checkpoints" / "set_aside").iterdir()
        done = commits.read_marker(str(aside / "ckpt-7"))
        assert done.step == 7 and not commits.verify(done)
    assert after > 3


def test_an_export_that_is_replaced_is_there_whole_after_a_kill(tmp_path):
    for after in range(20):
        place = tmp_path / f"{after}"
        for path, text in ((place / "out", "old"), (place / "new", "new")):
            folders.make_folder(str(path))
            files.write_whole(str(path / "weights"), text)

        def replace():
            with new_folder(str(place / "out")) as aside:
                put_in_place(str(place / "new"), str(place / "out"), aside)

        died = killed(replace, after)
        with new_folder(str(place / "out")):  # as the next one
            assert (place / "out" / "weights").read_text() in (("old", "new") if died else ("new",))
        if not died:
            break
    assert after > 3
