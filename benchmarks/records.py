"""What a benchmark found: ratios, their targets, the file that they are kept in and the table that they are shown in.

A ratio is looplib's speed divided by a peer's: the median over rounds of the ratio within a round, and its quartiles. A
workload by its name alone is looplib with `loop="auto"`; "W1, graph" (the default engine) and "W1, own input" are other
rows of it, and
"W10, W1" is W1 with all guards on, against the same with all off.
"""

import json
import os

import numpy as np

_AT_LEAST_AS_FAST = {"orbit": 1.0, "keras": 1.0, "bare": 1.0}
TARGETS = {  # of the ratio, at least; a framework's holds against each of its rows that has none of its own
    "W1": {"orbit": 1.5},
    "W2": {"orbit": 2.6},
    **{f"{name}{row}": _AT_LEAST_AS_FAST for name in ("W3", "W5", "W7-1", "W7-10") for row in ("", ", graph")},
    "W4": {**_AT_LEAST_AS_FAST, "keras, XLA": 1.2},
    "W6": {"orbit": 1.5, "keras": 1.0, "bare": 1.0},
    "W9": {"after 100 rounds": 1.0},
    "W1, own input": {"orbit": 1.7, "jax": 0.9},  # JAX's with TensorFlow 2.21
    "W2, own input": {"one program": 0.9, "jax": 0.9},
    **{f"{name}, graph": _AT_LEAST_AS_FAST for name in ("W4", "W6")},
    **{f"{name}, graph": {"orbit": 1.0} for name in ("W1", "W2")},
    **{f"scaling, {count} workers": {"bare": 1.0} for count in (1, 2, 4)},
    **{
        f"{name}, {what}": {"Model Garden's driver": 1.0}
        for name in ("resnet", "vision_transformer", "masked_lm", "text_classification")
        for what in ("train", "evaluate")
    },
    **{f"{name} x2, graph": {"orbit": 1.0} for name in ("W1", "W2", "W3")},
    "K1": {"keras": 1.3},
    "K2": {"keras": 1.3},
    **{f"{name}, graph": {"keras": 1.0} for name in ("K1", "K2", "K3")},
    **{f"choice, {name}": {"looplib": 1.0} for name in ("W1", "W2", "W3", "W4", "W5")},
    **{f"W10, {name}": {"looplib": 1.0} for name in ("W1", "W2", "W3", "W4")},
}
_NOISE = 0.03  # by which the lower quartile of a ratio may be below its target


def record(workload, against, ratios, **numbers):
    """Makes a record.

    Args:
      workload: its name.
      against: the peer's row.
      ratios: float array `[rounds]`.
      **numbers: what else is worth keeping.

    Returns:
      dict; `target` and `met` are None where no target is set. It is met if the lower quartile is at most 3% below it.
    """
    low, ratio, high = (round(float(value), 3) for value in np.quantile(ratios, [0.25, 0.5, 0.75]))
    targets = TARGETS.get(workload, {})
    target = targets.get(against, targets.get(against.split(",")[0]))
    met = None if target is None else low >= (1 - _NOISE) * target
    found = {"workload": workload, "against": against, "ratio": ratio, "low": low, "high": high, "rounds": len(ratios)}
    return {**found, "target": target, "met": met, **numbers}


def not_measured(workload, why="could not be measured"):
    """Makes the record of a workload without numbers."""
    return {"workload": workload, "against": why, "ratio": None, "target": None, "met": None}


def read(path):
    """Returns the list of records in a file; none if there is no file."""
    if not os.path.exists(path):
        return []
    with open(path) as file:
        return json.load(file)


def add(path, records):
    """Adds records to a file, in place of those of the same workload and peer."""
    new = {(entry["workload"], entry["against"]) for entry in records}
    kept = [entry for entry in read(path) if (entry["workload"], entry["against"]) not in new]
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path + ".part", "w") as file:
        file.write(json.dumps(kept + records, indent=1) + "\n")
    os.replace(path + ".part", path)


def show(records):
    """Prints a table of records."""
    print(f"\n{'workload':<30}{'against':<24}{'looplib / it':>12}{'(quartiles)':>15}{'target':>8}")
    for entry in records:
        if entry["ratio"] is None:
            print(f"{entry['workload']:<30}{entry['against']:<24}{'-':>12}", flush=True)
            continue
        spread = f"({entry['low']:.2f}-{entry['high']:.2f})"
        goal = f"{entry['target']:>8.2f}  {'met' if entry['met'] else 'NOT MET'}" if entry["target"] else ""
        print(f"{entry['workload']:<30}{entry['against']:<24}{entry['ratio']:>12.2f}{spread:>15}{goal}", flush=True)
