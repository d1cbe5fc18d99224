"""How fast looplib is beside its peers on one workload: `python -m benchmarks.speed --workload=W1`.

One process holds every contestant and gives them turns, so that a change in the machine's load meets all alike. They
share the model, its initial weights, Adam, the data and one tf.data pipeline (looplib's own input and JAX have theirs),
all compute loss and accuracy, and no result counts unless they are shown to compute the same first.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import numpy as np
import tensorflow as tf
from absl import app, flags, logging

from benchmarks import contestants, records
from benchmarks.workloads import WORKLOADS, Task, take_turns
from looplib.config.run_config import ENGINES

_WORKLOAD = flags.DEFINE_enum("workload", "W1", list(WORKLOADS), "The workload to run.")
_ROUNDS = flags.DEFINE_integer("rounds", 11, "Turns of each contestant that count.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 0.7, "Length of a turn, rounded to whole loops.", lower_bound=0)
_WARM_UP = flags.DEFINE_float("warm_up", 3, "Seconds that each contestant runs before its turns count.", lower_bound=0)
_COPIES = flags.DEFINE_integer(
    "copies", 1, "Copies of each contestant, whose speeds are averaged: two in one process differ by up to a tenth.",
    lower_bound=1,
)  # fmt: skip
_NEAR_TIES = 0.01  # of the predictions of W3's first steps, 0.0014 differ on some processors
_OUTPUT = flags.DEFINE_string("output", "build/bench.json", "The file to add the ratios to.")


def build(workload, arrays):
    """Builds the contestants of a workload, and those that only have to compute the same: what `auto` may choose.

    Args:
      workload: `Workload`.
      arrays: its data, as tensors.

    Returns:
      `(timed, checked)`, dicts from name to `Contestant`, the first part of the second.
    """
    names = [name for name in workload.contestants if name != f"looplib, {contestants.ENGINE}"]
    timed = {name: contestants.CONTESTANTS[name](Task(workload, arrays)) for name in contestants.present(names)}
    engines = set(ENGINES) - {"auto", "eager", "graph"} if contestants.ENGINE == "auto" else ()
    others = {f"looplib, {e}": contestants.looplib_loop(Task(workload, arrays), e) for e in sorted(engines)}
    return timed, {**timed, **others}


def check_same(workload, checked):
    """Lets every contestant do the first steps and compares the outcome with the bare loop's.

    Args:
      workload: `Workload`.
      checked: dict from name to `Contestant`, none of which has run.

    Raises:
      RuntimeError: if they differ by more than float arithmetic does.
    """
    outcomes = {}
    for name, contestant in checked.items():
        _, reported = contestant.run(workload.checked if workload.loop else 1)
        outcomes[name] = {"loss of the model": contestant.loss()}
        if workload.loop in (0, workload.checked):  # or else fit's cover all steps and the others' the last loop
            outcomes[name].update({f"reported {what}": reported[what] for what in ("loss", "accuracy")})
    for name, outcome in outcomes.items():
        other = contestants.TOLERANCES.get(name, 0) if workload.loop else 0
        tolerance = max(other, workload.tolerance)
        for what, expected in outcomes["bare"].items():
            # The loss decides. Rounding moves whole predictions that are near a tie, a few in a thousand.
            most = max(tolerance, _NEAR_TIES) if "accuracy" in what else tolerance * abs(expected)
            if not abs(outcome[what] - expected) <= most:
                raise RuntimeError(
                    f"{name} does not compute what the bare loop does: {what} {outcome[what]}, expected {expected}; "
                    "their speeds cannot be compared until it does"
                )


def measure(workload, rounds, seconds, warm_up, copies=1):
    """Runs a workload.

    Args:
      workload: `Workload`.
      rounds: turns that count.
      seconds: about how long a turn is.
      warm_up: about how long each contestant runs before.
      copies: of each contestant.

    Returns:
      dict from contestant to float array `[rounds]`, steps (or evaluations) per second, the mean of its copies.

    Raises:
      RuntimeError: if the contestants do not compute the same.
    """
    arrays = tuple(tf.constant(array) for array in workload.arrays())
    timed, names = {}, []
    for copy in range(copies):
        made, checked = build(workload, arrays)
        check_same(workload, checked)
        names = list(made)
        timed.update({(name, copy): contestant for name, contestant in made.items()})
    for (name, _), contestant in timed.items():
        for choice in contestant.settle().values():
            times = ", ".join(f"{plan} {1e6 * value:.0f}" for plan, value in choice["seconds_per_step"].items())
            print(f"{name} selected {choice['loop']}, {choice['chunk']} steps a round (microseconds per step: {times})")
    least = workload.loop or 1
    amounts = dict.fromkeys(timed, least)
    for length in (warm_up, seconds / 2, seconds):  # each time it is better known how many steps that is
        for name, contestant in timed.items():
            spent, _ = contestant.run(amounts[name])
            amounts[name] = least * max(1, round(length * amounts[name] / spent / least))
    speeds = take_turns(timed, amounts, least, rounds)
    return {name: np.mean([speeds[name, copy] for copy in range(copies)], axis=0) for name in names}


def compare(name, speeds):
    """Returns the records of a workload: of each of looplib's rows against each peer, and of its guards."""
    ours = {"looplib": name, "looplib, graph": f"{name}, graph", "looplib, own input": f"{name}, own input"}
    ours |= {"looplib, KerasTrainer": name, "looplib, KerasTrainer, graph": f"{name}, graph"}
    if contestants.ENGINE == "graph" and "looplib" in speeds:  # then it is the default
        speeds = {**speeds, "looplib, graph": speeds["looplib"]}
    found = [
        records.record(title, peer, speeds[row] / speeds[peer])
        for row, title in ours.items()
        for peer in speeds
        if row in speeds and not peer.startswith("looplib")
    ]
    if "looplib, unguarded" in speeds:
        ratios = speeds["looplib"] / speeds["looplib, unguarded"]
        found.append(records.record(f"W10, {name}", "looplib, unguarded", ratios))
    return found


def main(argv):
    """Runs the workload, prints its tables and adds its ratios to the file."""
    del argv
    logging.set_verbosity(logging.WARNING)  # Orbit logs every loop
    workload = WORKLOADS[_WORKLOAD.value]
    speeds = measure(workload, _ROUNDS.value, _SECONDS.value, _WARM_UP.value, _COPIES.value)
    copies = f", copies: {_COPIES.value}" if _COPIES.value > 1 else ""
    print(f"\n{_WORKLOAD.value} {workload.title}; engine: {contestants.ENGINE}; rounds: {_ROUNDS.value}{copies}")
    print(f"{'':<22}{'steps/s' if workload.loop else 'evaluations/s':>13}{'(quartiles)':>20}")
    for name, values in speeds.items():
        low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
        print(f"{name:<22}{median:>13.1f}{f'({low:.1f}-{high:.1f})':>20}")
    found = compare(_WORKLOAD.value, speeds)
    records.show(found)
    records.add(_OUTPUT.value, found)


if __name__ == "__main__":
    app.run(main)
