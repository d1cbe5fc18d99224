"""Runs pytest on its arguments: the `main` of every py_test, so that no test file needs a `__main__` block."""

import sys

import pytest

if __name__ == "__main__":
    # The cache would be written among Bazel's links.
    sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
