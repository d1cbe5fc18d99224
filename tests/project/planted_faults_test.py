"""The faults of `planted_faults.py` fit the project as it is now."""

import planted_faults

ROOT = planted_faults.ROOT


def test_a_fault_has_one_place_and_tests_that_exist():
    tests = [path.name.removesuffix("_test.py") for path in (ROOT / "tests").rglob("*_test.py")]
    for fault in planted_faults.FAULTS:
        assert (ROOT / "looplib" / fault.path).read_text().count(fault.right) == 1, fault
        assert fault.wrong != fault.right, fault
        assert all(tests.count(name.rpartition("/")[2]) == 1 for name in fault.tests.split()), fault
