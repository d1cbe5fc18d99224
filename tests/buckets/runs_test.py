"""Trainings in a store: each start may be on another machine, and the run is the one that was never interrupted."""

import json
import random
import signal

import pytest
from clouds import wait_for

from looplib.commands.compare import compare
from looplib.errors import EXIT_PREEMPTED
from looplib.report.alerts import RunObserver
from looplib.run import commits
from looplib.run.records import read_jsonl

STEPS = 40
COMMON = [f"--train_steps={STEPS}", "--config.slow_step=0.02", "--config.data=pipeline"]


def newest(folder):
    return max((done.step for done in commits.committed(str(folder / "checkpoints"))), default=0)


def records(folder):
    return [
        {key: value for key, value in record.items() if key != "steps_per_second"}
        for record in read_jsonl(str(folder / "metrics.jsonl"))
    ]


def same(whole, found):
    """Asserts that two runs have the same weights, order of examples and metrics."""
    result = compare(whole, found)
    assert result.differences == [] and result.examples and result.records >= STEPS // 5
    assert records(found) == records(whole)


@pytest.mark.slow
def test_a_run_killed_at_random_moments_on_machines_that_vanish_ends_as_one_that_was_not(cloud, nursery):
    whole = cloud.folder / "whole"
    undisturbed = nursery.life(whole, *COMMON)
    chance, kept = random.Random(5), 0
    for number in range(10):
        life = cloud.run(*COMMON)
        reached = kept + 1 + int(chance.random() * (STEPS - kept - 4)) if number < 4 else 0
        wait_for(lambda: life.ended() or max(cloud.steps(), default=0) >= reached, 60)
        life.ended(chance.random())
        life.kill()
        life.code()
        cloud.lose()
        assert max(cloud.steps(), default=0) >= kept
        kept = max(cloud.steps(), default=0)
    last = cloud.run(*COMMON)
    for life in (last, undisturbed):
        assert life.code() == 0, life.output()
    assert kept and f"restored step {kept} from " in last.output()
    same(whole, cloud.download("found"))


def test_sigterm_uploads_the_final_save_before_the_exit(cloud):
    cloud.proxy.faults.delay = 0.05
    life = cloud.run("--train_steps=100000", "--config.slow_step=0.01", "--checkpoint_interval=100000")
    wait_for(lambda: "step       5" in life.output(), 60)
    life.kill(signal.SIGTERM)
    assert life.code() == EXIT_PREEMPTED, life.output()
    (step,) = cloud.steps()
    folder = cloud.download("found")
    assert not commits.verify(commits.read_marker(str(folder / "checkpoints" / f"ckpt-{step}")))
    run = json.loads((folder / "run.json").read_text())
    assert run["status"] == "preempted" and run["step"] == step
    lease = max(name for name in cloud.names() if name.startswith(".lease"))
    assert json.loads(cloud.read(lease))["released"]


def test_the_last_line_the_page_and_alerts_name_the_run_by_its_url(cloud):
    life = cloud.run("--train_steps=5", machine="one")
    assert life.code() == 0, life.output()
    url, local = cloud.url("run"), cloud.local("one")
    assert f"the run directory is {url}, its local copy {local}, and its page {local}/report.html" in life.output()
    assert json.loads((local / "run.json").read_text())["url"] == url
    assert url in (local / "report.html").read_text()
    observer = RunObserver(
        str(local), process=json.loads((local / "run.json").read_text())["starts"][-1]["process"]["pid"]
    )
    assert [(alert.kind, alert.run) for alert in observer.look()] == [("done", url)]


@pytest.mark.slow
def test_an_upload_after_a_signal_may_take_longer_than_a_step(cloud):
    life = cloud.run("--train_steps=100000", "--config.slow_step=0.01", "--checkpoint_interval=100000")
    wait_for(lambda: "step       5" in life.output(), 60)
    cloud.proxy.faults.only = lambda request: request.method == "PUT" and "/ckpt-" in request.path
    cloud.proxy.faults.delay = 9.0  # of three files; a step would have 15 s
    life.kill(signal.SIGTERM)
    assert life.code(90) == EXIT_PREEMPTED, life.output()
    (step,) = cloud.steps()
    assert f"ended by SIGTERM at step {step}, saved in " in life.output().splitlines()[-1]
    assert json.loads(cloud.read("run.json"))["status"] == "preempted"


