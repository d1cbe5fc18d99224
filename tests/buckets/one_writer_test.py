"""One writer: the lease of a run in a store, with processes, and with a store that is out of reach."""

import json
import os
import signal
import threading
import time

import copied
import pytest
from clouds import LEASE, lease_of, said, wait_for

from looplib.buckets import lease
from looplib.buckets.lease import Lease
from looplib.errors import LockedError
from looplib.run import commits
from looplib.stores.stores import Store


def metrics(cloud):
    return [json.loads(one) for one in cloud.read("metrics.jsonl").splitlines()]


@pytest.mark.slow
def test_a_second_writer_is_refused_by_the_name_of_the_first(cloud):
    first = cloud.copied("--steps=1000", "--pause=0.1", machine="one")
    wait_for(lambda: cloud.steps())
    second = cloud.copied(machine="two")
    assert second.code() == 1
    (error,) = said(second)
    assert error["error"] == "LockedError" and str(first.pid) in error["text"] and cloud.url() in error["text"]
    known = max(cloud.steps())
    wait_for(lambda: max(cloud.steps()) > known)  # the first one goes on
    first.end()


@pytest.mark.slow
def test_of_two_that_start_at_once_one_gets_the_run(cloud):
    for number in range(8):
        name = f"run{number}"
        both = [cloud.copied("--steps=6", "--pause=0.5", name=name, machine=machine) for machine in ("one", "two")]
        codes = [life.code() for life in both]
        assert sorted(codes) == [0, 1], [life.output() for life in both]
        assert said(both[codes.index(1)])[-1]["error"] == "LockedError"
        assert cloud.steps(name) == [4, 5, 6]


def test_a_killed_writer_on_another_machine_is_followed_once_its_lease_has_expired(cloud):
    first = cloud.copied("--steps=1000", "--pause=0.1", machine="one")
    wait_for(lambda: cloud.steps())
    first.kill()
    first.code()
    # As another machine would have it, which cannot see whether the process has ended.
    (name,) = [name for name in cloud.names() if name.startswith(".lease")]
    cloud.write(name, json.dumps({**json.loads(cloud.read(name)), "host": "elsewhere"}).encode())
    begun, kept = time.monotonic(), cloud.steps()[-1]
    second = cloud.copied(f"--steps={kept + 3}", machine="two")
    assert second.code() == 0, second.output()
    start = said(second)[0]
    assert start["start"] == kept and LEASE <= start["time"] - begun < 3 * LEASE
    assert cloud.steps() == [kept + 1, kept + 2, kept + 3]


@pytest.mark.slow
def test_a_writer_that_lost_its_lease_while_the_store_was_out_of_reach_ends_and_writes_nothing_more(cloud, s3):
    """It is stopped for as long as the lease lasts; the other one reaches the store by another way."""
    first = cloud.copied("--steps=1000", "--pause=0.1", machine="one", environment=lease_of(5.0))
    wait_for(lambda: cloud.steps())
    cloud.proxy.stop()
    (name,) = [name for name in cloud.names() if name.startswith(".lease")]
    cloud.write(name, json.dumps({**json.loads(cloud.read(name)), "host": "elsewhere"}).encode())
    kept = cloud.steps()[-1]
    variables = {"AWS_ENDPOINT_URL": s3.url, **lease_of(5.0)}
    second = cloud.copied(f"--steps={kept + 80}", "--pause=0.05", "--seed=7", machine="two", environment=variables)
    wait_for(lambda: said(second))
    cloud.proxy.start()
    assert first.code() == 1, first.output()
    assert said(first)[-1]["error"] == "LockedError" and "taken" in said(first)[-1]["text"]
    assert second.code(60) == 0, second.output()
    (start, *_) = said(second)
    after = [record for record in metrics(cloud) if record["step"] > start["start"]]
    assert [record["loss"] for record in after] == [record["step"] + 0.7 for record in after]  # the second's alone
    folder = cloud.download("found")
    for step in (step for step in cloud.steps() if step > start["start"]):
        assert not commits.verify(commits.read_marker(str(folder / "checkpoints" / f"ckpt-{step}")))
        assert (folder / "checkpoints" / f"ckpt-{step}.index").read_bytes() == copied.content(step, 7, 1000)
    written = [request for request in cloud.proxy.requests if request.method in ("PUT", "DELETE") and request.status]
    assert not [one for one in written if one.time > start["time"] and ".lease" not in one.path]


@pytest.mark.slow
def test_a_writer_that_was_stopped_for_longer_than_its_lease_ends(cloud):
    """As a virtual machine that is suspended."""
    first = cloud.copied("--steps=1000", "--pause=0.1", machine="one")
    wait_for(lambda: cloud.steps())
    first.kill(signal.SIGSTOP)
    time.sleep(0.2)
    second = cloud.copied("--steps=1000", "--pause=0.1", machine="two")
    wait_for(lambda: said(second))
    first.kill(signal.SIGCONT)
    assert first.code() == 1
    assert said(first)[-1]["error"] == "LockedError"
    known = max(cloud.steps())
    wait_for(lambda: max(cloud.steps()) > known)
    second.end()


class StoreOfALateWriter(Store):
    """A store in which a writer renews its lease after another one's last look, and before that one's lease is there."""

    late = None

    def create(self, *what):
        late, self.late = self.late, None
        if late:
            late.renew(1.0)
        super().create(*what)


def test_a_writer_that_renews_between_the_last_look_and_the_lease_of_another_one_keeps_the_run(monkeypatch):
    monkeypatch.setattr(lease, "SECONDS", 0.5)
    monkeypatch.setattr(lease.LeaseHolder, "is_gone", False)
    url = f"memory://late-{os.getpid()}/run"
    first, store = Lease(Store(url)), StoreOfALateWriter(url)
    store.late = first
    with pytest.raises(LockedError, match="is in use"):
        threading.Timer(0.7, lambda: first.renew(1.0)).start()  # it is found alive again
        Lease(store)
    first.check(1.0, surely=True)
    assert lease.highest_of(store.listed(lease.FOLDER)) == 1
