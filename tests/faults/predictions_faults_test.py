"""Predictions under faults: damaged pieces and indexes, kills, two jobs at once, full disks; a restart is exact."""

import contextlib
import fcntl
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import time

import pytest
from conftest import make_strategy, more, repetitions
from disk_test import disk  # noqa: F401
from exports.predictions_test import Predicts, pieces, predict
from kill_test import saved_step
from lock_test import EVALUATION, LONG, last_line, wait_for_step
from tampering import MAKE, make_directory, make_fifo, mutate_fields, mutated

import looplib
from looplib.errors import PredictionError, RunDirectoryError

MUTATIONS = int(os.environ.get("LOOPLIB_MUTATIONS", repetitions(28, 200)))
KILLS = repetitions(2, 7)


class PredictsNumbers(Predicts):
    """Contents that each kind of file can have."""

    def predict_fn(self, inputs):
        return {"label": inputs[1], **super().predict_fn(inputs)}


def again(folder, kind="jsonl"):
    """Predicts into a folder whose predictions may be finished."""
    return pathlib.Path(predict(make_strategy("default"), folder, PredictsNumbers, loop="eager", piece=5, format=kind))


def contents(folder):
    """Returns what a reader of the pieces gets."""
    return {path.name: path.read_bytes() for path in pieces(folder)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Finished predictions of each kind, which nothing has disturbed, by kind."""
    pytest.importorskip("pyarrow")
    return {kind: again(tmp_path_factory.mktemp(kind), kind) for kind in ("jsonl", "tfrecord", "parquet")}


@pytest.fixture
def copy(whole, tmp_path):
    """Makes a copy of finished predictions; returns their folder."""
    return lambda kind="jsonl": shutil.copytree(whole[kind], tmp_path / "predictions" / "eval")


@pytest.fixture
def victim(tmp_path):
    """A directory outside, which stays as it is."""
    folder = tmp_path / "victim"
    folder.mkdir()
    for name in ("piece-00002.jsonl", "_index.json", "_lock", "notes"):
        (folder / name).write_text(f"this is {name}")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    yield folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swap(path):
    other = path.with_name(path.name.replace("2", "3"))
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


def put(make):
    """A change that puts something else in the place of a file."""

    def change(path):
        path.unlink()
        make(path)

    return change


DAMAGES = {
    "removed": lambda path: path.unlink(),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "a bit flipped": flip,
    "swapped with another": swap,
    "grown to 60 GB": lambda path: os.truncate(path, 60 * 2**30),
    "a link": put(lambda path: path.symlink_to(path.parents[2] / "victim" / "piece-00002.jsonl")),
    "a link to nothing": put(lambda path: path.symlink_to("/nonexistent/x")),
    "a FIFO": put(make_fifo),
}
FEW = ["removed", "a bit flipped", "a link", "a FIFO", "swapped with another", "grown to 60 GB"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage, kind",
    [*((damage, "jsonl") for damage in FEW), ("truncated", "tfrecord"), ("emptied", "parquet")]
    + more([(damage, kind) for damage in DAMAGES for kind in ("jsonl", "tfrecord", "parquet")]),
)
def test_a_damaged_piece_of_finished_predictions_is_predicted_again_and_all_are_equal(
    damage, kind, copy, whole, victim, caplog
):
    folder = copy(kind)
    DAMAGES[damage](folder / f"piece-00002.{kind}")
    earlier = [path.stat().st_mtime_ns for path in pieces(folder)[:2]]
    again(folder.parent, kind)
    assert contents(folder) == contents(whole[kind])
    assert [path.stat().st_mtime_ns for path in pieces(folder)[:2]] == earlier, "an intact piece was written again"
    assert f"piece-00002.{kind} is damaged (" in caplog.text
    assert (folder / "_index.json").read_bytes() == (whole[kind] / "_index.json").read_bytes()


def test_two_damaged_pieces_and_the_first_and_the_last_are_predicted_again(copy, whole):
    folder = copy()
    for name in ("piece-00000.jsonl", "piece-00007.jsonl"):
        flip(folder / name)
    again(folder.parent)
    assert contents(folder) == contents(whole["jsonl"])


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("name", ["piece-00099.jsonl", "piece-00001.parquet", "piece-\udcff"])
def test_what_is_no_piece_but_looks_like_one_is_named_and_left_where_it_is(name, copy, whole):
    folder = copy()
    (folder / name).mkdir()
    (folder / name / "mine").write_text("kept")
    with pytest.raises(PredictionError) as raised:
        again(folder.parent)
    assert ascii(name)[1:-1] in str(raised.value)
    assert (folder / name / "mine").read_text() == "kept"
    (folder / name).rename(folder.parent / "aside")  # as it advises
    again(folder.parent)
    assert contents(folder) == contents(whole["jsonl"])


def test_a_directory_in_the_place_of_a_piece_is_moved_aside(copy, whole):
    folder = copy()
    (folder / "piece-00002.jsonl").unlink()
    (folder / "piece-00002.jsonl").mkdir()
    (folder / "piece-00002.jsonl" / "mine").write_text("kept")
    again(folder.parent)
    assert contents(folder) == contents(whole["jsonl"])
    assert (folder / "_piece-00002.jsonl.aside" / "mine").read_text() == "kept"


OLD = {"version": 1, "source": {}, "finished": {"pieces": 8, "records": 37}}
FORGED = {
    "of an earlier version": lambda index: OLD,
    "no object": lambda index: [],
    "steps as text": lambda index: index["pieces"][0]["end"].update(step="0"),
    "a step that is negative": lambda index: index["pieces"][0]["end"].update(step=-1),
    "a step that is huge": lambda index: index["pieces"][7]["end"].update(step=2**62),
    "a step beyond the data": lambda index: index["pieces"][7]["end"].update(step=2**39),
    "a number of 400 digits": lambda index: index["pieces"][7].update(bytes=10**400),
    "records that do not add up": lambda index: index["pieces"][3]["end"].update(records=21),
    "a size of a whole disk": lambda index: index["pieces"][3].update(bytes=2**62),
    "a format that is a path": lambda index: index["source"].update(format="x/../../../victim/notes"),
    "pieces of no records": lambda index: index["source"].update(piece=0),
    "an unknown field": lambda index: index.update(more={"a": [1]}),
    "Booleans": lambda index: index["pieces"][0]["end"].update(records=True),
    "complete as a number": lambda index: index.update(complete=1),
    "another last example": lambda index: index["pieces"][7]["end"].update(last_example=7),
    "fewer pieces": lambda index: index["pieces"].pop(),
    "no pieces": lambda index: index["pieces"].clear(),
}
EQUAL = ("a size of a whole disk", "an unknown field")


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("how", FORGED)
def test_a_forged_index_is_refused_in_a_sentence_or_changes_nothing(how, copy, whole, victim):
    folder = copy()
    path = folder / "_index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps(FORGED[how](index) or index))
    refused = ""
    try:
        again(folder.parent)
    except looplib.UsageError as error:
        refused = str(error)
        assert str(folder) in refused and "; remove" in refused
        shutil.rmtree(folder)  # as it advises
        again(folder.parent)
    assert contents(folder) == contents(whole["jsonl"])
    assert not (refused and how in EQUAL), refused


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("make", [*MAKE, lambda path: path.symlink_to(path.parents[2] / "victim" / "_index.json")])
def test_something_else_in_the_place_of_the_index_is_refused_in_a_sentence(make, copy, victim):
    folder = copy()
    (folder / "_index.json").unlink()
    make(folder / "_index.json")
    with pytest.raises(PredictionError, match="_index.json.*--pre"):
        again(folder.parent)


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize(
    "make", [make_fifo, make_directory, lambda path: path.symlink_to(path.parents[2] / "victim" / "_lock")]
)
def test_something_else_in_the_place_of_the_lock_is_refused_in_a_sentence(make, copy, whole, victim):
    folder = copy()
    (folder / "_lock").unlink()
    make(folder / "_lock")
    with pytest.raises(RunDirectoryError, match="_lock.*name|move.*away|remove"):
        again(folder.parent)
    (folder / "_lock").rename(folder.parent / "aside")
    again(folder.parent)
    assert contents(folder) == contents(whole["jsonl"])


def test_predictions_that_another_process_writes_are_refused_by_name_and_left_alone(copy, whole):
    folder = copy()
    with open(folder / "_lock", "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(looplib.UsageError, match=f"the directory of predictions {folder} is in use by process"):
            again(folder.parent)
    assert contents(folder) == contents(whole["jsonl"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["predictions", "predictions/eval"])
def test_a_folder_of_predictions_that_is_a_link_is_refused(name, tmp_path, victim, nursery, trained):
    run = shutil.copytree(trained, tmp_path / "run")
    place = run / name
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(victim)
    life = nursery.life(run, *PREDICT)
    assert life.code() == 1
    assert f"{place} is a symbolic link, and looplib writes" in last_line(life)
    other = tmp_path / "other"
    other.mkdir()
    (other / "eval").symlink_to(victim)
    life = nursery.life(trained, *PREDICT, f"--predictions={other}")
    assert life.code() == 1 and "is a symbolic link" in last_line(life)


@pytest.mark.slow
def test_no_mutation_of_an_index_or_of_names_of_pieces_hangs_or_crashes_or_is_accepted_in_silence(copy, whole, victim):
    chance, expected = random.Random(4), contents(whole["jsonl"])
    outcomes = {"equal": 0, "refused": 0}
    for number in range(MUTATIONS):
        folder = copy()
        index = folder / "_index.json"
        if chance.random() < 0.7:
            if chance.random() < 0.7:
                fields = json.loads(index.read_text())
                mutate_fields(fields, chance)
                index.write_text(json.dumps(fields))
            else:
                index.write_bytes(mutated(index.read_bytes(), chance))
        else:
            for path in chance.sample(pieces(folder), chance.randrange(1, 3)):
                name = chance.choice(
                    ["piece-00003.jsonl", "piece-00008.jsonl", "piece-x", "mine", "piece-00002.tfrecord"]
                )
                path.rename(folder / name)
        try:
            again(folder.parent)
            outcomes["equal"] += 1
        except looplib.UsageError as error:
            outcomes["refused"] += 1
            assert "; remove" in str(error) or "; move away" in str(error), (number, error)
        except BaseException as error:
            raise AssertionError(f"mutation {number}") from error
        else:
            assert contents(folder) == expected, number
        shutil.rmtree(folder)
    print(outcomes)
    assert min(outcomes.values()) > MUTATIONS / 20


# Whole jobs.

PREDICT = ["--config.state_mb=0.01", "--mode=predict", "--loop=eager", "--predictions_piece=3"]
SLOW = [*PREDICT, "--config.slow_evaluation=0.4"]  # six steps


@pytest.fixture(scope="module")
def trained(nursery, tmp_path_factory):
    """A run directory that is only read."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    life = nursery.life(folder, "--config.state_mb=0.01", "--mode=train", "--train_steps=8", "--loop=eager")
    assert life.code() == 0, life.output()
    return folder


@pytest.fixture(scope="module")
def undisturbed(nursery, trained, tmp_path_factory):
    """The pieces of predictions of the run, by kind."""
    place, found = tmp_path_factory.mktemp("undisturbed"), {}
    lives = {
        kind: nursery.life(trained, *PREDICT, f"--predictions_format={kind}", f"--predictions={place / kind}")
        for kind in ("jsonl", "tfrecord", "parquet")
    }
    for kind, life in lives.items():
        assert life.code() == 0, life.output()
        found[kind] = contents(place / kind / "eval")
    return found


def wait_for_a_piece(life, folder):
    until = time.monotonic() + 60
    while not (folder / "piece-00000.jsonl").exists():
        assert time.monotonic() < until and not life.ended(0.005), life.output()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "tfrecord", "parquet"])
