"""Two processes and one run directory: the second training is refused, an evaluation only reads."""

import hashlib
import json
import os
import signal
import subprocess
import time

import pytest
from kill_test import records, saved_step

from looplib.commands.compare import compare

LONG = ["--train_steps=100000", "--config.slow_step=0.01", "--eval_interval=100000", "--loop=eager"]
EVALUATION = ["--mode=eval", "--loop=eager"]


def wait_for_step(life, folder, step):
    until = time.monotonic() + 60
    while saved_step(folder) < step:
        assert time.monotonic() < until and not life.ended(0.01), life.output()


def last_line(life):
    return life.output().strip().splitlines()[-1]


def test_a_second_training_is_refused_by_name_and_a_killed_one_blocks_nobody(nursery, tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    first = nursery.life(run, *LONG)
    wait_for_step(first, run, 4)
    second = nursery.life(run)
    assert second.code() == 1
    assert last_line(second).startswith(f"looplib: error: the run directory {run} is in use by process {first.pid} on ")
    assert "wait until it ends or stop it, or use a separate model_dir" in last_line(second)
    reached = saved_step(run)
    wait_for_step(first, run, reached + 4)  # the first is not disturbed
    first.kill()
    assert first.code() == -signal.SIGKILL
    reached = saved_step(run)
    steps = f"--train_steps={reached + 8}"
    third = nursery.life(run, *LONG, steps)
    assert third.code() == 0, third.output()
    assert f"restored step {reached} from " in third.output()
    alone = nursery.life(whole, *LONG, steps)
    assert alone.code() == 0, alone.output()
    assert compare(whole, run).differences == [] and records(whole) == records(run)


@pytest.mark.slow
def test_two_started_at_once_are_one_that_trains_and_one_that_is_refused(nursery, tmp_path):
    both = [nursery.life(tmp_path / "run", "--train_steps=20", "--loop=eager") for _ in range(2)]
    codes = [life.code() for life in both]
    assert sorted(codes) == [0, 1]
    assert f"is in use by process {both[codes.index(0)].pid} on " in both[codes.index(1)].output()


def state_of(folder):
    """Returns every file of a directory with its content and times."""
    return {
        path.relative_to(folder): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_an_evaluation_runs_beside_a_training_and_holds_nothing_up(nursery, tmp_path):
    run = tmp_path / "run"
    training = nursery.life(run, *LONG)
    wait_for_step(training, run, 4)
    evaluation = nursery.life(run, *EVALUATION)  # by the time that it is built, what it found is long deleted
    assert evaluation.code() == 0, evaluation.output()
    reached = saved_step(run)
    wait_for_step(training, run, reached + 4)
    training.kill()
    training.code()
    evaluated = [record for record in records(run) if record["split"] == "eval"]
    assert len(evaluated) == 1 and evaluated[0]["step"] >= 4 and evaluated[0]["examples"] == 96
    assert json.loads((run / "run_eval.json").read_text())["status"] == "done"


@pytest.fixture(scope="module")
def finished(nursery, tmp_path_factory):
    """The directory of a run that is done."""
    run = tmp_path_factory.mktemp("finished") / "run"
    life = nursery.life(run, "--train_steps=20", "--loop=eager")
    assert life.code() == 0, life.output()
    return run


@pytest.mark.slow
def test_an_evaluation_of_a_read_only_directory_writes_nothing_and_reports_on_the_console(nursery, finished, tmp_path):
    run, view = finished, tmp_path / "view"
    view.mkdir()
    for command in (["--bind", run, view], ["-o", "remount,bind,ro", view]):
        result = subprocess.run(["mount", *map(str, command)], capture_output=True, text=True)
        if result.returncode:
            subprocess.run(["umount", str(view)], capture_output=True)
            pytest.skip(f"a directory cannot be made read-only here: {result.stderr.strip()}")
    try:
        before = state_of(run)
        evaluation = nursery.life(view, *EVALUATION)
        assert evaluation.code() == 0, evaluation.output()
        assert state_of(run) == before
        training = nursery.life(view)
        assert training.code() == 1
        assert "cannot be written to" in last_line(training) and "Read-only file system" in last_line(training)
    finally:
        subprocess.run(["umount", str(view)], check=True)
    accuracy = next(record for record in records(run) if record["step"] == 20 and record["split"] == "eval")["accuracy"]
    assert f"step      20  eval   accuracy {accuracy:.4g}" in evaluation.output()


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to start it as another user")
def test_an_evaluation_as_another_user_writes_nothing(nursery, finished):
    for parent in finished.parents:
        parent.chmod(parent.stat().st_mode | 0o001)
    before = state_of(finished)
    evaluation = nursery.life(finished, *EVALUATION, user=65534, directory="/", environment={"HOME": "/nonexistent"})
    assert evaluation.code() == 0, evaluation.output()
    assert "this evaluation reports on the console only" in evaluation.output()
    assert "step      20  eval   accuracy" in evaluation.output()
    assert state_of(finished) == before
