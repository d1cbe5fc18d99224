"""The faults of `planted_faults.py` fit the project as it is now."""

import planted_faults
import pytest

ROOT = planted_faults.ROOT


@pytest.mark.parametrize("fault", planted_faults.FAULTS, ids=lambda fault: fault.promise)
def test_a_fault_has_one_place_and_tests_that_exist(fault):
    assert (ROOT / "looplib" / fault.path).read_text().count(fault.right) == 1 and fault.wrong != fault.right
    for name in fault.tests.split():
        assert len(list((ROOT / "tests").rglob(f"{name.rpartition('/')[2]}_test.py"))) == 1, name
