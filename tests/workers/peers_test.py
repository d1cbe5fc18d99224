"""When one of several processes dies, freezes or is cut off, all leave, each with one line; real processes and signals.

The chief is the victim in some tests and another worker in the rest; with --all, each in turn.
"""

import json
import os
import signal
import socket
import sys
import time

import pytest
from cluster_harness import Loopback, Namespaces, Workers
from conftest import more
from paths import PROGRAMS

from looplib.cluster import peers
from looplib.cluster.environment import Cluster
from looplib.cluster.peers import WatchedPeers

AGAIN = "; run the same command on all workers to resume from the newest checkpoint"
WORKER = str(PROGRAMS / "pulse_worker.py")
SILENCE = 2.0


def command(join_limit=30.0, silence_limit=SILENCE):
    return [sys.executable, WORKER, str(join_limit), str(silence_limit)]


@pytest.fixture
def network():
    with Loopback(3) as loopback:
        yield loopback


@pytest.fixture
def workers(network, tmp_path):
    with Workers(command(), network, tmp_path) as workers:
        for i in range(3):
            workers.wait_for(i, "joined False")  # False: without TensorFlow
        yield workers


def name(network, index):
    return f"worker {index} ({network.addresses[index]})" + (", the chief," if index == 0 else "")


def assert_all_leave(workers, line, indices, code=1, seconds=15.0):
    assert workers.codes(seconds, indices) == [code] * len(indices)
    for i in indices:
        assert workers.err(i).splitlines() == [line]


@pytest.mark.parametrize("victim", [0, *more([2])])
def test_when_a_worker_is_killed_the_others_leave_at_once(victim, workers, network):
    killed = workers.kill(victim)
    others = [i for i in range(3) if i != victim]
    line = f"looplib: error: {name(network, victim)} died; see its log{AGAIN}"
    assert_all_leave(workers, line, others)
    assert max(workers.ended[i] for i in others) - killed < SILENCE + 5


@pytest.mark.slow
@pytest.mark.parametrize("victim", [2, *more([0])])
def test_when_a_worker_freezes_the_others_leave_and_it_leaves_too_once_it_wakes(victim, workers, network):
    frozen = workers.signal(victim, signal.SIGSTOP)
    others = [i for i in range(3) if i != victim]
    line = (
        f"looplib: error: {name(network, victim)} sent nothing for {SILENCE:g} s: it is frozen or disconnected{AGAIN}"
    )
    assert_all_leave(workers, line, others)
    assert min(workers.ended[i] for i in others) - frozen > SILENCE / 2  # a short pause is no reason
    time.sleep(0.5)
    workers.signal(victim, signal.SIGCONT)
    assert_all_leave(workers, line, [victim])


@pytest.mark.slow
def test_a_short_freeze_alarms_nobody(workers):
    workers.signal(1, signal.SIGSTOP)
    time.sleep(SILENCE / 2)
    workers.signal(1, signal.SIGCONT)
    time.sleep(SILENCE * 1.5)
    for i in range(3):
        workers.tell(i, "leave")
    assert workers.codes(15) == [0, 0, 0]
    assert [workers.err(i) for i in range(3)] == ["", "", ""]


@pytest.mark.parametrize("victim", [1, *more([0])])
def test_an_error_is_sent_to_the_others_and_printed_by_its_worker_only_in_its_own_words(victim, workers, network):
    workers.tell(victim, "fail")
    line = f"looplib: error: {name(network, victim)} failed: ValueError: a bad shape"
    assert_all_leave(workers, line, [i for i in range(3) if i != victim])
    assert_all_leave(workers, "looplib: error: ValueError: a bad shape", [victim])


@pytest.mark.slow
def test_an_error_that_another_ones_death_brought_about_is_not_reported(workers, network):
    workers.tell(2, "fail 20")  # as a collective that fails before the pulse says why
    time.sleep(0.3)
    workers.signal(1, signal.SIGSTOP)
    line = f"looplib: error: {name(network, 1)} sent nothing for {SILENCE:g} s: it is frozen or disconnected{AGAIN}"
    assert_all_leave(workers, line, [0, 2])


def test_of_two_errors_at_once_all_name_the_same(workers, network):
    for index in (1, 2):
        workers.signal(index, signal.SIGSTOP)  # the first one must not end the second one before that is asked to fail
        workers.tell(index, "fail")
    for index in (1, 2):
        workers.signal(index, signal.SIGCONT)
    assert workers.codes(15) == [1, 1, 1]
    named = workers.err(0).split(" (")[0].removeprefix("looplib: error: ")
    assert named in ("worker 1", "worker 2")
    first, second = (1, 2) if named == "worker 1" else (2, 1)
    assert workers.err(first) == "looplib: error: ValueError: a bad shape\n"
    assert workers.err(second) == workers.err(0)


