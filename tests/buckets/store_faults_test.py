"""Random faults over the whole of a run in a store: it ends as one that nothing befell, and the store stays whole."""

import os

import pytest
from lives import Nursery
from store_faults import clock_library, schedules

FAULTS = int(os.environ.get("LOOPLIB_FAULTS", 20))
FEW = (4, 110)  # a stop and a lost checkpoint, a second writer


def test_after_a_few_faults_a_run_in_a_store_is_whole(s3, nursery, tmp_path):
    outcomes = schedules(FEW, 1, s3, nursery, tmp_path)
    assert [str(outcome) for outcome in outcomes if outcome.problems] == []


@pytest.mark.slow
def test_after_random_faults_a_run_in_a_store_is_whole_and_one_machine_at_a_time_has_written_it(s3, tmp_path):
    clock = clock_library(tmp_path)
    with Nursery(("copied", "faulty", "s3fs", "keras", "tf_keras"), variables=clock) as nursery:
        outcomes = schedules(range(FAULTS), 0, s3, nursery, tmp_path, bool(clock))
    assert len(outcomes) == FAULTS
    assert [str(outcome) for outcome in outcomes if outcome.problems] == []