def test_a_prediction_killed_between_and_in_its_pieces_ends_equal_and_leaves_nothing_else(
    kind, nursery, trained, undisturbed, tmp_path
):
    """A step has 16 records, so most kills strike while their pieces and indexes are written."""
    chance, kills, struck = random.Random(kind), 0, set()
    folder, scratch = tmp_path / "out" / "eval", tmp_path / "scratch"
    scratch.mkdir()
    arguments = [*PREDICT, "--predictions_piece=1", f"--predictions_format={kind}"]  # as many writes as can be
    order = {"environment": {"TMPDIR": str(scratch)}}
    while True:
        life = nursery.life(
            trained, *arguments, f"--predictions={folder.parent}", "--config.slow_evaluation=0.05", **order
        )
        if kills < KILLS:
            before, until = len(list(folder.glob("piece-*"))) if folder.exists() else 0, time.monotonic() + 60
            while not life.ended() and time.monotonic() < until:
                if folder.exists() and len(list(folder.glob("piece-*"))) > before + 4:
                    break
            life.ended(chance.random() * 0.1)
            life.kill()
        code = life.code()
        assert code in (0, -signal.SIGKILL), life.output()
        if code == 0:
            break
        kills += 1
        struck.add(len(list(folder.glob("piece-*"))))
        assert kills < 60
    assert kills >= min(KILLS, 2), struck
    found = contents(folder)
    assert len(found) == 96
    if kind != "parquet":
        assert b"".join(found.values()) == b"".join(undisturbed[kind].values())
    life = nursery.life(trained, *arguments, f"--predictions={tmp_path / 'whole'}")
    assert life.code() == 0, life.output()
    assert contents(tmp_path / "whole" / "eval") == found
    assert sorted(path.name for path in folder.iterdir()) == ["_index.json", "_lock", *sorted(found)]
    assert not list(scratch.iterdir())


