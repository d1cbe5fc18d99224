"""Pipelines that end, on two workers with shares of their own: what is left out, and that it is said in time."""

import json

import endings
import pytest
from conftest import repetitions

JOBS = [(case, job, distribute) for case in endings.CASES for job in ("train", "evaluate")
        for distribute in ("auto", "tf") if job == "train" or endings.CASES[case][0][0] >= 0]  # fmt: skip
FEW = [("uneven", "train", "auto"), ("uneven, filtered", "train", "auto"), ("one empty, filtered", "evaluate", "auto")]


def batches_of(case, worker):
    """The batches of a worker's share, enough of them if it never ends."""
    sizes, kind = endings.CASES[case]
    numbers = [1000 * worker + i % 10 for i in range(400)] if sizes[worker] < 0 else None
    numbers = numbers or list(range(1000 * worker, 1000 * worker + sizes[worker]))
    batches = [numbers[i : i + endings.BATCH] for i in range(0, len(numbers), endings.BATCH)]
    return [batch for batch in batches if kind != "dropped" or len(batch) == endings.BATCH]


def expected(case, job):
    """(steps, sum of all examples used, their number): a step of a training needs a batch from each worker."""
    shares = [batches_of(case, worker) for worker in range(2)]
    steps = min(map(len, shares)) if job == "train" else max(map(len, shares))
    used = [number for share in shares for batch in share[:steps] for number in batch]
    return steps if job == "train" else 0, sum(used), len(used)


@pytest.fixture(scope="module")
def found(nursery, tmp_path_factory):
    """dict from job to what two workers did, in one pair of processes."""
    jobs = repetitions(FEW, JOBS)
    path = tmp_path_factory.mktemp("endings") / "found.json"
    lives = nursery.workers(2, path, *map("/".join, jobs), binary="endings")
    assert [life.code(500) for life in lives] == [0, 0], "".join(life.output() for life in lives)
    return dict(zip(jobs, json.loads(path.read_text())))


@pytest.mark.slow
def test_no_more_is_left_out_than_a_batch_for_each_worker_in_each_step_requires(found):
    for (case, job, distribute), result in found.items():
        steps, total, count = expected(case, job)
        if job == "train" and steps == 0:
            assert "error" in result, (case, result)
        elif job == "train" and distribute == "tf" and endings.CASES[case][1] in ("filtered", "flat_map"):
            assert "The length" in result["error"].replace("the", "The", 1), (case, result)
        else:
            assert (result.get("steps"), result.get("sum"), result.get("count")) == (steps, total, count), (
                case,
                result,
            )


@pytest.mark.slow
def test_it_is_said_before_the_training_where_the_lengths_are_known_and_after_it_where_not(found):
    said = {
        case: " ".join(result["warnings"])
        for (case, job, how), result in found.items()
        if (job, how) == ("train", "auto")
    }
    before = "Training.dataset lasts for 3 steps: it has shares of 3, 6 batches, in the order of the workers, and 3 of worker 1"
    assert said["uneven"].count("left out") == 1 and before in said["uneven"]
    after = (
        "the training data ended at step 3 on some workers only: the share of worker 1 has ended, and batches of others"
    )
    assert after in said["uneven, filtered"]
    if "even" in said:
        assert "left out" not in said["even"]
        assert (
            "shares of no end, 3 batches, in the order of the workers, and all further of worker 0"
            in said["one never ends"]
        )
        errors = {case: found[case, "train", "auto"].get("error", "") for case in said}
        assert "the shares of Training.dataset have 3, 0 batches" in errors["one empty"]
        assert "the shares of Training.dataset have 0, 2 batches" in errors["all dropped"]
        assert "the training data set is empty" in errors["one empty, filtered"]
