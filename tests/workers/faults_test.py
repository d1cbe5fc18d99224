"""A worker that dies, freezes, fails, is cut off, preempted or missing: all end within a minute and say why, once."""

import os
import re
import signal
import time

import pytest
from cluster_harness import Namespaces
from conftest import more, repetitions

from looplib.commands.compare import compare
from looplib.run import commits, status
from looplib.run.directory import RunDir

# Long enough to strike in the middle; a step is a collective op of both. Each worker has a pipeline of its own, whose
# iterator's state is saved.
STEPS = repetitions(60, 120)
ARGUMENTS = [
    "--mode=train", "--config.slow_step=0.01", f"--train_steps={STEPS}", "--config.state_mb=0.01", "--config.data=interleaved",
    "--verbosity=0"
]  # fmt: skip
LIMIT = 60.0  # seconds


@pytest.fixture(scope="module")
def whole(nursery, tmp_path_factory):
    """A run of two workers that nothing has happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(nursery, [folder])
    return folder


@pytest.fixture(scope="module")
def struck(tmp_path_factory):
    """One run that test after test strikes; each resumes it where the last one ended it."""
    return tmp_path_factory.mktemp("struck") / "run"


@pytest.fixture(scope="module")
def froze(tmp_path_factory):
    """The run of which a worker freezes."""
    return tmp_path_factory.mktemp("froze") / "run"


def finish(nursery, folders):
    """Runs two workers in each directory to the end, all at once; those of a run that has begun from their states."""
    begun = [saved_step(folder) for folder in folders]
    runs = [nursery.workers(2, folder, *ARGUMENTS) for folder in folders]
    for step, processes in zip(begun, runs):
        for process in processes:
            assert process.code(300) == 0, process.output()
            assert not step or f"resumes after step {step} from its saved state" in process.output()


def saved_step(folder):
    done = commits.newest(os.path.join(folder, "checkpoints"))
    return done.step if done else 0


def wait_for_checkpoints(folder, processes, more=4):
    """Waits until a run has saved some steps further than it was when it was started."""
    until, target = time.monotonic() + 120, saved_step(folder) + more
    while saved_step(folder) < target:
        assert time.monotonic() < until and not any(process.ended() for process in processes), "\n".join(
            process.output() for process in processes
        )
        time.sleep(0.01)


def codes(processes, since, limit=LIMIT):
    """The exit codes, all within the limit."""
    return [process.code(max(1.0, since + limit - time.monotonic())) for process in processes]


def causes(process):
    return re.findall(r"^looplib: error: .*", process.output(), re.M)


def assert_written_as_failed(folder, cause):
    report = RunDir(folder).report()
    assert (report.status, f"looplib: error: {report.error}") == ("failed", cause)
    assert status.read_status(str(folder)).state == "failed"


def compare_with_whole(whole, folder):
    result = compare(whole, folder)
    assert result.differences == [] and result.examples


def start_and_wait(nursery, folder, *arguments, **settings):
    processes = nursery.workers(2, folder, *ARGUMENTS, *arguments, **settings)
    wait_for_checkpoints(folder, processes)
    return processes


# Strikes on one run.


@pytest.mark.slow
def test_an_error_in_one_worker_ends_the_other_with_the_first_error_in_words(nursery, struck):
    processes = nursery.workers(2, struck, *ARGUMENTS, f"--config.fail_at={saved_step(struck) + 10}")
    assert codes(processes, time.monotonic() + 60) == [1, 1]
    for process in processes:
        (cause,) = causes(process)
        assert "this example is broken" in cause, process.output()
    assert "worker 1" in causes(processes[0])[0]
    assert "Traceback" in processes[1].output()
    assert_written_as_failed(struck, causes(processes[0])[0])


@pytest.mark.parametrize("victim", [1, *more([0])])
def test_a_killed_worker_ends_the_other(victim, nursery, struck):
    processes = start_and_wait(nursery, struck)
    processes[victim].kill()
    found = codes(processes, time.monotonic())
    assert found[victim] == -signal.SIGKILL and found[1 - victim] == 1
    (cause,) = causes(processes[1 - victim])
    assert f"worker {victim}" in cause and "died" in cause
    if victim:  # the chief, which writes the report, has survived
        assert_written_as_failed(struck, cause)


@pytest.mark.parametrize("victim", [1, *more([0])])
def test_a_preempted_worker_makes_all_save_and_leave(victim, nursery, struck):
    processes = start_and_wait(nursery, struck)
    processes[victim].kill(signal.SIGTERM)
    assert codes(processes, time.monotonic()) == [75, 75], "".join(process.output() for process in processes)
    saved = [re.search(r"at step (\d+), saved in .*ckpt-(\d+)", process.output()) for process in processes]
    assert saved[0][1] == saved[0][2] == saved[1][1]


@pytest.fixture
def network():
    with Namespaces(2) as network:
        yield network


@pytest.mark.slow
@pytest.mark.skipif(bool(Namespaces.missing()), reason=Namespaces.missing())
def test_a_frozen_worker_and_a_cut_link_end_all(nursery, network, struck, froze):
    """Both at once, as the others notice them after 20 s of silence."""
    hosts = (address.partition(":")[0] for address in network.addresses)
    frozen = start_and_wait(nursery, froze)
    frozen[0].kill(signal.SIGSTOP)
    was_frozen = time.monotonic()
    cut = start_and_wait(nursery, struck, namespaces=dict(zip(network.spaces, hosts)))
    network.cut(1)
    was_cut = time.monotonic()

    assert codes([frozen[1]], was_frozen) == [1]
    (cause,) = causes(frozen[1])
    assert "worker 0" in cause
    frozen[0].kill(signal.SIGCONT)
    assert codes([frozen[0]], time.monotonic()) == [1]

    assert codes(cut, was_cut) == [1, 1]
    assert "worker 1" in causes(cut[0])[0] and "worker 0" in causes(cut[1])[0]


@pytest.mark.slow
def test_after_all_these_strikes_the_run_resumes_exactly(nursery, struck, froze, whole):
    assert saved_step(struck) < STEPS
    resumed = [struck, froze]
    finish(nursery, resumed)
    for folder in resumed:
        compare_with_whole(whole, folder)


# Others.


@pytest.mark.slow
def test_a_value_that_is_not_finite_on_one_worker_halts_all_at_the_same_step(nursery, tmp_path):
    # A state that takes long to write: the other worker's failure may not end the chief before its save.
    processes = nursery.workers(2, tmp_path / "run", *ARGUMENTS, "--config.nan_at=10", "--config.state_mb=300")
    assert codes(processes, time.monotonic() + 60) == [1, 1]
    for process in processes:
        (cause,) = causes(process)
        # Where relu(NaN) is 0, which depends on the processor, the loss is finite.
        assert re.search("at step 10, (loss, )?the gradient of", cause), cause
    assert commits.newest(str(tmp_path / "run" / "checkpoints")).step == 8


@pytest.mark.slow
def test_workers_roll_back_together(nursery, tmp_path):
    arguments = [*ARGUMENTS, "--config.nan_at=30", "--non_finite=rollback", "--train_steps=40"]
    processes = nursery.workers(2, tmp_path / "run", *arguments)
    assert codes(processes, time.monotonic() + 120) == [0, 0], "".join(process.output() for process in processes)
    assert "rolling back to step 28 and continuing with the data after step 30" in processes[0].output()
    assert commits.newest(str(tmp_path / "run" / "checkpoints")).step == 40


@pytest.mark.slow
def test_a_worker_that_never_starts_is_named(nursery, tmp_path):
    processes = nursery.workers(3, tmp_path / "run", *ARGUMENTS, "--join_limit=4", missing=[1])
    assert codes(processes, time.monotonic()) == [1, 1]
    for process in processes:
        (cause,) = causes(process)
        assert "worker 1" in cause
    assert not (tmp_path / "run" / "checkpoints").exists()
