"""Random faults: each run ends rightly, its next start comes out right, and nothing outside is changed."""

import os

import pytest
from random_faults import trials

FAULTS = int(os.environ.get("LOOPLIB_FAULTS", 20))


@pytest.mark.slow
def test_after_random_faults_the_end_the_next_start_and_the_surroundings_are_right(nursery, tmp_path):
    for parent in tmp_path.parents:
        parent.chmod(parent.stat().st_mode | 0o001)  # some starts are of another user
    outcomes = trials(range(FAULTS), 0, tmp_path, nursery)
    assert len(outcomes) == FAULTS and len({name for outcome in outcomes for name in outcome.faults}) > FAULTS / 3
    assert [outcome for outcome in outcomes if outcome.problems] == []