@pytest.mark.slow
def test_a_second_prediction_is_refused_by_name_and_another_output_and_a_killed_one_disturb_nobody(
    nursery, trained, undisturbed, tmp_path
):
    place = [f"--predictions={tmp_path / 'one'}"]
    first = nursery.life(trained, *SLOW, *place)
    wait_for_a_piece(first, tmp_path / "one" / "eval")
    second = nursery.life(trained, *PREDICT, *place, "--predictions_format=tfrecord")
    other = nursery.life(trained, *PREDICT, f"--predictions={tmp_path / 'other'}")
    assert second.code() == 1
    expected = (
        f"looplib: error: the directory of predictions {tmp_path / 'one' / 'eval'} is in use by process {first.pid} on "
    )
    assert last_line(second).startswith(expected), second.output()
    assert "wait until it ends or stop it, or name another directory (--predictions)" in last_line(second)
    assert other.code() == 0, other.output()
    assert contents(tmp_path / "other" / "eval") == undisturbed["jsonl"]
    first.kill()
    first.code()
    third = nursery.life(trained, *PREDICT, *place)
    assert third.code() == 0, third.output()
    assert contents(tmp_path / "one" / "eval") == undisturbed["jsonl"]


@pytest.mark.slow
def test_two_predictions_started_at_once_are_one_that_writes_and_one_that_is_refused(
    nursery, trained, undisturbed, tmp_path
):
    both = [nursery.life(trained, *SLOW, f"--predictions={tmp_path}") for _ in range(2)]
    codes = [life.code() for life in both]
    assert sorted(codes) == [0, 1], [life.output() for life in both]
    assert f"is in use by process {both[codes.index(0)].pid} on " in last_line(both[codes.index(1)])
    assert contents(tmp_path / "eval") == undisturbed["jsonl"]


