"""Runs pytest on its arguments: the `main` of every py_test, so that no test file needs a `__main__` block."""

import sys

import pytest

if __name__ == "__main__":
    # Python puts the folder behind the link to this file first: the source tree, where files are that BUILD leaves out.
    sys.path.pop(0)
    # The cache would be written among Bazel's links.
    sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