def test_a_preempted_worker_takes_the_others_along_with_its_code(workers, network):
    workers.tell(1, "preempted")
    line = f"looplib: {name(network, 1)} was preempted: SIGTERM came"
    assert_all_leave(workers, line, [0, 2], code=75)
    assert workers.codes(1, [1]) == [75] and workers.err(1) == ""


@pytest.mark.slow
def test_a_worker_whose_main_thread_hangs_leaves_too(workers, network):
    workers.tell(1, "hang")
    workers.wait_for(1, "hangs")
    workers.kill(2)
    assert_all_leave(workers, f"looplib: error: {name(network, 2)} died; see its log{AGAIN}", [0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "preempted"])
def test_a_worker_that_leaves_for_the_end_of_another_notes_how_the_run_ended(how, workers, network, tmp_path):
    workers.tell(0, f"note {tmp_path / 'end'}")
    workers.tell(2, "note")  # which never ends
    for index in (0, 2):
        workers.wait_for(index, "notes")
    if how == "killed":
        workers.kill(1)
        sentence = f"{name(network, 1)} died; see its log{AGAIN}"
        assert_all_leave(workers, f"looplib: error: {sentence}", [0, 2])
        assert (tmp_path / "end").read_text() == f"failed | {sentence}"
    else:
        workers.tell(1, "preempted")
        assert workers.codes(15) == [75, 75, 75]
        assert (tmp_path / "end").read_text() == "preempted | "


def test_a_child_that_outlives_its_worker_does_not_hide_the_death(workers, network):
    workers.tell(1, "fork 30")
    workers.wait_for(1, "forked")
    workers.kill(1)
    assert_all_leave(workers, f"looplib: error: {name(network, 1)} died; see its log{AGAIN}", [0, 2])


@pytest.mark.slow
def test_goodbyes_alarm_nobody_and_all_leave_together(workers):
    workers.tell(1, "leave")
    workers.tell(0, "leave")
    time.sleep(SILENCE / 2)
    assert not workers.ended  # they wait for worker 2, which may still fail
    left = time.monotonic()
    workers.tell(2, "leave")
    assert workers.codes(15) == [0, 0, 0]
    assert [workers.err(i) for i in range(3)] == ["", "", ""]
    assert max(workers.ended.values()) - left < SILENCE + 5


def test_a_failure_in_the_last_moments_is_seen_by_those_that_have_finished(workers, network):
    workers.tell(0, "leave 20")
    workers.tell(1, "leave 20")
    time.sleep(0.3)
    workers.kill(2)
    assert_all_leave(workers, f"looplib: error: {name(network, 2)} died; see its log{AGAIN}", [0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("slow", [2, *more([0])])
def test_a_worker_that_continues_for_long_after_the_others_have_left_is_not_alarmed(slow, workers):
    for i in range(3):
        if i != slow:
            workers.tell(i, "leave 0.5")
    assert workers.codes(15, [i for i in range(3) if i != slow]) == [0, 0]
    time.sleep(SILENCE * 1.5)
    workers.tell(slow, "leave")
    assert workers.codes(15, [slow]) == [0]
    assert workers.err(slow) == ""


# The meeting.


@pytest.mark.slow(spread=1)
@pytest.mark.parametrize("missing", [[0], [1, 2]])
def test_workers_that_never_come_are_named_by_all(missing, network, tmp_path):
    with Workers(command(join_limit=2.0), network, tmp_path, late=missing) as workers:
        present = [i for i in range(3) if i not in missing]
        assert workers.codes(20, present) == [1] * len(present)
        for i in present:
            (line,) = workers.err(i).splitlines()
            for j in missing:
                assert f"worker {j} ({network.addresses[j]})" in line and "within 2 s" in line
            assert not any(f"worker {j} (" in line for j in present)


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, *more([1])])
def test_a_worker_may_come_late(late, network, tmp_path):
    with Workers(command(), network, tmp_path, late=[late]) as workers:
        time.sleep(SILENCE * 1.5)
        assert not workers.ended
        workers.start(late)
        for i in range(3):
            workers.wait_for(i, "joined")


def test_a_worker_that_dies_while_it_waits_may_come_again(network, tmp_path):
    with Workers(command(), network, tmp_path, late=[2]) as workers:
        time.sleep(1)
        workers.kill(1)
        workers.codes(5, [1])
        workers.start(1)
        workers.start(2)
        for i in range(3):
            workers.wait_for(i, "joined")