@pytest.mark.slow
def test_a_prediction_beside_a_training_and_an_evaluation_beside_a_prediction_disturb_nobody(nursery, tmp_path):
    run = tmp_path / "run"
    training = nursery.life(run, *LONG, "--config.state_mb=0.01")
    wait_for_step(training, run, 4)
    prediction = nursery.life(run, *SLOW)
    wait_for_a_piece(prediction, run / "predictions" / "eval")
    evaluation = nursery.life(run, *EVALUATION, "--config.state_mb=0.01")
    assert evaluation.code() == 0, evaluation.output()
    assert prediction.code() == 0, prediction.output()
    wait_for_step(training, run, saved_step(run) + 4)
    training.kill()
    training.code()
    assert len(contents(run / "predictions" / "eval")) == 32


@pytest.mark.slow
def test_two_workers_mend_a_piece_and_a_refusal_of_the_chief_ends_both(nursery, trained, undisturbed, tmp_path):
    place = [f"--predictions={tmp_path}"]
    first = nursery.life(trained, *PREDICT, *place)
    assert first.code() == 0, first.output()
    (tmp_path / "eval" / "piece-00020.jsonl").unlink()
    workers = nursery.workers(2, trained, *SLOW, *place)
    until = time.monotonic() + 60
    while not (tmp_path / "eval" / "piece-00020.jsonl").exists():
        assert time.monotonic() < until and not workers[0].ended(0.005), workers[0].output()
    workers[0].kill(signal.SIGSTOP)  # it has the folder until the others are refused
    refused = nursery.workers(2, trained, *PREDICT, *place)
    assert [life.code() for life in refused] == [1, 1]
    workers[0].kill(signal.SIGCONT)
    assert f"is in use by process {workers[0].pid} on " in last_line(refused[0])
    assert [life.code() for life in workers] == [0, 0], workers[0].output()
    labels = [
        json.loads(line)["label"] for piece in contents(tmp_path / "eval").values() for line in piece.splitlines()
    ]
    assert labels == [
        json.loads(line)["label"] for piece in undisturbed["jsonl"].values() for line in piece.splitlines()
    ]
    assert len(contents(tmp_path / "eval")) == 32


