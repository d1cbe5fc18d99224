"""Tests that pytest runs."""

load("@rules_python//python:defs.bzl", python_test = "py_test")

def py_test(name, deps, **kwargs):
    """Makes a test target of a file, which is run by run_pytest.py.

    Args:
      name: the file without its ending.
      deps: what it imports.
      **kwargs: other attributes of a py_test.
    """
    python_test(
        name = name,
        srcs = [name + ".py", "run_pytest.py"],
        args = ["tests/" + name + ".py"],
        main = "run_pytest.py",
        deps = deps,
        **kwargs
    )