@pytest.mark.slow
def test_the_final_save_of_a_training_waits_for_a_store_that_is_down(cloud):
    life = cloud.run("--train_steps=40", "--config.slow_step=0.1", "--mode=train")
    wait_for(lambda: "step      35" in life.output(), 60)
    cloud.proxy.stop()
    assert not life.ended(60.0)
    cloud.proxy.start()
    assert life.code() == 0, life.output()
    assert max(cloud.steps()) == 40
    assert json.loads(cloud.read("run.json"))["status"] == "done"


@pytest.mark.slow
def test_a_rollback_by_a_guard_is_in_the_store_too(cloud, nursery):
    """A checkpoint that the run has set aside is gone there, and one that it has saved again is there as it is now."""
    arguments = [
        "--train_steps=24", "--config.nan_at=14", "--non_finite=rollback", "--checkpoint_interval=4", "--mode=train",
        "--config.slow_step=0.05",
    ]  # fmt: skip
    life = cloud.run(*arguments)
    assert life.code() == 0 and "rollback" in life.output(), life.output()
    folder = cloud.download("found")
    here = commits.committed(str(cloud.local() / "checkpoints"))
    assert here and cloud.steps() == sorted(done.step for done in here), life.output()
    for done in here:
        assert commits.read_marker(str(folder / "checkpoints" / f"ckpt-{done.step}")).files == done.files
        assert not commits.verify(commits.read_marker(str(folder / "checkpoints" / f"ckpt-{done.step}")))


@pytest.mark.slow
def test_a_training_that_lost_its_lease_ends_with_a_sentence(cloud, s3):
    first = cloud.run("--train_steps=100000", "--config.slow_step=0.02", machine="one")
    wait_for(lambda: cloud.steps(), 60)
    (name,) = [name for name in cloud.names() if name.startswith(".lease")]
    lease = json.loads(cloud.read(name))  # before the proxy stops: it may cut a request, of which moto keeps a part
    cloud.proxy.stop()
    cloud.write(name, json.dumps({**lease, "host": "elsewhere"}).encode())
    second = cloud.copied("--steps=1000000", "--pause=0.2", machine="two", environment={"AWS_ENDPOINT_URL": s3.url})
    wait_for(lambda: '"start"' in second.output(), 60)
    cloud.proxy.start()
    assert first.code() == 1
    assert "LockedError" in first.output() and "Traceback" not in first.output()
    second.end()


@pytest.mark.slow
def test_two_workers_with_a_cache_each_train_as_on_one_file_system(cloud, nursery):
    arguments = [*COMMON, "--mode=train", "--checkpoint_interval=4"]
    whole = cloud.folder / "whole"
    for life in nursery.workers(2, whole, *arguments):
        assert life.code() == 0, life.output()

    def start(*more):
        return nursery.workers(2, cloud.url(), *arguments, *more, environments=[
            cloud.environment(f"machine{index}") for index in range(2)
        ])  # fmt: skip

    def started():
        saved, lives = max(cloud.steps(), default=0), start("--config.slow_step=0.2")
        wait_for(lambda: max(cloud.steps(), default=0) > saved, 60)
        return lives

    lives = started()
    for life in lives:
        life.kill()
        life.code()
        assert "cannot write its position" not in life.output()
    for index in range(2):
        cloud.lose(f"machine{index}")
    lives = started()
    cloud.proxy.faults.only = lambda request: request.method == "PUT" and "/ckpt-" in request.path
    cloud.proxy.faults.delay = 8.0
    for life in lives:
        life.kill(signal.SIGTERM)
    assert [life.code() for life in lives] == [EXIT_PREEMPTED] * 2, [life.output() for life in lives]
    assert all("ended by " in life.output() and "in time" not in life.output() for life in lives)
    cloud.proxy.clear()
    lives = started()
    cloud.proxy.stop()
    saved = max(cloud.steps())
    wait_for(lambda: newest(cloud.local("machine0")) > saved, 60)  # which the other worker does not have
    for life in lives:
        life.kill()
        life.code()
    cloud.proxy.start()
    for life in start():
        assert life.code() == 0, life.output()
    found = cloud.download("found")
    same(whole, found)
    marker = commits.read_marker(str(found / "checkpoints" / f"ckpt-{STEPS}"))
    assert {name for name in marker.files if ".position-" in name} == {
        f"ckpt-{STEPS}.position-{index}-of-2" for index in range(2)
    }


def test_older_checkpoints_that_a_start_fetches_while_it_trains_are_pruned_before_the_run_ends(cloud):
    assert cloud.copied("--steps=4", "--keep=9", machine="one").code() == 0
    assert cloud.steps() == [1, 2, 3, 4]
    assert cloud.copied("--steps=5", "--keep=2", machine="two").code() == 0  # one step, which may end before they come
    assert cloud.steps() == [4, 5]
