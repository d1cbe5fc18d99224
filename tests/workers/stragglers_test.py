"""Of two real workers that train in step, the one that is slow is named, by its data or its steps; or none is."""

import pytest
from conftest import more

from looplib.report.page.content import read_run
from looplib.report.page.verdict import findings
from looplib.run.directory import RunDir


def trained(nursery, folder, *arguments):
    """Trains on two workers; returns (the newest start in `run.json`, what the chief printed)."""
    workers = nursery.workers(2, folder, *arguments, binary="straggling")
    assert [worker.code(300) for worker in workers] == [0, 0], "".join(worker.output() for worker in workers)
    return RunDir(folder).report().newest, workers[0].output()


@pytest.mark.parametrize(
    "slow, worker, cause",
    [*more([("step", 0, "step"), ("work", 1, "step"), ("data", 1, "data")]), ("step", 1, "step")],
)
def test_a_slow_worker_is_named_with_the_cause(slow, worker, cause, nursery, tmp_path):
    start, printed = trained(nursery, tmp_path / "run", f"--config.slow={slow}", f"--config.worker={worker}")
    (found,) = start.slow_workers
    assert (found.worker, found.cause) == (worker, cause) and found.share > 0.3
    # What a worker reads while it reports holds nobody up.
    assert found.seconds > (0.01 if cause == "data" else 0.03) and found.others < found.seconds / 2
    assert f"worker {worker} is slower than the others" in printed
    texts = [remark.text for remark in findings(read_run(str(tmp_path / "run"), "run"))]
    assert any(text.startswith(f"Worker {worker} is slower than the others") for text in texts), texts


@pytest.mark.slow
@pytest.mark.parametrize("loop, steps", [("graph", 1500), ("eager", 500)])
def test_of_workers_that_are_alike_none_is_named(loop, steps, nursery, tmp_path):
    arguments = [f"--loop={loop}", f"--train_steps={steps}", "--steps_per_loop=50"]
    start, printed = trained(nursery, tmp_path / "run", *arguments)
    assert start.slow_workers == [] and "is slower" not in printed


@pytest.mark.slow
def test_a_worker_that_waits_for_its_data_is_named_in_the_eager_loop_too(nursery, tmp_path):
    start, _ = trained(nursery, tmp_path / "run", "--config.slow=data", "--config.seconds=0.2", "--loop=eager")
    (found,) = start.slow_workers
    assert (found.worker, found.cause) == (1, "data")
