"""A store that is slow, down or fails now and then stops no step, and has everything in the end."""

import json
import re
import time

import pytest
from clouds import said, wait_for
from conftest import repetitions

from looplib.commands.status import status
from looplib.report.page.content import read_run
from looplib.report.page.verdict import findings
from looplib.run.status import standing_of

DOWN = 20.0


def as_it_should_be(cloud, steps, name="run", kept=3):
    """Asserts that the store has the newest checkpoints of a run of `copied`, and every line of its metrics."""
    assert cloud.steps(name)[-kept:] == list(range(steps - kept + 1, steps + 1))
    lines = [json.loads(one)["step"] for one in cloud.read("metrics.jsonl", name).splitlines()]
    assert lines == list(range(1, steps + 1))
    (lease,) = [key for key in cloud.names(name) if key == max(k for k in cloud.names(name) if k.startswith(".lease"))]
    assert json.loads(cloud.read(lease, name))["released"]


def test_a_store_that_is_down_stops_no_step_and_has_everything_in_the_end(cloud, capsys):
    seconds = repetitions(3.0, DOWN)
    life = cloud.copied(f"--steps={int(40 + 8 * seconds)}", "--pause=0.05")
    wait_for(lambda: cloud.steps())
    cloud.proxy.stop()
    stopped = time.monotonic()
    time.sleep(seconds)
    local, url = str(cloud.local()), cloud.url()
    wait_for(lambda: standing_of(local).error)
    there, waiting = sorted(cloud.steps()), standing_of(local).behind
    assert waiting > 0
    status([local])
    row = capsys.readouterr().out
    known = int(re.search(rf"not in {re.escape(url)} yet, which has step (\d+)", row)[1])
    assert known in there[-2:] and "cannot be reached" in row  # the answer to the last one may have been lost
    (remark,) = (one.text for one in findings(read_run(local, "run")) if url in one.text)
    assert f"has step {known}" in remark
    started = time.monotonic()
    cloud.proxy.start()
    assert life.code(300) == 0, life.output()
    assert (standing_of(local).behind, standing_of(local).error) == (0, "")
    status([local])
    assert url not in capsys.readouterr().out
    times = [one["time"] for one in said(life) if "step" in one]
    during = [one for one in times if stopped < one < started]
    assert len(during) > 4 * seconds
    assert max(later - one for one, later in zip(times, times[1:])) < 2.0  # of 0.05
    as_it_should_be(cloud, int(40 + 8 * seconds))


@pytest.mark.slow
def test_the_final_save_waits_for_a_store_that_is_down(cloud):
    seconds = DOWN
    life = cloud.copied("--steps=40", "--pause=0.05")
    wait_for(lambda: said(life)[-1:] and said(life)[-1].get("step") == 37)
    cloud.proxy.stop()
    assert not life.ended(seconds)
    assert said(life)[-1]["step"] == 40
    cloud.proxy.start()
    assert life.code(300) == 0, life.output()
    as_it_should_be(cloud, 40)


@pytest.mark.slow
@pytest.mark.parametrize("status", [503, 404, "cut"])
def test_a_storm_of_failures_is_waited_out(cloud, status):
    if status == "cut":
        cloud.proxy.faults.cut = 0.3
    else:
        cloud.proxy.faults.share, cloud.proxy.faults.status = 0.3, status
    if status == 404:  # which a store answers too where there is no bucket, so that a start ends at once
        cloud.proxy.faults.only = lambda request: bool(cloud.steps())
    life = cloud.copied("--steps=16", "--pause=0.05")
    assert life.code(300) == 0, life.output()
    as_it_should_be(cloud, 16)
    cloud.lose()
    life = cloud.copied("--steps=20", "--pause=0.05")  # it starts in the storm
    assert life.code(300) == 0, life.output()
    assert said(life)[0]["start"] == 16
    as_it_should_be(cloud, 20)
    assert sum(request.status in (0, status) for request in cloud.proxy.requests) > 10


@pytest.mark.slow
def test_a_slow_store_stops_no_step(cloud):
    cloud.proxy.faults.delay = 0.15
    life = cloud.copied("--steps=60", "--pause=0.05")
    assert life.code(120) == 0, life.output()
    times = [one["time"] for one in said(life) if "step" in one]
    assert times[-1] - times[0] < 60 * 0.05 + 3
    as_it_should_be(cloud, 60)
