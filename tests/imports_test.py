"""Importing looplib is cheap and never imports tf-models-official."""

import statistics
import subprocess
import sys

CODE = "import time; start = time.perf_counter(); import {}; import sys; print(time.perf_counter() - start, 'official' in sys.modules)"


def seconds(module):
    output = subprocess.run(
        [sys.executable, "-c", CODE.format(module)], capture_output=True, text=True, check=True
    ).stdout
    elapsed, official = output.split()
    assert official == "False"
    return float(elapsed)


def test_importing_looplib_costs_little_more_than_importing_tensorflow():
    pairs = [(seconds("tensorflow"), seconds("looplib")) for _ in range(5)]
    ours, theirs = (statistics.median(times) for times in (tuple(p[1] for p in pairs), tuple(p[0] for p in pairs)))
    assert ours <= 1.15 * theirs, f"looplib {ours:.2f} s, tensorflow {theirs:.2f} s"


def test_no_room_imports_a_higher_one():
    import ast
    import pathlib

    order = ["errors", "keras_family", "clock", "trainer", "evaluator", "commits", "lock", "preemption", "watchdog", "guards",
             "metrics", "checksums", "feeds", "inputs", "loops", "snapshots", "checkpoints", "state", "tasks", "actions",
             "store", "writers", "controller", "runtime", "launch", "comparisons", "checks", "inspection", "__main__"]  # fmt: skip
    folder = pathlib.Path(__file__).parents[1] / "looplib"
    assert sorted(order) == sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    for name in order:
        tree = ast.parse((folder / f"{name}.py").read_text())
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "looplib":
                imported = [node.module.split(".")[1]] if "." in node.module else [alias.name for alias in node.names]
                for module in imported:
                    assert order.index(module) < order.index(name), f"{name} imports {module}"