@pytest.mark.parametrize("index", [1, *more([0])])
def test_a_second_process_with_the_same_index_is_refused_in_words(index, network, tmp_path):
    with Workers(command(), network, tmp_path, late=[2]) as workers:
        first = workers.processes[index]
        time.sleep(2)  # so that it is the first
        workers.start(index)
        assert workers.codes(20, [index]) == [1]
        (line,) = workers.err(index).splitlines()
        assert f"two processes claim to be worker {index}: process {first.pid} on" in line
        assert f"this is process {workers.processes[index].pid} on" in line
        assert first.poll() is None  # it still waits, and all can meet
        workers.start(2)
        for i in {0, 1, 2} - {index}:
            workers.wait_for(i, "joined")


def test_a_process_of_another_run_is_refused_in_words(network, tmp_path):
    with Workers(command(), network, tmp_path, late=[1, 2]) as workers:
        workers.start(1, {"LOOPLIB_JOB_ID": "yesterday's"})
        assert workers.codes(20, [1]) == [1]
        assert "another list of workers, or belongs to another job" in workers.err(1)
        other = Cluster((*network.addresses[:2], "127.0.0.1:1"), task_index=1).tf_config
        workers.start(1, {"TF_CONFIG": other})
        assert workers.codes(20, [1]) == [1]
        for i in (1, 2):
            workers.start(i)
        for i in range(3):
            workers.wait_for(i, "joined")


def test_strangers_do_not_disturb_the_meeting(network, tmp_path):
    host, port = network.addresses[0].split(":")
    with Workers(command(), network, tmp_path, late=[2]) as workers:
        end = time.monotonic() + 20
        while True:
            try:
                strangers = [socket.create_connection((host, int(port)), 5) for _ in range(4)]
                break
            except ConnectionRefusedError:
                assert time.monotonic() < end
                time.sleep(0.05)
        strangers[0].sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")  # as gRPC begins
        strangers[1].sendall(b"x" * 200_000)
        strangers[2].sendall(json.dumps({"index": [1], "run": 5}).encode() + b"\n[]\n")
        strangers.pop().close()
        workers.start(2)
        for i in range(3):
            workers.wait_for(i, "joined")
        for stranger in strangers:
            stranger.close()


@pytest.mark.slow
def test_a_port_in_use_is_named(network, tmp_path):
    host, port = network.addresses[0].split(":")
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, int(port)))
        server.listen()
        with Workers(command(join_limit=1.0), network, tmp_path) as workers:
            assert workers.codes(40) == [1, 1, 1]
            assert f"the chief cannot listen on its address {host}:{port} (Address already in use" in workers.err(0)
            assert "another process listens there" in workers.err(1)


def test_one_worker_alone_needs_nobody():
    peers.join(Cluster(("127.0.0.1:1",)), join_limit=60.0)
    assert not peers.current.joined
    peers.current.exit_with_first_cause(0)
    peers.current.announce_exit(1, "nobody hears it")
    peers.current.leave()


def test_peers_are_for_workers_that_train_in_step():
    with pytest.raises(ValueError, match="the evaluator of a cluster does not train in step"):
        WatchedPeers(Cluster(("127.0.0.1:1",), task_type="evaluator"))


# Over a network.

MISSING = Namespaces.missing() if os.geteuid() == 0 else "network namespaces need root"


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize("victim", [0, *more([1])])
def test_a_cut_link_is_distinguished_from_a_death_by_silence_and_ends_both_sides(victim, tmp_path):
    with Namespaces(3) as network, Workers(command(), network, tmp_path) as workers:
        for i in range(3):
            workers.wait_for(i, "joined")
        network.cut(victim)
        cut = time.monotonic()
        assert workers.codes(20) == [1, 1, 1]
        assert min(workers.ended.values()) - cut > SILENCE / 2
        silent = f"sent nothing for {SILENCE:g} s: it is frozen or disconnected{AGAIN}"
        for i in range(3):
            # The one that is cut off sees the chief fall silent; a cut chief sees that of one of the others.
            seen = [1, 2] if i == victim == 0 else [0] if i == victim else [victim]
            lines = [f"looplib: error: {name(network, j)} {silent}" for j in seen]
            assert workers.err(i).splitlines()[0] in lines and len(workers.err(i).splitlines()) == 1


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_a_link_that_is_cut_for_a_moment_alarms_nobody(tmp_path):
    with Namespaces(2) as network, Workers(command(silence_limit=5.0), network, tmp_path) as workers:
        for i in range(2):
            workers.wait_for(i, "joined")
        network.cut(1)
        time.sleep(1.5)
        network.mend(1)
        time.sleep(5)
        for i in range(2):
            workers.tell(i, "leave")
        assert workers.codes(15) == [0, 0]