@pytest.mark.slow
def test_a_folder_that_is_moved_away_ends_a_prediction_with_a_sentence(nursery, trained, undisturbed, tmp_path):
    life = nursery.life(trained, *SLOW, f"--predictions={tmp_path}")
    wait_for_a_piece(life, tmp_path / "eval")
    (tmp_path / "eval").rename(tmp_path / "moved")
    assert life.code() == 1
    assert "was moved or removed" in last_line(life) and not (tmp_path / "eval").exists()
    (tmp_path / "moved").rename(tmp_path / "eval")  # as it advises
    life = nursery.life(trained, *PREDICT, f"--predictions={tmp_path}")
    assert life.code() == 0 and contents(tmp_path / "eval") == undisturbed["jsonl"]


def check_sentence(life, *words):
    """That a job ended with one sentence that has some words, and without a trace."""
    assert life.code() == 1, life.output()
    for word in words:
        assert word in last_line(life), life.output()
    assert "Traceback" not in life.output() and "trace above" not in life.output()


@pytest.mark.slow
def test_a_disk_that_gets_full_ends_a_prediction_with_a_sentence_and_it_continues_once_there_is_space(
    nursery,
    trained,
    undisturbed,
    disk,  # noqa: F811
):
    life = nursery.life(trained, *SLOW, f"--predictions={disk}")
    wait_for_a_piece(life, disk / "eval")
    with contextlib.suppress(OSError), open(disk / "somebody_elses", "wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
    check_sentence(
        life, f"the predictions cannot be written to {disk / 'eval'}: [Errno 28] No space left on device: '{disk}/eval/",
        "; free space on that disk; then run the same command again",
    )  # fmt: skip
    check_sentence(nursery.life(trained, *PREDICT, f"--predictions={disk}"), "No space left", "; free space")
    assert not list((disk / "eval").glob("*.new"))
    (disk / "somebody_elses").unlink()
    life = nursery.life(trained, *PREDICT, f"--predictions={disk}")
    assert life.code() == 0, life.output()
    assert contents(disk / "eval") == undisturbed["jsonl"]


def mount(*arguments):
    result = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"nothing can be mounted here: {result.stderr.strip()}")


@pytest.mark.slow
def test_a_place_that_cannot_be_written_is_a_sentence_with_the_cure(nursery, trained, tmp_path):
    view, loop, file = tmp_path / "view", tmp_path / "loop", tmp_path / "file"
    view.mkdir()
    loop.symlink_to(loop)
    file.write_text("")
    mount("--bind", view, view)
    try:
        mount("-o", "remount,bind,ro", view)
        started = [
            (nursery.life(trained, *PREDICT, f"--predictions={place}"), words)
            for place, words in [
                (view, f"Read-only file system: '{view}/eval'; make that file system writable, or use another"),
                (file, f"File exists: '{file}'; move away what has that name"),
                (loop / "x", "; remove the symbolic link there"),
                (tmp_path / ("x" * 300), "which cannot be used: it has more than"),
            ]
        ]
        for life, words in started:
            check_sentence(life, words)
    finally:
        subprocess.run(["umount", str(view)], check=True)


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to start it as another user")
def test_a_directory_of_another_user_is_a_sentence_with_the_cure(nursery, trained, tmp_path):
    for place in (trained, tmp_path):
        for parent in (place, *place.parents):
            parent.chmod(parent.stat().st_mode | 0o005)
    environment = {"HOME": "/nonexistent"}
    life = nursery.life(
        trained, *PREDICT, f"--predictions={tmp_path}", user=65534, directory="/", environment=environment
    )
    check_sentence(life, f"Permission denied: '{tmp_path}/eval'", "; fix the permissions, or use another directory")
